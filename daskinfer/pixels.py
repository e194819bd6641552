"""Pixels of a window, and which of them are valid."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .tiling import Window

__all__ = ["Array", "Mask", "Pixels", "cutter", "valid_pixels", "without_reach"]

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Pixels:
    """What a source returns for a window.

    Attributes
    ----------
    data : ndarray, shape (band, y, x)
        Raw numbers as stored.
    valid : ndarray of bool, shape (y, x), or None
        False where a pixel is nodata in any band; None where all are valid.
    """

    data: Array
    valid: Mask | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.data.nbytes + (0 if self.valid is None else self.valid.nbytes)

    def cut(self, rows: slice, cols: slice) -> Pixels:
        """A part of the pixels, as views of the same memory.

        >>> whole = Pixels(np.arange(6).reshape(1, 2, 3), np.array([[1, 1, 0], [1, 1, 1]], bool))
        >>> whole.cut(slice(0, 2), slice(0, 2)).valid is None
        True
        """
        valid = None if self.valid is None else self.valid[rows, cols]
        return Pixels(self.data[:, rows, cols], None if valid is None or valid.all() else valid)


def cutter(whole: Pixels, window: Window) -> Callable[[Window], Pixels]:
    """Gives windows inside one whose pixels are at hand, as views of them."""

    def cut(part: Window) -> Pixels:
        if part.clip(window) != part:
            raise ValueError(f"window {part.bounds()} reaches outside {window.bounds()}")
        return whole.cut(*part.slices(window.origin))

    return cut


def valid_pixels(data: Array, nodata: Sequence[float | int | None]) -> Mask:
    """Pixels ``(y, x)`` that are nodata in none of the bands ``(band, y, x)``.

    NaN is never valid; nodata is compared with the raw numbers, 64-bit ones to the last digit where
    it is an int.

    >>> valid_pixels(np.array([[[1, 2, 3]], [[1, 1, 9]]]), (None, 9.0)).tolist()
    [[True, True, False]]
    """
    valid = np.ones(data.shape[1:], np.bool_)
    for band, value in zip(data, nodata, strict=True):
        if data.dtype.kind == "f":
            valid &= ~np.isnan(band)
        number = _in_dtype(value, data.dtype)
        if number is not None:
            valid &= band != number
    return valid


def _in_dtype(value: float | int | None, dtype: np.dtype[Any]) -> Any:
    """Nodata in the band's dtype; None where no pixel can equal it.

    float32 pixels never equal a float64 like -3.4e38, and -9999 is no uint8 (cast, it is 241).
    """
    if value is None or math.isnan(value):
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return dtype.type(value)
    if dtype.kind == "b":
        return np.bool_(value) if value in (0, 1) else None
    limits = np.iinfo(dtype)
    fits = math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max
    return dtype.type(int(value)) if fits else None


def without_reach(
    valid: Mask, origin: tuple[int, int], radius: tuple[int, int], stride: tuple[int, int]
) -> Mask:
    """Pixels ``(y, x)`` of a mask on whose output no nodata has any influence.

    A network of stride `s` sees a pixel as part of a cell of the lattice of `s` px, and its radius
    counts from the cell's edge.

    Parameters
    ----------
    valid : ndarray of bool, shape (y, x)
    origin : tuple of int
        Pixel of the raster on which the mask begins, for the lattice.
    radius, stride : tuple of int
        Of the network, ``(y, x)`` in pixels.

    Examples
    --------
    >>> valid = np.array([[True] * 4 + [False] + [True] * 4])
    >>> without_reach(valid, (0, 0), (0, 1), (1, 1)).astype(int).tolist()
    [[1, 1, 1, 0, 0, 0, 1, 1, 1]]
    >>> without_reach(valid, (0, 0), (0, 1), (1, 4)).astype(int).tolist()
    [[1, 1, 1, 0, 0, 0, 0, 0, 0]]
    """
    hit = ~valid
    for axis in (0, 1):
        hit = _dilated(_whole_cells(hit, origin[axis], stride[axis], axis), radius[axis], axis)
    return ~hit


def _whole_cells(hit: Mask, origin: int, stride: int, axis: int) -> Mask:
    """Every cell of the lattice of which a pixel is hit, as far as it is there."""
    if stride == 1:
        return hit
    size = hit.shape[axis]
    edges = np.arange(-(origin % stride), size, stride)
    starts = np.maximum(edges, 0)
    cells = np.logical_or.reduceat(hit, starts, axis=axis)
    return np.repeat(cells, np.diff(starts, append=size), axis=axis)


def _dilated(hit: Mask, radius: int, axis: int) -> Mask:
    """Pixels with a hit at most `radius` px away along an axis."""
    if radius == 0:
        return hit
    size = hit.shape[axis]
    before = np.zeros_like(np.take(hit, [0], axis), np.int32)
    counts = np.concatenate([before, np.cumsum(hit, axis=axis, dtype=np.int32)], axis)
    places = np.arange(size)
    near = np.minimum(places + radius + 1, size), np.maximum(places - radius, 0)
    found: Mask = np.take(counts, near[0], axis) > np.take(counts, near[1], axis)
    return found
