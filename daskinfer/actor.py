"""`InferenceActor`: one device, one model, one mailbox.  Knows no Dask.

Chunk tasks of a process hand their tiles to the actor and get futures back.  A tile is copied by
its caller's own thread into the next free slot of the batch that is being filled, so collating
costs the device thread nothing; a ring of such buffers is the bounded mailbox, and a caller blocks
while the ring is full, which holds the readers back to the pace of the device.  Tiles of different
chunks meet in one batch.

A batch leaves when it is full, or when nobody is left who could add to it (every producer has
handed in what it had), or when it has waited for `timeout`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .forward import Array, BatchFunction

__all__ = ["ActorMetrics", "InferenceActor"]


@dataclass(frozen=True)
class ActorMetrics:
    """What an actor has done so far.

    Attributes
    ----------
    tiles, batches : int
        Tiles and batches run.
    slots : int
        Tiles that would have fitted into those batches.
    busy : float
        Seconds in which the device thread ran a batch.
    elapsed : float
        Seconds from the start of the first batch to the end of the last.
    """

    tiles: int = 0
    batches: int = 0
    slots: int = 0
    busy: float = 0.0
    elapsed: float = 0.0

    @property
    def fill(self) -> float:
        """Tiles per slot, 1.0 when every batch was full."""
        return self.tiles / self.slots if self.slots else 0.0


class _Buffer:
    """A batch being filled: slots are reserved under the actor's lock, copied into outside it."""

    def __init__(self, size: int, shape: tuple[int, int, int], dtype: npt.DTypeLike) -> None:
        self.data = np.empty((size, *shape), dtype)
        self.valid = np.ones((size, *shape[1:]), np.bool_)
        self.reset()

    def reset(self) -> None:
        self.futures: list[Future[Array]] = []
        self.filled = 0
        self.masked = False
        self.opened = 0.0

    @property
    def complete(self) -> bool:
        """Every reserved slot has been copied into."""
        return bool(self.futures) and self.filled == len(self.futures)

    @property
    def full(self) -> bool:
        return len(self.futures) == len(self.data)

    def copy(self, slot: int, tile: Array, valid: npt.NDArray[np.bool_] | None) -> None:
        np.copyto(self.data[slot], tile)
        if valid is not None:
            self.valid[slot] = valid
            self.masked = True
        else:
            self.valid[slot] = True


class InferenceActor:
    """Owns one device and one copy of the model; answers through futures.

    Parameters
    ----------
    function : BatchFunction
        Runs one batch on the device; called from the actor's own thread only.
    tile_shape : tuple of int
        ``(band, y, x)`` of every tile.
    dtype : dtype
        Of the tiles, as the raster stores them.
    batch_size : int, default 8
        Tiles in a full batch.
    timeout : float, default 0.1
        Seconds that a batch which is not full waits while producers are still at work.
    ring : int, default 3
        Batches that may be filled, waiting or running at once: the bound of the mailbox.

    Examples
    --------
    >>> def double(batch, valid):
    ...     return batch * 2
    >>> with InferenceActor(double, (1, 2, 2), "float32", batch_size=4) as actor:
    ...     with actor.producer():
    ...         futures = [actor.submit(np.full((1, 2, 2), i, "float32")) for i in range(3)]
    ...     [float(future.result().max()) for future in futures]
    [0.0, 2.0, 4.0]
    """

    def __init__(
        self,
        function: BatchFunction,
        tile_shape: tuple[int, int, int],
        dtype: npt.DTypeLike,
        *,
        batch_size: int = 8,
        timeout: float = 0.1,
        ring: int = 3,
    ) -> None:
        if batch_size < 1 or ring < 1:
            raise ValueError(f"batch_size and ring must be at least 1, got {batch_size} and {ring}")
        self._function = function
        self._shape = tuple(tile_shape)
        self._dtype = np.dtype(dtype)
        self._timeout = timeout
        self._changed = threading.Condition()
        self._free = [_Buffer(batch_size, tile_shape, dtype) for _ in range(ring)]
        self._open: _Buffer | None = None
        self._sealed: list[_Buffer] = []
        self._producers = 0
        self._closed = False
        self._metrics = ActorMetrics()
        self._began = 0.0
        self._thread = threading.Thread(target=self._serve, name="daskinfer-device", daemon=True)
        self._thread.start()

    def __enter__(self) -> InferenceActor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def metrics(self) -> ActorMetrics:
        """A snapshot of what has been done."""
        with self._changed:
            return self._metrics

    @contextlib.contextmanager
    def producer(self) -> Iterator[None]:
        """Announce tiles to come: while inside, a batch that is not full waits for them.

        Enter before reading pixels, leave before waiting for results.
        """
        with self._changed:
            self._producers += 1
        try:
            yield
        finally:
            with self._changed:
                self._producers -= 1
                self._changed.notify_all()

    def submit(self, tile: Array, valid: npt.NDArray[np.bool_] | None = None) -> Future[Array]:
        """Put one tile into the mailbox; blocks while the mailbox is full.

        Parameters
        ----------
        tile : ndarray, shape (band, y, x)
            Copied before this returns, so read-only and shared arrays are safe.
        valid : ndarray of bool, shape (y, x), optional
            False where a pixel is nodata.

        Returns
        -------
        concurrent.futures.Future
            The model's ``(band, y, x)`` output for this tile, or the error of its batch.

        Raises
        ------
        ValueError, TypeError
            If the tile has another shape or dtype than the actor was made for.
        RuntimeError
            If the actor is closed.
        """
        self._check(tile, valid)
        future: Future[Array] = Future()
        # Running from the start: a caller that cancelled it would stop the device thread otherwise.
        future.set_running_or_notify_cancel()
        with self._changed:
            buffer = self._reserve(future)
            slot = len(buffer.futures) - 1
        try:
            # Outside the lock: callers copy at the same time.
            buffer.copy(slot, tile, valid)
        finally:
            with self._changed:
                buffer.filled += 1
                self._changed.notify_all()
        return future

    def close(self) -> None:
        """Run what is in the mailbox, then stop the device thread and drop the model."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _check(self, tile: Array, valid: npt.NDArray[np.bool_] | None) -> None:
        """Refuse what would not fit before it takes a slot."""
        if tile.shape != self._shape:
            raise ValueError(f"tile has shape {tile.shape}, the actor was made for {self._shape}")
        # "equiv": another byte order is fine, another dtype would change the numbers silently.
        if not np.can_cast(tile.dtype, self._dtype, "equiv"):
            raise TypeError(f"tile has dtype {tile.dtype}, the actor was made for {self._dtype}")
        if valid is not None and valid.shape != self._shape[1:]:
            raise ValueError(f"mask has shape {valid.shape}, the actor needs {self._shape[1:]}")

    def _reserve(self, future: Future[Array]) -> _Buffer:
        self._changed.wait_for(lambda: self._closed or self._open is not None or self._free)
        if self._closed:
            raise RuntimeError("the actor is closed")
        if self._open is None:
            self._open = self._free.pop()
            self._open.reset()
            self._open.opened = time.monotonic()
        buffer = self._open
        buffer.futures.append(future)
        if buffer.full:
            self._sealed.append(buffer)
            self._open = None
        return buffer

    def _serve(self) -> None:
        while (buffer := self._next()) is not None:
            self._run(buffer)
            with self._changed:
                self._free.append(buffer)
                self._changed.notify_all()
        # What the model holds on the device goes with the thread that used it.
        del self._function

    def _next(self) -> _Buffer | None:
        """Wait for the next batch to run; None when closed and empty."""
        with self._changed:
            while True:
                if self._sealed and self._sealed[0].complete:
                    return self._sealed.pop(0)
                if not self._sealed and self._open is not None and self._open.complete:
                    wait = self._patience(self._open)
                    if wait <= 0:
                        buffer, self._open = self._open, None
                        return buffer
                    self._changed.wait(wait)
                elif self._closed and not self._sealed and self._open is None:
                    return None
                else:
                    self._changed.wait()

    def _patience(self, buffer: _Buffer) -> float:
        """Seconds for which a batch that is not full may go on waiting."""
        if self._closed or not self._producers:
            return 0.0
        return buffer.opened + self._timeout - time.monotonic()

    def _run(self, buffer: _Buffer) -> None:
        size = len(buffer.futures)
        start = time.perf_counter()
        outcomes = self._outcomes(buffer.data[:size], buffer.valid[:size], buffer.masked)
        self._count(start, time.perf_counter(), size, len(buffer.data))
        for future, outcome in zip(buffer.futures, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _outcomes(
        self, data: Array, valid: npt.NDArray[np.bool_], masked: bool
    ) -> list[Array | BaseException]:
        """Result or error of each tile.

        A batch that fails is run again in halves: the error reaches the tile that caused it and no
        neighbour, and a batch too large for the device's memory gets through in parts.
        """
        try:
            outputs = self._function(data, valid if masked else None)
            if len(outputs) != len(data):
                raise ValueError(f"the model returned {len(outputs)} results for {len(data)} tiles")
            if np.may_share_memory(outputs, data):
                # The buffer is filled again while callers still hold their results.
                outputs = np.array(outputs)
        except BaseException as error:
            # Whatever it is, the caller gets it; the actor lives on.
            if len(data) == 1:
                return [error]
            half = len(data) // 2
            first = self._outcomes(data[:half], valid[:half], masked)
            return first + self._outcomes(data[half:], valid[half:], masked)
        return list(outputs)

    def _count(self, start: float, stop: float, tiles: int, slots: int) -> None:
        self._began = self._began or start
        with self._changed:
            done: Any = self._metrics
            self._metrics = ActorMetrics(
                tiles=done.tiles + tiles,
                batches=done.batches + 1,
                slots=done.slots + slots,
                busy=done.busy + (stop - start),
                elapsed=stop - self._began,
            )
