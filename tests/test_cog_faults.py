"""Killed writers and failing disks: nothing committed is lost, and nothing is silently missing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import rasterio

import daskinfer as di
from cogs import check, class_map, levels_of, noise_of, pyramid, spec_of, write_all
from conftest import Pixel, write_raster
from daskinfer.cog import WorkFile, encode_chunk

ROOT = Path(__file__).parents[1]
CHUNK = (256, 256)

# ---- kills ------------------------------------------------------------------------------------

KILLED = spec_of(
    1024, 960, 2, "float32", blocksize=64, nodata=-1, resampling="nearest", interleave="band"
)
SMALL = (128, 128)

OPENED = """
import pickle, sys
import numpy as np
from daskinfer.cog import WorkFile, encode_chunk
spec, path = pickle.loads(bytes.fromhex(sys.argv[1])), sys.argv[2]
work = WorkFile.open(path, spec, (128, 128))
"""
WRITER = OPENED + textwrap.dedent(
    """
    array = np.load(path + ".npy")
    todo = np.argwhere(~work.done())
    sys.stdin.read(1)
    # From both ends, and past the middle: some chunks come from both writers, at any moment.
    for row, col in 128 * (todo[::-1] if sys.argv[3] == "backwards" else todo):
        pixels = array[:, row : row + 128, col : col + 128]
        work.append(encode_chunk(spec, pixels, row, col, work.levels))
        print(row, col, flush=True)
    """
)
FINISHER = OPENED + textwrap.dedent(
    """
    print("ready", flush=True)
    work.finish(sys.argv[3], sys.argv[4])
    print("done", flush=True)
    """
)


def script(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, pickle.dumps(KILLED).hex(), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )


def kill_writers(path, rng):
    """Two writers at work, killed together at a moment that nobody chose."""
    writers = [script(WRITER, path, way) for way in ("forwards", "backwards")]
    for process in writers:
        process.stdin.write("x")
        process.stdin.flush()
    for _ in range(rng.randrange(4)):
        writers[0].stdout.readline()
    time.sleep(rng.random() * 0.01)  # not to wait for anything: the moment itself
    for process in writers:
        process.send_signal(signal.SIGKILL)
    for process in writers:
        process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)


def assert_committed_is_exact(work, array):
    """Whatever the index says is there, at every level that chunks make."""
    blocks, expected = work.done_blocks(), pyramid(array, work.spec)
    for level, pixels in enumerate(levels_of(work.path)[: work.levels + 1]):
        side = 64 >> level
        there = blocks.repeat(side, 0).repeat(side, 1)[: pixels.shape[1], : pixels.shape[2]]
        if level:
            assert np.array_equal(pixels[:, there], expected[level][:, there])
        else:
            np.testing.assert_array_equal(pixels, np.where(there, array, -1))


def kill_and_finish(folder, kills):
    rng = random.Random(kills)
    array = class_map(KILLED)
    np.save(folder / "w.npy", array)
    with WorkFile.create(folder / "w", KILLED, SMALL) as work:
        for _ in range(kills):
            kill_writers(work.path, rng)
            assert_committed_is_exact(work, array)
        assert work.done().any()
        write_all(work, array, np.flatnonzero(~work.done()))
        work.finish(folder / "out.tif")
    check(folder / "out.tif", array, KILLED)
    return folder / "out.tif"


def whole(folder):
    """The file of a run that nobody disturbed."""
    work = WorkFile.create(folder / "w", KILLED, SMALL)
    write_all(work, class_map(KILLED))
    work.finish(folder / "undisturbed.tif")
    return folder / "undisturbed.tif"


def test_two_writers_killed_at_random_moments(tmp_path):
    killed = kill_and_finish(tmp_path, 3)
    assert killed.read_bytes() == whole(tmp_path).read_bytes()


@pytest.mark.slow
def test_two_writers_killed_at_twenty_random_moments(tmp_path):
    killed = kill_and_finish(tmp_path, 20)
    assert killed.read_bytes() == whole(tmp_path).read_bytes()


def finisher(work, output, layout):
    process = script(FINISHER, work, output, layout)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["strict", "append"])
def test_a_finish_killed_at_random_moments(tmp_path, layout):
    rng = random.Random(layout)
    array = noise_of(KILLED)
    array[:, 300:600] = -1
    with WorkFile.create(tmp_path / "written", KILLED, SMALL) as work:
        write_all(work, array)
    output, path = tmp_path / "out.tif", tmp_path / "w"
    shutil.copy(tmp_path / "written", path)
    process, start = finisher(path, output, layout), time.perf_counter()
    assert process.stdout.readline() == "done\n"
    takes, unfinished = time.perf_counter() - start, 0
    process.communicate()
    for _ in range(20):
        output.unlink(missing_ok=True)
        shutil.copy(tmp_path / "written", path)
        process = finisher(path, output, layout)
        time.sleep(rng.random() * takes)  # not to wait for anything: the moment itself
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if not output.exists():
            unfinished += 1
            with WorkFile.open(path, KILLED, SMALL) as work:
                assert_committed_is_exact(work, array)
                assert work.done().all()
                work.finish(output, layout)
        # In strict layout the name comes first and the work file goes after it.
        path.unlink(missing_ok=True)
        check(output, array, KILLED)
    assert unfinished > 0


# ---- workers that come late -------------------------------------------------------------------


def late_spec():
    return spec_of(500, 500, 1, "int16", blocksize=64, nodata=0, resampling="nearest")


@pytest.mark.parametrize("layout", ["strict", "append"])
def test_a_chunk_that_comes_while_the_file_is_finished_is_refused(tmp_path, monkeypatch, layout):
    spec = late_spec()
    array, other = noise_of(spec), noise_of(spec, 1)
    work = WorkFile.create(tmp_path / "w", spec, SMALL)
    write_all(work, array)
    late = pickle.loads(pickle.dumps(work))
    asked, described = threading.Event(), WorkFile._described
    short = late._lock.short

    def tell():
        asked.set()
        return short()

    monkeypatch.setattr(late._lock, "short", tell)
    with ThreadPoolExecutor(1) as pool:

        def come_late(self, failed):
            self.coming = pool.submit(write_all, late, other, [3])
            assert asked.wait(60)
            return described(self, failed)

        monkeypatch.setattr(WorkFile, "_described", come_late)
        work.finish(tmp_path / "out.tif", layout)
        with pytest.raises(FileNotFoundError) as caught:
            work.coming.result()
    assert caught.value.filename == work.path
    late.close()
    check(tmp_path / "out.tif", array, spec)


@pytest.mark.parametrize("layout", ["strict", "append"])
def test_a_chunk_that_is_being_written_while_the_file_is_finished_harms_nothing(
    tmp_path, monkeypatch, layout
):
    spec = late_spec()
    array, other = noise_of(spec), noise_of(spec, 1)
    work = WorkFile.create(tmp_path / "w", spec, SMALL)
    write_all(work, array, range(8))
    late = pickle.loads(pickle.dumps(work))
    begun, finished = threading.Event(), threading.Event()
    write = late._file.write

    def slow(data, at):
        begun.set()
        assert finished.wait(60)
        write(data, at)

    monkeypatch.setattr(late._file, "write", slow)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(write_all, late, other, [3])
        assert begun.wait(60)
        write_all(work, array, range(8, 16))
        work.finish(tmp_path / "out.tif", layout)
        finished.set()
        with pytest.raises(FileNotFoundError) as caught:
            coming.result()
    assert caught.value.filename == work.path
    late.close()
    check(tmp_path / "out.tif", array, spec)


# ---- disks ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB, and a function that makes it larger."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")

    def enlarge(size):
        subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)

    yield folder, enlarge
    subprocess.run(["umount", "-l", str(folder)], check=True)


def write_until_full(work, array):
    """Chunks written before the disk is full, and what is raised then."""
    for n in range(work.done().size):
        try:
            write_all(work, array, [n])
        except OSError as error:
            return n, error
    raise AssertionError("the disk never was full")


def test_a_full_disk_stops_the_writer_and_a_larger_one_goes_on(small_disk):
    folder, enlarge = small_disk
    spec = spec_of(1024, 1280, 2, "uint8", blocksize=64, nodata=0, resampling="nearest")
    array = noise_of(spec)
    work = WorkFile.create(folder / "w", spec, CHUNK)
    written, error = write_until_full(work, array)
    assert 0 < written < work.done().size - 1
    assert (error.errno, error.filename) == (errno.ENOSPC, work.path)
    assert work.done().sum() == written
    blocks = work.done_blocks().repeat(64, 0).repeat(64, 1)
    with rasterio.open(work.path) as dataset:
        np.testing.assert_array_equal(dataset.read(), np.where(blocks, array, 0))
    enlarge("6m")
    write_all(work, array, range(written, work.done().size))
    enlarge("5m")
    with pytest.raises(OSError, match="No space left") as caught:
        work.finish(folder / "out.tif")
    assert caught.value.filename == f"{folder / 'out.tif'}.tmp"
    assert os.listdir(folder) == ["w"]
    # There is no room for a copy, but for the overviews once more.
    work.finish(folder / "out.tif", "append")
    check(folder / "out.tif", array, spec)


def test_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(
    small_disk, tmp_path, one_worker
):
    folder, enlarge = small_disk
    source = write_raster(tmp_path / "scene.tif", noise_of(spec_of(512, 512, 2, "float32")))
    model = di.load_model(Pixel(), output="values", bands=["1", "2"])
    sides = {"tile": 128, "chunk": 128, "blocksize": 64}
    output = folder / "o.tif"
    with pytest.raises(di.InferenceError, match=r"No space left.*o\.tif\.partial"):
        di.run(source, model, output, client=one_worker, **sides)
    assert not output.exists()
    enlarge("32m")
    report = di.run(source, model, output, client=one_worker, **sides)
    assert report.complete
    assert report.resumed > 0
    with rasterio.open(output) as written, rasterio.open(source) as read:
        np.testing.assert_array_equal(written.read(), read.read())


@contextlib.contextmanager
def files_up_to(size):
    """No file of this process may grow beyond `size`; Python ignores the signal that says so."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_may_not_grow_stops_the_writer(tmp_path):
    spec = spec_of(1024, 1280, 2, "uint8", blocksize=64, nodata=0, resampling="nearest")
    array = noise_of(spec)
    work = WorkFile.create(tmp_path / "w", spec, CHUNK)
    with files_up_to(1 << 20):
        written, error = write_until_full(work, array)
        assert (error.errno, error.filename) == (errno.EFBIG, work.path)
    assert work.done().sum() == written > 0
    write_all(work, array, range(written, work.done().size))
    with files_up_to(1 << 20), pytest.raises(OSError, match="File too large") as caught:
        work.finish(tmp_path / "out.tif")
    assert caught.value.filename in (work.path, f"{tmp_path / 'out.tif'}.tmp")
    assert not (tmp_path / "out.tif").exists()
    work.finish(tmp_path / "out.tif")
    check(tmp_path / "out.tif", array, spec)


def test_short_writes_lose_nothing(tmp_path, monkeypatch):
    spec = spec_of(300, 300, 2, "int16", blocksize=64, nodata=0)
    array = class_map(spec)
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: write(fd, data[: 1 + len(data) // 2], at)
    )
    work = WorkFile.create(tmp_path / "w", spec, CHUNK)
    write_all(work, array)
    work.finish(tmp_path / "out.tif")
    check(tmp_path / "out.tif", array, spec)


def stopped_by(work, array, output, layout):
    """Write a file; what stopped it, or None."""
    try:
        write_all(work, array)
        work.finish(output, layout)
    except OSError as error:
        return error
    return None


@pytest.mark.parametrize("layout", ["strict", "append"])
def test_a_write_that_never_ends_is_an_error_wherever_it_happens(tmp_path, monkeypatch, layout):
    """Of each write in turn the device takes half, and then no more."""
    spec = spec_of(200, 200, 2, "float32", blocksize=64, nodata=0)
    array = class_map(spec)
    write, calls = os.pwrite, [0]
    for fails_at in itertools.count(step=5):

        def half(fd, data, at, fails_at=fails_at):
            calls[0] += 1
            if calls[0] <= fails_at:
                return write(fd, data, at)
            return write(fd, data[: len(data) // 2], at) if calls[0] == fails_at + 1 else 0

        work = WorkFile.create(tmp_path / "w", spec, (128, 128))
        calls[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", half)
            error = stopped_by(work, array, tmp_path / "out.tif", layout)
        if error is None:
            break
        assert error.errno == errno.EIO
        assert error.filename in (work.path, f"{tmp_path / 'out.tif'}.tmp")
        assert "left unwritten" in str(error)
        assert not (tmp_path / "out.tif").exists()
        write_all(work, array, np.flatnonzero(~work.done()))
        work.finish(tmp_path / "out.tif", layout)
        check(tmp_path / "out.tif", array, spec)
        (tmp_path / "out.tif").unlink()
    check(tmp_path / "out.tif", array, spec)
    assert fails_at > 15


def test_what_the_disk_did_not_take_is_not_committed(tmp_path, monkeypatch):
    """Network file systems take writes, and tell only later that there was no room."""
    spec = spec_of(300, 300, blocksize=64, nodata=0)
    array = noise_of(spec)
    work = WorkFile.create(tmp_path / "w", spec, CHUNK)

    def fail(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left") as caught:
            work.append(encode_chunk(spec, array[:, :256, :256], 0, 0, work.levels), sync=True)
        assert caught.value.filename == work.path
        assert not work.done().any()
        write_all(work, array)  # without asking the disk
        with pytest.raises(OSError, match="No space left") as caught:
            work.finish(tmp_path / "out.tif")
        assert caught.value.filename == f"{tmp_path / 'out.tif'}.tmp"
        assert os.listdir(tmp_path) == ["w"]
    work.finish(tmp_path / "out.tif")
    check(tmp_path / "out.tif", array, spec)


def test_a_work_file_that_lost_its_end_is_an_error(tmp_path):
    spec = spec_of(300, 300, blocksize=64, nodata=0)
    work = WorkFile.create(tmp_path / "w", spec, CHUNK)
    write_all(work, noise_of(spec))
    os.truncate(work.path, os.path.getsize(work.path) - 10)
    with pytest.raises(OSError, match="ends before byte") as caught:
        work.finish(tmp_path / "out.tif")
    assert caught.value.filename == work.path
    assert os.listdir(tmp_path) == ["w"]


def test_a_chunk_that_comes_twice_at_once_is_one_of_them(tmp_path):
    """Two workers may be given one chunk: the index never mixes what they append."""
    spec = spec_of(256, 256, blocksize=64, nodata=0)
    work = WorkFile.create(tmp_path / "w", spec, CHUNK)
    arrays = [class_map(spec, seed) for seed in (1, 2)]
    encoded = [encode_chunk(spec, array, 0, 0, work.levels) for array in arrays]
    for _ in range(20):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work.append, encoded))
        with rasterio.open(work.path) as dataset:
            read = dataset.read()
        assert any(np.array_equal(read, array) for array in arrays)
