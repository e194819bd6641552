"""Drive a plan on a Dask client, a bounded number of chunks at a time.

The raster's graph is never built: chunk tasks are submitted as others finish, so that the client
and the scheduler hold the chunks in flight and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from distributed import Client, KilledWorker, get_client

from .clusters import cluster
from .clusters.check import check_workers
from .clusters.workers import neighbours
from .dashboard.daskreport import dask_reporting
from .dashboard.feed import feeding
from .dashboard.view import RunView
from .dispatch import Answer, Dispatch
from .errors import InferenceError
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
)
from .ledger import Failure
from .memory import THREADS
from .metrics import Meters
from .objects.plan import ObjectPlan
from .outputs import Outputs, to_go_on, work_path
from .paths import absolute_path
from .planner import Plan, check_output
from .planner import plan as make_plan
from .raster import layout_warning
from .report import Report, check_html
from .station import ChunkError, GroupResult, StationPlugin, open_stations, run_chunks, stop_station
from .trace import tracing

__all__ = ["Job", "execute", "run"]

Job = Plan | ObjectPlan

_ATTEMPTS = 3
# Seconds that a run which is stopped waits for the chunks at work.
_GRACE = 20.0
# Of a worker's "GPU", per chunk: all its threads may be at work, the actor sees to the turns.
_GPU_SHARE = 1e-3


def run(
    source: Any,
    model: Any = None,
    output: str | os.PathLike[str] | None = None,
    *,
    client: Client | None = None,
    callbacks: Sequence[Callback] = (),
    trace: str | os.PathLike[str] | None = None,
    dashboard: bool = True,
    performance_report: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Report:
    """Run a model over a raster and write the result as a Cloud Optimized GeoTIFF.

    Rerunning the same call after it was stopped goes on where it stopped.  Ctrl-C, and SIGTERM
    where the main thread runs this and the program does not catch it, begin no other chunk, wait
    at most 20 s for those at work, and then raise `KeyboardInterrupt`, or `SystemExit` of code 143.

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
    dashboard : bool, default True
        Show the run on a page of its own on Dask's dashboard.  A scheduler whose environment lacks
        bokeh is warned of once, and the run goes on.
    performance_report : path, optional
        Also write Dask's own report of the tasks, workers and scheduler, an HTML file.
    **options
        Of `plan`.

    Returns
    -------
    Report

    Raises
    ------
    InferenceError
        If a chunk failed three times and ``on_error="raise"``, the output cannot be written, or the
        cluster was lost.
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
    check_output(plan.output, None, plan.overwrite)
    return execute(
        plan,
        Outputs.prepare,
        client=client,
        callbacks=callbacks,
        trace=trace,
        dashboard=dashboard,
        performance_report=performance_report,
    )


def execute(
    plan: Job,
    prepare: Callable[[Any], AbstractContextManager[Any]],
    *,
    client: Client | None = None,
    callbacks: Sequence[Callback] = (),
    trace: str | os.PathLike[str] | None = None,
    dashboard: bool = True,
    performance_report: str | os.PathLike[str] | None = None,
) -> Report:
    """Run any plan.

    Parameters
    ----------
    plan : Plan or ObjectPlan
        With its output checked.
    prepare : callable
        Makes what takes the results of a plan, as `Outputs.prepare`.
    client, callbacks, trace, dashboard, performance_report
        As for `run`.
    """
    _check_callbacks(callbacks)
    check_html(performance_report, "performance_report")
    if plan.source.changed():
        raise ValueError("the source has changed since it was planned: plan again")
    with (
        _terminable(),
        tracing(trace) as writers,
        _ready(client, plan) as active,
        prepare(plan) as outputs,
        dask_reporting(active, performance_report),
        feeding(active, view := RunView(), dashboard) as (feeds, link),
    ):
        listeners: list[Callback] = [view, *callbacks, *writers, *feeds]
        return _Driver(plan, active, outputs, view, listeners, link, bool(writers)).drive()


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


@contextlib.contextmanager
def _ready(given: Client | None, plan: Job) -> Iterator[Client]:
    """A client whose workers can do the plan."""
    with _client(given) as client:
        travels = plan.model.kind == "module"
        check_workers(client, plan.source, plan.inference.device, bytecode=travels)
        yield client


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Have SIGTERM, which batch systems send at the end of the walltime, raise like Ctrl-C.

    Unless the program has its own use for it; only the main thread may say.
    """
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not ours:
        yield
        return

    def terminate(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass
class _Driver:
    """One execution of a plan."""

    plan: Job
    client: Client
    outputs: Any
    view: RunView
    callbacks: Sequence[Callback]
    link: str = ""
    tracing: bool = False
    run: str = field(default_factory=lambda: f"daskinfer-{uuid.uuid4().hex[:8]}")
    tiles: int = 0
    nonfinite: int = 0
    retries: int = 0
    meters: Meters = field(default_factory=Meters)
    # Workers on which an attempt at a chunk failed.
    tried: dict[int, list[str]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)

    def drive(self) -> Report:
        try:
            return self._drive()
        except BaseException as error:
            # A display that fails must not hide why the run did.
            with contextlib.suppress(Exception):
                self._emit(RunStopped(error))
            raise

    def _drive(self) -> Report:
        start = time.perf_counter()
        finished = self.outputs.finished()
        todo, count = self.outputs.todo(finished)
        chunks = self.plan.tiling.chunks
        self._emit(RunStarted(self.plan, chunks, chunks - count, self.link, self.run, finished))
        self.outputs.ledger.announce(self.run)
        with self._stations():
            if count:
                open_stations(self.client, self.run, list(self._workers()))
            dispatch = Dispatch(
                self.client,
                run_chunks,
                self.run,
                self._threads,
                self._placement(),
                name=self._task_name,
            )
            try:
                self._stream(dispatch, todo, count)
            except (KeyboardInterrupt, SystemExit):
                self._wind_down(dispatch)
                raise
            except BaseException:
                # What runs ends by itself, before its station closes; nothing else is begun.
                self._stop_stations()
                raise
            finally:
                dispatch.cancel()
        self._emit(RunFinishing())
        size = self.outputs.finish(self.failures)
        report: Report = self.outputs.told(
            self._report(chunks - count, time.perf_counter() - start, size)
        )
        self._emit(RunFinished(report))
        return report

    def _emit(self, event: Event) -> None:
        for callback in self.callbacks:
            callback(event)

    @contextlib.contextmanager
    def _stations(self) -> Iterator[None]:
        """Bring the plan to all workers, also those that join later, and clear up afterwards."""
        shipped = self.plan.model.ship()
        # Workers may have another working folder.
        plan = replace(self.plan, output=absolute_path(self.plan.output))
        plugin = StationPlugin(self.run, plan, shipped, neighbours(self.client), self.tracing)
        self.client.register_plugin(plugin)
        try:
            yield
        finally:
            if self.client.status == "running":
                self.client.unregister_worker_plugin(self.run)

    def _stream(self, dispatch: Dispatch, todo: Iterator[int], count: int) -> None:
        """Run all chunks; those that may have killed a worker once more, one at a time."""
        for answer in dispatch.answers(todo, count):
            self._settle(answer, dispatch)
        for number in tuple(self.suspects):
            for answer in dispatch.answers([number], 1, most=1):
                self._settle(answer, dispatch)

    def _wind_down(self, dispatch: Dispatch) -> None:
        """Take what is nearly done; the file goes on from there."""
        stop = time.monotonic() + _GRACE
        at_work = self._stop_stations()
        try:
            self._emit(RunStopping(tuple(sorted(at_work)), _GRACE))
            for answer in dispatch.drain(_GRACE):
                if answer.outcome is not None:
                    self._done(answer.outcome)
                if at_work & set(answer.numbers):
                    at_work -= set(answer.numbers)
                    left = max(0.0, stop - time.monotonic())
                    self._emit(RunStopping(tuple(sorted(at_work)), left))
        finally:
            self._stop_stations(abort=True)

    def _stop_stations(self, abort: bool = False) -> set[int]:
        """Have no more chunks begun; returns those at work."""
        if self.client.status != "running":
            return set()
        at_work = self.client.run(stop_station, self.run, abort, on_error="ignore")
        return {number for numbers in at_work.values() for number in numbers}

    def _task_name(self, number: int) -> tuple[str | int, ...]:
        """What Dask's pages show: one name for all, and the place in the grid of chunks."""
        name = self.run.replace("daskinfer-", "daskinfer-chunk-")
        return (name, *self.plan.tiling.index_of(number))

    def _workers(self) -> dict[str, dict[str, Any]]:
        """Workers that chunks go to: those that declare a GPU, where any does."""
        every: dict[str, dict[str, Any]] = self.client.scheduler_info(n_workers=-1)["workers"]
        if self.plan.inference.device == "cpu":
            return every
        return {
            at: worker for at, worker in every.items() if worker["resources"].get("GPU")
        } or every

    def _threads(self) -> dict[str, int]:
        """Of each worker; of one with many no more than have work beside a device.

        `daskinfer.memory` counts on so many.
        """
        return {at: min(worker["nthreads"], THREADS) for at, worker in self._workers().items()}

    def _placement(self) -> dict[str, float] | None:
        """What a chunk asks of its worker: a GPU, of which the actor takes care, or nothing.

        Not the worker's name or address: a chunk bound to those hangs when the worker comes back
        under another one.
        """
        placed = any(worker["resources"].get("GPU") for worker in self._workers().values())
        return {"GPU": _GPU_SHARE} if placed and self.plan.inference.device != "cpu" else None

    def _settle(self, answer: Answer, dispatch: Dispatch) -> None:
        """Take the end of a task."""
        if answer.outcome is not None:
            self._done(answer.outcome)
            for failure in answer.outcome.failed:
                self._failed(failure.chunk, failure.error, dispatch, fatal=failure.fatal)
            return
        error = answer.error or RuntimeError("a task ended without an answer")
        if isinstance(error, ConnectionError):
            raise InferenceError(
                f"the cluster was lost ({error}): {to_go_on(self.plan)}"
            ) from error
        for number in answer.numbers:
            if isinstance(error, KilledWorker) and number not in self.suspects:
                # Whatever ran beside the chunk that killed its worker is named too: each gets a try
                # on its own, which tells the guilty one.
                self.suspects.append(number)
            else:
                self._failed(number, error, dispatch, fatal=isinstance(error, KilledWorker))

    def _done(self, result: GroupResult) -> None:
        self.meters.take(result.process, result.metrics, result.times)
        self._emit(Metered(result.process, result.metrics, result.times))
        spans = result.spans
        for chunk in result.done:
            self.tiles += chunk.tiles
            self.nonfinite += chunk.nonfinite
            self.outputs.take(chunk)
            self.outputs.mended(chunk.chunk)
            window = self._window(chunk.chunk)
            at = result.worker, spans, result.process
            self._emit(ChunkDone(chunk.chunk, window, chunk.tiles, chunk.seconds, *at))
            spans = ()

    def _failed(
        self, number: int, error: BaseException, dispatch: Dispatch, *, fatal: bool
    ) -> None:
        window, text, worker, cause = self._window(number), *_told(error)
        tried = self.tried.setdefault(number, [])
        tried.append(worker)
        if len(tried) < _ATTEMPTS and not fatal:
            self.retries += 1
            self._emit(ChunkRetried(number, window, len(tried), text))
            dispatch.again(number, avoid=tried)
            return
        failure = Failure(number, window, text, worker)
        unwritable = fatal and not isinstance(error, KilledWorker)
        if not unwritable:
            # A disk that is full is no fault of the chunk, which may even be in the file: what fell
            # short may be an overview tile.  And the ledger is most likely on that disk.
            self.outputs.ledger.failed(failure)
        self._emit(ChunkFailed(number, window, text, worker))
        if self.plan.on_error == "raise" or unwritable:
            raise InferenceError(
                self._sentence(failure, unwritable),
                window=window,
                chunk=self.plan.tiling.index_of(number),
                worker=worker,
            ) from cause
        self.outputs.leave_nodata(failure)
        self.failures.append(failure)

    def _sentence(self, failure: Failure, unwritable: bool) -> str:
        or_else = "" if unwritable else ", or with on_error='nodata' to leave such chunks nodata"
        return (
            f"chunk {failure.chunk} at (row, col, height, width) = {failure.window} failed on "
            f"{failure.worker}: {failure.error}. The rest is kept in {work_path(self.plan)}: "
            f"{to_go_on(self.plan)}{or_else}"
        )

    def _window(self, number: int) -> tuple[int, int, int, int]:
        tiling = self.plan.tiling
        return tiling.chunk_at(tiling.index_of(number)).window.bounds()

    def _report(self, resumed: int, seconds: float, file_bytes: int) -> Report:
        note = layout_warning(self.plan.source, self.plan.tiling.chunk_at((0, 0)).read)
        outside = len(self.plan.outside())
        return Report(
            output=self.plan.output,
            shape=self.plan.shape,
            chunks=self.plan.tiling.chunks,
            resumed=max(0, resumed - outside),
            tiles=self.tiles,
            seconds=seconds,
            load=self.meters.load(seconds, self.plan.model.precision, note),
            queue_depth=self.meters.queue_depth,
            batch_notes=self.meters.notes,
            retries=self.retries,
            nonfinite=self.nonfinite,
            failures=tuple(self.failures),
            file_bytes=file_bytes,
            chunk_map=self.view.snapshot().chunk_map,
            outside=outside,
        )


def _told(error: BaseException) -> tuple[str, str, BaseException]:
    """Text, worker and cause of a failed task."""
    if isinstance(error, ChunkError):
        return error.text, error.worker, error.original()
    worker = getattr(getattr(error, "last_worker", None), "address", None)
    return f"{type(error).__name__}: {error}", str(worker or "an unknown worker"), error
