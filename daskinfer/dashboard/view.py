"""What is known of a run from its events: the one place that all displays ask."""

from __future__ import annotations

import math
import threading
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import display
from ..events import (
    ChunkDone,
    ChunkFailed,
    ChunkRetried,
    Event,
    Metered,
    RunFinished,
    RunFinishing,
    RunStarted,
    RunStopped,
    RunStopping,
    describe,
)
from ..metrics import Meters
from ..pace import Pacer
from .states import DONE, FAILED, MISSING, RESUMED, SKIPPED, ChunkMap

__all__ = ["ENDED", "TOPIC", "FailedChunk", "RunView", "Snapshot"]

TOPIC = "daskinfer"
"""Under which a scheduler is told of snapshots; ``client.subscribe_topic`` hears them too."""

ENDED = ("complete", "incomplete", "stopped")
"""States of a run that is over; before that it is "running", "stopping" or "finishing"."""

# Of the failed chunks, those that a display lists; all are in the ledger.
_LISTED = 100


@dataclass(frozen=True)
class FailedChunk:
    """A chunk that failed for good, its window as ``(row, col, height, width)``."""

    chunk: int
    window: tuple[int, int, int, int]
    error: str
    worker: str


@dataclass(frozen=True)
class Snapshot:
    """A run at a moment.

    Attributes
    ----------
    run, output : str
        Its name on the cluster, and the path of its COG.
    state : str
        "running", "stopping", "finishing", or one of `ENDED`.
    note : str
        What the run waits for, or why it ended.
    shape, grid : tuple of int
        Rows and columns of pixels, and of chunks.
    chunks, done, resumed, failed : int
        Chunks in all; in the output; of these from an earlier run; failed for good.
    tiles, retries : int
        Of this run.
    seconds, speed : float
        Since its start, and megapixels per second since then.
    left : float or None
        Seconds that the rest takes; None where that is not known.
    busy, busy_whole, fill, queue : float
        As `device_busy`, `busy_whole`, `batch_fill` and `queue_depth` of the report.
    device : str
    failures : tuple of FailedChunk
        The last of them.
    chunk_map : ChunkMap
    """

    run: str
    output: str
    state: str
    note: str
    shape: tuple[int, int]
    grid: tuple[int, int]
    chunks: int
    done: int
    resumed: int
    failed: int
    tiles: int
    retries: int
    seconds: float
    speed: float
    left: float | None
    busy: float
    busy_whole: float
    fill: float
    queue: float
    device: str
    failures: tuple[FailedChunk, ...]
    chunk_map: ChunkMap

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ENDED

    def later(self, seconds: float) -> Snapshot:
        """The run so many seconds after it was last heard of."""
        if self.ended:
            return self
        left = None if self.left is None else max(0.0, self.left - seconds)
        total = self.seconds + seconds
        speed = self.speed * self.seconds / total if total else 0.0
        return replace(self, seconds=total, left=left, speed=speed)

    def rows(self) -> list[display.Row]:
        """Names and values to show, in order."""
        count = display.count_text
        chunks = f"{count(self.done)} of {count(self.chunks)} ({self.share:.0%})"
        if self.resumed:
            chunks += f", {count(self.resumed)} from an earlier run"
        time = f"{display.duration_text(self.seconds)}"
        if self.left is not None and not self.ended:
            time += f", {display.duration_text(self.left)} left"
        return [
            ("state", self.state + (f": {self.note}" if self.note else "")),
            ("chunks", chunks),
            ("time", time),
            ("speed", f"{self.speed:.2f} Mpx/s"),
            ("device busy", f"{self.busy:.1%}, of the whole run {self.busy_whole:.1%}"),
            ("batches", f"{self.fill:.0%} full"),
            ("queue", f"{self.queue:.1f} tiles waiting at the start of a batch"),
            ("tiles", count(self.tiles)),
            ("retries", count(self.retries)),
            ("failed", f"{count(self.failed)} chunks"),
        ]

    @property
    def share(self) -> float:
        """Of the chunks that are in the output."""
        return self.done / self.chunks if self.chunks else 0.0

    def message(self) -> dict[str, Any]:
        """As plain values that travel."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        failures = [asdict(failure) for failure in self.failures]
        return plain | {"failures": failures, "chunk_map": self.chunk_map.message()}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Snapshot:
        """Undo `message`, of this version or another that says as much."""
        known = {field.name: message[field.name] for field in fields(cls)}
        failures = tuple(
            FailedChunk(**failure | {"window": tuple(failure["window"])})
            for failure in message["failures"]
        )
        sides = {name: tuple(message[name]) for name in ("shape", "grid")}
        chunk_map = ChunkMap.from_message(message["chunk_map"])
        return cls(**known | sides | {"failures": failures, "chunk_map": chunk_map})


@dataclass
class _Counts:
    """What changes with each chunk; a snapshot is made when one is asked for."""

    done: int = 0
    failed: int = 0
    tiles: int = 0
    retries: int = 0
    failures: tuple[FailedChunk, ...] = ()


class RunView:
    """Callback that keeps what is known of a run; safe to look at from another thread.

    Examples
    --------
    >>> import daskinfer as di, numpy as np, torch, xarray as xr
    >>> scene = xr.DataArray(np.ones((1, 64, 64), "float32"), dims=("band", "y", "x"))
    >>> plan = di.plan(scene, torch.nn.Conv2d(1, 2, 1), "o.tif", tile=32, chunk=32)
    >>> view = RunView()
    >>> view(RunStarted(plan, chunks=plan.tiling.chunks, done=0, dashboard=""))
    >>> view(ChunkDone(1, (0, 32, 32, 32), tiles=1, seconds=0.5, worker=""))
    >>> view.snapshot().done, view.snapshot().chunk_map.count("done")
    (1, 1)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meters = Meters()
        self._pacer = Pacer()
        self._counts = _Counts()
        self._snapshot: Snapshot | None = None
        self._states: NDArray[np.uint8] = np.zeros((1, 1), np.uint8)
        self._stop_seconds: float | None = None

    def __call__(self, event: Event) -> None:
        """Take an event."""
        with self._lock:
            if isinstance(event, RunStarted):
                self._begin(event)
            elif self._snapshot is not None:
                self._take(self._snapshot, event)

    def snapshot(self) -> Snapshot:
        """The run as it is now.

        Raises
        ------
        RuntimeError
            Before it has started.
        """
        with self._lock:
            if self._snapshot is None:
                raise RuntimeError("the run has not started yet")
            return self._snapshot if self._snapshot.ended else self._measured(self._snapshot)

    def _begin(self, event: RunStarted) -> None:
        tiling = event.plan.tiling
        self._states = np.full(tiling.grid, MISSING, np.uint8)
        if event.finished is not None:
            self._states.flat[np.flatnonzero(event.finished)] = RESUMED
        self._pacer, self._meters = Pacer(), Meters()
        self._counts = _Counts(event.done)
        self._snapshot = Snapshot(
            run=event.run,
            output=event.plan.output,
            state="running" if event.done < event.chunks else "finishing",
            note="",
            shape=tiling.shape,
            grid=tiling.grid,
            chunks=event.chunks,
            done=event.done,
            resumed=event.done,
            failed=0,
            tiles=0,
            retries=0,
            seconds=0.0,
            speed=0.0,
            left=None,
            busy=0.0,
            busy_whole=0.0,
            fill=0.0,
            queue=0.0,
            device="",
            failures=(),
            chunk_map=ChunkMap.of(self._states),
        )

    def _take(self, now: Snapshot, event: Event) -> None:
        counts = self._counts
        match event:
            case ChunkDone():
                counts.done += 1
                counts.tiles += event.tiles
                self._states[divmod(event.chunk, now.grid[1])] = DONE if event.tiles else SKIPPED
                self._pacer.add(event.window[2] * event.window[3])
            case Metered():
                self._meters.take(event.process, event.metrics, event.times)
            case ChunkRetried():
                counts.retries += 1
            case ChunkFailed():
                counts.failed += 1
                self._states[divmod(event.chunk, now.grid[1])] = FAILED
                failure = FailedChunk(event.chunk, event.window, event.error, event.worker)
                counts.failures = (*counts.failures, failure)[-_LISTED:]
            case RunStopping():
                note = describe(event).partition(": ")[2]
                self._snapshot = replace(now, state="stopping", note=note)
            case RunFinishing():
                self._snapshot = replace(now, state="finishing", note="")
            case RunStopped():
                note = f"{type(event.error).__name__}: {event.error}".rstrip(": ")
                ended = replace(self._measured(now), state="stopped", note=note, left=None)
                self._snapshot = ended
            case RunFinished():
                self._snapshot = self._reported(now, event)

    def _measured(self, now: Snapshot) -> Snapshot:
        seconds = self._pacer.seconds
        load = self._meters.load(seconds)
        chunk_map = ChunkMap.of(self._states)
        pixels = math.prod(now.shape) * chunk_map.count("missing") / now.chunks
        return replace(
            now,
            **vars(self._counts),
            seconds=seconds,
            speed=self._pacer.speed,
            left=self._pacer.left(round(pixels)),
            busy=load.busy,
            busy_whole=load.busy_whole,
            fill=load.fill,
            queue=self._meters.queue_depth,
            device=load.device,
            chunk_map=chunk_map,
        )

    def _reported(self, now: Snapshot, event: RunFinished) -> Snapshot:
        """The figures of the report, so that no display ends with others."""
        report = event.report
        return replace(
            self._measured(now),
            state="complete" if report.complete else "incomplete",
            note="",
            tiles=report.tiles,
            retries=report.retries,
            failed=len(report.failures),
            seconds=report.seconds,
            speed=report.speed,
            left=None,
            busy=report.device_busy,
            busy_whole=report.busy_whole,
            fill=report.batch_fill,
            queue=report.queue_depth,
        )
