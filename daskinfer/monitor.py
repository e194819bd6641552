"""What shows the events of a run on a terminal or in a log; a progress bar is one callback."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from .display import count_text
from .events import (
    Callback,
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
from .pace import Pacer

# The events too: what a callback imports.
__all__ = [
    "Callback",
    "ChunkDone",
    "ChunkFailed",
    "ChunkRetried",
    "Event",
    "Metered",
    "ProgressBar",
    "ProgressLines",
    "RunFinished",
    "RunFinishing",
    "RunStarted",
    "RunStopped",
    "RunStopping",
    "progress",
]


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
