"""Exact statistics of a file's bands, kept block by block while it is written.

Chunks arrive in any order, some twice, some after a kill: no running total could be trusted.  So
every block has a line of its own in the work file, which is written before the block is committed
and replaced with it, and the lines are merged at the end in order of place.  The result is that of
all pixels, and the same whatever happened on the way.

In the header the numbers take the place of texts of fixed width that GDAL wrote, so that nothing
moves when they become known.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daskinfer.cog.overview import Array, valid_mask
from daskinfer.cog.tiff import Entry

if TYPE_CHECKING:
    from daskinfer.cog.tileindex import IndexedFile

# Of one band of one block: count, mean, sum of squared deviations from the mean, smallest, largest.
Table = NDArray[np.float64]
FIELDS = 5

_STRIP_PIXELS = 32 << 10

_NAMES = ("MINIMUM", "MAXIMUM", "MEAN", "STDDEV", "VALID_PERCENT")
# "-2.2250738585072014e-308" is the longest float64.
_WIDTH = 24
FAILED = "FAILED_CHUNKS"
_ITEM = re.compile(
    rb'<Item name="(STATISTICS_\w+|FAILED_CHUNKS)"(?: sample="(\d+)")?[^>]*>(0{24})</Item>'
)


def block_statistics(array: Array, blocksize: int, nodata: float | None) -> Table:
    """Describe each block of a chunk.

    Parameters
    ----------
    array : ndarray, shape (band, y, x)
        Pixels.
    blocksize : int
        Side of a block in pixels.
    nodata : float or None
        Left out, as are NaN and infinity.

    Returns
    -------
    ndarray of float64, shape (block rows, block columns, band, 5)
        Count, mean, sum of squared deviations, smallest and largest; zeros without a valid pixel.

    Examples
    --------
    >>> block_statistics(np.array([[[1, 3], [9, 0]]], "f4"), 16, nodata=9).ravel().tolist()
    [3.0, 1.3333333333333333, 4.666666666666667, 0.0, 3.0]
    """
    rows, cols = (-(-n // blocksize) for n in array.shape[1:])
    table = np.zeros((rows, cols, len(array), FIELDS))
    for i, j, band in np.ndindex(table.shape[:3]):
        rest = array[band, blocksize * i : blocksize * (i + 1)]
        table[i, j, band] = _describe(rest[:, blocksize * j : blocksize * (j + 1)], nodata)
    return table


def _describe(block: Array, nodata: float | None) -> Any:
    """One band of a block, in strips whose temporaries stay in the processor's cache."""
    step = max(1, _STRIP_PIXELS // block.shape[1])
    strips = [_describe_strip(block[i : i + step], nodata) for i in range(0, len(block), step)]
    return merged(np.array(strips)[:, None])[0]


def _describe_strip(block: Array, nodata: float | None) -> tuple[float, ...]:
    values = np.ascontiguousarray(block).ravel()
    low, high = values.min(), values.max()
    # NaN is both then.  In most strips all pixels count, and need no mask.
    if not (np.isfinite(low) and np.isfinite(high)) or _has(values, nodata):
        values = values[valid_mask(values, nodata) & np.isfinite(values)]
        if not values.size:
            return (0.0,) * FIELDS
        low, high = values.min(), values.max()
    apart = values.astype("f8")
    with np.errstate(over="ignore", invalid="ignore"):  # `filled` leaves out what is not finite
        mean = apart.mean()
        apart -= mean
        apart *= apart
        # No product of vectors: BLAS would start its threads for it, in every process.
        square = apart.sum()
    return values.size, float(mean), float(square), float(low), float(high)


def _has(values: Array, nodata: float | None) -> bool:
    return nodata is not None and bool((values == values.dtype.type(nodata)).any())


def blank_statistics(shape: tuple[int, int], blocksize: int, bands: int) -> Table:
    """Describe the blocks of a chunk that is all zeros, as `block_statistics` would.

    Parameters
    ----------
    shape : (int, int)
        Sides of the chunk in pixels.
    blocksize : int
        Side of a block in pixels.
    bands : int
        How many.

    Returns
    -------
    ndarray of float64, shape (block rows, block columns, band, 5)
        Counts of pixels, and zeros.
    """
    sides = [np.minimum(blocksize, n - np.arange(0, n, blocksize)) for n in shape]
    table = np.zeros((len(sides[0]), len(sides[1]), bands, FIELDS))
    table[..., 0] = np.multiply.outer(*sides)[..., None]
    return table


def merged(lines: Table) -> Table:
    """Merge descriptions of disjoint sets of pixels.

    Parameters
    ----------
    lines : ndarray of float64, shape (set, band, 5)
        From `block_statistics`.

    Returns
    -------
    ndarray of float64, shape (band, 5)
        Of all of them together.
    """
    counts, means, squares, least, most = np.moveaxis(lines, -1, 0)
    some = counts > 0
    count = counts.sum(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = (counts * means).sum(axis=0) / np.maximum(count, 1)
        # Deviations of the sets' means, not a difference of large sums, which would cancel.
        square = squares.sum(axis=0) + (counts * (means - mean) ** 2).sum(axis=0)
    low = np.where(some, least, np.inf).min(axis=0)
    high = np.where(some, most, -np.inf).max(axis=0)
    return np.where(count > 0, [count, mean, square, low, high], 0).T


class StatisticsTable:
    """The lines of all blocks, in a file.

    Parameters
    ----------
    file : IndexedFile
        Where.
    at : int
        First byte.
    grid : (int, int)
        Block rows and columns.
    bands : int
        How many.
    """

    def __init__(self, file: IndexedFile, at: int, grid: tuple[int, int], bands: int) -> None:
        self._file, self._at, self._grid, self._bands = file, at, grid, bands

    @staticmethod
    def size(grid: tuple[int, int], bands: int) -> int:
        """Bytes that it takes."""
        return 8 * FIELDS * bands * grid[0] * grid[1]

    def patch(self, row: int, col: int, table: Table) -> None:
        """Set the lines of a rectangle of blocks.

        Parameters
        ----------
        row, col : int
            Block row and column of its corner.
        table : ndarray of float64, shape (block rows, block columns, band, 5)
            From `block_statistics`.
        """
        line = 8 * FIELDS * self._bands
        for i, blocks in enumerate(table.astype("<f8")):
            self._file.write(blocks.tobytes(), self._at + line * ((row + i) * self._grid[1] + col))

    def merged(self) -> Table:
        """Statistics of the whole, read row by row.

        Returns
        -------
        ndarray of float64, shape (band, 5)
            As `merged`.
        """
        size = self.size((1, self._grid[1]), self._bands)
        rows = []
        for i in range(self._grid[0]):
            raw = np.frombuffer(self._file.read(size, self._at + i * size), "<f8")
            rows.append(merged(raw.reshape(-1, self._bands, FIELDS)))
        return merged(np.stack(rows))


def placeholders() -> dict[str, str]:
    """Tags of a band for GDAL to write: names of its own, values to be replaced."""
    return {f"STATISTICS_{name}": "0" * _WIDTH for name in _NAMES}


def failed_placeholder() -> dict[str, str]:
    """The tag of the file that tells how many chunks were given up, for GDAL to write."""
    return {FAILED: "0" * _WIDTH}


def blanked(entry: Entry) -> Entry:
    """Take the placeholders out of GDAL's metadata.

    Parameters
    ----------
    entry : Entry
        Tag 42112 with placeholders.

    Returns
    -------
    Entry
        Of the same size.
    """
    return _replaced(entry, {})


def filled(entry: Entry, statistics: Table | None, pixels: int, failed: int = 0) -> Entry:
    """Put what is known at the end in the place of the placeholders in GDAL's metadata.

    Parameters
    ----------
    entry : Entry
        Tag 42112 with placeholders.
    statistics : ndarray of float64, shape (band, 5), or None
        Of the whole raster; a band without a valid pixel, or with numbers too large for them, gets
        none.
    pixels : int
        Of one band.
    failed : int, default 0
        Chunks that were given up; the tag is left out where there are none.

    Returns
    -------
    Entry
        Of the same size.
    """
    texts = {(FAILED.encode(), b""): b"%d" % failed} if failed else {}
    lines = [] if statistics is None else statistics.tolist()
    for band, (count, mean, square, low, high) in enumerate(lines):
        deviation = (square / count) ** 0.5 if count else np.nan
        numbers = (low, high, mean, deviation, 100 * count / pixels)
        if np.isfinite(numbers).all():
            for name, number in zip(_NAMES, numbers, strict=True):
                key = f"STATISTICS_{name}".encode(), b"%d" % band
                texts[key] = repr(number).removesuffix(".0").encode()
    return _replaced(entry, texts)


def _replaced(entry: Entry, texts: dict[tuple[bytes, bytes], bytes]) -> Entry:
    def item(match: re.Match[bytes]) -> bytes:
        text = texts.get((match[1], match[2] or b""))
        new = b"" if text is None else match[0].replace(match[3], text)
        return new.ljust(len(match[0]))  # blanks between elements mean nothing in XML

    return Entry(entry.type, entry.count, _ITEM.sub(item, entry.value or b""))
