"""Move encoded tiles: into another file in reading order, or together where others left gaps."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from daskinfer.cog.directio import PAGE, Write, aligned_buffer, direct_writer
from daskinfer.cog.tileindex import IndexedFile

__all__ = ["compact", "copy_tiles"]

# Bytes that are copied at a time.
_COPY_BYTES = 8 << 20
_COPY_THREADS = 2
# Less than this is copied through the kernel's cache, where readers find it.
_DIRECT_BYTES = _COPY_BYTES


def copy_tiles(
    source: IndexedFile,
    target: IndexedFile,
    level: int,
    chosen: NDArray[np.bool_],
    at: int,
    frame: int,
) -> int:
    """Copy tiles of a level, in reading order and without gaps.

    Parameters
    ----------
    source, target : IndexedFile
        May be the same.
    level : int
        Of both.
    chosen : ndarray of bool, shape (tiles,)
        Tiles to copy; in another file the others are missing, in the same they stay.
    at : int
        Where to.
    frame : int
        0, or 4 to put the size before each tile and its last 4 bytes behind it, by which GDAL
        reads a tile without looking up its index entry.

    Returns
    -------
    int
        Where they end.
    """
    offsets, counts = source.offsets(level).ravel(), source.counts(level).ravel()
    old, sizes = offsets[chosen], counts[chosen]
    ends = at + np.cumsum(sizes + 2 * frame)
    offsets[chosen] = ends - frame - sizes
    if target is not source:
        offsets[~chosen] = counts[~chosen] = 0
    starts = ends - sizes - 2 * frame
    cuts = np.flatnonzero(np.diff((ends - at) // _COPY_BYTES)) + 1
    groups = [group for group in np.split(np.arange(old.size), cuts) if group.size]

    def copy(write: Write, some: list[NDArray[np.int64]]) -> None:
        most = max((int(ends[group[-1]] - starts[group[0]]) for group in some), default=0)
        buffer = aligned_buffer(PAGE + most)
        for group in some:
            first = int(starts[group[0]])
            begin = end = first % PAGE
            for size, place in zip(sizes[group].tolist(), old[group].tolist(), strict=True):
                end = _framed(source, buffer, end, size, place, frame)
            write(buffer[begin:end], first)

    # Moving bytes is the kernel's work, which goes on in several threads.
    parts = [groups[i::_COPY_THREADS] for i in range(min(_COPY_THREADS, len(groups)))]
    with (
        _writer(target, ends[-1] - at if ends.size and target is not source else 0) as write,
        ThreadPoolExecutor(_COPY_THREADS) as pool,
    ):
        for _ in pool.map(partial(copy, write), parts):
            pass
    grid = target.layout.grids[level]
    target.patch_offsets(level, 0, 0, offsets.reshape(grid))
    target.patch_counts(level, 0, 0, counts.reshape(grid))
    return int(ends[-1]) if ends.size else at


@contextlib.contextmanager
def _writer(target: IndexedFile, size: int) -> Iterator[Write]:
    """What writes so many bytes to a file: past the cache where they are many."""

    def buffered(data: memoryview, at: int) -> None:
        target.write(data, at)
        target.begin_sync(len(data), at)

    if size < _DIRECT_BYTES:
        yield buffered
        return
    with direct_writer(target.path, buffered) as write:
        yield write


def _framed(
    source: IndexedFile, buffer: memoryview, start: int, size: int, place: int, frame: int
) -> int:
    """Read a tile into a buffer, with its frame; returns where that ends."""
    end = start + frame + size
    source.read_into(buffer[start + frame : end], place)
    if frame:
        struct.pack_into("<I", buffer, start, size)
        buffer[end : end + frame] = buffer[end - frame : end]
    return end + frame


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
