"""Tiles back into one chunk: their cores side by side, or all of them blended.

Everything here is in output pixels; `Window.scaled` takes windows of the input there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from .forward import Array, OutputFormat, to_classes
from .inference import Inference
from .raster import Mask
from .tiling import Chunk, Span, Tile, Window

__all__ = ["blend", "count_nonfinite", "output_mask", "stitch", "without_rim"]


def stitch(inference: Inference, window: Window, outputs: Iterable[tuple[Tile, Array]]) -> Array:
    """Put the cores of the tiles side by side."""
    form = inference.form
    result = np.full((form.bands, *window.shape), form.nodata, form.dtype)
    for tile, output in outputs:
        placed = _placed(inference, tile, output, form.bands)
        core = tile.core.scaled(inference.scale).clip(placed)
        rows, cols = core.slices(placed.origin)
        result[:, *core.slices(window.origin)] = output[:, rows, cols]
    return result


def blend(inference: Inference, window: Window, outputs: Iterable[tuple[Tile, Array]]) -> Array:
    """Average overlapping tiles with their weights, then decide on classes."""
    total = np.zeros((inference.channels, *window.shape), np.float32)
    weight = np.zeros(window.shape, np.float32)
    for tile, output in outputs:
        placed = _placed(inference, tile, output, inference.channels)
        area = tile.core.scaled(inference.scale).clip(placed)
        own = _weights(inference, tile, area)
        rows, cols = area.slices(placed.origin)
        here = area.slices(window.origin)
        total[:, *here] += output[:, rows, cols] * own
        weight[here] += own
    # Without a tile there is no valid pixel; 0/0 makes it the nodata that it is.
    with np.errstate(invalid="ignore"):
        values = total / weight
    return _decided(values, inference)


def _weights(inference: Inference, tile: Tile, area: Window) -> npt.NDArray[np.float32]:
    """Weights ``(y, x)`` of a tile over output pixels."""
    axes = (inference.tiling.y, inference.tiling.x)
    y, x = (
        axis.weights(own, (np.arange(*span) + 0.5) / float(inference.scale))
        for axis, own, span in zip(axes, tile.window, area, strict=True)
    )
    return np.outer(y, x).astype(np.float32)


def _decided(values: Array, inference: Inference) -> Array:
    """Blended values as pixels of the output."""
    if inference.model.output != "classes":
        return values
    import torch

    classes: Array = to_classes(torch.from_numpy(values)[None], inference.model)[0].numpy()
    return classes


def output_mask(mask: Mask | None, chunk: Chunk, scale: Fraction) -> Mask | None:
    """The mask of a chunk in output pixels; a coarser pixel is valid if any of its pixels is."""
    if mask is None:
        return None
    own = mask[chunk.window.slices(chunk.read.origin)]
    if scale == 1:
        return own
    shape = chunk.window.scaled(scale).shape
    cells = [
        np.minimum(np.arange(side) * scale.denominator // scale.numerator, size - 1)
        for side, size in zip(shape, own.shape, strict=True)
    ]
    if scale > 1:
        return own[np.ix_(*cells)]
    by_row = np.logical_or.reduceat(own, cells[0], axis=0)
    reduced: Mask = np.logical_or.reduceat(by_row, cells[1], axis=1)
    return reduced


def _placed(inference: Inference, tile: Tile, output: Array, bands: int) -> Window:
    """Output pixels that a tile's output covers, checked against those it has to."""
    scale = inference.scale
    if output.ndim != 3 or output.shape[0] != bands:
        raise ValueError(f"the model returned {output.shape} for a tile, expected {bands} bands")
    placed = Window(
        *(
            Span(start, start + size)
            for start, size in zip(
                (
                    math.floor((span.start + margin) * scale)
                    for span, margin in zip(tile.window, inference.margin, strict=True)
                ),
                output.shape[1:],
                strict=True,
            )
        )
    )
    whole = Window(*(Span(0, math.ceil(size * scale)) for size in inference.tiling.shape))
    core = tile.core.scaled(scale)
    for have, need, edge in zip(placed, core, whole, strict=True):
        # An unpadded model leaves a rim, at the raster's edge and nowhere else.
        rim = any(inference.margin)
        short_start = have.start > need.start and not (rim and need.start == edge.start)
        short_stop = have.stop < need.stop and not (rim and need.stop == edge.stop)
        if short_start or short_stop:
            raise ValueError(
                f"the model returned (band, y, x) = {output.shape} for a tile of "
                f"{tile.window.shape}: too small for its core {tile.core.bounds()}"
            )
    return placed


def without_rim(inference: Inference, window: Window, valid: Mask | None) -> Mask | None:
    """The mask less the rim for which an unpadded model has no output."""
    if not any(inference.margin):
        return valid
    expected = np.ones(window.shape, np.bool_) if valid is None else valid.copy()
    for axis, (span, margin, size) in enumerate(
        zip(window, inference.margin, inference.tiling.shape, strict=True)
    ):
        # Up to one output pixel more is missing at the far side.
        scale = float(inference.scale)
        first, last = margin * scale, (size - margin) * scale - 1
        outside = (np.arange(*span) < first) | (np.arange(*span) >= last)
        expected[outside if axis == 0 else (slice(None), outside)] = False
    return expected


def count_nonfinite(result: Array, expected: Mask | None, form: OutputFormat) -> int:
    """Pixels that are nodata although something was expected there."""
    lost = np.isnan(result) if np.isnan(form.nodata) else result == form.nodata
    pixels = lost.any(axis=0)
    return int(np.count_nonzero(pixels if expected is None else pixels & expected))
