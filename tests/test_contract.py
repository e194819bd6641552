"""The seam contract: any chunk, tile, batch and number of workers equals the whole-image run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import rasterio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import daskinfer as di
from conftest import N3, P4, noise, seeded, write_raster
from oracle import assert_classes, whole

SCALE = 1e-4
NUMBERS = itertools.count()
# Each example is a run on a cluster: shrinking one would take minutes, and the first is as telling.
RUNS = {
    "deadline": None,
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


def demo_network():
    return di.demo_model().network()


NETS = {
    "three convolutions": (seeded(N3), 2, 1, 6),
    "pooling": (seeded(P4), 2, 4, 16),
}


@pytest.mark.parametrize(
    "name", ["pooling", pytest.param("three convolutions", marks=pytest.mark.slow)]
)
@settings(max_examples=25, **RUNS)
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    tile=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    chunk=st.tuples(st.integers(1, 320), st.integers(1, 320)),
    batch=st.integers(1, 9),
    two=st.booleans(),
)
def test_run_and_predict_equal_the_whole_image(
    tmp_path, one_worker, two_workers, name, height, width, tile, chunk, batch, two
):
    net, bands, stride, halo = NETS[name]
    raw = noise(bands, height, width)
    expected = whole(net, raw, stride=stride, scale=SCALE)
    source = write_raster(tmp_path / "scene.tif", raw)
    output = tmp_path / f"out{next(NUMBERS)}.tif"
    sides = tuple(2 * halo + stride * (1 + n) for n in tile)
    model = di.load_model(net, scale=SCALE)
    options = {"tile": sides, "chunk": chunk, "batch_size": batch}

    report = di.run(source, model, output, client=two_workers if two else one_worker, **options)
    with rasterio.open(output) as dataset:
        streamed = dataset.read()
    lazy = di.predict(di.open_raster(source), model, **options).compute(scheduler="threads")

    assert report.complete
    assert streamed.shape == (1, height, width)
    assert_classes(streamed[0], expected)
    assert_classes(lazy.values[0], expected)


@settings(max_examples=8, **RUNS)
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    core=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    chunk=st.integers(64, 320),
    two=st.booleans(),
)
def test_demo_model_equals_the_whole_image(
    tmp_path, one_worker, two_workers, height, width, core, chunk, two
):
    model = di.demo_model()
    field = di.receptive_field(model)
    stride, halo = field.stride[0], field.halo[0]
    with rasterio.open(di.demo.demo_path()) as dataset:
        raw = dataset.read(window=((20, 20 + height), (100, 100 + width)))
    expected = whole(
        demo_network(),
        raw,
        stride=stride,
        scale=model.scale,
        mean=model.mean,
        std=model.std,
    )
    source = write_raster(tmp_path / "scene.tif", raw, descriptions=di.demo_scene().band.values)
    output = tmp_path / f"out{next(NUMBERS)}.tif"
    tile = tuple(2 * halo + stride * n for n in core)

    di.run(source, model, output, tile=tile, chunk=chunk, client=two_workers if two else one_worker)
    with rasterio.open(output) as dataset:
        streamed = dataset.read()
    lazy = di.predict(di.open_raster(source), model, tile=tile, chunk=chunk).compute(
        scheduler="threads"
    )

    assert_classes(streamed[0], expected)
    assert_classes(lazy.values[0], expected)


def test_scores_equal_the_whole_image_within_1e_5(tmp_path, one_worker):
    net = seeded(P4)
    raw = noise(2, 203, 151)
    source = write_raster(tmp_path / "scene.tif", raw)
    model = di.load_model(net, scale=SCALE, output="values")
    di.run(source, model, tmp_path / "out.tif", tile=48, chunk=64, client=one_worker)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        scores = dataset.read()
        assert dataset.dtypes == ("float32",) * 3
        assert np.isnan(dataset.nodata)
    assert np.abs(scores - whole(net, raw, stride=4, scale=SCALE)).max() < 1e-5


def test_result_does_not_depend_on_chunks_or_workers(tmp_path, one_worker, two_workers):
    net = seeded(N3)
    source = write_raster(tmp_path / "scene.tif", noise(2, 150, 170))
    model = di.load_model(net, scale=SCALE)
    results = []
    for i, (chunk, client) in enumerate(
        itertools.product((32, 64, 2048), (one_worker, two_workers))
    ):
        output = tmp_path / f"{i}.tif"
        di.run(source, model, output, tile=40, chunk=chunk, client=client)
        with rasterio.open(output) as dataset:
            results.append(dataset.read())
    assert all(np.array_equal(results[0], other) for other in results)
