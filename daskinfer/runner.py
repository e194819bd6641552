"""Drive a plan on a Dask client, a bounded number of chunks at a time.

The raster's graph is never built: chunk tasks are submitted as others finish, so that the client
and the scheduler hold the chunks in flight and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, Future, KilledWorker, as_completed, get_client

from .clusters import cluster
from .cog import WorkFile, encode_chunk
from .diagnosis import Load
from .errors import InferenceError
from .ledger import Failure, Ledger
from .monitor import Callback, ChunkDone, ChunkFailed, ChunkRetried, Event, RunFinished, RunStarted
from .planner import Plan, check_output
from .planner import plan as make_plan
from .raster import Raster, layout_warning
from .report import Report
from .spans import StageTimes
from .station import ChunkError, ChunkResult, StationPlugin, run_chunk, work_path
from .trace import TraceWriter

__all__ = ["run"]

_ATTEMPTS = 3
# Chunks submitted per thread: one that runs and one that waits for it to end.
_IN_FLIGHT_PER_THREAD = 2
# Of a worker's "GPU", per chunk: all its threads may be at work, the actor sees to the turns.
_GPU_SHARE = 1e-3
_THREADS_EVERY = 5.0  # seconds between looks at how many threads the cluster has


def run(
    source: Any,
    model: Any = None,
    output: str | os.PathLike[str] | None = None,
    *,
    client: Client | None = None,
    callbacks: Sequence[Callback] = (),
    trace: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Report:
    """Run a model over a raster and write the result as a Cloud Optimized GeoTIFF.

    Rerunning the same call after it was stopped goes on where it stopped.

    Parameters
    ----------
    source : Plan, path, URL or DataArray
        A plan, which says all the rest; or a raster as for `open_raster`.
    model : Model or anything that `load_model` takes
    output : path
        The COG to write.
    client : distributed.Client, optional
        Where to run; by default the current client, else threads of this process.
    callbacks : sequence of callable
        Called with each `daskinfer.monitor.Event`.
    trace : path, optional
        Write a timeline of every stage of every tile and chunk, which https://ui.perfetto.dev and
        chrome://tracing open.
    **options
        Of `plan`.

    Returns
    -------
    Report

    Raises
    ------
    InferenceError
        If a chunk failed three times and ``on_error="raise"``, or the cluster was lost.
    FileNotFoundError, FileExistsError, PermissionError, ValueError, TypeError
        As of `plan`, before any work; ValueError also where a partial output belongs to a run with
        other settings.

    Examples
    --------
    >>> import os, tempfile
    >>> from daskinfer.demo import demo_model, demo_path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = run(demo_path(), demo_model(), os.path.join(folder, "clouds.tif"))
    >>> report.complete, report.chunks
    (True, 1)
    """
    plan = _planned(source, model, output, options)
    _check_callbacks(callbacks)
    check_output(plan.output, None, plan.overwrite)
    if plan.source.changed():
        raise ValueError("the source has changed since it was planned: plan again")
    with (
        _tracing(trace) as writers,
        _client(client) as active,
        _Outputs.prepare(plan) as outputs,
    ):
        driver = _Driver(plan, active, outputs, [*callbacks, *writers], bool(writers))
        return driver.drive()


@contextlib.contextmanager
def _tracing(path: str | os.PathLike[str] | None) -> Iterator[list[TraceWriter]]:
    if path is None:
        yield []
        return
    with TraceWriter(path) as writer:
        yield [writer]


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    if not isinstance(callbacks, (list, tuple)) or not all(map(callable, callbacks)):
        raise TypeError(f"callbacks must be a list of functions of one event, got {callbacks!r}")


def _planned(source: Any, model: Any, output: Any, options: dict[str, Any]) -> Plan:
    if isinstance(source, Plan):
        if model is not None or output is not None or options:
            raise TypeError("run(plan) takes its settings from the plan: pass them to plan()")
        return source
    if model is None or output is None:
        raise TypeError("run needs a Plan, or a source, a model and an output")
    return make_plan(source, model, output, **options)


@contextlib.contextmanager
def _client(given: Client | None) -> Iterator[Client]:
    """The client given, the current one, or one of our own that is closed afterwards."""
    if given is None:
        with contextlib.suppress(ValueError):
            given = get_client()
    elif not isinstance(given, Client):
        raise TypeError(f"client must be a distributed.Client, got {given!r}")
    if given is not None:
        yield given
        return
    with cluster("local") as own:
        yield own


@dataclass
class _Outputs:
    """The work file and the ledger of a run."""

    plan: Plan
    work: WorkFile
    ledger: Ledger

    @classmethod
    @contextlib.contextmanager
    def prepare(cls, plan: Plan) -> Iterator[_Outputs]:
        """Make them, or go on with those of an earlier run.

        The ledger comes first and goes last, and says what the work file holds: one without the
        other is never gone on with.
        """
        path = work_path(plan)
        with Ledger(f"{path}.jsonl") as ledger:
            if plan.overwrite or not os.path.exists(path):
                Path(path).unlink(missing_ok=True)
                ledger.begin(plan.settings())
                WorkFile.create(path, plan.cog, plan.inference.chunk).close()
            else:
                ledger.go_on(plan.settings(), path)
            with WorkFile.open(path, plan.cog, plan.inference.chunk) as work:
                yield cls(plan, work, ledger)

    def todo(self) -> list[int]:
        """Chunks that are not in the work file, or are there as the nodata of a failure."""
        inference, tiling = self.plan.inference, self.plan.tiling
        done = self.work.done(
            [inference.window((i, 0)).rows.start for i in range(tiling.grid[0])],
            [inference.window((0, j)).cols.start for j in range(tiling.grid[1])],
        )
        finished = done.ravel()
        finished[[failure.chunk for failure in self.ledger.failures()]] = False
        striped = isinstance(self.plan.source, Raster) and self.plan.source.striped
        order = tiling.order(tiling.grid[1]) if striped else tiling.order()
        return [number for number in order if not finished[number]]

    def leave_nodata(self, number: int) -> None:
        """Write nodata where a chunk failed for good."""
        window = self.plan.inference.window(self.plan.tiling.index_of(number))
        form = self.plan.inference.form
        nodata = np.full((form.bands, *window.shape), form.nodata, form.dtype)
        self.work.append(encode_chunk(self.plan.cog, nodata, *window.origin, self.work.levels))

    def finish(self, failures: Sequence[Failure]) -> None:
        """Turn the work file into the output."""
        self.work.finish(self.plan.output)
        # What the output lacks stays written beside it.
        lacking = Path(f"{self.plan.output}.failed.jsonl")
        if failures:
            os.replace(self.ledger.path, lacking)
        else:
            lacking.unlink(missing_ok=True)
            self.ledger.remove()


@dataclass
class _Driver:
    """One execution of a plan."""

    plan: Plan
    client: Client
    outputs: _Outputs
    callbacks: Sequence[Callback]
    tracing: bool = False
    run: str = field(default_factory=lambda: f"daskinfer-{uuid.uuid4().hex[:8]}")
    tiles: int = 0
    nonfinite: int = 0
    retries: int = 0
    metrics: dict[tuple[str, int], ChunkResult] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)
    placement: dict[str, float] | None = None

    def drive(self) -> Report:
        start = time.perf_counter()
        todo = self.outputs.todo()
        done = self.plan.tiling.chunks - len(todo)
        self._emit(RunStarted(self.plan, self.plan.tiling.chunks, done, self.client.dashboard_link))
        self.placement = self._placement()
        with self._stations():
            self._stream(deque(todo), self._limit)
            for number in tuple(self.suspects):
                self._stream(deque([number]), lambda: 1)
        self.outputs.finish(self.failures)
        report = self._report(done, time.perf_counter() - start)
        self._emit(RunFinished(report))
        return report

    def _emit(self, event: Event) -> None:
        for callback in self.callbacks:
            callback(event)

    @contextlib.contextmanager
    def _stations(self) -> Iterator[None]:
        """Bring the plan to all workers, also those that join later, and clear up afterwards."""
        hosts = [worker["host"] for worker in self._workers()]
        neighbours = {host: hosts.count(host) for host in set(hosts)}
        shipped = self.plan.model.ship()
        plugin = StationPlugin(self.run, self.plan, shipped, neighbours, self.tracing)
        self.client.register_plugin(plugin)
        try:
            yield
        finally:
            self.client.unregister_worker_plugin(self.run)

    def _stream(self, todo: deque[int], room: Callable[[], int]) -> None:
        """Keep a bounded number of chunks in flight until all are done or one failed for good."""
        flow = as_completed(loop=self.client.loop)
        limit, looked = room(), time.monotonic()
        flow.update(self._submit(todo, limit))
        try:
            for future in flow:
                again = self._settle(future)
                if again is not None:
                    todo.appendleft(again)
                if time.monotonic() - looked > _THREADS_EVERY:
                    limit, looked = room(), time.monotonic()
                flow.update(self._submit(todo, limit - flow.count()))
        finally:
            # After an error or Ctrl-C nothing more is started; what runs ends by itself.
            self.client.cancel(list(flow.futures))

    def _limit(self) -> int:
        workers = self._workers()
        threads: int = sum(worker["nthreads"] for worker in workers)
        return _IN_FLIGHT_PER_THREAD * max(1, threads)

    def _workers(self) -> list[dict[str, Any]]:
        """Workers that chunks go to: those that declare a GPU, where any does."""
        every = list(self.client.scheduler_info(n_workers=-1)["workers"].values())
        if self.plan.inference.device == "cpu":
            return every
        return [worker for worker in every if worker["resources"].get("GPU")] or every

    def _placement(self) -> dict[str, float] | None:
        """What a chunk asks of its worker: a GPU, of which the actor takes care, or nothing.

        Not the worker's name or address: a chunk bound to those hangs when the worker comes back
        under another one.
        """
        placed = any(worker["resources"].get("GPU") for worker in self._workers())
        return {"GPU": _GPU_SHARE} if placed and self.plan.inference.device != "cpu" else None

    def _submit(self, todo: deque[int], room: int) -> list[Future]:
        """Submit up to `room` chunks in one message (the scheduler keeps a record per message)."""
        numbers = [todo.popleft() for _ in range(min(room, len(todo)))]
        if not numbers:
            return []
        group = f"infer-{self.run}"
        keys = [(group, n, self.attempts.get(n, 0), self.suspects.count(n)) for n in numbers]
        futures: list[Future] = self.client.map(
            run_chunk,
            [self.run] * len(numbers),
            numbers,
            key=keys,
            pure=False,
            resources=self.placement,
        )
        return futures

    def _settle(self, future: Future) -> int | None:
        """Take a finished task; returns the chunk when it is to be tried again."""
        number = int(future.key[1])
        if future.status == "cancelled":
            raise InferenceError(
                "the cluster was lost (its scheduler closed or cancelled the work): run the same "
                "call again to go on"
            )
        if future.status != "error":
            self._done(future.result())
            return None
        error = future.exception()
        if isinstance(error, KilledWorker) and number not in self.suspects:
            # Whatever ran beside the chunk that killed its worker is named too: each gets a try
            # on its own, which tells the guilty one.
            self.suspects.append(number)
            return None
        return self._failed(number, error)

    def _done(self, result: ChunkResult) -> None:
        self.tiles += result.tiles
        self.nonfinite += result.nonfinite
        self.metrics[result.process] = result
        self._emit(
            ChunkDone(
                result.chunk,
                self._window(result.chunk),
                result.tiles,
                result.seconds,
                result.worker,
                result.spans,
                result.process,
            )
        )

    def _failed(self, number: int, error: BaseException) -> int | None:
        attempt = self.attempts[number] = self.attempts.get(number, 0) + 1
        window, text, worker, cause = self._window(number), *_told(error)
        if attempt < _ATTEMPTS and not isinstance(error, KilledWorker):
            self.retries += 1
            self._emit(ChunkRetried(number, window, attempt, text))
            return number
        failure = Failure(number, window, text, worker)
        self.outputs.ledger.failed(failure)
        self._emit(ChunkFailed(number, window, text))
        if self.plan.on_error == "raise":
            raise InferenceError(
                f"chunk {number} at (row, col, height, width) = {window} failed on {worker}: {text}"
                f". The rest is kept in {work_path(self.plan)}: run the same call again to go on, "
                "or with on_error='nodata' to leave such chunks nodata",
                window=window,
                chunk=self.plan.tiling.index_of(number),
                worker=worker,
            ) from cause
        self.outputs.leave_nodata(number)
        self.failures.append(failure)
        return None

    def _window(self, number: int) -> tuple[int, int, int, int]:
        tiling = self.plan.tiling
        return tiling.chunk_at(tiling.index_of(number)).window.bounds()

    def _report(self, resumed: int, seconds: float) -> Report:
        last = self.metrics.values()
        metrics = [result.metrics for result in last]
        elapsed = sum(m.elapsed for m in metrics)
        busy = sum(m.busy for m in metrics)
        slots, batches = sum(m.slots for m in metrics), sum(m.batches for m in metrics)
        load = Load(
            busy=busy / elapsed if elapsed else 0.0,
            busy_whole=busy / (seconds * len(metrics)) if metrics else 0.0,
            fill=sum(m.tiles for m in metrics) / slots if slots else 0.0,
            batches=batches,
            batch_size=min((m.batch_size for m in metrics), default=0),
            shrunk=any(m.shrunk for m in metrics),
            stages=StageTimes.merged(result.times for result in last),
            device=", ".join(sorted({m.device for m in metrics})),
            precision=self.plan.model.precision,
            source_note=layout_warning(self.plan.source, self.plan.tiling.chunk_at((0, 0)).read),
        )
        return Report(
            output=self.plan.output,
            shape=self.plan.cog.shapes[0],
            chunks=self.plan.tiling.chunks,
            resumed=resumed,
            tiles=self.tiles,
            seconds=seconds,
            load=load,
            queue_depth=sum(m.queued for m in metrics) / batches if batches else 0.0,
            batch_notes=tuple(sorted({m.note for m in metrics if m.note})),
            retries=self.retries,
            nonfinite=self.nonfinite,
            failures=tuple(self.failures),
            file_bytes=os.path.getsize(self.plan.output),
        )


def _told(error: BaseException) -> tuple[str, str, BaseException]:
    """Text, worker and cause of a failed task."""
    if isinstance(error, ChunkError):
        return error.text, error.worker, error.original()
    worker = getattr(getattr(error, "last_worker", None), "address", None)
    return f"{type(error).__name__}: {error}", str(worker or "an unknown worker"), error
