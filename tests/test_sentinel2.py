"""A Sentinel-2 scene as it is delivered: 13 files at 10, 20 and 60 m."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
from rasterio.enums import Resampling

import daskinfer as di
from conftest import Pixel
from daskinfer.source import source_of
from realdata import sentinel2_bands
from sources import everything, of_rioxarray

pytestmark = of_rioxarray


@pytest.fixture(scope="module")
def paths():
    return sentinel2_bands()


def by_rasterio(path, shape, resampling):
    with rasterio.open(path) as dataset:
        return dataset.read(1, out_shape=shape, resampling=Resampling[resampling])


@pytest.mark.parametrize(
    ("resampling", "bands"), [("bilinear", None), ("nearest", ["B02", "B05", "B01"])]
)
def test_thirteen_bands_are_one_scene_at_10_m(paths, resampling, bands):
    assert len(paths) == 13
    scene = di.open_raster(paths, resampling=resampling, bands=bands)
    names = list(paths) if bands is None else bands
    assert scene.band.values.tolist() == names
    assert scene.dtype == np.uint16
    with rasterio.open(paths["B02"]) as dataset:
        assert scene.shape[1:] == dataset.shape
        assert scene.rio.transform() == dataset.transform
        assert scene.rio.crs == dataset.crs
    values = scene.compute()
    for name in names:
        expected = by_rasterio(paths[name], scene.shape[1:], resampling).astype(int)
        difference = np.abs(values.sel(band=name).values.astype(int) - expected)
        # Between pixels both interpolate; halves are rounded up by one and down by the other.
        assert difference.max() <= (0 if resampling == "nearest" else 1), name
    note = dict(source_of(scene).notes)["warped"]
    coarse = [name for name in names if name not in ("B02", "B03", "B04", "B08")]
    assert note.startswith(f"{', '.join(coarse)} to ")
    assert note.endswith(resampling)


def test_files_of_bands_are_named_by_what_tells_them_apart(paths):
    some = [paths[name] for name in ("B8A", "B04", "B01")]
    scene = di.open_raster(some, stack="bands", bands=["B04", "B8A"])
    assert scene.band.values.tolist() == ["B04", "B8A"]
    assert scene.rio.transform().a == 10
    expected = by_rasterio(paths["B8A"], scene.shape[1:], "nearest")
    assert np.array_equal(scene.sel(band="B8A").values, expected)
    coarse = di.open_raster(some, stack="bands", resolution=60, resampling="average")
    assert coarse.rio.transform().a == 60
    assert np.array_equal(coarse.sel(band="B01").values, by_rasterio(paths["B01"], None, "nearest"))


def test_a_run_on_a_part_is_the_array(paths, tmp_path, one_worker):
    wanted = {name: paths[name] for name in ("B02", "B11", "B09")}
    scene = di.open_raster(wanted, resampling="bilinear", window=(100, 200, 150, 170))
    model = di.load_model(Pixel(), output="values")
    report = di.run(scene, model, tmp_path / "out.tif", tile=64, chunk=64, client=one_worker)
    assert report.complete
    with rasterio.open(tmp_path / "out.tif") as dataset:
        assert dataset.transform == scene.rio.transform()
        assert np.array_equal(dataset.read(), scene.values)
    assert np.array_equal(everything(source_of(scene)).data, scene.values)
