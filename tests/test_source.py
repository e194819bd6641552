"""Opening rasters as lazy arrays, and arrays as sources, against rasterio and plain numpy."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
import rasterio
import rioxarray
import xarray as xr
from rasterio.errors import NotGeoreferencedWarning

import daskinfer as di
from conftest import TRANSFORM, Pixel, noise, ramp, write_raster
from daskinfer.raster import Raster, describe
from daskinfer.source import ArraySource, source_of
from sources import everything, of_rioxarray, three_ways, valid_of, window

NAMES = ("B4", "B8A", "B2", "B3")


@pytest.fixture
def reads(monkeypatch):
    """Windows that are read of files, as they are read."""
    windows, read = [], Raster.read

    def counted(self, window, **options):
        windows.append(window)
        return read(self, window, **options)

    monkeypatch.setattr(Raster, "read", counted)
    return windows


# --- laziness -------------------------------------------------------------------------------------


def test_opening_slicing_and_choosing_bands_read_nothing(tmp_path, reads):
    path = write_raster(tmp_path / "a.tif", noise(3, 40, 50), nodata=7)
    scene = di.open_raster(path, bands=[3, 1], chunks=16, window=(4, 4, 32, 40))
    source = source_of(scene[:, 3:20]).select(["1"])
    assert (source.grid.shape, source.dtype, len(source.identity) > 0) == ((17, 40), "uint16", True)
    assert source.valid is not None
    assert reads == []


def test_computing_a_part_reads_its_chunks_alone(tmp_path, reads):
    path = write_raster(tmp_path / "a.tif", ramp(40, 50))
    part = di.open_raster(path, chunks=16)[:, 17:20, 2:5]
    assert np.array_equal(part.values, ramp(40, 50)[:, 17:20, 2:5])
    assert reads == [window(16, 0, 16, 16)]


def test_a_mask_from_nodata_and_the_numbers_are_read_once_for_both(tmp_path, reads):
    path = write_raster(tmp_path / "a.tif", noise(1, 20, 20), nodata=7)
    scene = di.open_raster(path)
    with dask.config.set(scheduler="synchronous"):
        dask.compute(scene.data, scene.mask.data)
    assert reads == [window(0, 0, 20, 20)]


def test_two_windows_of_a_raster_that_lies_nowhere_keep_apart_in_one_graph(tmp_path):
    with pytest.warns(NotGeoreferencedWarning):
        path = write_raster(tmp_path / "a.tif", ramp(8, 9), transform=None, crs=None)
    corner, other = (di.open_raster(path, window=(n, n, 3, 4)) for n in (0, 5))
    difference = (other.data - corner.data).compute()
    assert np.array_equal(difference, ramp(8, 9)[:, 5:8, 5:9] - ramp(8, 9)[:, :3, :4])
    assert describe(path, window=(0, 0, 3, 4)).identity != describe(path).identity


@pytest.mark.parametrize("chunks", [7, (5, 9), "auto"])
def test_chunks_do_not_change_the_numbers(tmp_path, chunks):
    raw = noise(2, 23, 31)
    scene = di.open_raster(write_raster(tmp_path / "a.tif", raw), chunks=chunks)
    assert (scene.dims, scene.dtype) == (("band", "y", "x"), np.uint16)
    assert np.array_equal(scene.values, raw)


def test_automatic_chunks_are_whole_blocks_near_2048(tmp_path):
    options = {"tiled": True, "blockxsize": 256, "blockysize": 512, "SPARSE_OK": True}
    path = tmp_path / "a.tif"
    with rasterio.open(
        path, "w", driver="GTiff", width=5000, height=5000, count=1, dtype="uint8",
        transform=TRANSFORM, **options,
    ):  # fmt: skip
        pass
    assert di.open_raster(path).data.chunks[1:] == ((2048, 2048, 904),) * 2


# --- bands ----------------------------------------------------------------------------------------


def test_bands_come_by_name_in_the_order_asked_for(tmp_path):
    raw = noise(4, 5, 6)
    path = write_raster(tmp_path / "a.tif", raw, descriptions=NAMES)
    wanted = ["B2", "B3", "B4", "B8A"]
    expected = raw[[NAMES.index(name) for name in wanted]]
    scene = di.open_raster(path, bands=wanted)
    assert list(scene.band.values) == wanted
    assert np.array_equal(scene.values, expected)
    for source in three_ways(path):
        picked = source.select(wanted)
        assert picked.band_names == tuple(wanted)
        assert np.array_equal(everything(picked).data, expected)
    assert np.array_equal(di.open_raster(path, bands=[3, "B8A"]).values, raw[[2, 1]])
    assert np.array_equal(di.open_raster(di.open_raster(path), bands=["B3"]).values, raw[[3]])


def test_bands_are_in_file_order_not_in_that_of_their_names(tmp_path):
    names = ["band_1", "band_10", "band_2", "B8A"]
    path = write_raster(tmp_path / "a.tif", noise(4, 5, 6), descriptions=names)
    assert list(di.open_raster(path).band.values) == names


@pytest.mark.parametrize("names", [(), ("B1", "", "B3"), ("B1", "B1", "B2")])
def test_bands_without_names_of_their_own_are_numbered_from_one(tmp_path, names):
    path = write_raster(tmp_path / "a.tif", noise(3, 5, 6), descriptions=names)
    assert describe(path).band_names == ("1", "2", "3")


@pytest.mark.parametrize("unknown", ["B9", "b4", 0, 5, -1])
def test_an_unknown_band_is_refused_with_both_lists(tmp_path, unknown):
    path = write_raster(tmp_path / "a.tif", noise(4, 5, 6), descriptions=NAMES)
    for source in three_ways(path):
        with pytest.raises(ValueError, match=f"no band {unknown!r}") as refusal:
            source.select(["B2", unknown])
        assert str(["B2", unknown]) in str(refusal.value)
        assert str(list(NAMES)) in str(refusal.value)


@pytest.mark.parametrize("doubled", [["B2", "B3", "B2"], [3, "B2"]])
def test_a_band_asked_for_twice_is_refused(tmp_path, doubled):
    path = write_raster(tmp_path / "a.tif", noise(4, 5, 6), descriptions=NAMES)
    with pytest.raises(ValueError, match="'B2' is asked for twice"):
        di.open_raster(path, bands=doubled)


# --- masks ----------------------------------------------------------------------------------------


def test_a_mask_follows_slices_and_arithmetic(tmp_path):
    raw = noise(1, 8, 9, dtype="float32") + 1
    raw[0, 2, 3] = -1
    scene = di.open_raster(write_raster(tmp_path / "a.tif", raw, nodata=-1))
    expected = raw[0] != -1
    assert np.array_equal(valid_of(ArraySource(scene[:, ::-1, 2:])), expected[::-1, 2:])
    # Computed numbers may be the old nodata by chance, and NaN where they are undefined.
    computed = scene * 0 - 1
    assert np.array_equal(valid_of(ArraySource(computed)), expected)
    undefined = xr.where(scene == raw[0, 5, 6], np.nan, scene)
    assert np.array_equal(valid_of(ArraySource(undefined)), expected & (raw[0] != raw[0, 5, 6]))


# --- scale and offset -----------------------------------------------------------------------------


def test_scale_and_offset_belong_to_their_band(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(2, 4, 5), nodata=3)
    with rasterio.open(path, "r+") as dataset:
        dataset.scales, dataset.offsets = (0.1, 0.5), (0.0, -1.0)
    with rasterio.open(path) as dataset:
        raw = dataset.read()
    for source in three_ways(path):
        assert (source.scales, source.offsets) == ((0.1, 0.5), (0, -1))
        swapped = source.select(["2", "1"])
        assert (swapped.scales, swapped.offsets) == ((0.5, 0.1), (-1, 0))
        # Raw numbers, on which nodata is matched.
        assert np.array_equal(everything(source).data, raw)


def test_a_model_sees_physical_values_and_nodata_is_matched_on_raw_numbers(tmp_path):
    raw = np.array([[[9, 5]], [[9, 9]]], "uint8")
    path = write_raster(tmp_path / "a.tif", raw, nodata=5)
    with rasterio.open(path, "r+") as dataset:
        dataset.scales, dataset.offsets = (0.1, 0.5), (0.0, -1.0)
    model = di.load_model(Pixel(), output="values")
    seen = di.predict(di.open_raster(path), model).values
    assert seen[:, 0, 0] == pytest.approx([0.9, 3.5])
    assert np.isnan(seen[:, 0, 1]).all()


@of_rioxarray
@pytest.mark.filterwarnings("ignore:(Scales|Offsets) differ across bands:UserWarning")
@pytest.mark.parametrize("scales", [(0.1, 0.1), (0.1, 0.5)])
def test_arrays_of_rioxarray_keep_scale_and_offset_through_selections(tmp_path, scales):
    path = write_raster(tmp_path / "a.tif", noise(2, 4, 5))
    with rasterio.open(path, "r+") as dataset:
        dataset.scales, dataset.offsets = scales, (0.0, 0.0)
    with rioxarray.open_rasterio(path) as array:
        assert ArraySource(array).scales == scales
        assert ArraySource(array).select(["2", "1"]).scales == scales[::-1]
        assert ArraySource(array[1:]).scales == scales[1:]
        assert ArraySource(array.sel(band=2)).scales == scales[1:]
        renamed = array.assign_coords(band=["red", "nir"])
        if scales[0] == scales[1]:
            assert ArraySource(renamed).scales == scales
        else:
            with pytest.raises(
                ValueError, match=r"'scales' has 2 entries.*pass scale= to load_model"
            ):
                assert ArraySource(renamed).scales
    with rioxarray.open_rasterio(path, mask_and_scale=True) as scaled:
        assert ArraySource(scaled).scales == (1, 1)


@of_rioxarray
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunks", [None, {}])
def test_arrays_of_rioxarray_keep_their_nodata(tmp_path, masked, chunks):
    raw = noise(2, 6, 7) % 100 + 4
    raw[1, 2, 3] = 3
    path = write_raster(tmp_path / "a.tif", raw, nodata=3)
    with rioxarray.open_rasterio(path, masked=masked, chunks=chunks) as array:
        source = ArraySource(array)
        expected = valid_of(describe(path))
        assert np.array_equal(valid_of(source), expected)
        assert np.array_equal(everything(source).data[:, expected], raw[:, expected])


@of_rioxarray
def test_arrays_of_rioxarray_keep_their_names_through_selections(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(3, 4, 5), descriptions=("red", "nir", "swir"))
    with rioxarray.open_rasterio(path) as array:
        assert ArraySource(array).band_names == ("red", "nir", "swir")
        assert ArraySource(array.sel(band=[3, 1])).band_names == ("swir", "red")
        assert ArraySource(array.sel(band=2)).band_names == ("nir",)


@of_rioxarray
def test_the_variables_of_a_dataset_are_bands(tmp_path):
    raw = noise(2, 6, 7) % 100 + 4
    raw[1, 2, 3] = 3
    path = write_raster(tmp_path / "a.tif", raw, nodata=3)
    expected = everything(describe(path))
    with rioxarray.open_rasterio(path, band_as_variable=True) as dataset:
        for source in (source_of(dataset), source_of(di.open_raster(dataset, bands=[1, 2]))):
            pixels = everything(source)
            assert np.array_equal(pixels.data, expected.data)
            assert np.array_equal(pixels.valid, expected.valid)
            assert source.grid.transform == TRANSFORM
        one = source_of(dataset[["band_2"]])
        assert one.band_names == ("band_2",)
        assert np.array_equal(everything(one).data, expected.data[1:])
        odd = dataset.assign(other=("t", [1.0])).assign(third=dataset.band_1.astype("f4"))
        with pytest.raises(ValueError, match=r"the dataset holds band_1 .*not bands of one raster"):
            di.open_raster(odd)


@of_rioxarray
def test_bands_of_several_files_may_all_be_called_1(tmp_path):
    paths = [write_raster(tmp_path / f"{i}.tif", noise(1, 4, 5, seed=i)) for i in range(3)]
    each = [rioxarray.open_rasterio(path) for path in paths]
    source = ArraySource(xr.concat(each, dim="band"))
    chosen = everything(source.select([3, 1])).data
    assert np.array_equal(chosen, np.concatenate([each[2].values, each[0].values]))
    for array in each:
        array.close()


# --- arrays ---------------------------------------------------------------------------------------


def test_a_computed_array_is_read_in_the_calling_thread(tmp_path):
    raw = noise(2, 30, 40)
    lazy = xr.DataArray(da.from_array(raw, chunks=(1, 8, 8)), dims=("band", "y", "x"))
    pixels = ArraySource(lazy).read(window(3, 5, 20, 30))
    assert pixels.valid is None
    assert np.array_equal(pixels.data, raw[:, 3:23, 5:35])


def test_the_identity_of_an_array_is_that_of_its_numbers_and_its_place():
    raw = noise(1, 4, 5)
    centres = {"y": np.arange(4.0), "x": np.arange(5.0)}
    array = xr.DataArray(raw, centres, ("band", "y", "x"))
    assert ArraySource(array).identity == ArraySource(array.copy(deep=True)).identity
    assert ArraySource(array).identity != ArraySource(array + 1).identity
    moved = array.assign_coords(x=array.x + 10)
    assert ArraySource(array).identity != ArraySource(moved).identity


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("nodata", [None, 7, np.nan])
def test_an_array_as_it_was_opened_stands_for_its_file(tmp_path, reads, mask, nodata):
    raw = noise(2, 40, 50, dtype="float32") % 20
    path = write_raster(tmp_path / "a.tif", raw, nodata=7, descriptions=("red", "nir"))
    scene = di.open_raster(path, bands=["nir", "red"], nodata=nodata, mask=mask, chunks=16)
    source = source_of(scene)
    assert isinstance(source, Raster)
    assert source_of(scene.copy(), window=(3, 4, 20, 30), bands=["red"]) == describe(
        path, bands=["red"], nodata=nodata, mask=mask, window=(3, 4, 20, 30)
    )
    assert reads == []
    as_array = ArraySource(scene)
    assert np.array_equal(everything(source).data, everything(as_array).data)
    assert np.array_equal(valid_of(source), valid_of(as_array))
    assert (source.band_names, source.grid) == (as_array.band_names, as_array.grid)


CHANGES = {
    "cut": lambda scene: scene[:, 1:],
    "bands": lambda scene: scene[::-1],
    "numbers": lambda scene: scene + 0,
    "in memory": lambda scene: scene.compute(),
    "no mask": lambda scene: scene.drop_vars("mask"),
    "other mask": lambda scene: scene.assign_coords(mask=~scene.mask),
    "nodata": lambda scene: scene.assign_attrs(_FillValue=8),
    "names": lambda scene: scene.assign_coords(band=["a", "b"]),
    "place": lambda scene: scene.assign_coords(x=scene.x + 10),
    "crs": lambda scene: scene.rio.write_crs("EPSG:32633"),
    "scale": lambda scene: scene.assign_coords(scale=("band", [2.0, 2.0])),
    "order of axes": lambda scene: scene.transpose("y", "x", "band").transpose("band", "y", "x"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_array_that_was_changed_since_stands_for_itself(tmp_path, change):
    path = write_raster(tmp_path / "a.tif", noise(2, 20, 30) % 20, nodata=7)
    scene = di.open_raster(path)
    changed = change(scene)
    source = source_of(changed)
    assert isinstance(source, ArraySource)
    assert np.array_equal(everything(source).data, changed.values)
    assert isinstance(source_of(scene), Raster)


# --- refusals -------------------------------------------------------------------------------------


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.tif.*no such file"):
        di.open_raster(tmp_path / "nowhere.tif")


def test_what_is_no_raster_is_refused_with_gdals_reason(tmp_path):
    (tmp_path / "a.tif").write_text("not a raster")
    for path in (tmp_path / "a.tif", tmp_path):
        with pytest.raises(ValueError, match="is not a raster that GDAL opens: "):
            di.open_raster(path)


def test_complex_numbers_are_refused_in_files_and_arrays(tmp_path):
    raw = np.ones((1, 4, 5), np.complex64)
    with pytest.raises(ValueError, match=r"is complex.*amplitude"):
        di.open_raster(write_raster(tmp_path / "a.tif", raw))
    with pytest.raises(ValueError, match="dtype complex64 cannot be fed to a model"):
        ArraySource(xr.DataArray(raw, dims=("band", "y", "x")))


@pytest.mark.parametrize(
    "dims", [("y", "x", "band"), ("band", "time", "y", "x"), ("band", "x", "y")]
)
def test_other_dimensions_are_refused_with_what_they_are(dims):
    array = xr.DataArray(np.zeros((2,) * len(dims)), dims=dims)
    with pytest.raises(ValueError, match=r"expected dimensions \(band, y, x\), got") as refusal:
        ArraySource(array)
    assert str(dims) in str(refusal.value)


def test_one_row_of_all_bands_is_no_raster():
    with pytest.raises(
        ValueError, match=r"expected dimensions \(band, y, x\), got \('band', 'x'\)"
    ):
        ArraySource(xr.DataArray(np.zeros((2, 5)), dims=("band", "x")))


def test_an_array_of_rows_and_columns_is_one_band():
    raw = noise(4, 5)
    source = ArraySource(xr.DataArray(raw, dims=("y", "x")))
    assert source.band_names == ("1",)
    assert np.array_equal(everything(source).data, raw[None])


def test_a_raster_of_a_million_pixels_a_side_is_opened_without_listing_its_chunks(tmp_path):
    path = str(tmp_path / "a.tif")
    with rasterio.open(
        path, "w", driver="GTiff", width=1_000_000, height=1_000_000, count=1, dtype="uint8",
        tiled=True, blockxsize=512, blockysize=512, SPARSE_OK=True, BIGTIFF="YES",
        transform=TRANSFORM, nodata=7,
    ):  # fmt: skip
        pass
    scene = di.open_raster(path)
    assert scene.data.npartitions > 200_000
    for data in (scene.data, scene.mask.data):
        assert not any(layer.is_materialized() for layer in data.dask.layers.values())
    corner = scene[:, 999_990:, 500_000:500_003]
    assert np.array_equal(corner.values, np.full((1, 10, 3), 7))
    assert not corner.mask.values.any()
