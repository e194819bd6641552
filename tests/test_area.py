"""How much ground each class covers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import rasterio
from affine import Affine
from pyproj import CRS, Geod, Transformer

import daskinfer as di
from conftest import TRANSFORM, Pixel, write_raster
from daskinfer.area import AreaTally, ClassArea, Ground, area_rows, count_classes, ground_of
from daskinfer.monitor import ChunkDone

WORLD = (1.0, 0.0, -180.0, 0.0, -1.0, 90.0)


def outline_area(transform, crs, row, col):
    """Area of a pixel whose edges are followed point by point, by GeographicLib's polygons."""
    steps = np.linspace(0, 1, 200, endpoint=False)
    zeros = np.zeros_like(steps)
    cols = col + np.concatenate([steps, zeros + 1, 1 - steps, zeros])
    rows = row + np.concatenate([zeros, steps, zeros + 1, 1 - steps])
    x, y = Affine(*transform) @ (cols, rows)
    system = CRS.from_user_input(crs)
    to_degrees = Transformer.from_crs(system, system.geodetic_crs, always_xy=True)
    area, _ = Geod(ellps="WGS84").polygon_area_perimeter(*to_degrees.transform(x, y))
    return abs(area)


@pytest.mark.parametrize("row", [0, 1, 30, 89, 90, 179])
def test_cells_of_degrees(row):
    cell = ground_of(WORLD, "EPSG:4326", (180, 360)).areas(row, 7, (1, 5))
    assert cell.shape == (1, 1)
    # The chords of 200 points are a little inside the parallel.
    assert cell[0, 0] == pytest.approx(outline_area(WORLD, "EPSG:4326", row, 7), rel=1e-5)


def test_all_cells_together_are_the_earth():
    cells = ground_of(WORLD, "EPSG:4326", (180, 360)).areas(0, 0, (180, 360))
    assert cells.sum() * 360 == pytest.approx(510_065_621_724_089, rel=1e-12)


@pytest.mark.parametrize(
    ("transform", "crs"),
    [
        ((500.0, 0.0, 1e6, 0.0, -500.0, 8.4e6), "EPSG:3857"),
        ((0.004, 0.003, 9.0, 0.003, -0.004, 50.0), "EPSG:4326"),
        # Far outside of its zone, where areas are twice too large.
        ((1000.0, 0.0, 4.5e6, 0.0, -1000.0, 5e6), "EPSG:32632"),
    ],
)
def test_pixels_that_are_not_what_their_units_say(transform, crs):
    ground = ground_of(transform, crs, (1300, 1500))
    assert not ground.uniform
    areas = ground.areas(700, 300, (130, 1100))
    assert areas.shape == (5, 35)
    # Pixels around the middle of cells, the last of which is 2 rows high and 12 columns wide.
    for i, j in ((0, 0), (1, 9), (4, 34)):
        row, col = (min(32 * n + 15, (32 * n + side - 1) // 2) for n, side in ((i, 130), (j, 1100)))
        expected = outline_area(transform, crs, 700 + row, 300 + col)
        assert areas[i, j] == pytest.approx(expected, rel=2e-4)


def test_cells_are_as_good_as_pixels():
    transform, shape = (500.0, 0.0, 1e6, 0.0, -500.0, 8.4e6), (200, 150)
    ground = ground_of(transform, "EPSG:3857", shape)
    # A class for the upper half and one for the lower, where pixels are smaller.
    classes = np.repeat(np.uint8([0, 1]), 100)[:, None].repeat(150, axis=1)
    counted = count_classes(classes, 2, ground, (0, 0))
    column = [outline_area(transform, "EPSG:3857", row, 0) for row in range(200)]
    expected = [150 * sum(column[:100]), 150 * sum(column[100:])]
    np.testing.assert_allclose(counted.areas, expected, rtol=2e-4)


def test_a_thread_makes_one_transformer_for_all_chunks(monkeypatch):
    made, real = [], Transformer.from_crs

    def counted(*arguments, **options):
        made.append(arguments)
        return real(*arguments, **options)

    # A CRS that no other test uses.
    ground = Ground(1.0, (1000.0, 0.0, 4.5e6, 0.0, -1000.0, 5e6), "EPSG:32637")
    monkeypatch.setattr(Transformer, "from_crs", counted)
    for chunk in range(3):
        count_classes(np.zeros((200, 200), np.uint8), 2, ground, (200 * chunk, 0))
    assert len(made) == 1


@pytest.mark.parametrize(
    ("transform", "crs", "pixel"),
    [
        (tuple(TRANSFORM)[:6], "EPSG:32632", 100.0),
        ((30.0, 0.0, 4e6, 0.0, -30.0, 3e6), "EPSG:3035", 900.0),
        # Feet: 10 of them are 3.048006 m.
        ((10.0, 0.0, 2e6, 0.0, -10.0, 7e5), "EPSG:2263", (10 * 1200 / 3937) ** 2),
        # Turned.
        (tuple(TRANSFORM @ Affine.rotation(30))[:6], "EPSG:32632", 100.0),
    ],
)
def test_pixels_that_are_what_their_units_say(transform, crs, pixel):
    ground = ground_of(transform, crs, (100, 100))
    assert ground.uniform
    assert ground.pixel == pytest.approx(pixel, rel=1e-12)


@pytest.mark.parametrize(("transform", "crs"), [(None, "EPSG:4326"), (tuple(TRANSFORM)[:6], None)])
def test_a_raster_that_does_not_say_where_it_lies(transform, crs):
    ground = ground_of(transform, crs, (10, 10))
    counted = count_classes(np.zeros((3, 4), np.uint8), 2, ground, (0, 0))
    assert counted.pixels.tolist() == [12, 0]
    assert math.isnan(counted.areas[0])


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_counts_are_those_of_each_pixel(dtype):
    rng = np.random.default_rng(0)
    classes = rng.choice([0, 1, 2, 7, 255], (150, 90)).astype(dtype)
    ground = ground_of(WORLD, "EPSG:4326", (180, 360))
    counted = count_classes(classes, 8, ground, (20, 11))
    cells = np.broadcast_to(ground.areas(20, 11, classes.shape), classes.shape)
    assert counted.pixels.tolist() == [(classes == n).sum() for n in range(8)]
    np.testing.assert_allclose(counted.areas, [cells[classes == n].sum() for n in range(8)])


def test_a_tally_survives_being_closed_and_counts_what_it_lacks(tmp_path):
    ground = ground_of(tuple(TRANSFORM)[:6], "EPSG:32632", (8, 8))

    def counted(n):
        return count_classes(np.full((n, 1), 1, np.uint8), 3, ground, (0, 0))

    path = str(tmp_path / "areas")
    for chunk in (3, 0):
        tally = AreaTally(path, 6, 3)
        tally.put(chunk, counted(chunk + 1))
        tally.close()
    asked = []

    def recount(chunk):
        asked.append(chunk)
        return counted(chunk + 1)

    tally = AreaTally(path, 6, 3)
    pixels, areas = tally.total({0, 4}, recount)
    assert asked == [1, 2, 5]
    assert pixels.tolist() == [0, 2 + 3 + 4 + 6, 0]
    assert areas.tolist() == [0, 1500, 0]
    tally.remove()
    assert list(tmp_path.iterdir()) == []


def test_lines_for_a_report():
    rows = area_rows([ClassArea("a", 1, 100.0), ClassArea("b", 3, 300.0), ClassArea("c", 0, 0.0)])
    assert rows == [
        ("areas", "of classes"),
        ("  b", "0.0003 km2, 75.0%, 3 px"),
        ("  a", "0.0001 km2, 25.0%, 1 px"),
    ]
    assert area_rows([ClassArea("a", 7, math.nan)])[1] == ("  a", "100.0%, 7 px")
    assert area_rows([]) == []
    assert len(area_rows([ClassArea(str(n), n, 1.0) for n in range(1, 40)])) == 22


# --- of a run -------------------------------------------------------------------------------------

NAMES = ["low", "high"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """A raster whose classes are known, with nodata."""
    rng = np.random.default_rng(1)
    data = rng.choice([0.0, 1.0, 9.0], (1, 200, 260), p=[0.5, 0.3, 0.2]).astype("float32")
    return write_raster(tmp_path_factory.mktemp("area") / "s.tif", data, nodata=9), data[0]


def model(**spec):
    return di.load_model(Pixel(), threshold=0.5, class_names=NAMES, bands=["1"], **spec)


OPTIONS = {"tile": 64, "chunk": 64, "blocksize": 64}


def expected(data, pixel=100.0):
    counts = [(data == value).sum() for value in (0, 1)]
    return [ClassArea(name, int(n), n * pixel) for name, n in zip(NAMES, counts, strict=True)]


def test_the_report_tells_the_area_of_each_class(scene, tmp_path, one_worker):
    path, data = scene
    report = di.run(path, model(), tmp_path / "o.tif", client=one_worker, **OPTIONS)
    assert list(report.areas) == expected(data)
    assert "low" in repr(report)
    assert [file.name for file in tmp_path.iterdir()] == ["o.tif"]


def test_areas_survive_a_stop_and_a_kill(scene, tmp_path, one_worker):
    path, data = scene
    output = tmp_path / "o.tif"

    def stop(event):
        if isinstance(event, ChunkDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        di.run(path, model(), output, client=one_worker, callbacks=[stop], **OPTIONS)
    # As if the client had been killed before it noted anything.
    (tmp_path / "o.tif.partial.areas").unlink()
    report = di.run(path, model(), output, client=one_worker, **OPTIONS)
    assert report.resumed
    assert list(report.areas) == expected(data)


def test_areas_with_confidence_beside_and_of_another_scale(tmp_path, one_worker):
    data = np.zeros((1, 64, 64), np.float32)
    data[0, :16] = 1
    path = write_raster(tmp_path / "s.tif", data)
    sure = model(confidence=True, activation="identity")
    report = di.run(path, sure, tmp_path / "o.tif", client=one_worker, **OPTIONS)
    assert list(report.areas) == expected(data[0])

    finer = di.load_model(Doubled(), threshold=0.5, bands=["1"])
    report = di.run(path, finer, tmp_path / "p.tif", client=one_worker, **OPTIONS)
    assert [(one.name, one.pixels) for one in report.areas] == [("0", 4 * 48 * 64), ("1", 4 * 1024)]
    assert sum(one.area for one in report.areas) == 100.0 * 64 * 64


class Doubled(Pixel):
    def forward(self, x):
        return x.repeat_interleave(2, 2).repeat_interleave(2, 3)


def test_values_have_no_classes_to_measure(scene, tmp_path, one_worker):
    values = di.load_model(Pixel(), output="values")
    report = di.run(scene[0], values, tmp_path / "o.tif", client=one_worker, **OPTIONS)
    assert report.areas == ()


def test_failed_chunks_count_for_nothing(scene, tmp_path, one_worker):
    marked = scene[1].copy()
    marked[:64, :64] = 0
    marked[3, 3] = 5
    source = write_raster(tmp_path / "s.tif", marked[None], nodata=9)
    choking = di.load_model(Choking(), threshold=0.5, class_names=NAMES, bands=["1"])
    output = tmp_path / "o.tif"
    report = di.run(source, choking, output, client=one_worker, on_error="nodata", **OPTIONS)
    marked[:64, :64] = 9
    assert len(report.failures) == 1
    assert list(report.areas) == expected(marked)
    with rasterio.open(output) as dataset:
        assert (dataset.read(1) == 0).sum() == report.areas[0].pixels


class Choking(Pixel):
    def forward(self, x):
        if (x == 5).any():
            raise RuntimeError("five")
        return x


def test_counts_that_are_lost_and_cannot_be_made_again_are_left_out(scene, tmp_path, one_worker):
    output = tmp_path / "o.vrt"

    def stop(event):
        if isinstance(event, ChunkDone):
            raise KeyboardInterrupt

    options = OPTIONS | {"client": one_worker, "split": 128}
    with pytest.raises(KeyboardInterrupt):
        di.run(scene[0], model(), output, callbacks=[stop], **options)
    (tmp_path / "o.vrt.partial.areas").unlink()
    report = di.run(scene[0], model(), output, **options)
    # The map is there; its areas are told if the growing files could be read.
    with rasterio.open(output) as dataset:
        assert (dataset.read(1) == 1).sum() == (scene[1] == 1).sum()
    assert list(report.areas) in ([], expected(scene[1]))
