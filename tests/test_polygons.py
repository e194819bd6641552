"""Class maps as polygons: against those of the whole map."""

from __future__ import annotations

import geopandas
import numpy as np
import pytest
import rasterio
import shapely
import xarray as xr
from affine import Affine
from hypothesis import given, settings
from hypothesis import strategies as st
from rasterio.features import rasterize, shapes
from shapely.geometry import shape

import daskinfer as di
from conftest import TRANSFORM, write_raster
from daskinfer.cli import main
from daskinfer.objects.polygons import _areas
from daskinfer.source import ArraySource


def valid(outline):
    return outline if outline.is_valid else shapely.make_valid(outline)


def key(value, outline):
    """What tells an area from any other, whatever its first point."""
    return value, shapely.to_wkb(shapely.normalize(shapely.simplify(outline, 0)), flavor="iso")


def whole(data, mask, connectivity):
    """Areas of a map, made at once."""
    pairs = shapes(data, mask, connectivity)
    return {
        key(int(value), valid(shape(outline))): valid(shape(outline)) for outline, value in pairs
    }


def streamed(data, connectivity, chunk, nodata=None, wanted=None):
    array = xr.DataArray(data[None], dims=("band", "y", "x"))
    if nodata is not None:
        array.attrs["_FillValue"] = nodata
    return list(_areas(ArraySource(array), wanted, connectivity, chunk))


def assert_same(areas, expected):
    """The same areas, each once."""
    found = {key(area.value, area.outline): area.outline for area in areas}
    assert len(found) == len(areas) == len(expected)
    # By their points where they have the same ones, else by what they cover.
    rest = [outline for name, outline in expected.items() if name not in found]
    odd = [outline for name, outline in found.items() if name not in expected]
    for outline in odd:
        match = next(other for other in rest if outline.equals(other))
        rest.remove(match)
    assert not rest
    assert all(area.outline.is_valid for area in areas)


def blobs(height, width, values, seed=0, smooth=3):
    """A map of patches, as classes are."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(height, width))
    for axis in (0, 1):
        for _ in range(smooth):
            noise = noise + np.roll(noise, 1, axis) + np.roll(noise, -1, axis)
    ranks = noise.ravel().argsort().argsort().reshape(noise.shape)
    return (ranks * values // noise.size).astype(np.uint8)


@pytest.mark.parametrize("connectivity", [4, 8])
@pytest.mark.parametrize("chunk", [16, 50, 64, 200])
def test_areas_are_those_of_the_whole_map(connectivity, chunk):
    data = blobs(90, 130, 4)
    assert_same(streamed(data, connectivity, chunk), whole(data, None, connectivity))


@pytest.mark.parametrize("connectivity", [4, 8])
def test_noise_with_nodata(connectivity):
    data = np.random.default_rng(1).integers(0, 3, (60, 45)).astype(np.uint8)
    expected = whole(data, data != 1, connectivity)
    assert_same(streamed(data, connectivity, 16, nodata=1), expected)


@settings(max_examples=10)
@given(
    st.integers(1, 24), st.integers(1, 24), st.integers(1, 9), st.sampled_from([4, 8]),
    st.integers(2, 4), st.integers(0, 10**6),
)  # fmt: skip
def test_any_map_in_any_chunks(height, width, chunk, connectivity, values, seed):
    data = np.random.default_rng(seed).integers(0, values, (height, width)).astype(np.uint8)
    assert_same(streamed(data, connectivity, chunk), whole(data, None, connectivity))


def test_a_spiral_across_all_chunks_is_one_area():
    size = 61
    data = np.zeros((size, size), np.uint8)
    row = col = 0
    step, length = (0, 1), size
    for turn in range(size):
        for _ in range(length - 1):
            data[row, col] = 1
            row, col = row + step[0], col + step[1]
        step = step[1], -step[0]
        length -= 2 * (turn % 2) if turn else 0
        if length < 3:
            break
    areas = streamed(data, 4, 10)
    assert_same(areas, whole(data, None, 4))
    assert [area.outline.area for area in areas if area.value == 1] == [(data == 1).sum()]


def test_complete_areas_are_not_kept():
    # Two rows of chunks on, nothing of a patch is held.
    data = np.zeros((64, 8), np.uint8)
    data[2:6, 2:6] = 1
    data[40:44, 2:6] = 1
    areas = _areas(
        ArraySource(xr.DataArray(data[None], dims=("band", "y", "x"))), np.array([1]), 4, 8
    )
    assert next(areas).outline.bounds == (2, 2, 6, 6)


# --- files ----------------------------------------------------------------------------------------

NAMES = ["water", "soil", "wood"]


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    data = blobs(120, 150, 4)
    path = tmp_path_factory.mktemp("polygons") / "classes.tif"
    write_raster(path, data[None], nodata=3)
    with rasterio.open(path, "r+") as dataset:
        dataset.update_tags(CLASS_NAMES='["water", "soil", "wood"]')
    return path, data


@pytest.mark.parametrize("name", ["o.gpkg", "o.parquet", "o.fgb"])
def test_polygons_burn_back_into_the_map(classes, tmp_path, name):
    path, data = classes
    report = di.vectorize(path, tmp_path / name, chunk=64)
    read = geopandas.read_parquet if name.endswith("parquet") else geopandas.read_file
    frame = read(tmp_path / name)
    assert frame.crs == "EPSG:32632"
    pairs = zip(frame.geometry, frame["value"], strict=True)
    burnt = rasterize(pairs, data.shape, fill=3, transform=TRANSFORM, dtype="uint8")
    assert np.array_equal(burnt, data)
    assert frame.area.sum() == 100 * (data != 3).sum()
    assert (frame["class"] == np.array(NAMES)[frame["value"]]).all()
    assert report.polygons == len(frame) == len(whole(data, data != 3, 4))
    assert dict(report.counts) == frame["class"].value_counts().to_dict()
    assert "water" in repr(report)


def test_small_areas_and_other_values_are_left_out(classes, tmp_path):
    path, data = classes
    options = {"min_area": 2000, "values": [0, 2], "class_names": ["a", "b", "c"]}
    di.vectorize(path, tmp_path / "o.parquet", **options)
    frame = geopandas.read_parquet(tmp_path / "o.parquet")
    areas = [100 * outline.area for outline in whole(data, np.isin(data, (0, 2)), 4).values()]
    assert sorted(frame.area) == sorted(area for area in areas if area >= 2000)
    assert set(frame["class"]) == {"a", "c"}


def test_a_lazy_prediction_with_confidence(tmp_path, two_classes):
    scene, expected = two_classes
    model = di.load_model(
        torch_identity(), threshold=0.5, confidence=True, activation="identity",
        class_names=["no", "yes"], bands=["1"],
    )  # fmt: skip
    lazy = di.predict(scene, model, tile=32, chunk=32)
    di.vectorize(lazy, tmp_path / "o.parquet", chunk=25, window=(10, 0, 40, 60))
    frame = geopandas.read_parquet(tmp_path / "o.parquet")
    assert len(frame) == len(whole(expected[10:50, :60], None, 4))
    assert set(frame["class"]) == {"no", "yes"}


@pytest.fixture
def two_classes():
    data = blobs(64, 64, 2, seed=5)
    array = xr.DataArray(data[None].astype("float32"), dims=("band", "y", "x"))
    return array.assign_coords(band=["1"]), data


def torch_identity():
    from conftest import Pixel

    return Pixel()


def test_turned_rasters(tmp_path):
    data = blobs(40, 50, 2)
    turned = TRANSFORM @ Affine.rotation(25)
    path = write_raster(tmp_path / "s.tif", data[None], transform=turned)
    di.vectorize(path, tmp_path / "o.parquet", chunk=16)
    frame = geopandas.read_parquet(tmp_path / "o.parquet")
    expected = [shape(s) for s, _ in shapes(data, transform=turned)]
    for outline in frame.geometry:
        assert any(outline.equals_exact(shapely.MultiPolygon([o]), 1e-6, normalize=True)
                   or outline.symmetric_difference(o).area < 1e-3 for o in expected)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"output": "o.shp"}, ValueError, r"name it \.parquet"),
        ({"connectivity": 6}, ValueError, "connectivity must be 4 or 8"),
        ({"min_area": -1}, ValueError, "min_area must be"),
        ({"chunk": 0}, ValueError, "chunk must be"),
        ({"band": 7}, ValueError, "7"),
        ({"class_names": "water"}, ValueError, "class_names must be a list"),
    ],
)
def test_refused_before_work(classes, tmp_path, options, error, message):
    output = tmp_path / options.pop("output", "o.gpkg")
    with pytest.raises(error, match=message):
        di.vectorize(classes[0], output, **options)
    assert list(tmp_path.iterdir()) == []


def test_maps_that_are_none(tmp_path):
    floats = write_raster(tmp_path / "f.tif", np.zeros((1, 8, 8), np.float32))
    with pytest.raises(ValueError, match="map of float32 has no classes"):
        di.vectorize(floats, tmp_path / "o.gpkg")
    several = write_raster(tmp_path / "s.tif", np.zeros((2, 8, 8), np.uint8))
    with pytest.raises(ValueError, match=r"2 bands .* band=1"):
        di.vectorize(several, tmp_path / "o.gpkg")
    steps = write_raster(tmp_path / "p.tif", np.zeros((2, 8, 8), np.uint8))
    with rasterio.open(steps, "r+") as dataset:
        dataset.scales = (1, 0.004)
    with pytest.raises(ValueError, match=r"a scale of 0\.004 are no classes"):
        di.vectorize(steps, tmp_path / "o.gpkg", band=2)
    far = xr.DataArray(np.full((1, 4, 4), 2**40), dims=("band", "y", "x"))
    with pytest.raises(ValueError, match="int32 at most"):
        di.vectorize(far, tmp_path / "o.gpkg")
    assert not (tmp_path / "o.gpkg").exists()


def test_where_something_is_true(tmp_path):
    true = np.zeros((1, 20, 30), bool)
    true[0, 5:9, 10:20] = True
    array = xr.DataArray(true, dims=("band", "y", "x"))
    report = di.vectorize(array, tmp_path / "o.parquet", values=[1], chunk=np.int64(8))
    assert report.counts == (("1", 1),)
    assert geopandas.read_parquet(tmp_path / "o.parquet").area.tolist() == [40]


def test_the_command_line(classes, tmp_path, capsys):
    output = tmp_path / "o.gpkg"
    options = ["--connectivity", "8", "--values", "0,2", "--min-area", "500", "--chunk", "64"]
    assert main(["vectorize", str(classes[0]), str(output), *options]) == 0
    assert "water" in capsys.readouterr().out
    frame = geopandas.read_file(output)
    expected = whole(classes[1], np.isin(classes[1], (0, 2)), 8).values()
    assert sorted(frame.area) == sorted(a for a in (100 * o.area for o in expected) if a >= 500)
    assert main(["vectorize", str(classes[0]), str(output)]) == 2
    assert "--overwrite" in capsys.readouterr().err
