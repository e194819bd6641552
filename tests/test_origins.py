"""An output that would replace a file of its source is refused, however the source is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import rasterio
import rasterio.shutil
import rioxarray
from torch import nn

import daskinfer as di
from conftest import Pixel, noise, write_raster
from daskinfer.objects.detect import plan_objects
from daskinfer.origins import origins
from sources import of_rioxarray

pytestmark = of_rioxarray

REFUSED = "is the source itself"


@pytest.fixture
def scene(tmp_path):
    return write_raster(tmp_path / "a.tif", noise(1, 64, 48))


@pytest.fixture
def model():
    return di.load_model(Pixel(), output="values")


@pytest.fixture
def kept(tmp_path):
    """All files of the folder must be at the end what they were at first."""

    def told():
        files = (path for path in sorted(tmp_path.rglob("*")) if path.is_file())
        return {path: path.read_bytes() for path in files}

    before = []

    def keep():
        before.append(told())

    yield keep
    assert told() == before[0]


def vrt_over(path, name):
    rasterio.shutil.copy(name, path, driver="VRT")
    return str(path)


def computed(array):
    return array * 2


def opened_by_rioxarray(path):
    return rioxarray.open_rasterio(path, chunks=32)


def nested(path):
    inner = vrt_over(Path(path).with_name("inner.vrt"), path)
    outer = Path(path).with_name("outer.vrt")
    vrt_over(outer, path)
    outer.write_text(outer.read_text().replace("a.tif", os.path.basename(inner)))
    return str(outer)


SOURCES = {
    "opened": di.open_raster,
    "computed": lambda path: computed(di.open_raster(path)),
    "part": lambda path: di.open_raster(path, window=(0, 0, 32, 32)),
    "rioxarray": opened_by_rioxarray,
    "rioxarray computed": lambda path: computed(opened_by_rioxarray(path)),
    "vrt": lambda path: vrt_over(Path(path).with_name("v.vrt"), path),
    "vrt opened": lambda path: di.open_raster(vrt_over(Path(path).with_name("v.vrt"), path)),
    "vrt in a vrt": nested,
    "list": lambda path: [path],
    "bands": lambda path: {"red": path, "nir": [path]},
    "mosaic opened": lambda path: di.open_raster([path, path]),
    "subdataset": lambda path: f"GTIFF_DIR:1:{path}",
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_run_does_not_replace_its_source(scene, model, kind, kept):
    source = SOURCES[kind](scene)
    if kind == "bands":
        model = di.load_model(nn.Conv2d(2, 1, 1), output="values")
    kept()
    with pytest.raises(ValueError, match=REFUSED):
        di.run(source, model, scene, overwrite=True)


@pytest.mark.parametrize(
    "kind", ["opened", "computed", "rioxarray", "rioxarray computed", "vrt opened", "mosaic opened"]
)
def test_write_cog_does_not_replace_what_is_read_for_it(scene, model, kind, kept):
    prediction = di.predict(SOURCES[kind](scene), model)
    kept()
    for array in (prediction, prediction + 1):
        with pytest.raises(ValueError, match=REFUSED):
            di.write_cog(array, scene, overwrite=True)


def test_numbers_in_memory_and_other_files_may_be_written_anywhere(scene, tmp_path, one_worker):
    (tmp_path / "b.tif").write_bytes(Path(scene).read_bytes())
    di.write_cog(di.open_raster(scene), tmp_path / "b.tif", overwrite=True)
    here = di.open_raster(scene).compute()
    di.write_cog(here + 1, scene, overwrite=True)
    with rasterio.open(scene) as dataset:
        np.testing.assert_array_equal(dataset.read(), here.values + 1)


def test_files_of_a_split_output_are_not_replaced_by_their_own(tmp_path, scene, model, kept):
    di.write_cog(di.open_raster(scene), tmp_path / "o.vrt", blocksize=16, split=32)
    piece = str(tmp_path / "o_files" / "o_r00_c00.tif")
    kept()
    for source in (str(tmp_path / "o.vrt"), piece, di.open_raster(tmp_path / "o.vrt")):
        for output in (tmp_path / "o.vrt", piece):
            with pytest.raises(ValueError, match=REFUSED):
                di.plan(source, model, output, overwrite=True)


def test_what_a_run_grows_in_is_not_the_source(tmp_path, scene, model, kept):
    unfinished = str(tmp_path / "o.tif.partial")
    os.rename(scene, unfinished)
    kept()
    with pytest.raises(ValueError, match=REFUSED):
        di.plan(unfinished, model, tmp_path / "o.tif", overwrite=True)


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
def test_a_store_does_not_replace_itself(tmp_path, scene, model, kept):
    store = str(tmp_path / "s.zarr")
    array = opened_by_rioxarray(scene)
    array.to_dataset(name="scene").to_zarr(f"{store}/10m", consolidated=False)
    array.to_dataset(name="scene").to_zarr(store, consolidated=False, mode="a")
    lazy = di.open_raster(store)
    kept()
    for source in (store, f"{store}/10m", lazy, lazy * 2, di.open_raster(f"{store}/10m")):
        with pytest.raises(ValueError, match=REFUSED):
            di.plan(source, model, store, overwrite=True)


def test_an_object_does_not_replace_itself():
    for source in ("s3://bucket/a.tif", "/vsis3/bucket/a.tif"):
        with pytest.raises(ValueError, match=REFUSED):
            di.plan(source, Pixel(), "s3://bucket/a.tif", overwrite=True)


def test_vector_files_do_not_replace_what_they_are_made_from(tmp_path, kept):
    pytest.importorskip("pyogrio", reason="needs: pip install 'daskinfer[vector]'")
    from detectors import Patches

    classes = noise(1, 64, 48, dtype="uint8") % 3
    source = write_raster(tmp_path / "map.gpkg", classes, driver="GPKG")
    areas = str(tmp_path / "areas.gpkg")
    di.vectorize(source, areas, band=1)
    kept()
    with pytest.raises(ValueError, match=REFUSED):
        plan_objects(source, Patches(), areas, aoi=areas, overwrite=True)
    for one in (source, di.open_raster(source)):
        with pytest.raises(ValueError, match=REFUSED):
            di.vectorize(one, source, band=1, overwrite=True)
        with pytest.raises(ValueError, match=REFUSED):
            plan_objects(one, Patches(), source, overwrite=True)


def test_origins_name_each_file(tmp_path, scene):
    other = write_raster(tmp_path / "b.tif", noise(1, 64, 48, seed=1))
    both = di.open_raster([scene, other])
    assert set(origins(both)) == set(origins(both * 2)) == {scene, other}
    assert set(origins(both.chunk(16).mean("band"))) == {scene, other}
    assert list(origins(both.compute())) == []
    assert list(origins(None)) == []
