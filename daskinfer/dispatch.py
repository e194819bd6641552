"""Keep a bounded number of chunks in flight on a Dask client.

Knows nothing of pixels: it hands numbers of chunks to a task function and their answers to whoever
asks.  Where chunks are cheap (nodata, small chunks, fast models) a task takes several of them, for
a task costs the scheduler about a millisecond whatever it does.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from distributed import Client, Future

from .errors import warn_user

__all__ = ["MOST", "TASK_SECONDS", "Answer", "Dispatch", "Outcome", "Pace"]

# Long beside what a task costs, short beside what a user waits for after Ctrl-C.
TASK_SECONDS = 0.3
# Chunks in a task at most: what the death of a worker costs has a bound.
MOST = 64
# Tasks submitted per thread: one that runs and one that waits for it to end.
_IN_FLIGHT_PER_THREAD = 2
# Part of the tasks in flight that is submitted at once, at least, on large clusters.
_WAVE = 8
_ALONE = 60.0  # seconds without a worker, after which the user is told
_THREADS_EVERY = 5.0  # seconds between looks at how many threads the cluster has
_ALONE_EVERY = 1.0  # while it has none: a worker may join and die in between


class Outcome(Protocol):
    """What a task returns: small, and all of it numbers.

    `left` are chunks that it did not begin, which are then given to other tasks; `spent` is what
    the others took, in seconds.
    """

    @property
    def left(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def spent(self) -> float: ...  # noqa: D102


@dataclass(frozen=True)
class Answer:
    """How a task ended.

    Attributes
    ----------
    numbers : tuple of int
        Chunks that it was given.
    outcome : Outcome or None
        What it returned; None if it raised.
    error : BaseException or None
        What it raised, or Dask for it.
    """

    numbers: tuple[int, ...]
    outcome: Any = None
    error: BaseException | None = None


@dataclass
class Pace:
    """How many chunks make a task of about `TASK_SECONDS`.

    Examples
    --------
    >>> pace = Pace()
    >>> pace.size(left=1000, lanes=2)
    1
    >>> pace.note(chunks=1, seconds=0.01)
    >>> pace.size(left=1000, lanes=2), pace.size(left=20, lanes=2)
    (30, 5)
    """

    seconds: float | None = None

    def size(self, left: int, lanes: int) -> int:
        """Chunks for the next task.

        Parameters
        ----------
        left : int
            Chunks that are not submitted yet.
        lanes : int
            Threads that share them: at the end no one is left with much while others idle.
        """
        if self.seconds is None:
            return 1
        wanted = int(TASK_SECONDS / max(self.seconds, 1e-9))
        return max(1, min(wanted, MOST, left // (2 * max(1, lanes))))

    def note(self, chunks: int, seconds: float) -> None:
        """Learn from a task.  Follows a change within a few tasks: a raster has cheap parts."""
        if chunks:
            now = seconds / chunks
            self.seconds = now if self.seconds is None else (self.seconds + now) / 2


@dataclass
class Dispatch:
    """Chunks on their way.

    Parameters
    ----------
    client : distributed.Client
    task : callable
        ``(run, numbers)`` to an `Outcome`; runs on a worker.
    run : str
        Name of the run.
    workers : callable
        Threads of each worker that chunks may go to, by address; asked now and then, since workers
        come and go.
    resources : dict, optional
        What a task asks of its worker.
    most : int, default 64
        Chunks in a task at most.
    name : callable, optional
        How Dask is to call a task, as a tuple, by its first chunk.
    """

    client: Client
    task: Callable[[str, tuple[int, ...]], Any]
    run: str
    workers: Callable[[], dict[str, int]]
    resources: dict[str, float] | None = None
    most: int = MOST
    name: Callable[[int], tuple[Any, ...]] | None = None
    pace: Pace = field(default_factory=Pace)
    tasks: int = 0
    _flying: dict[Any, tuple[Future, tuple[int, ...]]] = field(default_factory=dict)
    _landing: queue.Queue[Future] = field(default_factory=queue.Queue)
    _again: deque[tuple[int, Collection[str]]] = field(default_factory=deque)
    _back: deque[int] = field(default_factory=deque)
    # Workers that tasks in flight were told to prefer.
    _near: dict[Any, frozenset[str]] = field(default_factory=dict)
    _threads: dict[str, int] = field(default_factory=dict)
    _looked: float = -_THREADS_EVERY
    _alone: float | None = None
    _told: bool = False

    def answers(self, todo: Iterable[int], count: int, most: int | None = None) -> Iterator[Answer]:
        """Run chunks; yields how each task ended, until none is left.

        Parameters
        ----------
        todo : iterable of int
            Chunks, in order; taken from as room is made.
        count : int
            How many they are.
        most : int, optional
            Tasks in flight at most; by default two for each thread of the cluster.
        """
        rest, left = iter(todo), count
        self._alone = None
        while True:
            left -= self._fill(rest, left, most)
            if not self._flying:
                return
            landed = self._landed(_THREADS_EVERY if self._threads else _ALONE_EVERY)
            self._lonely(bool(landed))
            for answer in landed:
                outcome = answer.outcome
                if outcome is not None:
                    self.pace.note(len(answer.numbers) - len(outcome.left), outcome.spent)
                    self._back.extend(outcome.left)
                yield answer

    def again(self, number: int, avoid: Collection[str] = ()) -> None:
        """Give a chunk another try, before those that had none; on its own, on another worker.

        Parameters
        ----------
        number : int
        avoid : collection of str
            Addresses of workers on which it failed; others are preferred while there are any.
        """
        self._again.appendleft((number, avoid))

    def drain(self, seconds: float) -> Iterator[Answer]:
        """Answers that still come within so many seconds; nothing more is submitted."""
        stop = time.monotonic() + seconds
        while self._flying and (left := stop - time.monotonic()) > 0:
            yield from self._landed(left)

    def cancel(self) -> None:
        """Take back what does not run yet, and forget the rest."""
        futures = [future for future, _ in self._flying.values()]
        self._flying.clear()
        self._near.clear()
        self._again.clear()
        self._back.clear()
        # The scheduler may be gone.
        with contextlib.suppress(Exception):
            self.client.cancel(futures)

    def _fill(self, rest: Iterator[int], left: int, most: int | None) -> int:
        """Submit as much as there is room for; returns how many chunks of the rest that took."""
        if time.monotonic() - self._looked > (_THREADS_EVERY if self._threads else _ALONE_EVERY):
            self._threads, self._looked = self.workers(), time.monotonic()
            self._free()
        lanes = max(1, sum(self._threads.values()))
        limit = _IN_FLIGHT_PER_THREAD * lanes if most is None else most
        room = limit - len(self._flying)
        if self._flying and room * _WAVE < limit:
            return 0
        groups: list[tuple[int, ...]] = []
        while self._again and room > 0:
            number, avoid = self._again.popleft()
            room -= 1
            if others := [address for address in self._threads if avoid and address not in avoid]:
                self._submit([(number,)], near=others)
            else:
                groups.append((number,))
        taken = 0
        while room > len(groups):
            size = min(self.pace.size(left - taken + len(self._back), lanes), self.most)
            back = [self._back.popleft() for _ in range(min(size, len(self._back)))]
            new = tuple(islice(rest, size - len(back)))
            if not back and not new:
                break
            groups.append((*back, *new))
            taken += len(new)
        self._submit(groups)
        return taken

    def _lonely(self, answered: bool) -> None:
        """Say so, once, when there has been no worker for long: the run waits for one to join."""
        now = time.monotonic()
        if answered or self._threads:
            self._alone = None
        elif self._alone is None:
            self._alone = now
        elif now - self._alone > _ALONE and not self._told:
            self._told = True
            warn_user(
                f"no worker for {_ALONE:.0f} s: the run waits until one joins the scheduler at "
                f"{self.client.scheduler.address}; stop it with Ctrl-C, it can be gone on with"
            )

    def _free(self) -> None:
        """Submit tasks anew whose workers are all gone.

        Dask lets such a task run elsewhere, but not on workers that join later: where none was
        left for a moment, it would wait for those that are gone for good.
        """
        lost = [key for key, near in self._near.items() if not near & self._threads.keys()]
        if not lost:
            return
        bound = [self._flying.pop(key) for key in lost]
        for key in lost:
            del self._near[key]
        self.client.cancel([future for future, _ in bound])
        self._submit([group for _, group in bound])

    def _submit(self, groups: list[tuple[int, ...]], near: Collection[str] = ()) -> None:
        """Submit tasks in one message: the scheduler keeps a record per message for good."""
        if not groups:
            return
        # Other workers too, as those that are preferred may be busy, or gone.
        where = {"workers": list(near), "allow_other_workers": True} if near else {}
        first = self.tasks
        self.tasks += len(groups)
        # The count makes them unique: a chunk may be tried again.
        keys = [(*self._named(group[0]), first + n) for n, group in enumerate(groups)]
        futures = self.client.map(
            self.task,
            [self.run] * len(groups),
            groups,
            key=keys,
            pure=False,
            resources=self.resources,
            **where,
        )
        for future, group in zip(futures, groups, strict=True):
            self._flying[future.key] = future, group
            if near:
                self._near[future.key] = frozenset(near)
            future.add_done_callback(self._landing.put)

    def _named(self, number: int) -> tuple[Any, ...]:
        return (f"chunk-{self.run}", number) if self.name is None else self.name(number)

    def _landed(self, timeout: float) -> list[Answer]:
        """All answers that are there, one at least unless none comes in time."""
        landed = []
        with contextlib.suppress(queue.Empty):
            landed.append(self._landing.get(timeout=timeout))
            while True:
                landed.append(self._landing.get_nowait())
        pairs = [self._flying.pop(future.key, None) for future in landed]
        for future in landed:
            self._near.pop(future.key, None)
        ours = [pair for pair in pairs if pair is not None]
        fine = [future for future, _ in ours if future.status == "finished"]
        results = dict(zip([future.key for future in fine], self._gathered(fine), strict=True))
        return [_answer(future, group, results.get(future.key)) for future, group in ours]

    def _gathered(self, futures: list[Future]) -> list[Any]:
        """Results, all in one message; None for one that was lost and failed when it was redone."""
        if not futures:
            return []
        try:
            return list(self.client.gather(futures))
        except Exception:
            return [None if future.exception() else future.result() for future in futures]


def _answer(future: Future, group: tuple[int, ...], outcome: Any) -> Answer:
    if outcome is not None:
        return Answer(group, outcome)
    if future.status == "cancelled":
        return Answer(group, error=ConnectionError("the scheduler closed or cancelled the work"))
    return Answer(group, error=future.exception())
