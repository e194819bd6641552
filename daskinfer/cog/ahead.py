"""Copy the full resolution into the order of the finished file while chunks still come.

There overviews come first, and how long they are is known with the last chunk only.  So the full
resolution goes into a file of its own, behind room for the header; at the end the file system
inserts pages for the overviews in front of it (``FALLOC_FL_INSERT_RANGE`` of Linux; ext4 and XFS
can).  Where it cannot, there is no such file, and finishing copies everything.

The bytes of the finished file are the same either way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from daskinfer.cog.header import FRAME, PAGE
from daskinfer.cog.tilecopy import Stream, write_stream
from daskinfer.cog.tileindex import IndexedFile
from daskinfer.filelock import locked

__all__ = ["Ahead", "Chosen"]

# Copied at a time: less is not worth the calls, unless it is so many rows; more need not be.
_LEAST = 16 << 20
_ROWS = 64
_INSERT_RANGE = 0x20
# Tile rows that are in the file, and where they end; in front, where the header will be.
_STATE = struct.Struct("<QQ")

Chosen = Callable[[NDArray[np.int64]], NDArray[np.bool_]]


class Ahead:
    """The file of what was copied; safe to use from several processes of a host.

    Parameters
    ----------
    path : str
        Where it is, if it is there.
    work : IndexedFile
        The work file.
    chosen : callable
        Tells by their offsets which tiles go into the finished file.
    """

    def __init__(self, path: str, work: IndexedFile, chosen: Chosen) -> None:
        self.path = path
        self._work, self._chosen = work, chosen
        self._there = os.path.exists(path)

    def begin(self, start: int) -> None:
        """Make the file, if the file system can do what it is for.

        Parameters
        ----------
        start : int
            Where the first tile goes, in whole pages.
        """
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(fd, start + PAGE)
                _insert(fd, start, PAGE)
                os.ftruncate(fd, start)
                self._opened(fd).write(_STATE.pack(0, start), 0)
                self._there = True
            finally:
                os.close(fd)
                if not self._there:
                    os.unlink(self.path)

    def drop(self) -> bool:
        """Remove the file, as what is in it does not hold any more; whether it was there."""
        self._there = False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
            return True
        return False

    def advance(self, row: int, rows: int) -> None:
        """Copy what has become complete, unless somebody else is at it.

        Parameters
        ----------
        row, rows : int
            Tile rows of the chunk that was committed: the first, and how many.
        """
        if not self._there or all(self._line(row + i) is None for i in range(rows)):
            return
        try:
            with locked(self.path, wait=False) as fd:
                self._copy(self._opened(fd))
        except BlockingIOError:
            pass
        except FileNotFoundError:
            self._there = False
        except OSError:
            # Of the work file, finishing will tell; a full disk needs the space.
            self.drop()

    def hand_over(self, path: str, start: int, room: int, chosen: NDArray[np.bool_]) -> int:
        """Make it the beginning of the finished file, with room for the overviews.

        Parameters
        ----------
        path : str
            Its name from then on.
        start : int
            As for `begin`.
        room : int
            Bytes to insert there, in whole pages.
        chosen : ndarray of bool, shape (tiles,)
            Tiles of the full resolution that go into the finished file.

        Returns
        -------
        int
            How many of the chosen tiles it has; 0 if there is no such file.
        """
        try:
            with locked(self.path) as fd:
                row, end = _STATE.unpack(self._opened(fd).read(_STATE.size, 0))
                first = row * self._work.layout.grids[0][1]
                there = self._work.counts(0).ravel()[:first][chosen[:first]]
                if not there.size or end != start + int((there + 2 * FRAME).sum()):
                    raise OSError("not what is in the work file")
                os.rename(self.path, path)
                self._there = False
                if room:
                    _insert(fd, start, room)
                return int(there.size)
        except OSError:
            self.drop()
            Path(path).unlink(missing_ok=True)
            return 0

    def _opened(self, fd: int) -> IndexedFile:
        return IndexedFile(self.path, fd, self._work.layout)

    def _copy(self, file: IndexedFile) -> None:
        row, at = _STATE.unpack(file.read(_STATE.size, 0))
        while lines := self._lines(row):
            offsets, sizes = np.concatenate(lines, axis=1)
            if sizes.sum() < _LEAST and len(lines) < _ROWS:
                break
            stream = Stream(self._work, offsets, sizes, at, FRAME)
            write_stream(stream, file)
            row, at = row + len(lines), int(stream.ends[-1]) if sizes.size else at
            # It must not reach the disk before what it says is there.
            file.sync()
            file.write(_STATE.pack(row, at), 0)

    def _lines(self, row: int) -> list[NDArray[np.int64]]:
        """Offsets and sizes of some complete rows, from one on."""
        lines: list[NDArray[np.int64]] = []
        for i in range(row, min(row + _ROWS, self._work.layout.grids[0][0])):
            line = self._line(i)
            if line is None:
                break
            lines.append(line)
        return lines

    def _line(self, row: int) -> NDArray[np.int64] | None:
        """Offsets and sizes of the chosen tiles of a row; None while one is missing."""
        grid = 1, self._work.layout.grids[0][1]
        sizes = self._work.counts_of(0, row, 0, grid)[0]
        if not sizes.all():
            return None
        offsets = self._work.offsets_of(0, row, 0, grid)[0]
        return np.stack([offsets, sizes])[:, self._chosen(offsets)]


def _insert(fd: int, at: int, size: int) -> None:
    """Insert bytes into a file, in whole pages; raises OSError where that cannot be."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:
        raise OSError("no fallocate")
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    if call(fd, _INSERT_RANGE, at, size):
        raise OSError(ctypes.get_errno(), "pages cannot be inserted")
