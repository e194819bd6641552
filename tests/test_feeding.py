"""From readers to device in a run: back-pressure, placement, one shape, one model, a timeline."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import ClassVar

import cloudpickle
import numpy as np
import pytest
import rasterio
import torch
from distributed import Client, Scheduler, SpecCluster, Worker

import daskinfer as di
from conftest import N3, noise, seeded, write_raster
from daskinfer.cog import WorkFile
from daskinfer.device import Device
from daskinfer.monitor import ChunkDone
from daskinfer.raster import Raster
from oracle import whole

HANG = 30.0
JOB = {"tile": 40, "halo": 4, "chunk": 64, "batch_size": 4}


@dataclass(frozen=True)
class Makes:
    """Makes a device of a class here; a value, as `plan` wants it."""

    kind: type

    def __call__(self, inference):
        return self.kind()


class Zeros(Device):
    """Says class 0 everywhere and notes what it was given."""

    shapes: ClassVar[list] = []
    running = 0
    most = 0
    lock = threading.Lock()

    def forward(self, loaded):
        with self.lock:
            Zeros.running += 1
            Zeros.most = max(Zeros.most, Zeros.running)
        batch, _ = loaded
        Zeros.shapes.append(batch.shape)
        with self.lock:
            Zeros.running -= 1
        return np.zeros((len(batch), 1, *batch.shape[2:]), np.uint8)


@pytest.fixture
def zeros():
    Zeros.shapes, Zeros.running, Zeros.most = [], 0, 0
    return Makes(Zeros)


@pytest.fixture
def mixed_workers():
    """One worker with a GPU, one without, in this process."""
    options = {"nthreads": 4, "dashboard": False}
    workers = {
        "a": {"cls": Worker, "options": options | {"resources": {"GPU": 1}}},
        "b": {"cls": Worker, "options": options},
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "port": 0}}
    with (
        SpecCluster(workers=workers, scheduler=scheduler, silence_logs=40) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2)
        yield client


def scene(tmp_path, size=200, bands=2):
    return write_raster(tmp_path / "scene.tif", noise(bands, size, size))


def test_chunks_go_to_workers_with_a_gpu_only_and_one_batch_runs_at_once(
    tmp_path, mixed_workers, zeros
):
    events = []
    report = di.run(
        scene(tmp_path), seeded(N3), tmp_path / "o.tif",
        client=mixed_workers, callbacks=[events.append], device=zeros, **JOB,
    )  # fmt: skip
    addresses = {
        worker["name"]: address
        for address, worker in mixed_workers.scheduler_info()["workers"].items()
    }
    assert {event.worker for event in events if isinstance(event, ChunkDone)} == {addresses["a"]}
    assert Zeros.most == 1
    assert report.complete


def test_a_run_on_cpus_uses_the_workers_without_a_gpu_too(tmp_path, mixed_workers):
    events = []
    di.run(
        scene(tmp_path), seeded(N3), tmp_path / "o.tif",
        client=mixed_workers, callbacks=[events.append], device="cpu", **JOB,
    )  # fmt: skip
    assert len({event.worker for event in events if isinstance(event, ChunkDone)}) == 2


def test_all_tiles_of_a_run_have_one_shape(tmp_path, one_worker, zeros):
    di.run(
        scene(tmp_path, 70), seeded(N3), tmp_path / "o.tif",
        client=one_worker, device=zeros, **JOB,
    )  # fmt: skip
    assert {shape[1:] for shape in Zeros.shapes} == {(2, 40, 40)}
    assert max(shape[0] for shape in Zeros.shapes) <= 4


def test_batches_of_a_reproducible_run_have_one_size_too(tmp_path, one_worker, zeros):
    di.run(
        scene(tmp_path, 70), seeded(N3), tmp_path / "o.tif",
        client=one_worker, device=zeros, reproducible=True, **JOB,
    )  # fmt: skip
    assert set(Zeros.shapes) == {(4, 2, 40, 40)}


def test_reads_run_ahead_of_writes_by_no_more_than_the_threads_can_hold(
    tmp_path, one_worker, zeros, monkeypatch
):
    lock, ahead, most = threading.Lock(), 0, 0
    read, append = Raster.read, WorkFile.append

    def counted(self, window):
        nonlocal ahead, most
        with lock:
            ahead += 1
            most = max(most, ahead)
        return read(self, window)

    def written(self, encoded):
        nonlocal ahead
        with lock:
            # Not the overviews that are made at the end.
            ahead -= 4 * (encoded.parts[0].level == 0)
        append(self, encoded)

    monkeypatch.setattr(Raster, "read", counted)
    monkeypatch.setattr(WorkFile, "append", written)
    report = di.run(
        scene(tmp_path, 640), seeded(N3), tmp_path / "o.tif",
        client=one_worker, device=zeros, **JOB,
    )  # fmt: skip
    assert report.tiles == 400
    assert report.chunks == 100
    # Chunks at work, of 2 x 2 tiles each, and what is read ahead of them.
    assert most <= sum(one_worker.nthreads().values()) * 4 + 16
    assert ahead == 0


class Held(Device):
    """Runs its first batch only when a later chunk is being read, and the reads of the others
    only once that batch is on the device: proof that one runs beside the other.
    """

    reading = threading.Event()
    running = threading.Event()

    def forward(self, loaded):
        Held.running.set()
        assert Held.reading.wait(HANG)
        return np.zeros((len(loaded[0]), 1, *loaded[0].shape[2:]), np.uint8)


def test_the_trace_shows_that_a_batch_runs_while_a_later_chunk_is_read(
    tmp_path, one_worker, monkeypatch
):
    Held.reading.clear()
    Held.running.clear()
    read = Raster.read

    def telling(self, window):
        if window.cols.start > 50:
            assert Held.running.wait(HANG)
            Held.reading.set()
        return read(self, window)

    monkeypatch.setattr(Raster, "read", telling)
    path = tmp_path / "trace.json"
    report = di.run(
        scene(tmp_path), seeded(N3), tmp_path / "o.tif",
        client=one_worker, device=Makes(Held), trace=path, **JOB,
    )  # fmt: skip
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in events)
    by_stage = {}
    for event in events:
        by_stage.setdefault(event["name"], []).append(event)
    assert len(by_stage["read"]) == report.tiles
    for stage in ("results", "stitch", "encode", "append"):
        assert sorted(e["args"]["chunk"] for e in by_stage[stage]) == list(range(report.chunks))
    batches = {event["args"]["batch"]: event for event in by_stage["forward"]}
    assert sum(event["args"]["tiles"] for event in batches.values()) == report.tiles
    overlapping = [
        (batch["args"]["batch"], later["args"]["chunk"])
        for batch in batches.values()
        for later in by_stage["read"]
        if later["args"]["chunk"] > max(batch["args"]["chunks"])
        and batch["ts"] < later["ts"] + later["dur"]
        and later["ts"] < batch["ts"] + batch["dur"]
    ]
    assert overlapping


class Small(Device):
    """Has memory for two tiles."""

    def forward(self, loaded):
        if len(loaded[0]) > 2:
            raise MemoryError("two fit")
        return np.zeros((len(loaded[0]), 1, *loaded[0].shape[2:]), np.uint8)


class Tiny(Small):
    """Has memory for none."""

    def forward(self, loaded):
        raise MemoryError("none fits")


def test_a_device_short_of_memory_gets_smaller_batches_and_the_report_says_so(tmp_path, one_worker):
    report = di.run(
        scene(tmp_path), seeded(N3), tmp_path / "o.tif",
        client=one_worker, device=Makes(Small), **JOB | {"batch_size": 8},
    )  # fmt: skip
    assert report.complete
    assert report.load.batch_size == 2
    assert any("batch_size=2" in note for note in report.diagnosis)
    assert "short of memory" in repr(report)


def test_a_device_without_memory_for_one_tile_fails_the_run_with_advice(tmp_path, one_worker):
    with pytest.raises(di.InferenceError, match="pass a smaller tile="):
        di.run(
            scene(tmp_path), seeded(N3), tmp_path / "o.tif",
            client=one_worker, device=Makes(Tiny), **JOB,
        )  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_results_agree_for_all_batch_sizes(tmp_path, one_worker, batch_size):

    source = scene(tmp_path)
    net = seeded(N3)
    model = di.load_model(net, scale=1e-4, output="values")
    di.run(source, model, tmp_path / "o.tif", client=one_worker, **JOB | {"batch_size": batch_size})
    with rasterio.open(tmp_path / "o.tif") as dataset, rasterio.open(source) as original:
        expected = whole(net, original.read(), scale=1e-4)
        np.testing.assert_allclose(dataset.read(), expected, atol=1e-5, rtol=0)


def test_reproducible_runs_are_equal_bit_for_bit_whatever_the_workers(
    tmp_path, one_worker, two_workers
):

    source = scene(tmp_path)
    model = di.load_model(seeded(N3), scale=1e-4, output="values")
    results = []
    for name, client in (("one", one_worker), ("two", two_workers)):
        path = tmp_path / f"{name}.tif"
        di.run(source, model, path, client=client, reproducible=True, **JOB)
        with rasterio.open(path) as dataset:
            results.append(dataset.read())
    assert np.array_equal(results[0], results[1])


def test_a_plan_with_a_model_of_50_mb_is_small(tmp_path):
    big = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.Identity())
    big.register_buffer("ballast", torch.zeros(12_500_000))
    plan = di.plan(scene(tmp_path, 640), big, tmp_path / "o.tif", tile=32, chunk=64)
    assert plan.tiling.runs == 400
    assert len(cloudpickle.dumps(plan)) < 5_000_000


def test_tiles_do_not_change_the_scene_they_are_cut_from_though_the_model_works_in_place():
    import xarray as xr

    class InPlace(torch.nn.Module):
        def forward(self, x):
            return x.mul_(0)

    data = noise(1, 64, 64, dtype="float32") + 1
    data.flags.writeable = False
    array = xr.DataArray(data.copy(), dims=("band", "y", "x"))
    array.data.flags.writeable = False
    lazy = array.chunk({"y": 32, "x": 32})
    model = di.load_model(InPlace(), output="values")
    result = di.predict(lazy, model, tile=16, chunk=32).compute()
    assert not result.values.any()
    assert np.array_equal(array.values, data)


def test_the_report_tells_how_long_each_stage_took(tmp_path, one_worker, zeros):
    report = di.run(
        scene(tmp_path), seeded(N3), tmp_path / "o.tif", client=one_worker, device=zeros, **JOB
    )
    counts = {stage: times.count for stage, times in report.stages.items()}
    assert counts["read"] == counts["room"] == report.tiles
    assert counts["encode"] == counts["append"] == counts["stitch"] == report.chunks
    assert counts["forward"] == counts["copy in"] == counts["copy out"]
    for times in report.stages.values():
        assert 0 <= times.quantile(0.5) <= times.quantile(0.95) <= times.quantile(0.99)
    assert 0 < report.busy_whole <= report.device_busy <= 1
    for word in ("p95", "device busy", "diagnosis", "tiles waiting"):
        assert word in repr(report)


def test_metrics_of_a_run_are_its_own_though_a_prediction_used_its_model_before(tmp_path):
    source = scene(tmp_path, 100)
    model = seeded(N3, seed=9)
    preview = di.predict(di.open_raster(source), model, tile=32, chunk=26).compute()
    assert preview.shape == (1, 100, 100)
    with di.cluster("local", dashboard_address=":0") as client:
        report = di.run(source, model, tmp_path / "o.tif", client=client, tile=32, chunk=26)
    assert report.stages["read"].count == report.tiles


@pytest.mark.parametrize("device", ["gpu", "cuda:x", ""])
def test_an_unknown_device_is_refused_by_name(tmp_path, device):
    with pytest.raises(ValueError, match="pass 'auto', 'cpu', 'cuda' or 'cuda:1'"):
        di.plan(scene(tmp_path), seeded(N3), tmp_path / "o.tif", device=device)


def test_a_device_that_is_no_device_is_refused(tmp_path):
    with pytest.raises(TypeError, match="device must be"):
        di.plan(scene(tmp_path), seeded(N3), tmp_path / "o.tif", device=7)


class Threads(torch.nn.Module):
    """Says everywhere how many threads torch may use."""

    def forward(self, x):
        return x[:, :1] * 0 + torch.get_num_threads()


@pytest.mark.parametrize("clients", ["one_worker", "two_workers"])
def test_the_worker_processes_of_a_host_share_its_cores(tmp_path, request, clients):
    from dask.system import CPU_COUNT

    client = request.getfixturevalue(clients)
    processes = {"one_worker": 1, "two_workers": 2}[clients]
    di.run(
        scene(tmp_path), di.load_model(Threads(), output="values", bands=["1", "2"]),
        tmp_path / "o.tif", client=client, chunk=64,
    )  # fmt: skip
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert set(np.unique(dataset.read())) == {max(1, CPU_COUNT // processes)}
