"""Windows of files through the cache of decoded blocks, against rasterio on the same pixels."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import dask
import numpy as np
import pytest
import rasterio
import rasterio.windows
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from rasterio.enums import ColorInterp

from conftest import noise, ramp, write_raster
from daskinfer import raster as raster_module
from daskinfer.blockcache import BlockCache
from daskinfer.raster import Raster, describe, layout_warning
from daskinfer.readahead import ReadAhead
from daskinfer.source import ArraySource, open_raster
from daskinfer.tiling import AxisTiling, Span, Tiling, Window
from sources import everything, valid_of, vrt, window

MB = 1 << 20


@pytest.fixture
def cache(monkeypatch):
    """A cache of the test's own."""

    def make(capacity=256 * MB):
        made = BlockCache(capacity)
        monkeypatch.setattr(raster_module, "shared_cache", lambda: made)
        return made

    return make


@pytest.fixture
def decoded(monkeypatch):
    """Windows that GDAL is asked for, as `(raster, window)`."""
    windows, decode, lock = [], Raster._decode, threading.Lock()

    def counted(self, area):
        with lock:
            windows.append(area)
        return decode(self, area)

    monkeypatch.setattr(Raster, "_decode", counted)
    return windows


def times_decoded(windows, shape):
    count = np.zeros(shape, int)
    for area in windows:
        count[area.slices()] += 1
    return count


def tiled(side, **options):
    return {"tiled": True, "blockxsize": side, "blockysize": side, "compress": "deflate"} | options


LAYOUTS = {
    "tiles": tiled(64),
    "large tiles": tiled(512),
    "band by band": tiled(128, interleave="band"),
    "strips": {"blockysize": 7, "compress": "deflate"},
    "one strip": {"blockysize": 600},
    "uncompressed": {},
}


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("layout") / "a.tif"
    return write_raster(path, noise(3, 600, 700) % 50, nodata=9, **request.param)


# --- pixels ---------------------------------------------------------------------------------------


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_windows_of_any_crop_are_what_rasterio_reads(layout, data):
    def spans(height, width):
        rows, cols = (
            sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))
            for n in (height, width)
        )
        return Window(Span(*rows), Span(*cols))

    crop = spans(600, 700)
    bands = data.draw(st.permutations([1, 2, 3]))[: data.draw(st.integers(1, 3))]
    raster = describe(layout, bands=bands, window=crop.bounds())
    for _ in range(3):
        area = spans(*crop.shape)
        at = rasterio.windows.Window(
            crop.cols.start + area.cols.start, crop.rows.start + area.rows.start, *area.shape[::-1]
        )
        with rasterio.open(layout) as dataset:
            expected = dataset.read(bands, window=at)
        pixels, valid = raster.read(area), (expected != 9).all(axis=0)
        assert np.array_equal(pixels.data, expected)
        assert (pixels.valid is None) == valid.all()
        assert pixels.valid is None or np.array_equal(pixels.valid, valid)


@pytest.mark.parametrize("mask", ["nodata", "alpha", "internal", "beside", "nan", "none"])
def test_masks_come_through_the_cache(tmp_path, cache, mask):
    raw = noise(3, 90, 80, dtype="float32" if mask == "nan" else "uint16") % 100 + 1
    expected = np.random.default_rng(1).random((90, 80)) > 0.1
    if mask in ("nodata", "nan"):
        raw[1, ~expected] = np.nan if mask == "nan" else 0
    if mask == "alpha":
        raw[2] = expected
    if mask == "none":
        expected[:] = True
    path = write_raster(
        tmp_path / "a.tif", raw, nodata=0 if mask == "nodata" else None, **tiled(16)
    )
    if mask == "alpha":
        with rasterio.open(path, "r+") as dataset:
            dataset.colorinterp = [*dataset.colorinterp[:2], ColorInterp.alpha]
    if mask in ("internal", "beside"):
        with (
            rasterio.Env(GDAL_TIFF_INTERNAL_MASK=mask == "internal"),
            rasterio.open(path, "r+") as dataset,
        ):
            dataset.write_mask(expected)
    cache()
    raster, bands = describe(path), 2 if mask == "alpha" else 3
    for area in (window(0, 0, 90, 80), window(10, 20, 30, 40), window(9, 19, 40, 50)):
        pixels, (rows, cols) = raster.read(area), area.slices()
        assert np.array_equal(pixels.data, raw[:bands, rows, cols], equal_nan=mask == "nan")
        valid = np.ones(area.shape, bool) if pixels.valid is None else pixels.valid
        assert np.array_equal(valid, expected[rows, cols])


def test_bands_of_different_dtypes_come_through_the_cache(tmp_path, cache):
    raw = noise(2, 70, 60, dtype="int16") % 200
    path = write_raster(tmp_path / "a.tif", raw, **tiled(16))
    mixed = describe(vrt(tmp_path / "a.vrt", path, [("Byte", 1, ""), ("Int16", 2, "")]))
    made = cache()
    for area in (window(5, 5, 40, 40), window(0, 0, 70, 60)):
        pixels = mixed.read(area)
        assert (pixels.data.dtype, pixels.valid) == (np.int16, None)
        assert np.array_equal(pixels.data, raw[:, *area.slices()])
    assert made.stats.decoded > 0


def test_selections_and_crops_do_not_get_each_others_pixels(tmp_path, cache):
    raw = noise(3, 50, 40)
    raw[1, 3, 3] = 7
    path = write_raster(tmp_path / "a.tif", raw, **tiled(16))
    cache()
    every, other = describe(path), describe(path, nodata=7)
    for _ in range(2):
        assert np.array_equal(everything(every).data, raw)
        assert everything(every).valid is None
        assert np.array_equal(everything(every.select([3, 1])).data, raw[[2, 0]])
        assert np.array_equal(everything(every.crop(window(9, 8, 20, 30))).data, raw[:, 9:29, 8:38])
        assert np.array_equal(valid_of(other), (raw != 7).all(axis=0))


def test_pixels_are_the_readers_own(tmp_path, cache):
    raw = noise(1, 40, 40)
    cache()
    raster = describe(write_raster(tmp_path / "a.tif", raw, **tiled(16)))
    everything(raster).data[:] = 0
    assert np.array_equal(everything(raster).data, raw)


# --- once -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    path = tmp_path_factory.mktemp("scene") / "a.tif"
    return write_raster(path, noise(2, 1500, 1300) % 50, nodata=9, **tiled(256))


def test_each_block_is_decoded_once_by_readers_of_overlapping_tiles(scene, cache, decoded):
    cache()
    raster = describe(scene)
    axes = (AxisTiling(size, tile=288, halo=16, chunk=512) for size in raster.grid.shape)
    tiling = Tiling(*axes)
    with rasterio.open(scene) as dataset:
        raw = dataset.read()

    def read(number):
        index = tiling.index_of(number)
        chunk = tiling.chunk_at(index)
        reader = raster.reader(chunk.read)
        areas = [tile.window.clip(chunk.read) for tile in tiling.tiles_of(index)]
        return all(np.array_equal(reader(a).data, raw[:, *a.slices()]) for a in areas)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, tiling.order()))
    assert (times_decoded(decoded, raster.grid.shape) == 1).all()


def test_tiles_that_are_read_ahead_decode_each_block_once(scene, cache, decoded):
    cache()
    raster = describe(scene)
    with rasterio.open(scene) as dataset:
        raw = dataset.read()
    whole = window(0, 0, *raster.grid.shape)
    corners = [(row, col) for row in range(-16, 1500, 256) for col in range(-16, 1300, 256)]
    tiles = [window(*corner, 288, 288).clip(whole) for corner in corners]
    with ReadAhead(8) as ahead:
        stream = ahead.stream(raster.reader(whole), tiles)
        for tile, pixels in zip(tiles, stream, strict=True):
            assert np.array_equal(pixels.data, raw[:, *tile.slices()])
    assert (times_decoded(decoded, raster.grid.shape) == 1).all()


def test_a_raster_that_was_pickled_shares_the_blocks(scene, cache, decoded):
    cache()
    raster = describe(scene, nodata=float("nan"))
    again = cloudpickle.loads(cloudpickle.dumps(raster))
    area = window(100, 100, 500, 500)
    assert np.array_equal(raster.read(area).data, again.read(area).data)
    assert len(decoded) == 1


def test_thinned_pixels_are_not_cached(scene, cache):
    made = cache()
    assert describe(scene).thinned(100).data.shape == (2, 100, 87)
    assert made.stats.decoded == 0


def test_a_file_that_was_changed_is_refused_and_what_is_opened_anew_is_read_anew(tmp_path, cache):
    cache()
    path = write_raster(tmp_path / "a.tif", ramp(40, 50))
    indirect = vrt(tmp_path / "a.vrt", path, [("Float32", 1, "")])
    before, before_indirect = describe(path), describe(indirect)
    assert everything(before).data.max() == everything(before_indirect).data.max() == 1999
    write_raster(path, ramp(40, 50) + 1)
    with pytest.raises(rasterio.errors.RasterioIOError, match="was changed"):
        everything(before)
    # The VRT itself is as it was.
    assert (
        everything(describe(path)).data.max() == everything(describe(indirect)).data.max() == 2000
    )


def test_a_broken_block_fails_what_needs_it_and_is_tried_again(tmp_path, cache):
    made = cache()
    raw = noise(1, 1024, 1024)
    path = write_raster(tmp_path / "a.tif", raw, **tiled(512))
    with open(path, "rb") as file:
        sound = file.read()
    with rasterio.open(path) as dataset:
        offset = int(dataset.get_tag_item("BLOCK_OFFSET_1_1", "TIFF", bidx=1))
    broken = bytearray(sound)
    broken[offset : offset + 64] = b"\xff" * 64
    (tmp_path / "a.tif").write_bytes(broken)
    raster = describe(path)
    with pytest.raises(rasterio.errors.RasterioIOError) as error:
        everything(raster)
    assert "X offset 1, Y offset 1" in str(error.value.__cause__)
    for area in (window(0, 0, 512, 1024), window(600, 100, 300, 300)):
        assert np.array_equal(raster.read(area).data, raw[:, *area.slices()])
    with pytest.raises(rasterio.errors.RasterioIOError):
        raster.read(window(700, 700, 10, 10))
    assert made.stats.decoded == 3


# --- chunks ---------------------------------------------------------------------------------------


def test_where_the_cache_is_too_small_a_chunk_is_read_at_once(scene, cache, decoded):
    raster, chunk = describe(scene), window(100, 200, 700, 600)
    cache(raster.cache_bytes(chunk) - 1)
    read = raster.reader(chunk)
    assert decoded == [chunk]
    with rasterio.open(scene) as dataset:
        raw = dataset.read()
    for area in (window(100, 200, 50, 60), window(300, 400, 500, 400), chunk):
        pixels, expected = read(area), raw[:, *area.slices()]
        assert np.array_equal(pixels.data, expected)
        assert np.array_equal(pixels.valid, (expected != 9).all(axis=0))
    assert decoded == [chunk]
    for outside in (window(99, 200, 5, 5), window(795, 795, 5, 6)):
        with pytest.raises(ValueError, match=r"outside \(100, 200, 700, 600\)"):
            read(outside)
    with pytest.raises(ValueError, match="reaches outside"):
        raster.reader(window(1000, 1000, 600, 300))


def test_where_it_is_large_enough_a_chunk_is_read_tile_by_tile(scene, cache, decoded):
    raster, chunk = describe(scene), window(100, 200, 700, 600)
    cache(raster.cache_bytes(chunk))
    read = raster.reader(chunk)
    assert decoded == []
    read(window(100, 200, 5, 5))
    assert decoded == [window(0, 0, 512, 512)]


def test_the_need_for_cache_grows_with_the_chunks_at_work(scene):
    raster, chunk = describe(scene), window(100, 100, 700, 700)
    touched = 1024 * 1024 * (2 * 2 + 1)
    assert raster.cache_bytes(chunk) == pytest.approx(1.3 * touched, abs=1)
    # Two thirds of the blocks of each chunk, but no more than the raster has.
    assert raster.cache_bytes(window(0, 0, 500, 500), threads=6) == 4 * 512 * 512 * 5
    assert raster.cache_bytes(chunk, threads=6) == 1500 * 1300 * 5


def test_a_lazy_array_computes_each_chunk_once_for_the_tiles_of_a_window(scene, decoded):
    source = ArraySource(open_raster(scene, chunks=256) * 2)
    with rasterio.open(scene) as dataset:
        raw = dataset.read() * 2
    chunk = window(256, 0, 512, 512)
    read = source.reader(chunk)
    seen = len(decoded)
    for area in (window(256, 0, 300, 300), window(300, 100, 400, 400), window(500, 300, 268, 212)):
        assert np.array_equal(read(area).data, raw[:, *area.slices()])
    assert len(decoded) == seen
    assert source.cache_bytes(chunk, threads=8) == 0


@pytest.mark.parametrize(("chunks", "cached"), [(256, False), (512, False), (300, True)])
def test_chunks_of_a_lazy_array_are_cached_only_where_they_share_blocks(
    scene, cache, decoded, chunks, cached
):
    made = cache()
    with rasterio.open(scene) as dataset:
        raw = dataset.read()
    with dask.config.set(scheduler="synchronous"):
        assert np.array_equal(open_raster(scene, chunks=chunks).values, raw)
    assert (made.stats.decoded > 0) == cached
    assert (times_decoded(decoded, raw.shape[1:]) == 1).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_window_has_whole_blocks_where_no_pixel_of_a_block_is_missing(tmp_path, data):
    def spans(height, width):
        pairs = st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True)
        rows, cols = (
            # Mostly on the lattice of blocks.
            Span(*(min(n * 8, size) for n in sorted(data.draw(pairs))))
            for size in (height, width)
        )
        return Window(rows, cols)

    file = sparse(tmp_path / "a.tif", 70, 60, count=1, **tiled(16))
    raster = file.crop(spans(70, 60))
    area = spans(*raster.grid.shape)
    # The number of its block, for each pixel of the raster.
    rows, cols = (np.arange(n) for n in raster.grid.shape)
    number = (rows[:, None] + raster.origin[0]) // 16 * 100 + (cols + raster.origin[1]) // 16
    inside = number[area.slices()]
    assume(inside.size)
    assert raster.whole_blocks(area) == (np.isin(number, inside).sum() == inside.size)


# --- strips ---------------------------------------------------------------------------------------


def sparse(path, height, width, count=6, **options):
    """A file of nothing but holes, of any size."""
    profile = {"driver": "GTiff", "dtype": "uint16", "SPARSE_OK": True, "count": count} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(path, "w", height=height, width=width, **profile):
            pass
    return describe(path)


@pytest.mark.parametrize(
    ("options", "striped"),
    [({"blockysize": 1}, True), ({"blockysize": 16}, True), (tiled(256), False),
     ({"blockysize": 900, "compress": "deflate"}, False), (tiled(2048), False)],
)  # fmt: skip
def test_strips_are_blocks_as_wide_as_the_file(tmp_path, options, striped):
    raster = sparse(tmp_path / "a.tif", 900, 2000, **options)
    assert raster.striped is striped
    assert raster.crop(window(10, 100, 50, 60)).striped is striped


def test_all_blocks_that_a_window_touches_must_be_decoded(tmp_path):
    strips = sparse(tmp_path / "a.tif", 100, 2000, count=3, blockysize=16)
    assert strips.decoded_bytes(window(0, 0, 1, 1)) == 16 * 2000 * 6
    assert strips.decoded_bytes(window(15, 500, 2, 7)) == 32 * 2000 * 6
    assert strips.decoded_bytes(window(90, 0, 10, 1)) == 20 * 2000 * 6
    assert strips.crop(window(15, 0, 20, 9)).decoded_bytes(window(0, 0, 1, 9)) == 16 * 2000 * 6
    blocks = sparse(tmp_path / "b.tif", 1000, 700, count=1, **tiled(256))
    assert blocks.decoded_bytes(window(200, 300, 100, 100)) == 512 * 256 * 2
    assert blocks.decoded_bytes(window(900, 690, 100, 10)) == 232 * 188 * 2


def test_wide_strips_are_warned_of_with_cost_and_cure(tmp_path):
    raster = sparse(tmp_path / "my scene.tif", 5000, 60_000, blockysize=1)
    chunk = window(0, 0, 2096, 2096)
    text = layout_warning(raster, chunk)
    assert "stored in strips of 60000 x 1 px" in text
    assert "a chunk of 52.7 MB costs 1.5 GB, 29 times as much" in text
    assert f"gdal_translate '{tmp_path}/my scene.tif' 'my scene-cog.tif' -of COG" in text


def test_strips_that_the_cache_can_hold_cost_nothing_and_are_decoded_once(tmp_path, cache, decoded):
    raw = noise(1, 700, 900)
    raster = describe(write_raster(tmp_path / "a.tif", raw, blockysize=3, compress="deflate"))
    assert raster.striped
    assert layout_warning(raster, window(0, 0, 300, 300)) is None
    cache()
    axes = (AxisTiling(size, tile=96, halo=16, chunk=256) for size in raster.grid.shape)
    tiling = Tiling(*axes)
    for number in range(tiling.chunks):
        chunk = tiling.chunk_at(tiling.index_of(number)).read
        assert np.array_equal(raster.reader(chunk)(chunk).data, raw[:, *chunk.slices()])
    assert (times_decoded(decoded, raster.grid.shape) == 1).all()


def test_tiles_narrow_strips_and_arrays_are_not_warned_of(tmp_path):
    chunk = window(0, 0, 2096, 2096)
    assert layout_warning(sparse(tmp_path / "a.tif", 5000, 60_000, **tiled(512)), chunk) is None
    assert layout_warning(sparse(tmp_path / "b.tif", 60_000, 3000, blockysize=1), chunk) is None
    assert layout_warning(ArraySource(open_raster(tmp_path / "b.tif")), chunk) is None
