"""How long each stage takes: distributions always, single spans when a run is traced.

A process of a run has one `Recorder`.  Its histograms are small, and those of several processes add
up, so quantiles of a whole run come from what each chunk task brings along.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["STAGES", "Recorder", "Span", "StageTimes"]

STAGES = (
    "read", "room", "queue", "copy in", "forward", "copy out", "results", "stitch", "encode",
    "append",
)  # fmt: skip
"""In the order in which pixels go through them.

Per tile: ``read`` from the source, ``room`` waited for in the mailbox.  Per batch: ``queue`` from
its first tile to its start, ``copy in``, ``forward``, ``copy out``.  Per chunk: ``results`` waited
for after its last tile was handed in, ``stitch``, ``encode``, ``append``.
"""

# Buckets per factor of two: quantiles are right to 5 %.
_PER_OCTAVE = 8
_SHORTEST = 1e-7


@dataclass(frozen=True)
class Span:
    """One stage of one tile, batch or chunk.

    Attributes
    ----------
    stage : str
        One of `STAGES`.
    start : float
        Seconds since the epoch.
    seconds : float
        How long it took.
    thread : str
        Name of the thread.
    about : dict
        What it worked on, as ``{"chunk": 7}``.
    """

    stage: str
    start: float
    seconds: float
    thread: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class StageTimes:
    """Distribution of the durations of one stage.

    Attributes
    ----------
    counts : dict of int to int
        Number of durations per bucket, each a factor of 2**(1/8) wide.
    total : float
        Sum of all durations in seconds.

    Examples
    --------
    >>> times = StageTimes()
    >>> for milliseconds in range(1, 101):
    ...     times = times.plus(StageTimes.of(milliseconds / 1000))
    >>> round(times.quantile(0.5), 2), round(times.quantile(0.99), 1), times.count
    (0.05, 0.1, 100)
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    total: float = 0.0

    @classmethod
    def of(cls, seconds: float) -> StageTimes:
        """One duration."""
        return cls({_bucket(seconds): 1}, seconds)

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts.values())

    def plus(self, other: StageTimes) -> StageTimes:
        """Both distributions together."""
        return StageTimes(Counter(self.counts) + Counter(other.counts), self.total + other.total)

    def quantile(self, share: float) -> float:
        """Duration in seconds that this share of all do not exceed; 0 where there are none."""
        rank, seen = share * self.count, 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                return float(_SHORTEST * 2 ** ((bucket + 0.5) / _PER_OCTAVE))
        return 0.0

    @staticmethod
    def merged(parts: Iterable[Mapping[str, StageTimes]]) -> dict[str, StageTimes]:
        """Times by stage of several processes as those of all."""
        together: dict[str, StageTimes] = {}
        for part in parts:
            for stage, times in part.items():
                together[stage] = together.get(stage, StageTimes()).plus(times)
        return {stage: together[stage] for stage in STAGES if stage in together}


def _bucket(seconds: float) -> int:
    return math.floor(_PER_OCTAVE * math.log2(max(seconds, _SHORTEST) / _SHORTEST))


class Recorder:
    """Takes the times of a process; safe to use from several threads.

    Parameters
    ----------
    tracing : bool, default False
        Keep single spans too, until they are drained.

    Examples
    --------
    >>> recorder = Recorder(tracing=True)
    >>> with recorder.span("read", chunk=3):
    ...     pass
    >>> recorder.times()["read"].count
    1
    >>> [(span.stage, span.about) for span in recorder.drain()]
    [('read', {'chunk': 3})]
    """

    def __init__(self, *, tracing: bool = False) -> None:
        self.tracing = tracing
        self._lock = threading.Lock()
        # perf_counter is the better clock within a process, the epoch is shared by processes.
        self.epoch = time.time() - time.perf_counter()
        self._counts: dict[str, Counter[int]] = {}
        self._totals: dict[str, float] = {}
        self._spans: list[Span] = []

    def add(self, stage: str, start: float, stop: float, **about: Any) -> None:
        """Take a span between two readings of `time.perf_counter`."""
        seconds = stop - start
        with self._lock:
            self._counts.setdefault(stage, Counter())[_bucket(seconds)] += 1
            self._totals[stage] = self._totals.get(stage, 0.0) + seconds
            if self.tracing:
                name = threading.current_thread().name
                self._spans.append(Span(stage, self.epoch + start, seconds, name, about))

    @contextlib.contextmanager
    def span(self, stage: str, **about: Any) -> Iterator[None]:
        """Time a block of code."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, start, time.perf_counter(), **about)

    def times(self) -> dict[str, StageTimes]:
        """Distributions so far, by stage."""
        with self._lock:
            return {
                stage: StageTimes(dict(counts), self._totals[stage])
                for stage, counts in self._counts.items()
            }

    def drain(self) -> tuple[Span, ...]:
        """Spans since the last call; none unless tracing."""
        with self._lock:
            spans, self._spans = self._spans, []
        return tuple(spans)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts.clear()
            self._totals.clear()
            self._spans.clear()
