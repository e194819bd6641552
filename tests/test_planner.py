"""`plan`: everything is decided and refused before work starts, and the plan is small."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc

import dask.array as da
import numpy as np
import pytest
import rasterio
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import daskinfer as di
from conftest import N3, P4, TRANSFORM, noise, seeded, write_raster
from daskinfer.raster import Raster

NAMES = ("red", "nir")


@pytest.fixture
def source(tmp_path):
    return write_raster(tmp_path / "scene.tif", noise(2, 120, 150), descriptions=NAMES)


@pytest.fixture
def untouched(monkeypatch):
    """Reading pixels or measuring the model is an error."""

    def refuse(*_, **__):
        raise AssertionError("work was done before the refusal")

    monkeypatch.setattr(Raster, "read", refuse)
    monkeypatch.setattr("daskinfer.settle.receptive_field", refuse)


@pytest.fixture
def model():
    return di.load_model(seeded(N3))


# --- refusals before any work ---------------------------------------------------------------------


@pytest.mark.usefixtures("untouched")
class TestRefusedBeforeAnyWork:
    def test_a_source_that_is_missing(self, tmp_path, model):
        with pytest.raises(FileNotFoundError, match=r"nowhere\.tif.*no such file"):
            di.plan(tmp_path / "nowhere.tif", model, tmp_path / "out.tif")

    def test_a_source_that_is_no_raster(self, tmp_path, model):
        (tmp_path / "a.tif").write_text("not a raster")
        with pytest.raises(ValueError, match="not a raster that GDAL opens"):
            di.plan(tmp_path / "a.tif", model, tmp_path / "out.tif")

    def test_a_source_with_another_number_of_bands_names_both_numbers(self, source, tmp_path):
        model = di.load_model(seeded(N3, 5))
        with pytest.raises(ValueError, match=r"takes 5 bands, the source has 2 \(red, nir\)"):
            di.plan(source, model, tmp_path / "out.tif")

    def test_a_band_that_is_unknown_names_both_lists(self, source, tmp_path, model):
        model = model.patch(bands=["nir", "swir"])
        both = r"no band 'swir': wanted \['nir', 'swir'\], there are \['red', 'nir'\]"
        with pytest.raises(ValueError, match=both):
            di.plan(source, model, tmp_path / "out.tif")

    def test_what_is_no_model(self, source, tmp_path):
        with pytest.raises(TypeError, match="not a model: got int"):
            di.plan(source, 7, tmp_path / "out.tif")
        with pytest.raises(FileNotFoundError, match=r"nowhere\.pt2"):
            di.plan(source, "nowhere.pt2", tmp_path / "out.tif")

    def test_an_output_in_a_folder_that_is_missing(self, source, tmp_path, model):
        with pytest.raises(FileNotFoundError, match=r"nowhere' does not exist: make it"):
            di.plan(source, model, tmp_path / "nowhere" / "out.tif")

    def test_an_output_in_a_folder_that_is_not_writable(self, source, tmp_path, model, monkeypatch):
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
        with pytest.raises(PermissionError, match="is not writable"):
            di.plan(source, model, tmp_path / "out.tif")

    def test_an_output_that_exists(self, source, tmp_path, model):
        (tmp_path / "out.tif").write_text("precious")
        with pytest.raises(FileExistsError, match=r"out\.tif' exists: pass overwrite=True"):
            di.plan(source, model, tmp_path / "out.tif")
        assert (tmp_path / "out.tif").read_text() == "precious"

    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("link", [None, os.link, os.symlink])
    def test_an_output_that_is_the_source_by_any_name(
        self, source, tmp_path, model, link, overwrite
    ):
        output = source
        if link is not None:
            output = tmp_path / "link.tif"
            link(source, output)
        with pytest.raises(ValueError, match="is the source itself"):
            di.plan(source, model, output, overwrite=overwrite)

    @pytest.mark.parametrize("name", ["out", "out.png", "out.tif.gz"])
    def test_an_output_that_is_not_called_a_tif(self, source, tmp_path, model, name):
        with pytest.raises(ValueError, match=r"writes GeoTIFF, name it \.tif"):
            di.plan(source, model, tmp_path / name)

    def test_an_output_that_is_a_folder(self, source, tmp_path, model):
        (tmp_path / "out.tif").mkdir()
        with pytest.raises(ValueError, match="is a folder"):
            di.plan(source, model, tmp_path / "out.tif", overwrite=True)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"on_error": "ignore"}, "on_error must be 'raise' or 'nodata', got 'ignore'"),
            ({"precision": "int8"}, "precision must be one of"),
            (
                {"window": (0, 0, 121, 10)},
                r"\(0, 0, 121, 10\) lies outside the raster of 120 x 150",
            ),
        ],
    )
    def test_options_that_make_no_sense(self, source, tmp_path, model, option, message):
        with pytest.raises(ValueError, match=message):
            di.plan(source, model, tmp_path / "out.tif", **option)


# --- refusals that need the model -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["class_names", "class_colors"])
def test_names_for_another_number_of_classes_are_refused_with_both_numbers(
    source, tmp_path, model, name
):
    entries = {"class_names": ["a", "b"], "class_colors": ["#000000", "#ffffff"]}[name]
    with pytest.raises(ValueError, match=f"{name} has 2 entries, the model has 3 classes"):
        di.plan(source, model.patch(**{name: entries}), tmp_path / "out.tif")


def test_one_channel_is_two_classes(source, tmp_path):
    model = di.load_model(seeded(N3, 2, 1), class_names=["land", "water"])
    with pytest.raises(ValueError, match="one score per pixel"):
        di.plan(source, model, tmp_path / "out.tif")
    for how in ({"activation": "sigmoid"}, {"threshold": 0}):
        plan = di.plan(source, model.patch(**how), tmp_path / "out.tif")
        assert plan.inference.form.bands == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"chunk": 0}, "chunk must be .* px from 1 up.* got 0"),
        ({"batch_size": 0}, "batch_size must be 'auto' or at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be 'auto' or at least 1, got 2.5"),
        ({"halo": 30, "tile": 40}, "halo 30 px needs a tile of at least 61, got 40: pass tile=64"),
        ({"overlap": 40, "tile": 40}, "overlap 40 px needs a tile of at least 41, got 40"),
        ({"halo": 4, "overlap": 4}, "halo= .* or overlap= .* not both"),
        ({"halo": -1}, "halo must be .* px from 0 up.* got -1"),
        ({"tile": (64, 64, 64)}, "tile must be"),
        ({"chunk": 64.5}, "chunk must be .* got 64.5"),
        ({"overlap": "big"}, "overlap must be"),
        ({"tol": -1}, "tol must be"),
        ({"blocksize": 512.0}, "blocksize must be"),
        ({"window": (0, 0, 5)}, "window must be"),
        ({"window": (0, 0, 5.0, 5)}, "window must be four whole numbers"),
        ({"blocksize": 100}, "block size 100 is not a multiple of 16"),
        ({"compress": "zip"}, "compress 'zip' is not one of"),
        ({"compress": "deflate", "level": 30}, "level 30 for deflate"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(source, tmp_path, model, option, message):
    with pytest.raises(ValueError, match=message):
        di.plan(source, model, tmp_path / "out.tif", **option)


def test_a_halo_below_the_radius_warns_with_both_numbers(source, tmp_path, model):
    with pytest.warns(UserWarning, match="halo 2 px is below the receptive-field radius 3 px"):
        plan = di.plan(source, model, tmp_path / "out.tif", halo=2)
    assert plan.tiling.halo == (2, 2)


# --- what is decided ------------------------------------------------------------------------------


def test_planning_reads_no_pixel_and_writes_no_file(source, tmp_path, model, monkeypatch):
    monkeypatch.setattr(Raster, "read", lambda *_: pytest.fail("a pixel was read"))
    before = sorted(os.listdir(tmp_path))
    plan = di.plan(source, model, tmp_path / "out.tif")
    assert (plan.tiling.shape, plan.tiling.halo, plan.field.radius) == ((120, 150), (3, 3), (3, 3))
    assert sorted(os.listdir(tmp_path)) == before


def test_an_existing_output_may_be_replaced_when_asked_to(source, tmp_path, model):
    (tmp_path / "out.tif").write_text("old")
    assert di.plan(source, model, tmp_path / "out.tif", overwrite=True).overwrite


def test_bands_are_those_of_the_model_in_its_order(source, tmp_path, model):
    plan = di.plan(source, model.patch(bands=["nir", "red"]), tmp_path / "out.tif")
    assert plan.source.band_names == ("nir", "red")
    assert plan.source.indexes == (2, 1)


def test_tags_of_the_output_come_from_the_output_alone(tmp_path, model):
    raw = noise(2, 20, 30, dtype="int16")
    path = write_raster(tmp_path / "a.tif", raw, nodata=0, descriptions=NAMES)
    with rasterio.open(path, "r+") as dataset:
        dataset.scales, dataset.offsets = (0.1, 0.5), (1, 2)
        dataset.update_tags(SECRET="of the source")
    named = model.patch(class_names=["a", "b", "c"], class_colors=["#ff0000", "#00ff00", "#0000ff"])
    cog = di.plan(path, named, tmp_path / "out.tif").cog
    assert (cog.dtype, cog.nodata, cog.count, cog.descriptions) == ("uint8", 255, 1, ("class",))
    assert dict(cog.tags)["CLASS_NAMES"] == '["a", "b", "c"]'
    assert cog.colors == ((255, 0, 0, 255), (0, 255, 0, 255), (0, 0, 255, 255))
    assert "SECRET" not in dict(cog.tags)
    assert cog.band_tags == ()
    assert cog.transform == tuple(TRANSFORM)[:6]


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    core=st.integers(1, 60),
    chunk=st.just("auto") | st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    blocksize=st.sampled_from(["auto", 16, 256]),
    net=st.sampled_from([N3, P4]),
)
def test_chunks_are_whole_blocks_and_large_enough_for_their_tiles(
    tmp_path_factory, shape, core, chunk, blocksize, net
):
    model = di.load_model(seeded(net))
    stride, halo = {N3: (1, 3), P4: (4, 12)}[net]
    zeros = da.zeros((2, *shape), chunks=-1, dtype="uint8")
    scene = xr.DataArray(zeros, dims=("band", "y", "x"))
    output = tmp_path_factory.getbasetemp() / "out.tif"
    options = {"chunk": chunk, "tile": 2 * halo + core * stride, "blocksize": blocksize}
    plan = di.plan(scene, model, output, **options)
    for axis, wanted in zip(
        (plan.tiling.y, plan.tiling.x), (1, 1) if chunk == "auto" else chunk, strict=True
    ):
        assert axis.chunk % plan.cog.blocksize == 0
        assert axis.chunk >= wanted
        assert axis.tiles == 1 or axis.chunk >= axis.tile - axis.halo
        assert (axis.halo, axis.stride) == (halo, stride)
    assert plan.cog.local_levels(plan.inference.chunk) >= 0


# --- what it says ---------------------------------------------------------------------------------


def test_the_plan_says_in_text_and_html_what_will_be_done(source, tmp_path, model):
    named = model.patch(bands=["nir", "red"])
    plan = di.plan(source, named, tmp_path / "out.tif", tile=38, chunk=64, batch_size=5)
    text, html = repr(plan), plan._repr_html_()
    said = {
        "source": "120 x 150 px, bands nir, red",
        "receptive field": "radius 3 px, stride 1 px, measured",
        "halo": "3 px",
        "tile": "38 px",
        "chunks": "4 of 64 px",
        "tiles": f"{plan.tiling.runs} in batches of 5",
        "output": f"{tmp_path / 'out.tif'}, 1 x uint8, nodata 255",
        "bytes": "18.0 kB before deflate",
    }
    rows = dict(line.strip().split("  ", 1) for line in text.splitlines()[1:])
    assert text.startswith("Plan\n")
    assert {name: rows[name].strip() for name in said} == said
    for name, value in said.items():
        assert f">{name}</th>" in html
        assert f">{value}</td>" in html


def test_html_shows_names_as_they_are(tmp_path, model):
    names = ("<b>red</b>", "nir & more")
    path = write_raster(tmp_path / "a.tif", noise(2, 20, 30), descriptions=names)
    html = di.plan(path, model, tmp_path / "out.tif")._repr_html_()
    assert "&lt;b&gt;red&lt;/b&gt;, nir &amp; more" in html


# --- what runs must share -------------------------------------------------------------------------


def test_equal_plans_have_equal_settings_that_survive_json(source, tmp_path, model):
    one, other = (di.plan(source, model, tmp_path / "out.tif").settings() for _ in range(2))
    assert one == other
    assert json.loads(json.dumps(one)) == one


@pytest.mark.parametrize(
    "options",
    [{"window": (1, 0, 119, 150)}, {"tile": 40}, {"halo": 8}, {"chunk": 64}, {"blocksize": 256},
     {"compress": "zstd"}, {"precision": "bfloat16"}],
)  # fmt: skip
def test_what_changes_the_file_changes_the_settings(source, tmp_path, model, options):
    plain = di.plan(source, model, tmp_path / "out.tif").settings()
    assert di.plan(source, model, tmp_path / "out.tif", **options).settings() != plain


def test_another_model_or_source_changes_the_settings(source, tmp_path, model):
    plain = di.plan(source, model, tmp_path / "out.tif").settings()
    for other in (
        di.load_model(seeded(N3, seed=1)),
        model.patch(scale=2),
        model.patch(bands=["nir", "red"]),
    ):
        assert di.plan(source, other, tmp_path / "out.tif").settings() != plain
    os.utime(source, (0, 0))
    assert di.plan(source, model, tmp_path / "out.tif").settings() != plain


def test_windows_of_a_raster_that_lies_nowhere_have_other_settings(tmp_path, model):
    zeros = np.zeros((2, 20, 30), "uint8")
    with pytest.warns(rasterio.errors.NotGeoreferencedWarning):
        path = write_raster(tmp_path / "a.tif", zeros, transform=None, crs=None)
    plans = [di.plan(path, model, tmp_path / "o.tif", window=(n, n, 9, 9)) for n in (0, 5)]
    assert plans[0].settings() != plans[1].settings()


def test_what_changes_no_pixel_changes_no_setting(source, tmp_path, model):
    plain = di.plan(source, model, tmp_path / "out.tif").settings()
    options = {"batch_size": 3, "on_error": "nodata"}
    assert di.plan(source, model, tmp_path / "out.tif", **options).settings() == plain


# --- size -----------------------------------------------------------------------------------------


class Heavy(nn.Conv2d):
    """A small network with 60 MB of weights."""

    def __init__(self):
        super().__init__(2, 3, 3, padding=1)
        self.unused = nn.Parameter(torch.zeros(15_000_000))


def test_a_plan_is_pickled_without_weights(source, tmp_path):
    plan = di.plan(source, di.load_model(Heavy()), tmp_path / "out.tif")
    packed = pickle.dumps(plan)
    assert len(packed) < 1_000_000
    again = pickle.loads(packed)
    assert again.settings() == plan.settings()
    assert again.tiling == plan.tiling
    assert repr(again) == repr(plan)


@pytest.mark.parametrize("kind", ["sparse BigTIFF", "VRT"])
def test_a_plan_for_a_million_pixels_squared_takes_little_memory(tmp_path, model, kind):
    side = 1_000_000
    if kind == "VRT":
        path = tmp_path / "huge.vrt"
        band = '<VRTRasterBand dataType="Byte" band="{}"/>'
        bands = "".join(band.format(n) for n in (1, 2))
        path.write_text(
            f'<VRTDataset rasterXSize="{side}" rasterYSize="{side}"><GeoTransform>0,1,0,0,0,-1'
            f"</GeoTransform>{bands}</VRTDataset>"
        )
    else:
        path = tmp_path / "huge.tif"
        options = {"SPARSE_OK": True, "BIGTIFF": "YES", "tiled": True, "blockxsize": 4096}
        with rasterio.open(
            path, "w", driver="GTiff", width=side, height=side, count=2, dtype="uint8",
            blockysize=4096, transform=TRANSFORM, **options,
        ):  # fmt: skip
            pass
    di.plan(write_raster(tmp_path / "small.tif", noise(2, 9, 9)), model, tmp_path / "out.tif")
    tracemalloc.start()
    try:
        plan = di.plan(path, model, tmp_path / "out.tif")
        text, packed = repr(plan), pickle.dumps(plan)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20e6
    assert len(packed) < 1_000_000
    assert "1 000 000 x 1 000 000 px" in text
    assert plan.tiling.runs * plan.tiling.step[0] ** 2 >= side**2


def striped(path, width, height=3000, bands=6):
    """A sparse file of strips one row high: large in pixels, small on disk."""
    with rasterio.open(
        path, "w", driver="GTiff", width=width, height=height, count=bands, dtype="uint16",
        blockysize=1, sparse_ok=True, bigtiff="yes",
    ):  # fmt: skip
        pass
    return str(path)


def test_wide_strips_get_chunks_of_few_rows_so_that_each_strip_is_decoded_once(tmp_path):
    wide = striped(tmp_path / "wide.tif", 40_960)
    plan = di.plan(wide, seeded(N3, 6), tmp_path / "o.tif", tile=512)
    height, width = plan.tiling.chunk
    assert height < 1024 < width
    assert plan.source.cache_bytes(plan.tiling.chunk_at((0, 0)).read) <= 1 << 30


def test_strips_that_fit_the_cache_get_the_usual_chunks(tmp_path):
    narrow = striped(tmp_path / "narrow.tif", 3000)
    plan = di.plan(narrow, seeded(N3, 6), tmp_path / "o.tif", tile=512)
    assert plan.tiling.chunk[0] >= 2048


def test_strips_beyond_any_cache_are_warned_of_with_the_cure(tmp_path):
    widest = striped(tmp_path / "widest.tif", 200_000)
    with pytest.warns(UserWarning, match="stored in strips.*gdal_translate .*-of COG"):
        di.plan(widest, seeded(N3, 6), tmp_path / "o.tif", tile=512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "any"}, "layout must be 'strict' or 'append'"),
        ({"interleave": "line"}, "interleave"),
        ({"compress": "webp"}, "webp"),
        ({"predictor": 3}, "predictor"),
    ],
)
def test_options_of_the_file_that_do_not_go_together_are_refused(
    source, tmp_path, model, options, message
):
    with pytest.raises(ValueError, match=message):
        di.plan(source, model, tmp_path / "o.tif", **options)


def test_classes_are_deflated_and_floats_are_zstd_unless_said(source, tmp_path, model):
    assert di.plan(source, model, tmp_path / "o.tif").cog.compress == "deflate"
    values = model.patch(output="values")
    assert di.plan(source, values, tmp_path / "o.tif").cog.compress == "zstd"


def test_files_of_one_band_each_are_told_how_to_be_bands(tmp_path):
    files = [write_raster(tmp_path / f"b{i}.tif", noise(1, 40, 40)) for i in range(2)]
    with pytest.raises(ValueError, match=r"takes 2 bands, the source has 1 .*stack='bands'"):
        di.plan(files, seeded(N3), tmp_path / "o.tif")
    di.plan(di.open_raster(files, stack="bands"), seeded(N3), tmp_path / "o.tif")
