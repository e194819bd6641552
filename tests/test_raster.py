"""Rasters in files: dtypes, masks, nodata and windows, against rasterio and plain numpy."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import pytest
import rasterio
from hypothesis import given
from hypothesis import strategies as st
from rasterio.enums import ColorInterp

import daskinfer as di
from conftest import noise, ramp, write_raster
from daskinfer.raster import describe, valid_pixels
from daskinfer.tiling import Span, Window
from sources import everything, three_ways, valid_of, vrt, window

# --- nodata ---------------------------------------------------------------------------------------


@st.composite
def numbers_and_nodata(draw):
    dtype = np.dtype(draw(st.sampled_from(["uint8", "int16", "uint16", "float32", "float64"])))
    values = st.integers(0, 5)
    data = np.array(draw(st.lists(values, min_size=24, max_size=24)), dtype).reshape(2, 3, 4)
    if dtype.kind == "f":
        data[data == 5] = np.nan
    return data, tuple(draw(st.none() | st.sampled_from([0.0, 3.0, np.nan])) for _ in range(2))


@given(numbers_and_nodata())
def test_a_pixel_is_valid_where_no_band_is_nodata_or_nan(case):
    data, nodata = case
    expected = np.ones((3, 4), bool)
    for band, value in zip(data, nodata, strict=True):
        for at in np.ndindex(3, 4):
            expected[at] &= not (band[at] == value or np.isnan(band[at]))
    assert np.array_equal(valid_pixels(data, nodata), expected)


@pytest.mark.parametrize(
    ("dtype", "nodata"), [("uint8", 0), ("uint16", 65535), ("int16", -9999), ("float32", -9999),
                          ("float32", np.nan), ("float32", -3.4e38), ("float64", -1.7e308)],
)  # fmt: skip
def test_nodata_and_nan_are_masked_in_every_kind_of_source(tmp_path, dtype, nodata):
    raw = noise(2, 9, 10, dtype=dtype) + 1
    raw[0, 2, 3] = raw[1, 4, 5] = nodata
    expected = np.ones((9, 10), bool)
    expected[2, 3] = expected[4, 5] = False
    path = write_raster(tmp_path / "a.tif", raw, nodata=nodata)
    for source in three_ways(path):
        assert np.array_equal(valid_of(source), expected)
    assert np.array_equal(di.open_raster(path).mask.values, expected)


@pytest.mark.parametrize(("dtype", "nodata"), [("uint8", -9999), ("uint8", 256), ("int16", 1e10),
                                               ("uint8", 0.5), ("uint16", np.nan)])  # fmt: skip
def test_nodata_that_the_dtype_does_not_hold_matches_no_pixel(tmp_path, dtype, nodata):
    raw = np.arange(256, dtype=dtype).reshape(1, 16, 16)
    path = write_raster(tmp_path / "a.tif", raw)
    for source in three_ways(path, nodata=nodata):
        assert everything(source).valid is None


def test_nodata_may_differ_between_bands_and_only_chosen_bands_count(tmp_path):
    raw = np.array([[[1, 2, 3]], [[1, 2, 3]]], "uint8")
    path = write_raster(tmp_path / "a.tif", raw)
    bands = [("Byte", n, f"<NoDataValue>{n}</NoDataValue>") for n in (1, 2)]
    source = describe(vrt(tmp_path / "a.vrt", path, bands))
    assert valid_of(source).tolist() == [[False, False, True]]
    assert valid_of(source.select([1])).tolist() == [[False, True, True]]
    assert valid_of(source.select([2])).tolist() == [[True, False, True]]


def test_nodata_given_by_the_user_replaces_the_files(tmp_path):
    path = write_raster(tmp_path / "a.tif", ramp(2, 3), nodata=1)
    for source in three_ways(path, nodata=4):
        assert valid_of(source).tolist() == [[True, True, True], [True, False, True]]


def test_no_mask_is_made_where_none_is_wanted(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(1, 4, 5), nodata=1)
    scene = di.open_raster(path, mask=False)
    assert "mask" not in scene.coords
    assert "_FillValue" not in scene.attrs
    assert describe(path, mask=False).mask is None


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bands", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_alpha_is_a_mask_and_no_input(tmp_path, bands, dtype):
    raw = noise(bands + 1, 6, 7, dtype=dtype) % 200 + 1
    raw[-1, 0, 0] = 0
    expected = raw[-1] > 0
    path = write_raster(tmp_path / "a.tif", raw)
    with rasterio.open(path, "r+") as dataset:
        dataset.colorinterp = [*dataset.colorinterp[:-1], ColorInterp.alpha]
    for source in three_ways(path):
        assert len(source.band_names) == bands
        assert np.array_equal(everything(source).data, raw[:-1])
        assert np.array_equal(valid_of(source), expected)


@pytest.mark.parametrize("internal", [True, False])
def test_a_mask_inside_or_beside_the_file_is_used(tmp_path, internal):
    raw, mask = noise(2, 6, 7), np.ones((6, 7), bool)
    mask[0, 0] = mask[3, 4] = False
    path = write_raster(tmp_path / "a.tif", raw)
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=internal), rasterio.open(path, "r+") as dataset:
        dataset.write_mask(mask)
    assert os.path.exists(f"{path}.msk") is not internal
    for source in three_ways(path):
        assert np.array_equal(valid_of(source), mask)
        assert np.array_equal(everything(source).data, raw)
    assert np.array_equal(valid_of(describe(path, window=(3, 2, 3, 4))), mask[3:6, 2:6])


# --- reading --------------------------------------------------------------------------------------


def test_bands_of_different_dtypes_are_read_in_one_that_holds_both(tmp_path):
    raw = noise(2, 5, 6, dtype="int16") % 200
    path = write_raster(tmp_path / "a.tif", raw)
    mixed = vrt(tmp_path / "a.vrt", path, [("Byte", 1, ""), ("Int16", 2, "")])
    for source in three_ways(mixed):
        assert source.dtype == "int16"
        assert np.array_equal(everything(source).data, raw)
        alone = everything(source.select([1])).data
        assert (alone.dtype, alone.tolist()) == (np.int16, raw[:1].tolist())


@pytest.fixture(scope="module")
def deflated(tmp_path_factory):
    path = tmp_path_factory.mktemp("raster") / "a.tif"
    options = {"tiled": True, "blockxsize": 64, "blockysize": 64, "compress": "deflate"}
    return write_raster(path, noise(2, 500, 400), nodata=9, **options)


def random_windows(count, *shape):
    rng = np.random.default_rng(0)
    for _ in range(count):
        rows, cols = (sorted(rng.choice(size + 1, 2, replace=False).tolist()) for size in shape)
        yield Window(Span(*rows), Span(*cols))


def test_threads_read_what_one_thread_reads(deflated):
    raster = describe(deflated)
    with rasterio.open(deflated) as dataset:
        raw = dataset.read()
    windows = list(random_windows(100, *raster.grid.shape))

    def equal(area):
        pixels, expected = raster.read(area), raw[:, *area.slices()]
        valid = (expected != 9).all(axis=0)
        actual = np.ones_like(valid) if pixels.valid is None else pixels.valid
        return np.array_equal(pixels.data, expected) and np.array_equal(actual, valid)

    with ThreadPoolExecutor(8) as pool:
        done = [pool.map(equal, windows) for _ in range(8)]
        assert all(all(answers) for answers in done)


def test_a_raster_is_pickled_without_its_open_datasets(deflated):
    raster = describe(deflated)
    everything(raster)
    packed = cloudpickle.dumps(raster)
    assert len(packed) < 5000
    again = cloudpickle.loads(packed)
    assert again == raster
    assert np.array_equal(everything(again).data, everything(raster).data)


def test_a_window_is_counted_from_the_rasters_own_origin(deflated):
    with rasterio.open(deflated) as dataset:
        raw = dataset.read()
    raster = describe(deflated, window=(100, 50, 200, 150))
    assert np.array_equal(raster.read(window(10, 20, 30, 40)).data, raw[:, 110:140, 70:110])


def test_a_window_that_reaches_outside_is_refused_not_cut_short(deflated):
    raster = describe(deflated, window=(100, 50, 200, 150))
    for outside in (window(0, 0, 201, 150), window(199, 149, 1, 2), window(-1, 0, 5, 5)):
        with pytest.raises(ValueError, match=r"outside \(200, 150\)"):
            raster.read(outside)


def test_a_file_that_was_replaced_is_opened_again(tmp_path):
    path = write_raster(tmp_path / "a.tif", ramp(4, 5))
    before = describe(path)
    assert everything(before).data.max() == 19
    write_raster(path, ramp(4, 5) + 100)
    os.utime(path, (0, 0))
    assert describe(path).identity != before.identity
    assert everything(describe(path)).data.max() == 119


def open_files(folder):
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.realpath(link).startswith(str(folder)) for link in links)


def test_a_thread_keeps_a_bounded_number_of_files_open(tmp_path):
    paths = [write_raster(tmp_path / f"{n}.tif", ramp(4, 5) + n) for n in range(30)]

    def read_all():
        return [int(everything(describe(path)).data.min()) for path in paths], open_files(tmp_path)

    with ThreadPoolExecutor(1) as pool:
        answers, still_open = pool.submit(read_all).result()
    assert answers == list(range(30))
    assert still_open <= 8
