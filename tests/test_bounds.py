"""Bounds in another CRS, where maps of the globe have their ends."""

from __future__ import annotations

import numpy as np
import pytest
from affine import Affine
from rasterio.warp import transform

from daskinfer.grid import Grid
from daskinfer.selection import window_of_bounds

# UTM zone 60 ends at 180 degrees east: 178.8 east to 176.7 west.
PACIFIC = (700_000, -100_000, 1_200_000, 100_000)


def degrees(west, width, *, height=180, size=1.0):
    return Grid(height, width, Affine(size, 0, west, 0, -size, height * size / 2), "EPSG:4326")


def wanted(bounds, crs, grid):
    """Columns of the pixels of a grid in degrees in which points of the bounds lie."""
    xs, ys = np.meshgrid(np.linspace(*bounds[::2], 400), np.linspace(*bounds[1::2], 50))
    lon, _ = transform(crs, "EPSG:4326", xs.ravel(), ys.ravel())
    west, size = grid.transform.c, grid.transform.a
    cols = np.concatenate([(np.array(lon) + turn - west) // size for turn in (-360, 0, 360)])
    return {int(col) for col in cols if 0 <= col < grid.width}


@pytest.mark.parametrize(
    "grid",
    [degrees(0, 360), degrees(-185, 20), degrees(-180, 10), degrees(170, 10), degrees(170, 20)],
    ids=["0 to 360", "-185 to -165", "-180 to -170", "170 to 180", "170 to 190"],
)
def test_bounds_across_the_antimeridian_are_where_the_raster_has_them(grid):
    area = window_of_bounds(PACIFIC, grid, "EPSG:32660")
    assert set(range(*area.cols)) == wanted(PACIFIC, "EPSG:32660", grid)
    assert area.rows.size == 2


def test_bounds_that_a_raster_has_at_both_ends_are_refused_with_both_parts():
    with pytest.raises(
        ValueError, match=r"-180 to -176\.7\d+ and 178\.7\d+ to 180: pass those of one"
    ):
        window_of_bounds(PACIFIC, degrees(-180, 360), "EPSG:32660")
    with pytest.raises(ValueError, match="x = 0 to 10 and 350 to 360"):
        window_of_bounds((-10, -5, 10, 5), degrees(0, 360), "EPSG:4326")


def test_longitudes_are_those_of_the_raster():
    area = window_of_bounds((-20, -5, -10, 5), degrees(0, 360), "EPSG:4326")
    assert tuple(area.cols) == (340, 350)
    every = window_of_bounds((-180, -90, 180, 90), degrees(0, 360), "EPSG:4326")
    assert tuple(every.cols) == (0, 360)
    half = window_of_bounds(
        (-180, -90, 180, 90), degrees(-180.125, 1441, height=720, size=0.25), "EPSG:4326"
    )
    assert half.cols.size == 1441
    with pytest.raises(ValueError, match="do not meet the raster"):
        window_of_bounds((-20, -5, -10, 5), degrees(170, 20), "EPSG:4326")


def test_bounds_in_the_rasters_own_crs_are_taken_as_they_stand():
    area = window_of_bounds((-10, -5, 10, 5), degrees(0, 360))
    assert tuple(area.cols) == (0, 10)


def test_bounds_that_a_projection_tears_apart_are_refused():
    world = Affine(1e5, 0, -2.0037508e7, 0, -1e5, 2.0037508e7)
    with pytest.raises(ValueError, match="both sides of where the raster's CRS is cut"):
        window_of_bounds(PACIFIC, Grid(400, 401, world, "EPSG:3857"), "EPSG:32660")
    # Mercator around the Pacific is cut elsewhere.
    there = window_of_bounds(PACIFIC, Grid(400, 401, world, "EPSG:3832"), "EPSG:32660")
    assert there.cols.size == 6
    for crs in ("EPSG:3857", "EPSG:3395"):
        whole = window_of_bounds((-180, -80, 180, 80), Grid(400, 401, world, crs), "EPSG:4326")
        assert whole.cols.size == 401
