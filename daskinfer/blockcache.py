"""A cache of decoded blocks, so that each block of a file is decoded about once per process.

Tiles overlap by their halos, and chunks by theirs: a tile of 608 px that delivers 512 touches nine
blocks of 512 px, and its neighbours want eight of them again.  GDAL keeps decoded blocks per open
dataset, and every thread needs a dataset of its own, so that readers in threads would decode the
same blocks next to each other.

Pixels are kept in cells.  A cell is a rectangle of whole blocks, near 512 px a side where blocks
are smaller than that; in a file of strips it is a band of strips as wide as the file.  Under the
lock a reader claims what nobody has read; it decodes all it has claimed before it waits for what
others are decoding, so that readers never wait for each other in a circle.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from .pixels import Mask, Pixels
from .recycled import recycled
from .tiling import Span, Window

__all__ = [
    "BlockCache",
    "CacheStats",
    "Cells",
    "cache_limit",
    "first_capacity",
    "reserve",
    "shared_cache",
]

Index = tuple[int, int]
Decode = Callable[[Window], Pixels]
_Cell = Future[Pixels]

_CAPACITY_MB = 256
_LARGEST_MB = 1024
_CAPACITY_VARIABLE = "DASKINFER_CACHE_MB"
# Near it a GDAL read costs little beside the decoding (0.1 ms and 10 ms for 6 bands of uint16), and
# a window does not decode much that it has no use for.
_SIDE = 512
# Of strips, which may be 100 000 px wide.
_LARGEST_CELL = 16 << 20
# Of cells that are read at once: they are copied apart, and held twice meanwhile.
_LARGEST_READ = 32 << 20


@dataclass(frozen=True)
class Cells:
    """How a raster is cut into cells.

    Attributes
    ----------
    shape : tuple of int
        ``(height, width)`` of the raster.
    cell : tuple of int
        ``(height, width)`` of a cell: multiples of the file's blocks.
    offset : tuple of int
        ``(row, col)`` of the raster's first pixel in its first cell; not 0 where the raster is a
        window of a file, whose blocks it cuts.
    pixel : int
        Bytes of a pixel in all bands, with its mask.

    Examples
    --------
    >>> cells = Cells.of((1000, 900), block=(256, 256), origin=(300, 0), pixel=13)
    >>> cells.cell, cells.offset, cells.window((0, 1)).bounds()
    ((512, 512), (300, 0), (0, 512, 212, 388))
    """

    shape: tuple[int, int]
    cell: tuple[int, int]
    offset: tuple[int, int]
    pixel: int

    @classmethod
    def of(
        cls, shape: tuple[int, int], block: tuple[int, int], origin: tuple[int, int], pixel: int
    ) -> Cells:
        """Cells for a window of a file at `origin`, whose storage blocks are `block`."""
        width = _near(block[1], _SIDE)
        rows = min(_SIDE, _LARGEST_CELL // (min(width, shape[1]) * pixel))
        cell = (_near(block[0], rows), width)
        return cls(shape, cell, (origin[0] % cell[0], origin[1] % cell[1]), pixel)

    def touching(self, window: Window) -> list[Index]:
        """Cells that a window of the raster needs, in row-major order."""
        rows, cols = (
            range((span.start + offset) // side, (span.stop - 1 + offset) // side + 1)
            for span, offset, side in zip(window, self.offset, self.cell, strict=True)
        )
        return [(i, j) for i in rows for j in cols]

    def window(self, first: Index, last: Index | None = None) -> Window:
        """Pixels of a cell, or of the rectangle of cells between two; inside the raster."""
        rows, cols = (
            Span(start * side - offset, (stop + 1) * side - offset).clip(Span(0, size))
            for start, stop, side, offset, size in zip(
                first, last or first, self.cell, self.offset, self.shape, strict=True
            )
        )
        return Window(rows, cols)

    def nbytes_touched(self, window: Window) -> int:
        """Bytes of all cells that a window needs."""
        touched = self.touching(window)
        return self.nbytes(self.window(touched[0], touched[-1]))

    def nbytes(self, window: Window) -> int:
        """Bytes of a window's pixels."""
        height, width = window.shape
        return height * width * self.pixel


@dataclass(frozen=True)
class CacheStats:
    """What a cache has done so far.

    Attributes
    ----------
    decoded : int
        Cells decoded.
    hits : int
        Cells that were there, or being decoded, when a window asked for them.
    straight : int
        Windows read past the cache, because their cells do not fit.
    nbytes : int
        Bytes held now.
    """

    decoded: int
    hits: int
    straight: int
    nbytes: int


@dataclass
class _Claim:
    """Cells of one window: those to wait for, and those that this reader has to decode."""

    wanted: dict[Index, _Cell] = field(default_factory=dict)
    mine: set[Index] = field(default_factory=set)


class BlockCache:
    """Decoded cells of any number of rasters, the least recently used of which go first.

    Safe to use from any number of threads.  An error of a decode is raised in every reader that
    waits for that cell and is not kept: the next reader decodes again.

    Parameters
    ----------
    capacity : int
        Bytes that are kept at most.  A window whose cells do not fit is read past the cache; 0
        turns it off.

    Examples
    --------
    >>> cache = BlockCache(capacity=1 << 20)
    >>> ones = lambda window: Pixels(np.ones((1, *window.shape), "uint8"))
    >>> cells = Cells.of((600, 600), block=(256, 256), origin=(0, 0), pixel=1)
    >>> tile = Window(Span(0, 300), Span(100, 400))
    >>> cache.read("scene", cells, tile, ones).data.shape
    (1, 300, 300)
    >>> cache.read("scene", cells, tile, ones).data.sum(), cache.stats.decoded
    (np.uint64(90000), 1)
    """

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self._ready: OrderedDict[tuple[Hashable, Index], _Cell] = OrderedDict()
        self._coming: dict[tuple[Hashable, Index], _Cell] = {}
        self._nbytes = self._decoded = self._hits = self._straight = 0
        self.capacity = capacity

    @property
    def capacity(self) -> int:
        """Bytes that are kept at most; may be set."""
        return self._capacity

    @capacity.setter
    def capacity(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"capacity must be 0 bytes or more, got {nbytes}")
        with self._lock:
            self._capacity = nbytes
            self._evict()

    @property
    def stats(self) -> CacheStats:
        """Numbers so far."""
        with self._lock:
            return CacheStats(self._decoded, self._hits, self._straight, self._nbytes)

    def clear(self) -> None:
        """Forget everything that is held."""
        with self._lock:
            self._ready.clear()
            self._nbytes = 0

    def read(self, key: Hashable, cells: Cells, window: Window, decode: Decode) -> Pixels:
        """Pixels of a window.

        Parameters
        ----------
        key : hashable
            All that the pixels depend on besides where they lie: file, version, bands, nodata.
        cells : Cells
            How this raster is cut; the same for every read with this key.
        window : Window
            Inside the raster.
        decode : callable
            Reads a window of the raster; called for cells that nobody has read, or for rectangles
            of them.

        Returns
        -------
        Pixels
            In memory of their own.
        """
        # It would push out everything and not fit itself; of strips, all of which a window touches,
        # and of very large blocks, it might fill the memory.
        if cells.nbytes_touched(window) > self.capacity:
            with self._lock:
                self._straight += 1
            return decode(window)
        claim = self._claim(key, cells.touching(window))
        self._decode(key, cells, claim, decode)
        parts = {index: cell.result() for index, cell in claim.wanted.items()}
        return _assemble(cells, window, parts)

    def _claim(self, key: Hashable, indexes: Iterable[Index]) -> _Claim:
        claim = _Claim()
        with self._lock:
            for index in indexes:
                name = key, index
                cell = self._ready.get(name)
                if cell is not None:
                    self._ready.move_to_end(name)
                else:
                    cell = self._coming.get(name)
                if cell is None:
                    cell = self._coming[name] = Future()
                    claim.mine.add(index)
                claim.wanted[index] = cell
            self._hits += len(claim.wanted) - len(claim.mine)
        return claim

    def _decode(self, key: Hashable, cells: Cells, claim: _Claim, decode: Decode) -> None:
        """Decode all that was claimed; an error is left in the cells that have it."""
        left = set(claim.mine)
        todo = list(_rectangles(cells, claim.mine))
        try:
            while todo:
                first, last = todo.pop()
                area = cells.window(first, last)
                try:
                    pixels = decode(area)
                except Exception as error:
                    if first != last:
                        # Others may wait for the sound ones among them.
                        todo.extend((index, index) for index in _between(first, last))
                        continue
                    self._fail(key, {first: claim.wanted[first]}, error)
                    left.discard(first)
                    continue
                for index in _between(first, last):
                    part = _part(pixels, cells.window(index), area)
                    self._store((key, index), claim.wanted[index], part)
                    left.discard(index)
        except BaseException as error:
            self._fail(key, {index: claim.wanted[index] for index in left}, error)
            raise

    def _store(self, name: tuple[Hashable, Index], cell: _Cell, pixels: Pixels) -> None:
        with self._lock:
            del self._coming[name]
            self._ready[name] = cell
            self._nbytes += pixels.nbytes
            self._decoded += 1
            # Before it is evicted, which asks for its size.
            cell.set_result(pixels)
            self._evict()

    def _fail(self, key: Hashable, failed: dict[Index, _Cell], error: BaseException) -> None:
        with self._lock:
            for index in failed:
                del self._coming[key, index]
        for cell in failed.values():
            cell.set_exception(error)

    def _evict(self) -> None:
        while self._nbytes > self._capacity:
            _, cell = self._ready.popitem(last=False)
            self._nbytes -= cell.result().nbytes


_shared_lock = threading.Lock()
_shared: BlockCache | None = None


def shared_cache() -> BlockCache:
    """The cache of this process, made by its first reader.

    Its capacity is 256 MB, or that many MB as the environment variable ``DASKINFER_CACHE_MB`` says:
    a variable reaches worker processes on other hosts, a setting in the client does not.

    Raises
    ------
    ValueError
        If the variable is not a whole number, 0 or more.
    """
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = BlockCache(first_capacity())
        return _shared


def first_capacity() -> int:
    """Bytes that the cache holds until a run needs more: 256 MB, or what the variable says."""
    told = _told_capacity()
    return _CAPACITY_MB << 20 if told is None else told


def cache_limit() -> int:
    """Bytes that the cache may be made to hold: 1 GB, or what ``DASKINFER_CACHE_MB`` says."""
    told = _told_capacity()
    return _LARGEST_MB << 20 if told is None else told


def reserve(nbytes: int) -> bool:
    """Enlarge the cache of this process to a need, if that is within the limit.

    Parameters
    ----------
    nbytes : int
        As of `daskinfer.raster.Raster.cache_bytes`.

    Returns
    -------
    bool
        Whether it holds so much.  A cache that is somewhat too small is no better than none.
    """
    cache = shared_cache()
    if cache.capacity < nbytes <= cache_limit():
        cache.capacity = nbytes
    return nbytes <= cache.capacity


def _told_capacity() -> int | None:
    text = os.environ.get(_CAPACITY_VARIABLE)
    if text is None:
        return None
    if not text.strip().isdecimal():
        raise ValueError(
            f"the environment variable {_CAPACITY_VARIABLE} must be a whole number of MB, 0 for no "
            f"cache, got {text!r}: set {_CAPACITY_VARIABLE}={_CAPACITY_MB}"
        )
    return int(text) << 20


def _near(block: int, side: int) -> int:
    """The multiple of a block that is nearest to a side, one block at least."""
    return block * max(1, round(side / block))


def _between(first: Index, last: Index) -> list[Index]:
    return [(i, j) for i in range(first[0], last[0] + 1) for j in range(first[1], last[1] + 1)]


def _rectangles(cells: Cells, indexes: Iterable[Index]) -> Iterator[tuple[Index, Index]]:
    """First and last cell of rectangles that cover these cells, each cell once.

    Each takes a run of neighbours in a row, then the rows below that have the same run: a read has
    a cost of its own, and on object storage is a request of its own.
    """
    left = set(indexes)
    while left:
        first = last = min(left)
        for down, right in ((0, 1), (1, 0)):
            while _fits(cells, left, first, grown := (last[0] + down, last[1] + right)):
                last = grown
        left.difference_update(_between(first, last))
        yield first, last


def _fits(cells: Cells, left: set[Index], first: Index, last: Index) -> bool:
    """Whether all cells of a rectangle are wanted, and no more than is read at once."""
    nbytes = cells.nbytes(cells.window(first, last))
    return nbytes <= _LARGEST_READ and left.issuperset(_between(first, last))


def _part(pixels: Pixels, window: Window, area: Window) -> Pixels:
    """A window of an area in memory of its own: a view would keep all of the area alive."""
    if window == area:
        return pixels
    part = pixels.cut(*window.slices(area.origin))
    data = recycled(part.data.shape, part.data.dtype)
    data[:] = part.data
    return Pixels(data, None if part.valid is None else part.valid.copy())


def _assemble(cells: Cells, window: Window, parts: dict[Index, Pixels]) -> Pixels:
    """One array from the cells that a window touches."""
    like = next(iter(parts.values())).data
    data = recycled((like.shape[0], *window.shape), like.dtype)
    valid: Mask | None = None
    for index, part in parts.items():
        area = cells.window(index)
        common = area.clip(window)
        to, at = common.slices(window.origin), common.slices(area.origin)
        data[:, *to] = part.data[:, *at]
        if part.valid is not None:
            if valid is None:
                valid = np.ones(window.shape, np.bool_)
            valid[to] = part.valid[at]
    return Pixels(data, None if valid is None or valid.all() else valid)
