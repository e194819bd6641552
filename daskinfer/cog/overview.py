"""Overview pixels: each level is a 2x2 reduction of the level below it.

Law: with cells aligned to even rows and columns, reducing the parts of a raster and reducing the
whole raster give the same pixels.  A chunk whose origin is a multiple of ``2**k`` can therefore
make its own first ``k`` levels without seeing its neighbours.

Every reduction looks only at pixels that exist and are valid: at an odd right or bottom edge a
cell has two pixels or one, and neither nodata nor NaN ever wins over a valid value.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, int]

RESAMPLINGS = ("mode", "average", "nearest")

# Of one temporary array.
_STRIP_BYTES = 96 << 10


def level_shapes(height: int, width: int, largest: int) -> tuple[Shape, ...]:
    """List the sizes of all levels, full resolution first.

    Parameters
    ----------
    height, width : int
        Size of the full resolution in pixels.
    largest : int
        Halving, rounded up, goes on until neither side is longer than this.  A raster that is
        one pixel wide is not halved.

    Returns
    -------
    tuple of (int, int)
        ``(height, width)`` of each level.

    Examples
    --------
    >>> level_shapes(1025, 300, 512)
    ((1025, 300), (513, 150), (257, 75))
    """
    shapes = [(height, width)]
    # rasterio tells levels by the ratio of widths, and validators refuse a ratio of 1.
    if width == 1:
        return tuple(shapes)
    while max(shapes[-1]) > largest:
        rows, cols = shapes[-1]
        shapes.append((-(-rows // 2), -(-cols // 2)))
    return tuple(shapes)


def reduce2x2(array: Array, how: str | tuple[str, ...], nodata: float | None = None) -> Array:
    """Halve the last two axes of an array.

    Parameters
    ----------
    array : ndarray, shape (..., y, x)
        Pixels; the first one is the corner of a cell.
    how : {"mode", "average", "nearest"} or tuple of them
        One for each of the bands, on the third axis from the end.
        ``mode`` takes the most frequent valid value of a cell, the first in reading order when
        several are as frequent.  ``average`` takes the mean of the valid values; integers round
        halves up, and a mean that would equal nodata moves to the next number.  ``nearest``
        takes the top left pixel.
    nodata : float or None
        Value that marks a pixel as not valid; NaN always does.

    Returns
    -------
    ndarray, shape (..., ceil(y / 2), ceil(x / 2))
        Same dtype.  A cell without a valid pixel is nodata (NaN where nodata is None).

    Raises
    ------
    ValueError
        If `how` is not one of the three.

    Examples
    --------
    >>> reduce2x2(np.array([[1, 2, 9], [2, 0, 0]]), "mode", nodata=0)
    array([[2, 9]])
    """
    if isinstance(how, tuple):
        bands = zip(np.moveaxis(array, -3, 0), how, strict=True)
        return np.stack([reduce2x2(band, one, nodata) for band, one in bands], axis=-3)
    if how not in RESAMPLINGS:
        raise ValueError(f"resampling is {how!r}: pass one of {', '.join(RESAMPLINGS)}")
    if how == "nearest":
        return np.ascontiguousarray(array[..., ::2, ::2])
    reduce = _mode if how == "mode" else _average
    halves = [-(-n // 2) for n in array.shape[-2:]]
    out = np.empty((*array.shape[:-2], *halves), array.dtype)
    # A strip at a time: its temporaries stay in the processor's cache, and are not fetched from
    # the kernel page by page.
    step = max(1, _STRIP_BYTES * halves[0] // max(1, out.nbytes))
    for row in range(0, halves[0], step):
        cells = _cells(array[..., 2 * row : 2 * (row + step), :])
        out[..., row : row + step, :] = reduce(cells, nodata)
    return out


def _cells(array: Array) -> list[Array]:
    """Split into the four pixels of each cell, in reading order; edge cells repeat theirs.

    Repeating changes neither the mean nor the mode of a cell, nor which value comes first.
    """
    rows, cols = array.shape[-2:]
    if rows % 2 or cols % 2:
        pad = [(0, 0)] * (array.ndim - 2) + [(0, rows % 2), (0, cols % 2)]
        array = np.pad(array, pad, mode="edge")
    # Contiguous copies: everything after this runs on whole vectors.
    return [np.ascontiguousarray(array[..., y::2, x::2]) for y in (0, 1) for x in (0, 1)]


def valid_mask(array: Array, nodata: float | None) -> NDArray[np.bool_]:
    """Tell which pixels are neither nodata nor NaN.

    Parameters
    ----------
    array : ndarray
        Pixels of any shape.
    nodata : float or None
        Value that marks a pixel as not valid.

    Returns
    -------
    ndarray of bool
        Same shape.
    """
    valid: NDArray[np.bool_] = np.ones(array.shape, bool)
    if array.dtype.kind == "f":
        valid = ~np.isnan(array)
    if nodata is not None and not math.isnan(nodata):
        valid &= array != array.dtype.type(nodata)
    return valid


def _mode(cells: list[Array], nodata: float | None) -> Array:
    """Most frequent valid value.

    In most cells of a class map the first pixel has a twin, and wins: those are settled for the
    whole array at once, and the careful count is left for the few others.
    """
    p, q, r, s = cells
    settled = ((p == q) | (p == r) | (p == s)) & valid_mask(p, nodata)
    settled |= (p == q) & (p == r) & (p == s)
    out = p.copy()
    rest = np.flatnonzero(~settled)
    if rest.size:
        out.reshape(-1)[rest] = _careful_mode([c.reshape(-1)[rest] for c in cells], nodata)
    return out


def _careful_mode(cells: list[Array], nodata: float | None) -> Array:
    """Most frequent valid value, with masks; the later `copyto` has the stronger claim."""
    p, q, r, s = cells
    vp, vq, vr, vs = (valid_mask(c, nodata) for c in cells)
    out = p.copy()
    for cell, valid in ((s, vs), (r, vr), (q, vq), (p, vp)):
        np.copyto(out, cell, where=valid)
    np.copyto(out, r, where=(r == s) & vr)
    np.copyto(out, q, where=((q == r) | (q == s)) & vq)
    np.copyto(out, p, where=((p == q) | (p == r) | (p == s)) & vp)
    return out


def _average(cells: list[Array], nodata: float | None) -> Array:
    """Mean of the valid values: all four at once, then again where some are not valid."""
    if nodata is None and cells[0].dtype.kind == "f":
        nodata = math.nan
    valid = [valid_mask(c, nodata) for c in cells]
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, as it should be
        out = _mean_of_four(cells)
    rest = np.flatnonzero(~(valid[0] & valid[1] & valid[2] & valid[3]))
    if rest.size:
        some = [c.reshape(-1)[rest] for c in cells]
        out.reshape(-1)[rest] = _mean_of_some(some, [v.reshape(-1)[rest] for v in valid])
    if nodata is not None:
        _step_off(out, valid, nodata)
    return out


def _mean_of_four(cells: list[Array]) -> Array:
    p, q, r, s = cells
    if p.dtype.kind == "f":
        # Quarters first: the sum of four large numbers could overflow.
        four = p.dtype.type(0.25)
        return np.asarray((p * four + q * four) + (r * four + s * four))
    # Quotients and remainders apart, for the same reason, in the dtype itself.
    quotient = (p >> 2) + (q >> 2) + (r >> 2) + (s >> 2)
    return np.asarray(quotient + (((p & 3) + (q & 3) + (r & 3) + (s & 3) + 2) >> 2))


def _mean_of_some(cells: list[Array], valid: list[NDArray[np.bool_]]) -> Array:
    dtype = cells[0].dtype
    n = sum(v.astype(dtype) for v in valid)
    n = np.maximum(n, dtype.type(1))
    kept = [np.where(v, c, dtype.type(0)) for c, v in zip(cells, valid, strict=True)]
    if dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            return np.asarray(sum(c / n for c in kept), dtype)
    quotient = sum(c // n for c in kept)
    remainder = sum(c % n for c in kept)
    return np.asarray(quotient + (remainder + remainder + n) // (n + n), dtype)


def _step_off(out: Array, valid: list[NDArray[np.bool_]], nodata: float) -> None:
    """Give empty cells nodata, and keep nodata out of all others."""
    dtype = out.dtype
    some = valid[0] | valid[1] | valid[2] | valid[3]
    value = dtype.type(nodata)
    if not math.isnan(nodata):
        np.copyto(out, _neighbour(value), where=some & (out == value))
    np.copyto(out, value, where=~some)


def _neighbour(value: Any) -> Any:
    """Next number above, or below where there is none above."""
    dtype = np.dtype(type(value))
    if dtype.kind == "f":
        up = np.nextafter(value, dtype.type(np.inf))
        return up if np.isfinite(up) else np.nextafter(value, dtype.type(-np.inf))
    one = dtype.type(1)
    return value - one if value == np.iinfo(dtype).max else value + one
