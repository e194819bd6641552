"""Integer arithmetic of chunks and tiles.  Pure: no arrays, no files, no dask.

Both axes of a raster are tiled independently, so all the reasoning is one-dimensional and lives in
`AxisTiling`; `Tiling` is the product of two of them.

Laws (checked by property tests):

1. Chunks partition the raster, and the cores of all tiles partition it too: every pixel belongs to
   exactly one chunk and to exactly one core.
2. Every tile has the same size, starts on the stride lattice, and lies inside the padded raster
   (the raster rounded up to the stride at its bottom and right).
3. Between a core and an end of its tile that is not an end of the padded raster lie at least
   ``halo`` pixels.
4. Tiles do not depend on chunks: the lattice is anchored at the raster's origin.
5. Where tiles overlap to be blended, every pixel belongs to at least one tile, and the weights of
   its tiles are positive and add up to 1.

Models whose output has another resolution than their input are tiled on the input's pixels, and
`Scale` takes spans to the output's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["AxisTiling", "Chunk", "Span", "Tile", "Tiling", "Window", "round_up"]


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `value`.

    >>> round_up(13, 8), round_up(16, 8), round_up(0, 8)
    (16, 16, 0)
    """
    return -(-value // multiple) * multiple


class Span(NamedTuple):
    """Half-open range of pixels ``[start, stop)`` on one axis."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Pixels in the span."""
        return self.stop - self.start

    def clip(self, other: Span) -> Span:
        """Part of this span inside `other` (empty spans have size 0)."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def scaled(self, scale: Fraction) -> Span:
        """Output pixels that this span of input pixels covers, in part at its end.

        >>> Span(8, 30).scaled(Fraction(1, 4)), Span(8, 30).scaled(Fraction(2))
        (Span(start=2, stop=8), Span(start=16, stop=60))
        """
        return Span(math.floor(self.start * scale), math.ceil(self.stop * scale))

    def relative_to(self, origin: int) -> slice:
        """This span as a slice of an array that begins at pixel `origin`."""
        return slice(self.start - origin, self.stop - origin)


class Window(NamedTuple):
    """Pixel rectangle: the product of a span of rows and a span of columns."""

    rows: Span
    cols: Span

    @property
    def shape(self) -> tuple[int, int]:
        """``(height, width)`` in pixels."""
        return self.rows.size, self.cols.size

    @property
    def origin(self) -> tuple[int, int]:
        """``(row, col)`` of the first pixel."""
        return self.rows.start, self.cols.start

    def bounds(self) -> tuple[int, int, int, int]:
        """``(row, col, height, width)``, the form in which windows are reported."""
        return (*self.origin, *self.shape)

    def slices(self, origin: tuple[int, int] = (0, 0)) -> tuple[slice, slice]:
        """Row and column slices of an array that begins at pixel `origin`."""
        return self.rows.relative_to(origin[0]), self.cols.relative_to(origin[1])

    def clip(self, other: Window) -> Window:
        """Part of this window inside `other`."""
        return Window(self.rows.clip(other.rows), self.cols.clip(other.cols))

    def scaled(self, scale: Fraction) -> Window:
        """Output pixels that this window of input pixels covers."""
        return Window(self.rows.scaled(scale), self.cols.scaled(scale))


@dataclass(frozen=True, slots=True)
class Tile:
    """One model input.

    Attributes
    ----------
    window : Window
        What the model sees; may reach past the raster's bottom and right into the padding.
    core : Window
        The pixels whose result is taken from this tile: its own alone, unless tiles are blended.
    """

    window: Window
    core: Window


@dataclass(frozen=True, slots=True)
class Chunk:
    """One unit of work.

    Attributes
    ----------
    index : tuple of int
        ``(i, j)`` in the chunk grid.
    window : Window
        The pixels whose result the chunk delivers.
    read : Window
        The pixels it needs for that: `window` with its halo, inside the raster.
    """

    index: tuple[int, int]
    window: Window
    read: Window


@dataclass(frozen=True)
class AxisTiling:
    """Tiles and chunks along one axis.

    Parameters
    ----------
    size : int
        Pixels of the raster on this axis.
    tile : int
        Pixels of one model input: a multiple of `stride`.  Shrinks to the padded raster where that
        is smaller.
    halo : int, default 0
        Context pixels per side: a multiple of `stride`.
    stride : int, default 1
        Total stride of the model.
    chunk : int, default 2048
        Pixels of one chunk.
    least : int, default 1
        Smallest input that the model accepts: a smaller raster is padded up to it, a smaller tile
        is refused.
    overlap : int, default 0
        Pixels that neighbouring tiles share in order to be blended, for models without an exact
        halo; there is no halo then, and a tile's core is all of it.

    Raises
    ------
    ValueError
        If a number is out of range, off the stride lattice, or halo or overlap fill the tile.

    Examples
    --------
    >>> axis = AxisTiling(size=101, tile=48, halo=8, stride=4, chunk=64)
    >>> [tuple(axis.core(i)) for i in range(axis.tiles)]
    [(0, 32), (32, 64), (64, 96), (96, 101)]
    >>> [tuple(axis.tile_span(i)) for i in range(axis.tiles)]
    [(0, 48), (24, 72), (56, 104), (56, 104)]
    """

    size: int
    tile: int
    halo: int = 0
    stride: int = 1
    chunk: int = 2048
    least: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        for name in ("size", "tile", "stride", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 px, got {getattr(self, name)}")
        if self.halo < 0 or self.overlap < 0:
            raise ValueError(
                f"halo and overlap must not be negative, got {self.halo} and {self.overlap}"
            )
        if self.halo and self.overlap:
            raise ValueError("tiles have a halo or overlap to be blended, not both")
        for name in ("tile", "halo", "overlap"):
            value = getattr(self, name)
            if value % self.stride:
                raise ValueError(
                    f"{name} must be a multiple of the model's stride {self.stride}, got {value}: "
                    f"pass {name}={round_up(value, self.stride)}"
                )
        if self.tile > self.padded:
            object.__setattr__(self, "tile", self.padded)
        if self.tile < self.least:
            raise ValueError(
                f"the model takes at least {self.least} px, got tile {self.tile}: "
                f"pass tile={round_up(self.least, self.stride)}"
            )
        name = "overlap" if self.overlap else "halo"
        smallest = 2 * self.halo + self.overlap + self.stride
        if self.tile < self.padded and self.tile < smallest:
            roomy = round_up(1 << (smallest - 1).bit_length(), self.stride)
            raise ValueError(
                f"{name} {getattr(self, name)} px needs a tile of at least {smallest}, "
                f"got {self.tile}: pass tile={roomy}"
            )

    @property
    def padded(self) -> int:
        """Raster size rounded up to the stride, and to the smallest input."""
        return round_up(max(self.size, self.least), self.stride)

    @property
    def step(self) -> int:
        """Distance between neighbouring tiles."""
        if self.tile == self.padded:
            return self.tile
        return self.tile - 2 * self.halo - self.overlap

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        if self.overlap:
            return -(-max(self.padded - self.tile, 0) // self.step) + 1
        return -(-self.size // self.step)

    def core(self, i: int) -> Span:
        """Pixels whose result is taken from tile `i`, from it alone unless tiles are blended."""
        if self.overlap:
            return self.tile_span(i).clip(Span(0, self.size))
        return Span(i * self.step, min((i + 1) * self.step, self.size))

    def tile_span(self, i: int) -> Span:
        """Input of tile `i`.

        Nominally the core with its halo.  At the raster's edges the span is shifted inward instead
        of being padded there: it keeps one size for the whole run, stays on the stride lattice
        (``padded``, ``tile``, ``step`` and ``halo`` are all multiples of the stride), and what the
        model sees at the raster's edge is the edge itself.
        """
        start = min(max(i * self.step - self.halo, 0), self.padded - self.tile)
        return Span(start, start + self.tile)

    def weights(self, span: Span, positions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Weights of the tile with this span at positions (centres are at ``n + 0.5``).

        A Hann ramp ``sin^2(pi d / (2 overlap))`` over the pixels shared with a neighbour, `d` px
        from the tile's end; 1 elsewhere.  At an end that is the raster's there is no neighbour and
        no ramp.  Pixel centres are never at ``d = 0``, so that no weight is zero.  Where the ramps
        of two neighbours meet they add up to 1; the last tile, shifted inward, overlaps more, so
        that the sum is divided by.
        """
        weights = np.ones(len(positions))
        for distance, inner in (
            (positions - span.start, span.start > 0),
            (span.stop - positions, span.stop < self.padded),
        ):
            if inner and self.overlap:
                ramp = np.clip(distance / self.overlap, 0, 1)
                weights = weights * np.sin(np.pi / 2 * ramp) ** 2
        return weights

    @property
    def reach(self) -> tuple[int, int]:
        """Pixels before and after a chunk of whole steps that its tiles need."""
        if self.chunks == 1:
            return 0, 0
        if self.overlap:
            return (self.tile - 1) // self.step * self.step, self.overlap
        return self.halo, self.halo

    @property
    def tail(self) -> int:
        """Smallest last chunk: a shorter remainder is merged into the chunk before.

        The last tile, shifted inward, reaches back ``tile - halo`` pixels from the end (and so the
        first one forward from the start), so that with chunks of this size or more a chunk needs
        no more than `reach` of its neighbours.
        """
        return self.tile - self.halo if self.tile < self.padded else 1

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        whole, rest = divmod(self.size, self.chunk)
        return max(1, whole + (rest >= self.tail and rest > 0))

    def chunk_span(self, k: int) -> Span:
        """Pixels of chunk `k`."""
        last = k == self.chunks - 1
        return Span(k * self.chunk, self.size if last else (k + 1) * self.chunk)

    def tiles_of(self, k: int) -> range:
        """Tiles whose core meets chunk `k` (a core on a chunk border belongs to both)."""
        span = self.chunk_span(k)
        if not self.overlap:
            return range(span.start // self.step, -(-span.stop // self.step))
        first = max(0, (span.start - self.tile) // self.step + 1)
        last = min(self.tiles - 1, (span.stop - 1) // self.step)
        # The last tile starts earlier than its number says.
        while last + 1 < self.tiles and self.tile_span(last + 1).start < span.stop:
            last += 1
        return range(min(first, self.tiles - 1), last + 1)

    def read_span(self, k: int) -> Span:
        """Pixels of the raster that the tiles of chunk `k` need."""
        tiles = self.tiles_of(k)
        first, last = self.tile_span(tiles[0]), self.tile_span(tiles[-1])
        return Span(first.start, min(last.stop, self.size))

    @property
    def aligned(self) -> bool:
        """Whether no tile belongs to two chunks, so that each is run once."""
        return self.chunks == 1 or (self.chunk % self.step == 0 and not self.overlap)

    @property
    def runs(self) -> int:
        """Tile inputs computed on this axis, counting those shared by two chunks twice."""
        return (
            sum(len(self.tiles_of(k)) for k in range(self.chunks))
            if not self.aligned
            else self.tiles
        )


@dataclass(frozen=True)
class Tiling:
    """Tiles and chunks of a raster: the product of its two axes.

    Examples
    --------
    >>> tiling = Tiling(AxisTiling(100, tile=64, halo=16), AxisTiling(40, tile=64, halo=16))
    >>> tiling.tile, tiling.step, len(list(tiling.tiles_of((0, 0))))
    ((64, 40), (32, 40), 4)
    """

    y: AxisTiling
    x: AxisTiling

    @property
    def shape(self) -> tuple[int, int]:
        """``(height, width)`` of the raster."""
        return self.y.size, self.x.size

    @property
    def tile(self) -> tuple[int, int]:
        """``(height, width)`` of every tile."""
        return self.y.tile, self.x.tile

    @property
    def step(self) -> tuple[int, int]:
        """``(height, width)`` of a core away from the raster's edges."""
        return self.y.step, self.x.step

    @property
    def halo(self) -> tuple[int, int]:
        """Context pixels per side, ``(y, x)``."""
        return self.y.halo, self.x.halo

    @property
    def chunk(self) -> tuple[int, int]:
        """``(height, width)`` of a chunk away from the raster's edges."""
        return self.y.chunk, self.x.chunk

    @property
    def grid(self) -> tuple[int, int]:
        """Number of chunks ``(rows, columns)``."""
        return self.y.chunks, self.x.chunks

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return math.prod(self.grid)

    @property
    def runs(self) -> int:
        """Tiles that a run without skipped chunks puts through the model."""
        return self.y.runs * self.x.runs

    @property
    def overhead(self) -> float:
        """Pixels computed beyond one pass over the raster, as a fraction (0.25 is 25 % more)."""
        return self.runs * math.prod(self.tile) / math.prod(self.shape) - 1

    def index_of(self, number: int) -> tuple[int, int]:
        """Index of the chunk with this number in row-major order."""
        return divmod(number, self.x.chunks)

    def order(self, columns: int = 3) -> Iterator[int]:
        """Numbers of all chunks, down strips of so many chunk columns.

        A chunk shares blocks of the source with its neighbours.  In row-major order those below
        come a whole row of chunks later, when their blocks have long left the cache; in a strip
        they come soon.  With 3 threads, chunks of 2048 px, blocks of 512 px and a cache of 256 MB
        for 6 bands of uint16, a raster of 20 480 px has each block decoded 1.47 times row-major,
        1.21, 1.16 and 1.18 times in strips of 2, 3 and 4 columns.  A strip as wide as the threads
        of all workers is best for a few of them.  Sources stored in strips of rows want row-major
        order: ``columns=grid[1]``.

        Parameters
        ----------
        columns : int, default 3

        Raises
        ------
        ValueError
            If `columns` is not at least 1.

        Examples
        --------
        >>> tiling = Tiling(AxisTiling(20, tile=8, chunk=10), AxisTiling(50, tile=8, chunk=10))
        >>> list(tiling.order(columns=2))
        [0, 1, 5, 6, 2, 3, 7, 8, 4, 9]
        """
        if columns < 1:
            raise ValueError(f"columns must be at least 1, got {columns}")
        down, across = self.grid
        return (
            i * across + j
            for first in range(0, across, columns)
            for i in range(down)
            for j in range(first, min(first + columns, across))
        )

    def chunk_at(self, index: tuple[int, int]) -> Chunk:
        """The chunk at ``(i, j)``."""
        i, j = index
        return Chunk(
            index,
            Window(self.y.chunk_span(i), self.x.chunk_span(j)),
            Window(self.y.read_span(i), self.x.read_span(j)),
        )

    def tiles_of(self, index: tuple[int, int]) -> Iterator[Tile]:
        """Tiles of one chunk in row-major order, their cores clipped to the chunk."""
        window = self.chunk_at(index).window
        for i in self.y.tiles_of(index[0]):
            for j in self.x.tiles_of(index[1]):
                core = Window(self.y.core(i), self.x.core(j)).clip(window)
                yield Tile(Window(self.y.tile_span(i), self.x.tile_span(j)), core)
