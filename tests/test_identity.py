"""What two runs must share: all that changes the pixels of a source, or which of them are valid."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import rasterio
import rasterio.shutil
import xarray as xr

import daskinfer as di
from conftest import Pixel, noise, write_raster
from daskinfer.errors import InferenceError
from daskinfer.inputs.protocol import served_state
from daskinfer.raster import describe
from daskinfer.source import ArraySource, source_of
from httpserver import serve
from sources import vrt

RAW = noise(2, 20, 30)


def settings(source, tmp_path):
    model = di.load_model(Pixel(), output="values")
    return di.plan(source, model, tmp_path / "out.tif", tile=16).settings()


def later(path):
    """Another time of change, as of a file that was written again."""
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))


@pytest.fixture
def path(tmp_path):
    return write_raster(tmp_path / "a.tif", RAW, nodata=3)


OPTIONS = [
    {"nodata": 0}, {"mask": False}, {"scale": 10.0}, {"offset": 2.0}, {"scale": {"2": 3.0}},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_how_a_file_is_read_is_part_of_what_runs_share(path, tmp_path, options):
    for source in (path, [path, path], {"one": [path]} if "2" not in str(options) else path):
        if isinstance(source, dict):
            source = {"one": write_raster(tmp_path / "b.tif", RAW[:1], nodata=3)}
        plain, other = di.open_raster(source), di.open_raster(source, **options)
        assert settings(plain, tmp_path) == settings(di.open_raster(source), tmp_path)
        assert settings(plain, tmp_path) != settings(other, tmp_path)


def test_masks_of_arrays_that_are_read_otherwise_keep_apart_in_one_graph(path):
    one, other = (di.open_raster([path, path], nodata=n) for n in (RAW[0, 0, 0], RAW[0, 5, 5]))
    both = (one.mask.astype(int) + 2 * other.mask).values
    expected = [(n != RAW).all(axis=0) for n in (RAW[0, 0, 0], RAW[0, 5, 5])]
    assert np.array_equal(both, expected[0] + 2 * expected[1])


def test_a_run_does_not_go_on_with_other_nodata(tmp_path):
    class Failing(Pixel):
        def forward(self, x):
            if broken.exists() and float(x.max()) >= 20_000:
                raise RuntimeError("as it was asked to")
            return x

    raw = noise(1, 32, 32)
    raw[0, 20, 20] = 20_000
    path, out = write_raster(tmp_path / "a.tif", raw), tmp_path / "o.tif"
    broken = tmp_path / "broken"
    broken.touch()
    model = di.load_model(Failing(), output="values")
    options = {"tile": 16, "chunk": 16, "blocksize": 16}
    with pytest.raises(InferenceError, match="as it was asked to"):
        di.run(di.open_raster(path, nodata=raw[0, 0, 0]), model, out, **options)
    broken.unlink()
    with pytest.raises(ValueError, match=r"run with other settings.*source: .* then, .* now"):
        di.run(di.open_raster(path, nodata=raw[0, 5, 5]), model, out, **options)
    di.run(di.open_raster(path, nodata=raw[0, 0, 0]), model, out, **options)
    with rasterio.open(out) as dataset:
        expected = np.where(raw == raw[0, 0, 0], np.nan, raw)
        assert np.array_equal(dataset.read(), expected, equal_nan=True)


def test_files_behind_a_vrt_are_looked_at_however_deep(path, tmp_path):
    inner = vrt(tmp_path / "inner.vrt", path, [("UInt16", 1, "")])
    outer = vrt(tmp_path / "outer.vrt", inner, [("UInt16", 1, "")])
    before = [describe(name).identity for name in (inner, outer)]
    assert [describe(name).identity for name in (inner, outer)] == before
    later(path)
    for name, earlier in zip((inner, outer), before, strict=True):
        assert describe(name).identity != earlier


def test_a_mask_beside_a_file_is_looked_at_and_statistics_are_not(path):
    other = describe(path).identity
    Path(f"{path}.aux.xml").write_text("<PAMDataset></PAMDataset>")
    assert describe(path).identity == other
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False), rasterio.open(path, "r+") as dataset:
        dataset.write_mask(RAW[0] != RAW[0, 0, 0])
    with_mask = describe(path).identity
    assert with_mask != other
    later(f"{path}.msk")
    assert describe(path).identity != with_mask


def test_the_archive_of_a_file_is_looked_at(path, tmp_path):
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(path, "a.tif")
    before = describe(f"/vsizip/{archive}/a.tif").identity
    later(archive)
    assert describe(f"/vsizip/{archive}/a.tif").identity != before


def test_a_header_of_a_file_is_looked_at(tmp_path):
    path = write_raster(tmp_path / "a.img", RAW, driver="ENVI")
    before = describe(path).identity
    later(tmp_path / "a.hdr")
    assert describe(path).identity != before


def test_a_store_whose_chunks_changed_is_another_source(tmp_path):
    store = tmp_path / "s.zarr"
    dataset = xr.Dataset({"a": (("y", "x"), RAW[0])}).chunk(10)
    dataset.to_zarr(store, consolidated=False)
    before, computed = (source_of(opened).identity for opened in both(store))
    assert [source_of(opened).identity for opened in both(store)] == [before, computed]
    held = di.open_raster(store)
    (dataset + 1).to_zarr(store, mode="r+", consolidated=False)
    assert before != source_of(di.open_raster(store)).identity
    assert computed != source_of(both(store)[1]).identity
    assert held.data.name != di.open_raster(store).data.name


def both(store):
    scene = di.open_raster(store)
    return scene, scene * 2


def test_what_an_array_tells_of_its_numbers_is_part_of_what_runs_share():
    array = xr.DataArray(RAW, dims=("band", "y", "x"))
    told = [
        array,
        array.assign_coords(mask=(("y", "x"), RAW[0] != RAW[0, 0, 0])),
        array.assign_coords(mask=(("y", "x"), RAW[0] != RAW[0, 5, 5])),
        array.assign_coords(scale=("band", [1.0, 2.0])),
        array.assign_coords(scale=("band", [2.0, 1.0])),
        array.assign_coords(offset=("band", [2.0, 1.0])),
        array.assign_attrs(_FillValue=4),
        array.assign_coords(mask=(("y", "x"), RAW[0] != RAW[0, 0, 0])).chunk(8),
        array.assign_coords(mask=(("y", "x"), RAW[0] != RAW[0, 5, 5])).chunk(8),
    ]
    names = [ArraySource(one).identity for one in told]
    assert len(set(names)) == len(names)
    assert names == [ArraySource(one.copy(deep=True)).identity for one in told]


def test_the_state_of_a_file_is_asked_of_its_server(path, tmp_path):
    with serve(tmp_path) as files:
        url = files.url("a.tif")
        sources = describe(url), source_of([url, path])
        before = [served_state(source) for source in sources]
        assert None not in before
        assert [served_state(source) for source in sources] == before
        later(path)
        assert all(
            now != then for now, then in zip(map(served_state, sources), before, strict=True)
        )
        signed = describe(files.url("a.tif", 1), sign=lambda name: name.replace("/1/", "/2/"))
        assert served_state(signed) == served_state(sources[0])
        plan = settings(url, tmp_path)
        later(path)
        assert settings(url, tmp_path) != plan
    assert served_state(describe(path)) is None
