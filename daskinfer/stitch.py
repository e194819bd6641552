"""Tiles back into one chunk: their cores side by side, or all of them blended.

Everything here is in output pixels; `Window.scaled` takes windows of the input there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from .forward import OutputFormat, to_pixels
from .inference import Inference
from .pixels import Array, Mask
from .tiling import Chunk, Span, Tile, Window

__all__ = ["blend", "count_nonfinite", "covered_window", "output_mask", "stitch", "without_rim"]


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
    import torch

    pixels: Array = to_pixels(torch.from_numpy(values)[None], inference.model)[0].numpy()
    return pixels


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
    """Output pixels that a tile's output lies on, checked to hold all that it has to."""
    scale = inference.scale
    if output.ndim != 3 or output.shape[0] != bands:
        raise ValueError(f"the model returned {output.shape} for a tile, expected {bands} bands")
    rows, cols = (
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
    placed = Window(rows, cols)
    needed = tile.core.scaled(scale).clip(covered_window(inference, output.shape[1:]))
    if math.prod(needed.shape) and needed.clip(placed) != needed:
        raise ValueError(
            f"the model returned (band, y, x) = {output.shape} for a tile of {tile.window.shape}: "
            f"too small for its core {tile.core.bounds()}"
        )
    return placed


def covered_window(inference: Inference, size: tuple[int, ...]) -> Window:
    """Output pixels of the raster that the model can give: all, or all but a rim.

    A model without padding gives less than its tile.  What it leaves out at the top and left is its
    margin; the rest of what is missing it leaves out at the bottom and right, which is as much, or
    one output pixel more where the two cannot be equal.
    """
    spans = []
    axes = (inference.tiling.y, inference.tiling.x)
    for axis, margin, got in zip(axes, inference.margin, size, strict=True):
        near = int(margin * inference.scale)
        far = int(axis.tile * inference.scale) - got - near
        if not 0 <= far <= near + 1:
            raise ValueError(
                f"the model returned {got} px for a tile of {axis.tile} px at scale "
                f"{inference.scale} and margin {margin}: too small for its core, or too large"
            )
        spans.append(Span(near, int(axis.padded * inference.scale) - far))
    return Window(spans[0], spans[1])


def without_rim(window: Window, covered: Window, valid: Mask | None) -> Mask:
    """The mask of a chunk less the rim for which the model has no output."""
    inside = np.zeros(window.shape, np.bool_)
    inside[window.clip(covered).slices(window.origin)] = True
    return inside if valid is None else inside & valid


def count_nonfinite(result: Array, expected: Mask | None, form: OutputFormat) -> int:
    """Pixels that are nodata although something was expected there."""
    lost = np.isnan(result) if np.isnan(form.nodata) else result == form.nodata
    pixels = lost.any(axis=0)
    return int(np.count_nonzero(pixels if expected is None else pixels & expected))
