"""Statistics of a raster, taken once for a whole run."""

from __future__ import annotations

from typing import Any

import numpy as np

from .model import Model
from .source import Source

__all__ = ["with_statistics"]

_LARGEST = 1024


def with_statistics(source: Source, model: Model, statistics: str | None) -> Model:
    """The model with mean and std of the raster, where those are asked for.

    Parameters
    ----------
    source : Source
        With the model's bands.
    model : Model
    statistics : {None, "global"}
        "global": per band over the valid pixels of the raster, thinned out (or from its overviews)
        to at most 1024 px a side.

    Raises
    ------
    ValueError
        For statistics per tile or chunk, which would leave visible squares; or if the model has its
        own already, or the raster has no valid pixel.
    """
    if statistics is None:
        return model
    if statistics != "global":
        raise ValueError(
            f"statistics must be None or 'global', got {statistics!r}: normalising tile by tile "
            "leaves visible squares"
        )
    if model.mean is not None or model.std is not None:
        raise ValueError("statistics='global' would replace the model's own mean and std")
    pixels = source.thinned(_LARGEST)
    values = pixels.data.reshape(len(pixels.data), -1)
    if pixels.valid is not None:
        values = values[:, pixels.valid.ravel()]
    if not values.size:
        raise ValueError("statistics='global': the raster has no valid pixel")
    scale, offset = model.scaling(source.scales, source.offsets)
    physical = values * _column(scale) + _column(offset)
    std = physical.std(axis=1)
    # A band of one value is 0 after normalisation whatever it is divided by.
    std[std == 0] = 1.0
    return model.patch(mean=physical.mean(axis=1).tolist(), std=std.tolist())


def _column(numbers: tuple[float, ...]) -> Any:
    return np.asarray(numbers, np.float64)[:, None]
