"""The lock of a file that threads, processes and runs write together."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator

__all__ = ["FileLock", "locked"]


@contextlib.contextmanager
def locked(path: str, *, wait: bool = True) -> Iterator[int]:
    """Open a file, and exclude all others that do so.

    Parameters
    ----------
    path : str
        Exists.
    wait : bool
        For others.

    Yields
    ------
    int
        Its descriptor, for reading and writing.

    Raises
    ------
    FileNotFoundError
        If the file has another name by now, or none.
    BlockingIOError
        If another has it, and this is not to wait.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, "replaced while it was locked", path)
        yield fd
    finally:
        os.close(fd)


class FileLock:
    """Excludes all other writers of a file, also those that come late.

    A lock of the kernel's belongs to an open file, which threads and forks share: so each locking
    opens the file anew, and finds out whether it still is the one of that name.

    Parameters
    ----------
    path : str
        The file itself, which exists.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._threads = threading.Lock()
        self._held = False

    @contextlib.contextmanager
    def short(self) -> Iterator[None]:
        """Exclude all others for a moment; within `long`, the other threads of its owner.

        Raises
        ------
        FileNotFoundError
            If the file has another name by now, or none.
        """
        with self._threads:
            if self._held:
                yield
            else:
                with locked(self.path):
                    yield

    @contextlib.contextmanager
    def long(self) -> Iterator[None]:
        """Exclude all others for as long as a whole piece of work takes.

        Raises
        ------
        FileNotFoundError
            If the file has another name by now, or none.
        """
        with locked(self.path):
            self._held = True
            try:
                yield
            finally:
                self._held = False
