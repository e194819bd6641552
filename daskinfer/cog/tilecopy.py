"""Move encoded tiles: into another file in reading order, or together where others left gaps."""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from daskinfer.cog.directio import PAGE, Write, aligned_buffer, direct_writer
from daskinfer.cog.tileindex import IndexedFile

__all__ = ["Stream", "compact", "copy_tiles", "write_stream"]

# Bytes that are copied at a time.
_COPY_BYTES = 8 << 20
_COPY_THREADS = 2
# Less than this is copied through the kernel's cache, where readers find it.
_DIRECT_BYTES = _COPY_BYTES


def copy_tiles(
    source: IndexedFile,
    target: IndexedFile,
    chosen: Mapping[int, NDArray[np.bool_]],
    at: int,
    frame: int,
    done: int = 0,
) -> None:
    """Copy tiles in reading order, level behind level and without gaps.

    Parameters
    ----------
    source, target : IndexedFile
        May be the same.
    chosen : dict of int to ndarray of bool, shape (tiles,)
        Tiles to copy, of each level in the order in which levels are to lie; in another file the
        others are missing, in the same they stay.
    at : int
        Where to.
    frame : int
        0, or 4 to put the size before each tile and its last 4 bytes behind it, by which GDAL
        reads a tile without looking up its index entry.
    done : int
        So many of the first tiles are there already.
    """
    spans = {
        level: np.stack([source.offsets(level).ravel(), source.counts(level).ravel()])
        for level in chosen
    }
    moved = np.concatenate([spans[level][:, some] for level, some in chosen.items()], axis=1)
    stream = Stream(source, moved[0], moved[1], at, frame, done)
    write_stream(stream, target, past_the_cache=target is not source)
    new = stream.starts + frame
    for level, some in chosen.items():
        span, grid = spans[level], target.layout.grids[level]
        span[0, some], new = np.split(new, [np.count_nonzero(some)])
        if target is not source:
            span[:, ~some] = 0
        target.patch_offsets(level, 0, 0, span[0].reshape(grid))
        target.patch_counts(level, 0, 0, span[1].reshape(grid))


class Stream:
    """Tiles of a file, each in its frame, as they will lie one behind the other.

    Parameters
    ----------
    file : IndexedFile
        Where they are.
    offsets, sizes : ndarray of int64, shape (n,)
        Of each.
    at : int
        Where the first will begin.
    frame, done : int
        As of `copy_tiles`.

    Attributes
    ----------
    starts, ends : ndarray of int64, shape (n,)
        Where each will be, with its frame.
    done : int
        As above.
    """

    def __init__(
        self,
        file: IndexedFile,
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        at: int,
        frame: int,
        done: int = 0,
    ) -> None:
        self.done = done
        self._file, self._offsets, self._sizes, self._frame = file, offsets, sizes, frame
        self.ends = at + np.cumsum(sizes + 2 * frame)
        self.starts = self.ends - sizes - 2 * frame

    def groups(self) -> list[tuple[int, int]]:
        """First tile, and the one behind the last, of parts of about `_COPY_BYTES`."""
        ends = self.ends[self.done :]
        if not ends.size:
            return []
        cuts = np.flatnonzero(np.diff((ends - self.starts[self.done]) // _COPY_BYTES)) + 1
        return list(itertools.pairwise([self.done, *(self.done + cuts).tolist(), self.ends.size]))

    def pages(self, first: int, stop: int) -> tuple[int, int]:
        """First byte, and the one behind the last, of a group.

        It begins and ends at a page, so that none is written in two pieces: it lacks the last
        bytes of its last tile, and has those of the tiles before it.
        """
        begin, end = int(self.starts[first]), int(self.ends[stop - 1])
        return (
            begin - begin % PAGE if first > self.done else begin,
            end if stop == self.ends.size else end - end % PAGE,
        )

    def read(self, first: int, stop: int, buffer: memoryview) -> None:
        """Fill a buffer with a group, from its first page on, and the rest of its last tile."""
        head = self._before(first, int(self.starts[first]) - self.pages(first, stop)[0])
        buffer[: len(head)] = head
        end, frame = len(head), self._frame
        sizes, offsets = (array[first:stop].tolist() for array in (self._sizes, self._offsets))
        for size, offset in zip(sizes, offsets, strict=True):
            start, end = end + frame, end + frame + size
            self._file.read_into(buffer[start:end], offset)
            if frame:
                struct.pack_into("<I", buffer, start - frame, size)
                buffer[end : end + frame] = buffer[end - frame : end]
            end += frame

    def _before(self, tile: int, count: int) -> bytes:
        """The last bytes of the tiles before one."""
        found = b""
        while len(found) < count:
            tile -= 1
            found = self._end_of(tile, count - len(found)) + found
        return found

    def _end_of(self, tile: int, count: int) -> bytes:
        """The last bytes of a tile in its frame, or all if they are fewer."""
        size, frame = int(self._sizes[tile]), self._frame
        some = min(size, count)
        data = self._file.read(some, int(self._offsets[tile]) + size - some)
        if not frame:
            return data
        return (struct.pack("<I", size) + data + data[-frame:])[-count:]


def write_stream(stream: Stream, target: IndexedFile, *, past_the_cache: bool = True) -> None:
    """Write a stream to a file; past the cache only what is worth it."""
    groups = stream.groups()
    size = int(stream.ends[-1] - stream.starts[stream.done]) if groups else 0

    def copy(write: Write, some: list[tuple[int, int]]) -> None:
        most = max((int(stream.ends[stop - 1] - stream.starts[i]) for i, stop in some), default=0)
        buffer = aligned_buffer(2 * PAGE + most)
        for first, stop in some:
            begin, end = stream.pages(first, stop)
            shift = begin % PAGE
            stream.read(first, stop, buffer[shift:])
            write(buffer[shift : shift + end - begin], begin)

    # Moving bytes is the kernel's work, which goes on in several threads.
    parts = [groups[i::_COPY_THREADS] for i in range(_COPY_THREADS)]
    with (
        _writer(target, past_the_cache and size >= _DIRECT_BYTES) as write,
        ThreadPoolExecutor(_COPY_THREADS) as pool,
    ):
        for _ in pool.map(partial(copy, write), parts):
            pass


@contextlib.contextmanager
def _writer(target: IndexedFile, past_the_cache: bool) -> Iterator[Write]:
    """What writes to a file."""

    def buffered(data: memoryview, at: int) -> None:
        target.write(data, at)
        target.begin_sync(len(data), at)

    if not past_the_cache:
        yield buffered
        return
    with direct_writer(target.path, target.fd, buffered) as write:
        yield write


def compact(file: IndexedFile, shared: int, left: NDArray[np.int64]) -> int:
    """Close the gaps that tiles left, keeping the order of the others, and cut the file off.

    Tiles only move to where nothing is needed any more, not even by a file whose index is on the
    disk and whose newest tiles are not: a run of tiles is as long as the gap in front of it.  A
    tile that is larger than the gap stays, and the gap with it; gaps add up, so few do.  Bytes
    that no tile is known to have left are not touched: somebody may still be writing there.

    Parameters
    ----------
    file : IndexedFile
        All levels are moved.
    shared : int
        Offset of the tile that many index entries share; it stays.
    left : ndarray of int64, shape (2, n)
        Offsets and sizes of the gaps.

    Returns
    -------
    int
        Size of the file.
    """
    grids = file.layout.grids
    offsets = np.concatenate([file.offsets(level).ravel() for level in range(len(grids))])
    sizes = np.concatenate([file.counts(level).ravel() for level in range(len(grids))])
    own = np.flatnonzero(offsets != shared)
    order = own[np.argsort(offsets[own])]
    source, ends = offsets[order], np.concatenate([[0], np.cumsum(sizes[order])])
    breaks = np.append(np.flatnonzero(np.diff(source - ends[:-1])) + 1, order.size)
    floors = _stretches(np.concatenate([source, left[0]]), np.concatenate([sizes[order], left[1]]))
    floors = floors[np.searchsorted(floors, source, "right") - 1]
    at, i = 0, 0
    while i < order.size:
        at = max(at, int(floors[i]))
        gap = int(source[i]) - at
        if gap == 0:
            j = int(breaks[np.searchsorted(breaks, i, "right")])
        else:
            j = int(np.searchsorted(ends, ends[i] + gap, "right")) - 1
            j = min(j, int(np.searchsorted(floors, floors[i], "right")))
        if j == i:
            j, at = i + 1, int(source[i])
        elif gap:
            offsets[order[i:j]] = at + ends[i:j] - ends[i]
            _move(file, source[i:j], sizes[order[i:j]], at)
            _patch_all(file, offsets)
        at += int(ends[j] - ends[i])
        i = j
    os.ftruncate(file.fd, at)
    return at


def _stretches(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the stretches begin that spans of bytes make without a gap."""
    order = np.argsort(offsets)
    starts = offsets[order]
    ends = np.append(0, starts + sizes[order])[:-1]
    return np.asarray(starts[starts != ends])


def _move(file: IndexedFile, offsets: NDArray[np.int64], sizes: NDArray[np.int64], at: int) -> None:
    """Copy tiles to one place, and have them on the disk."""
    cuts = np.flatnonzero(np.diff(np.cumsum(sizes) // _COPY_BYTES)) + 1
    for group in np.split(np.arange(sizes.size), cuts):
        data = b"".join(file.read(int(sizes[i]), int(offsets[i])) for i in group)
        file.write(data, at)
        at += len(data)
    file.sync()


def _patch_all(file: IndexedFile, offsets: NDArray[np.int64]) -> None:
    """Set the offsets of all levels, and have them on the disk."""
    cuts = np.cumsum([rows * cols for rows, cols in file.layout.grids])[:-1]
    for level, values in enumerate(np.split(offsets, cuts)):
        file.patch_offsets(level, 0, 0, values.reshape(file.layout.grids[level]))
    file.sync()
