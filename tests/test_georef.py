"""Where an output lies: every way in which a raster is tied to the ground, carried or refused."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import rioxarray  # noqa: F401  registers the .rio accessor
import tifffile
import xarray as xr
from affine import Affine
from rasterio.control import GroundControlPoint
from rasterio.errors import NotGeoreferencedWarning
from rasterio.transform import GCPTransformer, RPCTransformer
from rasterio.warp import transform_bounds
from torch import nn

import daskinfer as di
from conftest import TRANSFORM, Pixel, noise, ramp, write_raster
from daskinfer.cli import main
from daskinfer.grid import grid_of
from daskinfer.raster import describe
from daskinfer.source import source_of

MODEL = di.load_model(Pixel(), output="values")
LAEA = (
    'PROJCS["somewhere",GEOGCS["WGS 84",DATUM["WGS_1984",SPHEROID["WGS 84",6378137,298.257223563]],'
    'PRIMEM["Greenwich",0],UNIT["degree",0.0174532925199433]],'
    'PROJECTION["Lambert_Azimuthal_Equal_Area"],PARAMETER["latitude_of_center",12.5],'
    'PARAMETER["longitude_of_center",-7.25],PARAMETER["false_easting",100],'
    'PARAMETER["false_northing",0],UNIT["metre",1]]'
)


class Coarser(nn.Module):
    """One output pixel for 2 x 2."""

    def forward(self, x):
        return nn.functional.avg_pool2d(x, 2)


class Finer(nn.Module):
    """2 x 2 output pixels for each."""

    def forward(self, x):
        return nn.functional.interpolate(x, scale_factor=2)


def written(source, path, client, model=MODEL, **options):
    """The output of a run, opened by rasterio."""
    di.run(source, model, path, client=client, **options)
    return rasterio.open(path)


# --- affine ---------------------------------------------------------------------------------------

TRANSFORMS = {
    "north-up": TRANSFORM,
    "south-up": Affine(10, 0, 500_000, 0, 10, 5_600_000),
    "east to west": Affine(-10, 0, 500_000, 0, -10, 5_600_000),
    "rectangular": Affine(10, 0, 500_000, 0, -20, 5_600_000),
    "periodic": Affine(0.7 / 3600, 0, 10.1, 0, -0.7 / 3600, 50.3),
    "rotated": Affine(10, 2, 500_000, 3, -10, 5_600_000),
    "quarter turn": Affine(0, 10, 500_000, 10, 0, 5_600_000),
}


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (50, 1), (20, 30)])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_outputs_transform_is_the_sources_to_the_last_digit(tmp_path, one_worker, name, shape):
    path = write_raster(tmp_path / "a.tif", ramp(*shape), transform=TRANSFORMS[name], crs=LAEA)
    with rasterio.open(path) as dataset:
        crs = dataset.crs
    with written(path, tmp_path / "o.tif", one_worker) as dataset:
        assert dataset.transform == TRANSFORMS[name]
        assert dataset.crs.to_wkt() == crs.to_wkt()
        assert np.array_equal(dataset.read(), ramp(*shape))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_window_begins_at_its_first_pixel_in_every_orientation(tmp_path, one_worker, name):
    path = write_raster(tmp_path / "a.tif", ramp(90, 80), transform=TRANSFORMS[name])
    expected = TRANSFORMS[name] @ Affine.translation(20, 50)
    with written(path, tmp_path / "o.tif", one_worker, window=(50, 20, 30, 40)) as dataset:
        assert np.allclose(dataset.transform, expected, rtol=0, atol=1e-9)
        assert np.array_equal(dataset.read(), ramp(90, 80)[:, 50:80, 20:60])
    part = di.predict(di.open_raster(path)[:, 50:80, 20:60], MODEL)
    assert np.allclose(grid_of(part).transform, expected, rtol=0, atol=1e-9)


def test_a_window_of_50_rows_from_50_and_50_columns_from_20(tmp_path, one_worker):
    path = write_raster(tmp_path / "a.tif", ramp(120, 100))
    with written(path, tmp_path / "o.tif", one_worker, window=(50, 20, 50, 50)) as dataset:
        assert dataset.transform == Affine(10, 0, 500_200, 0, -10, 5_599_500)
        assert dataset.shape == (50, 50)


@pytest.mark.parametrize(("net", "size"), [(Finer(), 5), (Coarser(), 20)])
def test_other_resolutions_keep_the_bounds(tmp_path, one_worker, net, size):
    path = write_raster(tmp_path / "a.tif", noise(1, 20, 30))
    model = di.load_model(net, output="values")
    with rasterio.open(path) as source, written(path, tmp_path / "o.tif", one_worker, model) as out:
        assert out.bounds == source.bounds
        assert out.transform == Affine(size, 0, 500_000, 0, -size, 5_600_000)
        assert out.shape == (200 // size, 300 // size)


def test_pixels_that_are_points_stay_points_where_they_are(tmp_path, one_worker):
    path = str(tmp_path / "a.tif")
    with rasterio.open(
        path, "w", driver="GTiff", width=9, height=8, count=1, dtype="uint8", crs="EPSG:32632",
        transform=TRANSFORM,
    ) as dataset:  # fmt: skip
        dataset.update_tags(AREA_OR_POINT="Point")
        dataset.write(noise(1, 8, 9, dtype="uint8"))
    assert grid_of(di.open_raster(path)) == describe(path).grid
    with written(path, tmp_path / "o.tif", one_worker) as dataset:
        assert dataset.transform == TRANSFORM
        assert dataset.tags()["AREA_OR_POINT"] == "Point"
    di.write_cog(di.predict(di.open_raster(path), MODEL), tmp_path / "p.tif")
    for name in ("a.tif", "o.tif", "p.tif"):
        with tifffile.TiffFile(tmp_path / name) as file:
            tags = file.pages[0].geotiff_tags
        # The tie point is the first pixel's centre.
        assert tags["GTRasterTypeGeoKey"] == 2
        assert tags["ModelTiepoint"] == [0, 0, 0, 500_005, 5_599_995, 0]


def test_a_raster_that_lies_nowhere_gets_no_place(tmp_path, one_worker):
    with pytest.warns(NotGeoreferencedWarning):
        path = write_raster(tmp_path / "a.tif", ramp(8, 9), transform=None, crs=None)
    with pytest.warns(NotGeoreferencedWarning):
        dataset = written(path, tmp_path / "o.tif", one_worker)
    with dataset:
        assert (dataset.crs, dataset.gcps[0], dataset.transform.is_identity) == (None, [], True)


@pytest.mark.parametrize("code", [4326, 3857, 32732, 5514, 2056, 3031])
def test_a_crs_with_a_code_keeps_it(tmp_path, one_worker, code):
    path = write_raster(tmp_path / "a.tif", ramp(4, 5), crs=f"EPSG:{code}")
    with rasterio.open(path) as source, written(path, tmp_path / "o.tif", one_worker) as dataset:
        assert dataset.crs == source.crs
        assert dataset.crs.to_wkt() == source.crs.to_wkt()


@pytest.mark.parametrize("code", [7415, 9518, 6349])
def test_a_crs_with_heights_keeps_them(tmp_path, one_worker, code):
    path = write_raster(tmp_path / "a.tif", ramp(4, 5), crs=f"EPSG:{code}")
    assert grid_of(di.open_raster(path)) == describe(path).grid
    di.write_cog(di.predict(di.open_raster(path), MODEL), tmp_path / "p.tif")
    with rasterio.open(path) as source, written(path, tmp_path / "o.tif", one_worker) as dataset:
        assert dataset.crs.to_wkt() == source.crs.to_wkt()
    with rasterio.open(path) as source, rasterio.open(tmp_path / "p.tif") as dataset:
        assert dataset.crs.to_wkt() == source.crs.to_wkt()


def test_a_crs_of_ones_own_survives_arithmetic_and_the_output(tmp_path):
    path = write_raster(tmp_path / "a.tif", ramp(4, 5), crs=LAEA)
    scene = di.open_raster(path)
    changed = xr.where(scene > 5, scene, 0) * 2
    di.write_cog(di.predict(changed, MODEL), tmp_path / "o.tif")
    with rasterio.open(path) as source, rasterio.open(tmp_path / "o.tif") as dataset:
        assert dataset.crs.to_wkt() == source.crs.to_wkt()
        assert dataset.transform == source.transform


# --- ground control points ------------------------------------------------------------------------

POINTS = ((0, 0, 10, 50, 0), (0, 30, 11, 50, 120), (20, 0, 10, 49, 0), (20, 30, 11.1, 49, 0))


def with_points(path, crs="EPSG:4326"):
    points = [GroundControlPoint(*point) for point in POINTS]
    return write_raster(path, ramp(20, 30), transform=None, gcps=points, crs=crs)


def points_of(dataset):
    return tuple((p.row, p.col, p.x, p.y, p.z) for p in dataset.gcps[0])


@pytest.mark.parametrize("crs", ["EPSG:4326", "EPSG:32632", LAEA])
def test_four_points_come_out_as_four_points_in_their_crs(tmp_path, one_worker, crs):
    path = with_points(tmp_path / "a.tif", crs)
    with rasterio.open(path) as source, written(path, tmp_path / "o.tif", one_worker) as dataset:
        assert points_of(dataset) == POINTS
        assert dataset.gcps[1] == source.gcps[1]
        assert dataset.transform.is_identity
    di.write_cog(di.predict(di.open_raster(path), MODEL), tmp_path / "p.tif")
    with rasterio.open(tmp_path / "p.tif") as dataset:
        assert points_of(dataset) == POINTS


def test_points_in_no_crs_are_refused_with_the_cure(tmp_path):
    with pytest.warns(NotGeoreferencedWarning):
        path = write_raster(tmp_path / "a.tif", ramp(20, 30), transform=None, crs=None)
    points = [GroundControlPoint(*point) for point in POINTS]
    with pytest.warns(NotGeoreferencedWarning), rasterio.open(path, "r+") as dataset:
        dataset.gcps = (points, rasterio.CRS())
    with pytest.raises(ValueError, match=r"4 ground control points in no CRS.*-a_srs"):
        di.open_raster(path)


def test_points_of_a_window_tie_its_pixels_to_the_same_ground(tmp_path, one_worker):
    path = with_points(tmp_path / "a.tif")
    moved = tuple((row - 4, col - 7, x, y, z) for row, col, x, y, z in POINTS)
    with written(path, tmp_path / "o.tif", one_worker, window=(4, 7, 10, 20)) as dataset:
        assert points_of(dataset) == moved
        assert np.array_equal(dataset.read(), ramp(20, 30)[:, 4:14, 7:27])
        with rasterio.open(path) as source, GCPTransformer(source.gcps[0]) as before:
            expected = before.xy([4, 10], [7, 20])
        with GCPTransformer(dataset.gcps[0]) as after:
            assert np.allclose(after.xy([0, 6], [0, 13]), expected)


@pytest.mark.parametrize(("net", "factor"), [(Finer(), 2), (Coarser(), 0.5)])
def test_points_of_another_resolution_are_scaled(tmp_path, one_worker, net, factor):
    path = with_points(tmp_path / "a.tif")
    model = di.load_model(net, output="values")
    scaled = tuple((row * factor, col * factor, x, y, z) for row, col, x, y, z in POINTS)
    with written(path, tmp_path / "o.tif", one_worker, model) as dataset:
        assert points_of(dataset) == scaled


def test_of_a_transform_and_points_the_transform_is_kept_and_said_so(tmp_path, one_worker):
    file = write_raster(tmp_path / "a.tif", ramp(20, 30))
    points = "".join(
        f'<GCP Id="{n}" Line="{row}" Pixel="{col}" X="{x}" Y="{y}"/>'
        for n, (row, col, x, y, _) in enumerate(POINTS)
    )
    geo = ", ".join(map(str, TRANSFORM.to_gdal()))
    (tmp_path / "a.vrt").write_text(
        f'<VRTDataset rasterXSize="30" rasterYSize="20"><SRS>EPSG:32632</SRS>'
        f"<GeoTransform>{geo}</GeoTransform>"
        f'<GCPList Projection="EPSG:4326">{points}</GCPList><VRTRasterBand dataType="Float32" '
        f'band="1"><SimpleSource><SourceFilename>{file}</SourceFilename><SourceBand>1</SourceBand>'
        "</SimpleSource></VRTRasterBand></VRTDataset>"
    )
    path = str(tmp_path / "a.vrt")
    with pytest.warns(UserWarning, match="4 ground control points.*the transform is kept"):
        raster = describe(path)
    assert (raster.grid.transform, raster.grid.gcps) == (TRANSFORM, ())


# --- RPCs -----------------------------------------------------------------------------------------


def rpc_tags():
    """A camera straight above 50 N 10 E, some 30 px to the degree."""
    linear = {"LINE_NUM": 2, "SAMP_NUM": 1}  # terms 1, longitude, latitude, height, ...
    tags = {
        "LINE_OFF": "9.5", "SAMP_OFF": "14.25", "LAT_OFF": "50", "LONG_OFF": "10",
        "HEIGHT_OFF": "100", "LINE_SCALE": "10", "SAMP_SCALE": "15", "LAT_SCALE": "0.25",
        "LONG_SCALE": "0.5", "HEIGHT_SCALE": "500", "ERR_BIAS": "-1", "ERR_RAND": "-1",
    }  # fmt: skip
    for name in ("LINE_NUM", "LINE_DEN", "SAMP_NUM", "SAMP_DEN"):
        terms = np.zeros(20)
        terms[linear.get(name, 0)] = 1 if name != "LINE_NUM" else -1
        terms[3] += 1e-3
        tags[f"{name}_COEFF"] = " ".join(str(float(term)) for term in terms)
    return tags


@pytest.fixture
def with_rpcs(tmp_path):
    path = str(tmp_path / "rpcs.tif")
    with pytest.warns(NotGeoreferencedWarning):
        write_raster(path, ramp(20, 30), transform=None, crs=None)
    with pytest.warns(NotGeoreferencedWarning), rasterio.open(path, "r+") as dataset:
        dataset.update_tags(ns="RPC", **rpc_tags())
    return path


GROUND = ([9.6, 10.1, 10.3], [49.9, 50.2, 50.05], [100, 0, 250])


def pixels_of(dataset):
    """Where three places on the ground are, in pixels from the corner of the first."""
    with RPCTransformer(dataset.rpcs) as transformer:
        return np.array(transformer.rowcol(*GROUND, op=lambda n: n))


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
def test_rpcs_come_out_as_they_went_in(with_rpcs, tmp_path, one_worker):
    with rasterio.open(with_rpcs) as source:
        expected = source.tags(ns="RPC")
    with written(with_rpcs, tmp_path / "o.tif", one_worker) as dataset:
        assert dataset.tags(ns="RPC") == expected
        assert dataset.transform.is_identity
    di.write_cog(di.predict(di.open_raster(with_rpcs), MODEL), tmp_path / "p.tif")
    with rasterio.open(tmp_path / "p.tif") as dataset:
        assert dataset.tags(ns="RPC") == expected


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
def test_rpcs_of_a_window_tie_its_pixels_to_the_same_ground(with_rpcs, tmp_path, one_worker):
    with rasterio.open(with_rpcs) as source:
        before = pixels_of(source)
    with written(with_rpcs, tmp_path / "o.tif", one_worker, window=(4, 7, 10, 20)) as dataset:
        assert np.allclose(pixels_of(dataset), before - [[4], [7]])
        told = dataset.tags(ns="RPC")
        assert (told["LINE_OFF"], told["SAMP_OFF"]) == ("5.5", "7.25")
    part = grid_of(di.predict(di.open_raster(with_rpcs)[:, 4:14, 7:27], MODEL))
    assert (dict(part.rpcs)["LINE_OFF"], dict(part.rpcs)["SAMP_OFF"]) == ("5.5", "7.25")


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
@pytest.mark.parametrize(("net", "factor"), [(Finer(), 2), (Coarser(), 0.5)])
def test_rpcs_of_another_resolution_are_scaled(with_rpcs, tmp_path, one_worker, net, factor):
    with rasterio.open(with_rpcs) as source:
        before = pixels_of(source)
    model = di.load_model(net, output="values")
    with written(with_rpcs, tmp_path / "o.tif", one_worker, model) as dataset:
        assert np.allclose(pixels_of(dataset), before * factor)


# --- geolocation arrays ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
def test_geolocation_arrays_are_refused_with_the_cure(tmp_path):
    path = write_raster(tmp_path / "a.tif", ramp(20, 30), transform=None, crs=None)
    arrays = {
        "X_DATASET": "lon.tif", "X_BAND": "1", "Y_DATASET": "lat.tif", "Y_BAND": "1",
        "PIXEL_OFFSET": "0", "LINE_OFFSET": "0", "PIXEL_STEP": "1", "LINE_STEP": "1",
    }  # fmt: skip
    with rasterio.open(path, "r+") as dataset:
        dataset.update_tags(ns="GEOLOCATION", **arrays)
    for open_it in (di.open_raster, lambda path: di.plan(path, MODEL, tmp_path / "o.tif")):
        with pytest.raises(ValueError, match=r"geolocation arrays \(lon.tif\).*gdalwarp -geoloc"):
            open_it(path)
    placed = write_raster(tmp_path / "b.tif", ramp(20, 30))
    with rasterio.open(placed, "r+") as dataset:
        dataset.update_tags(ns="GEOLOCATION", **arrays)
    assert describe(placed).grid.transform == TRANSFORM


def test_a_container_of_rasters_names_them(tmp_path):
    path = tmp_path / "a.gpkg"
    profile = {"driver": "GPKG", "width": 20, "height": 30, "count": 1, "dtype": "uint8"}
    for name in ("one", "two"):
        with rasterio.open(
            path, "w", crs="EPSG:32632", transform=TRANSFORM, RASTER_TABLE=name,
            APPEND_SUBDATASET="YES" if name == "two" else "NO", **profile,
        ) as dataset:  # fmt: skip
            dataset.write(noise(1, 30, 20, dtype="uint8"))
    with pytest.raises(ValueError, match=r"no bands of its own, but rasters inside(.|\n)*:two"):
        di.open_raster(path)


# --- bounds ---------------------------------------------------------------------------------------


def touched(dataset, bounds):
    """Pixels of a raster that a rectangle overlaps, by their own corners."""
    left, bottom, right, top = bounds
    hit = np.zeros(dataset.shape, bool)
    for row, col in np.ndindex(*dataset.shape):
        corners = (dataset.transform @ (col + i, row + j) for i in (0, 1) for j in (0, 1))
        xs, ys = zip(*corners, strict=True)
        hit[row, col] = min(xs) < right and max(xs) > left and min(ys) < top and max(ys) > bottom
    rows, cols = np.flatnonzero(hit.any(axis=1)), np.flatnonzero(hit.any(axis=0))
    return int(rows[0]), int(cols[0]), len(rows), len(cols)


@pytest.mark.parametrize("name", ["north-up", "south-up", "east to west", "rectangular"])
@pytest.mark.parametrize(
    "rectangle",
    [(2, 3, 5, 6), (2.5, 3.5, 2.6, 3.6), (-9, -9, 4, 5), (10, 10, 99, 99), (-1, -1, 99, 99)],
)
def test_bounds_take_all_pixels_that_they_touch(tmp_path, name, rectangle):
    transform = TRANSFORMS[name]
    path = write_raster(tmp_path / "a.tif", ramp(15, 20), transform=transform)
    xs, ys = zip(*(transform @ (rectangle[i], rectangle[i + 1]) for i in (0, 2)), strict=True)
    bounds = (min(xs), min(ys), max(xs), max(ys))
    with rasterio.open(path) as dataset:
        row, col, height, width = touched(dataset, bounds)
    expected = ramp(15, 20)[:, row : row + height, col : col + width]
    scene = di.open_raster(path, bounds=bounds)
    assert np.array_equal(scene.values, expected)
    assert grid_of(scene).transform == transform @ Affine.translation(col, row)
    for source in (path, di.open_raster(path), di.open_raster(path).compute()):
        part = source_of(source, bounds=bounds)
        assert part.grid.shape == (height, width)
        assert np.allclose(part.grid.transform, grid_of(scene).transform, rtol=0, atol=1e-9)
    assert np.array_equal(di.open_raster(di.open_raster(path), bounds=bounds).values, expected)


def test_bounds_of_a_rotated_raster_hold_all_that_they_touch(tmp_path):
    transform = TRANSFORMS["rotated"]
    path = write_raster(tmp_path / "a.tif", ramp(40, 50), transform=transform)
    x, y = transform @ (25, 20)
    part = di.open_raster(path, bounds=(x - 30, y - 30, x + 30, y + 30))
    grid = grid_of(part)
    inside = [~grid.transform @ (x + dx, y + dy) for dx in (-30, 30) for dy in (-30, 30)]
    assert all(0 <= col <= grid.width and 0 <= row <= grid.height for col, row in inside)
    assert grid.height < 20
    assert grid.width < 20


def test_bounds_in_another_crs(tmp_path, one_worker):
    path = write_raster(tmp_path / "a.tif", ramp(100, 120))
    wanted = (500_200, 5_599_300, 500_700, 5_599_800)
    degrees = transform_bounds("EPSG:32632", "EPSG:4326", *wanted)
    plan = di.plan(
        path, MODEL, tmp_path / "o.tif", bounds=degrees, bounds_crs="EPSG:4326", chunk=64
    )
    left, bottom, right, top = plan.source.grid.bounds
    assert left <= wanted[0] < left + 20
    assert right - 20 < wanted[2] <= right
    assert bottom <= wanted[1] < bottom + 20
    assert top - 20 < wanted[3] <= top
    di.run(plan, client=one_worker)
    with rasterio.open(path) as source, rasterio.open(tmp_path / "o.tif") as dataset:
        window = source.window(*dataset.bounds)
        assert np.array_equal(dataset.read(), source.read(window=window))


def test_bounds_beside_the_raster_are_refused_with_both(tmp_path):
    path = write_raster(tmp_path / "a.tif", ramp(20, 30))
    for bounds in ((0, 0, 10, 10), (500_300, 5_599_800, 500_400, 5_600_000)):
        with pytest.raises(ValueError, match="do not meet the raster") as refusal:
            di.open_raster(path, bounds=bounds)
        assert str(tuple(map(float, bounds))) in str(refusal.value)
        assert "(500000.0, 5599800.0, 500300.0, 5600000.0)" in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bounds": (0, 0, 1)}, "must be"), ({"bounds": "0,0,1,1"}, "must be"),
     ({"bounds": (5, 0, 1, 1)}, "left < right"), ({"bounds": (0, 5, 1, 1)}, "bottom < top"),
     ({"bounds": (0, 0, 1, np.nan)}, "must be"), ({"bounds_crs": "EPSG:4326"}, "pass those too"),
     ({"bounds": (0, 0, 1, 1), "window": (0, 0, 1, 1)}, "not both")],
)  # fmt: skip
def test_bounds_that_make_no_sense_are_refused(tmp_path, options, message):
    path = write_raster(tmp_path / "a.tif", ramp(20, 30))
    for open_it in (
        di.open_raster,
        lambda path, **o: di.plan(path, MODEL, tmp_path / "o.tif", **o),
    ):
        with pytest.raises(ValueError, match=message):
            open_it(path, **options)


def test_bounds_of_a_raster_without_a_transform_are_refused(tmp_path):
    with pytest.raises(ValueError, match="pass window="):
        di.open_raster(with_points(tmp_path / "a.tif"), bounds=(0, 0, 1, 1))


def test_the_command_line_takes_bounds_and_masks_the_halo(tmp_path, factory, capsys):
    raw = noise(2, 90, 80, dtype="float32")
    raw[0, 40, 30] = np.nan
    path = write_raster(tmp_path / "a.tif", raw)
    output = str(tmp_path / "o.tif")
    job = ["run", path, factory, output, "--bounds=500100,5599300,500700,5599900", "--mask-halo"]
    assert main(job) == 0
    assert "nodata masked as far as it is seen" in capsys.readouterr().out
    with rasterio.open(output) as dataset:
        assert dataset.bounds == (500_100, 5_599_300, 500_700, 5_599_900)
        # A convolution of 3 x 3 sees one pixel around.
        assert np.argwhere(dataset.read(1) == 255).tolist() == [
            [row, col] for row in (29, 30, 31) for col in (19, 20, 21)
        ]
    assert main(["plan", path, factory, output, "--bounds=0,0,1,1", "--overwrite"]) == 2
    assert "do not meet the raster" in capsys.readouterr().err
