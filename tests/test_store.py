"""`write_cog` from dask arrays: any chunks, any scheduler, one task per chunk, nothing left."""

from __future__ import annotations

import itertools
import os
from functools import partial

import dask.array as da
import numpy as np
import pytest
import rasterio
import rioxarray  # noqa: F401
import xarray as xr
from dask.core import flatten
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import daskinfer as di
from cogs import check, class_map, spec_of
from conftest import TRANSFORM, Pixel, noise, write_raster
from daskinfer.cog import WorkFile
from daskinfer.store import on_grid, store_cog
from test_package import in_new_process

of_rioxarray = pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning")


def scene(data, **attrs):
    """A DataArray ``(band, y, x)`` on a plain UTM grid."""
    bands = np.arange(1, data.shape[0] + 1)
    array = xr.DataArray(data, {"band": bands}, ("band", "y", "x"), attrs=attrs)
    return array.rio.write_crs("EPSG:32632").rio.write_transform(TRANSFORM)


def numbered(side, chunk):
    """Every chunk is full of its own number; made where it is asked for."""

    def block(block_info=None):
        (_, i, j), shape = block_info[None]["chunk-location"], block_info[None]["chunk-shape"]
        return np.full(shape, i * 16 + j, np.uint8)

    chunks = da.core.normalize_chunks(chunk, (side, side))
    return da.map_blocks(
        block, chunks=((1,), *chunks), dtype=np.uint8, meta=np.empty((0, 0, 0), np.uint8)
    )


@st.composite
def chunks_of_an_axis(draw, size):
    borders = draw(st.sets(st.integers(1, size - 1), max_size=5)) if size > 1 else set()
    edges = [0, *sorted(borders), size]
    return tuple(b - a for a, b in itertools.pairwise(edges))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_chunks(tmp_path_factory, data):
    height, width, bands = (data.draw(st.integers(1, n)) for n in (400, 400, 3))
    spec = spec_of(height, width, bands, blocksize=64, nodata=data.draw(st.sampled_from([None, 3])))
    pixels = class_map(spec, data.draw(st.integers(0, 99)))
    chunks = [data.draw(chunks_of_an_axis(n)) for n in (bands, height, width)]
    path = str(tmp_path_factory.mktemp("any") / "out.tif")
    assert store_cog(da.from_array(pixels, chunks), spec, path).compute(scheduler="sync") == path
    check(path, pixels, spec)


@settings(max_examples=300)
@given(st.data())
def test_chunks_lie_on_the_grid(data):
    height, width = (data.draw(st.integers(1, 700)) for _ in range(2))
    chunks = [data.draw(chunks_of_an_axis(n)) for n in (height, width)]
    array, grid = on_grid(da.zeros((2, height, width), chunks=((1, 1), *chunks)), 64)
    spec = spec_of(height, width, 2, blocksize=64)
    step = spec.chunk_step(spec.local_levels(grid))
    assert array.shape == (2, height, width)
    assert array.numblocks[0] == 1
    for sides in array.chunks[1:]:
        assert all(border % step == 0 for border in np.cumsum(sides)[:-1])
    # A level at least is made without reading back, where there is one.
    assert spec.local_levels(grid) >= min(1, len(spec.shapes) - 1)


def test_chunks_that_fit_stay_as_they_are():
    data = da.zeros((1, 6000, 6000), chunks=(1, (2048, 1024, 2928), 2048), dtype="u1")
    array, grid = on_grid(data, 512)
    assert array.chunks == data.chunks
    assert grid == (1024, 2048)


def test_many_bands_get_smaller_chunks():
    data = da.zeros((64, 4096, 4096), chunks=(1, 700, 700), dtype="f4")
    assert on_grid(data, 512)[0].chunks[1:] == ((1024,) * 4, (1024,) * 4)


def test_one_task_per_chunk(tmp_path):
    side = 1024
    data = (numbered(side, 128) + 1).astype("u1")
    storing = store_cog(data, spec_of(side, side, blocksize=64), str(tmp_path / "out.tif"))
    # Beside the chunks: begin and finish.
    assert len(dict(storing.__dask_graph__())) == 64 + 2
    assert list(flatten(storing.__dask_keys__())) == [storing.key]


@pytest.mark.parametrize("repeat", range(5))
def test_two_processes_lose_no_block(tmp_path, two_workers, repeat):
    path = tmp_path / "out.tif"
    storing = di.write_cog(scene(numbered(1024, 128)), path, blocksize=64, compute=False)
    assert not path.exists()
    assert two_workers.compute(storing).result() == str(path)
    expected = np.arange(8)[:, None] * 16 + np.arange(8)
    with rasterio.open(path) as dataset:
        np.testing.assert_array_equal(dataset.read(1), expected.repeat(128, 0).repeat(128, 1))
        assert dataset.overviews(1) == [2, 4, 8, 16]
    assert os.listdir(tmp_path) == ["out.tif"]


def test_an_array_in_memory(tmp_path):
    pixels = np.arange(300 * 200, dtype="f4").reshape(1, 300, 200)
    path = tmp_path / "out.tif"
    assert di.write_cog(scene(pixels, _FillValue=np.nan), path) is None
    with rasterio.open(path) as dataset:
        np.testing.assert_array_equal(dataset.read(), pixels)
        assert dataset.transform == TRANSFORM
        assert np.isnan(dataset.nodata)


def fails_at(number):
    def change(block, block_info=None):
        if block_info[0]["chunk-location"][1] == number:
            raise ZeroDivisionError("in the chunk")
        return block

    return change


@pytest.mark.parametrize("lazily", [False, True])
def test_a_chunk_that_fails_leaves_nothing(tmp_path, lazily):
    data = numbered(1024, 128).map_blocks(fails_at(5), dtype="u1")
    path = tmp_path / "out.tif"
    writing = di.write_cog(scene(data), path, blocksize=64, compute=False)
    write = writing.compute if lazily else partial(di.write_cog, scene(data), path, blocksize=64)
    with pytest.raises(ZeroDivisionError, match="in the chunk"):
        write()
    assert os.listdir(tmp_path) == []


def test_a_finish_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "out.tif"
    path.write_bytes(b"old")

    def full(self, output, layout):
        raise OSError(28, "No space left on device", output)

    monkeypatch.setattr(WorkFile, "finish", full)
    with pytest.raises(OSError, match="No space left"):
        di.write_cog(scene(numbered(256, 128)), path, blocksize=64, overwrite=True)
    assert os.listdir(tmp_path) == ["out.tif"]
    assert path.read_bytes() == b"old"


def test_it_can_be_computed_again(tmp_path):
    path = tmp_path / "out.tif"
    storing = di.write_cog(scene(numbered(256, 128)), path, blocksize=64, compute=False)
    storing.compute(scheduler="sync")
    first = path.read_bytes()
    path.unlink()
    storing.compute(scheduler="threads")
    assert path.stat().st_size == len(first)
    assert os.listdir(tmp_path) == ["out.tif"]


def test_the_worker_that_knew_of_the_file_may_be_lost(tmp_path):
    """Its task runs again, and must not start the file anew."""
    from daskinfer.draft import Draft
    from daskinfer.store import _append, _begin, _Target

    spec = spec_of(128, 128, blocksize=64)
    partial = str(tmp_path / "out.tif.writing")
    draft = Draft(spec, (128, 128))
    target = _Target(partial, str(tmp_path / "out.tif"), None, draft)
    pixels = class_map(spec)
    _begin(target)
    _append(pixels, target, block_info={0: {"array-location": [(0, 1), (0, 128), (0, 128)]}})
    _begin(target)
    with WorkFile.open(partial, spec, (128, 128)) as work:
        assert work.done().all()


def test_what_workers_import_is_light():
    code = (
        "import sys, daskinfer.store;"
        "print([m for m in ('torch', 'rioxarray', 'distributed') if m in sys.modules])"
    )
    assert in_new_process(code) == "[]"


@pytest.mark.parametrize(("dtype", "written"), [("bool", "uint8"), ("float16", "float32")])
def test_dtypes_that_tiff_lacks_are_written_without_loss(tmp_path, dtype, written):
    pixels = np.random.default_rng(0).integers(0, 2, (1, 40, 50)).astype(dtype)
    di.write_cog(scene(pixels), tmp_path / "o.tif")
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert dataset.dtypes == (written,)
        assert np.array_equal(dataset.read(), pixels)


def test_codecs_in_capitals_and_blocks_that_are_chosen(tmp_path):
    pixels = np.arange(2 * 700 * 90, dtype=np.uint16).reshape(2, 700, 90)
    di.write_cog(scene(pixels), tmp_path / "o.tif", compress="ZSTD", blocksize="auto")
    di.write_cog(scene(pixels), tmp_path / "o.vrt", split=256)
    for name, block in (("o.tif", 512), ("o_files/o_r00_c00.tif", 256)):
        with rasterio.open(tmp_path / name) as dataset:
            assert dataset.block_shapes[0] == (block, block)
    for name in ("o.tif", "o.vrt"):
        with rasterio.open(tmp_path / name) as dataset:
            assert np.array_equal(dataset.read(), pixels)


def test_a_store_is_not_written_as_a_file(tmp_path):
    with pytest.raises(ValueError, match=r"name it \.tif; daskinfer\.run writes Zarr"):
        di.write_cog(scene(np.zeros((1, 8, 8), np.uint8)), tmp_path / "o.zarr")
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_files_do_not_have_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"'tiled' of a file; known: level, .*sparse"):
        di.write_cog(scene(np.zeros((1, 8, 8), np.uint8)), tmp_path / "o.tif", tiled=True)
    assert list(tmp_path.iterdir()) == []


def test_names_of_bands_are_kept(tmp_path):
    array = scene(np.zeros((3, 8, 8), np.uint8)).assign_coords(band=["red", "nir", "3"])
    di.write_cog(array, tmp_path / "o.tif")
    di.write_cog(array.isel(band=1), tmp_path / "one.tif")
    with rasterio.open(tmp_path / "o.tif") as three, rasterio.open(tmp_path / "one.tif") as one:
        assert (three.descriptions, one.descriptions) == (("red", "nir", "3"), ("nir",))


def test_a_question_about_classes_has_no_names_of_theirs(tmp_path):
    model = di.load_model(
        Pixel(), class_names=["water", "soil"], class_colors=["#0000ff", "#804000"]
    )
    scene = di.open_raster(write_raster(tmp_path / "s.tif", noise(2, 40, 50)))
    found = di.predict(scene, model)
    di.write_cog(found == 1, tmp_path / "soil.tif")
    with rasterio.open(tmp_path / "soil.tif") as dataset:
        np.testing.assert_array_equal(dataset.read(), found.to_numpy() == 1)
        assert dataset.dtypes == ("uint8",)
        assert dataset.nodata is None
        assert "CLASS_NAMES" not in dataset.tags()
        assert dataset.colorinterp[0].name != "palette"


def test_nodata_of_floats_is_none_of_whole_numbers(tmp_path):
    model = di.load_model(Pixel(), output="probabilities", activation="softmax")
    scene = di.open_raster(write_raster(tmp_path / "s.tif", noise(2, 40, 50)))
    scores = di.predict(scene, model)
    percent = (scores * 100).round().astype("uint8")
    with pytest.raises(ValueError, match=r"nodata nan .*assign_attrs\(_FillValue=255\)"):
        di.write_cog(percent, tmp_path / "p.tif")
    di.write_cog(percent.assign_attrs(_FillValue=255), tmp_path / "p.tif")
    with rasterio.open(tmp_path / "p.tif") as dataset:
        np.testing.assert_array_equal(dataset.read(), percent.to_numpy())
        assert dataset.nodata == 255


def test_an_existing_file_is_refused(tmp_path):
    path = tmp_path / "out.tif"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        di.write_cog(scene(numbered(256, 128)), path)
    assert path.read_bytes() == b"old"


def test_an_array_of_one_lazy_chunk_is_written_once(tmp_path):
    """Fused into its only chunk, the making of the work file would run twice at one time."""
    lazy = da.zeros((1, 32, 48), np.uint8, chunks=-1).map_blocks(lambda block: block + 7)
    array = xr.DataArray(lazy, dims=("band", "y", "x"))
    for number in range(5):
        path = tmp_path / f"{number}.tif"
        di.write_cog(array, path, blocksize=16)
        with rasterio.open(path) as dataset:
            assert (dataset.read() == 7).all()
    assert len(list(tmp_path.iterdir())) == 5
