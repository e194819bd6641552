"""Events of a run, and what listens to them.

The runner tells callbacks what happens and knows none of them; a progress bar is one callback.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .spans import Span

if TYPE_CHECKING:
    from .planner import Plan
    from .report import Report

__all__ = [
    "Callback",
    "ChunkDone",
    "ChunkFailed",
    "ChunkRetried",
    "Event",
    "ProgressBar",
    "ProgressLines",
    "RunFinished",
    "RunStarted",
    "progress",
]


@dataclass(frozen=True)
class RunStarted:
    """Before the first chunk: what is planned, what an earlier run has done, where to look."""

    plan: Plan
    chunks: int
    done: int
    dashboard: str


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


@dataclass(frozen=True)
class RunFinished:
    """The output is in place."""

    report: Report


Event = RunStarted | ChunkDone | ChunkRetried | ChunkFailed | RunFinished
Callback = Callable[[Event], None]


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
            TextColumn("{task.completed}/{task.total} chunks, {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = TaskID(0)
        self._pixels = 0
        self._start = 0.0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        match event:
            case RunStarted():
                self._console.print(f"dashboard {event.dashboard}", highlight=False, soft_wrap=True)
                self._start = time.perf_counter()
                self._task = self._bar.add_task(
                    "inference", total=event.chunks, completed=event.done, speed="starting"
                )
                self._bar.start()
            case ChunkDone():
                self._pixels += event.window[2] * event.window[3]
                speed = self._pixels / 1e6 / (time.perf_counter() - self._start)
                self._bar.update(self._task, advance=1, speed=f"{speed:.2f} Mpx/s")
            case ChunkRetried() | ChunkFailed():
                self._bar.console.print(describe(event), highlight=False)
            case RunFinished():
                self._bar.stop()

    def stop(self) -> None:
        """Leave the terminal in order when a run ends early."""
        self._bar.stop()


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
        self._done = self._total = 0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        match event:
            case RunStarted():
                self._done, self._total = event.done, event.chunks
                self._every = max(1, event.chunks // self._lines)
                self._print(f"dashboard {event.dashboard}")
            case ChunkDone():
                self._done += 1
                if self._done % self._every == 0 or self._done == self._total:
                    self._print(f"{self._done} of {self._total} chunks")
            case ChunkRetried() | ChunkFailed():
                self._print(describe(event))
            case RunFinished():
                pass

    def stop(self) -> None:
        """Nothing to put in order."""

    @staticmethod
    def _print(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def progress() -> ProgressBar | ProgressLines:
    """A bar on a terminal, lines elsewhere."""
    return ProgressBar() if sys.stderr.isatty() else ProgressLines()


def describe(event: ChunkRetried | ChunkFailed) -> str:
    """One line on what happened to a chunk."""
    row, col, height, width = event.window
    where = f"chunk {event.chunk} (rows {row}-{row + height}, columns {col}-{col + width})"
    if isinstance(event, ChunkRetried):
        return f"{where}: attempt {event.attempt} failed, trying again: {event.error}"
    return f"{where} failed: {event.error}"
