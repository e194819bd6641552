"""Values and masks from file to output: what a model sees, and where there is none to see."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import torch
import xarray as xr
from rasterio.enums import ColorInterp
from torch import nn

import daskinfer as di
from conftest import N3, P4, Pixel, noise, seeded, write_raster
from daskinfer.metadata import nodata_of
from daskinfer.raster import describe
from daskinfer.source import source_of
from engine import inferred
from sources import everything, three_ways, valid_of, vrt


def both_ways(path):
    """A file by its path and as an array in memory."""
    return path, di.open_raster(path).compute()


class Bias(nn.Module):
    """Class 3, whatever it sees."""

    def forward(self, x):
        scores = torch.zeros((x.shape[0], 5, *x.shape[2:]))
        scores[:, 3] = 1
        return scores + 0 * x[:, :1]


# --- nodata in, nodata out ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:no halo is exact for this model:UserWarning")
@pytest.mark.parametrize("net", [N3, nn.Sequential])
@pytest.mark.parametrize("value", [np.nan, -9999.0, np.inf])
def test_one_pixel_of_nodata_is_one_pixel_of_nodata(tmp_path, net, value):
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 3, 1)]
    net = seeded(N3) if net is N3 else seeded(lambda: nn.Sequential(*layers))
    raw = noise(2, 64, 64, dtype="float32") / 1e4
    raw[0, 40, 40] = value
    nodata = value if np.isfinite(value) else None
    path = write_raster(tmp_path / "a.tif", raw, nodata=np.inf if np.isinf(value) else nodata)
    for source in both_ways(path):
        result, _ = inferred(source, di.load_model(net), tile=64)
        assert np.argwhere(result[0] == 255).tolist() == [[40, 40]]


def reached(nodata, radius, stride):
    """Pixels within the radius of the stride cells that hold nodata, by its definition."""
    expected = np.zeros_like(nodata)
    for y, x in np.argwhere(nodata):
        rows, cols = (
            slice(max(n // stride * stride - radius, 0), n // stride * stride + stride + radius)
            for n in (y, x)
        )
        expected[rows, cols] = True
    return expected


@pytest.mark.parametrize("tile", [24, 32, 96])
@pytest.mark.parametrize("chunk", [16, 48, 96])
@pytest.mark.parametrize(("net", "radius", "stride"), [(N3, 3, 1), (P4, 9, 4)])
def test_the_halo_of_nodata_can_be_masked_too(net, radius, stride, chunk, tile):
    raw = noise(2, 70, 90, dtype="float32") / 1e4
    for at in ((40, 40), (0, 0), (69, 50), (31, 89)):
        raw[1, *at] = np.nan
    expected = reached(np.isnan(raw).any(axis=0), radius, stride)
    scene = xr.DataArray(raw, dims=("band", "y", "x"))
    model = di.load_model(seeded(net), output="values")
    tile = max(tile, 36) if net is P4 else tile
    result, _ = inferred(scene, model, mask_halo=True, tile=tile, chunk=chunk)
    assert np.array_equal(np.isnan(result[0]), expected)
    plain, _ = inferred(scene, model, tile=tile, chunk=chunk)
    # Not bit for bit: which tiles meet in a batch is a matter of time.
    np.testing.assert_allclose(result[:, ~expected], plain[:, ~expected], rtol=0, atol=1e-5)


def test_nothing_that_nodata_has_an_influence_on_is_left_by_the_masked_halo():
    raw = noise(2, 80, 80, dtype="float32") / 1e4
    gone = np.zeros((80, 80), bool)
    gone[37, 42] = gone[60:62, 3] = True
    results = []
    for fill in (0, 5):
        # What stands for nodata is all that differs.
        scene = xr.DataArray(np.where(gone, np.nan, raw), dims=("band", "y", "x"))
        model = di.load_model(seeded(P4), output="values", fill=fill)
        results.append(inferred(scene, model, mask_halo=True, tile=48, chunk=32)[0])
        assert np.isnan(results[-1]).any()
    np.testing.assert_allclose(*results, rtol=0, atol=1e-5)


def test_the_masked_halo_of_radius_3_is_49_pixels_in_run_and_predict(tmp_path, one_worker):
    raw = noise(2, 64, 64, dtype="float32") / 1e4
    raw[0, 40, 40] = np.nan
    path = write_raster(tmp_path / "a.tif", raw)
    model = di.load_model(seeded(N3))
    job = {"tile": 24, "chunk": 16, "mask_halo": True}
    plan = di.plan(path, model, tmp_path / "o.tif", **job)
    assert "nodata masked as far as it is seen" in repr(plan)
    di.run(plan, client=one_worker)
    with rasterio.open(tmp_path / "o.tif") as dataset:
        written = dataset.read()
    assert (written == 255).sum() == 49
    assert (written[0, 37:44, 37:44] == 255).all()
    lazy = di.predict(di.open_raster(path), model, **job)
    assert np.array_equal(lazy.values, written)
    other = di.plan(path, model, tmp_path / "p.tif", tile=24, chunk=16)
    assert other.settings()["mask_halo"] != plan.settings()["mask_halo"] == [3, 3]


def test_the_masked_halo_needs_a_radius_and_a_halo_that_sees_it(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(2, 64, 64))
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 3, 1)]
    endless = di.load_model(seeded(lambda: nn.Sequential(*layers)))
    with pytest.warns(UserWarning, match="blended"), pytest.raises(ValueError, match="has an end"):
        di.plan(path, endless, tmp_path / "o.tif", mask_halo=True)
    with (
        pytest.warns(UserWarning, match="halo"),
        pytest.raises(ValueError, match="at least the radius, 3 px, got 2: leave halo= out"),
    ):
        di.plan(
            path, di.load_model(seeded(N3)), tmp_path / "o.tif", mask_halo=True, halo=2, tile=16
        )


@pytest.mark.parametrize(("dtype", "nodata"), [("uint8", 0), ("int16", -1), ("float32", np.nan)])
def test_a_block_of_nodata_stays_nodata_and_its_tiles_are_not_run(tmp_path, dtype, nodata):
    raw = (noise(2, 96, 64, dtype=dtype) % 100) + 1
    raw[:, 32:64, :] = nodata
    raw[:, 70:90, 20:40] = nodata
    path = write_raster(tmp_path / "a.tif", raw, nodata=nodata)
    expected = np.full((96, 64), 3)
    expected[32:64] = expected[70:90, 20:40] = 255
    for source in both_ways(path):
        result, tiles = inferred(source, di.load_model(Bias()), tile=32, chunk=32)
        assert np.array_equal(result[0], expected)
        assert tiles == 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_nodata_and_no_class(bad):
    class Breaking(Pixel):
        def forward(self, x):
            scores = torch.stack([torch.ones_like(x[:, 0]), x[:, 0], 3 + 0 * x[:, 0]], dim=1)
            return torch.where(x == 7, bad, scores)

    raw = noise(1, 32, 32, dtype="float32") % 5
    raw[0, 3, 4] = 7
    scene = xr.DataArray(raw, dims=("band", "y", "x"))
    result, _ = inferred(scene, di.load_model(Breaking()), tile=16)
    assert np.argwhere(result[0] == 255).tolist() == [[3, 4]]


@pytest.mark.slow
def test_class_299_of_300_is_299_and_its_nodata_is_none_of_them(tmp_path):
    class Many(nn.Module):
        def forward(self, x):
            scores = torch.arange(300.0)[None, :, None, None].expand(len(x), 300, *x.shape[2:])
            return scores + 0 * x[:, :1]

    raw = np.ones((1, 16, 16), "uint8")
    raw[0, 2, 3] = 0
    path = write_raster(tmp_path / "a.tif", raw, nodata=0)
    result, _ = inferred(path, di.load_model(Many()))
    assert result.dtype == np.uint16
    assert result[0, 2, 3] == 65535
    assert np.unique(result).tolist() == [299, 65535]


@pytest.mark.parametrize(
    ("classes", "nodata"),
    [
        (2, 255),
        pytest.param(255, 255, marks=pytest.mark.slow),
        pytest.param(256, 65535, marks=pytest.mark.slow),
    ],
)
def test_nodata_of_classes_is_no_class(classes, nodata):
    class Last(nn.Module):
        def forward(self, x):
            scores = torch.arange(float(classes))[None, :, None, None]
            return scores.expand(len(x), classes, *x.shape[2:]) + 0 * x[:, :1]

    scene = xr.DataArray(np.ones((1, 8, 8), "uint8"), dims=("band", "y", "x"))
    result, _ = inferred(scene, di.load_model(Last()))
    assert np.unique(result).tolist() == [classes - 1]
    assert np.iinfo(result.dtype).max == nodata


# --- nodata by its number -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int64", 2**53 + 1), ("int64", -(2**63)), ("uint64", 2**64 - 1), ("int64", 2**63 - 1)],
)
def test_64_bit_nodata_is_matched_to_the_last_digit(tmp_path, dtype, value):
    near = value - 1 if value > 0 else value + 1
    raw = np.array([[[value, near, 5]]], dtype)
    file = write_raster(tmp_path / "a.tif", raw)
    kind = dtype.replace("i", "I").replace("uI", "UI")
    path = vrt(tmp_path / "a.vrt", file, [(kind, 1, f"<NoDataValue>{value}</NoDataValue>")])
    for source in (*three_ways(path), *three_ways(file, nodata=value)):
        assert source.nodata == (value,)
        assert valid_of(source).tolist() == [[False, True, True]]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int8", -128), ("uint16", 65535), ("uint32", 2**32 - 1), ("int32", -(2**31)),
     ("int64", -9999), ("uint64", 0), ("float64", -1.7976931348623157e308),
     ("float32", 3.4028234663852886e38)],
)  # fmt: skip
def test_nodata_at_the_ends_of_a_dtype(tmp_path, dtype, value):
    raw = np.array([[[value, 1, 2], [3, 4, 5]]], dtype)
    path = write_raster(tmp_path / "a.tif", raw, nodata=value)
    for source in three_ways(path):
        assert valid_of(source).tolist() == [[False, True, True], [True, True, True]]


def test_nodata_may_be_given_for_each_band(tmp_path):
    raw = np.array([[[1, 2, 3]], [[1, 2, 3]]], "uint8")
    path = write_raster(tmp_path / "a.tif", raw, nodata=3)
    raster = describe(path, nodata=[1, None])
    assert valid_of(raster).tolist() == [[False, True, True]]
    assert valid_of(raster.select([2])).all()
    with pytest.raises(ValueError, match="3 numbers for 2 bands"):
        describe(path, nodata=[1, 2, 3])


def test_nodata_that_a_file_and_an_output_cannot_hold_is_refused_before_anything_is_read(tmp_path):
    scene = xr.DataArray(np.ones((1, 8, 8), "uint8"), dims=("band", "y", "x"))
    wrong = scene.chunk({"y": 4}).assign_attrs(_FillValue=-9999)
    with pytest.raises(ValueError, match=r"nodata -9999.* is not a uint8, which holds 0 to 255"):
        di.write_cog(wrong, tmp_path / "a.tif")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["_FillValue", "missing_value", "nodata"])
def test_arrays_tell_nodata_in_several_ways(name):
    scene = xr.DataArray(np.array([[[1, 2, 3]]]), dims=("band", "y", "x"), attrs={name: 2})
    assert valid_of(source_of(scene)).tolist() == [[True, False, True]]


# --- masks ----------------------------------------------------------------------------------------


def with_mask(path, mask, *, internal=False):
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=internal), rasterio.open(path, "r+") as dataset:
        dataset.write_mask(mask)


@pytest.mark.parametrize("internal", [True, False])
def test_a_mask_and_nodata_count_both(tmp_path, internal):
    raw = noise(2, 6, 7) % 50 + 4
    raw[1, 1, 1] = 3
    mask = np.ones((6, 7), bool)
    mask[4, 5] = False
    path = write_raster(tmp_path / "a.tif", raw, nodata=3)
    with_mask(path, mask, internal=internal)
    expected = mask.copy()
    expected[1, 1] = False
    for source in three_ways(path):
        assert np.array_equal(valid_of(source), expected)


def test_alpha_and_nodata_count_both(tmp_path):
    raw = noise(4, 6, 7, dtype="uint8") % 50 + 4
    raw[1, 1, 1], raw[3] = 3, 255
    raw[3, 4, 5] = 0
    path = write_raster(tmp_path / "a.tif", raw, nodata=3)
    with rasterio.open(path, "r+") as dataset:
        dataset.colorinterp = [*dataset.colorinterp[:3], ColorInterp.alpha]
    expected = np.ones((6, 7), bool)
    expected[1, 1] = expected[4, 5] = False
    for source in three_ways(path):
        assert np.array_equal(everything(source).data, raw[:3])
        assert np.array_equal(valid_of(source), expected)


def test_alpha_as_fifth_band_is_the_mask_of_a_model_of_four(tmp_path):
    raw = noise(5, 8, 9) + 1
    raw[4, 0, 0] = 0
    path = write_raster(tmp_path / "a.tif", raw)
    with rasterio.open(path, "r+") as dataset:
        dataset.colorinterp = [*dataset.colorinterp[:4], ColorInterp.alpha]
    model = di.load_model(nn.Conv2d(4, 3, 1))
    for source in both_ways(path):
        result, _ = inferred(source, model)
        assert np.argwhere(result[0] == 255).tolist() == [[0, 0]]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_alpha_is_found_wherever_it_is(tmp_path, place):
    raw = noise(4, 6, 7, dtype="uint8") % 50 + 4
    raw[place, 2, 3] = 0
    path = write_raster(tmp_path / "a.tif", raw)
    with rasterio.open(path, "r+") as dataset:
        colors = [ColorInterp.red, ColorInterp.green, ColorInterp.blue]
        colors.insert(place, ColorInterp.alpha)
        dataset.colorinterp = colors
    expected = raw[place] > 0
    for source in three_ways(path):
        assert np.array_equal(everything(source).data, np.delete(raw, place, axis=0))
        assert np.array_equal(valid_of(source), expected)


def test_a_file_of_alpha_alone_is_refused(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(1, 6, 7, dtype="uint8"))
    with rasterio.open(path, "r+") as dataset:
        dataset.colorinterp = [ColorInterp.alpha]
    with pytest.raises(ValueError, match="no bands but alpha"):
        di.open_raster(path)


def test_nodata_of_all_bands_at_once(tmp_path):
    raw = noise(3, 6, 7, dtype="uint8") % 50 + 8
    raw[:, 1, 2] = 7
    raw[0, 3, 3] = 7
    path = write_raster(tmp_path / "a.tif", raw)
    with rasterio.open(path, "r+") as dataset:
        dataset.update_tags(NODATA_VALUES="7 7 7")
    expected = np.ones((6, 7), bool)
    expected[1, 2] = False
    for source in three_ways(path):
        assert np.array_equal(valid_of(source), expected)


def test_a_mask_of_one_band_counts_where_the_band_is_used(tmp_path):
    raw, mask = noise(2, 6, 7) % 50 + 4, np.full((1, 6, 7), 255, "uint8")
    mask[0, 3, 4] = 0
    file = write_raster(tmp_path / "a.tif", raw)
    masking = write_raster(tmp_path / "m.tif", mask)
    own = (
        '<MaskBand><VRTRasterBand dataType="Byte"><SimpleSource>'
        f"<SourceFilename>{masking}</SourceFilename><SourceBand>1</SourceBand>"
        "</SimpleSource></VRTRasterBand></MaskBand>"
    )
    raster = describe(vrt(tmp_path / "a.vrt", file, [("UInt16", 1, own), ("UInt16", 2, "")]))
    assert np.array_equal(valid_of(raster), mask[0] > 0)
    assert np.array_equal(valid_of(raster.select([1])), mask[0] > 0)
    assert valid_of(raster.select([2])).all()


@pytest.mark.parametrize("kind", ["bool", "uint8", "int64", "float32"])
def test_the_mask_of_an_array_is_true_where_it_is_not_0(kind):
    mask = np.array([[1, 0, 1]]).astype(kind) * (1 if kind == "bool" else 255)
    raw = np.ones((1, 1, 3), "uint8")
    coords = {"mask": (("y", "x"), mask.astype(kind))}
    scene = xr.DataArray(raw, coords, ("band", "y", "x"))
    result, _ = inferred(scene, di.load_model(Pixel(), output="values"))
    assert np.isnan(result).tolist() == [[[False, True, False]]]


def test_a_mask_of_other_dimensions_is_refused():
    raw = np.ones((2, 4, 4), "uint8")
    scene = xr.DataArray(raw, {"mask": (("band", "y", "x"), raw > 0)}, ("band", "y", "x"))
    with pytest.raises(ValueError, match=r"the mask of an array is \(y, x\)"):
        source_of(scene)


# --- scale and offset -----------------------------------------------------------------------------


def test_unsigned_numbers_and_negative_offsets_do_not_wrap(tmp_path):
    path = write_raster(tmp_path / "a.tif", np.full((1, 4, 5), 500, "uint16"))
    with rasterio.open(path, "r+") as dataset:
        dataset.scales, dataset.offsets = (1e-4,), (-0.1,)
    for source in both_ways(path):
        result, _ = inferred(source, di.load_model(Pixel(), output="values"))
        assert result == pytest.approx(-0.05)


def test_a_scaled_band_keeps_its_pair_when_bands_are_chosen(tmp_path):
    raw = np.full((2, 1, 2), 9, "uint8")
    raw[0, 0, 1] = 5
    path = write_raster(tmp_path / "a.tif", raw, nodata=5, descriptions=("a", "b"))
    with rasterio.open(path, "r+") as dataset:
        dataset.scales, dataset.offsets = (0.1, 0.5), (0.0, -1.0)
    model = di.load_model(Pixel(), output="values", bands=["b", "a"])
    for source in both_ways(path):
        result, _ = inferred(source, model)
        assert result[:, 0, 0] == pytest.approx([3.5, 0.9])
        assert np.isnan(result[:, 0, 1]).all()


def test_nothing_of_the_sources_tags_is_on_the_output(tmp_path, one_worker):
    raw = noise(2, 16, 16, dtype="uint8") % 3
    path = write_raster(tmp_path / "a.tif", raw, nodata=0)
    with rasterio.open(path, "r+") as dataset:
        dataset.scales, dataset.offsets = (0.1, 0.5), (1, 2)
        dataset.update_tags(OTHER="x")
        dataset.update_tags(1, STATISTICS_MAXIMUM="2")
    model = di.load_model(seeded(N3))
    di.run(path, model, tmp_path / "o.tif", client=one_worker)
    di.write_cog(di.predict(di.open_raster(path), model), tmp_path / "p.tif")
    for name in ("o.tif", "p.tif"):
        with rasterio.open(tmp_path / name) as dataset:
            assert (dataset.nodata, dataset.scales, dataset.offsets) == (255, (1,), (0,))
            assert "OTHER" not in dataset.tags()
            assert "STATISTICS_MAXIMUM" not in dataset.tags(1)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float32",
        "float64",
    ],
)
def test_every_dtype_of_files_and_arrays_gives_the_float32_reference(tmp_path, dtype):
    raw = noise(2, 20, 30, dtype="int64") % 100
    raw = raw.astype(dtype) * (1 if np.dtype(dtype).kind == "u" else -1)
    path = write_raster(tmp_path / "a.tif", raw.astype(dtype))
    model = di.load_model(seeded(N3), output="values")
    with torch.inference_mode():
        expected = seeded(N3)(torch.from_numpy(raw.astype(np.float32))[None])[0].numpy()
    for source in both_ways(path):
        result, _ = inferred(source, model)
        assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [bool, ">f4", ">i2", ">u2", "f2", "<f8", ">f8"])
def test_arrays_of_dtypes_that_no_file_has(dtype):
    raw = (noise(2, 20, 30, dtype="int64") % 100).astype(dtype)
    result, _ = inferred(
        xr.DataArray(raw[:, ::-1], dims=("band", "y", "x")), di.load_model(Pixel(), output="values")
    )
    assert np.array_equal(result, raw[:, ::-1].astype(np.float32))


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "complex_int16"])
def test_complex_files_are_refused_with_what_to_pass(tmp_path, dtype):
    path = tmp_path / "a.tif"
    profile = {"driver": "GTiff", "width": 4, "height": 4, "count": 1, "crs": "EPSG:32632"}
    with rasterio.open(
        path, "w", dtype=dtype, transform=rasterio.Affine(1, 0, 5, 0, -1, 5), **profile
    ):
        pass
    with pytest.raises(ValueError, match=f"is complex.*{dtype}.*amplitude"):
        di.open_raster(path)


def test_nodata_of_ordinary_bands_is_not_looked_up_twice(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(2, 4, 5, dtype="float32"), nodata=-3.4e38)
    with rasterio.open(path) as dataset:
        assert nodata_of(dataset, (1, 2), None) == dataset.nodatavals


# --- bands ----------------------------------------------------------------------------------------

NAMES = ("B4", "B8A", "B2", "B3")


def summed(bands):
    """A model of a weighted sum, 1, 10, 100, 1000 by band."""
    net = nn.Conv2d(4, 1, 1, bias=False)
    net.weight.data = torch.tensor([1.0, 10, 100, 1000]).reshape(1, 4, 1, 1)
    return di.load_model(net, output="values", bands=bands)


@pytest.mark.parametrize("wanted", [["B2", "B3", "B4", "B8A"], ["B02", "B03", "B04", "B8A"]])
def test_bands_by_name_get_the_weights_meant_for_them(tmp_path, wanted):
    raw = noise(4, 5, 6) % 10
    path = write_raster(tmp_path / "a.tif", raw, descriptions=NAMES)
    order = [NAMES.index(name.replace("B0", "B")) for name in wanted]
    expected = np.tensordot([1, 10, 100, 1000], raw[order], 1)
    for source in both_ways(path):
        result, _ = inferred(source, summed(wanted))
        assert np.array_equal(result[0], expected)


@pytest.mark.parametrize("unknown", ["B8", "B08", "b2", "B2 ", "nir", "", "B20", True])
def test_a_name_that_is_only_like_a_band_is_refused_with_both_lists(tmp_path, unknown):
    path = write_raster(tmp_path / "a.tif", noise(4, 5, 6), descriptions=NAMES)
    for source in three_ways(path):
        with pytest.raises(ValueError, match="has no band") as refusal:
            source.select(["B2", unknown])
        assert str(["B2", unknown]) in str(refusal.value)
        assert str(list(NAMES)) in str(refusal.value)


def test_a_name_in_other_case_is_hinted_at(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(4, 5, 6), descriptions=NAMES)
    with pytest.raises(ValueError, match="did you mean 'B8A'"):
        di.open_raster(path, bands=["b8a"])


@pytest.mark.parametrize("doubled", [["B2", "B02"], ["B2", 3], [1, 1]])
def test_one_band_by_two_names_is_refused(tmp_path, doubled):
    path = write_raster(tmp_path / "a.tif", noise(4, 5, 6), descriptions=NAMES)
    with pytest.raises(ValueError, match="is asked for twice"):
        di.open_raster(path, bands=doubled)


def test_a_name_that_could_be_two_bands_is_refused(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(2, 5, 6), descriptions=("B02", "B002"))
    assert np.array_equal(di.open_raster(path, bands=["B002"]).values, noise(2, 5, 6)[1:])
    with pytest.raises(ValueError, match="has no band 'B2'"):
        di.open_raster(path, bands=["B2"])


def test_colours_name_bands_that_have_no_other_name(tmp_path):
    raw = noise(3, 5, 6, dtype="uint8")
    path = write_raster(tmp_path / "a.tif", raw)
    with rasterio.open(path, "r+") as dataset:
        dataset.colorinterp = [ColorInterp.blue, ColorInterp.green, ColorInterp.red]
    scene = di.open_raster(path, bands=["red", "blue"])
    assert np.array_equal(scene.values, raw[[2, 0]])
    named = write_raster(tmp_path / "b.tif", raw, descriptions=("red", "x", "y"), photometric="RGB")
    assert np.array_equal(di.open_raster(named, bands=["red"]).values, raw[:1])


def test_gdals_descriptions_of_sentinel_2_are_known_by_their_band(tmp_path):
    names = [f"B{n}, central wavelength {w} nm" for n, w in ((4, 665), ("8A", 865))]
    path = write_raster(tmp_path / "a.tif", noise(2, 5, 6), descriptions=names)
    assert np.array_equal(di.open_raster(path, bands=["B8A", "B4"]).values, noise(2, 5, 6)[::-1])


@pytest.mark.parametrize("wanted", [[4, 3, 1, 2], ["4", "3", "1", "2"], np.array([4, 3, 1, 2])])
def test_a_model_takes_bands_with_names_by_their_numbers(tmp_path, wanted):
    raw = noise(4, 5, 6) % 10
    path = write_raster(tmp_path / "a.tif", raw, descriptions=NAMES)
    expected = np.tensordot([1, 10, 100, 1000], raw[[3, 2, 0, 1]], 1)
    for source in both_ways(path):
        assert np.array_equal(inferred(source, summed(wanted))[0][0], expected)
        assert np.array_equal(di.open_raster(source, bands=list(wanted)), raw[[3, 2, 0, 1]])


def test_numbers_are_those_of_the_file_where_alpha_is_first_or_bands_were_chosen(tmp_path):
    raw = noise(4, 5, 6)
    path = write_raster(tmp_path / "a.tif", raw)
    with rasterio.open(path, "r+") as dataset:
        dataset.colorinterp = [ColorInterp.alpha, *dataset.colorinterp[1:]]
    for source in three_ways(path):
        assert np.array_equal(everything(source.select([3, 2])).data, raw[[2, 1]])
        assert np.array_equal(everything(source.select([4, 2]).select([2])).data, raw[[1]])
        with pytest.raises(ValueError, match="has no band 1"):
            source.select([1])
    lately = di.open_raster(path, bands=[4, 3])
    assert np.array_equal(di.open_raster(lately, bands=[3]), raw[[2]])


@pytest.mark.parametrize("wanted", [["B2", "B3"], [1, 4]])
def test_data_that_passes_for_alpha_is_told_of_with_the_cure(tmp_path, wanted):
    # GDAL takes the last of four bands of bytes for alpha, whatever it holds.
    path = write_raster(tmp_path / "a.tif", noise(4, 5, 6, dtype="uint8"), descriptions=NAMES)
    cure = r"band 4 \(B3\) is marked as alpha.*gdal_edit.py -colorinterp_4 undefined"
    for source in (path, di.open_raster(path)):
        with pytest.raises(ValueError, match=cure):
            di.open_raster(path, bands=wanted)
        with pytest.raises(ValueError, match=cure):
            di.plan(source, summed(None), tmp_path / "o.tif")


@pytest.mark.parametrize("bands", ["B2", [], 3])
def test_bands_that_are_no_list_are_refused(tmp_path, bands):
    path = write_raster(tmp_path / "a.tif", noise(4, 5, 6), descriptions=NAMES)
    with pytest.raises(ValueError, match="bands must be a list"):
        di.open_raster(path, bands=bands)


def test_missing_bands_are_found_before_work_with_both_lists(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(4, 5, 6), descriptions=NAMES)
    model = summed(["B2", "B3", "B4", "B11"])
    for source in (path, di.open_raster(path)):
        with pytest.raises(ValueError, match="no band 'B11'") as refusal:
            di.plan(source, model, tmp_path / "o.tif")
        assert str(["B2", "B3", "B4", "B11"]) in str(refusal.value)
        assert str(list(NAMES)) in str(refusal.value)
    with pytest.raises(ValueError, match="no band 'B11'"):
        di.predict(di.open_raster(path), model)


@pytest.mark.parametrize("nodata", [7, None])
def test_nodata_of_a_band_that_is_not_used_does_not_count(tmp_path, nodata):
    raw = noise(3, 20, 30, dtype="float32") % 50 + 8
    raw[1, 3, 4] = np.nan if nodata is None else nodata
    raw[2, 5, 6] = np.nan if nodata is None else nodata
    path = write_raster(tmp_path / "a.tif", raw, nodata=nodata, descriptions=("a", "b", "c"))
    model = di.load_model(Pixel(), output="values", bands=["c", "a"])
    lazy = di.open_raster(path, chunks=8)
    for source in (path, lazy, di.open_raster(lazy, bands=["a", "c"])):
        result, _ = inferred(source, model, tile=16, chunk=16)
        assert np.argwhere(np.isnan(result[0])).tolist() == [[5, 6]]
        assert np.array_equal(result[1][~np.isnan(result[1])], raw[0][~np.isnan(result[1])])
    predicted = di.predict(lazy, model, tile=16, chunk=16).values
    assert np.array_equal(predicted, result, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 4, 5), (1, 0, 5), (1, 4, 0)])
def test_an_array_without_pixels_is_refused_with_its_shape(shape):
    scene = xr.DataArray(np.zeros(shape, "uint8"), dims=("band", "y", "x"))
    with pytest.raises(ValueError, match="has no pixels") as refusal:
        di.predict(scene, di.load_model(Bias()))
    assert str(shape) in str(refusal.value)


def test_options_of_another_type_are_refused(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(1, 8, 9))
    with pytest.raises(TypeError, match="nodata must be a number, got '3'"):
        di.open_raster(path, nodata="3")
    with pytest.raises(TypeError, match="mask_halo must be True or False, got 'yes'"):
        di.plan(path, di.load_model(Bias()), tmp_path / "o.tif", mask_halo="yes")


def test_a_raster_of_nothing_but_nodata_is_nodata_and_runs_no_tile(tmp_path, one_worker):
    path = write_raster(tmp_path / "a.tif", np.zeros((1, 70, 50), "uint8"), nodata=0)
    report = di.run(path, di.load_model(Bias()), tmp_path / "o.tif", client=one_worker, tile=32)
    assert report.tiles == 0
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert np.unique(dataset.read()).tolist() == [255]
