"""Numbers of a run for Prometheus, on the ``/metrics`` of Dask's workers and scheduler.

Dask serves what is in the default registry of `prometheus_client`, where that is installed.  One
collector per process asks for the numbers when they are scraped; a run that is over leaves the
workers' pages, and stays on the scheduler's as one of the last few.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .samples import Sample
from .states import STATES
from .view import Snapshot

__all__ = ["expose_runs", "expose_samples"]

Samples = Callable[[], Iterable[Sample]]
Runs = Callable[[], Iterable[Snapshot]]

_lock = threading.Lock()
_samples: list[Samples] = []
_runs: weakref.WeakSet[Any] = weakref.WeakSet()
_registered = False


def expose_samples(samples: Samples) -> bool:
    """Have a worker process show its samples; returns whether `prometheus_client` is there."""
    with _lock:
        if samples not in _samples:
            _samples.append(samples)
    return _register()


def expose_runs(owner: Any) -> bool:
    """Have a scheduler's process show ``owner.snapshots()`` for as long as the owner lives."""
    with _lock:
        _runs.add(owner)
    return _register()


def _register() -> bool:
    global _registered
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return False
    with _lock:
        if not _registered:
            REGISTRY.register(_Collector())
            _registered = True
    return True


class _Collector:
    """Asked by `prometheus_client` at each scrape."""

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        with _lock:
            samples, owners = list(_samples), list(_runs)
        yield from _of_samples([sample for take in samples for sample in take()])
        yield from _of_runs([run for owner in owners for run in owner.snapshots()])


_WORKER = (
    ("tiles", "Tiles that went through the model", lambda s: s["tiles"]),
    ("batches", "Batches run", lambda s: s["batches"]),
    ("batch_slots", "Tiles that would have fitted into those batches", lambda s: s["slots"]),
    ("device_busy_seconds", "Seconds in which the device ran a batch", lambda s: s["busy"]),
)
_WORKER_NOW = (
    ("mailbox_tiles", "Tiles that wait for the device", lambda s: s["mailbox"]),
    ("chunks_at_work", "Chunks at work", lambda s: len(s["chunks"])),
)
_RUN_NOW: tuple[tuple[str, str, Callable[[Snapshot], float | None]], ...] = (
    ("speed_megapixels_per_second", "Since the run's start", lambda r: r.speed),
    ("seconds", "Since the run's start", lambda r: r.seconds),
    ("seconds_left", "At the pace of the last two minutes", lambda r: r.left),
    ("device_busy_ratio", "Share of the time with a batch on the device", lambda r: r.busy),
    ("batch_fill_ratio", "Tiles per slot of the batches", lambda r: r.fill),
    ("mailbox_tiles", "Tiles that waited at the start of a batch, on average", lambda r: r.queue),
    ("tiles", "Tiles of the chunks that are done", lambda r: r.tiles),
    ("retries", "Attempts at chunks that failed and were made again", lambda r: r.retries),
)


def _of_samples(samples: list[Sample]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for kind, families in ((CounterMetricFamily, _WORKER), (GaugeMetricFamily, _WORKER_NOW)):
        for name, text, value in families:
            family = kind(f"daskinfer_worker_{name}", text, labels=["run", "device"])
            for sample in samples:
                family.add_metric([sample["run"], sample["device"]], value(sample))
            yield family


def _of_runs(runs: list[Snapshot]) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    info = GaugeMetricFamily("daskinfer_run_info", "1", labels=["run", "output", "state"])
    chunks = GaugeMetricFamily("daskinfer_run_chunks", "Chunks by state", labels=["run", "state"])
    for run in runs:
        info.add_metric([run.run, run.output, run.state], 1)
        for state in STATES:
            chunks.add_metric([run.run, state], run.chunk_map.count(state))
    yield info
    yield chunks
    for name, text, value in _RUN_NOW:
        family = GaugeMetricFamily(f"daskinfer_run_{name}", text, labels=["run"])
        for run in runs:
            if (number := value(run)) is not None:
                family.add_metric([run.run], number)
        yield family
