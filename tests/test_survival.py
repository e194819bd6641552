"""Runs whose parts are killed: nothing finished is lost, nothing is computed twice for nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import rasterio

import daskinfer as di
from daskinfer.cog import WorkFile
from daskinfer.monitor import ChunkDone
from survivors import After, Job

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
THREADS = 3  # of a local cluster


def script(folder, **told):
    """The command of a run in a process of its own."""
    told = {"folder": str(folder), "after": [], "signal": 0} | told
    return [sys.executable, str(HERE / "survivors.py"), json.dumps(told)]


def ended(command):
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=ENVIRONMENT,
        start_new_session=True,
    )  # fmt: skip


@contextlib.contextmanager
def processes(workers=2, **options):
    options = {"threads_per_worker": 1, "dashboard_address": ":0"} | options
    with di.cluster("processes", n_workers=workers, set_as_default=False, **options) as client:
        yield client


# --- workers --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 2])
def test_workers_are_killed_in_turn(tmp_path, kills):
    job = Job(tmp_path).prepare()
    done, killed, before = set(), [], set()

    def kill(event):
        nonlocal before
        other = [pid for _, pid in pids if pid not in killed]
        os.kill(other[0], signal.SIGKILL)
        killed.append(other[0])
        before = set(done)

    def note(event):
        if isinstance(event, ChunkDone):
            done.add(event.chunk)

    with processes() as client:
        pids = sorted(client.run(os.getpid).items())
        callbacks = [note, *(After(40 + 60 * n, kill) for n in range(kills))]
        report = job.run(client=client, callbacks=callbacks)
    assert len(killed) == kills
    assert report.complete
    assert len(done) == report.chunks == 256
    computed = job.computed()
    assert max(computed.values()) <= 1 + kills
    # Only what was on its way when a worker died is computed again.
    assert all(computed[chunk] == 1 for chunk in before) or kills > 1
    assert sum(computed.values()) < 1.5 * 256
    job.assert_finished()


@pytest.mark.slow
def test_workers_that_join_help_and_retired_ones_drain(tmp_path):
    job = Job(tmp_path, chunks=24).prepare()
    workers, joined = set(), []

    def note(event):
        if isinstance(event, ChunkDone):
            workers.add(event.worker)

    with processes(workers=1) as client:
        first = set(client.nthreads())

        def join(event):
            client.cluster.scale(2)
            client.wait_for_workers(2)

        def retire(event):
            joined.extend(set(client.nthreads()) - first)
            client.retire_workers(list(first))

        report = job.run(client=client, callbacks=[note, After(20, join), After(300, retire)])
    assert report.complete
    assert len(joined) == 1
    assert set(joined) < workers
    assert max(job.computed().values()) <= 2
    job.assert_finished()


@pytest.mark.slow
def test_adaptive_clusters_work(tmp_path):
    job = Job(tmp_path).prepare()
    with processes(workers=0) as client:
        client.cluster.adapt(minimum=0, maximum=2, interval="100ms")
        report = job.run(client=client)
    assert report.complete
    job.assert_finished()


@pytest.mark.slow
def test_a_run_without_workers_says_that_it_waits(tmp_path, monkeypatch):
    job = Job(tmp_path).prepare()
    told = []
    with processes(workers=1) as client, warnings.catch_warnings():
        warnings.simplefilter("always")

        def join(message, *_):
            told.append(str(message))
            client.cluster.scale(1)

        monkeypatch.setattr(warnings, "showwarning", join)
        monkeypatch.setattr("daskinfer.dispatch._ALONE", 1.0)
        report = job.run(client=client, callbacks=[After(30, lambda _: client.cluster.scale(0))])
    assert report.complete
    assert [text for text in told if "the run waits until one joins" in text] != []
    job.assert_finished()


# --- the client -----------------------------------------------------------------------------------

_MOMENTS = random.Random(7).sample(range(1, 200), 5)


@pytest.mark.slow
@pytest.mark.parametrize("moment", _MOMENTS)
def test_a_killed_client_loses_what_was_in_flight(tmp_path, moment):
    job = Job(tmp_path).prepare()
    killed = ended(script(tmp_path, after=[moment], signal=signal.SIGKILL))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not Path(job.output).exists()
    written = job.written()
    first = job.computed()
    assert len(written) >= moment
    assert len(set(first) - written) <= THREADS
    assert ended(script(tmp_path)).returncode == 0
    total = job.computed()
    assert all(total[chunk] == 1 for chunk in written)
    assert sum(total.values()) <= 256 + THREADS
    job.assert_finished()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_a_stopped_client_takes_what_is_nearly_done(tmp_path, number, code):
    job = Job(tmp_path).prepare()
    stopped = ended(script(tmp_path, after=[30], signal=number))
    assert stopped.returncode == code, stopped.stderr
    written = job.written()
    assert 30 <= len(written) < 256
    # Nothing was cut off: what went through the model is in the file.
    assert set(job.computed()) == written
    assert ended(script(tmp_path)).returncode == 0
    assert set(job.computed().values()) == {1}
    job.assert_finished()


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_worker_processes_too(tmp_path):
    job = Job(tmp_path).prepare()
    told = {"cluster": "processes", "group": True}
    stopped = ended(script(tmp_path, after=[30], signal=signal.SIGINT, **told))
    assert stopped.returncode == -signal.SIGINT, stopped.stderr
    assert set(job.computed()) == job.written()
    assert ended(script(tmp_path)).returncode == 0
    assert set(job.computed().values()) == {1}
    job.assert_finished()


# --- the scheduler --------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster_of_processes(folder):
    """A scheduler and two workers, as a user starts them; yields its address and the processes."""
    file = folder / "scheduler.json"
    with contextlib.ExitStack() as stack:
        every = []

        def start(name, *arguments):
            command = [
                sys.executable,
                "-m",
                "dask",
                name,
                *arguments,
                "--scheduler-file",
                str(file),
            ]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen(command, env=ENVIRONMENT, **quiet, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(kill_group, process)
            every.append(process)

        start("scheduler", "--port", "0", "--dashboard-address", ":0", "--host", "127.0.0.1")
        for _ in range(2):
            start("worker", "--nthreads", "1", "--dashboard-address", ":0")
        from distributed import Client

        with Client(scheduler_file=str(file), set_as_default=False) as client:
            client.wait_for_workers(2)
            address = client.scheduler.address
        yield address, every


def kill_group(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
def test_a_killed_scheduler_ends_the_run_which_goes_on_later(tmp_path, everything):
    job = Job(tmp_path).prepare()
    with cluster_of_processes(tmp_path) as (address, every):
        command = script(tmp_path, cluster=address)
        client = subprocess.Popen(
            command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        wait_for_lines(job.log, 40, client)
        for process in [*every, client] if everything else every[:1]:
            (process.kill if process is client else lambda p=process: kill_group(p))()
        error = client.communicate(timeout=60)[1]
        assert client.returncode == (-signal.SIGKILL if everything else 1), error
        assert everything or "the cluster was lost" in error
    written = job.written()
    assert 1 <= len(written) < 256
    assert ended(script(tmp_path)).returncode == 0
    assert sum(job.computed().values()) <= 256 + 2 * 1 + 2
    job.assert_finished()


def wait_for_lines(path, count, writer):
    """Until a process has written so many lines; it is to be at work until then."""
    while not path.exists() or path.read_text().count("\n") < count:
        assert writer.poll() is None, writer.communicate()[1]
        os.sched_yield()


# --- the disk -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["raise", "nodata"])
def test_a_full_disk_stops_the_run_whatever_becomes_of_bad_chunks(tmp_path, on_error):
    job = Job(tmp_path).prepare()
    full = ended(script(tmp_path, room=5_000, on_error=on_error))
    assert full.returncode == 1
    assert "the output cannot be written" in full.stderr
    assert "o.tif.partial" in full.stderr
    assert not Path(job.output).exists()
    written = job.written()
    assert len(written) < 256
    assert ended(script(tmp_path, on_error=on_error)).returncode == 0
    assert all(job.computed()[chunk] == 1 for chunk in written)
    job.assert_finished()


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 4 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a disk")
    yield folder
    # Lazily: threads of the cluster keep their handles of the source.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_run_goes_on_once_a_full_disk_has_room_again(tmp_path, small_disk, one_worker):
    job = Job(small_disk).prepare()
    job.log = tmp_path / "log"
    filler = small_disk / "filler"

    def fill(event):
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    with pytest.raises(di.InferenceError, match=r"cannot be written.*No space left.*partial"):
        job.run(client=one_worker, callbacks=[After(20, fill)])
    written = job.written()
    assert 20 <= len(written) < 256
    filler.unlink()
    assert job.run(client=one_worker).resumed == len(written)
    assert all(job.computed()[chunk] == 1 for chunk in written)
    job.assert_finished()


def test_a_chunk_whose_overview_found_the_disk_full_is_kept(tmp_path, monkeypatch, one_worker):
    job, place = Job(tmp_path).prepare(), WorkFile._place

    def full(self, encoded):
        if encoded.parts[0].level > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        return place(self, encoded)

    with monkeypatch.context() as patch:
        patch.setattr(WorkFile, "_place", full)
        with pytest.raises(di.InferenceError, match=r"cannot be written.*No space left.*partial"):
            job.run(client=one_worker)
    written = job.written()
    assert len(written) >= 4
    assert job.run(client=one_worker).resumed == len(written)
    assert all(job.computed()[chunk] == 1 for chunk in written)
    job.assert_finished()


# --- bad blocks and bad models --------------------------------------------------------------------


@pytest.mark.slow
def test_a_chunk_that_kills_its_worker_is_named_and_the_cluster_lives_on(tmp_path):
    from test_runner import Deadly, poisoned_raster

    source = poisoned_raster(tmp_path, 64)
    job = {"tile": 32, "chunk": 32}
    with processes() as client:
        with pytest.raises(di.InferenceError, match="KilledWorker") as caught:
            di.run(source, Deadly(), tmp_path / "o.tif", client=client, **job)
        assert caught.value.window == (32, 32, 32, 32)
        other = Job(tmp_path / "other", chunks=3)
        other.folder.mkdir()
        other.prepare().run(client=client)
    other.assert_finished()


def corrupt(path, row, col):
    """Overwrite the middle of a block of a tiled file."""
    with rasterio.open(path) as dataset:
        offset, size = (
            int(dataset.get_tag_item(f"BLOCK_{what}_{col}_{row}", "TIFF", bidx=1))
            for what in ("OFFSET", "SIZE")
        )
    with open(path, "r+b") as file:
        file.seek(offset + size // 3)
        file.write(b"\xff" * (size // 3))


@pytest.mark.parametrize("on_error", ["raise", "nodata"])
def test_a_corrupt_block_fails_its_chunk_alone(tmp_path, one_worker, on_error):
    from conftest import Pixel, noise, write_raster

    raw = noise(1, 512, 512)
    tiled = {"tiled": True, "blockxsize": 128, "blockysize": 128, "compress": "deflate"}
    source = write_raster(tmp_path / "scene.tif", raw, **tiled)
    corrupt(source, 1, 2)
    model = di.load_model(Pixel(), output="values")
    options = {"tile": 128, "chunk": 128, "client": one_worker, "on_error": on_error}
    if on_error == "raise":
        # What GDAL says of the block is in the cause.
        with pytest.raises(di.InferenceError, match=r"failed on.*<-.*offset") as caught:
            di.run(source, model, tmp_path / "o.tif", **options)
        assert caught.value.window == (128, 256, 128, 128)
        return
    report = di.run(source, model, tmp_path / "o.tif", **options)
    assert [failure.window for failure in report.failures] == [(128, 256, 128, 128)]
    expected = raw.astype(np.float32)
    expected[:, 128:256, 256:384] = np.nan
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert np.array_equal(dataset.read(), expected, equal_nan=True)


def test_a_chunk_that_failed_once_and_is_mended_is_not_listed_again(tmp_path, one_worker):
    from daskinfer.ledger import Failure, read_ledger
    from daskinfer.outputs import Outputs

    job = Job(tmp_path, chunks=3).prepare()

    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(client=one_worker, callbacks=[After(1, stop)])
    plan = di.plan(
        job.source, di.load_model(_logged(job), output="values"), job.output,
        tile=32, chunk=32, batch_size=1,
    )  # fmt: skip
    with Outputs.prepare(plan) as outputs:
        failure = Failure(4, (32, 32, 32, 32), "it failed", "tcp://there")
        outputs.ledger.failed(failure)
        outputs.leave_nodata(failure)
    assert read_ledger(f"{job.output}.partial.jsonl")[1] == (failure,)
    seen = []

    def look(event):
        if isinstance(event, ChunkDone) and event.chunk == 4:
            seen.append(read_ledger(f"{job.output}.partial.jsonl")[1])

    assert job.run(client=one_worker, callbacks=[look]).complete
    assert seen == [()]
    job.assert_finished()


def _logged(job):
    from survivors import Logged

    return Logged(job.log, job.seconds)


def test_the_command_line_tells_a_walltime_from_a_failure(monkeypatch, capsys):
    from daskinfer.cli import main

    def terminated(arguments):
        raise SystemExit(143)

    monkeypatch.setattr("daskinfer.cli._run", terminated)
    assert main(["run", "scene.tif", "model.pt2", "o.tif"]) == 143
    assert "goes on from here" in capsys.readouterr().err
