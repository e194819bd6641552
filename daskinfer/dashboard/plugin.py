"""The scheduler's side: keeps what runs have said last, and adds the page to Dask's dashboard."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.diagnostics.plugin import SchedulerPlugin
from numpy.typing import NDArray

from .gauges import expose_runs
from .samples import METRIC, Sample
from .view import TOPIC, Snapshot

if TYPE_CHECKING:
    from distributed import Scheduler

__all__ = ["KnownRun", "PagePlugin"]

# Runs of the past that are still shown, and readings of the speed of each.
_KEPT = 8
_READINGS = 1200


@dataclass
class KnownRun:
    """A run as the scheduler knows it.

    `history` has seconds since the start, and megapixels by then.
    """

    heard: float
    snapshot: Snapshot | None = None
    backdrop: NDArray[np.uint8] | None = None
    history: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_READINGS))

    def now(self) -> Snapshot | None:
        """The run as it would be by now, if it went on as before."""
        return self.snapshot and self.snapshot.later(time.monotonic() - self.heard)


class PagePlugin(SchedulerPlugin):  # type: ignore[misc]
    """Listens to the runs of all clients of a scheduler.

    It stays when a run is over, which is then shown as it ended until others take its place.
    """

    name = "daskinfer-page"
    # Runs that follow, and those of other clients, find the page there.
    idempotent = True

    def __init__(self) -> None:
        self._runs: OrderedDict[str, KnownRun] = OrderedDict()
        self._scheduler: Scheduler | None = None

    async def start(self, scheduler: Scheduler) -> None:
        """Called on the scheduler's event loop when the first run registers this."""
        from .page import add_page

        self._scheduler = scheduler
        add_page(scheduler, self)
        expose_runs(self)

    def log_event(self, topic: str, msg: Any) -> None:
        """Called on the scheduler's event loop with what `Feed` sends."""
        if topic != TOPIC or not isinstance(msg, dict) or "run" not in msg:
            return
        known = self._runs.setdefault(msg["run"], KnownRun(time.monotonic()))
        if "backdrop" in msg:
            picture = np.frombuffer(msg["backdrop"], np.uint8)
            known.backdrop = picture.reshape(tuple(msg["shape"]))
            return
        known.snapshot = run = Snapshot.from_message(msg)
        known.heard = time.monotonic()
        known.history.append((run.seconds, run.speed * run.seconds))
        for old in [*self._runs][:-_KEPT]:
            del self._runs[old]

    def runs(self) -> list[KnownRun]:
        """Runs that have begun; the one to show first comes first: at work, then the latest."""
        begun = [known for known in reversed(self._runs.values()) if known.snapshot is not None]
        return sorted(begun, key=lambda known: known.snapshot is None or known.snapshot.ended)

    def snapshots(self) -> list[Snapshot]:
        """All runs as they are now."""
        return [now for known in self.runs() if (now := known.now()) is not None]

    def samples(self) -> list[tuple[str, Sample]]:
        """Name of a worker and what its process said of a run; workers in one process say it once.

        As of their last heartbeats.
        """
        found: dict[tuple[Any, ...], tuple[str, Sample]] = {}
        workers = self._scheduler.workers.values() if self._scheduler is not None else ()
        for worker in workers:
            for sample in (worker.metrics or {}).get(METRIC) or ():
                key = (sample["run"], *sample["process"])
                found.setdefault(key, (str(worker.name), sample))
        return list(found.values())
