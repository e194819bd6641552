"""Numbers of a run at ``/metrics``, scraped as Prometheus does, against those of the run."""

from __future__ import annotations

import time
import urllib.request

import pytest

import daskinfer as di
from daskinfer.dashboard import gauges
from daskinfer.dashboard.samples import METRIC
from daskinfer.monitor import ChunkDone, RunStarted
from held import BAD, CHUNK, HELD, PATIENCE, gated_plan, held, numbers

parser = pytest.importorskip("prometheus_client.parser")


def scraped(url):
    """All numbers of ours at an address, by name and labels."""
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        text = answer.read().decode()
    families = [f for f in parser.text_string_to_metric_families(text)]
    ours = [f for f in families if f.name.startswith("daskinfer")]
    assert len({family.name for family in ours}) == len(ours)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in ours
        for sample in family.samples
    }


def pages(client):
    """Addresses of the scheduler's and of the worker's numbers."""
    port = next(iter(client.run(lambda dask_worker: dask_worker.http_server.port).values()))
    return client.dashboard_link.replace("status", "metrics"), f"http://localhost:{port}/metrics"


def of_run(found, name, run, **labels):
    return found.get((f"daskinfer_{name}", frozenset({"run": run, **labels}.items())))


def scraped_when(url, true):
    """What is scraped as soon as that is true of it."""
    stop = time.monotonic() + PATIENCE
    while not true(found := scraped(url)):
        assert time.monotonic() < stop, found
    return found


def test_a_scrape_during_a_run_finds_what_it_is_doing(tmp_path, one_worker):
    events = []
    # A chunk before the one at which the run stands still, and one that waits behind it.
    raw = numbers(**{f"c{CHUNK}": HELD})
    with held(gated_plan(tmp_path, raw=raw), one_worker, [events.append]):
        scheduler, worker = pages(one_worker)
        run = next(event.run for event in events if isinstance(event, RunStarted))
        found = scraped_when(
            scheduler, lambda found: of_run(found, "run_chunks", run, state="skipped") == 11
        )
        assert sum(isinstance(event, ChunkDone) for event in events) == 11
        assert of_run(found, "run_chunks", run, state="missing") == 1
        assert of_run(found, "run_tiles", run) == 0
        assert of_run(found, "run_info", run, state="running", output=str(tmp_path / "o.tif")) == 1
        found = scraped(worker)
        (sample,) = heard(one_worker)
        labels = {"device": "cpu"}
        assert of_run(found, "worker_chunks_at_work", run, **labels) == len(sample["chunks"]) == 1
        assert sample["chunks"] == [CHUNK]
        assert of_run(found, "worker_mailbox_tiles", run, **labels) == sample["mailbox"] == 0
        assert of_run(found, "worker_tiles_total", run, **labels) == sample["tiles"] == 0


def heard(client):
    """What the last heartbeat said, once it told of nothing but the chunk that stands still."""
    stop = time.monotonic() + PATIENCE
    while True:
        (worker,) = client.scheduler_info()["workers"].values()
        samples = worker["metrics"].get(METRIC, [])
        if samples and samples[0]["chunks"] == [CHUNK]:
            return samples
        assert time.monotonic() < stop, samples


def test_a_scrape_after_a_run_finds_the_numbers_of_the_report(tmp_path, one_worker):
    plan = gated_plan(tmp_path, raw=numbers(c0=1, c1=1, c6=BAD, c7=2), on_error="nodata")
    events = []
    report = di.run(plan, client=one_worker, callbacks=[events.append])
    scheduler, worker = pages(one_worker)
    found = scraped(scheduler)
    run = events[0].run
    expected = {
        "run_speed_megapixels_per_second": report.speed,
        "run_seconds": report.seconds,
        "run_device_busy_ratio": report.device_busy,
        "run_batch_fill_ratio": report.batch_fill,
        "run_mailbox_tiles": report.queue_depth,
        "run_tiles": report.tiles,
        "run_retries": report.retries,
    }
    assert {name: of_run(found, name, run) for name in expected} == pytest.approx(expected)
    assert report.retries == 2
    assert of_run(found, "run_seconds_left", run) is None
    assert of_run(found, "run_chunks", run, state="failed") == len(report.failures) == 1
    assert of_run(found, "run_chunks", run, state="done") == 3
    assert of_run(found, "run_info", run, state="incomplete", output=plan.output) == 1
    # A process that serves no run any more tells of none.
    assert of_run(scraped(worker), "worker_tiles_total", run, device="cpu") is None


def test_without_prometheus_nothing_is_exposed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    assert gauges.expose_samples(list) is False
