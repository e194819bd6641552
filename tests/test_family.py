"""The seam contract for random models on random rasters, through the engine without a cluster."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import daskinfer as di
from conftest import Pixel, noise, seeded
from daskinfer.infer import infer_chunk, release_actor, using_actor
from daskinfer.settle import Choice, settle
from daskinfer.source import ArraySource
from daskinfer.tiling import round_up
from nets import ResNetUNet, analytic_radius, build, family, total_stride
from oracle import whole

# Of one random job; some 2 s.
MOST_TILES = 400
MOST_PIXELS = 2_000_000


def settled(net, raw, **choice):
    """A raster as a source, and what to run on it."""
    source = ArraySource(xr.DataArray(raw, dims=("band", "y", "x")))
    model = di.load_model(net, output="values")
    return source, settle(source, model, Choice(**choice))[0]


def tiled(net, raw, **choice):
    """Scores of `raw` in tiles and chunks, all in this thread, and the tiling."""
    source, inference = settled(net, raw, **choice)
    return computed(source, inference), inference.tiling


def computed(source, inference):
    """Scores of all chunks, in this thread."""
    result = np.empty((inference.channels, *source.grid.shape), np.float32)
    with using_actor(inference) as actor:
        for number in range(inference.tiling.chunks):
            index = inference.tiling.index_of(number)
            rows, cols = inference.window(index).slices()
            result[:, rows, cols] = infer_chunk(inference, index, source.read, actor).data
    release_actor(inference)
    return result


def affordable(shape, core, halo):
    """The core, doubled until its tiles are few: a core of 1 px in 400 x 400 takes hours."""
    while True:
        tiles = math.prod(math.ceil(n / c) for n, c in zip(shape, core, strict=True))
        area = math.prod(min(n, c + 2 * halo) for n, c in zip(shape, core, strict=True))
        if tiles <= MOST_TILES and tiles * area <= MOST_PIXELS:
            return core
        core = tuple(2 * c for c in core)


def check(layers, seed, shape, core, chunk, batch, more):
    """Tiles with any halo >= radius equal the whole image within 1e-5 of the scores' size."""
    net = build(layers, seed=seed)
    stride = total_stride(layers)
    radius = analytic_radius(layers, 384)
    raw = noise(3, *shape, dtype="float32", seed=seed) / 1e4
    halo = round_up(radius, stride) + more * stride
    core = affordable(shape, tuple(stride * n for n in core), halo)
    tile = tuple(2 * halo + n for n in core)
    result, tiling = tiled(net, raw, tile=tile, chunk=chunk, batch_size=batch, halo=halo)
    assert all(axis.halo >= radius for axis in (tiling.y, tiling.x))
    expected = whole(net, raw, stride=stride)
    assert np.abs(result - expected).max() <= 1e-5 * max(1, np.abs(expected).max())


JOBS = {
    "layers": family(),
    "seed": st.integers(0, 99),
    "shape": st.tuples(st.integers(1, 400), st.integers(1, 400)),
    "core": st.tuples(st.integers(1, 40), st.integers(1, 40)),
    "chunk": st.tuples(st.integers(1, 400), st.integers(1, 400)),
    "batch": st.integers(1, 8),
    "more": st.integers(0, 2),
}


@settings(max_examples=15, deadline=None)
@given(**JOBS)
def test_random_models_equal_the_whole_image(layers, seed, shape, core, chunk, batch, more):
    check(layers, seed, shape, core, chunk, batch, more)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(**JOBS)
def test_random_models_equal_the_whole_image_often(layers, seed, shape, core, chunk, batch, more):
    check(layers, seed, shape, core, chunk, batch, more)


def test_one_shape_of_tile_per_run():
    shapes = set()

    class Recording(torch.nn.Module):
        def forward(self, x):
            shapes.add(tuple(x.shape[2:]))
            return x

    net = Recording()
    raw = noise(1, 70, 70, dtype="float32")
    source, inference = settled(net, raw, tile=32, batch_size=4)
    shapes.clear()  # of the measurements
    computed(source, inference)
    assert shapes == {(32, 32)}


def test_given_statistics_give_the_same_bits_for_any_tile():
    raw = np.linspace(0, 1000, 64 * 64, dtype=np.float32).reshape(1, 64, 64)
    source = ArraySource(xr.DataArray(raw, dims=("band", "y", "x")))
    model = di.load_model(Pixel(), output="values", mean=500, std=250)
    results = []
    for tile in (16, 64):
        inference, _ = settle(source, model, Choice(tile=tile))
        with using_actor(inference) as actor:
            results.append(infer_chunk(inference, (0, 0), source.read, actor).data)
    assert np.array_equal(results[0], (raw - np.float32(500)) / np.float32(250))
    assert np.array_equal(results[0], results[1])


def test_planning_and_building_a_graph_do_not_run_the_model(tmp_path):
    calls = []

    class Counting(torch.nn.Module):
        def forward(self, x):
            calls.append(x.shape)
            return x

    model = di.load_model(Counting(), output="values", bands=["1"])
    scene = xr.DataArray(noise(1, 200, 200), dims=("band", "y", "x"), coords={"band": ["1"]})
    di.predict(scene, model, tile=64, chunk=64)
    calls.clear()
    lazy = di.predict(scene, model, tile=64, chunk=64)
    di.plan(scene, model, tmp_path / "out.tif", tile=64, chunk=64)
    assert not calls
    assert lazy.dtype == np.float32
    lazy.compute(scheduler="threads")
    assert calls


def test_a_tile_that_comes_back_too_small_is_an_error():
    class Short(torch.nn.Module):
        def forward(self, x):
            return x[..., :-1] if x.shape[2:] == (32, 32) else x

    raw = noise(1, 64, 64, dtype="float32")
    with pytest.raises(ValueError, match="too small for its core"):
        tiled(Short(), raw, tile=32, batch_size=4, chunk=64)


@pytest.mark.slow
def test_a_resnet_unet_equals_the_whole_image():
    net = seeded(ResNetUNet, 3, 2, 4)
    raw = noise(3, 700, 1500, dtype="float32") / 1e4
    result, tiling = tiled(net, raw, batch_size=1, chunk=512)
    assert tiling.halo == (544, 544)
    assert np.abs(result - whole(net, raw, stride=32)).max() <= 1e-5
