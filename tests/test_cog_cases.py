"""Faults that other writers are known for, each as the report of it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch
from rasterio.io import MemoryFile
from rasterio.shutil import copy as copy_raster

import daskinfer as di
from cogs import assert_valid, check, spec_of, write_all
from conftest import write_raster
from daskinfer.cog import WorkFile, encode_chunk
from daskinfer.cog.spec import gdal_profile

ROOT = Path(__file__).parents[1]


def append_index(work, number):
    """One block whose every pixel is its number; what a Dask task does."""
    row, col = divmod(number, 8)
    array = np.full((1, 64, 64), number, "u1")
    work.append(encode_chunk(work.spec, array, 64 * row, 64 * col, work.levels))


@pytest.mark.parametrize("repeat", range(5))
def test_two_dask_processes_lose_no_block(tmp_path, two_workers, repeat):
    """rioxarray 220, 223: a lock of each process's own lets two of them write over each other."""
    spec = spec_of(512, 512, blocksize=64, nodata=255)
    expected = np.arange(64, dtype="u1").reshape(1, 8, 8).repeat(64, 1).repeat(64, 2)
    with WorkFile.create(tmp_path / "w", spec, (64, 64)) as work:
        two_workers.gather(
            two_workers.map(append_index, [work] * 64, range(64), key=f"case46-{repeat}")
        )
        assert work.done().all()
        work.finish(tmp_path / "out.tif")
    check(tmp_path / "out.tif", expected, spec)


@pytest.mark.parametrize("interleave", ["pixel", "band"])
def test_no_block_is_compressed_twice(tmp_path, interleave):
    """rioxarray 861: with a small cache, blocks written in parts are written again and again."""
    spec = spec_of(2048, 2048, 3, blocksize=512, interleave=interleave, resampling="nearest")
    y, x = np.mgrid[:2048, :2048]
    rng = np.random.default_rng(0)
    bands = [np.sin(x / (50 + b)) + np.cos(y / (70 + b)) for b in range(3)]
    array = (120 + 40 * np.stack(bands) + rng.integers(0, 9, (3, 2048, 2048))).astype("u1")
    with MemoryFile() as memory:
        with memory.open(**gdal_profile(spec, 2048, 2048)) as dataset:
            dataset.write(array)
        with memory.open() as dataset, MemoryFile() as copy:
            options = {"BLOCKSIZE": 512, "COMPRESS": "DEFLATE", "PREDICTOR": "YES"}
            options["OVERVIEW_RESAMPLING"] = "NEAREST"
            copy_raster(dataset, copy.name, driver="COG", **options)
            at_once = len(copy.getbuffer())
    with rasterio.Env(GDAL_CACHEMAX=1):
        work = WorkFile.create(tmp_path / "w", spec, (512, 1024))
        write_all(work, array)
        before = os.path.getsize(work.path)
        work.finish(tmp_path / "out.tif")
    assert_valid(tmp_path / "out.tif", spec)
    assert os.path.getsize(tmp_path / "out.tif") < 1.05 * at_once
    assert before < 1.05 * at_once


def test_each_tile_is_run_once_with_overviews_and_statistics(tmp_path, one_worker):
    """xarray-spatial 3117: each output block ran the graph again."""
    data = np.random.default_rng(0).random((2, 512, 512), "f4")
    source = write_raster(tmp_path / "scene.tif", data)
    calls = []

    class Counting(torch.nn.Conv2d):
        def forward(self, x):
            calls.append(x.shape)
            return super().forward(x)

    plan = di.plan(
        source, di.load_model(Counting(2, 3, 1), output="values"), tmp_path / "o.tif",
        tile=128, blocksize=64, chunk=256, batch_size=1,
    )  # fmt: skip
    calls.clear()  # planning looks at the model
    report = di.run(plan, client=one_worker)
    assert report.tiles == 16
    ran = [shape for shape in calls if shape[-1] == 128]
    assert len(ran) == 16
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert dataset.overviews(1) == [2, 4, 8]
        told = float(dataset.tags(2)["STATISTICS_MEAN"])
        assert told == pytest.approx(dataset.read(2).mean(dtype="f8"), rel=1e-9)


MEMORY = textwrap.dedent(
    """
    import resource, sys, torch
    import daskinfer as di
    def largest():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if __name__ == "__main__":
        torch.set_num_threads(1)
        with di.cluster("local", dashboard_address=":0") as client:
            net = di.load_model(torch.nn.Conv2d(1, 10, 1), output="classes")
            before = largest()
            di.run(sys.argv[1], net, sys.argv[2], client=client)
            print(largest() - before)
    """
)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_raster(tmp_path):
    """geoai 798: all classes of the whole raster in memory at once, 5.8 GB of them here."""
    source = tmp_path / "scene.tif"
    profile = {"driver": "GTiff", "height": 12_000, "width": 12_000, "count": 1}
    tiles = {"dtype": "uint8", "tiled": True, "compress": "deflate", "SPARSE_OK": "TRUE"}
    with rasterio.open(source, "w", **profile, **tiles, crs="EPSG:32633"):
        pass
    (tmp_path / "job.py").write_text(MEMORY)
    job = [sys.executable, str(tmp_path / "job.py"), str(source), str(tmp_path / "o.tif")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(job, capture_output=True, check=True, text=True, env=environment)
    assert float(done.stdout) < 600
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert dataset.shape == (12_000, 12_000)


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    import torch
    import daskinfer as di
    from daskinfer.monitor import ChunkDone
    done = 0
    def kill(event):
        global done
        done += isinstance(event, ChunkDone)
        if done == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    if __name__ == "__main__":
        with di.cluster("local", dashboard_address=":0") as client:
            net = di.load_model(sys.argv[3], weights=sys.argv[4])
            di.run(sys.argv[1], net, sys.argv[2], tile=64, chunk=64, blocksize=64, client=client,
                   callbacks=[kill])
    """
)


def test_a_killed_run_goes_on_with_what_it_had_and_with_nothing_else(
    tmp_path, one_worker, monkeypatch
):
    """villa 1342, 1695, myOCT 142: reruns start from zero, or mix the work of two models."""
    (tmp_path / "killed_nets.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Conv2d(2, 3, 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    weights = [tmp_path / name for name in ("one.pt", "two.pt")]
    for seed, path in enumerate(weights):
        torch.manual_seed(seed)
        torch.save(torch.nn.Conv2d(2, 3, 1).state_dict(), path)
    data = np.random.default_rng(0).random((2, 256, 256), "f4") - np.float32(0.5)
    source, output = write_raster(tmp_path / "scene.tif", data), tmp_path / "o.tif"
    (tmp_path / "job.py").write_text(KILLED)
    job = [sys.executable, tmp_path / "job.py", source, output, "killed_nets:make", weights[0]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    killed = subprocess.run(job, capture_output=True, check=False, env=environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not output.exists()

    def again(weights, **options):
        net = di.load_model("killed_nets:make", weights=str(weights))
        sides = {"tile": 64, "chunk": 64, "blocksize": 64}
        return di.run(source, net, output, client=one_worker, **sides, **options)

    with pytest.raises(ValueError, match=r"other settings .*model"):
        again(weights[1])
    report = again(weights[0])
    assert report.complete
    assert report.resumed >= 5
    assert report.tiles == 16 - report.resumed
    assert again(weights[1], overwrite=True).tiles == 16
