"""Where a raster lies: transforms, CRS and ground control points travel unchanged with an array."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import rioxarray
import xarray as xr
from affine import Affine
from hypothesis import given
from hypothesis import strategies as st
from rasterio.control import GroundControlPoint
from rasterio.errors import NotGeoreferencedWarning

import daskinfer as di
from conftest import TRANSFORM, Pixel, noise, ramp, write_raster
from daskinfer.grid import Grid, grid_of
from daskinfer.raster import describe
from daskinfer.tiling import Span, Window

LAEA = (
    'PROJCS["somewhere",GEOGCS["WGS 84",DATUM["WGS_1984",SPHEROID["WGS 84",6378137,298.257223563]],'
    'PRIMEM["Greenwich",0],UNIT["degree",0.0174532925199433]],'
    'PROJECTION["Lambert_Azimuthal_Equal_Area"],PARAMETER["latitude_of_center",12.5],'
    'PARAMETER["longitude_of_center",-7.25],PARAMETER["false_easting",100],'
    'PARAMETER["false_northing",0],UNIT["metre",1]]'
)
TRANSFORMS = {
    "north-up": TRANSFORM,
    "south-up": Affine(10, 0, 500_000, 0, 10, 5_600_000),
    "rectangular pixels": Affine(10, 0, 500_000, 0, -20, 5_600_000),
    "periodic fraction": Affine(0.7 / 3600, 0, 10.1, 0, -0.7 / 3600, 50.3),
    "rotated": Affine(10, 2, 500_000, 3, -10, 5_600_000),
}
SHAPES = [(1, 1), (1, 50), (50, 1), (20, 30)]
# rioxarray multiplies transforms with the operator that affine 3 is about to deprecate.
of_rioxarray = pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning")
# Corners of a raster of 20 x 30 px, one with a height.
POINTS = ((0, 0, 10, 50, 0), (0, 30, 11, 50, 120), (20, 0, 10, 49, 0), (20, 30, 11, 49, 0))


def rpc_tags():
    names = "HEIGHT LAT LONG LINE SAMP"
    numbers = {f"{name}_{part}": "1" for name in names.split() for part in ("OFF", "SCALE")}
    terms = ("LINE_NUM", "LINE_DEN", "SAMP_NUM", "SAMP_DEN")
    return numbers | {f"{term}_COEFF": " ".join(["1"] * 20) for term in terms}


@pytest.fixture
def with_gcps(tmp_path):
    points = [GroundControlPoint(*point) for point in POINTS]
    return write_raster(
        tmp_path / "gcps.tif", noise(1, 20, 30), transform=None, gcps=points, crs="EPSG:4326"
    )


@pytest.fixture
def with_rpcs(tmp_path):
    path = str(tmp_path / "rpcs.tif")
    with pytest.warns(NotGeoreferencedWarning):
        write_raster(path, noise(1, 20, 30), transform=None, crs=None)
    with (
        pytest.warns(NotGeoreferencedWarning),
        rasterio.open(path, "r+") as dataset,
    ):
        dataset.update_tags(ns="RPC", **rpc_tags())
    return path


# --- files and arrays say the same ----------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_transform_is_the_files_to_the_last_digit(tmp_path, name, shape):
    path = write_raster(tmp_path / "a.tif", ramp(*shape), transform=TRANSFORMS[name])
    grid = describe(path).grid
    assert tuple(grid.transform) == tuple(TRANSFORMS[name])
    assert grid.shape == shape
    assert grid_of(di.open_raster(path)) == grid
    assert tuple(grid_of(di.open_raster(path)).transform) == tuple(TRANSFORMS[name])


@of_rioxarray
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_array_of_rioxarray_has_the_files_grid(tmp_path, name, masked):
    path = write_raster(tmp_path / "a.tif", ramp(20, 30), transform=TRANSFORMS[name], nodata=7)
    with rioxarray.open_rasterio(path, masked=masked) as array:
        assert grid_of(array) == describe(path).grid


def test_rows_keep_their_order_south_up(tmp_path):
    path = write_raster(tmp_path / "a.tif", ramp(4, 3), transform=TRANSFORMS["south-up"])
    scene = di.open_raster(path)
    assert np.array_equal(scene.values, ramp(4, 3))
    assert scene.y.values.tolist() == [5_600_005, 5_600_015, 5_600_025, 5_600_035]


@pytest.mark.parametrize("crs", ["EPSG:32632", "EPSG:4326", LAEA])
def test_the_crs_is_the_files_with_or_without_an_epsg_code(tmp_path, crs):
    path = write_raster(tmp_path / "a.tif", ramp(4, 3), crs=crs)
    with rasterio.open(path) as dataset:
        expected = dataset.crs
    for grid in (describe(path).grid, grid_of(di.open_raster(path))):
        assert rasterio.CRS.from_wkt(grid.crs) == expected
        assert grid.crs.startswith(("PROJCRS", "GEOGCRS"))


def test_a_custom_crs_survives_arithmetic(tmp_path):
    scene = di.open_raster(write_raster(tmp_path / "a.tif", ramp(4, 3), crs=LAEA))
    assert grid_of(xr.where(scene > 5, scene, 0)) == grid_of(scene)
    assert grid_of((scene * 2 + 1).astype("int16")) == grid_of(scene)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_raster_without_georeferencing_gets_none(tmp_path, shape):
    with pytest.warns(NotGeoreferencedWarning):
        path = write_raster(tmp_path / "a.tif", ramp(*shape), transform=None, crs=None)
    assert describe(path).grid == Grid(*shape)
    assert grid_of(di.open_raster(path)) == Grid(*shape)


def test_ground_control_points_keep_their_crs_and_no_transform_is_made_up(with_gcps):
    for grid in (describe(with_gcps).grid, grid_of(di.open_raster(with_gcps))):
        assert grid.gcps == POINTS
        assert rasterio.CRS.from_wkt(grid.gcps_crs) == rasterio.CRS.from_epsg(4326)
        assert grid.transform is None
        assert grid.crs is None
        points = grid.ground_control_points()
        assert [(p.row, p.col, p.x, p.y, p.z) for p in points] == list(POINTS)


@of_rioxarray
def test_ground_control_points_come_with_an_array_of_rioxarray(with_gcps):
    with rioxarray.open_rasterio(with_gcps) as array:
        assert grid_of(array) == describe(with_gcps).grid


def test_rpcs_are_kept_and_no_transform_is_made_up(with_rpcs):
    for grid in (describe(with_rpcs).grid, grid_of(di.open_raster(with_rpcs))):
        assert rpc_tags().items() <= dict(grid.rpcs).items()
        assert grid.transform is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_plans_and_predictions_lie_exactly_where_the_source_lies(tmp_path, name, shape):
    path = write_raster(tmp_path / "a.tif", ramp(*shape), transform=TRANSFORMS[name], crs=LAEA)
    model = di.load_model(Pixel(), output="values")
    prediction = di.predict(di.open_raster(path), model)
    assert grid_of(prediction) == describe(path).grid
    cog = di.plan(path, model, tmp_path / "out.tif").cog
    assert cog.transform == tuple(TRANSFORMS[name])[:6]
    assert rasterio.CRS.from_wkt(cog.crs) == rasterio.CRS.from_wkt(LAEA)
    assert np.array_equal(prediction.values, ramp(*shape))


def test_plans_and_predictions_keep_ground_control_points(with_gcps, tmp_path):
    model = di.load_model(Pixel(), output="values")
    assert grid_of(di.predict(di.open_raster(with_gcps), model)) == describe(with_gcps).grid
    cog = di.plan(with_gcps, model, tmp_path / "out.tif").cog
    assert cog.gcps == POINTS
    assert rasterio.CRS.from_wkt(cog.gcps_crs) == rasterio.CRS.from_epsg(4326)
    assert (cog.transform, cog.crs) == (None, None)


# --- windows --------------------------------------------------------------------------------------


def test_a_window_has_the_transform_of_its_first_pixel(tmp_path):
    path = write_raster(tmp_path / "a.tif", ramp(120, 100))
    scene = di.open_raster(path, window=(50, 20, 50, 50))
    expected = Affine(10, 0, 500_200, 0, -10, 5_599_500)
    assert np.array_equal(scene.values, ramp(120, 100)[:, 50:100, 20:70])
    assert grid_of(scene).transform == expected
    assert describe(path, window=(50, 20, 50, 50)).grid == grid_of(scene)


@of_rioxarray
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_window_and_the_same_slice_have_one_grid(tmp_path, name):
    path = write_raster(tmp_path / "a.tif", ramp(20, 30), transform=TRANSFORMS[name])
    part = di.open_raster(path)[:, 3:10, 5:25]
    window = describe(path, window=(3, 5, 7, 20)).grid
    assert grid_of(part) == window
    with rioxarray.open_rasterio(path) as array:
        assert grid_of(array[:, 3:10, 5:25]) == window


@pytest.mark.parametrize("bounds", [(0, 0, 21, 5), (-1, 0, 5, 5), (0, 28, 5, 3), (0, 0, 0, 5)])
def test_a_window_outside_the_raster_is_refused_with_both_sizes(tmp_path, bounds):
    path = write_raster(tmp_path / "a.tif", ramp(20, 30))
    with pytest.raises(ValueError, match=r"outside the raster of 20 x 30 px") as refusal:
        di.open_raster(path, window=bounds)
    assert str(bounds) in str(refusal.value)


def test_a_part_of_a_raster_keeps_its_points_and_rpcs_where_they_are(with_gcps, with_rpcs):
    moved = tuple((row - 3, col - 5, x, y, z) for row, col, x, y, z in POINTS)
    part = di.open_raster(with_gcps)[:, 3:10, 5:25]
    for grid in (grid_of(part), describe(with_gcps, window=(3, 5, 7, 20)).grid):
        assert (grid.gcps, grid.transform, grid.shape) == (moved, None, (7, 20))
    part = di.open_raster(with_rpcs)[:, 3:10, 5:25]
    for grid in (grid_of(part), describe(with_rpcs, window=(3, 5, 7, 20)).grid):
        told = dict(grid.rpcs)
        assert (told["LINE_OFF"], told["SAMP_OFF"], grid.transform) == ("-2", "-4", None)
        same = {
            name: value for name, value in rpc_tags().items() if name[:5] not in ("LINE_", "SAMP_")
        }
        assert same.items() <= told.items()


def test_a_flip_mirrors_points_and_is_refused_with_rpcs(with_gcps, with_rpcs):
    flipped = grid_of(di.open_raster(with_gcps)[:, ::-1, ::2])
    assert flipped.gcps[0] == (20, 0.25, 10, 50, 0)
    for part in (slice(None, None, -1), slice(None, None, 2)):
        with pytest.raises(ValueError, match="cut it without steps or flips"):
            grid_of(di.open_raster(with_rpcs)[:, :, part])


# --- slices ---------------------------------------------------------------------------------------

SLICES = st.builds(
    slice,
    st.none() | st.integers(-12, 12),
    st.none() | st.integers(-12, 12),
    st.sampled_from([None, 1, 2, 3, -1, -2]),
)


@given(rows=SLICES, cols=SLICES, name=st.sampled_from(sorted(TRANSFORMS)))
def test_pixel_centres_stay_where_they_are_in_any_slice(rows, cols, name):
    whole = Grid(12, 9, TRANSFORMS[name])
    row, col = np.mgrid[:12, :9]
    centres = np.array(whole.transform @ (col + 0.5, row + 0.5))
    array = xr.DataArray(np.zeros((12, 9)), whole.coords(), ("y", "x"))
    part = array[rows, cols]
    if not part.size:
        return
    grid = grid_of(part)
    row, col = np.mgrid[: grid.height, : grid.width]
    actual = np.array(grid.transform @ (col + 0.5, row + 0.5))
    assert np.abs(actual - centres[:, rows, cols]).max() < 1e-6 * abs(TRANSFORMS[name].a)


def test_a_slice_by_coordinates_moves_the_transform_by_whole_pixels(tmp_path):
    scene = di.open_raster(write_raster(tmp_path / "a.tif", ramp(20, 30)))
    part = scene.sel(x=slice(500_045, 500_100), y=slice(5_599_975, 5_599_900))
    assert grid_of(part).transform == TRANSFORM @ Affine.translation(4, 2)
    assert grid_of(part).shape == (8, 6)


def test_a_flip_turns_the_transform_and_every_second_pixel_is_twice_as_large(tmp_path):
    scene = di.open_raster(write_raster(tmp_path / "a.tif", ramp(20, 30)))
    flipped = grid_of(scene[:, ::-1])
    assert flipped.transform == Affine(10, 0, 500_000, 0, 10, 5_599_800)
    coarse = grid_of(scene[:, ::2, ::2])
    assert coarse.transform == Affine(20, 0, 499_995, 0, -20, 5_600_005)


def test_slices_without_a_declared_transform_follow_their_coordinates():
    centres = {"y": 45.0 - np.arange(4) * 0.5, "x": 7.0 + np.arange(5) * 0.25}
    array = xr.DataArray(np.zeros((4, 5)), centres, ("y", "x")).rio.write_crs("EPSG:4326")
    assert grid_of(array).transform == Affine(0.25, 0, 6.875, 0, -0.5, 45.25)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_coordinates_that_are_not_evenly_spaced_are_refused(axis):
    centres = {"y": np.array([1.0, 2.0, 3.0, 7.0]), "x": np.array([1.0, 2.0, 3.0, 7.0])}
    centres["x" if axis == "y" else "y"] = np.arange(4.0)
    with pytest.raises(ValueError, match=f"coordinates {axis} do not follow"):
        grid_of(xr.DataArray(np.zeros((4, 4)), centres, ("y", "x")))


@pytest.mark.parametrize("axis", ["x", "y"])
def test_coordinates_that_contradict_the_transform_are_refused(tmp_path, axis):
    scene = di.open_raster(write_raster(tmp_path / "a.tif", ramp(20, 30)))
    uneven = scene.isel({axis: [0, 1, 2, 5]})
    moved = scene.assign_coords({axis: scene[axis] + 4})
    for wrong in (uneven, moved):
        with pytest.raises(ValueError, match=f"coordinates {axis} do not follow"):
            grid_of(wrong)


def test_coordinates_that_are_no_numbers_are_refused(tmp_path):
    scene = di.open_raster(write_raster(tmp_path / "a.tif", ramp(20, 30)))
    with pytest.raises(
        ValueError, match=r"5 of 35 coordinates x are no numbers.*assign_coords\(x="
    ):
        grid_of(scene.pad(x=(2, 3)))
    with pytest.raises(ValueError, match="1 of 21 coordinates y are no numbers"):
        grid_of(scene.pad(y=(0, 1)))


def test_an_array_without_rows_and_columns_is_refused_with_its_dimensions():
    with pytest.raises(ValueError, match=r"\(band, y, x\), got \('lat', 'lon'\)"):
        grid_of(xr.DataArray(np.zeros((3, 4)), dims=("lat", "lon")))


def test_grids_are_values():
    grid = Grid(20, 30, TRANSFORM, "EPSG:32632")
    same = grid.window(Window(Span(0, 20), Span(0, 30)))
    assert grid == same
    assert hash(grid) == hash(same)
    assert grid != grid.window(Window(Span(1, 20), Span(0, 30)))
