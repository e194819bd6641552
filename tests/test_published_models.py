"""Published networks give their published numbers through a raster."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import torch

import daskinfer as di
from conftest import write_raster
from daskinfer.demo import demo_path
from published import (
    cover_network,
    csmask,
    csmask_in_float32,
    csmask_torch,
    lai_network,
    lai_numbers,
)


def test_lai_of_100_cases(tmp_path, one_worker):
    cases = lai_numbers("TestCases").astype(np.float32)
    given, expected = cases[:, :11].T.reshape(11, 10, 10), cases[:, 11].reshape(10, 10)
    low, high = lai_numbers("Normalisation").T
    # 2 (v - low) / (high - low) - 1
    spec = {"mean": (low + high) / 2, "std": (high - low) / 2}
    model = di.load_model(lai_network(), output="values", **spec)
    scene = write_raster(tmp_path / "cases.tif", given)
    di.run(scene, model, tmp_path / "lai.tif", client=one_worker)
    with rasterio.open(tmp_path / "lai.tif") as dataset:
        actual = dataset.read(1)
    # Their five digits, of inputs that have five too.
    assert np.abs(actual - expected).max() < 2e-3
    assert np.corrcoef(actual.ravel(), expected.ravel())[0, 1] > 0.999999


def test_the_published_fractions_of_cover(tmp_path, one_worker):
    pixel = np.array([825, 1088, 2056, 2951, 2187], np.uint16)
    scene = np.broadcast_to(pixel[:, None, None], (5, 20, 30)).copy()
    model = di.load_model(cover_network(), output="values", scale=1e-4)
    path = write_raster(tmp_path / "scene.tif", scene)
    di.run(path, model, tmp_path / "cover.tif", client=one_worker, tile=16)
    with rasterio.open(tmp_path / "cover.tif") as dataset:
        actual = dataset.read()
    expected = np.array([0.12142971, 0.23126282, 0.6459608])
    assert np.abs(actual - expected[:, None, None]).max() < 1e-6


@pytest.fixture(scope="module")
def clouds():
    """Scores of the published network on all of the real scene: as published, and ways to run it.

    Windows of the only size that the file takes, side by side.
    """
    path, spec = csmask()
    with rasterio.open(demo_path()) as dataset:
        raw = dataset.read()
    mean, std = (np.reshape(np.float32(spec[name]), (-1, 1, 1)) for name in ("mean", "std"))
    x = (raw * np.float32(1e-4) - mean) / std
    windows = [x[:, y : y + 256, left : left + 256] for y in (0, 128) for left in (0, 256, 512)]
    batch = torch.from_numpy(np.stack(windows))
    with torch.inference_mode():
        return batch, di.load_model(path).network()(batch), csmask_torch()(batch)


@pytest.mark.slow
def test_clouds_through_onnx_runtime_and_through_torch_are_the_same(tmp_path, clouds):
    batch, published, plain = clouds
    # The file computes in float16: its scores are rounded to three digits.
    assert (published - plain).abs().max() < 0.2
    top = published.topk(2, dim=1).values
    certain = top[:, 0] - top[:, 1] > 0.2
    assert certain.float().mean() > 0.9
    assert torch.equal(published.argmax(1)[certain], plain.argmax(1)[certain])
    # The same graph in float32 is the same network.
    path = csmask_in_float32(tmp_path / "float32.onnx")
    with torch.inference_mode():
        exact = di.load_model(path).network()(batch)
    assert torch.allclose(exact, plain, atol=2e-3)
    assert torch.equal(exact.argmax(1), plain.argmax(1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no halo is exact for this model")
def test_the_onnx_file_runs_over_the_scene(tmp_path, clouds, one_worker):
    path, spec = csmask()
    names = ["clear", "cloud", "shadow"]
    model = di.load_model(path, scale=1e-4, class_names=names, **spec)
    assert (model.tile, model.in_bands) == ((256, 256), 6)
    window = (0, 256, 256, 256)
    di.run(demo_path(), model, tmp_path / "out.tif", window=window, client=one_worker)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        classes = dataset.read(1)
    assert np.mean(classes != clouds[1][1].argmax(0).numpy()) < 1e-3
    assert {0, 1} <= set(np.unique(classes))
