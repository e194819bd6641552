"""An output in several files: each a COG of its own, together equal to the output in one."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pytest
import rasterio
import rasterio.warp
from hypothesis import given, settings
from hypothesis import strategies as st
from rasterio.transform import Affine

import daskinfer as di
from cogs import assert_valid, chunks_of, class_map, levels_of, noise_of, pyramid, spec_of
from conftest import write_raster
from daskinfer.cog import CogSpec
from daskinfer.demo import demo_path
from daskinfer.draft import Draft
from daskinfer.info import describe_file
from daskinfer.progress import _blocks, read_progress
from daskinfer.splitting.pieces import MOST_FILES, Pieces, Places
from daskinfer.splitting.work import SplitWork
from test_runner import Poisoned
from test_store import numbered, scene


def fill(work, draft, array, numbers=None):
    chunks = list(chunks_of(draft.spec, draft.chunk))
    for number in range(len(chunks)) if numbers is None else numbers:
        row, col, part = chunks[number]
        work.append(draft.encode(array[part], row, col))


def written(folder, draft, array, layout="strict"):
    path = str(folder / "out.vrt")
    with draft.create(f"{path}.partial") as work:
        fill(work, draft, array)
        work.finish(path, layout)
    return path


def check_split(path, draft, array):
    """Every file is valid and has its part; the VRT has the whole, and all overviews."""
    spec, pieces = draft.spec, draft.pieces
    places = Places(path, pieces.grid)
    for index in pieces:
        rows, cols = pieces.window(index).slices()
        piece = places.piece(index)
        assert_valid(piece, pieces.spec_of(index))
        with rasterio.open(piece) as dataset:
            np.testing.assert_array_equal(dataset.read(), array[:, rows, cols])
            if spec.transform is not None:
                corner = Affine(*spec.transform) @ (cols.start, rows.start)
                assert dataset.transform @ (0, 0) == pytest.approx(corner, rel=1e-15)
    levels, expected = levels_of(path), pyramid(array, spec)
    assert [level.shape for level in levels] == [level.shape for level in expected]
    np.testing.assert_array_equal(levels[0], array)
    return levels, expected


@settings(max_examples=15)
@given(st.data())
def test_any_size(tmp_path_factory, data):
    height, width = (data.draw(st.integers(1, 300)) for _ in range(2))
    bands, chunk = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([16, 32, 64]))
    options = {"nodata": data.draw(st.sampled_from([None, 3])), "blocksize": 16}
    spec = spec_of(height, width, bands, **options)
    draft = Draft(spec, (chunk, chunk), 32 * data.draw(st.integers(1, 4)) if chunk < 64 else 64)
    pixels = class_map(spec, data.draw(st.integers(0, 99)))
    path = written(tmp_path_factory.mktemp("any"), draft, pixels)
    check_split(path, draft, pixels)


@pytest.mark.parametrize("layout", ["strict", "append"])
@pytest.mark.parametrize(("dtype", "resampling"), [("uint8", "mode"), ("float32", "average")])
def test_overviews_equal_those_of_one_file(tmp_path, dtype, resampling, layout):
    spec = spec_of(900, 1001, 1, dtype, blocksize=32, nodata=3, resampling=resampling)
    draft = Draft(spec, (128, 128), 256)
    pixels = class_map(spec)
    if dtype == "float32":
        pixels = np.where(pixels == 3, pixels, np.random.default_rng(0).random(pixels.shape, "f4"))
    path = written(tmp_path, draft, pixels, layout)
    levels, expected = check_split(path, draft, pixels)
    assert len(levels) == 6
    for level, wanted in zip(levels, expected, strict=True):
        np.testing.assert_allclose(level, wanted, rtol=1e-5, atol=1e-6)
    with rasterio.open(path) as dataset:
        assert dataset.overviews(1) == [2, 4, 8, 16, 31]  # as rasterio counts them of one file
    assert sorted(os.listdir(tmp_path)) == ["out.vrt", "out_files"]
    names = {
        name.partition("_r")[0]
        for name in os.listdir(tmp_path / "out_files")
        if not name.endswith(".json")
    }
    assert names == {
        "out",
        "out_overviews.tif",
        *(f"out_overview_{1 << k}.vrt" for k in range(1, 6)),
    }


def test_border_files_too_small_for_an_overview_are_resampled(tmp_path):
    spec = spec_of(260, 260, blocksize=16, nodata=255)
    draft = Draft(spec, (128, 128), 128)
    pixels = np.full((1, 260, 260), 7, np.uint8)
    path = written(tmp_path, draft, pixels)
    for level in levels_of(path):
        assert (level == 7).all()


def test_metadata_is_that_of_one_file(tmp_path):
    spec = spec_of(
        200,
        150,
        2,
        "float32",
        nodata=-9.5,
        blocksize=16,
        resampling="average",
        descriptions=("wood & field", "höhe"),
        tags=(("TIFFTAG_SOFTWARE", "tests"), ("MADE", "<by> & for")),
        band_tags=((("unit", "m"),), (("unit", "%"),)),
        failures=True,
    )
    pixels = noise_of(spec)
    pixels[0, :70, :50] = -9.5
    one, several = (Draft(spec, (64, 64), split) for split in (None, 64))
    work = one.create(str(tmp_path / "one.tif.partial"))
    fill(work, one, pixels)
    work.finish(str(tmp_path / "one.tif"))
    path = written(tmp_path, several, pixels)
    with rasterio.open(tmp_path / "one.tif") as whole, rasterio.open(path) as dataset:
        for name in ("crs", "transform", "nodata", "dtypes", "descriptions", "colorinterp"):
            assert getattr(dataset, name) == getattr(whole, name), name
        assert dataset.tags() == whole.tags()
        for band in (1, 2):
            told, wanted = dataset.tags(band), whole.tags(band)
            assert told.keys() == wanted.keys()
            for name in wanted:
                if name.startswith("STATISTICS"):
                    assert float(told[name]) == pytest.approx(float(wanted[name]), rel=1e-9)
                else:
                    assert told[name] == wanted[name]


def test_colours_and_classes(tmp_path):
    colors = ((0, 0, 0, 255), (200, 10, 30, 255), (5, 6, 7, 255))
    names = ["sea", "land & wood", "ice"]
    spec = spec_of(
        100,
        100,
        nodata=255,
        blocksize=16,
        colors=colors,
        tags=(("CLASS_NAMES", json.dumps(names)),),
    )
    draft = Draft(spec, (32, 32), 64)
    path = written(tmp_path, draft, class_map(spec) % 3)
    with rasterio.open(path) as dataset:
        assert [dataset.colormap(1)[value] for value in range(3)] == list(colors)
        assert json.loads(dataset.tags()["CLASS_NAMES"]) == names
    text = (tmp_path / "out.vrt").read_text()
    assert "<Category>land &amp; wood</Category>" in text
    # Moved together, they still are one raster.
    (tmp_path / "moved").mkdir()
    for name in ("out.vrt", "out_files"):
        os.rename(tmp_path / name, tmp_path / "moved" / name)
    with rasterio.open(tmp_path / "moved" / "out.vrt") as dataset:
        np.testing.assert_array_equal(dataset.read(), class_map(spec) % 3)


def test_large_numbers_as_nodata(tmp_path):
    spec = CogSpec(64, 64, 1, "int64", nodata=-(2**62) - 1, blocksize=32)
    path = written(tmp_path, Draft(spec, (32, 32), 32), np.full((1, 64, 64), 5, np.int64))
    assert f"<NoDataValue>{-(2**62) - 1}</NoDataValue>" in (tmp_path / "out.vrt").read_text()
    with rasterio.open(path) as dataset:
        assert (dataset.read() == 5).all()


def test_the_unfinished_output_opens_at_any_moment(tmp_path):
    spec = spec_of(200, 200, nodata=255, blocksize=16)
    draft, pixels = Draft(spec, (32, 32), 64), None
    pixels = class_map(spec) % 5
    path = f"{tmp_path}/out.vrt.partial"
    with draft.create(path) as work:
        chunks = list(chunks_of(spec, (32, 32)))
        expected = np.full_like(pixels, 255)
        for number in (0, 5, 17, 48):
            fill(work, draft, pixels, [number])
            part = chunks[number][2]
            expected[part] = pixels[part]
            with rasterio.open(path) as dataset:
                np.testing.assert_array_equal(dataset.read(), expected)
    with draft.open(path) as work:
        done = work.done()
        assert [int(n) for n in np.flatnonzero(done)] == [0, 5, 17, 48]
        with pytest.raises(RuntimeError, match="blocks are missing"):
            work.finish(f"{tmp_path}/out.vrt")
        assert isinstance(work, SplitWork)
        work.finish(f"{tmp_path}/out.vrt", allow_missing=True)
    with rasterio.open(tmp_path / "out.vrt") as dataset:
        np.testing.assert_array_equal(dataset.read(), expected)
    assert sorted(os.listdir(tmp_path)) == ["out.vrt", "out_files"]


@pytest.mark.parametrize("stop", range(6))
def test_a_finish_that_was_stopped_is_gone_on_with(tmp_path, monkeypatch, stop):
    """At each of the names that are given: COGs, overviews, the VRT."""
    spec = spec_of(200, 200, nodata=255, blocksize=16)
    draft, pixels = Draft(spec, (32, 32), 128), class_map(spec)
    path = f"{tmp_path}/out.vrt"
    with draft.create(f"{path}.partial") as work:
        fill(work, draft, pixels)
    names, replace = itertools.count(), os.replace

    def stopped(source, target):
        if next(names) == stop:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched, draft.open(f"{path}.partial") as work:
        patched.setattr(os, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            work.finish(path)
    assert not os.path.exists(path)
    assert _blocks(f"{path}.partial")[0].all()
    with draft.open(f"{path}.partial") as work:
        assert work.done().all()
        work.finish(path)
    check_split(path, draft, pixels)
    assert not any(".partial" in name for name in os.listdir(tmp_path / "out_files"))


# ---- runs ----------------------------------------------------------------------------------------


def source_and_model(folder):
    from conftest import N3, noise, seeded, write_raster

    source = write_raster(folder / "scene.tif", noise(2, 150, 170))
    names = ["sea", "land", "ice"]
    return source, di.load_model(seeded(N3), output="classes", class_names=names)


def test_a_run_equals_that_into_one_file(tmp_path, one_worker):
    source, model = source_and_model(tmp_path)
    options = {"tile": 32, "chunk": 32, "client": one_worker}
    di.run(source, model, tmp_path / "one.tif", **options)
    report = di.run(source, model, tmp_path / "many.vrt", split=64, **options)
    files = list((tmp_path / "many_files").glob("many_r*_c*.tif"))
    assert len(files) == 9
    assert report.file_bytes > sum(file.stat().st_size for file in files)
    with rasterio.open(tmp_path / "one.tif") as one, rasterio.open(tmp_path / "many.vrt") as many:
        np.testing.assert_array_equal(many.read(), one.read())
        assert many.overviews(1) == one.overviews(1)
        assert many.tags() == one.tags()
    assert sorted(os.listdir(tmp_path)) == ["many.vrt", "many_files", "one.tif", "scene.tif"]


def test_a_run_goes_on(tmp_path, one_worker):
    from daskinfer.monitor import ChunkDone

    source, model = source_and_model(tmp_path)
    options = {"tile": 32, "chunk": 32, "client": one_worker, "split": 64}
    done = []

    def stop(event):
        if isinstance(event, ChunkDone):
            done.append(event.chunk)
            if len(done) == 5:
                raise KeyboardInterrupt

    path = tmp_path / "out.vrt"
    with pytest.raises(KeyboardInterrupt):
        di.run(source, model, path, callbacks=[stop], **options)
    progress = read_progress(f"{path}.partial")
    assert progress is not None
    assert progress.states.shape == (4, 5)  # a short last row is part of the one before
    assert progress.count("done") >= 5
    assert progress.count("missing") == 20 - progress.count("done")
    assert f"{progress.count('done')} of 20 chunks" in describe_file(f"{path}.partial")
    with pytest.raises(ValueError, match=r"split: 64 then, 128 now"):
        di.run(source, model, path, **options | {"split": 128})
    report = di.run(source, model, path, **options)
    assert report.complete
    assert report.resumed >= 5
    di.run(source, model, tmp_path / "one.tif", tile=32, chunk=32, client=one_worker)
    with rasterio.open(path) as many, rasterio.open(tmp_path / "one.tif") as one:
        np.testing.assert_array_equal(many.read(), one.read())


def test_failed_chunks_are_counted_in_their_file_and_in_the_vrt(tmp_path):
    spec = spec_of(128, 128, nodata=255, blocksize=16, failures=True)
    draft = Draft(spec, (32, 32), 64)
    path = f"{tmp_path}/out.vrt"
    with draft.create(f"{path}.partial") as work:
        fill(work, draft, class_map(spec))
        work.finish(path, failed=[(96, 32), (64, 0)])
    with rasterio.open(path) as dataset:
        assert dataset.tags()["FAILED_CHUNKS"] == "2"
    counts = {}
    for index in draft.pieces:
        with rasterio.open(Places(path, draft.pieces.grid).piece(index)) as dataset:
            counts[index] = dataset.tags().get("FAILED_CHUNKS")
    assert counts == {(0, 0): None, (0, 1): None, (1, 0): "2", (1, 1): None}


def test_a_run_with_a_chunk_that_fails(tmp_path, one_worker):
    raw = np.ones((1, 96, 130), np.uint8)
    raw[0, 40, 100] = 13
    source = write_raster(tmp_path / "scene.tif", raw, nodata=0)
    options = {"tile": 32, "chunk": 32, "split": 64, "on_error": "nodata", "client": one_worker}
    report = di.run(source, Poisoned(), tmp_path / "out.vrt", **options)
    assert [failure.window for failure in report.failures] == [(32, 96, 32, 34)]
    expected = np.ones((96, 130), np.uint8)
    expected[32:64, 96:] = 255
    with rasterio.open(tmp_path / "out.vrt") as dataset:
        np.testing.assert_array_equal(dataset.read(1), expected)
        assert dataset.tags()["FAILED_CHUNKS"] == "1"
    assert (tmp_path / "out.vrt.failed.jsonl").exists()


# ---- what is chosen, and what is refused ---------------------------------------------------------


def test_chunks_are_chosen_for_the_files(tmp_path):
    source, model = source_and_model(tmp_path)
    plan = di.plan(source, model, tmp_path / "out.vrt", split=160, tile=32)
    assert 160 % plan.inference.chunk[0] == 0 or plan.inference.chunk[0] % 160 == 0
    assert 160 % plan.cog.blocksize == 0
    assert "1 x 2 of 160 px, in out_files" in repr(plan)
    plan = di.plan(source, model, tmp_path / "out.vrt", tile=32, chunk=32)
    assert plan.split == 131072


def test_a_tile_that_is_larger_than_files(tmp_path):
    """The scene is one tile high, 384 px, of which no file of 256 px is made."""
    options = {"split": 256, "blocksize": 128}
    plan = di.plan(demo_path(), di.demo_model(), tmp_path / "out.vrt", **options)
    assert plan.split == 256
    assert all(side % 256 == 0 or 256 % side == 0 for side in plan.inference.chunk)


def refusal(folder, output="out.vrt", **options):
    source, model = source_and_model(folder)
    with pytest.raises((ValueError, OSError)) as caught:
        di.plan(source, model, folder / output, tile=32, **options)
    return str(caught.value)


def test_what_does_not_fit_is_refused(tmp_path):
    assert "name it .vrt" in refusal(tmp_path, "out.tif", split=64)
    assert "pass split=96" in refusal(tmp_path, split=64, chunk=48, blocksize=16)
    assert "multiple of the block size 64: pass split=128" in refusal(
        tmp_path, split=100, blocksize=64
    )
    for split in (0, -64, 64.0, "half", True):
        assert "split must be" in refusal(tmp_path, split=split)
    with pytest.raises(ValueError, match=f"more than {MOST_FILES}"):
        Pieces(CogSpec(10**6, 10**6, 1, "uint8"), 512)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a\\b.vrt", "with a backslash"),
        (" a.vrt", "begins with a blank"),
        ("a\udcff.vrt", "not in UTF-8"),
    ],
)
def test_names_by_which_gdal_does_not_find_files_are_refused(tmp_path, name, message):
    assert message in refusal(tmp_path, name, split=64)
    with pytest.raises(ValueError, match=message):
        di.write_cog(scene(numbered(128, 64)), tmp_path / name)
    assert os.listdir(tmp_path) == ["scene.tif"]


@pytest.mark.parametrize("name", ["a .vrt", "a&<b>'\".vrt", "a#?%20[x]{y},$.vrt", "ä\n.vrt"])
def test_other_names_are_as_good_as_any(tmp_path, name):
    data = numbered(128, 64)
    di.write_cog(scene(data), tmp_path / name, blocksize=64, split=64)
    with rasterio.open(tmp_path / name) as dataset:
        np.testing.assert_array_equal(dataset.read(), data.compute(scheduler="sync"))


def test_files_of_others_are_not_touched(tmp_path, one_worker):
    folder = tmp_path / "out_files"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        assert "notes.txt" in refusal(tmp_path, split=64, overwrite=overwrite)
    (folder / "notes.txt").rename(folder / "out_r00_c00.tif")
    assert "overwrite=True" in refusal(tmp_path, split=64)
    (folder / "out_r99_c99.tif").write_text("of an earlier grid")
    source, model = source_and_model(tmp_path)
    di.run(
        source, model, tmp_path / "out.vrt", tile=32, split=64, overwrite=True, client=one_worker
    )
    assert not (folder / "out_r99_c99.tif").exists()
    assert "overwrite=True" in refusal(tmp_path, split=64)  # of the VRT


def test_overwriting_keeps_the_old_output_until_the_end(tmp_path):
    spec = spec_of(64, 64, nodata=255, blocksize=16)
    draft, old = Draft(spec, (32, 32), 32), np.full((1, 64, 64), 1, np.uint8)
    path = written(tmp_path, draft, old)
    with draft.create(f"{path}.partial") as work:
        fill(work, draft, 2 * old)
        with rasterio.open(path) as dataset:
            np.testing.assert_array_equal(dataset.read(), old)
        work.finish(path)
    with rasterio.open(path) as dataset:
        np.testing.assert_array_equal(dataset.read(), 2 * old)


# ---- from dask arrays ----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [128, 100, 256])
def test_write_cog(tmp_path, chunk):
    data = numbered(700, chunk)
    path = tmp_path / "out.vrt"
    with di.cluster("local", dashboard_address=":0", set_as_default=False) as client:
        storing = di.write_cog(scene(data), path, blocksize=64, split=256, compute=False)
        assert client.compute(storing).result() == str(path)
    with rasterio.open(path) as dataset:
        np.testing.assert_array_equal(dataset.read(), data.compute(scheduler="sync"))
    assert len(list((tmp_path / "out_files").glob("out_r*_c*.tif"))) == 9
    assert sorted(os.listdir(tmp_path)) == ["out.vrt", "out_files"]


def test_a_name_in_capitals(tmp_path):
    data = numbered(256, 128)
    di.write_cog(scene(data), tmp_path / "a.vrt.OUT.VRT", blocksize=64, split=128)
    with rasterio.open(tmp_path / "a.vrt.OUT.VRT") as dataset:
        np.testing.assert_array_equal(dataset.read(), data.compute(scheduler="sync"))


def test_write_cog_that_fails_leaves_nothing(tmp_path):
    from test_store import fails_at

    data = numbered(512, 128).map_blocks(fails_at(3), dtype="u1")
    with pytest.raises(ZeroDivisionError):
        di.write_cog(scene(data), tmp_path / "out.vrt", blocksize=64, split=128)
    assert os.listdir(tmp_path) == []


def test_write_cog_in_either_layout(tmp_path):
    data = scene(numbered(512, 128))
    layouts = {}
    for layout in ("strict", "append"):
        di.write_cog(data, tmp_path / f"{layout}.tif", blocksize=64, layout=layout)
        assert_valid(tmp_path / f"{layout}.tif", spec_of(512, 512))
        with rasterio.open(tmp_path / f"{layout}.tif") as dataset:
            layouts[layout] = dataset.tags(ns="IMAGE_STRUCTURE").get("LAYOUT")
            np.testing.assert_array_equal(dataset.read(), data.compute(scheduler="sync"))
    assert layouts == {"strict": "COG", "append": None}
    with pytest.raises(ValueError, match="'strict' or 'append'"):
        di.write_cog(data, tmp_path / "x.tif", layout="loose")


# ---- STAC ----------------------------------------------------------------------------------------


def test_items_and_their_collection(tmp_path):
    pystac = pytest.importorskip("pystac", reason="needs: pip install 'daskinfer[stac]'")
    colors = ((0, 0, 255, 255), (0, 255, 0, 255))
    spec = spec_of(
        100, 90, nodata=255, blocksize=16, colors=colors, descriptions=("class",),
        tags=(("CLASS_NAMES", json.dumps(["sea", "land"])),),
    )  # fmt: skip
    draft, pixels = Draft(spec, (32, 32), 64), class_map(spec) % 2
    path = written(tmp_path, draft, pixels)
    folder = tmp_path / "out_files"
    collection = pystac.Collection.from_file(str(folder / "out.collection.json"))
    items = {item.id: item for item in collection.get_items()}
    assert sorted(items) == [f"out_r0{i}_c0{j}" for i in (0, 1) for j in (0, 1)]
    west, south, east, north = collection.extent.spatial.bboxes[0]
    for name, item in items.items():
        asset = item.assets["data"]
        assert asset.href == f"./{name}.tif"
        with rasterio.open(folder / f"{name}.tif") as dataset:
            assert item.properties["proj:shape"] == [dataset.height, dataset.width]
            assert item.properties["proj:transform"] == list(dataset.transform)
            assert item.properties["proj:bbox"] == list(dataset.bounds)
            box = rasterio.warp.transform_bounds(dataset.crs, "EPSG:4326", *dataset.bounds)
        assert item.bbox == pytest.approx(box, abs=1e-6)
        assert west <= item.bbox[0] < item.bbox[2] <= east
        assert south <= item.bbox[1] < item.bbox[3] <= north
        assert item.properties["proj:code"] == "EPSG:32633"
        assert asset.extra_fields["raster:bands"] == [{"data_type": "uint8", "nodata": 255}]
        classes = asset.extra_fields["classification:classes"]
        told = [(c["value"], c["name"], c["color_hint"]) for c in classes]
        assert told == [(0, "sea", "0000FF"), (1, "land", "00FF00")]
        # Everything names everything else by relative paths.
        assert str(tmp_path) not in json.dumps(item.to_dict(include_self_link=False))
    assert str(tmp_path) not in (folder / "out.collection.json").read_text()
    # What is written here can be read here.
    again = di.open_raster(list(items.values()), bands=["data"])
    np.testing.assert_array_equal(again.values, pixels)
    with rasterio.open(path) as dataset:
        np.testing.assert_array_equal(dataset.read(), pixels)


def test_no_items_without_a_place_or_without_pystac(tmp_path, monkeypatch):
    spec = CogSpec(64, 64, 1, "uint8", blocksize=16)
    draft = Draft(spec, (32, 32), 32)
    written(tmp_path, draft, np.ones((1, 64, 64), np.uint8))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "b").mkdir()
    placed = Draft(spec_of(64, 64, blocksize=16), (32, 32), 32)
    written(tmp_path / "b", placed, np.ones((1, 64, 64), np.uint8))
    assert not list(tmp_path.glob("**/*.json"))


def test_bands_that_are_resampled_differently(tmp_path):
    """Also in the overviews above those of the files, and in small files at the border."""
    resampling = ("mode", "average")
    spec = spec_of(300, 290, 2, nodata=255, blocksize=16, resampling=resampling)
    draft = Draft(spec, (32, 32), 64)
    pixels = np.concatenate([class_map(spec)[:1] % 7, class_map(spec, 1)[1:] * 50])
    pixels[:, -50:, -50:] = 40
    path = written(tmp_path, draft, pixels)
    one = Draft(spec, (32, 32))
    with one.create(str(tmp_path / "one.tif.partial")) as work:
        fill(work, one, pixels)
        work.finish(str(tmp_path / "one.tif"))
    for level, wanted in zip(levels_of(path), levels_of(tmp_path / "one.tif"), strict=True):
        np.testing.assert_array_equal(level, wanted)
