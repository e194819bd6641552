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
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True)
class Tile:
    """One model input.

    Attributes
    ----------
    window : Window
        What the model sees; may reach past the raster's bottom and right into the padding.
    core : Window
        The pixels whose result is taken from this tile.
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
        Smallest input that the model accepts: a smaller raster is padded up to it.

    Raises
    ------
    ValueError
        If a number is out of range, off the stride lattice, or the halo leaves no core.

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

    def __post_init__(self) -> None:
        for name in ("size", "tile", "stride", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 px, got {getattr(self, name)}")
        if self.halo < 0:
            raise ValueError(f"halo must not be negative, got {self.halo}")
        for name in ("tile", "halo"):
            value = getattr(self, name)
            if value % self.stride:
                raise ValueError(
                    f"{name} must be a multiple of the model's stride {self.stride}, got {value}: "
                    f"pass {name}={round_up(value, self.stride)}"
                )
        if self.tile > self.padded:
            object.__setattr__(self, "tile", self.padded)
        smallest = 2 * self.halo + self.stride
        if self.tile < self.padded and self.tile < smallest:
            roomy = round_up(1 << (smallest - 1).bit_length(), self.stride)
            raise ValueError(
                f"halo {self.halo} px needs a tile of at least {smallest}, got {self.tile}: "
                f"pass tile={roomy}"
            )

    @property
    def padded(self) -> int:
        """Raster size rounded up to the stride, and to the smallest input."""
        return round_up(max(self.size, self.least), self.stride)

    @property
    def step(self) -> int:
        """Distance between the cores of neighbouring tiles."""
        return self.tile if self.tile == self.padded else self.tile - 2 * self.halo

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.size // self.step)

    def core(self, i: int) -> Span:
        """Pixels whose result is taken from tile `i`."""
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

    @property
    def tail(self) -> int:
        """Smallest last chunk: a shorter remainder is merged into the chunk before.

        The last tile, shifted inward, reaches back ``tile - halo`` pixels from the end (and so the
        first one forward from the start), so that with chunks of this size or more the halo is all
        that a chunk needs of its neighbours.
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
        return range(span.start // self.step, -(-span.stop // self.step))

    def read_span(self, k: int) -> Span:
        """Pixels of the raster that the tiles of chunk `k` need."""
        tiles = self.tiles_of(k)
        first, last = self.tile_span(tiles[0]), self.tile_span(tiles[-1])
        return Span(first.start, min(last.stop, self.size))

    @property
    def aligned(self) -> bool:
        """Whether no tile belongs to two chunks, so that each is run once."""
        return self.chunks == 1 or self.chunk % self.step == 0

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
