"""Reads and writes that name their position, are whole or an error, and name the file in errors."""

from __future__ import annotations

import errno
import os

__all__ = ["read_at", "read_into", "rename", "sync_file", "write_at"]


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
