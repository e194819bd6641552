"""What a plan says of memory, part by part, and against runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import daskinfer as di
from conftest import N3, noise, seeded, write_raster
from daskinfer.memory import THREADS, expected_memory
from memoryrun import SHAPES

SCRIPT = Path(__file__).parent / "memoryrun.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_run_takes_what_its_plan_says(name):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("DASKINFER_CACHE_MB", None)
    command = [sys.executable, str(SCRIPT), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    predicted, measured = map(int, done.stdout.split())
    assert predicted / 1.5 <= measured <= predicted * 1.5


def planned(tmp_path, source, **options):
    job = {"tile": 64, "chunk": 128, "batch_size": 2} | options
    return di.plan(source, di.load_model(seeded(N3)), tmp_path / "o.tif", overwrite=True, **job)


def parts(plan):
    return expected_memory(plan.source, plan.inference)


def test_parts_add_up_and_follow_their_causes(tmp_path):
    source = write_raster(tmp_path / "scene.tif", noise(2, 700, 700))
    plan = planned(tmp_path, source)
    small, large = parts(plan), parts(planned(tmp_path, source, chunk=256))
    assert plan.memory == small.total
    assert large.results == pytest.approx(4 * small.results)
    assert large.batches == small.batches
    more = parts(planned(tmp_path, source, batch_size=4))
    assert (more.batches, more.running) == (2 * small.batches, 2 * small.running)
    # No cache is larger than all that there is to read, its mask included.
    assert small.cache <= 2 * 700 * 700 * 5


def test_chunks_of_a_lazy_array_are_computed_whole(tmp_path):
    array = xr.DataArray(np.zeros((2, 700, 700), "uint16"), dims=("band", "y", "x"))
    told = parts(planned(tmp_path, array))
    assert told.cache == 0
    assert told.reading > THREADS * 128 * 128 * 2 * 2


def test_chunks_behind_the_one_that_ends_hold_their_tiles(tmp_path):
    source = write_raster(tmp_path / "scene.tif", noise(2, 128, 128))
    one = parts(planned(tmp_path, source))
    many = parts(planned(tmp_path, write_raster(tmp_path / "b.tif", noise(2, 700, 700))))
    tiles = 128 * 128  # of uint8 classes
    assert many.results == pytest.approx(one.results + (THREADS - 1) * tiles)


def test_a_cache_that_is_too_small_means_whole_chunks(tmp_path, monkeypatch):
    tiled = {"tiled": True, "blockxsize": 128, "blockysize": 128}
    source = write_raster(tmp_path / "scene.tif", noise(2, 700, 700), **tiled)
    cached = parts(planned(tmp_path, source))
    monkeypatch.setenv("DASKINFER_CACHE_MB", "0")
    read_whole = parts(planned(tmp_path, source))
    assert read_whole.cache < cached.cache
    assert read_whole.reading > cached.reading
