"""A file of encoded tiles and its index: read, grow, patch, copy.

Reads and writes name their position, so that threads and processes can share the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskinfer.cog.tiff import Layout
from daskinfer.fileio import read_at, read_into, rename, sync_file, write_at


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
        return self._rectangle(level, row, col, grid, self.layout.counts_at[level], "<u4")

    def offsets_of(
        self, level: int, row: int, col: int, grid: tuple[int, ...]
    ) -> NDArray[np.int64]:
        """Offsets of a rectangle of tiles, as `counts_of`."""
        return self._rectangle(level, row, col, grid, self.layout.offsets_at[level], "<u8")

    def _rectangle(
        self, level: int, row: int, col: int, grid: tuple[int, ...], start: int, dtype: str
    ) -> NDArray[np.int64]:
        across, size = self.layout.grids[level][1], np.dtype(dtype).itemsize
        lines = [
            self.read(size * grid[1], start + size * ((row + i) * across + col))
            for i in range(grid[0])
        ]
        return np.frombuffer(b"".join(lines), dtype).astype(np.int64).reshape(grid)

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


@contextlib.contextmanager
def new_file(path: str, layout: Layout, *, keep: bool = False) -> Iterator[IndexedFile]:
    """Write a file that gets its name when it is whole and on the disk.

    Parameters
    ----------
    path : str
        Replaced if it exists.
    layout : Layout
        Of the header, which is written first.
    keep : bool
        What is in ``<path>.tmp`` behind the header.

    Yields
    ------
    IndexedFile
        Under a name of its own until the end; removed if an error ends it.
    """
    scratch = f"{path}.tmp"
    begin = 0 if keep else os.O_CREAT | os.O_TRUNC
    fd = os.open(scratch, os.O_RDWR | begin | os.O_CLOEXEC, 0o666)
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


def whole_chunks(
    blocks: NDArray[np.bool_], rows: Sequence[int], cols: Sequence[int]
) -> NDArray[np.bool_]:
    """Tell which chunks have all their blocks.

    Parameters
    ----------
    blocks : ndarray of bool, shape (block rows, block columns)
        Which blocks there are.
    rows, cols : sequence of int
        First block of each chunk on each axis, from 0 up.

    Returns
    -------
    ndarray of bool, shape (chunk rows, chunk columns)

    Examples
    --------
    >>> blocks = np.array([[True, True, False], [True, True, True]])
    >>> whole_chunks(blocks, [0], [0, 2])
    array([[ True, False]])
    """
    down = np.logical_and.reduceat(blocks, rows, axis=0)
    return np.asarray(np.logical_and.reduceat(down, cols, axis=1))
