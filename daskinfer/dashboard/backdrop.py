"""A small picture of a run's source, where one costs next to nothing."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..handles import open_dataset
from ..raster import Raster
from ..remote import is_remote
from ..source import ArraySource, Source

__all__ = ["backdrop"]

_LARGEST = 384
# Pixels that may be read for it: an overview is no larger than a quarter of what it is thinned to.
_FEW = 4_000_000
_NAMES = (
    ("red", "green", "blue"),
    ("r", "g", "b"),
    ("b04", "b03", "b02"),
    ("b4", "b3", "b2"),
)


def backdrop(source: Source) -> NDArray[np.uint8] | None:
    """Read a picture of a source.

    Parameters
    ----------
    source : Source

    Returns
    -------
    ndarray of uint8, shape (row, column, 3), or None
        At most 384 px a side.  None where that would mean to read much: of a large file without
        overviews, a remote one, an array that is yet to be computed.
    """
    if not _cheap(source):
        return None
    names = _shown(source.band_names)
    pixels = source.select(names).thinned(_LARGEST)
    data = pixels.data.astype(np.float32)
    valid = np.isfinite(data).all(axis=0)
    if pixels.valid is not None:
        valid &= pixels.valid
    if not valid.any():
        return None
    low, high = np.percentile(data[:, valid], (2, 98))
    stretched = np.clip((data - low) / max(high - low, 1e-9), 0, 1)
    bands = (np.where(valid, stretched, 1) * 255).astype(np.uint8)
    return np.ascontiguousarray(np.moveaxis(np.broadcast_to(bands, (3, *bands.shape[1:])), 0, -1))


def _cheap(source: Source) -> bool:
    if isinstance(source, ArraySource):
        return source.in_memory and math.prod(source.grid.shape) <= 16 * _FEW
    if not isinstance(source, Raster) or is_remote(source.path):
        return False
    if math.prod(source.grid.shape) <= _FEW:
        return True
    with open_dataset(source.path, source.sign) as dataset:
        factors = dataset.overviews(source.indexes[0])
    return bool(factors) and math.prod(source.grid.shape) / max(factors) ** 2 <= _FEW


def _shown(names: tuple[str, ...]) -> tuple[str, ...]:
    """Red, green and blue by their names, else the first three, or the first alone."""
    by_name = {name.lower(): name for name in names}
    for colors in _NAMES:
        if all(color in by_name for color in colors):
            return tuple(by_name[color] for color in colors)
    return names[:3] if len(names) >= 3 else names[:1]
