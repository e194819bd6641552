"""What a worker process holds for a run: model actor, source and work file.

A `WorkerPlugin` brings the plan (and the bytes of an in-memory model) to every worker once, also to
workers that join late or come back after a crash, so that a task is no more than two numbers.  The
state lives in this importable module: Dask would pickle it into every task otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import rasterio
from distributed import Client, WorkerPlugin, get_worker

from .actor import InferenceActor
from .area import ChunkAreas, chunk_areas
from .blockcache import reserve, shared_cache
from .chunkerror import ChunkError, OutputError, StoppedError, causes, pickled
from .clusters.workers import cores_of_worker, declare_gpus
from .dashboard.gauges import expose_samples
from .dashboard.samples import METRIC, Sample, take_sample
from .dispatch import TASK_SECONDS
from .draft import Encoded, Work
from .errors import InferenceError
from .infer import infer_chunk, release_actor, using_actor
from .memory import GDAL_CACHE_MB, THREADS
from .metrics import ActorMetrics
from .model import ModelBytes
from .objects.chunk import find_chunk
from .objects.plan import ObjectPlan
from .objects.table import Found
from .outputs import reaches, work_path
from .pixels import Pixels
from .planner import Plan
from .readahead import MOST, ReadAhead
from .recycled import drop_recycled
from .source import Source
from .spans import Span, StageTimes
from .tiling import Window

__all__ = [
    "ChunkError",
    "ChunkFailure",
    "ChunkResult",
    "GroupResult",
    "StationPlugin",
    "open_stations",
    "run_chunks",
    "station_samples",
    "stop_station",
]

# Seconds after which a task begins no other chunk.
_LONGEST = 3 * TASK_SECONDS
# Bytes of encoded chunks after which a task that sends them begins no other.
_MOST_SENT = 16 << 20


@dataclass(frozen=True)
class ChunkResult:
    """What a finished chunk tells the client: numbers and objects.

    Pixels only where the worker does not reach the work file: `encoded` then is what goes into it.
    """

    chunk: int
    tiles: int
    nonfinite: int
    seconds: float
    found: Found | None = None
    areas: ChunkAreas | None = None
    encoded: Encoded | None = None


@dataclass(frozen=True)
class ChunkFailure:
    """A chunk that raised; `fatal` if it was the output's fault, which no other try will mend."""

    chunk: int
    error: ChunkError
    fatal: bool


@dataclass(frozen=True)
class GroupResult:
    """What a task tells the client.

    Attributes
    ----------
    done : tuple of ChunkResult
    failed : tuple of ChunkFailure
    left : tuple of int
        Chunks that it did not begin.
    spent : float
        Seconds that the others took.
    worker : str
        Address.
    process : tuple of (str, int)
        Host and number of the process.
    metrics, times : ActorMetrics, dict
        Of the process so far.
    spans : tuple of Span
        Since the last task of the process, when traced.
    """

    done: tuple[ChunkResult, ...]
    failed: tuple[ChunkFailure, ...]
    left: tuple[int, ...]
    spent: float
    worker: str
    process: tuple[str, int]
    metrics: ActorMetrics
    times: Mapping[str, StageTimes]
    spans: tuple[Span, ...]


class _Station:
    """State of one run in this process; shared by the workers of the process."""

    def __init__(
        self,
        run: str,
        plan: Plan | ObjectPlan,
        shipped: ModelBytes | None,
        threads: int,
        tracing: bool,
    ) -> None:
        self.run, self.plan = run, plan
        self.ahead = ReadAhead(most=_readers(plan.source, threads))
        self._tracing = tracing
        self.workers = 0
        self.stopping = self.aborting = False
        self.at_work: set[int] = set()
        self._shipped = shipped
        self._threads = threads
        self._changed = threading.Condition()
        self._users = 0
        self._closed = False
        self._resources = contextlib.ExitStack()
        self._opened: tuple[InferenceActor, Work | None] | None = None

    @contextlib.contextmanager
    def using(self) -> Iterator[tuple[InferenceActor, Work | None]]:
        """The actor and the work file, made by the first chunk; neither closes meanwhile."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the run is over")
            if self._opened is None:
                self._opened = self._open()
            self._users += 1
        try:
            yield self._opened
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def reader(self, window: Window) -> Callable[[Window], Pixels]:
        """Reads tiles of a chunk for as long as the run is on."""
        read = self.plan.source.reader(window)

        def read_on(window: Window) -> Pixels:
            if self.aborting:
                raise StoppedError("the run was stopped")
            return read(window)

        return read_on

    @contextlib.contextmanager
    def working(self, number: int) -> Iterator[None]:
        """Note that a chunk is at work here, for those who look on."""
        self.at_work.add(number)
        try:
            yield
        finally:
            self.at_work.discard(number)

    def sample(self, run: str) -> Sample:
        """What there is to see here now."""
        opened = self._opened
        return take_sample(run, sorted(self.at_work), None if opened is None else opened[0])

    def close(self) -> None:
        """Wait for the chunks at work, then close and forget everything."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._users)
            self._resources.close()
        self.ahead.close()
        shared_cache().clear()
        drop_recycled()
        release_actor(self.plan.inference)
        if self._shipped is not None:
            self._shipped.release()

    def _open(self) -> tuple[InferenceActor, Work | None]:
        _share_cores(self._threads)
        if self._shipped is not None:
            self._shipped.receive()
        source, tiling = self.plan.source, self.plan.tiling
        # Tiles of all chunks at work find the blocks that they share.
        reserve(source.cache_bytes(tiling.chunk_at((0, 0)).read, THREADS))
        actor = self._resources.enter_context(using_actor(self.plan.inference))
        self._resources.enter_context(_settled_objects())
        # It may have served a prediction before.
        actor.clear_metrics()
        actor.recorder.tracing = self._tracing
        if isinstance(self.plan, ObjectPlan):
            return actor, None
        if not reaches(self.plan, self.run):
            return actor, None
        work = self.plan.draft.open(work_path(self.plan))
        return actor, self._resources.enter_context(work)


def _readers(source: Source, cores: int) -> int:
    """Most tiles to read ahead at a time.

    From a local file decoding is what takes time, and more threads than cores would only make the
    device's threads wait for one; from a remote one it is waiting.
    """
    return MOST if source.remote else max(2, cores)


_stations: dict[str, _Station] = {}
_stations_lock = threading.Lock()


class StationPlugin(WorkerPlugin):  # type: ignore[misc]
    """Brings a run to a worker process and clears up after it.

    Parameters
    ----------
    run : str
        Name of the run.
    plan : Plan or ObjectPlan
    shipped : ModelBytes or None
        An in-memory model.
    neighbours : dict of str to int
        Worker processes that share cores, by the name of those; see `neighbours`.
    tracing : bool, default False
        Keep single spans for the run's trace.
    """

    def __init__(
        self,
        run: str,
        plan: Plan | ObjectPlan,
        shipped: ModelBytes | None,
        neighbours: dict[str, int],
        tracing: bool = False,
    ) -> None:
        self.name = run
        self._plan = plan
        self._shipped = shipped
        self._neighbours = neighbours
        self._tracing = tracing

    async def setup(self, worker: Any) -> None:
        """Called on the event loop of each worker: only notes what to open later."""
        place, cores, _ = cores_of_worker(worker)
        threads = max(1, cores // max(1, self._neighbours.get(place, 1)))
        with _stations_lock:
            if self.name not in _stations:
                _stations[self.name] = _Station(
                    self.name, self._plan, self._shipped, threads, self._tracing
                )
            _stations[self.name].workers += 1
        # Looked for by Dask at each heartbeat.
        getattr(worker, "metrics", {})[METRIC] = station_samples
        expose_samples(station_samples)
        _leave_interrupts_to_the_client(worker)
        if self._plan.inference.device != "cpu":
            await declare_gpus(worker)

    async def teardown(self, worker: object) -> None:
        """Called on the event loop when the run is over or the worker closes."""
        with _stations_lock:
            station = _stations.get(self.name)
            if station is None:
                return
            station.workers -= 1
            if station.workers:
                return
            del _stations[self.name]
        # Waits for chunks at work: not on the event loop, which they need to report.
        await asyncio.to_thread(station.close)


def station_samples(worker: object = None) -> list[Sample]:
    """What there is to see of each run in this process."""
    with _stations_lock:
        stations = list(_stations.items())
    return [station.sample(run) for run, station in stations]


def _leave_interrupts_to_the_client(worker: object) -> None:
    """Ignore Ctrl-C in a process that a nanny started.

    A terminal sends it to all processes of a local cluster; the client ends the run, and what is
    nearly done could not be if the workers died at once.  They end with their nanny.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and getattr(worker, "nanny", None):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def open_stations(client: Client, run: str, workers: list[str]) -> None:
    """Have all workers load the model and check that it runs, before any chunk is begun.

    Those that join later do so before their first chunk.

    Raises
    ------
    InferenceError
        If it does not on one of them; names worker and device.
    """
    if not workers:
        return
    # A worker that is lost meanwhile is none to wait for.
    answers = client.run(_open_station, run, workers=workers, on_error="return")
    for worker, wrong in answers.items():
        if isinstance(wrong, ChunkError):
            raise InferenceError(
                f"worker {worker} cannot do its part: {wrong.text}. No chunk was begun",
                worker=worker,
            ) from wrong.original()


async def _open_station(run: str, dask_worker: Any) -> ChunkError | None:
    """Make the station of a worker process ready; returns what is wrong."""
    station = _stations.get(run)
    if station is None:
        return None

    warm = contextlib.ExitStack()
    try:
        # Not on the event loop, on which the worker says that it lives.
        await asyncio.to_thread(warm.enter_context, station.using())
    except Exception as error:
        return _told(error, str(dask_worker.address))
    warm.close()
    return None


def stop_station(run: str, abort: bool = False) -> list[int]:
    """Have no more chunks begun for a run in this process; returns those at work.

    Parameters
    ----------
    run : str
    abort : bool, default False
        End those at work too, at their next tile.
    """
    with _stations_lock:
        station = _stations.get(run)
        if station is not None:
            station.stopping = True
            station.aborting = abort
            return sorted(station.at_work)
    return []


def run_chunks(run: str, numbers: tuple[int, ...]) -> GroupResult:
    """Read, infer, encode and append chunks one by one: the only kind of task of a run.

    One task, not four: reading ahead of the device is bounded by the number of threads then, and
    pixels never wait in a worker's memory for a later task.  A chunk that raises fails alone.  Once
    the task has lasted three times what it should, it leaves the rest to others: chunks behind
    cheap ones may be dear.
    """
    station = _stations.get(run)
    if station is None:
        raise RuntimeError("the run is over")
    address = str(get_worker().address)
    done: list[ChunkResult] = []
    failed: list[ChunkFailure] = []
    left: tuple[int, ...] = ()
    with contextlib.ExitStack() as held:
        try:
            actor, work = held.enter_context(station.using())
        except Exception as error:
            raise _told(error, address) from error
        held.enter_context(rasterio.Env(GDAL_CACHEMAX=GDAL_CACHE_MB))
        start = time.perf_counter()
        for place, number in enumerate(numbers):
            late = place and time.perf_counter() - start > _LONGEST
            full = sum(chunk.encoded.nbytes for chunk in done if chunk.encoded) > _MOST_SENT
            if station.stopping or late or full:
                left = numbers[place:]
                break
            try:
                with station.working(number):
                    done.append(_run_chunk(station, number, actor, work))
            except StoppedError:
                left = numbers[place:]
                break
            except Exception as error:
                fatal = isinstance(error, OutputError)
                failed.append(ChunkFailure(number, _told(error, address), fatal))
        return GroupResult(
            tuple(done),
            tuple(failed),
            left,
            spent=time.perf_counter() - start,
            worker=address,
            process=(address.rpartition(":")[0], os.getpid()),
            metrics=actor.metrics,
            times=actor.recorder.times(),
            spans=actor.recorder.drain(),
        )


def _told(error: Exception, address: str) -> ChunkError:
    return ChunkError(causes(error), address, pickled(error))


def _run_chunk(
    station: _Station, number: int, actor: InferenceActor, work: Work | None
) -> ChunkResult:
    start = time.perf_counter()
    plan = station.plan
    index = plan.tiling.index_of(number)
    read = station.reader(plan.tiling.chunk_at(index).read)
    if isinstance(plan, ObjectPlan):
        least = plan.search.min_score
        result = find_chunk(plan.inference, index, read, actor, station.ahead, least)
        seconds = time.perf_counter() - start
        return ChunkResult(number, result.tiles, result.dropped, seconds, found=result.found)
    stitched = infer_chunk(plan.inference, index, read, actor, station.ahead)
    row, col = plan.inference.window(index).origin
    with actor.recorder.span("encode", chunk=number):
        encoded = plan.draft.encode(stitched.data, row, col)
    if work is not None:
        with actor.recorder.span("append", chunk=number):
            try:
                work.append(encoded)
            except OSError as error:
                raise OutputError("the output cannot be written") from error
    sent = encoded if work is None else None
    areas = chunk_areas(plan, stitched.data, (row, col))
    seconds = time.perf_counter() - start
    return ChunkResult(
        number, stitched.tiles, stitched.nonfinite, seconds, encoded=sent, areas=areas
    )


@contextlib.contextmanager
def _settled_objects() -> Iterator[None]:
    """Keep the objects that are there before the work out of collections of garbage during it.

    A full collection walks a million objects of torch, Dask and whatever a notebook has imported,
    for 0.2 s in which no thread runs, the device's neither.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _share_cores(threads: int) -> None:
    """Give torch its share of the cores: a nanny leaves it 1, an in-process worker all of them."""
    import torch

    # Also where this thread has so many already: the number is that of each thread, and threads to
    # come, as the actor's, take the one that was set last.
    torch.set_num_threads(threads)
