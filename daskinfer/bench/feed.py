"""``bench feed``: how well designs keep a device busy that takes a known time per batch.

A naive loop, the bounded queue with 1, 2, 4, ... reader threads, the actor alone, and `run` do the
same work on the same raster.  The device's time per batch is what one core needs to decode the
pixels of one batch, unless given: a design that reads while the device works, and does all else
beside it, can keep it busy; one that does them in turn cannot.  That cost is measured before each
run, as a shared machine can be a third slower some minutes later.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daskinfer.bench.harness import Bench, Case, Column, Result, Spread, Values, say

if TYPE_CHECKING:
    from daskinfer.bench.rivals import Work
    from daskinfer.device import Device
    from daskinfer.planner import Plan

__all__ = ["BENCH", "Job", "prepare"]

_DESIGNS = ("naive", "queue", "actor", "run")
_PRODUCERS = 3

COLUMNS = (
    Column("service", "ms per batch", "{:.1f}"),
    Column("busy", "busy, whole run", "{:.3f}"),
    Column("steady", "busy, steady", "{:.3f}"),
    Column("fill", "batch fill", "{:.3f}"),
    Column("wall", "wall, s", "{:.1f}"),
    Column("cpu", "CPU, s", "{:.1f}"),
    Column("speed", "Mpx/s of the raster", "{:.2f}"),
)


@dataclass(frozen=True)
class Job:
    """The work of one setting, for all designs.

    Attributes
    ----------
    plan : Plan
        For `run`; its tiling is that of all designs.
    service : float
        Seconds per batch of each device.
    workers : int
        Worker processes; 1 stands for threads of this process.
    batch : int
        Tiles per batch.
    folder : Path
        For outputs and logs.
    """

    plan: Plan
    service: float
    workers: int
    batch: int
    folder: Path

    @property
    def log(self) -> str:
        """Log of the devices."""
        return str(self.folder / "batches.log")

    @property
    def output(self) -> str:
        """What a design writes."""
        return self.plan.output

    @property
    def pixels(self) -> int:
        """Pixels of the raster."""
        return math.prod(self.plan.tiling.shape)

    def work(self) -> Work:
        """The same, as the rivals take it."""
        from daskinfer.bench.rivals import Work

        source: Any = self.plan.source
        return Work(source.path, self.output, self.plan.tiling, self.batch)

    def at(self, service: float) -> Job:
        """The same work for devices of another speed."""
        from daskinfer.bench.simulated import SimulatedDevice

        device = SimulatedDevice(service, self.log)
        inference = replace(self.plan.inference, device=device)
        return replace(self, service=service, plan=replace(self.plan, inference=inference))

    def device(self) -> Device:
        """A simulated device in this process."""
        from daskinfer.bench.simulated import TimedDevice

        return TimedDevice(self.service, self.log)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``bench feed`` can be asked for."""
    parser.add_argument("--tile", type=int, default=640, metavar="PX", help="side of a tile")
    parser.add_argument("--halo", type=int, default=64, metavar="PX")
    parser.add_argument("--chunk", type=int, metavar="PX", help="side of run's chunks")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="tiles per batch")
    parser.add_argument(
        "--service", type=float, metavar="MS",
        help="time per batch and device (default: what one core needs to decode a batch, times "
        "the number of workers)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S",
        help="the raster is so large that the device alone needs this long",
    )  # fmt: skip
    parser.add_argument(
        "--readers", type=_numbers, default=(1, 2, 4, 8), metavar="N,N",
        help="reader threads of the bounded queue, each a case",
    )  # fmt: skip
    parser.add_argument(
        "--designs", type=_designs, default=_DESIGNS, metavar=",".join(_DESIGNS), help="which"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N",
        help="worker processes of run, each with a device of its own (default: threads of this "
        "process); more than one leaves out the other designs, which know one device",
    )  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _designs(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(_DESIGNS):
        raise argparse.ArgumentTypeError(f"known designs: {', '.join(_DESIGNS)}; got {text}")
    return names


def prepare(options: argparse.Namespace, folder: Path) -> Job:
    """Time the decoding, make the raster, and plan the run.

    Raises
    ------
    ValueError
        If the tile leaves no whole blocks of the output, or there is no time to spend.
    """
    from daskinfer.bench.simulated import CLASSES, SimulatedDevice
    from daskinfer.bench.synthetic import pixel_model, scene_raster, warm
    from daskinfer.model import load_model
    from daskinfer.planner import plan

    core = options.tile - 2 * options.halo
    if core < 16 or core % 16:
        raise ValueError(
            f"tile {options.tile} with halo {options.halo} leaves {core} px, which must be a "
            f"multiple of 16: pass --tile {max(16, round(core / 16) * 16) + 2 * options.halo}"
        )
    if options.batch < 1 or options.workers < 1 or options.seconds <= 0:
        raise ValueError("batch, workers and seconds must be positive")
    service = _service(options, folder)
    tiles = options.seconds / service * options.batch * options.workers
    # In steps of a chunk, so that a time per batch that varies a little finds the same raster.
    side = 4 * core * math.ceil(math.sqrt(tiles) / 4)
    say(f"a device takes {service * 1e3:.1f} ms per batch; raster of {side} x {side} px ...")
    source = scene_raster(folder, side, side, min(core, 512))
    warm(source)
    log = str(folder / "batches.log")
    planned = plan(
        source,
        load_model(pixel_model(6, CLASSES)),
        folder / "classes.tif",
        tile=options.tile,
        halo=options.halo,
        chunk=options.chunk or "auto",
        batch_size=options.batch,
        blocksize=min(core, 512),
        device=SimulatedDevice(service, log),
        overwrite=True,
    )
    return Job(planned, service, options.workers, options.batch, folder)


def _service(options: argparse.Namespace, folder: Path) -> float:
    """Seconds per batch, from the options or from what decoding costs now."""
    from daskinfer.bench.synthetic import decode_seconds, scene_raster

    if options.service is not None:
        if options.service <= 0:
            raise ValueError(f"service must be positive, got {options.service} ms")
        return float(options.service) / 1e3
    block = min(options.tile - 2 * options.halo, 512)
    sample = scene_raster(folder, 4 * block, 4 * block, block)
    pixels = int(options.batch * options.tile**2 * options.workers)
    return decode_seconds(sample) * pixels


def cases(options: argparse.Namespace, folder: Path) -> list[Case]:
    """Every design, as a case."""
    job = prepare(options, folder)
    seen = _SamePixels(job)
    designs: list[tuple[str, Design]] = []
    asked = ("run",) if options.workers > 1 else options.designs
    if "naive" in asked:
        designs.append(("naive loop", _naive))
    if "queue" in asked:
        designs += [(_queue_name(n), partial(_queue, readers=n)) for n in options.readers]
    if "actor" in asked:
        designs.append(("actor alone", _actor))
    if "run" in asked:
        name = "run" if options.workers == 1 else f"run, {options.workers} worker processes"
        designs.append((name, _run))

    def once(design: Design) -> Values:
        now = job.at(_service(options, folder))
        return _timed(now, design, None if design is _actor else seen)

    return [Case(name, partial(once, design)) for name, design in designs]


def _queue_name(readers: int) -> str:
    return f"queue, {readers} reader{'s' if readers > 1 else ''}"


# The designs: each a context that prepares, gives what is timed, and clears up -------------------

Design = Callable[[Job], Any]


@contextmanager
def _naive(job: Job) -> Iterator[Callable[[], object]]:
    from daskinfer.bench.rivals import naive_loop

    yield partial(naive_loop, job.work(), job.device())


@contextmanager
def _queue(job: Job, readers: int) -> Iterator[Callable[[], object]]:
    from daskinfer.bench.rivals import reader_queue

    yield partial(reader_queue, job.work(), job.device(), readers)


@contextmanager
def _run(job: Job) -> Iterator[Callable[[], object]]:
    from daskinfer.bench.cpu import diagnosed_run
    from daskinfer.clusters import cluster

    options: dict[str, Any] = {"dashboard_address": ":0", "set_as_default": False}
    if job.workers > 1:
        options["n_workers"] = job.workers
    with cluster("local" if job.workers == 1 else "processes", **options) as client:
        # Part of starting a cluster: this process has imported everything long ago.
        client.run(_import_libraries)
        yield partial(diagnosed_run, job.plan, client)


def _import_libraries() -> None:
    import torch  # noqa: F401

    import daskinfer.station  # noqa: F401


@contextmanager
def _actor(job: Job) -> Iterator[Callable[[], object]]:
    """Tiles that are in memory already, through the actor."""
    import numpy as np

    from daskinfer.bench.simulated import classes_of

    tiles = [job.plan.source.read(tile.window).data for tile in job.work().tiles[: 2 * job.batch]]
    expected = [classes_of(tile) for tile in tiles]
    count = job.plan.tiling.runs

    def through() -> None:
        from daskinfer.actor import InferenceActor

        with InferenceActor(
            job.device(), tiles[0].shape, tiles[0].dtype, batch_size=job.batch
        ) as actor:
            _produce(actor, count, tiles, check)

    def check(number: int, result: Any) -> None:
        if not np.array_equal(result, expected[number % len(expected)]):
            raise RuntimeError("the actor gave a tile the result of another")

    yield through


def _produce(
    actor: Any, count: int, tiles: Sequence[Any], check: Callable[[int, Any], None]
) -> None:
    """Hand in `count` tiles from several threads, as chunk tasks do, and check what comes back."""
    from concurrent.futures import ThreadPoolExecutor

    def produce(numbers: range) -> None:
        with actor.producer():
            pending = [(n, actor.submit(tiles[n % len(tiles)])) for n in numbers]
        for number, future in pending:
            check(number, future.result())

    chunk = 16
    parts = [range(start, min(start + chunk, count)) for start in range(0, count, chunk)]
    with ThreadPoolExecutor(_PRODUCERS) as pool:
        for done in [pool.submit(produce, part) for part in parts]:
            done.result()


# Timing -------------------------------------------------------------------------------------------


def _timed(job: Job, design: Design, seen: _SamePixels | None) -> Values:
    """Do the work once and tell how busy the devices were; starting a cluster is not timed."""
    from daskinfer.bench.simulated import Timeline

    Path(job.log).unlink(missing_ok=True)
    with design(job) as work:
        start, cpu = time.monotonic(), time.process_time()
        work()
        wall, cpu = time.monotonic() - start, time.process_time() - cpu
    timeline = Timeline.read(job.log)
    if timeline.tiles != job.plan.tiling.runs or timeline.overlaps():
        raise RuntimeError(
            f"the devices ran {timeline.tiles} tiles of {job.plan.tiling.runs}, or two batches at "
            "once: these numbers mean nothing"
        )
    if seen is not None:
        seen.check()
    values = {
        "service": job.service * 1e3,
        "busy": timeline.whole(job.service, wall, job.workers),
        "steady": timeline.steady(job.service),
        "fill": timeline.fill(job.batch),
        "wall": wall,
        "speed": job.pixels / 1e6 / wall,
    }
    # The time of other processes is not this one's.
    return values if job.workers > 1 else values | {"cpu": cpu}


class _SamePixels:
    """Checks that all designs write the same pixels."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._digest = ""

    def check(self) -> None:
        """Compare the output with that of the design before, and a part of it with the source."""
        digest = self._read()
        self._digest = self._digest or digest
        if digest != self._digest:
            raise RuntimeError("two designs gave different pixels: their times mean nothing")
        Path(self._job.output).unlink()

    def _read(self) -> str:
        import numpy as np
        import rasterio
        from rasterio.windows import Window

        from daskinfer.bench.simulated import classes_of

        digest = hashlib.blake2b()
        part = self._job.plan.tiling.chunk_at((0, 0)).window
        with rasterio.open(self._job.output) as dataset:
            rows, cols = part.shape
            expected = classes_of(self._job.plan.source.read(part).data)
            if not np.array_equal(dataset.read(window=Window(0, 0, cols, rows)), expected):
                raise RuntimeError("a design gave pixels that are not those of the raster")
            for row in range(0, dataset.height, rows):
                window = Window(0, row, dataset.width, min(rows, dataset.height - row))
                digest.update(dataset.read(window=window).tobytes())
        return digest.hexdigest()


def notes(result: Result, group: str) -> list[str]:
    """What was measured, and `run` against the bounded queue."""
    options = result.options[group]
    names = result.cases(group)
    told = [
        "busy: time per batch x batches / wall time of the call, from opening the raster to the "
        "finished file (run: with overviews and the COG's layout; the queue and the loop write a "
        "plain TIFF). The cluster's start and its workers' imports are not in it.",
        "steady: from the first batch's start to the last one's end.",
        "a batch counts in full, however few tiles are in it: see its fill.",
        "every design ran the same tiles; their pixels were compared and are equal.",
    ]
    if options["service"] is None:
        told.append(
            "ms per batch: of the device; processor time in which one thread decodes "
            f"{options['batch']} x {options['tile']} x {options['tile']} px, median of nine, "
            "measured before each run"
            + (f", times {options['workers']} workers." if options["workers"] > 1 else ".")
        )
    queues = [name for name in names if name.startswith("queue")]
    if queues and "run" in names:
        told.append(_against(result, group, queues))
    return told


def _against(result: Result, group: str, queues: Sequence[str]) -> str:
    """`run` against the setting of the queue that keeps the device busiest, run by run."""
    best = max(queues, key=lambda name: result.spread(name, "busy", group).median)
    ours, theirs = (result.runs(name, "busy", group) for name in ("run", best))
    times = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)]).text("{:.2f}")
    return (
        f"run keeps the device busy {times} times as much as the bounded queue's best setting "
        f"({best})."
    )


BENCH = Bench(
    "feed",
    "how busy designs keep a simulated device: naive loop, bounded queue, actor, run",
    COLUMNS,
    add_options,
    cases,
    notes,
)
