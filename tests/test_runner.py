"""Runs: streaming, resume, failures, refusals, reports."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import rasterio
import torch
from rio_cogeo import cog_validate

import daskinfer as di
from conftest import N3, Pixel, noise, seeded, write_raster
from daskinfer.cog import WorkFile
from daskinfer.dispatch import MOST
from daskinfer.ledger import Ledger, differences, read_ledger
from daskinfer.monitor import ChunkDone, ChunkFailed, ChunkRetried, RunFinished, RunStarted
from daskinfer.raster import Raster
from oracle import assert_classes, whole

JOB = {"tile": 32, "chunk": 32}


class Poisoned(torch.nn.Module):
    """Raises where it sees the number 13."""

    def forward(self, x):
        if (x == 13).any():
            raise ArithmeticError("thirteen")
        return torch.cat([x, x + 1], dim=1)


class Deadly(torch.nn.Module):
    """Ends its process where it sees the number 13."""

    def forward(self, x):
        if (x == 13).any():
            os._exit(1)
        return torch.cat([x, x + 1], dim=1)


def poisoned_raster(tmp_path, size=96):
    raw = np.ones((1, size, size), np.uint8)
    raw[0, 40, 40] = 13
    return write_raster(tmp_path / "scene.tif", raw)


def read(path):
    with rasterio.open(path) as dataset:
        return dataset.read()


def test_the_output_is_a_strict_cog_with_classes_and_colours(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 700, 600))
    model = di.load_model(
        seeded(N3),
        scale=1e-4,
        class_names=["a", "b", "c"],
        class_colors=["#ff0000", "#00ff00", "#0000ff"],
    )
    di.run(source, model, tmp_path / "o.tif", chunk=256, client=one_worker)
    assert cog_validate(str(tmp_path / "o.tif"), strict=True, quiet=True)[0]
    with rasterio.open(tmp_path / "o.tif") as dataset, rasterio.open(source) as original:
        assert dataset.nodata == 255
        assert dataset.dtypes == ("uint8",)
        assert dataset.crs == original.crs
        assert dataset.transform == original.transform
        assert dataset.colormap(1)[1] == (0, 255, 0, 255)
        assert dataset.tags()["CLASS_NAMES"] == '["a", "b", "c"]'
        assert "FAILED_CHUNKS" not in dataset.tags()
        assert dataset.overviews(1) == [2, 4]
        assert dataset.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.tif", "scene.tif"]


def test_events_tell_every_chunk_once(tmp_path, one_worker):
    events = []
    source = write_raster(tmp_path / "scene.tif", noise(2, 100, 100))
    report = di.run(
        source, seeded(N3), tmp_path / "o.tif", client=one_worker, callbacks=[events.append], **JOB
    )
    assert isinstance(events[0], RunStarted)
    assert isinstance(events[-1], RunFinished)
    done = [event.chunk for event in events if isinstance(event, ChunkDone)]
    assert sorted(done) == list(range(report.chunks))
    assert sum(event.tiles for event in events if isinstance(event, ChunkDone)) == report.tiles


def test_a_bounded_number_of_chunks_is_in_flight(tmp_path, one_worker, monkeypatch):
    in_flight, peak, groups = set(), 0, []
    original = type(one_worker).map

    def counting(self, function, runs, numbers, **options):
        nonlocal peak
        groups.extend(numbers)
        in_flight.update(number for group in numbers for number in group)
        peak = max(peak, len(in_flight))
        return original(self, function, runs, numbers, **options)

    def count(event):
        if isinstance(event, ChunkDone):
            in_flight.discard(event.chunk)

    monkeypatch.setattr(type(one_worker), "map", counting)
    source = write_raster(tmp_path / "scene.tif", noise(2, 640, 640))
    report = di.run(
        source, seeded(N3), tmp_path / "o.tif", client=one_worker, callbacks=[count], **JOB
    )
    assert report.chunks == 400
    # A task that takes long hands chunks back, which are submitted again.
    assert {number for group in groups for number in group} == set(range(400))
    assert not in_flight
    threads = sum(one_worker.nthreads().values())
    largest = max(map(len, groups))
    assert 1 < largest <= MOST
    assert peak <= 2 * threads * largest


def test_no_pixel_and_no_weight_travels_with_a_task(tmp_path, two_workers, monkeypatch):
    import cloudpickle

    sizes = []
    original = type(two_workers).map

    def measuring(self, function, *iterables, **options):
        sizes.append(len(cloudpickle.dumps((function, iterables))) / len(iterables[0]))
        return original(self, function, *iterables, **options)

    monkeypatch.setattr(type(two_workers), "map", measuring)
    big = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.Identity())
    big.register_buffer("ballast", torch.zeros(2_000_000))
    source = write_raster(tmp_path / "scene.tif", noise(2, 100, 100))
    di.run(source, big, tmp_path / "o.tif", client=two_workers, **JOB)
    assert max(sizes) < 1000


def test_a_model_defined_in_a_test_runs_in_other_processes(tmp_path, two_workers):
    class Here(torch.nn.Module):
        def forward(self, x):
            return torch.cat([x, 2 * x], dim=1)

    raw = noise(1, 70, 50, dtype="float32")
    source = write_raster(tmp_path / "scene.tif", raw)
    model = di.load_model(Here(), output="values")
    di.run(source, model, tmp_path / "o.tif", client=two_workers, **JOB)
    assert np.array_equal(read(tmp_path / "o.tif"), np.concatenate([raw, 2 * raw]))


def test_a_lazy_prediction_of_a_module_computes_in_other_processes(tmp_path, two_workers):
    raw = noise(2, 100, 90)
    source = write_raster(tmp_path / "scene.tif", raw)
    lazy = di.predict(di.open_raster(source), seeded(N3), **JOB)
    classes = two_workers.compute(lazy.data).result()
    assert_classes(classes[0], whole(seeded(N3), raw))


def test_a_failing_chunk_stops_the_run_and_says_where(tmp_path, one_worker):
    events = []
    with pytest.raises(di.InferenceError, match=r"\(32, 32, 32, 32\) failed on inproc") as caught:
        di.run(
            poisoned_raster(tmp_path),
            Poisoned(),
            tmp_path / "o.tif",
            client=one_worker,
            callbacks=[events.append],
            **JOB,
        )
    assert caught.value.window == (32, 32, 32, 32)
    assert caught.value.chunk == (1, 1)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert sum(isinstance(event, ChunkRetried) for event in events) == 2
    assert sum(isinstance(event, ChunkFailed) for event in events) == 1
    assert caught.value.worker.startswith("inproc://")
    assert not (tmp_path / "o.tif").exists()
    assert read_ledger(tmp_path / "o.tif.partial.jsonl")[1][0].window == (32, 32, 32, 32)


@pytest.mark.parametrize("layout", ["strict", "append"])
def test_a_failing_chunk_may_be_left_nodata_and_is_listed(tmp_path, one_worker, layout):
    report = di.run(
        poisoned_raster(tmp_path),
        Poisoned(),
        tmp_path / "o.tif",
        client=one_worker,
        on_error="nodata",
        layout=layout,
        **JOB,
    )
    assert not report.complete
    assert [failure.window for failure in report.failures] == [(32, 32, 32, 32)]
    assert "ArithmeticError: thirteen" in report.failures[0].error
    assert "INCOMPLETE" in repr(report)
    assert report.retries == 2
    expected = np.ones((1, 96, 96), np.uint8)
    expected[0, 32:64, 32:64] = 255
    assert np.array_equal(read(tmp_path / "o.tif"), expected)
    assert (tmp_path / "o.tif.failed.jsonl").exists()
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert dataset.tags()["FAILED_CHUNKS"] == "1"
    assert cog_validate(str(tmp_path / "o.tif"), strict=True, quiet=True)[0]


@pytest.mark.slow
def test_a_chunk_that_kills_its_worker_does_not_take_the_run_down(tmp_path):
    with di.cluster("processes", n_workers=2, dashboard_address=":0", set_as_default=False) as own:
        report = di.run(
            poisoned_raster(tmp_path, 64),
            Deadly(),
            tmp_path / "o.tif",
            client=own,
            on_error="nodata",
            **JOB,
        )
    assert [failure.window for failure in report.failures] == [(32, 32, 32, 32)]
    expected = np.ones((1, 64, 64), np.uint8)
    expected[0, 32:, 32:] = 255
    assert np.array_equal(read(tmp_path / "o.tif"), expected)


def test_a_rerun_computes_only_what_is_missing(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 224, 224))
    net = seeded(N3)
    plan = di.plan(source, net, tmp_path / "o.tif", **JOB)

    def stop(event):
        if isinstance(event, ChunkDone) and event.chunk >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        di.run(plan, client=one_worker, callbacks=[stop])
    with WorkFile.open(f"{plan.output}.partial", plan.cog, plan.inference.chunk) as work:
        done = int(work.done().sum())
    assert 1 <= done < 49
    report = di.run(plan, client=one_worker)
    assert report.resumed == done
    assert_classes(read(tmp_path / "o.tif")[0], whole(net, noise(2, 224, 224)))


def test_a_killed_run_leaves_what_is_done_and_goes_on(tmp_path):
    source = write_raster(tmp_path / "scene.tif", noise(2, 160, 160))
    script = textwrap.dedent(f"""
        import os, signal, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import daskinfer as di
        from conftest import N3, seeded
        from daskinfer.monitor import ChunkDone
        done = 0
        def kill(event):
            global done
            done += isinstance(event, ChunkDone)
            if done == 8:
                os.kill(os.getpid(), signal.SIGKILL)
        if __name__ == "__main__":
            client = di.cluster("local", dashboard_address=":0")
            di.run({source!r}, seeded(N3), {str(tmp_path / "o.tif")!r}, tile=32, chunk=32,
                   client=client, callbacks=[kill] if "kill" in sys.argv else [])
    """)
    (tmp_path / "job.py").write_text(script)
    job = [sys.executable, str(tmp_path / "job.py")]
    killed = subprocess.run([*job, "kill"], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not (tmp_path / "o.tif").exists()
    expected = whole(seeded(N3), noise(2, 160, 160))
    partial = read(tmp_path / "o.tif.partial")[0]
    written = partial != 255
    assert written.sum() >= 8 * 32 * 32
    assert (partial[written] == expected.argmax(axis=0)[written]).all()
    subprocess.run(job, capture_output=True, check=True)
    assert_classes(read(tmp_path / "o.tif")[0], expected)


def test_a_rerun_with_other_settings_is_refused_by_name(tmp_path, one_worker):
    source = poisoned_raster(tmp_path)
    with pytest.raises(di.InferenceError):
        di.run(source, Poisoned(), tmp_path / "o.tif", client=one_worker, **JOB)
    with pytest.raises(ValueError, match=r"tiling\.x\.tile: 32 then, 48 now"):
        di.run(source, Poisoned(), tmp_path / "o.tif", client=one_worker, tile=48, chunk=48)
    with pytest.raises(ValueError, match=r"model\.digest"):
        di.run(source, Deadly(), tmp_path / "o.tif", client=one_worker, **JOB)
    os.utime(source, (1, 1))
    with pytest.raises(ValueError, match="source: "):
        di.run(source, Poisoned(), tmp_path / "o.tif", client=one_worker, **JOB)


def test_overwrite_starts_again(tmp_path, one_worker):
    source = poisoned_raster(tmp_path)
    with pytest.raises(di.InferenceError):
        di.run(source, Poisoned(), tmp_path / "o.tif", client=one_worker, **JOB)
    model = di.load_model(Pixel(), output="values")
    report = di.run(source, model, tmp_path / "o.tif", client=one_worker, overwrite=True, **JOB)
    assert report.resumed == 0
    assert np.array_equal(read(tmp_path / "o.tif"), read(source))


def test_two_runs_on_one_output_do_not_meet(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 64, 64))
    errors = []

    def second(event):
        if isinstance(event, RunStarted):
            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join()

    def attempt():
        try:
            di.run(source, seeded(N3), tmp_path / "o.tif", client=one_worker, **JOB)
        except RuntimeError as error:
            errors.append(str(error))

    di.run(source, seeded(N3), tmp_path / "o.tif", client=one_worker, callbacks=[second], **JOB)
    assert len(errors) == 1
    assert "another run is writing this output" in errors[0]


def test_a_failed_write_fails_the_run_with_the_path(tmp_path, one_worker, monkeypatch):
    pwrite = os.pwrite

    def full(fd, data, at):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".partial"):
            raise OSError(28, "No space left on device")
        return pwrite(fd, data, at)

    source = write_raster(tmp_path / "scene.tif", noise(2, 64, 64))
    plan = di.plan(source, seeded(N3), tmp_path / "o.tif", **JOB)

    def break_disk(event):
        if isinstance(event, RunStarted):
            monkeypatch.setattr("os.pwrite", full)

    with pytest.raises(di.InferenceError, match=r"No space left.*o\.tif\.partial"):
        di.run(plan, client=one_worker, callbacks=[break_disk])
    assert not (tmp_path / "o.tif").exists()


def test_nodata_is_masked_and_empty_tiles_are_not_run(tmp_path, one_worker):
    raw = noise(1, 96, 96, dtype="int16") + 1
    raw[:, :64, :64] = -1
    raw[:, 80, 80] = -1
    source = write_raster(tmp_path / "scene.tif", raw, nodata=-1)
    net = torch.nn.Conv2d(1, 4, 1)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    report = di.run(source, net, tmp_path / "o.tif", client=one_worker, **JOB)
    assert np.array_equal(read(tmp_path / "o.tif"), np.where(raw == -1, 255, 3))
    assert report.tiles == 9 - 4


def test_non_finite_scores_become_nodata_and_are_counted(tmp_path, one_worker):
    class Broken(torch.nn.Module):
        def forward(self, x):
            return torch.cat([x, torch.where(x == 7, torch.nan, -x)], dim=1)

    raw = np.ones((1, 64, 64), np.float32)
    raw[0, 10, 10] = raw[0, 50, 3] = 7
    source = write_raster(tmp_path / "scene.tif", raw)
    report = di.run(source, Broken(), tmp_path / "o.tif", client=one_worker, **JOB)
    assert report.nonfinite == 2
    assert np.array_equal(read(tmp_path / "o.tif"), np.where(raw == 7, 255, 0))


def test_each_tile_is_run_once_with_overviews_on(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 512, 512))
    net = torch.nn.Conv2d(2, 3, 1)
    report = di.run(
        source, net, tmp_path / "o.tif", tile=128, blocksize=64, chunk=256, client=one_worker
    )
    assert report.tiles == 16
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert dataset.overviews(1) == [2, 4, 8]


def test_the_current_client_is_used_and_left_open(tmp_path):
    source = write_raster(tmp_path / "scene.tif", noise(2, 40, 40))
    with di.cluster("local", dashboard_address=":0") as client:
        di.run(source, seeded(N3), tmp_path / "o.tif")
        assert client.status == "running"


def test_threads_and_models_are_gone_after_a_run(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 40, 40))
    di.run(source, seeded(N3), tmp_path / "o.tif", client=one_worker)
    names = [thread.name for thread in threading.enumerate()]
    from daskinfer import infer, station

    assert not station._stations
    held = [key for key in infer._actors if key.model.digest == di.load_model(seeded(N3)).digest]
    assert not held
    assert names.count("daskinfer-device") == len(infer._actors)


def test_no_full_collection_of_garbage_stops_the_device(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 40, 40))
    frozen, before = [], len(gc.get_objects())

    def look(event):
        if isinstance(event, ChunkDone):
            frozen.append(gc.get_freeze_count())

    di.run(source, seeded(N3), tmp_path / "o.tif", client=one_worker, callbacks=[look], **JOB)
    assert min(frozen) > before / 2
    assert gc.get_freeze_count() == 0


def test_a_torn_ledger_line_is_ignored(tmp_path):
    path = tmp_path / "o.jsonl"
    with Ledger(path) as ledger:
        ledger.begin({"tile": 32})
    with path.open("a") as file:
        file.write('{"failed": {"chunk": 3, "wind')
    with Ledger(path) as ledger:
        ledger.go_on({"tile": 32}, "o.tif.partial")
        assert ledger.failures() == ()
    assert read_ledger(path)[0] == {"tile": 32}


def test_a_work_file_without_its_ledger_is_refused(tmp_path, one_worker):
    source = poisoned_raster(tmp_path)
    with pytest.raises(di.InferenceError):
        di.run(source, Poisoned(), tmp_path / "o.tif", client=one_worker, **JOB)
    (tmp_path / "o.tif.partial.jsonl").unlink()
    with pytest.raises(ValueError, match="has no ledger"):
        di.run(source, Poisoned(), tmp_path / "o.tif", client=one_worker, **JOB)


def test_a_source_that_changed_after_planning_is_refused(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 64, 64))
    plan = di.plan(source, seeded(N3), tmp_path / "o.tif", **JOB)
    write_raster(tmp_path / "scene.tif", noise(2, 64, 64, seed=1))
    os.utime(source, ns=(1, 1))
    with pytest.raises(ValueError, match="source has changed"):
        di.run(plan, client=one_worker)


def test_running_a_plan_again_does_not_replace_its_output(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(2, 64, 64))
    plan = di.plan(source, seeded(N3), tmp_path / "o.tif", **JOB)
    di.run(plan, client=one_worker)
    with pytest.raises(FileExistsError):
        di.run(plan, client=one_worker)


@pytest.mark.parametrize("options", [{"client": "here"}, {"callbacks": print}, {"callbacks": [5]}])
def test_wrong_types_are_refused_before_a_file_is_made(tmp_path, options):
    source = write_raster(tmp_path / "scene.tif", noise(2, 64, 64))
    with pytest.raises(TypeError):
        di.run(source, seeded(N3), tmp_path / "o.tif", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["scene.tif"]


def test_a_model_is_loaded_once_per_worker_and_not_per_chunk(tmp_path, two_workers, monkeypatch):
    log = tmp_path / "loads"
    (tmp_path / "counted_nets.py").write_text(
        textwrap.dedent(f"""
            import os, torch
            def make():
                with open({str(log)!r}, "a") as file:
                    file.write(f"{{os.getpid()}}\\n")
                return torch.nn.Conv2d(2, 2, 1)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    two_workers.run(lambda folder: sys.path.insert(0, folder), str(tmp_path))
    source = write_raster(tmp_path / "scene.tif", noise(2, 160, 160))
    model = di.load_model("counted_nets:make", output="values")
    lazy = di.predict(di.open_raster(source), model, **JOB)
    here = log.read_text().split()
    log.write_text("")
    two_workers.compute(lazy.data).result()
    loads = log.read_text().split()
    assert 1 <= len(loads) <= 2
    assert len(set(loads)) == len(loads)
    assert set(loads).isdisjoint(here)


def test_differences_name_settings_with_both_values():
    earlier = {"a": 1, "b": {"c": [1, 2]}}
    assert differences(earlier, {"a": 1, "b": {"c": [1, 3]}, "d": 0}) == [
        "b.c: [1, 2] then, [1, 3] now",
        "d: None then, 0 now",
    ]


def test_reads_do_not_run_ahead_of_what_is_written(tmp_path, one_worker, monkeypatch):
    """distributed 6360: instant reads and a slow model must not fill the memory with tiles."""
    lock, ahead, largest = threading.Lock(), 0, 0

    def counted(original, step):
        def count(self, *arguments, **options):
            nonlocal ahead, largest
            with lock:
                ahead += step
                largest = max(largest, ahead)
            return original(self, *arguments, **options)

        return count

    class Slow(Pixel):
        def forward(self, x):
            time.sleep(0.002)
            return x

    monkeypatch.setattr(Raster, "read", counted(Raster.read, 1))
    monkeypatch.setattr(WorkFile, "append", counted(WorkFile.append, -1))
    source = write_raster(tmp_path / "scene.tif", noise(1, 640, 640, dtype="float32"))
    model = di.load_model(Slow(), output="values")
    report = di.run(source, model, tmp_path / "o.tif", client=one_worker, batch_size=1, **JOB)
    assert report.tiles == 400
    # A tile in each thread, and those read ahead.
    assert 1 <= largest <= sum(one_worker.nthreads().values()) + 16
