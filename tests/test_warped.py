"""Rasters on a grid that is asked for, against GDAL's own warper."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import rasterio
from affine import Affine
from rasterio.enums import Resampling
from rasterio.vrt import WarpedVRT
from rasterio.warp import reproject, transform, transform_bounds

import daskinfer as di
from conftest import TRANSFORM, Pixel, noise, write_raster
from daskinfer.inputs.warped import RESAMPLINGS, Warped
from daskinfer.source import source_of
from sources import everything, of_rioxarray, valid_of, window

pytestmark = of_rioxarray

KERNELS = ("nearest", "bilinear", "cubic", "cubic_spline", "lanczos", "average", "mode")


def smooth(height, width, dtype="float32", top=4000):
    """A surface without sharp edges, so that a slip of a hundredth of a pixel stays small."""
    rows, cols = np.mgrid[:height, :width]
    values = 0.5 + 0.25 * np.sin(rows / 17) + 0.25 * np.cos(cols / 23)
    return (values * top).astype(dtype)[None]


def by_gdal(path, scene, resampling):
    """What WarpedVRT makes of a file on the grid of a scene."""
    options = {
        "crs": scene.rio.crs,
        "transform": scene.rio.transform(),
        "height": scene.sizes["y"],
        "width": scene.sizes["x"],
        "resampling": Resampling[resampling],
        "add_alpha": True,
    }
    with rasterio.open(path) as dataset, WarpedVRT(dataset, **options) as warped:
        both = warped.read()
        return both[:-1], both[-1] > 0


@pytest.mark.parametrize("resampling", KERNELS)
def test_another_grid_of_the_same_crs_is_what_gdal_makes(tmp_path, resampling):
    path = write_raster(tmp_path / "a.tif", noise(2, 120, 150))
    like = write_raster(
        tmp_path / "like.tif",
        noise(1, 90, 100),
        transform=Affine(13, 0, 500_023, 0, -11, 5_599_987),
    )
    scene = di.open_raster(path, like=like, resampling=resampling, chunks=50)
    expected, mask = by_gdal(path, scene, resampling)
    assert scene.rio.transform() == Affine(13, 0, 500_023, 0, -11, 5_599_987)
    valid = scene.mask.values
    assert np.array_equal(valid, mask)
    difference = np.abs(scene.values[:, valid].astype(int) - expected[:, valid].astype(int))
    assert difference.max() <= 1


@pytest.mark.parametrize("resampling", ["nearest", "bilinear", "cubic"])
def test_another_crs_is_what_gdal_makes(tmp_path, resampling):
    path = write_raster(tmp_path / "a.tif", smooth(300, 320))
    scene = di.open_raster(path, crs="EPSG:32633", resolution=10, resampling=resampling)
    expected, mask = by_gdal(path, scene, resampling)
    valid = scene.mask.values
    # The transform is approximated to an eighth of a pixel: so may the outline be.
    assert np.count_nonzero(valid != mask) <= 4
    both = valid & mask
    assert both.sum() > 80_000
    difference = np.abs(scene.values[:, both] - expected[:, both])
    # Both are off by an eighth of a pixel at most, 7.5 here; the nearest by a whole one, 60.
    assert difference.max() < (60 if resampling == "nearest" else 15)


def test_pixels_do_not_depend_on_the_window(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(2, 700, 650), nodata=0)
    lazy = di.open_raster(path, crs="EPSG:3857", resolution=31, resampling="bilinear", chunks=64)
    source = source_of(lazy)
    all_of_it = everything(source)
    rng = np.random.default_rng(0)
    for _ in range(6):
        row, col = (int(rng.integers(0, side - 20)) for side in source.grid.shape)
        area = window(row, col, *(int(n) for n in rng.integers(1, 20, 2)))
        rows, cols = area.slices()
        part = source.read(area)
        assert np.array_equal(part.data, all_of_it.data[:, rows, cols])
        cut = everything(source.crop(area))
        assert np.array_equal(cut.data, all_of_it.data[:, rows, cols])
        assert np.array_equal(valid_of(source.crop(area)), all_of_it.valid[rows, cols])
    assert np.array_equal(lazy.values, all_of_it.data)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64"])
def test_nodata_does_not_bleed_into_kernels(tmp_path, dtype):
    data = np.full((1, 60, 60), 100, dtype)
    data[0, 20:30, 25:40] = nodata = 0 if dtype == "uint8" else -9999
    path = write_raster(tmp_path / "a.tif", data, nodata=nodata)
    for resampling in ("bilinear", "cubic", "lanczos", "average"):
        scene = di.open_raster(path, resolution=7, resampling=resampling)
        valid = scene.mask.values
        assert 0 < np.count_nonzero(~valid) < 600
        np.testing.assert_allclose(scene.values[0][valid], 100, rtol=1e-6)


def test_a_mask_file_and_every_band_count_as_nodata(tmp_path):
    data = noise(2, 40, 40) + 1
    data[1, 10, 10] = 0
    path = write_raster(tmp_path / "a.tif", data, nodata=0)
    scene = di.open_raster(path, resolution=5)
    expected = np.ones((80, 80), bool)
    expected[20:22, 20:22] = False
    assert np.array_equal(scene.mask.values, expected)
    plain = write_raster(tmp_path / "b.tif", data)
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False), rasterio.open(plain, "r+") as dataset:
        mask = np.full((40, 40), 255, np.uint8)
        mask[10, 10] = 0
        dataset.write_mask(mask)
    assert np.array_equal(di.open_raster(plain, resolution=5).mask.values, expected)


def test_tiles_of_one_grid_leave_no_seam(tmp_path):
    data = noise(1, 200, 300)
    whole_path = write_raster(tmp_path / "whole.tif", data)
    parts = [
        write_raster(
            tmp_path / f"{col}.tif",
            data[:, :, col : col + 100],
            transform=TRANSFORM @ Affine.translation(col, 0),
        )
        for col in (0, 100, 200)
    ]
    options = {"crs": "EPSG:32633", "resolution": 9, "resampling": "cubic"}
    one, many = di.open_raster(whole_path, **options), di.open_raster(parts, **options)
    assert np.array_equal(one.mask.values, many.mask.values)
    assert np.array_equal(one.values, many.values)


def zones(folder):
    """Two files of one surface on both sides of 12 degrees east, in 32632 and 32633."""
    paths = []
    (x,), (y,) = transform("EPSG:4326", "EPSG:32632", [12.0], [48.0])
    for crs, side in (("EPSG:32632", -1), ("EPSG:32633", 1)):
        (east,), (north,) = transform("EPSG:32632", crs, [x], [y])
        left = round(east, -1) - (1000 if side < 0 else 50)
        grid = Affine(10, 0, left, 0, -10, round(north, -1) + 500)
        cols, rows = np.meshgrid(np.arange(105) + 0.5, np.arange(100) + 0.5)
        xs, ys = grid @ (cols.ravel(), rows.ravel())
        lon, lat = transform(crs, "EPSG:4326", xs, ys)
        values = (1000 + 5000 * (np.array(lon) - 12) + 5000 * (np.array(lat) - 48)).reshape(
            100, 105
        )
        paths.append(
            write_raster(
                folder / f"{crs[-5:]}.tif", values[None].astype("float32"), crs=crs, transform=grid
            )
        )
    return paths


def test_two_zones_need_a_grid_and_leave_no_gap_on_it(tmp_path):
    west, east = zones(tmp_path)
    with pytest.raises(ValueError, match=r"32633.tif is in EPSG:32633, .*32632.tif in EPSG:32632"):
        di.open_raster([west, east])
    with pytest.raises(ValueError, match=r"32633, .* in EPSG:32632: pass crs="):
        di.open_raster([west, east], resolution=10)
    for resampling in ("nearest", "bilinear"):
        options = {"crs": "EPSG:32632", "resolution": 10, "resampling": resampling}
        scene = di.open_raster([west, east], **options)
        # Rows in the middle, which both files cover for all of their width.
        middle = scene.isel(y=slice(30, 70))
        valid = middle.mask.values
        inner = valid[:, 3:-10]
        assert inner.all()
        lon, lat = transform(
            "EPSG:32632",
            "EPSG:4326",
            *(axis.ravel() for axis in np.meshgrid(middle.x.values, middle.y.values)),
        )
        expected = 1000 + 5000 * (np.array(lon) - 12) + 5000 * (np.array(lat) - 48)
        error = np.abs(middle.values[0] - expected.reshape(valid.shape))[valid]
        # A pixel is 0.7; half of one where a kernel hangs over the edge of a file.
        assert error.max() < 0.8
        if resampling == "bilinear":
            assert np.percentile(error, 97) < 1e-3
        notes = dict(source_of(scene).notes)
        assert notes["mosaic"] == "2 files, later ones on top"
        assert "1 of 2 files" in notes["warped"]
        assert resampling in notes["warped"]


def test_a_run_over_two_zones_equals_the_opened_array(tmp_path, one_worker):
    west, east = zones(tmp_path)
    scene = di.open_raster([west, east], crs="EPSG:32633", resolution=10, resampling="bilinear")
    model = di.load_model(Pixel(), output="values")
    plan = di.plan(scene, model, tmp_path / "out.tif", tile=32, chunk=48)
    assert "bilinear" in repr(plan)
    assert "EPSG:32633" in repr(plan)
    assert di.run(plan, client=one_worker).complete
    expected = np.where(scene.mask.values, scene.values, np.nan)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        assert dataset.crs == "EPSG:32633"
        assert dataset.transform == scene.rio.transform()
        assert np.array_equal(dataset.read(), expected, equal_nan=True)
    lazy = di.predict(scene, model, tile=32, chunk=48)
    assert np.array_equal(lazy.values, expected, equal_nan=True)


def test_the_later_file_lies_on_top_whatever_its_grid(tmp_path):
    low = write_raster(tmp_path / "a.tif", np.full((1, 20, 20), 1, np.uint8))
    high = write_raster(
        tmp_path / "b.tif",
        np.full((1, 40, 40), 2, np.uint8),
        transform=TRANSFORM @ Affine.scale(0.5),
    )
    again = write_raster(tmp_path / "c.tif", np.full((1, 20, 20), 3, np.uint8))
    for order, top in (((low, high), 2), ((high, low), 1), ((low, high, again), 3)):
        assert (di.open_raster(list(order), resolution=10).values == top).all()


def test_bands_of_three_resolutions_come_onto_the_finest(tmp_path):
    sides = {"fine": (10, 60), "middle": (20, 30), "coarse": (60, 10)}
    paths = {
        name: write_raster(
            tmp_path / f"{name}.tif",
            noise(1, side, side, seed=side),
            transform=Affine(size, 0, 5e5, 0, -size, 5.6e6),
        )
        for name, (size, side) in sides.items()
    }
    scene = di.open_raster(paths)
    assert scene.shape == (3, 60, 60)
    assert scene.rio.transform().a == 10
    for name, (_, side) in sides.items():
        expected = noise(1, side, side, seed=side)[0].repeat(60 // side, 0).repeat(60 // side, 1)
        assert np.array_equal(scene.sel(band=name).values, expected)
    assert dict(source_of(scene).notes)["warped"].startswith("middle, coarse to 60 x 60 px")
    smooth_one = di.open_raster(paths, resampling="bilinear", bands=["coarse"], like=paths["fine"])
    with rasterio.open(paths["coarse"]) as dataset:
        expected = dataset.read(out_shape=(1, 60, 60), resampling=Resampling.bilinear)
    assert np.abs(smooth_one.values.astype(int) - expected).max() <= 1


def test_a_coarser_grid_is_the_same_for_every_window(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(1, 600, 600))
    for resampling in ("bilinear", "average"):
        source = source_of(di.open_raster(path, resolution=45, resampling=resampling))
        area = window(3, 5, 20, 30)
        rows, cols = area.slices()
        assert np.array_equal(source.read(area).data, everything(source).data[:, rows, cols])
    with rasterio.open(path) as dataset:
        expected = dataset.read(out_shape=(1, 100, 100), resampling=Resampling.average)
    averaged = di.open_raster(path, resolution=60, resampling="average")
    assert averaged.shape == (1, 100, 100)
    assert np.abs(averaged.values.astype(int) - expected).max() <= 1


def test_every_resampling_has_a_kernel(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(1, 30, 30), nodata=0)
    for name in RESAMPLINGS:
        scene = di.open_raster(path, resolution=15, resampling=Resampling[name])
        assert scene.mask.values.any()


def test_grids_that_cannot_be_are_refused(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(1, 30, 30))
    bare = write_raster(tmp_path / "b.tif", noise(1, 30, 30), crs=None, transform=None)
    cases = [
        ({"crs": "EPSG:1"}, "not a coordinate reference system"),
        ({"resolution": 0}, "positive number"),
        ({"resolution": (1, 2, 3)}, "positive number"),
        ({"resolution": 10, "resampling": "best"}, "resampling must be one of nearest"),
        ({"like": path, "crs": "EPSG:32633"}, "leave crs= and resolution= out"),
        ({"like": bare}, "no transform"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            di.open_raster(path, **options)
    with pytest.raises(ValueError, match=r"b.tif has no"):
        di.open_raster(bare, resolution=10, crs="EPSG:32633")
    far = write_raster(tmp_path / "far.tif", noise(1, 5, 5), transform=Affine(10, 0, 0, 0, -10, 0))
    with pytest.raises(ValueError, match="none of the sources lies on the target grid"):
        di.open_raster(path, like=far)
    with pytest.raises(ValueError, match="on its grid and scaled already"):
        di.open_raster(di.open_raster(path), resolution=20)


def test_like_takes_an_array_and_a_grid(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(1, 30, 30))
    target = write_raster(
        tmp_path / "b.tif", noise(1, 8, 9), transform=Affine(25, 0, 500_010, 0, -25, 5_599_990)
    )
    array = di.open_raster(target)
    for like in (target, array, source_of(target).grid):
        scene = di.open_raster(path, like=like)
        assert scene.shape == (1, 8, 9)
        assert scene.rio.transform() == array.rio.transform()


def test_a_grid_of_another_crs_holds_all_of_the_source(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(1, 200, 200))
    scene = di.open_raster(path, crs="EPSG:4326")
    left, bottom, right, top = transform_bounds(
        "EPSG:32632", "EPSG:4326", 500_000, 5_598_000, 502_000, 5_600_000, densify_pts=21
    )
    grid = scene.rio.bounds()
    assert grid[0] <= left
    assert grid[1] <= bottom
    assert grid[2] >= right
    assert grid[3] >= top
    assert 0.9 < scene.mask.values.mean() <= 1


def test_a_warped_source_is_a_value(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(2, 50, 60))
    source = source_of(di.open_raster(path, crs="EPSG:32633", resolution=10))
    copy = pickle.loads(pickle.dumps(source))
    assert copy.identity == source.identity
    assert np.array_equal(everything(copy).data, everything(source).data)
    assert np.array_equal(everything(source.select([2])).data[0], everything(source).data[1])
    other = source_of(di.open_raster(path, crs="EPSG:32633", resolution=10, resampling="cubic"))
    assert other.identity != source.identity


def test_integers_of_64_bits_come_through(tmp_path):
    for dtype in ("int64", "uint64", "int8", "uint32"):
        data = noise(1, 20, 20, dtype=dtype) % 100
        path = write_raster(tmp_path / f"{dtype}.tif", data)
        scene = di.open_raster(path, resolution=5)
        assert scene.dtype == dtype
        assert np.array_equal(scene.values, data.repeat(2, 1).repeat(2, 2))


def test_thinned_pixels_of_a_warped_source_lie_where_they_should(tmp_path):
    path = write_raster(tmp_path / "a.tif", smooth(400, 400))
    source = source_of(di.open_raster(path, crs="EPSG:32633", resolution=10))
    full, thin = everything(source), source.thinned(50)
    step = -(-max(source.grid.shape) // 50)
    both = thin.valid & full.valid[::step, ::step]
    assert both.mean() > 0.8
    assert np.abs(thin.data[0] - full.data[0, ::step, ::step])[both].max() < 900
    assert isinstance(source.sources[0], Warped)


def test_reproject_is_not_thrown_by_many_threads(tmp_path):
    path = write_raster(tmp_path / "a.tif", noise(1, 600, 600))
    scene = di.open_raster(path, crs="EPSG:32633", resolution=10, chunks=100)
    serial = scene.compute(scheduler="synchronous").values
    threaded = scene.compute(scheduler="threads", num_workers=8).values
    assert np.array_equal(serial, threaded)
    target = np.zeros(serial.shape, serial.dtype)
    with rasterio.open(path) as dataset:
        reproject(
            rasterio.band(dataset, [1]),
            target,
            dst_transform=scene.rio.transform(),
            dst_crs="EPSG:32633",
        )
    assert (target == serial).mean() > 0.99
