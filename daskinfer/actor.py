"""`InferenceActor`: one device, one model, one mailbox.  Knows no Dask.

Chunk tasks of a process hand their tiles to the actor and get futures back.  A tile is copied by
its caller's own thread into the next free slot of the batch that is being filled, so collating
costs the device nothing; a ring of such buffers is the bounded mailbox, and a caller blocks while
the ring is full, which holds the readers back to the pace of the device.  Tiles of different chunks
meet in one batch.

A batch leaves when it is full.  One that is not full leaves only when the device has nothing else
to do, and then when nobody is left who could add to it (every producer has handed in what it had)
or when it has waited for `timeout`.

Three threads carry batches through copy in, forward and copy out, so that the device runs one batch
while the next is brought and the last is fetched.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .device import BatchFunction, Device, FunctionDevice
from .metrics import ActorMetrics
from .pixels import Array, Mask
from .spans import Recorder

__all__ = ["RING", "InferenceActor"]

# One batch being filled, one waiting, one on the device, one on its way out.
RING = 4


class _Buffer:
    """A batch being filled: slots are reserved under the actor's lock, copied into outside it."""

    def __init__(
        self, device: Device, size: int, shape: tuple[int, int, int], dtype: npt.DTypeLike
    ) -> None:
        self.data = device.allocate((size, *shape), dtype)
        # A batch of fixed size takes slots along that hold no tile.
        self.data[:] = 0
        self.valid = np.ones((size, *shape[1:]), np.bool_)
        self.reset(size)

    def reset(self, size: int) -> None:
        self.size = size
        self.futures: list[Future[Array]] = []
        self.labels: set[Any] = set()
        self.filled = 0
        self.masked = False
        self.opened = 0.0

    @property
    def complete(self) -> bool:
        """Every reserved slot has been copied into."""
        return bool(self.futures) and self.filled == len(self.futures)

    @property
    def full(self) -> bool:
        return len(self.futures) >= self.size

    @property
    def chunks(self) -> list[Any]:
        """What the tiles belong to, as far as their callers said."""
        return sorted(label for label in self.labels if label is not None)

    def copy(self, slot: int, tile: Array, valid: Mask | None) -> None:
        np.copyto(self.data[slot], tile)
        if valid is not None:
            self.valid[slot] = valid
            self.masked = True
        else:
            self.valid[slot] = True


@dataclass
class _Batch:
    """A buffer on its way through the stages, and what the last stage made of it."""

    number: int
    buffer: _Buffer
    queued: int
    result: Any = None
    error: BaseException | None = None
    outcomes: list[Array | BaseException] | None = None
    interval: tuple[float, float] = (0.0, 0.0)


class InferenceActor:
    """Owns one device and one copy of the model; answers through futures.

    Parameters
    ----------
    device : Device or BatchFunction
        Runs batches; called from the actor's own threads only.
    tile_shape : tuple of int
        ``(band, y, x)`` of every tile.
    dtype : dtype
        Of the tiles, as the raster stores them.
    batch_size : int, default 8
        Tiles in a full batch.
    timeout : float, default 0.1
        Seconds that a batch which is not full waits for an idle device while producers are at work.
    ring : int, default 4
        Batches that may be filled, waiting or running at once: the bound of the mailbox.
    fixed : bool, default False
        Run every batch in full size, with empty slots where tiles lack, for models that take one
        shape only and for results that do not depend on how many tiles met in a batch.
    recorder : Recorder, optional
        Takes the times of all stages.
    note : str
        How the batch size was found, for the metrics.

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
        device: Device | BatchFunction,
        tile_shape: tuple[int, int, int],
        dtype: npt.DTypeLike,
        *,
        batch_size: int = 8,
        timeout: float = 0.1,
        ring: int = RING,
        fixed: bool = False,
        recorder: Recorder | None = None,
        note: str = "",
    ) -> None:
        if batch_size < 1 or ring < 1:
            raise ValueError(f"batch_size and ring must be at least 1, got {batch_size} and {ring}")
        self._device = device if isinstance(device, Device) else FunctionDevice(device)
        self._shape = tuple(tile_shape)
        self._dtype = np.dtype(dtype)
        self._timeout = timeout
        self._fixed = fixed
        self.recorder = recorder or Recorder()
        self._changed = threading.Condition()
        self._free = [_Buffer(self._device, batch_size, tile_shape, dtype) for _ in range(ring)]
        self._ring = ring
        self._open: _Buffer | None = None
        self._sealed: list[_Buffer] = []
        self._ahead = 0  # batches that have left the mailbox and not yet the device
        self._producers = 0
        self._closed = False
        self._taken = 0
        self._since: float | None = None  # when the batch that runs now was begun
        self._metrics = ActorMetrics(batch_size=batch_size, note=note, device=self._device.name)
        # One batch may wait between two stages: enough to overlap them, no more in memory.
        self._loaded: queue.Queue[_Batch | None] = queue.Queue(1)
        self._ran: queue.Queue[_Batch | None] = queue.Queue(1)
        stages = {"copy-in": self._copy_in, "device": self._forward, "copy-out": self._copy_out}
        self._threads = [
            threading.Thread(target=stage, name=f"daskinfer-{name}", daemon=True)
            for name, stage in stages.items()
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> InferenceActor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def metrics(self) -> ActorMetrics:
        """A snapshot of what has been done."""
        with self._changed:
            return self._metrics

    @property
    def hungry(self) -> bool:
        """Whether the device has nothing to run after what it runs now."""
        with self._changed:
            return not self._sealed and self._ahead <= 1

    @property
    def full(self) -> bool:
        """Whether the next tile would have to wait for room."""
        with self._changed:
            return self._open is None and not self._free

    @property
    def waiting(self) -> int:
        """Tiles in the mailbox."""
        with self._changed:
            boxes = self._sealed if self._open is None else [*self._sealed, self._open]
            return sum(len(box.futures) for box in boxes)

    @property
    def running(self) -> float:
        """Seconds for which the batch on the device has run; its time is not in the metrics yet."""
        since = self._since
        return 0.0 if since is None else time.perf_counter() - since

    def clear_metrics(self) -> None:
        """Start counting anew."""
        with self._changed:
            kept = self._metrics
            self._metrics = ActorMetrics(
                batch_size=kept.batch_size, note=kept.note, device=kept.device
            )
        self.recorder.clear()

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

    def submit(self, tile: Array, valid: Mask | None = None, label: Any = None) -> Future[Array]:
        """Put one tile into the mailbox; blocks while the mailbox is full.

        Parameters
        ----------
        tile : ndarray, shape (band, y, x)
            Copied before this returns, so read-only and shared arrays are safe.
        valid : ndarray of bool, shape (y, x), optional
            False where a pixel is nodata.
        label : hashable, optional
            What the tile belongs to, for the trace.

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
        # Running from the start: a caller that cancelled it would stop the actor otherwise.
        future.set_running_or_notify_cancel()
        with self.recorder.span("room", chunk=label), self._changed:
            buffer = self._reserve(future, label)
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
        """Run what is in the mailbox, then stop the threads and drop the model."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        # What the model holds on the device goes with it.
        self._device = Device()

    def _check(self, tile: Array, valid: Mask | None) -> None:
        """Refuse what would not fit before it takes a slot."""
        if tile.shape != self._shape:
            raise ValueError(f"tile has shape {tile.shape}, the actor was made for {self._shape}")
        # "equiv": another byte order is fine, another dtype would change the numbers silently.
        if not np.can_cast(tile.dtype, self._dtype, "equiv"):
            raise TypeError(f"tile has dtype {tile.dtype}, the actor was made for {self._dtype}")
        if valid is not None and valid.shape != self._shape[1:]:
            raise ValueError(f"mask has shape {valid.shape}, the actor needs {self._shape[1:]}")

    def _reserve(self, future: Future[Array], label: Any) -> _Buffer:
        self._changed.wait_for(lambda: self._closed or self._open is not None or self._free)
        if self._closed:
            raise RuntimeError("the actor is closed")
        if self._open is None:
            self._open = self._free.pop()
            self._open.reset(self._metrics.batch_size)
            self._open.opened = time.perf_counter()
        buffer = self._open
        buffer.futures.append(future)
        buffer.labels.add(label)
        if buffer.full:
            self._sealed.append(buffer)
            self._open = None
        return buffer

    # The three stages ----------------------------------------------------------------------------

    def _copy_in(self) -> None:
        while (batch := self._next()) is not None:
            start = time.perf_counter()
            try:
                batch.result = self._device.copy_in(*self._slots(batch.buffer))
            except BaseException as error:
                # Whatever it is, the callers get it; the actor lives on.
                batch.error = error
            self._record("copy in", start, batch)
            self._loaded.put(batch)
        self._loaded.put(None)

    def _forward(self) -> None:
        while (batch := self._loaded.get()) is not None:
            start = self._since = time.perf_counter()
            try:
                if batch.error is not None:
                    raise batch.error
                batch.result = self._device.forward(batch.result)
            except BaseException as error:
                batch.result, batch.error = None, None
                batch.outcomes = self._in_parts(batch.buffer, error)
            batch.interval = start, time.perf_counter()
            with self._changed:
                self._since = None
                self._ahead -= 1
                self._changed.notify_all()
            self._ran.put(batch)
        self._ran.put(None)

    def _copy_out(self) -> None:
        while (batch := self._ran.get()) is not None:
            start = time.perf_counter()
            if batch.outcomes is None:
                batch.outcomes = self._fetched(batch)
            self._record("copy out", start, batch)
            futures = batch.buffer.futures
            self._count(batch, len(futures))
            for future, outcome in zip(futures, batch.outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
            with self._changed:
                self._free.append(batch.buffer)
                self._changed.notify_all()

    def _next(self) -> _Batch | None:
        """Wait for the next batch to run; None when closed and empty."""
        with self._changed:
            while True:
                if self._sealed and self._sealed[0].complete:
                    return self._take(self._sealed.pop(0))
                if not self._sealed and self._open is not None and self._open.complete:
                    wait = self._patience(self._open)
                    if wait is None:
                        self._changed.wait()
                    elif wait > 0:
                        self._changed.wait(wait)
                    else:
                        buffer, self._open = self._open, None
                        return self._take(buffer)
                elif self._closed and not self._sealed and self._open is None:
                    return None
                else:
                    self._changed.wait()

    def _patience(self, buffer: _Buffer) -> float | None:
        """Seconds for which a batch that is not full may go on waiting; None: no need to hurry."""
        if self._closed:
            return 0.0
        if self._ahead:
            return None
        if not self._producers:
            return 0.0
        return buffer.opened + self._timeout - time.perf_counter()

    def _take(self, buffer: _Buffer) -> _Batch:
        self._ahead += 1
        self._taken += 1
        waiting = sum(len(other.futures) for other in self._sealed)
        return _Batch(self._taken, buffer, waiting)

    def _slots(self, buffer: _Buffer) -> tuple[Array, Mask | None]:
        size = buffer.size if self._fixed else len(buffer.futures)
        return buffer.data[:size], buffer.valid[:size] if buffer.masked else None

    def _fetched(self, batch: _Batch) -> list[Array | BaseException]:
        """Outputs of a batch that ran, one per tile."""
        tiles = len(batch.buffer.futures)
        try:
            outputs = self._device.copy_out(batch.result)
            batch.interval = self._device.interval(batch.result) or batch.interval
            expected = len(self._slots(batch.buffer)[0])
            return list(_checked(outputs, expected)[:tiles])
        except BaseException as error:
            return [error] * tiles
        finally:
            batch.result = None

    def _in_parts(self, buffer: _Buffer, error: BaseException) -> list[Array | BaseException]:
        """Result or error of each tile of a batch that failed, which is run again in halves.

        An error so reaches the tile that caused it and no neighbour, and a batch too large for the
        device's memory gets through; later batches are no larger than what did.
        """
        data, valid = self._slots(buffer)
        return self._halves(data, valid, error)[: len(buffer.futures)]

    def _halves(
        self, data: Array, valid: Mask | None, error: BaseException
    ) -> list[Array | BaseException]:
        if isinstance(error, MemoryError):
            # The frames of the failed call hold what takes the memory.
            traceback.clear_frames(error.__traceback__)
            self._shrink(-(-len(data) // 2))
        if len(data) == 1:
            return [_alone(error, data)]
        half = len(data) // 2
        outcomes: list[Array | BaseException] = []
        for part in (slice(half), slice(half, None)):
            mask = None if valid is None else valid[part]
            try:
                outputs = self._device.run(data[part], mask)
                outcomes += list(_checked(outputs, len(data[part])))
            except BaseException as again:
                outcomes += self._halves(data[part], mask, again)
        return outcomes

    def _shrink(self, size: int) -> None:
        with self._changed:
            smaller = min(size, self._metrics.batch_size)
            self._metrics = replace(self._metrics, batch_size=smaller, shrunk=True)

    def _record(self, stage: str, start: float, batch: _Batch) -> None:
        about = {"batch": batch.number, "chunks": batch.buffer.chunks}
        self.recorder.add(stage, start, time.perf_counter(), **about)

    def _count(self, batch: _Batch, tiles: int) -> None:
        start, stop = batch.interval
        about = {"batch": batch.number, "tiles": tiles, "chunks": batch.buffer.chunks}
        self.recorder.add("queue", batch.buffer.opened, start, batch=batch.number)
        self.recorder.add("forward", start, stop, **about)
        epoch = self.recorder.epoch
        with self._changed:
            self._metrics = self._metrics.after(
                epoch + start, epoch + stop, tiles, batch.buffer.size, batch.queued
            )


def _checked(outputs: Array, tiles: int) -> Array:
    if len(outputs) != tiles:
        raise ValueError(f"the model returned {len(outputs)} results for {tiles} tiles")
    return outputs


def _alone(error: BaseException, data: Array) -> BaseException:
    """The error of a single tile; one of memory says what could help."""
    if not isinstance(error, MemoryError):
        return error
    clear = MemoryError(
        f"the device has too little memory for one tile of (band, y, x) = {data.shape[1:]}: pass a "
        f"smaller tile= or precision='bfloat16' ({error})"
    )
    clear.__cause__ = error
    return clear
