"""Attributes that rode along through arithmetic, and no longer tell of the numbers at hand."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import rioxarray
import xarray as xr

import daskinfer as di
from conftest import Pixel, noise, write_raster
from daskinfer.source import ArraySource
from sources import of_rioxarray, valid_of

pytestmark = of_rioxarray
RAW = noise(1, 8, 9) % 3000 + 100


def scaled(path, dtype="uint16", nodata=None):
    write_raster(path, RAW.astype(dtype), nodata=nodata)
    with rasterio.open(path, "r+") as dataset:
        dataset.scales, dataset.offsets = (1e-4,), (-0.1,)
    return str(path)


@pytest.fixture
def path(tmp_path):
    return scaled(tmp_path / "a.tif")


@pytest.fixture
def array(path):
    with rioxarray.open_rasterio(path) as opened:
        yield opened


@pytest.fixture
def masked(path):
    with rioxarray.open_rasterio(path, masked=True) as opened:
        yield opened


KEPT = {
    "as it is": lambda array: array,
    "rows": lambda array: array[:, 2:6],
    "flipped": lambda array: array[:, ::-1],
    "one band": lambda array: array.isel(band=0),
    "chunks": lambda array: array.chunk(4),
    "in memory": lambda array: array.compute(),
    "named": lambda array: array.assign_coords(band=["red"]).rename("scene"),
    "of a dataset": lambda array: array.to_dataset(name="a")["a"],
}
COMPUTED = {
    "physical": lambda array: array * 1e-4 - 0.1,
    "root": np.sqrt,
    "index": lambda array: (array - 100) / (array + 100),
    "shifted": lambda array: (array - 50).astype(array.dtype),
    "floats": lambda array: array.astype("float64") + 1,
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_selections_keep_scale_and_offset(path, array, masked, keep):
    for opened in (array, masked, di.open_raster(path)):
        source = ArraySource(keep(opened))
        assert (source.scales, source.offsets) == ((1e-4,), (-0.1,))


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
@pytest.mark.parametrize("reader", ["rioxarray", "masked", "open_raster", "floats"])
def test_scale_and_offset_of_a_file_are_refused_for_computed_numbers(
    tmp_path, path, array, masked, reader, compute
):
    floats = di.open_raster(scaled(tmp_path / "f.tif", "float32"))
    opened = {
        "rioxarray": array, "masked": masked, "open_raster": di.open_raster(path), "floats": floats,
    }[reader]  # fmt: skip
    computed = compute(opened)
    model = di.load_model(Pixel(), output="values")
    for call in (
        lambda: di.predict(computed, model),
        lambda: di.plan(computed, model, tmp_path / "o.tif"),
    ):
        with pytest.raises(ValueError, match=r"assign_coords\(scale=\('band', \[0\.0001\]\)\)"):
            call()


def test_other_numbers_in_a_copy_are_told_by_their_dtype(tmp_path, path, array):
    floats = di.open_raster(scaled(tmp_path / "f.tif", "float32"))
    for opened in (array, di.open_raster(path), floats):
        with pytest.raises(ValueError, match=r"drop_vars|del array\.attrs"):
            assert ArraySource(opened.copy(data=opened.values * np.float64(1e-4))).scales


def test_each_cure_of_the_refusal_helps(array):
    computed = array * 1e-4 - 0.1
    applied = computed.copy()
    del applied.attrs["scale_factor"], applied.attrs["add_offset"]
    model = di.load_model(Pixel(), output="values")
    assert np.allclose(di.predict(applied, model).values, RAW * 1e-4 - 0.1, atol=1e-6)
    clipped = array.clip(200, 900).assign_coords(scale=("band", [1e-4]), offset=("band", [-0.1]))
    expected = RAW.clip(200, 900) * 1e-4 - 0.1
    assert np.allclose(di.predict(clipped, model).values, expected, atol=1e-6)


def test_numbers_without_a_scale_may_be_computed(tmp_path):
    path = write_raster(tmp_path / "a.tif", RAW)
    with rioxarray.open_rasterio(path) as array:
        assert ArraySource(array * 2.0).scales == (1.0,)


@pytest.mark.parametrize("compute", [lambda a: a.astype("int32") - 1000, lambda a: a * 2])
def test_nodata_of_a_file_is_refused_for_computed_numbers(tmp_path, compute):
    nodata = int(RAW[0, 0, 0])
    path = write_raster(tmp_path / "a.tif", RAW, nodata=nodata)
    with rioxarray.open_rasterio(path) as array:
        assert np.array_equal(valid_of(ArraySource(array)), RAW[0] != nodata)
        computed = compute(array)
        with pytest.raises(
            ValueError, match=rf"_FillValue = {nodata} .*open_raster\(array, nodata"
        ):
            ArraySource(computed)
        meant = int(computed.values[0, 0, 0])
        said = ArraySource(di.open_raster(computed, nodata=meant))
        assert np.array_equal(valid_of(said), RAW[0] != nodata)
        free = computed.copy()
        del free.attrs["_FillValue"]
        assert valid_of(ArraySource(free)).all()
        assert valid_of(ArraySource(di.open_raster(computed, mask=False))).all()


def test_nodata_that_the_user_tells_of_an_array_holds():
    array = xr.DataArray(RAW, dims=("band", "y", "x"), attrs={"_FillValue": int(RAW[0, 0, 0])})
    assert np.array_equal(valid_of(ArraySource(array)), RAW[0] != RAW[0, 0, 0])


def test_a_store_keeps_its_scale_until_its_numbers_are_computed_with(tmp_path):
    told = {"scale_factor": 0.5}
    dataset = xr.Dataset({name: (("y", "x"), RAW[0], told) for name in ("a", "b")})
    dataset[["a"]].to_zarr(tmp_path / "one.zarr", consolidated=False)
    dataset.to_zarr(tmp_path / "two.zarr", consolidated=False)
    for name, count in (("one", 1), ("two", 2)):
        scene = di.open_raster(tmp_path / f"{name}.zarr")
        assert ArraySource(scene[:, 1:]).scales == (0.5,) * count
        with pytest.raises(ValueError, match=r"assign_coords\(scale="):
            assert ArraySource(
                (scene - 3).drop_attrs(deep=False) if count == 2 else scene - 3
            ).scales
