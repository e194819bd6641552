"""A file of encoded tiles and its index: read, grow, patch, copy.

Reads and writes name their position, so that threads and processes can share the file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskinfer.tiff import Layout

# Bytes that are copied at a time.
_COPY_BYTES = 8 << 20
_COPY_THREADS = 2


def write_at(path: str, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
    """Write all of `data`, however many calls that takes.

    Parameters
    ----------
    path : str
        Named in errors.
    fd : int
        Open file.
    data : bytes
        What to write.
    at : int
        Position in the file.

    Raises
    ------
    OSError
        If the disk is full or fails; names the file.
    """
    rest = memoryview(data)
    while rest:
        try:
            done = os.pwrite(fd, rest, at)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} at byte {at}", path) from error
        if done == 0:
            raise OSError(errno.EIO, f"{len(rest)} bytes left unwritten at byte {at}", path)
        rest, at = rest[done:], at + done


def sync_file(path: str, fd: int) -> None:
    """Have all that was written on the disk.

    Parameters
    ----------
    path : str
        Named in errors.
    fd : int
        Open file.

    Raises
    ------
    OSError
        If the disk is full or fails, which network file systems often tell only here; names the
        file.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} when it was synced", path) from error


def read_at(path: str, fd: int, size: int, at: int) -> bytes:
    """Read exactly `size` bytes, however many calls that takes.

    Parameters
    ----------
    path : str
        Named in errors.
    fd : int
        Open file.
    size, at : int
        How many bytes, and where.

    Returns
    -------
    bytes
        Of length `size`.

    Raises
    ------
    OSError
        If the file ends before; names the file.
    """
    data = os.pread(fd, size, at)
    if len(data) < size:
        rest = bytearray(size - len(data))
        read_into(path, fd, memoryview(rest), at + len(data))
        data += rest
    return data


def read_into(path: str, fd: int, data: memoryview, at: int) -> None:
    """Fill `data`, however many calls that takes.

    Parameters
    ----------
    path : str
        Named in errors.
    fd : int
        Open file.
    data : memoryview of bytes
        Where to.
    at : int
        Position in the file.

    Raises
    ------
    OSError
        If the file ends before; names the file.
    """
    end = at + len(data)
    while data:
        done = os.preadv(fd, [data], at)
        if not done:
            raise OSError(errno.EIO, f"ends before byte {end}", path)
        data, at = data[done:], at + done


class IndexedFile:
    """An open file and its tile index.

    Parameters
    ----------
    path : str
        Named in errors.
    fd : int
        Open for reading and writing; owned by the caller.
    layout : Layout
        Where the index is.
    """

    def __init__(self, path: str, fd: int, layout: Layout) -> None:
        self.path, self.fd, self.layout = path, fd, layout

    def write_header(self) -> None:
        """Write all but the index, which stays a hole that reads as zeros."""
        for at, data in self.layout.header:
            self.write(data, at)

    def write(self, data: bytes | bytearray | memoryview, at: int) -> None:
        """Write all of `data`, as `write_at`."""
        write_at(self.path, self.fd, data, at)

    def sync(self) -> None:
        """Have all that was written on the disk, as `sync_file`."""
        sync_file(self.path, self.fd)

    def read(self, size: int, at: int) -> bytes:
        """Read exactly `size` bytes, as `read_at`."""
        return read_at(self.path, self.fd, size, at)

    def begin_sync(self, size: int, at: int) -> None:
        """Have the kernel begin to put a range on the disk, so that `sync` has less to wait for."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, at, size, os.POSIX_FADV_DONTNEED)

    def read_into(self, data: memoryview, at: int) -> None:
        """Fill `data`, as the function `read_into`."""
        read_into(self.path, self.fd, data, at)

    def grow(self, size: int) -> int:
        """Make the file longer.

        Parameters
        ----------
        size : int
            By this many bytes.

        Returns
        -------
        int
            Where they are.

        Raises
        ------
        OSError
            If the file would be too large; names it.
        """
        at = os.fstat(self.fd).st_size
        try:
            os.ftruncate(self.fd, at + size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from error
        return at

    def offsets(self, level: int) -> NDArray[np.int64]:
        """Tile offsets of a level.

        Parameters
        ----------
        level : int
            0 is full resolution.

        Returns
        -------
        ndarray of int64, shape (tile rows, tile columns)
            Byte positions.
        """
        return self._array(level, self.layout.offsets_at[level], "<u8")

    def counts(self, level: int) -> NDArray[np.int64]:
        """Tile byte counts of a level.

        Parameters
        ----------
        level : int
            0 is full resolution.

        Returns
        -------
        ndarray of int64, shape (tile rows, tile columns)
            Bytes; zero where the tile is missing.
        """
        return self._array(level, self.layout.counts_at[level], "<u4")

    def counts_of(self, level: int, row: int, col: int, grid: tuple[int, ...]) -> NDArray[np.int64]:
        """Byte counts of a rectangle of tiles.

        Parameters
        ----------
        level, row, col : int
            Level, and tile row and column of the rectangle's corner.
        grid : (int, int)
            Its tile rows and columns.

        Returns
        -------
        ndarray of int64, shape `grid`
            Bytes; zero where the tile is missing.
        """
        across = self.layout.grids[level][1]
        start = self.layout.counts_at[level]
        lines = [
            self.read(4 * grid[1], start + 4 * ((row + i) * across + col)) for i in range(grid[0])
        ]
        return np.frombuffer(b"".join(lines), "<u4").astype(np.int64).reshape(grid)

    def _array(self, level: int, at: int, dtype: str) -> NDArray[np.int64]:
        rows, cols = self.layout.grids[level]
        raw = self.read(rows * cols * np.dtype(dtype).itemsize, at)
        return np.frombuffer(raw, dtype).astype(np.int64).reshape(rows, cols)

    def patch_offsets(self, level: int, row: int, col: int, values: NDArray[np.int64]) -> None:
        """Set the offsets of a rectangle of tiles.

        Parameters
        ----------
        level, row, col : int
            Level, and tile row and column of the rectangle's corner.
        values : ndarray of int64, shape (rows, columns)
            Byte positions.
        """
        self._patch(level, row, col, values.astype("<u8"), self.layout.offsets_at[level])

    def patch_counts(self, level: int, row: int, col: int, values: NDArray[np.int64]) -> None:
        """Set the byte counts of a rectangle of tiles.

        Parameters
        ----------
        level, row, col : int
            Level, and tile row and column of the rectangle's corner.
        values : ndarray of int64, shape (rows, columns)
            Bytes; zero takes a tile out of the file.
        """
        self._patch(level, row, col, values.astype("<u4"), self.layout.counts_at[level])

    def _patch(self, level: int, row: int, col: int, values: NDArray[Any], at: int) -> None:
        across = self.layout.grids[level][1]
        for i, line in enumerate(values):
            self.write(line.tobytes(), at + values.itemsize * ((row + i) * across + col))


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

    def copy(some: list[NDArray[np.int64]]) -> None:
        most = max((int(ends[group[-1]] - starts[group[0]]) for group in some), default=0)
        buffer = memoryview(bytearray(most))
        for group in some:
            end = 0
            for size, place in zip(sizes[group].tolist(), old[group].tolist(), strict=True):
                end = _framed(source, buffer, end, size, place, frame)
            target.write(buffer[:end], int(starts[group[0]]))
            target.begin_sync(end, int(starts[group[0]]))

    # Moving bytes is the kernel's work, which goes on in several threads.
    parts = [groups[i::_COPY_THREADS] for i in range(min(_COPY_THREADS, len(groups)))]
    with ThreadPoolExecutor(_COPY_THREADS) as pool:
        for _ in pool.map(copy, parts):
            pass
    grid = target.layout.grids[level]
    target.patch_offsets(level, 0, 0, offsets.reshape(grid))
    target.patch_counts(level, 0, 0, counts.reshape(grid))
    return int(ends[-1]) if ends.size else at


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


@contextlib.contextmanager
def new_file(path: str, layout: Layout) -> Iterator[IndexedFile]:
    """Write a file that gets its name when it is whole and on the disk.

    Parameters
    ----------
    path : str
        Replaced if it exists.
    layout : Layout
        Of the header, which is written first.

    Yields
    ------
    IndexedFile
        Under a name of its own until the end; removed if an error ends it.
    """
    scratch = f"{path}.tmp"
    fd = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        file = IndexedFile(scratch, fd, layout)
        file.write_header()
        yield file
        file.sync()
        rename(scratch, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)
        raise
    finally:
        os.close(fd)


def rename(source: str, target: str) -> None:
    """Rename a file and have the new name on the disk.

    Parameters
    ----------
    source, target : str
        On one file system; `target` is replaced if it exists.
    """
    os.replace(source, target)
    fd = os.open(os.path.dirname(target), os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
