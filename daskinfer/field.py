"""The receptive field of a model in any of the forms in which users have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .model import Model, load_model
from .probe import ReceptiveField, measure_field

__all__ = ["receptive_field", "smallest_input"]


def receptive_field(model: Any, *, bands: int | None = None) -> ReceptiveField:
    """Measure how far a model looks, on which lattice, and whether any halo is exact for it.

    Parameters
    ----------
    model : Model, torch.nn.Module, path, "package.module:factory" or callable
        What `load_model` takes, or any callable from a float32 tensor ``(n, band, y, x)`` to scores
        ``(n, channel, y, x)``.
    bands : int, optional
        Bands of its input; needed only where the model does not tell.

    Returns
    -------
    ReceptiveField

    Raises
    ------
    ValueError
        If the number of bands is not known, or the model cannot be run on such input.

    See Also
    --------
    daskinfer.probe.measure_field : The method.

    Examples
    --------
    >>> import torch
    >>> convs = [torch.nn.Conv2d(1, 1, 3, padding=1) for _ in range(5)]
    >>> field = receptive_field(torch.nn.Sequential(*convs))
    >>> field.radius, field.stride, field.exact
    ((5, 5), (1, 1), True)
    """
    import torch

    if callable(model) and not isinstance(model, torch.nn.Module):
        return measure_field(model, _known(bands))
    recipe = load_model(model)
    return _of_recipe(recipe, _known(bands or recipe.n_bands))


def smallest_input(model: Model, field: ReceptiveField, bands: int) -> tuple[int, int]:
    """The smallest ``(y, x)`` input that a model accepts, each axis with the other one large.

    Exported programs refuse sizes that their tracing did not cover, reflection padding needs more
    pixels than it pads: rasters smaller than that have to be padded up to it.

    Raises
    ------
    ValueError
        If it accepts none of the sizes tried, up to 64 strides.
    """
    if model.tile is not None:
        return model.tile
    return _smallest(model, field.stride, bands)


_STRIDES_TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@lru_cache(maxsize=64)
def _smallest(model: Model, stride: tuple[int, int], bands: int) -> tuple[int, int]:
    network = model.network("cpu")
    large = tuple(_STRIDES_TRIED[-1] * side for side in stride)
    y = _first_accepted(network, bands, [(n * stride[0], large[1]) for n in _STRIDES_TRIED])
    x = _first_accepted(network, bands, [(large[0], n * stride[1]) for n in _STRIDES_TRIED])
    return y[0], x[1]


def _first_accepted(
    network: Callable[[Any], Any], bands: int, shapes: list[tuple[int, int]]
) -> tuple[int, int]:
    import torch

    refusal: Exception | None = None
    for shape in shapes:
        try:
            with torch.inference_mode():
                network(torch.zeros((1, bands, *shape)))
        except Exception as error:
            # Whatever it raises, it does not take this size; the last one is told if none fits.
            refusal = error
        else:
            return shape
    raise ValueError(
        f"the model accepts no input of {bands} bands up to {shapes[-1]} px: {refusal}"
    ) from refusal


@lru_cache(maxsize=64)
def _of_recipe(model: Model, bands: int) -> ReceptiveField:
    network: Callable[[Any], Any] = model.network("cpu")
    return measure_field(network, bands)


def _known(bands: int | None) -> int:
    if bands is None:
        raise ValueError("how many bands the model takes is not known: pass bands=")
    return bands
