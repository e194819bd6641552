"""What is copied ahead of the end: the same file, bytes and all, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cogs import check, chunks_of, class_map, noise_of, spec_of, write_all
from daskinfer.cog import WorkFile, ahead, encode_chunk, header, ordering
from daskinfer.draft import Draft

SIDE = 64
CHUNK = (2 * SIDE, 2 * SIDE)


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    monkeypatch.setattr(header, "_LARGE", 0)
    monkeypatch.setattr(ahead, "_LEAST", 1)


@pytest.fixture
def folder(tmp_path):
    """One in which pages can be inserted into files."""
    path = tmp_path / "probe"
    path.write_bytes(bytes(2 * header.PAGE))
    with path.open("r+b") as file:
        try:
            ahead._insert(file.fileno(), header.PAGE, header.PAGE)
        except OSError:
            pytest.skip("the file system of the tests cannot insert pages into a file")
    path.unlink()
    return tmp_path


@pytest.fixture
def handed(monkeypatch):
    """How many tiles were there at the end, of each file."""
    counts, hand_over = [], ahead.Ahead.hand_over

    def noted(self, *arguments):
        counts.append(hand_over(self, *arguments))
        return counts[-1]

    monkeypatch.setattr(ahead.Ahead, "hand_over", noted)
    return counts


def spec(**options):
    return spec_of(500, 333, 3, "uint16", **({"nodata": 0, "blocksize": SIDE} | options))


def pixels_of(spec):
    return np.where(class_map(spec), noise_of(spec), 0).astype(spec.dtype)


def plain(folder, spec, pixels):
    """The bytes of the file that is copied at the end."""
    path = folder / "plain.tif"
    work = WorkFile.create(f"{path}.partial", spec, CHUNK)
    write_all(work, pixels)
    work.finish(path)
    data = path.read_bytes()
    path.unlink()
    return data


def begun(folder, spec):
    return WorkFile.create(folder / "out.tif.partial", spec, CHUNK, ahead=True)


def assert_finished(folder, spec, pixels, work):
    path = folder / "out.tif"
    work.finish(path)
    assert os.listdir(folder) == ["out.tif"]
    check(path, pixels, spec)
    assert path.read_bytes() == plain(folder, spec, pixels)


@pytest.mark.parametrize("options", [{}, {"sparse": False}, {"interleave": "band"}])
def test_all_rows_are_there_with_the_last_chunk(folder, handed, options):
    made = spec(**options)
    pixels, work = pixels_of(made), begun(folder, made)
    write_all(work, pixels)
    assert_finished(folder, made, pixels, work)
    blocks = [
        bands[:, row : row + SIDE, col : col + SIDE]
        for bands in np.split(pixels, made.planes)
        for row in range(0, made.height, SIDE)
        for col in range(0, made.width, SIDE)
    ]
    expected = sum(block.any() for block in blocks) if made.sparse else len(blocks)
    assert handed == [expected, 0]  # the second is of `plain`


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_chunks(folder, data):
    made = spec_of(
        data.draw(st.integers(1, 500)),
        data.draw(st.integers(1, 500)),
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from(["uint8", "float32"])),
        nodata=data.draw(st.sampled_from([None, 0])),
        blocksize=SIDE,
        sparse=data.draw(st.booleans()),
        interleave=data.draw(st.sampled_from(["pixel", "band"])),
    )
    order = data.draw(st.permutations(range(len(list(chunks_of(made, CHUNK))))))
    again = data.draw(st.lists(st.sampled_from(order), max_size=2))
    pieces = {
        "_ROWS": data.draw(st.sampled_from([1, 2, 64])),
        "_LEAST": data.draw(st.sampled_from([1, 1 << 40])),
    }
    with tempfile.TemporaryDirectory(dir=folder) as own, mock.patch.multiple(ahead, **pieces):
        pixels, work = pixels_of(made), begun(Path(own), made)
        write_all(work, pixels, [*order, *again])
        assert_finished(Path(own), made, pixels, work)


def test_a_chunk_that_is_replaced(folder, handed):
    made = spec()
    pixels, work = pixels_of(made), begun(folder, made)
    write_all(work, noise_of(made, 1))
    write_all(work, pixels)
    assert_finished(folder, made, pixels, work)
    assert handed[0] == 0


def test_an_earlier_run_is_gone_on_with(folder, handed):
    made = spec()
    pixels = pixels_of(made)
    with begun(folder, made) as work:
        write_all(work, pixels, range(7))
    assert Path(f"{work.path}.ahead").exists()
    work = WorkFile.open(work.path, made, CHUNK)
    write_all(work, pixels, range(7, 12))
    assert_finished(folder, made, pixels, work)
    assert handed[0] > 0


WRITER = """
import sys
from daskinfer.cog import WorkFile, ahead, encode_chunk, header
from cogs import chunks_of
from test_ahead import CHUNK, pixels_of, spec

header._LARGE, ahead._LEAST = 0, 1
work = WorkFile.open(sys.argv[1], spec(), CHUNK)
pixels = pixels_of(spec())
sys.stdin.read(1)
for n, (row, col, part) in enumerate(chunks_of(spec(), CHUNK)):
    if n % 2 == int(sys.argv[2]) and n < int(sys.argv[3]):
        work.append(encode_chunk(work.spec, pixels[part], row, col, work.levels))
        print(n, flush=True)
sys.stdin.read()
"""


def writer(path, first, stop):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, path, str(first), str(stop)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
        text=True,
    )


@pytest.mark.parametrize("kill_after", [1, 4, 6])
def test_processes_that_are_killed(folder, kill_after):
    made = spec()
    pixels, work = pixels_of(made), begun(folder, made)
    writers = [writer(work.path, first, 12) for first in range(2)]
    for process in writers:  # both have imported: now together
        process.stdin.write("x")
        process.stdin.flush()
    for process in writers:
        for _ in range(kill_after):
            process.stdout.readline()
        process.kill()
        process.communicate()
    done = work.done().ravel()
    assert done.sum() >= 2 * kill_after
    write_all(work, pixels, np.flatnonzero(~done).tolist())
    assert_finished(folder, made, pixels, work)


@pytest.mark.parametrize("when", ["begin", "hand over"])
def test_a_file_system_that_cannot(folder, monkeypatch, handed, when):
    def cannot(fd, at, size):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    made = spec()
    if when == "begin":
        monkeypatch.setattr(ahead, "_insert", cannot)
    pixels, work = pixels_of(made), begun(folder, made)
    assert Path(f"{work.path}.ahead").exists() == (when != "begin")
    write_all(work, pixels)
    monkeypatch.setattr(ahead, "_insert", cannot)
    assert_finished(folder, made, pixels, work)
    assert handed[0] == 0


def test_no_room_to_copy_ahead(folder, monkeypatch, handed):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = spec()
    pixels, work = pixels_of(made), begun(folder, made)
    write_all(work, pixels, range(6))
    with monkeypatch.context() as patched:
        patched.setattr(ahead, "write_stream", full)
        write_all(work, pixels, range(6, 12))
    assert not Path(f"{work.path}.ahead").exists()
    assert_finished(folder, made, pixels, work)
    assert handed[0] == 0


def test_chunks_come_before_what_is_copied_ahead(folder, monkeypatch, handed):
    made = spec()
    pixels, work = pixels_of(made), begun(folder, made)
    write_all(work, pixels, range(6))
    pwrite = os.pwrite

    def full(fd, data, at):
        if Path(f"{work.path}.ahead").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    write_all(work, pixels, range(6, 12))
    assert_finished(folder, made, pixels, work)
    assert handed[0] == 0


def test_a_finish_that_failed_is_repeated(folder, monkeypatch):
    made = spec()
    pixels, work = pixels_of(made), begun(folder, made)
    write_all(work, pixels)
    with monkeypatch.context() as patched:
        patched.setattr(ordering, "copy_tiles", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            work.finish(folder / "out.tif")
    assert os.listdir(folder) == ["out.tif.partial"]
    assert_finished(folder, made, pixels, work)


def test_a_worker_that_comes_late_leaves_the_output_alone(folder):
    made = spec()
    pixels, work = pixels_of(made), begun(folder, made)
    write_all(work, pixels, range(12))
    late = WorkFile.open(work.path, made, CHUNK)
    row, col, part = next(chunks_of(made, CHUNK))
    work.finish(folder / "out.tif")
    data = (folder / "out.tif").read_bytes()
    with pytest.raises(FileNotFoundError):
        late.append(encode_chunk(made, pixels[part], row, col, late.levels))
    late._ahead.advance(0, 2)
    assert os.listdir(folder) == ["out.tif"]
    assert (folder / "out.tif").read_bytes() == data


def test_nothing_is_copied_ahead_for_the_other_layout(folder):
    made = spec()
    pixels = pixels_of(made)
    with Draft(made, CHUNK, layout="append").create(str(folder / "a.partial")) as work:
        assert os.listdir(folder) == ["a.partial"]
    WorkFile.discard(work.path)
    work = begun(folder, made)
    write_all(work, pixels)
    work.finish(folder / "out.tif", "append")
    assert os.listdir(folder) == ["out.tif"]
    check(folder / "out.tif", pixels, made)


def test_what_is_discarded_is_gone(folder):
    draft = Draft(spec(), CHUNK)
    with draft.create(str(folder / "a.partial")) as work:
        write_all(work, pixels_of(spec()), range(8))
    assert sorted(os.listdir(folder)) == ["a.partial", "a.partial.ahead"]
    Path(work.path).unlink()
    # A file of that name that another run left is not gone on with.
    draft.create(work.path).close()
    assert Path(f"{work.path}.ahead").stat().st_size <= 2 * header.PAGE
    draft.discard(work.path)
    assert os.listdir(folder) == []


def test_a_small_file_has_no_gap(tmp_path, monkeypatch):
    monkeypatch.undo()
    made = spec()
    with WorkFile.create(tmp_path / "w", made, CHUNK, ahead=True) as work:
        assert os.listdir(tmp_path) == ["w"]
        write_all(work, pixels_of(made))
        work.finish(tmp_path / "out.tif")
    start = header.strict_start(work._main, made)
    assert start % header.PAGE
    assert (tmp_path / "out.tif").read_bytes()[start : start + 4] != bytes(4)
