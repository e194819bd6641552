"""Events of a run, and what shows them on a terminal or in a log.

The runner tells callbacks what happens and knows none of them; a progress bar is one callback.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from .display import count_text, duration_text
from .spans import Span, StageTimes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .metrics import ActorMetrics
    from .objects.plan import ObjectPlan
    from .planner import Plan
    from .report import Report

__all__ = [
    "Callback",
    "ChunkDone",
    "ChunkFailed",
    "ChunkRetried",
    "Event",
    "Metered",
    "Pacer",
    "ProgressBar",
    "ProgressLines",
    "RunFinished",
    "RunFinishing",
    "RunStarted",
    "RunStopped",
    "RunStopping",
    "progress",
]


@dataclass(frozen=True)
class RunStarted:
    """Before the first chunk: what is planned, what an earlier run has done, where to look.

    `finished` has a bool per chunk, in row-major order.
    """

    plan: Plan | ObjectPlan
    chunks: int
    done: int
    dashboard: str
    run: str = ""
    finished: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Metered:
    """What the model's actor of a process has done so far; comes before the chunks of a task."""

    process: tuple[str, int]
    metrics: ActorMetrics
    times: Mapping[str, StageTimes]


@dataclass(frozen=True)
class ChunkDone:
    """A chunk is in the output.

    `spans` are those of its process since the last chunk of that process, if the run is traced.
    """

    chunk: int
    window: tuple[int, int, int, int]
    tiles: int
    seconds: float
    worker: str
    spans: tuple[Span, ...] = ()
    process: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class ChunkRetried:
    """An attempt at a chunk failed and another is made."""

    chunk: int
    window: tuple[int, int, int, int]
    attempt: int
    error: str


@dataclass(frozen=True)
class ChunkFailed:
    """A chunk failed for good."""

    chunk: int
    window: tuple[int, int, int, int]
    error: str
    worker: str = ""


@dataclass(frozen=True)
class RunStopping:
    """The run was told to stop and waits for chunks at work.

    Comes again as they end: `chunks` are left, and are waited for `seconds` more at most.
    """

    chunks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class RunFinishing:
    """All chunks are in the output, which is given its last overviews and its order."""


@dataclass(frozen=True)
class RunStopped:
    """The run ended early; the same call goes on from there."""

    error: BaseException


@dataclass(frozen=True)
class RunFinished:
    """The output is in place."""

    report: Report


Event = (
    RunStarted
    | Metered
    | ChunkDone
    | ChunkRetried
    | ChunkFailed
    | RunStopping
    | RunFinishing
    | RunStopped
    | RunFinished
)
Callback = Callable[[Event], None]

# Seconds of the past that tell how long the rest will take.
_RECENT = 120.0


class Pacer:
    """How fast a run is, and how long the rest takes at the pace of the last two minutes.

    Parameters
    ----------
    now : callable
        A clock in seconds.

    Examples
    --------
    >>> clock = iter([0, 10, 20])
    >>> pacer = Pacer(lambda: next(clock))
    >>> pacer.add(2_000_000)
    >>> pacer.left(4_000_000, now=10.0)
    20.0
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.start = now()
        self.pixels = 0
        self._past = [(self.start, 0)]

    def add(self, pixels: int) -> None:
        """Take a chunk that is done."""
        now = self._now()
        self.pixels += pixels
        # A hundred readings are enough, however many chunks there are.
        if len(self._past) > 1 and now - self._past[-2][0] <= _RECENT / 100:
            self._past[-1] = now, self.pixels
            return
        self._past.append((now, self.pixels))
        while len(self._past) > 2 and now - self._past[1][0] > _RECENT:
            self._past.pop(0)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._now() - self.start

    @property
    def speed(self) -> float:
        """Megapixels per second since the start."""
        return self.pixels / 1e6 / max(self.seconds, 1e-9)

    def left(self, pixels: int, now: float | None = None) -> float | None:
        """Seconds that so many pixels more take; None before the first chunk is done."""
        then, before = self._past[0]
        done = self.pixels - before
        return ((now or self._now()) - then) * pixels / done if done else None

    def text(self, pixels: int) -> str:
        """Speed, and the time left for so many pixels more."""
        left = self.left(pixels)
        return f"{self.speed:.2f} Mpx/s" + ("" if left is None else f", {duration_text(left)} left")


@dataclass
class _Count:
    """Chunks and pixels of a run so far."""

    total: int
    done: int
    pixels_left: int
    pacer: Pacer

    @classmethod
    def of(cls, event: RunStarted) -> _Count:
        height, width = event.plan.tiling.shape
        share = (event.chunks - event.done) / max(1, event.chunks)
        return cls(event.chunks, event.done, round(height * width * share), Pacer())

    def add(self, event: ChunkDone) -> None:
        pixels = event.window[2] * event.window[3]
        self.done += 1
        self.pixels_left = max(0, self.pixels_left - pixels)
        self.pacer.add(pixels)

    def __str__(self) -> str:
        return f"{count_text(self.done)} of {count_text(self.total)} chunks"

    @property
    def pace(self) -> str:
        return self.pacer.text(self.pixels_left)


class ProgressBar:
    """Callback that draws a bar on a terminal.

    Parameters
    ----------
    console : rich.console.Console, optional
        Where to draw; standard error by default, so that results can be piped.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
        )
        self._task = TaskID(0)
        self._count: _Count | None = None

    def __call__(self, event: Event) -> None:
        """Take an event."""
        match event:
            case RunStarted():
                self._print(f"dashboard {event.dashboard}")
                self._count = _Count.of(event)
                self._task = self._bar.add_task(
                    "inference", total=event.chunks, completed=event.done, text=f"{self._count}"
                )
                self._bar.start()
            case ChunkDone() if self._count is not None:
                self._count.add(event)
                self._update(advance=1, text=f"{self._count}, {self._count.pace}")
            case ChunkRetried() | ChunkFailed():
                self._print(describe(event))
            case RunStopping():
                self._update(description="stopping", text=describe(event))
            case RunFinishing():
                self._update(description="finishing", text="the file's overviews and order")
            case RunStopped() | RunFinished():
                self._bar.stop()

    def stop(self) -> None:
        """Leave the terminal in order when a run ends early."""
        self._bar.stop()

    def _update(self, **fields: Any) -> None:
        if self._bar.tasks:
            self._bar.update(self._task, **fields)

    def _print(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, soft_wrap=True, markup=False)


class ProgressLines:
    """Callback that prints a line now and then, for logs.

    Parameters
    ----------
    lines : int, default 20
        About how many lines a run makes.
    """

    def __init__(self, lines: int = 20) -> None:
        self._lines = lines
        self._every = 1
        self._count: _Count | None = None
        self._waiting = 0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        match event:
            case RunStarted():
                self._count = _Count.of(event)
                self._every = max(1, event.chunks // self._lines)
                self._print(f"dashboard {event.dashboard}")
            case ChunkDone() if self._count is not None:
                self._count.add(event)
                if self._count.done % self._every == 0 or self._count.done == self._count.total:
                    self._print(f"{self._count}, {self._count.pace}")
            case ChunkRetried() | ChunkFailed():
                self._print(describe(event))
            case RunStopping() if self._fewer(len(event.chunks)):
                self._print(describe(event))
            case RunFinishing():
                self._print("all chunks are in; finishing the file")

    def stop(self) -> None:
        """Nothing to put in order."""

    def _fewer(self, waiting: int) -> bool:
        """Whether that is worth a line: at first, and each time that half of them have ended."""
        if not self._waiting or waiting <= self._waiting // 2:
            self._waiting = waiting
            return True
        return False

    @staticmethod
    def _print(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def progress() -> Any:
    """What suits where this runs: a widget in a notebook, a bar on a terminal, else lines.

    Returns
    -------
    NotebookProgress, ProgressBar or ProgressLines
        A callback for `run`, with a method ``stop`` for runs that end early.
    """
    from .dashboard.widget import NotebookProgress, in_notebook

    if in_notebook():
        return NotebookProgress()
    return ProgressBar() if sys.stderr.isatty() else ProgressLines()


def describe(event: ChunkRetried | ChunkFailed | RunStopping) -> str:
    """One line on what happened to a chunk, or on what a run that stops waits for."""
    if isinstance(event, RunStopping):
        return _waiting_text(event)
    row, col, height, width = event.window
    where = f"chunk {event.chunk} (rows {row}-{row + height}, columns {col}-{col + width})"
    if isinstance(event, ChunkRetried):
        return f"{where}: attempt {event.attempt} failed, trying again: {event.error}"
    return f"{where} failed: {event.error}"


def _waiting_text(event: RunStopping) -> str:
    """What is waited for, and for how long.

    >>> _waiting_text(RunStopping((3, 7), 20.0))
    'stopping: waits up to 20 s for 2 chunks at work (3, 7); Ctrl-C again does not wait'
    """
    if not event.chunks:
        return "stopping: no chunk is at work"
    some = ", ".join(str(number) for number in event.chunks[:8])
    more = ", ..." if len(event.chunks) > 8 else ""
    chunks = "1 chunk" if len(event.chunks) == 1 else f"{count_text(len(event.chunks))} chunks"
    return (
        f"stopping: waits up to {event.seconds:.0f} s for {chunks} at work ({some}{more}); "
        "Ctrl-C again does not wait"
    )
