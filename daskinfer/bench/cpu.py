"""``bench cpu``: what a run costs beyond its three unavoidable parts, on a machine without a GPU.

The floor is the sum of what has to be done in any case, each part measured by itself on the same
data and with the same threads: the model on batches that are in memory, decoding every block of
the source once, encoding the result.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daskinfer.bench.harness import Bench, Case, Column, Result, Values, say

if TYPE_CHECKING:
    from daskinfer.model import Model
    from daskinfer.planner import Plan
    from daskinfer.tiling import Window

__all__ = ["BENCH", "Job", "bench_model", "diagnosed_run", "parts", "times_of"]

_MODELS = ("demo", "heavy")
_PARTS = ("model", "decode", "encode")

COLUMNS = (
    Column("ratio", "run / floor"),
    Column("run", "run, s"),
    Column("floor", "floor, s"),
    *(Column(part, f"{part} alone, s") for part in _PARTS),
    Column("cpu_ratio", "run / floor, CPU time"),
    Column("cpu", "run, CPU s"),
    Column("speed", "run, Mpx/s", "{:.3f}"),
)


@dataclass(frozen=True)
class Job:
    """The work of one model.

    Attributes
    ----------
    plan : Plan
    threads : int
        Chunks at work at once, which read and encode.
    """

    plan: Plan
    threads: int

    @property
    def pixels(self) -> int:
        """Pixels of the raster."""
        return math.prod(self.plan.tiling.shape)

    def windows(self) -> list[Window]:
        """Windows of all chunks."""
        tiling = self.plan.tiling
        return [tiling.chunk_at(tiling.index_of(n)).window for n in range(tiling.chunks)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``bench cpu`` can be asked for."""
    parser.add_argument(
        "--models", type=_models, default=_MODELS, metavar=",".join(_MODELS),
        help="the bundled model; the same network about 20 times as heavy",
    )  # fmt: skip
    parser.add_argument("--size", type=int, default=6144, metavar="PX", help="raster of the demo")
    parser.add_argument("--heavy-size", type=int, default=4096, metavar="PX", help="of the heavy")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="tiles per batch")
    parser.add_argument("--tile", type=int, metavar="PX", help="side of a tile (default: auto)")
    parser.add_argument("--chunk", type=int, metavar="PX", help="side of a chunk (default: auto)")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "float16"), default="float32"
    )
    parser.add_argument("--threads", type=int, default=3, metavar="N", help="chunks at once")


def _models(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(_MODELS):
        raise argparse.ArgumentTypeError(f"known models: {', '.join(_MODELS)}; got {text}")
    return names


def cases(options: argparse.Namespace, folder: Path) -> list[Case]:
    """One case per model."""
    return [Case(name, partial(times_of, _job(name, options, folder))) for name in options.models]


def _job(name: str, options: argparse.Namespace, folder: Path) -> Job:
    from daskinfer.bench.synthetic import scene_raster, warm
    from daskinfer.planner import plan

    side = options.size if name == "demo" else options.heavy_size
    say(f"{name}: raster of {side} x {side} px ...")
    source = scene_raster(folder, side, side)
    warm(source)
    planned = plan(
        source,
        bench_model(name),
        folder / f"{name}.tif",
        tile=options.tile or "auto",
        chunk=options.chunk or "auto",
        batch_size=options.batch,
        precision=options.precision,
        device="cpu",
        overwrite=True,
    )
    return Job(planned, options.threads)


def bench_model(name: str) -> Model:
    """The model "demo" or "heavy", which take the same input."""
    from daskinfer.bench.synthetic import heavy_unet
    from daskinfer.demo import demo_model
    from daskinfer.model import load_model

    demo = demo_model()
    if name == "demo":
        return demo
    return load_model(
        heavy_unet(), scale=demo.scale, mean=demo.mean, std=demo.std, bands=demo.bands
    )


def times_of(job: Job) -> Values:
    """Run once end to end, then each part of the floor by itself.

    Returns
    -------
    dict
        Wall seconds of the run and of each part, their sum, and the ratio; the same of processor
        time.
    """
    wall, cpu = {}, {}
    with _running(job) as run:
        wall["run"], cpu["run"] = _timed(run)
    for part, work in parts(job).items():
        wall[part], cpu[part] = _timed(work)
    Path(job.plan.output).unlink()
    floor, cpu_floor = (sum(times[part] for part in _PARTS) for times in (wall, cpu))
    return {
        **wall,
        "floor": floor,
        "ratio": wall["run"] / floor,
        "cpu": cpu["run"],
        "cpu_ratio": cpu["run"] / cpu_floor,
        "speed": job.pixels / 1e6 / wall["run"],
    }


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds of this process."""
    start, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cpu


@contextmanager
def _running(job: Job) -> Iterator[Callable[[], object]]:
    """The run, on a cluster whose start and end are not part of it."""
    from daskinfer.clusters import cluster

    options = {"threads_per_worker": job.threads, "dashboard_address": ":0"}
    with cluster("local", set_as_default=False, **options) as client:
        yield partial(diagnosed_run, job.plan, client)


def diagnosed_run(plan: Plan, client: Any) -> None:
    """Run a plan, and show what its report says limited it."""
    from daskinfer.runner import run

    for line in run(plan, client=client).diagnosis:
        say(f"  {line}")


def parts(job: Job) -> Mapping[str, Callable[[], object]]:
    """What has to be done in any case, each as a function; needs the output of a run."""
    return {
        "model": _model_alone(job),
        "decode": partial(_in_threads, job, partial(_decode, job), job.windows()),
        "encode": _encode_alone(job),
    }


def _model_alone(job: Job) -> Callable[[], object]:
    """All batches of the run, on pixels that are in memory."""
    import numpy as np
    import torch
    from dask.system import CPU_COUNT

    from daskinfer.infer import make_device

    inference = job.plan.inference
    # As a worker has it that shares the machine with no other.
    torch.set_num_threads(CPU_COUNT)
    device = make_device(inference)
    tiles = [tile.window for tile in inference.tiling.tiles_of((0, 0))]
    batch = device.allocate((inference.batch_size, *inference.tile_shape), inference.dtype)
    for slot, window in zip(range(len(batch)), tiles * len(batch), strict=False):
        pixels = job.plan.source.read(window).data
        np.copyto(batch[slot], pixels)
    full, rest = divmod(inference.tiling.runs, inference.batch_size)
    sizes = [inference.batch_size] * full + [rest] * bool(rest)

    def model() -> None:
        for size in sizes:
            device.run(batch[:size])

    return model


def _decode(job: Job, window: Window) -> None:
    import rasterio
    from rasterio.windows import Window as RasterWindow

    row, col, height, width = window.bounds()
    source: Any = job.plan.source
    with rasterio.open(source.path, sharing=False) as dataset:
        dataset.read(window=RasterWindow(col, row, width, height))


def _encode_alone(job: Job) -> Callable[[], object]:
    """All blocks and overviews that the chunks of a run encode."""
    import rasterio
    from rasterio.windows import Window as RasterWindow

    from daskinfer.cog import WorkFile, encode_chunk

    plan = job.plan
    scratch = f"{plan.output}.empty"
    with WorkFile.create(scratch, plan.cog, plan.inference.chunk) as work:
        levels = work.levels
    Path(scratch).unlink()
    chunks = []
    with rasterio.open(plan.output) as dataset:
        for row, col, height, width in (window.bounds() for window in job.windows()):
            window = RasterWindow(col, row, width, height)
            chunks.append((dataset.read(window=window), row, col))

    def encode(chunk: tuple[Any, int, int]) -> None:
        encode_chunk(plan.cog, *chunk, levels)

    return partial(_in_threads, job, encode, chunks)


def _in_threads(job: Job, work: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Do the work for all items, in as many threads as a run has."""
    with ThreadPoolExecutor(job.threads) as pool:
        for _ in pool.map(work, items):
            pass


def notes(result: Result, group: str) -> list[str]:
    """Where the time of each run goes, and how much heavier the heavy model is."""
    told = [
        f"{name}: the model alone is {_share(result, name, 'model', group):.0%} of the run's time, "
        f"decoding {_share(result, name, 'decode', group):.0%}, "
        f"encoding {_share(result, name, 'encode', group):.0%}, "
        f"all else {_rest(result, name, group):.0%}."
        for name in result.cases(group)
    ]
    told.append(
        "each part of the floor was run by itself, on the same data, with the same threads, after "
        "each run; starting the cluster is in neither."
    )
    if set(_MODELS) <= set(result.cases(group)):
        told.append(_weight(result, group))
    return told


def _share(result: Result, name: str, part: str, group: str) -> float:
    runs, times = (result.runs(name, key, group) for key in ("run", part))
    return statistics.median(part / run for part, run in zip(times, runs, strict=True))


def _rest(result: Result, name: str, group: str) -> float:
    return 1 - sum(_share(result, name, part, group) for part in _PARTS)


def _weight(result: Result, group: str) -> str:
    """How the two models compare: arithmetic counted, time measured."""
    from daskinfer.bench.synthetic import heavy_unet, macs_per_pixel, unet

    counted = macs_per_pixel(heavy_unet()) / macs_per_pixel(unet())
    options = result.options[group]
    sides = {"demo": options["size"], "heavy": options["heavy_size"]}
    demo, heavy = (
        result.spread(name, "model", group).median / side**2 for name, side in sides.items()
    )
    return (
        f"the heavy model has {counted:.1f} times the multiply-adds of the demo model and took "
        f"{heavy / demo:.1f} times as long per pixel."
    )


BENCH = Bench(
    "cpu",
    "what a run costs beyond model, decoding and encoding by themselves",
    COLUMNS,
    add_options,
    cases,
    notes,
)
