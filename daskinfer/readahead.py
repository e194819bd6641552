"""Read ahead of the device, as far as the device needs it.

How many tiles must be on their way depends on the storage and on the model: none where a slow model
waits for a fast disk, a dozen where a fast one waits for object storage.  So the depth is no
setting.  Whoever feeds the device says at each tile what it saw in the mailbox, and a stream knows
whether its tiles came early, that is, were there when they were asked for and would have been with
a depth of one less:

- The device is hungry, and tiles do not come early: the depth grows by one at once, for every
  moment that the device idles is lost.
- The mailbox is full, and tiles come early: after `_PATIENCE` such tiles in a row the depth shrinks
  by one.  What is read too early costs memory alone, a tile or so, hence the slow way down.

A full mailbox alone says too little: tiles that wait to be taken keep it full for long after the
depth has become too small, and it would fall far below what is needed.  A hungry device alone does
not either: where tiles come early it is not reading that holds it up.

At depth 0 every tile is read in the thread that asks for it.

Streams take turns: the next begins to read when the one before has begun its last tile.  Chunks
that are read side by side also end together, wait together for their results and are encoded
together, and for as long the device has nothing to run; in turns, one is read while another is
encoded.  A stream that begins no tile for `_STALLED` seconds loses its turn: a server that does not
answer, or a chunk that waits for room, holds up no other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["MOST", "ReadAhead"]

W = TypeVar("W")
P = TypeVar("P")

MOST = 16
_NICE = 10
_STALLED = 1.0
_PATIENCE = 16


class ReadAhead:
    """Threads that read tiles before they are asked for; one per process and run.

    Streams read one after the other, and share one depth, so that memory is bounded by it however
    many chunks are at work: beside the tile that each stream holds, no more than `depth` tiles are
    being read or wait to be taken.

    Parameters
    ----------
    depth : int, default 1
        Tiles that are read ahead at first.
    most : int, default 16
        Largest depth, and number of threads, which are started as they are needed.

    Raises
    ------
    ValueError
        If `depth` is not between 0 and `most`.

    Examples
    --------
    >>> with ReadAhead() as ahead:
    ...     for pixels in ahead.stream(lambda window: window * 10, [1, 2, 3]):
    ...         ahead.adapt(hungry=False, full=False)
    ...         print(pixels)
    10
    20
    30
    """

    def __init__(self, depth: int = 1, *, most: int = MOST) -> None:
        if not 0 <= depth <= most:
            raise ValueError(f"depth must be between 0 and most, {most}, got {depth}")
        self._most = most
        self._depth = depth
        # Reentrant: a stream that was left unfinished may be collected at any allocation, also at
        # one under this lock.
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._turn: object = None  # windows of the stream whose turn it is
        self._begun = 0.0  # when it last began a tile
        self._out = 0
        self._calm = 0
        self._seen = threading.local()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def depth(self) -> int:
        """Tiles that are read ahead now."""
        with self._lock:
            return self._depth

    @property
    def outstanding(self) -> int:
        """Tiles that are being read ahead, or are read and were not taken yet."""
        with self._lock:
            return self._out

    def adapt(self, *, hungry: bool, full: bool) -> None:
        """Tell what the mailbox looked like when a tile of this thread's stream was put into it.

        Parameters
        ----------
        hungry : bool
            The device has nothing to run next.
        full : bool
            The tile has to wait for room.  With `hungry` (a mailbox of one batch) this counts:
            reading more would not help.
        """
        early: bool | None = getattr(self._seen, "early", None)
        if early is None:
            return
        with self._lock:
            if full and early:
                self._calm += 1
            elif hungry or not early:
                self._calm = 0
            if self._calm >= _PATIENCE:
                self._calm = 0
                self._depth = max(0, self._depth - 1)
            elif hungry and not (full or early):
                self._depth = min(self._most, self._depth + 1)

    def stream(self, read: Callable[[W], P], windows: Iterable[W]) -> Generator[P, None, None]:
        """Read windows in order, once the stream before has begun its last one.

        Parameters
        ----------
        read : callable
            Reads one window; called from several threads at once.
        windows : iterable

        Yields
        ------
        object
            What `read` gives for each window.  Its error is raised at its window, after which
            nothing more is read for this stream.  The same holds when the stream is closed: close
            it if it is left before its end (`contextlib.closing`).
        """
        rest = deque(windows)
        waiting: deque[_Ticket[P]] = deque()
        # No depth helps the first tile, and the last ones have no next one: they tell nothing.
        telling = False
        try:
            self._take_turn(rest)
            while waiting or rest:
                early = False
                if waiting:
                    ticket = waiting.popleft()
                    early = ticket.done and (not waiting or waiting[0].done)
                    pixels = ticket.take()
                    self._fill(waiting, read, rest)
                else:
                    window = rest.popleft()
                    # This one is read here, the next ones meanwhile.
                    self._fill(waiting, read, rest)
                    pixels = read(window)
                self._seen.early = early if telling and rest else None
                telling = True
                yield pixels
        finally:
            rest.clear()
            self._move(rest)
            for ticket in waiting:
                ticket.drop()

    def close(self) -> None:
        """Wait for the reads at work and end the threads; streams go on without reading ahead."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _take_turn(self, rest: object) -> None:
        with self._moved:
            while self._turn is not None:
                left = self._begun + _STALLED - time.monotonic()
                if left <= 0:
                    break
                self._moved.wait(left)
            self._turn, self._begun = rest, time.monotonic()

    def _move(self, rest: deque[W]) -> None:
        """Note that a stream began a tile; after its last one it is the next one's turn."""
        with self._moved:
            if self._turn is rest:
                self._begun = time.monotonic()
                if not rest:
                    self._turn = None
                    self._moved.notify_all()

    def _fill(self, waiting: deque[_Ticket[P]], read: Callable[[W], P], rest: deque[W]) -> None:
        """Start reads up to the depth."""
        with self._lock:
            room = 0 if self._closed else self._depth - self._out
            for _ in range(min(room, len(rest))):
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(
                        self._most, "daskinfer-read", initializer=_give_way
                    )
                self._out += 1
                waiting.append(_Ticket(self._pool.submit(read, rest.popleft()), self._taken))
        self._move(rest)

    def _taken(self) -> None:
        with self._lock:
            self._out -= 1


def _give_way() -> None:
    """Let the device's threads go first where cores are short.

    They sleep most of the time and have to be at once where a batch is due; a reader that comes
    later costs nothing as long as tiles are waiting.
    """
    if sys.platform == "linux":
        # There a thread has a priority of its own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class _Ticket(Generic[P]):
    """A read under way, which counts until it is taken or, dropped, has ended."""

    def __init__(self, future: Future[P], release: Callable[[], None]) -> None:
        self._future = future
        self._release = release

    @property
    def done(self) -> bool:
        return self._future.done()

    def take(self) -> P:
        try:
            return self._future.result()
        finally:
            self._release()

    def drop(self) -> None:
        self._future.cancel()
        self._future.add_done_callback(lambda _: self._release())
