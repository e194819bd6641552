"""Writes past the kernel's cache: the same bytes, whatever the file system can do."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cogs import check, class_map, noise_of, spec_of, write_file
from daskinfer.cog import tilecopy
from daskinfer.cog.directio import PAGE, aligned_buffer, direct_writer
from daskinfer.fileio import write_at

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="needs O_DIRECT")


def written(path, pieces, size):
    """A file of zeros with pieces ``(at, bytes)`` in it."""
    path.write_bytes(bytes(size))
    fd = os.open(path, os.O_RDWR)
    try:
        through = []

        def buffered(data, at):
            through.append(len(data))
            write_at(str(path), fd, data, at)

        with direct_writer(str(path), fd, buffered) as write:
            for at, data in pieces:
                buffer = aligned_buffer(at % PAGE + len(data))
                buffer[at % PAGE : at % PAGE + len(data)] = data
                write(buffer[at % PAGE : at % PAGE + len(data)], at)
        return through
    finally:
        os.close(fd)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3 * PAGE), min_size=1, max_size=5), st.integers(0, 2 * PAGE))
def test_any_place_and_size(tmp_path_factory, sizes, start):
    path = tmp_path_factory.mktemp("direct") / "f"
    data = np.random.default_rng(0).bytes(sum(sizes))
    ends = np.cumsum(sizes)
    pieces = [
        (start + int(end) - size, data[end - size : end])
        for size, end in zip(sizes, ends, strict=True)
    ]
    written(path, pieces, start + len(data) + 10)
    assert path.read_bytes() == bytes(start) + data + bytes(10)


def test_whole_pages_go_past_the_cache(tmp_path):
    at, data = PAGE - 10, os.urandom(3 * PAGE)
    through = written(tmp_path / "f", [(at, data)], 5 * PAGE)
    if sum(through) == len(data):
        pytest.skip("the file system of the tests has no direct writes")
    assert through == [10, PAGE - 10]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("name", ["open", "pwrite"])
def test_a_file_system_that_cannot(tmp_path, monkeypatch, name, number):
    call, data = getattr(os, name), os.urandom(3 * PAGE)
    flags = {}

    def refused(first, second, *rest):
        if name == "open" and second & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        if name == "pwrite" and len(second) % PAGE == 0 and not flags.setdefault("done", False):
            flags["done"] = True
            raise OSError(number, os.strerror(number))
        return call(first, second, *rest)

    monkeypatch.setattr(os, name, refused)
    written(tmp_path / "f", [(5, data)], 5 * PAGE)
    monkeypatch.undo()
    assert (tmp_path / "f").read_bytes()[5 : 5 + len(data)] == data


def test_short_writes_are_completed(tmp_path, monkeypatch):
    write, data = os.pwrite, os.urandom(6 * PAGE)
    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: write(fd, part[: 2 * PAGE + 7], at))
    written(tmp_path / "f", [(0, data)], 6 * PAGE)
    assert (tmp_path / "f").read_bytes() == data


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(fd, part, at):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device at byte 4096") as caught:
        written(tmp_path / "f", [(PAGE, os.urandom(PAGE))], 2 * PAGE)
    assert caught.value.filename == str(tmp_path / "f")


@pytest.mark.parametrize("interleave", ["pixel", "band"])
def test_cogs_are_the_same(tmp_path, monkeypatch, interleave):
    spec = spec_of(333, 500, 3, "uint16", nodata=0, blocksize=64, interleave=interleave)
    pixels = np.where(class_map(spec), noise_of(spec), 0)
    files = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(tilecopy, "_DIRECT_BYTES", least)
        path = write_file(tmp_path, spec, pixels, (128, 128))
        check(path, pixels, spec)
        files.append(path.read_bytes())
        path.unlink()
    assert files[0] == files[1]
