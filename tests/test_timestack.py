"""Several dates as one scene."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import rasterio
import torch
import xarray as xr
from affine import Affine
from torch import nn

import daskinfer as di
from conftest import TRANSFORM, Pixel, noise, write_raster
from daskinfer.raster import Raster
from daskinfer.source import ArraySource, source_of
from daskinfer.wrappers import TimeSteps
from realdata import landsat_dates
from sources import everything, of_rioxarray, valid_of, window
from test_stac import item

pytestmark = of_rioxarray

DAYS = ["2020-07-01", "2020-06-01", "2020-08-15"]


def dates(folder):
    """Three files of two bands, with some nodata (0) of their own, not in order of time."""
    arrays = {}
    for number, day in enumerate(DAYS):
        data = noise(2, 40, 50, seed=number) + 1
        data[:, 3 * number : 3 * number + 8, 10:30] = 0
        write_raster(folder / f"{day}.tif", data, nodata=0)
        arrays[day] = data
    return [str(folder / f"{day}.tif") for day in DAYS], arrays


def stacked(arrays, days):
    """(time, band, y, x) with NaN where a date lacks a pixel."""
    return np.stack([np.where(arrays[day] == 0, np.nan, arrays[day]) for day in days])


def test_dates_come_in_order_of_time(tmp_path):
    paths, arrays = dates(tmp_path)
    scene = di.open_raster(paths, time=DAYS, chunks=16)
    expected = stacked(arrays, sorted(DAYS))
    assert scene.dims == ("time", "band", "y", "x")
    assert scene.time.values.astype("datetime64[D]").astype(str).tolist() == sorted(DAYS)
    assert scene.dtype == np.float32
    assert np.array_equal(scene.values, expected, equal_nan=True)
    any_valid = ~np.isnan(expected[:, 0]).all(axis=0)
    assert not any_valid.all()
    assert np.array_equal(scene.mask.values, any_valid)
    assert scene.rio.transform() == TRANSFORM
    source = source_of(scene)
    assert source.band_names[:3] == ("2020-06-01/1", "2020-06-01/2", "2020-07-01/1")
    assert np.array_equal(everything(source).data, expected.reshape(6, 40, 50), equal_nan=True)
    assert "3 dates, 2020-06-01 to 2020-08-15" in dict(source.notes)["time"]


def test_wanted_dates_that_are_missing_are_gaps(tmp_path):
    paths, arrays = dates(tmp_path)
    given = dict(zip(DAYS, paths, strict=True))
    wanted = ["2020-06-01", "2020-06-15", "2020-07-01"]
    scene = di.open_raster(given, time=wanted)
    assert scene.sizes["time"] == 3
    assert np.isnan(scene.values[1]).all()
    assert np.array_equal(scene.values[::2], stacked(arrays, wanted[::2]), equal_nan=True)
    every = di.open_raster(given, time="all", bands=[2])
    assert np.array_equal(every.values, stacked(arrays, sorted(DAYS))[:, 1:], equal_nan=True)
    with pytest.raises(ValueError, match="none of the dates"):
        di.open_raster(given, time=["1999-01-01"])


def test_files_of_one_date_are_a_mosaic_and_grids_are_united(tmp_path):
    left = write_raster(tmp_path / "l.tif", noise(1, 20, 20))
    right = write_raster(
        tmp_path / "r.tif",
        noise(1, 20, 20, seed=1),
        transform=TRANSFORM @ Affine.translation(20, 0),
    )
    scene = di.open_raster([left, right, left], time=["2020-01-01", "2020-01-01", "2021-01-01"])
    both = np.concatenate([noise(1, 20, 20), noise(1, 20, 20, seed=1)], axis=2)
    assert np.array_equal(scene.values[0], both)
    assert np.array_equal(scene.values[1, :, :, :20], noise(1, 20, 20))
    assert np.isnan(scene.values[1, :, :, 20:]).all()
    assert scene.mask.values.all()
    other = write_raster(tmp_path / "o.tif", noise(1, 9, 9), crs="EPSG:32633")
    with pytest.raises(ValueError, match="pass like="):
        di.open_raster([left, other], time=["2020-01-01", "2021-01-01"])


def test_a_stack_is_a_value_and_its_bands_can_be_chosen(tmp_path):
    paths, _ = dates(tmp_path)
    source = source_of(di.open_raster(paths, time=DAYS))
    whole_one = everything(source).data
    copy = pickle.loads(pickle.dumps(source))
    assert copy.identity == source.identity
    area = window(3, 4, 20, 17)
    cut = everything(copy.crop(area)).data
    assert np.array_equal(cut, whole_one[:, *area.slices()], equal_nan=True)
    second = everything(source.select(["2"])).data
    assert np.array_equal(second, whole_one[1::2], equal_nan=True)
    some = source.select(["2020-07-01/2", "2020-06-01/1"])
    assert np.array_equal(everything(some).data, whole_one[[3, 0]], equal_nan=True)
    assert some.select(["2020-06-01/1"]).band_names == ("2020-06-01/1",)
    assert source.thinned(10).data.shape == (6, 8, 10)
    with pytest.raises(ValueError, match="no band '3'"):
        source.select(["3"])


class Mean(nn.Module):
    """The mean over time of the first band, which is 0 where a date was filled."""

    def forward(self, x):
        assert x.ndim == 5
        return x[:, :, :1].mean(dim=1)


class Conv(nn.Module):
    """A 3-D convolution over time and space."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv = nn.Conv3d(2, 3, 3, padding=(0, 1, 1))

    def forward(self, x):
        return self.conv(x).squeeze(2)


def test_a_model_of_dates_sees_gaps_filled(tmp_path, one_worker):
    paths, arrays = dates(tmp_path)
    scene = di.open_raster(paths, time=DAYS)
    values = stacked(arrays, sorted(DAYS))
    expected = np.nan_to_num(values[:, :1]).mean(axis=0) * np.float32(1e-4)
    expected[:, np.isnan(values[:, 0]).all(axis=0)] = np.nan
    model = di.load_model(TimeSteps(Mean(), 3), output="values", scale=1e-4)
    options = {"tile": 16, "chunk": 32}
    report = di.run(scene, model, tmp_path / "out.tif", client=one_worker, **options)
    assert report.nonfinite == 0
    with rasterio.open(tmp_path / "out.tif") as dataset:
        np.testing.assert_allclose(dataset.read(), expected, atol=1e-5)
    np.testing.assert_allclose(di.predict(scene, model, **options).values, expected, atol=1e-5)
    # Also where nothing is known of the files any more.
    computed = scene.compute()
    assert isinstance(source_of(computed), ArraySource)
    assert np.array_equal(valid_of(source_of(computed)), scene.mask.values)
    np.testing.assert_allclose(di.predict(computed, model, **options).values, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32"])
def test_an_array_of_dates_lacks_what_is_nodata_at_each_as_files_do(tmp_path, dtype):
    raw = np.stack([noise(2, 9, 11, seed=i) % 100 + 1 for i in range(3)]).astype(dtype)
    raw[1, :, 4, 4] = raw[0, 0, 7, 7] = raw[:, :, 8, 8] = 999
    paths = [
        write_raster(tmp_path / f"{i}.tif", one, nodata=999, descriptions=("a", "b"))
        for i, one in enumerate(raw)
    ]
    expected = everything(source_of(di.open_raster(paths, time=DAYS)))
    days = np.array(DAYS, "datetime64[ns]")
    array = xr.DataArray(
        raw[np.argsort(days)],
        {
            "time": np.sort(days),
            "band": ["a", "b"],
            "scale": ("band", [0.1, 0.2], {"dtype": dtype}),
        },
        ("time", "band", "y", "x"),
    )
    given = di.open_raster(array, nodata=999)
    for one in (array.assign_attrs(_FillValue=999), given, given.chunk(5)):
        source = source_of(one)
        pixels = everything(source)
        assert pixels.data.dtype == expected.data.dtype
        assert np.array_equal(pixels.data, expected.data, equal_nan=True)
        assert np.array_equal(pixels.valid, expected.valid)
        assert source.scales == (0.1, 0.2) * 3
    assert everything(source_of(di.open_raster(array, mask=False))).data.max() == 999


def test_a_3d_convolution_has_a_halo(tmp_path):
    arrays = [noise(2, 40, 50, seed=i) for i in range(3)]
    paths = [write_raster(tmp_path / f"{i}.tif", data) for i, data in enumerate(arrays)]
    scene = di.open_raster(paths, time=DAYS)
    assert scene.dtype == np.uint16
    model = di.load_model(TimeSteps(Conv(), 3, band_first=True), output="values", scale=1e-4)
    assert di.receptive_field(model, bands=6).radius == (1, 1)
    result = di.predict(scene, model, tile=16, chunk=16).values
    batch = torch.from_numpy(scene.values.astype(np.float32))[None].transpose(1, 2) * 1e-4
    with torch.inference_mode():
        np.testing.assert_allclose(result, Conv()(batch)[0].numpy(), atol=1e-5)


def test_items_are_placed_by_their_time(tmp_path):
    _, first = item(tmp_path, "a", datetime="2022-06-01T10:00:00Z")
    _, second = item(tmp_path, "b", seed=5, datetime="2022-06-11T10:20:00Z")
    paths = [tmp_path / "b.json", tmp_path / "a.json"]
    scene = di.open_raster(paths, bands=["red"], time="all")
    assert np.array_equal(scene.values[:, 0], np.stack([first["red"][0], second["red"][0]]))
    days = ["2022-06-11", "2022-06-02", "2022-06-01"]
    placed = di.open_raster(paths, bands=["red"], time=days)
    assert placed.sizes["time"] == 3
    assert np.isnan(placed.values[1]).all()
    assert np.array_equal(placed.values[2, 0], second["red"][0])
    timeless = json.loads((tmp_path / "a.json").read_text())
    timeless["properties"]["datetime"] = None
    with pytest.raises(ValueError, match="does not tell when"):
        di.open_raster(timeless, bands=["red"], time="all")


def test_what_is_no_date_is_refused(tmp_path):
    paths, _ = dates(tmp_path)
    for time, message in (
        (DAYS[:2], "2 dates, which must be one for each"),
        (["June", *DAYS[1:]], "'June' is no date"),
        ("some", "one for each source|list of dates or 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            di.open_raster(paths, time=time)
    with pytest.raises(ValueError, match="cannot be those of 4 dates"):
        TimeSteps(Mean(), 4)(torch.zeros(1, 6, 2, 2))


def test_105_dates_of_landsat_are_one_stack(tmp_path):
    folders = landsat_dates()
    paths = {str(f.name): [str(f / f"{f.name}_b{n}.tif") for n in (3, 4)] for f in folders}
    assert len(paths) == 105
    days = [np.datetime64(f"{name[9:13]}-01-01") + int(name[13:16]) - 1 for name in paths]
    reds = {day: path[0] for day, path in zip(days, paths.values(), strict=True)}
    scene = di.open_raster(reds, time="all")
    assert scene.shape == (105, 1, 61, 61)
    with rasterio.open(reds[max(days)]) as dataset:
        last = dataset.read(1, masked=True)
    values = scene.isel(time=-1, band=0).values
    assert np.array_equal(values[~last.mask], last.compressed())


def test_nodata_is_that_of_the_bands_and_dates_that_are_picked(tmp_path):
    first, second = noise(2, 9, 8) + 5, noise(2, 9, 8, seed=1) + 5
    first[0, :3], first[1, 6:], second[1, :, :2] = 1, 1, 1
    paths = [
        write_raster(tmp_path / f"{i}.tif", raw, nodata=1) for i, raw in enumerate((first, second))
    ]
    scene = di.open_raster(paths, time=["2020-06-01", "2020-07-01"])
    stack = source_of(scene)
    for picked, expected in (
        (["2020-06-01/1"], first[0] != 1),
        (["2020-06-01/2"], first[1] != 1),
        (["2020-07-01/1"], np.ones((9, 8), bool)),
        (["2020-06-01/1", "2020-06-01/2"], (first != 1).all(axis=0)),
        (["2020-07-01/2", "2020-06-01/1"], (first[0] != 1) | (second[1] != 1)),
    ):
        assert np.array_equal(valid_of(stack.select(picked)), expected)
        assert np.array_equal(valid_of(ArraySource(scene).select(picked)), expected)
        pixels = stack.select(picked).thinned(9)
        thin = np.ones((9, 8), bool) if pixels.valid is None else pixels.valid
        assert np.array_equal(thin, expected)
    model = di.load_model(Pixel(), output="values", bands=["2020-06-01/1"])
    di.run(scene, model, tmp_path / "o.tif")
    with rasterio.open(tmp_path / "o.tif") as dataset:
        expected = np.where(first[0] != 1, first[0], np.nan)
        assert np.array_equal(dataset.read(1), expected, equal_nan=True)
    assert np.array_equal(di.predict(scene, model).values[0], expected, equal_nan=True)


def test_bands_of_one_date_read_that_date_alone(tmp_path, monkeypatch):
    paths, _ = dates(tmp_path)
    source = source_of(di.open_raster(paths, time=DAYS)).select(["2020-07-01/1"])
    read, opened = Raster.read, []

    def noted(self, area, **options):
        opened.append((self.path, self.indexes))
        return read(self, area, **options)

    monkeypatch.setattr(Raster, "read", noted)
    everything(source)
    assert opened == [(dict(zip(DAYS, paths, strict=True))["2020-07-01"], (1,))]
