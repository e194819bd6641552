"""Ways to write one raster as a COG, each run in a process of its own; see `command`.

Pixels come from a template that lies in a file of its own, mapped by all processes: any window of
the raster is a copy of part of it, so that making them costs next to nothing, and the same for all.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import mmap
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from multiprocessing.pool import Pool
from typing import TYPE_CHECKING, Any

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.windows import Window

from daskinfer.cog import CogSpec, WorkFile, encode_chunk
from daskinfer.cog.encode import encode_levels
from daskinfer.cog.upper import Region, regions

if TYPE_CHECKING:
    import dask.array as da
    import xarray as xr

__all__ = ["WRITERS", "Job"]

_TRANSFORM = (10.0, 0.0, 300000.0, 0.0, -10.0, 6000000.0)
_CRS = "EPSG:32633"
# The raster repeats after so many pixels: no multiple of a block, and more than a codec looks back.
_PERIOD = 1789
_BAND_SHIFT = 300


@dataclass(frozen=True)
class Job:
    """A raster, and how to write it.

    Attributes
    ----------
    kind : {"classes", "floats"}
        One band of uint8 with 8 values in patches, or three of float32, smooth with some noise.
    size : int
        Rows and columns.
    chunk : int
        Side in pixels of what a task writes.
    processes : int
        At work; threads for those that have threads only.
    compress : str
        Codec of the blocks.
    level : int or None
        Of the codec.
    folder : str
        For the template and the output.
    """

    kind: str
    size: int
    chunk: int
    processes: int
    compress: str
    level: int | None
    folder: str

    @property
    def bands(self) -> int:
        """1 or 3."""
        return 1 if self.kind == "classes" else 3

    @property
    def dtype(self) -> str:
        """Of the pixels."""
        return "uint8" if self.kind == "classes" else "float32"

    @property
    def nodata(self) -> float:
        """255, or NaN."""
        return 255 if self.kind == "classes" else float("nan")

    @property
    def resampling(self) -> str:
        """Of the overviews."""
        return "mode" if self.kind == "classes" else "average"

    @property
    def output(self) -> str:
        """The COG."""
        return os.path.join(self.folder, f"{self.kind}.tif")

    @property
    def template(self) -> str:
        """The file that pixels are copied from."""
        return os.path.join(self.folder, f"{self.kind}-{self.chunk}.npy")

    def spec(self, **options: Any) -> CogSpec:
        """The file as the library's own writer takes it."""
        return CogSpec(
            self.size,
            self.size,
            self.bands,
            self.dtype,
            transform=_TRANSFORM,
            crs=_CRS,
            nodata=self.nodata,
            resampling=self.resampling,
            compress=self.compress,
            level=self.level,
            **options,
        )

    def corners(self) -> list[tuple[int, int]]:
        """First pixels of all chunks."""
        starts = range(0, self.size, self.chunk)
        return list(itertools.product(starts, starts))

    def pixels(self, row: int, col: int) -> NDArray[Any]:
        """The chunk that starts there, ``(band, y, x)``."""
        height, width = (min(self.chunk, self.size - start) for start in (row, col))
        whole, at = _mapped(self.template), (row % _PERIOD, col % _PERIOD)
        out = np.empty((self.bands, height, width), self.dtype)
        for band in range(self.bands):
            top = at[0] + band * _BAND_SHIFT
            out[band] = whole[top : top + height, at[1] : at[1] + width]
        if row == 0 and col == 0:
            # Whole blocks of nodata, and a border of it through others.
            out[:, : height // 2, : width // 2 + 100] = self.nodata
        return out

    def make_template(self) -> None:
        """Write the template, unless it is there."""
        if os.path.exists(self.template):
            return
        side = _PERIOD + self.chunk + (self.bands - 1) * _BAND_SHIFT
        rng = np.random.default_rng(7)
        rows, cols = np.ogrid[:side, :side]
        field = np.zeros((side, side), np.float32)
        for wave in range(14):
            down, across = rng.integers(1, 40, 2) * (2 * np.pi / 4096)
            down = np.sin(down * rows + 6 * rng.random()) / np.sqrt(wave + 1)
            field += (down * np.cos(across * cols + 6 * rng.random())).astype(np.float32)
        field /= field.std()
        rough = 0.06 if self.kind == "classes" else 0.02
        field += rng.normal(0, rough, field.shape).astype(np.float32)
        values = 1 / (1 + np.exp(-field))
        if self.kind == "classes":
            values = np.clip(np.floor(2 * field + 4), 0, 7)
        np.save(self.template, values.astype(self.dtype))


@cache
def _mapped(path: str) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, mmap_mode="r")
    return array


# --- the floors, and our own writer, in processes of this one -------------------------------------

_work: WorkFile | None = None
# Pixels of the last level that chunks make alone, in memory that all processes share.
_last: NDArray[Any] | None = None


def _encoded_only(job: Job, levels: int, corner: tuple[int, int]) -> None:
    pixels = job.pixels(*corner)
    encode_levels(job.spec(statistics=False), pixels, corner, range(levels + 1))
    if _last is not None:
        # Some of the pixels are no less to encode than their means, and cost nothing to make.
        some = pixels[:, :: 1 << levels, :: 1 << levels]
        row, col = (at >> levels for at in corner)
        _last[:, row : row + some.shape[1], col : col + some.shape[2]] = some


def _encoded_above(job: Job, levels: int, region: Region) -> None:
    assert _last is not None
    spec, step = job.spec(statistics=False), 1 << (region.level - levels)
    corner = region.row * spec.blocksize, region.col * spec.blocksize
    rows, cols = (slice(at, at + (spec.blocksize << region.step)) for at in corner)
    pixels = _last[:, ::step, ::step][:, rows, cols]
    encode_levels(spec, pixels, corner, range(region.level + 1, region.level + region.step + 1))


def _appended(job: Job, corner: tuple[int, int]) -> None:
    global _work
    if _work is None:
        _work = WorkFile.open(f"{job.output}.partial", job.spec(), (job.chunk, job.chunk))
    _work.append(encode_chunk(_work.spec, job.pixels(*corner), *corner, _work.levels))


def _processes(job: Job) -> Pool:
    return multiprocessing.get_context("fork").Pool(job.processes)


def _everywhere(pool: Pool, task: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Run a task for all chunks, or regions."""
    calls = [pool.apply_async(task, (item,)) for item in items]
    for call in calls:
        call.get()


def compress_only(job: Job) -> float:
    """Encode the full resolution, and write nothing."""
    with _processes(job) as pool:
        _everywhere(pool, partial(_encoded_only, job, 0), job.corners())
    return time.perf_counter()


def compress_overviews(job: Job) -> float:
    """Encode the full resolution and all overviews, and write nothing."""
    global _last
    spec = job.spec(statistics=False)
    levels = spec.local_levels((job.chunk, job.chunk))
    shape = (job.bands, *spec.shapes[levels])
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(job.dtype).itemsize)
    _last = np.frombuffer(memory, job.dtype).reshape(shape)
    with _processes(job) as pool:
        _everywhere(pool, partial(_encoded_only, job, levels), job.corners())
        level = levels
        while todo := list(regions(spec, level)):
            _everywhere(pool, partial(_encoded_above, job, levels), todo)
            level += todo[0].step
    return time.perf_counter()


def direct(job: Job) -> float:
    """Processes append to one work file, which is finished here."""
    chunk = job.chunk, job.chunk
    work = WorkFile.create(f"{job.output}.partial", job.spec(), chunk, ahead=True)
    with _processes(job) as pool:
        _everywhere(pool, partial(_appended, job), job.corners())
    last = time.perf_counter()
    work.finish(job.output)
    return last


# --- through dask ---------------------------------------------------------------------------------


def _lazy(job: Job) -> xr.DataArray:
    """The raster as tasks that make their own pixels."""
    import dask.array as da
    import rioxarray  # noqa: F401
    import xarray as xr

    def block(block_info: Any = None) -> NDArray[Any]:
        (row, _), (col, _) = block_info[None]["array-location"][1:]
        return job.pixels(row, col)

    sides = da.core.normalize_chunks(job.chunk, (job.size, job.size))
    data: da.Array = da.map_blocks(
        block,
        chunks=((job.bands,), *sides),
        dtype=job.dtype,
        meta=np.empty((0, 0, 0), job.dtype),
    )
    attrs: dict[str, Any] = {"_FillValue": job.nodata}
    if job.kind == "classes":
        attrs["output"] = "classes"
    centres = (np.arange(job.size) + 0.5) * 10
    coords = {
        "band": np.arange(1, job.bands + 1),
        "y": _TRANSFORM[5] - centres,
        "x": _TRANSFORM[2] + centres,
    }
    array = xr.DataArray(data, coords, ("band", "y", "x"), attrs=attrs)
    placed: xr.DataArray = array.rio.write_crs(_CRS)
    return placed


def _from_cluster(job: Job, write: Callable[[], object]) -> float:
    """Run a writer on worker processes of one thread.

    Before the clock starts the cluster is up and has imported what it needs, as the others have.
    """
    from distributed import Client, LocalCluster, get_task_stream

    with (
        LocalCluster(
            n_workers=job.processes, threads_per_worker=1, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
        get_task_stream(client) as stream,
    ):
        client.run(importlib.import_module, "daskinfer.store")
        client.run(importlib.import_module, __name__)
        _start()
        write()
        stop = time.perf_counter()
        now = time.time()
    _clock["stop"] = stop
    chunks = [task for task in stream.data if "_append" in str(task["key"])]
    last: float = max(span["stop"] for task in chunks for span in task["startstops"])
    return stop - (now - last)


def dask_processes(job: Job) -> float:
    """`write_cog` on a cluster of worker processes."""
    from daskinfer.lazy import write_cog

    array = _lazy(job)
    write = partial(write_cog, array, job.output, compress=job.compress, level=job.level)
    return _from_cluster(job, write)


def dask_threads(job: Job) -> float:
    """`write_cog` on Dask's own threads, as odc-geo below: one process has all that is imported."""
    import dask
    from dask.callbacks import Callback

    from daskinfer.lazy import write_cog

    last = [0.0]

    def note(key: object, *_: object) -> None:
        if "_append" in str(key):
            last[0] = time.perf_counter()

    with Callback(posttask=note), dask.config.set(scheduler="threads", num_workers=job.processes):
        write_cog(_lazy(job), job.output, compress=job.compress, level=job.level)
    return last[0]


def odc_threads(job: Job) -> float:
    """odc-geo's block-wise writer in threads, where it was faster than in processes."""
    import dask
    import odc.geo.xr  # noqa: F401
    from odc.geo.cog import save_cog_with_dask

    array = _lazy(job).odc.assign_crs(_CRS)
    if job.bands == 1:
        array = array.squeeze("band", drop=True)
    array = array.odc.reload()
    spec = job.spec()
    with dask.config.set(scheduler="threads", num_workers=job.processes):
        save_cog_with_dask(
            array,
            job.output,
            compression=job.compress,
            level=spec.codec_level,
            predictor=spec.tiff_predictor,
            blocksize=spec.blocksize,
            overview_resampling=job.resampling,
            stats=False,
        ).compute()
    return time.perf_counter()


# --- through GDAL ---------------------------------------------------------------------------------


def _creation(job: Job) -> dict[str, Any]:
    spec = job.spec()
    options: dict[str, Any] = {
        "compress": job.compress.upper(),
        "predictor": spec.tiff_predictor,
        "NUM_THREADS": job.processes,
        "BIGTIFF": "YES",
    }
    level = {"deflate": "ZLEVEL", "zstd": "ZSTD_LEVEL"}.get(job.compress)
    return options | ({level: spec.codec_level} if level else {})


def _tiled(job: Job) -> str:
    """A tiled GeoTIFF, written chunk by chunk; GDAL compresses in threads."""
    path = f"{job.output}.tiled.tif"
    profile: dict[str, Any] = {
        "driver": "GTiff", "height": job.size, "width": job.size, "count": job.bands,
        "dtype": job.dtype, "nodata": job.nodata, "crs": _CRS, "interleave": "pixel",
        "transform": rasterio.Affine(*_TRANSFORM),
        "tiled": True, "blockxsize": 512, "blockysize": 512,
    }  # fmt: skip
    with rasterio.open(path, "w", **profile, **_creation(job)) as dataset:
        for row, col in job.corners():
            pixels = job.pixels(row, col)
            dataset.write(pixels, window=Window(col, row, pixels.shape[2], pixels.shape[1]))
    return path


def gdal(job: Job) -> float:
    """A tiled GeoTIFF first, then GDAL's COG driver."""
    import rasterio.shutil

    path = _tiled(job)
    last = time.perf_counter()
    options = _creation(job)
    level = options.pop("ZLEVEL", None) or options.pop("ZSTD_LEVEL", None)
    options["predictor"] = {1: "NO", 2: "STANDARD", 3: "FLOATING_POINT"}[options["predictor"]]
    if level is not None:
        options["LEVEL"] = level
    rasterio.shutil.copy(
        path, job.output, driver="COG", blocksize=512,
        overview_resampling=job.resampling.upper(), **options,
    )  # fmt: skip
    os.unlink(path)
    return last


def rio_cogeo(job: Job) -> float:
    """A tiled GeoTIFF first, then rio-cogeo."""
    from rio_cogeo.cogeo import cog_translate

    path = _tiled(job)
    last = time.perf_counter()
    resampling: Any = job.resampling
    profile = _creation(job) | {
        "driver": "GTiff", "interleave": "pixel", "tiled": True,
        "blockxsize": 512, "blockysize": 512,
    }  # fmt: skip
    cog_translate(
        path,
        job.output,
        profile,
        overview_resampling=resampling,
        in_memory=False,
        quiet=True,
        config={"GDAL_NUM_THREADS": str(job.processes), "GDAL_TIFF_OVR_BLOCKSIZE": "512"},
    )
    os.unlink(path)
    return last


# --- one of them, timed ---------------------------------------------------------------------------

# Each returns when its last chunk was there.
WRITERS = {
    "compress only": compress_only,
    "compress and overviews": compress_overviews,
    "daskinfer, direct": direct,
    "daskinfer, dask": dask_processes,
    "daskinfer, threads": dask_threads,
    "GDAL's COG driver": gdal,
    "rio-cogeo": rio_cogeo,
    "odc-geo": odc_threads,
}

_clock: dict[str, float] = {}


def _start() -> None:
    _clock["start"], _clock["cpu"] = time.perf_counter(), _processor_seconds()


def _processor_seconds() -> float:
    """Of this process and all that it started, whether they have ended or not."""
    import psutil

    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            spent = child.cpu_times()
            total += spent.user + spent.system
    return total


def chunks_of(job: Job) -> Iterator[tuple[Window, NDArray[Any]]]:
    """All pixels, with where they are in the file."""
    for row, col in job.corners():
        pixels = job.pixels(row, col)
        yield Window(col, row, pixels.shape[2], pixels.shape[1]), pixels


def main(arguments: list[str]) -> None:
    """Run one writer and print its numbers as JSON."""
    job, name = Job(**json.loads(arguments[0])), arguments[1]
    writer = WRITERS[name]
    if name == "rio-cogeo":
        import rio_cogeo.cogeo  # noqa: F401
    if name == "daskinfer, threads":
        import daskinfer.lazy  # noqa: F401
    if name == "odc-geo":
        import odc.geo.cog  # noqa: F401
    _start()
    last = writer(job)
    stop = _clock.get("stop") or time.perf_counter()
    told = {
        "wall": stop - _clock["start"],
        "tail": stop - last,
        "cpu": _processor_seconds() - _clock["cpu"],
        "file": os.path.getsize(job.output) if os.path.exists(job.output) else 0,
    }
    print(json.dumps(told))


def command(job: Job, name: str) -> list[str]:
    """The command line that runs one writer and prints its numbers."""
    # Not -m: worker processes would run the module again as their main module.
    code = f"import sys; from {__name__} import main; main(sys.argv[1:])"
    return [sys.executable, "-c", code, json.dumps(asdict(job)), name]
