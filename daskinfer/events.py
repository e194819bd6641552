"""What happens in a run, told to callbacks as it happens.

The runner tells callbacks and knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .display import count_text
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
    "RunFinished",
    "RunFinishing",
    "RunStarted",
    "RunStopped",
    "RunStopping",
    "describe",
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
