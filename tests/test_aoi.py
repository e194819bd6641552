"""An area of interest: which pixels, what is not run, what is refused."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
import rasterio
import shapely
import shapely.geometry
import torch
from affine import Affine
from rasterio.features import geometry_mask
from rasterio.warp import transform_geom

import daskinfer as di
from conftest import N3, TRANSFORM, noise, seeded, write_raster
from daskinfer.cli import main
from daskinfer.grid import Grid
from daskinfer.inputs.aoi import AreaOfInterest
from daskinfer.inputs.protocol import whole_window
from daskinfer.tiling import AxisTiling, Tiling
from oracle import whole
from sources import of_rioxarray, window

pytestmark = of_rioxarray

GRID = Grid(90, 110, TRANSFORM, rasterio.CRS.from_epsg(32632).to_wkt())


def polygon(*points, holes=()):
    """GeoJSON of points ``(row, col)`` of the plain grid."""
    rings = [[list(TRANSFORM @ (col, row)) for row, col in ring] for ring in (points, *holes)]
    return {"type": "Polygon", "coordinates": [[*ring, ring[0]] for ring in rings]}


STAR = polygon(
    (10.2, 12.7), (70.4, 8.1), (50.7, 60.3), (83.9, 101.3), (30.1, 90.6),
    holes=[((45.0, 20.0), (58.3, 20.9), (50.1, 40.4))],
)  # fmt: skip


def in_lonlat(geometry):
    return transform_geom("EPSG:32632", "EPSG:4326", geometry, precision=12)


def expected_mask(geometry, shape=(90, 110), transform=TRANSFORM):
    return geometry_mask([geometry], shape, transform, invert=True)


def with_crs(geometry, code=32632):
    return {**geometry, "crs": {"type": "name", "properties": {"name": f"EPSG:{code}"}}}


def test_pixels_are_those_of_rasterio():
    area = AreaOfInterest.of(with_crs(STAR), GRID)
    expected = expected_mask(STAR)
    assert np.array_equal(area.inside(whole_window(GRID)), expected)
    for part in (window(0, 0, 1, 1), window(37, 11, 29, 43), window(80, 100, 10, 10)):
        assert np.array_equal(area.inside(part), expected[part.slices()])
    finer = geometry_mask([STAR], (180, 220), TRANSFORM @ Affine.scale(0.5), invert=True)
    assert np.array_equal(area.inside(window(0, 0, 180, 220), Fraction(2)), finer)


def test_every_form_of_an_area_is_the_same(tmp_path):
    import geopandas

    lonlat = in_lonlat(STAR)
    shape = shapely.geometry.shape(STAR)
    frame = geopandas.GeoDataFrame({"name": ["star"]}, geometry=[shape], crs="EPSG:32632")
    frame.to_file(tmp_path / "star.gpkg")
    frame.to_crs(4326).to_file(tmp_path / "star.shp")
    frame.to_parquet(tmp_path / "star.parquet")
    (tmp_path / "star.geojson").write_text(json.dumps(lonlat))
    feature = {"type": "Feature", "geometry": lonlat, "properties": {}}
    forms = [
        with_crs(STAR), STAR, lonlat, json.dumps(lonlat), feature,
        {"type": "FeatureCollection", "features": [feature]},
        {"type": "GeometryCollection", "geometries": [lonlat]},
        {"type": "MultiPolygon", "coordinates": [lonlat["coordinates"]]},
        shape, frame, frame.to_crs(4326), frame.geometry,
        tmp_path / "star.geojson", str(tmp_path / "star.gpkg"), tmp_path / "star.shp",
        tmp_path / "star.parquet",
    ]  # fmt: skip
    expected = expected_mask(STAR)
    for form in forms:
        mask = AreaOfInterest.of(form, GRID).inside(whole_window(GRID))
        assert np.array_equal(mask, expected), form


def test_bounds_are_a_box():
    left, top = TRANSFORM @ (20, 10)
    right, bottom = TRANSFORM @ (60, 50)
    mask = AreaOfInterest.of((left, bottom, right, top), GRID).inside(whole_window(GRID))
    expected = np.zeros((90, 110), bool)
    expected[10:50, 20:60] = True
    assert np.array_equal(mask, expected)


def test_edges_are_followed_into_the_rasters_crs():
    wide = Grid(200, 800, Affine(500, 0, 3e5, 0, -500, 5.6e6), GRID.crs)
    lonlat = {
        "type": "Polygon",
        "coordinates": [[[7, 50], [11, 50], [11, 50.4], [7, 50.4], [7, 50]]],
    }
    mask = AreaOfInterest.of(lonlat, wide).inside(whole_window(wide))
    cols, rows = np.meshgrid(np.arange(800) + 0.5, np.arange(200) + 0.5)
    x, y = wide.transform @ (cols.ravel(), rows.ravel())
    lon, lat = rasterio.warp.transform(wide.crs, "EPSG:4326", x, y)
    lon, lat = np.array(lon), np.array(lat)
    expected = ((lon > 7) & (lon < 11) & (lat > 50) & (lat < 50.4)).reshape(200, 800)
    # Straight in the raster's CRS, an edge of 4 degrees is off by kilometres.
    assert np.count_nonzero(mask != expected) < 1e-3 * np.count_nonzero(expected)


def test_chunks_are_those_with_a_pixel_inside():
    area = AreaOfInterest.of(STAR, GRID)
    expected = expected_mask(STAR)
    for side in (8, 16, 30, 200):
        tiling = Tiling(AxisTiling(90, 8, chunk=side), AxisTiling(110, 8, chunk=side))
        found = area.chunks(tiling)
        for number in range(tiling.chunks):
            chunk = tiling.chunk_at(tiling.index_of(number))
            has = expected[chunk.window.slices()].any()
            # One without a pixel that is touched may be kept: it only costs a little.
            assert found[number] or not has
        assert side > 16 or not found.all()


class Counting(torch.nn.Module):
    """A net that notes how many tiles it has seen."""

    seen = 0

    def __init__(self):
        super().__init__()
        self.net = seeded(N3)

    def forward(self, x):
        type(self).seen += len(x)
        return self.net(x)


def scene(folder, **profile):
    data = noise(2, 90, 110)
    return data, write_raster(folder / "scene.tif", data, **profile)


def test_a_run_is_the_whole_inside_and_nodata_outside(tmp_path, one_worker):
    data, path = scene(tmp_path)
    inside = expected_mask(STAR)
    expected = np.where(inside, whole(seeded(N3), data, scale=1e-4), np.nan)
    model = di.load_model(Counting(), output="values", scale=1e-4)
    options = {"tile": 22, "chunk": 16, "batch_size": 1, "aoi": in_lonlat(STAR)}
    plan = di.plan(path, model, tmp_path / "out.tif", **options)
    assert "area" in repr(plan)
    Counting.seen = 0
    report = di.run(plan, client=one_worker)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        result = dataset.read()
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert np.array_equal(np.isnan(result[0]), ~inside)
    step = plan.tiling.step[0]
    cores = [
        inside[row : row + step, col : col + step].any()
        for row in range(0, 90, step)
        for col in range(0, 110, step)
    ]
    assert report.tiles == sum(cores) < len(cores)
    assert report.outside == len(plan.outside()) > 0
    assert report.resumed == 0
    assert f"{report.outside} outside the area" in repr(report)
    assert report.nonfinite == 0
    lazy = di.predict(di.open_raster(path), model, **options)
    np.testing.assert_allclose(lazy.values, expected, atol=1e-5)


def test_nodata_and_area_are_both_honoured(tmp_path, one_worker):
    data = noise(2, 90, 110) + 1
    data[:, 20:40, 30:60] = 0
    path = write_raster(tmp_path / "scene.tif", data, nodata=0)
    model = di.load_model(seeded(N3), output="classes", scale=1e-4)
    di.run(path, model, tmp_path / "out.tif", tile=32, chunk=32, aoi=STAR, client=one_worker)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        valid = dataset.read(1) != 255
    assert np.array_equal(valid, expected_mask(STAR) & (data != 0).all(axis=0))


def test_a_blended_run_and_a_window_have_the_same_area(tmp_path, one_worker):
    _, path = scene(tmp_path)
    model = di.load_model(seeded(N3), output="values", scale=1e-4)
    inside = expected_mask(STAR)
    for name, options in (("b", {"overlap": 8}), ("w", {"window": (20, 30, 60, 70)})):
        output = tmp_path / f"{name}.tif"
        di.run(path, model, output, tile=32, chunk=32, aoi=STAR, client=one_worker, **options)
        expected = inside[20:80, 30:100] if "window" in options else inside
        with rasterio.open(output) as dataset:
            assert np.array_equal(~np.isnan(dataset.read(1)), expected)


def test_an_area_is_part_of_the_settings(tmp_path, one_worker):
    _, path = scene(tmp_path)
    model = di.load_model(seeded(N3), output="values", scale=1e-4)
    options = {"tile": 16, "chunk": 16}
    stopped = []

    def stop(event):
        if type(event).__name__ == "ChunkDone":
            stopped.append(event.chunk)
            raise KeyboardInterrupt

    output = tmp_path / "out.tif"
    with pytest.raises(KeyboardInterrupt):
        di.run(path, model, output, aoi=STAR, client=one_worker, callbacks=[stop], **options)
    with pytest.raises(ValueError, match="aoi"):
        di.run(path, model, output, client=one_worker, **options)
    report = di.run(path, model, output, aoi=STAR, client=one_worker, **options)
    assert report.resumed >= 1
    assert report.outside > 0
    with rasterio.open(output) as dataset:
        assert np.array_equal(~np.isnan(dataset.read(1)), expected_mask(STAR))


def test_a_model_of_another_scale_has_the_area_on_its_own_pixels(tmp_path, one_worker):
    _, path = scene(tmp_path)
    model = di.load_model(torch.nn.Upsample(scale_factor=2), output="values")
    di.run(path, model, tmp_path / "out.tif", tile=32, chunk=32, aoi=STAR, client=one_worker)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        expected = expected_mask(STAR, dataset.shape, dataset.transform)
        assert np.array_equal(~np.isnan(dataset.read(1)), expected)


BOW = polygon((10, 10), (50, 50), (50, 10), (12, 40))


@pytest.mark.parametrize(
    ("aoi", "error", "message"),
    [
        ({"type": "FeatureCollection", "features": []}, ValueError, "empty"),
        ({"type": "Point", "coordinates": [0, 0]}, ValueError, "has no area"),
        (BOW, ValueError, "Self-intersection"),
        ({"type": "Polygon", "coordinates": [[[0, 0], [1, 1], [0, 0]]]}, ValueError, "4 points"),
        ({"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [1, 1]]]}, ValueError, "4 points"),
        (
            {"type": "Polygon", "coordinates": [[[0, 0], [1, 1], [2, 2], [0, 0]]]},
            ValueError,
            "area",
        ),
        ({"type": "Polygon", "coordinates": [["a", "b"]]}, ValueError, "not rings of points"),
        (polygon((500, 500), (500, 600), (600, 600)), ValueError, "no pixel of the raster"),
        (polygon((5.6, 5.6), (5.6, 5.9), (5.9, 5.9)), ValueError, "no pixel of the raster"),
        ((3, 2, 1, 0), ValueError, "left, bottom, right, top"),
        ("nowhere.geojson", FileNotFoundError, "no such file"),
        (7, TypeError, "aoi must be"),
    ],
)
def test_what_is_no_area_is_refused(tmp_path, aoi, error, message):
    _, path = scene(tmp_path)
    with pytest.raises(error, match=message):
        di.plan(path, di.load_model(seeded(N3), output="values"), tmp_path / "out.tif", aoi=aoi)


def test_bounds_of_both_are_told():
    far = {"type": "Polygon", "coordinates": [[[1, 1], [2, 1], [2, 2], [1, 1]]]}
    with pytest.raises(ValueError, match=r"its bounds are \(-.*the raster's \(500000, 5599100"):
        AreaOfInterest.of(far, GRID)


def test_the_command_line_takes_an_area(tmp_path, factory, capsys):
    _, path = scene(tmp_path)
    (tmp_path / "star.geojson").write_text(json.dumps(in_lonlat(STAR)))
    arguments = ["run", path, factory, str(tmp_path / "out.tif"), "--output", "values"]
    arguments += ["--scale", "1e-4", "--aoi", str(tmp_path / "star.geojson")]
    assert main(arguments) == 0
    assert "area" in capsys.readouterr().out
    with rasterio.open(tmp_path / "out.tif") as dataset:
        assert np.array_equal(~np.isnan(dataset.read(1)), expected_mask(STAR))
