"""Lists of files: where they lie, which lies on top, what is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import rasterio
from affine import Affine
from rasterio.merge import merge

import daskinfer as di
from conftest import N3, TRANSFORM, Pixel, noise, seeded, write_raster
from daskinfer.cli import main
from daskinfer.inputs.mosaic import Mosaic
from daskinfer.source import ArraySource, source_of
from oracle import whole
from sources import everything, of_rioxarray, valid_of, window

# rasterio.merge multiplies transforms as affine 3 is about to deprecate.
pytestmark = of_rioxarray


def tile(path, data, row, col, **profile):
    """A file whose first pixel is (row, col) of the plain grid."""
    return write_raster(path, data, transform=TRANSFORM @ Affine.translation(col, row), **profile)


def four(folder, **profile):
    """Four files that overlap, leave gaps, and in part are nodata (0)."""
    places = [(0, 0, 30, 40), (20, 30, 35, 45), (5, 60, 20, 30), (60, 0, 17, 23)]
    paths = []
    for number, (row, col, height, width) in enumerate(places):
        data = noise(2, height, width, seed=number) + 1
        data[:, 4:9, 3:12] = 0
        paths.append(tile(folder / f"{number}.tif", data, row, col, nodata=0, **profile))
    return paths


def merged(paths, method="last"):
    """What rasterio makes of the files, and where."""
    return merge(paths, method=method, nodata=0)


def test_a_list_is_a_mosaic_with_the_last_on_top(tmp_path):
    paths = four(tmp_path)
    expected, transform = merged(paths)
    scene = di.open_raster(paths, chunks=16)
    assert scene.shape == expected.shape
    assert np.array_equal(scene.values, expected)
    assert np.array_equal(scene.mask.values, (expected != 0).all(axis=0))
    assert scene.rio.transform() == transform
    assert scene.attrs["_FillValue"] == 0
    assert not np.array_equal(expected, merged(paths, "first")[0])


def test_windows_and_crops_of_a_mosaic_are_those_of_the_whole(tmp_path):
    source = source_of(four(tmp_path))
    whole_one = everything(source)
    for area in (window(0, 0, 1, 1), window(18, 25, 40, 30), window(50, 40, 10, 10)):
        rows, cols = area.slices()
        assert np.array_equal(source.read(area).data, whole_one.data[:, rows, cols])
        cropped = source.crop(area)
        assert np.array_equal(everything(cropped).data, whole_one.data[:, rows, cols])
        assert np.array_equal(valid_of(cropped), whole_one.valid[rows, cols])
        assert cropped.grid.transform == source.grid.window(area).transform
        assert np.array_equal(source.reader(area)(area).data, source.read(area).data)
    with pytest.raises(ValueError, match="outside"):
        source.read(window(0, 0, 1000, 1))


def test_what_is_hidden_is_not_read(tmp_path, monkeypatch):
    below = tile(tmp_path / "below.tif", noise(1, 40, 40), 0, 0)
    above = tile(tmp_path / "above.tif", noise(1, 20, 20, seed=1), 0, 0)
    source = source_of([below, above])
    above = everything(source.parts[1].source)
    monkeypatch.setattr(type(source.parts[0].source), "read", lambda self, area: above)
    monkeypatch.setattr(source.parts[0].source.__class__, "cache_bytes", lambda *_: 0)
    assert np.array_equal(source.read(window(0, 0, 20, 20)).data, above.data)


def test_a_mosaic_is_a_value(tmp_path):
    paths = four(tmp_path)
    source = source_of(paths)
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(everything(copy).data, everything(source).data)
    assert copy.identity == source.identity == source_of(paths).identity
    assert source_of(paths[::-1]).identity != source.identity
    assert not source.changed()
    tile(paths[2], noise(2, 20, 30, seed=9), 5, 60, nodata=0)
    assert source.changed()
    assert source_of(paths).identity != source.identity


def test_bands_are_chosen_in_every_file(tmp_path):
    paths = four(tmp_path)
    both = di.open_raster(paths)
    assert np.array_equal(di.open_raster(paths, bands=[2, 1]).values, both.values[::-1])
    assert np.array_equal(di.open_raster(paths, bands=["2"]).values, both.values[1:])
    assert np.array_equal(everything(source_of(paths).select(["2"])).data, both.values[1:])
    with pytest.raises(ValueError, match="no band 'nir'"):
        di.open_raster(paths, bands=["nir"])


def test_a_file_keeps_its_own_nodata(tmp_path):
    first = np.full((1, 8, 8), 5, np.uint16)
    second = np.full((1, 8, 8), 6, np.uint16)
    first[0, 0, 0] = second[0, 0, 0] = 7
    first[0, 1, 1] = second[0, 1, 1] = 9
    a = tile(tmp_path / "a.tif", first, 0, 0, nodata=7)
    b = tile(tmp_path / "b.tif", second, 0, 8, nodata=9)
    scene = di.open_raster([a, b])
    expected = np.ones((8, 16), bool)
    expected[0, 0] = expected[1, 9] = False
    assert np.array_equal(scene.mask.values, expected)
    assert (scene.values[0, 0, 8], scene.values[0, 1, 1]) == (7, 9)
    assert "_FillValue" not in scene.attrs


def test_gaps_are_nodata_where_files_have_none(tmp_path):
    a = tile(tmp_path / "a.tif", np.zeros((1, 5, 5), np.uint8), 0, 0)
    b = tile(tmp_path / "b.tif", np.zeros((1, 5, 5), np.uint8), 7, 9)
    expected = np.zeros((12, 14), bool)
    expected[:5, :5] = expected[7:, 9:] = True
    for mask in (True, False):
        scene = di.open_raster([a, b], mask=mask)
        assert np.array_equal(scene.mask.values, expected)
    floats = tile(tmp_path / "f.tif", np.ones((1, 3, 3), np.float32), 0, 0)
    far = tile(tmp_path / "g.tif", np.ones((1, 3, 3), np.float32), 5, 0)
    assert np.isnan(di.open_raster([floats, far]).values[0, 3:5]).all()


def test_files_that_are_scaled_differently_come_as_physical_values(tmp_path):
    raw = np.full((1, 4, 4), 500, np.uint16)
    a = tile(tmp_path / "a.tif", raw, 0, 0, nodata=0)
    b = tile(tmp_path / "b.tif", raw, 0, 4, nodata=0)
    with rasterio.open(b, "r+") as dataset:
        dataset.scales, dataset.offsets = (1e-4,), (-0.1,)
    scene = di.open_raster([a, b])
    assert scene.dtype == np.float32
    assert "scale" not in scene.coords
    assert scene.values[0, 0].tolist() == [500] * 4 + [np.float32(-0.05)] * 4


def test_a_hundredth_of_a_pixel_is_the_same_grid(tmp_path):
    a = tile(tmp_path / "a.tif", noise(1, 8, 8), 0, 0)
    near = tile(tmp_path / "near.tif", noise(1, 8, 8, seed=1), 0.009, 8.009)
    assert di.open_raster([a, near]).shape == (1, 8, 16)
    far = tile(tmp_path / "far.tif", noise(1, 8, 8, seed=1), 0, 8.5)
    with pytest.raises(ValueError, match=r"far.tif lies \(row, col\) = \(0, 8.5\) px .*like="):
        di.open_raster([a, far])


def test_files_of_several_kinds_are_refused_by_name(tmp_path):
    a = tile(tmp_path / "a.tif", noise(2, 8, 8), 0, 0)
    cases = {
        "bands": (tile(tmp_path / "b.tif", noise(3, 8, 8), 0, 8), r"bands \['1', '2', '3'\]"),
        "dtype": (tile(tmp_path / "t.tif", noise(2, 8, 8, dtype="int16"), 0, 8), "int16.*gdal"),
        "size": (
            write_raster(tmp_path / "s.tif", noise(2, 8, 8), transform=Affine(20, 0, 0, 0, -20, 0)),
            "pixels of -20 x 20.* of -10 x 10: pass like=",
        ),
        "zone": (
            write_raster(tmp_path / "z.tif", noise(2, 8, 8), crs="EPSG:32633"),
            "z.tif is in EPSG:32633, .*a.tif in EPSG:32632: pass like=",
        ),
    }
    for path, message in cases.values():
        with pytest.raises(ValueError, match=message):
            di.open_raster([a, path])
    with pytest.raises(ValueError, match="empty list"):
        di.open_raster([])
    with pytest.raises(TypeError, match="one of paths"):
        di.open_raster([a, 7])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        di.open_raster([a, str(tmp_path / "nowhere.tif")])
    with pytest.raises(ValueError, match="stack must be"):
        di.open_raster([a], stack="time")


def test_south_up_and_turned_files_lie_side_by_side(tmp_path):
    for turn in (Affine(10, 0, 5e5, 0, 10, 5e6), Affine(10, 2, 5e5, 1, -10, 5e6)):
        left, right = noise(1, 6, 7), noise(1, 6, 5, seed=1)
        a = write_raster(tmp_path / "a.tif", left, transform=turn)
        b = write_raster(tmp_path / "b.tif", right, transform=turn @ Affine.translation(7, 0))
        source = source_of([a, b])
        assert np.array_equal(everything(source).data, np.concatenate([left, right], axis=2))
        assert source.grid.transform == turn


def test_files_that_begin_left_of_and_above_the_first(tmp_path):
    a = tile(tmp_path / "a.tif", noise(1, 4, 4), 0, 0)
    b = tile(tmp_path / "b.tif", noise(1, 4, 4, seed=1), -4, -6)
    source = source_of([a, b])
    assert source.grid.shape == (8, 10)
    assert source.grid.transform == TRANSFORM @ Affine.translation(-6, -4)
    assert np.array_equal(everything(source).data[:, 4:, 6:], noise(1, 4, 4))


def test_files_without_names_of_bands_take_those_of_the_others(tmp_path):
    names = ("red", "nir")
    a = tile(tmp_path / "a.tif", noise(2, 5, 5), 0, 0)
    b = tile(tmp_path / "b.tif", noise(2, 5, 5, seed=1), 0, 5, descriptions=names)
    for order in ((a, b), (b, a)):
        scene = di.open_raster(list(order))
        assert scene.band.values.tolist() == list(names)
        assert np.array_equal(scene.values[:, :, :5], noise(2, 5, 5))
        for bands in (["nir"], [2]):
            assert np.array_equal(di.open_raster(list(order), bands=bands), scene.values[1:])
            assert np.array_equal(di.open_raster(scene, bands=bands), scene.values[1:])
    c = tile(tmp_path / "c.tif", noise(2, 5, 5), 0, 10, descriptions=names[::-1])
    with pytest.raises(ValueError, match=r"bands \['nir', 'red'\]"):
        di.open_raster([b, c])


def test_one_file_per_band(tmp_path):
    bands = noise(3, 9, 11)
    names = ("B8A", "B04", "B11")
    paths = [tile(tmp_path / f"{name}.tif", bands[i : i + 1], 0, 0) for i, name in enumerate(names)]
    scene = di.open_raster(paths, stack="bands")
    assert scene.band.values.tolist() == list(names)
    assert np.array_equal(scene.values, bands)
    by_name = dict(zip(("nir", "red", "swir"), paths, strict=True))
    picked = di.open_raster(by_name, bands=["swir", "nir"])
    assert np.array_equal(picked.values, bands[[2, 0]])
    assert np.array_equal(everything(source_of(by_name).select(["red", 1])).data, bands[[1, 0]])
    with pytest.raises(ValueError, match=r"no band 'B12'.*\['B8A', 'B04', 'B11'\]"):
        di.open_raster(paths, stack="bands", bands=["B12"])
    with pytest.raises(ValueError, match="has 3 bands"):
        di.open_raster([tile(tmp_path / "all.tif", bands, 0, 0)], stack="bands")


def test_a_band_may_be_a_mosaic(tmp_path):
    paths = [tile(tmp_path / f"{i}.tif", noise(1, 5, 5, seed=i), 0, 5 * (i % 2)) for i in range(4)]
    scene = di.open_raster({"red": paths[:2], "nir": paths[2:]})
    rows = [np.concatenate([noise(1, 5, 5, seed=i), noise(1, 5, 5, seed=i + 1)], 2) for i in (0, 2)]
    assert np.array_equal(scene.values, np.concatenate(rows))


def test_nodata_of_one_band_is_nodata_of_the_pixel(tmp_path):
    red, nir = noise(1, 6, 6) + 1, noise(1, 6, 6, seed=1) + 1
    red[0, 2, 3] = nir[0, 4, 5] = 0
    a = tile(tmp_path / "red.tif", red, 0, 0, nodata=0)
    b = tile(tmp_path / "nir.tif", nir, 0, 0, nodata=0)
    expected = np.ones((6, 6), bool)
    expected[2, 3] = expected[4, 5] = False
    assert np.array_equal(di.open_raster([a, b], stack="bands").mask.values, expected)


def test_thinned_pixels_are_about_every_nth(tmp_path):
    columns = np.broadcast_to(np.arange(60), (1, 40, 60)).astype("uint16")
    a = tile(tmp_path / "a.tif", columns, 0, 0)
    b = tile(tmp_path / "b.tif", columns + 60, 0, 60)
    thin = source_of([a, b]).thinned(30)
    assert thin.data.shape == (1, 10, 30)
    assert np.abs(thin.data[0] - np.arange(0, 120, 4)).max() <= 4
    assert thin.valid is None


@pytest.mark.parametrize("net", [Pixel, N3])
def test_a_run_over_a_list_equals_the_whole(tmp_path, one_worker, net):
    paths = four(tmp_path)
    data, transform = merged(paths)
    net = seeded(net)
    valid = (data != 0).all(axis=0)
    expected = np.where(valid, whole(net, data, valid=valid, scale=1e-4), np.nan)
    model = di.load_model(net, output="values", scale=1e-4)
    output = tmp_path / "out.tif"
    options = {"tile": 32, "chunk": 32}
    report = di.run(paths, model, output, client=one_worker, **options)
    assert report.complete
    with rasterio.open(output) as dataset:
        assert dataset.transform == transform
        np.testing.assert_allclose(dataset.read(), expected, atol=1e-5)
    lazy = di.predict(di.open_raster(paths, chunks=24), model, **options)
    np.testing.assert_allclose(lazy.values, expected, atol=1e-5)


def test_an_opened_mosaic_stands_for_its_files(tmp_path):
    paths = four(tmp_path)
    scene = di.open_raster(paths)
    assert isinstance(source_of(scene), Mosaic)
    assert isinstance(source_of(scene.isel(x=slice(0, 10))), ArraySource)
    plan = di.plan(scene, di.load_model(Pixel(), output="values"), tmp_path / "out.tif")
    assert isinstance(plan.source, Mosaic)
    assert "mosaic" in repr(plan)
    assert "4 files, later ones on top" in repr(plan)


def test_the_command_line_takes_several_files(tmp_path, factory, capsys):
    paths = four(tmp_path)
    output = str(tmp_path / "out.tif")
    options = ["--output", "values", "--scale", "1e-4"]
    assert main(["run", *paths, factory, output, *options]) == 0
    assert "4 files, later ones on top" in capsys.readouterr().out
    with rasterio.open(output) as dataset:
        assert dataset.shape == di.open_raster(paths).shape[1:]
    grid = ["--crs", "EPSG:32633", "--resolution", "20", "--resampling", "bilinear"]
    assert main(["plan", *paths, factory, str(tmp_path / "b.tif"), *options, *grid]) == 0
    assert "4 of 4 files to" in capsys.readouterr().out
    assert main(["plan", *paths, factory, paths[0], *options]) == 2
    assert "is the source itself" in capsys.readouterr().err


def vrt_of(path, paths, *, nodata=None, bands=1):
    """A VRT over files of the plain grid, side by side, as gdalbuildvrt makes it."""
    placed = []
    for name in paths:
        with rasterio.open(name) as dataset:
            col, row = ~TRANSFORM @ (dataset.transform.c, dataset.transform.f)
            placed.append((name, round(col), round(row), dataset.width, dataset.height))
    width = max(col + w for _, col, _, w, _ in placed)
    height = max(row + h for _, _, row, _, h in placed)
    tag = "" if nodata is None else f"<NoDataValue>{nodata}</NoDataValue>"
    body = "".join(
        f'<VRTRasterBand dataType="UInt16" band="{n}">{tag}'
        + "".join(
            f'<SimpleSource><SourceFilename relativeToVRT="0">{name}</SourceFilename>'
            f"<SourceBand>{n}</SourceBand>"
            f'<SrcRect xOff="0" yOff="0" xSize="{w}" ySize="{h}"/>'
            f'<DstRect xOff="{col}" yOff="{row}" xSize="{w}" ySize="{h}"/></SimpleSource>'
            for name, col, row, w, h in placed
        )
        + "</VRTRasterBand>"
        for n in range(1, bands + 1)
    )
    geo = ", ".join(map(str, TRANSFORM.to_gdal()))
    path.write_text(
        f'<VRTDataset rasterXSize="{width}" rasterYSize="{height}">'
        f"<SRS>EPSG:32632</SRS><GeoTransform>{geo}</GeoTransform>{body}</VRTDataset>"
    )
    return str(path)


def test_gaps_of_a_vrt_are_nodata(tmp_path, one_worker):
    plain = [
        tile(tmp_path / f"p{i}.tif", np.ones((2, 9, 9), np.uint16), 9 * i, 12 * i) for i in range(3)
    ]
    vrt = vrt_of(tmp_path / "plain.vrt", plain, bands=2)
    expected = np.zeros((27, 33), bool)
    for i in range(3):
        expected[9 * i : 9 * i + 9, 12 * i : 12 * i + 9] = True
    scene = di.open_raster(vrt, chunks=8)
    assert np.array_equal(scene.mask.values, expected)
    assert "mask" not in di.open_raster(vrt, mask=False).coords
    source = source_of(vrt)
    area = window(7, 10, 11, 13)
    assert np.array_equal(valid_of(source.crop(area)), expected[area.slices()])
    assert np.array_equal(source.select([2]).thinned(11).valid, expected[1::3, 1::3])
    model = di.load_model(Pixel(), output="values")
    di.run(vrt, model, tmp_path / "out.tif", client=one_worker)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        assert np.array_equal(~np.isnan(dataset.read(1)), expected)
    # With nodata the file itself tells; without gaps there is nothing to tell.
    told = vrt_of(tmp_path / "told.vrt", plain, nodata=0, bands=2)
    assert np.array_equal(di.open_raster(told).mask.values, expected)
    assert source_of(told).covers is None
    whole_one = vrt_of(tmp_path / "full.vrt", [plain[0]], bands=1)
    assert "mask" not in di.open_raster(whole_one).coords


def test_processes_read_mosaics_on_a_grid_and_within_an_area(tmp_path, two_workers):
    paths = four(tmp_path)
    scene = di.open_raster(paths, crs="EPSG:32633", resolution=12, resampling="bilinear")
    left, bottom, right, top = scene.rio.bounds()
    area = (left + 300, bottom + 200, right - 200, top - 300)
    model = di.load_model(Pixel(), output="values")
    options = {"tile": 16, "chunk": 32, "aoi": area}
    report = di.run(scene, model, tmp_path / "out.tif", client=two_workers, **options)
    assert report.complete
    inside = (scene.x > area[0]) & (scene.x < area[2]) & (scene.y > area[1]) & (scene.y < area[3])
    expected = scene.where(scene.mask & inside).transpose("band", "y", "x").values
    assert not np.isnan(expected).all()
    with rasterio.open(tmp_path / "out.tif") as dataset:
        assert np.array_equal(dataset.read(), expected, equal_nan=True)
