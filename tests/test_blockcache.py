"""The cache of decoded blocks, against slices of the array that its decoder cuts from."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer import blockcache
from daskinfer.blockcache import BlockCache, Cells, cache_limit, reserve, shared_cache
from daskinfer.pixels import Pixels
from daskinfer.tiling import Span, Window
from sources import window

WAIT = 30  # seconds after which a test that hangs fails
PLENTY = 1 << 30


class Scene:
    """A raster in memory whose windows are "decoded", and which notes what was."""

    def __init__(self, height, width, *, bands=2, masked=False, seed=0):
        rng = np.random.default_rng(seed)
        self.data = rng.integers(0, 60_000, (bands, height, width)).astype("uint16")
        self.valid = rng.random((height, width)) > 0.01 if masked else None
        self.count = np.zeros((height, width), int)
        self.calls = []
        self.lock = threading.Lock()

    def decode(self, area):
        with self.lock:
            self.calls.append(area.bounds())
            self.count[area.slices()] += 1
        return self.expected(area)

    def expected(self, area):
        rows, cols = area.slices()
        valid = None if self.valid is None else self.valid[rows, cols].copy()
        return Pixels(
            self.data[:, rows, cols].copy(), None if valid is None or valid.all() else valid
        )

    def cells(self, block=(16, 16), origin=(0, 0)):
        return Cells.of(self.count.shape, block, origin, 2 * len(self.data) + 1)


@pytest.fixture(autouse=True)
def small_cells(monkeypatch):
    """Cells of 16 px, so that small rasters have many."""
    monkeypatch.setattr(blockcache, "_SIDE", 16)


def equal(actual, expected):
    masks = actual.valid, expected.valid
    assert np.array_equal(actual.data, expected.data)
    assert actual.data.dtype == expected.data.dtype
    assert [mask is None for mask in masks] in ([True, True], [False, False])
    assert masks[0] is None or np.array_equal(*masks)
    return True


def whole(scene):
    return window(0, 0, *scene.count.shape)


@st.composite
def windows_of(draw, height, width):
    rows, cols = (
        sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True)))
        for size in (height, width)
    )
    return Window(Span(*rows), Span(*cols))


# --- pixels ---------------------------------------------------------------------------------------


@given(
    shape=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    block=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    origin=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    capacity=st.sampled_from([0, 3000, 20_000, PLENTY]),
    masked=st.booleans(),
    data=st.data(),
)
def test_windows_are_those_of_the_raster(shape, block, origin, capacity, masked, data):
    scene, cache = Scene(*shape, masked=masked), BlockCache(capacity)
    cells = scene.cells(block, origin)
    for _ in range(6):
        area = data.draw(windows_of(*shape))
        assert equal(cache.read("scene", cells, area, scene.decode), scene.expected(area))
        assert cache.stats.nbytes <= capacity
    if capacity == PLENTY:
        assert scene.count.max() == 1


def test_threads_with_a_cache_that_overflows_read_what_one_reads():
    scene, cache, cells = Scene(200, 180, masked=True), BlockCache(20_000), None
    cells = scene.cells()
    rng = np.random.default_rng(1)
    areas = [window(*rng.integers(0, 150, 2).tolist(), 30, 30) for _ in range(100)]
    with ThreadPoolExecutor(8) as pool:
        rounds = [
            pool.map(
                lambda a: equal(cache.read("s", cells, a, scene.decode), scene.expected(a)), areas
            )
            for _ in range(8)
        ]
        assert all(all(answers) for answers in rounds)
    assert 0 < cache.stats.nbytes <= 20_000


def test_what_is_returned_is_the_readers_own():
    scene, cache = Scene(40, 40, masked=True), BlockCache(PLENTY)
    for area in (window(0, 0, 16, 16), window(5, 5, 30, 30)):
        pixels = cache.read("scene", scene.cells(), area, scene.decode)
        pixels.data[:] = 0
        if pixels.valid is not None:
            pixels.valid[:] = False
    assert equal(
        cache.read("s", scene.cells(), whole(scene), scene.decode), scene.expected(whole(scene))
    )
    assert equal(
        cache.read("scene", scene.cells(), whole(scene), scene.decode), scene.expected(whole(scene))
    )


def test_rasters_under_different_keys_keep_apart():
    scenes, cache = [Scene(20, 20, seed=n) for n in range(3)], BlockCache(PLENTY)
    for _ in range(2):
        for n, scene in enumerate(scenes):
            assert equal(
                cache.read(n, scene.cells(), whole(scene), scene.decode),
                scene.expected(whole(scene)),
            )
    assert [scene.count.max() for scene in scenes] == [1, 1, 1]


# --- cells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "cell"),
    [((512, 512), (512, 512)), ((256, 128), (512, 512)), ((16, 16), (512, 512)),
     ((300, 700), (600, 700)), ((1024, 1024), (1024, 1024)), ((1, 20_000), (64, 20_000)),
     ((100, 20_000), (100, 20_000))],
)  # fmt: skip
def test_cells_are_whole_blocks_near_512_px_and_strips_of_bounded_size(monkeypatch, block, cell):
    monkeypatch.setattr(blockcache, "_SIDE", 512)
    cells = Cells.of((20_000, 20_000), block, (0, 0), pixel=13)
    assert cells.cell == cell


@given(
    st.tuples(st.integers(1, 80), st.integers(1, 80)),
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_cells_partition_the_raster_and_lie_on_the_files_blocks(shape, block, origin):
    cells = Cells.of(shape, block, origin, pixel=1)
    count = np.zeros(shape, int)
    for index in cells.touching(window(0, 0, *shape)):
        area = cells.window(index)
        count[area.slices()] += 1
        for span, start, side, size in zip(area, origin, block, shape, strict=True):
            assert span.start == 0 or (span.start + start) % side == 0
            assert span.stop == size or (span.stop + start) % side == 0
    assert (count == 1).all()


@given(st.data())
def test_a_window_touches_the_cells_that_have_pixels_of_it(data):
    cells = Scene(70, 90).cells((8, 8), (3, 21))
    area = data.draw(windows_of(70, 90))
    every = cells.touching(window(0, 0, 70, 90))
    assert cells.touching(area) == [c for c in every if min(cells.window(c).clip(area).shape) > 0]


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6))), st.integers(1, 12))
def test_reads_are_rectangles_that_cover_what_is_missing_once(indexes, most):
    cells = Scene(7 * 16, 7 * 16).cells()
    limit, cell = blockcache._LARGEST_READ, 16 * 16 * 5
    blockcache._LARGEST_READ = most * cell
    try:
        found = list(blockcache._rectangles(cells, indexes))
    finally:
        blockcache._LARGEST_READ = limit
    covered = [index for first, last in found for index in blockcache._between(first, last)]
    assert sorted(covered) == sorted(indexes)
    assert all(cells.nbytes(cells.window(*corners)) <= most * cell for corners in found)


def test_missing_neighbours_are_read_at_once():
    scene, cache, cells = Scene(80, 80), BlockCache(PLENTY), Scene(80, 80).cells()
    cache.read("scene", cells, window(20, 20, 40, 40), scene.decode)
    assert scene.calls == [(16, 16, 48, 48)]
    cache.read("scene", cells, window(20, 20, 60, 60), scene.decode)
    assert sorted(scene.calls[1:]) == [(16, 64, 64, 16), (64, 16, 16, 48)]


# --- once -----------------------------------------------------------------------------------------


def test_each_block_is_decoded_once_whichever_tiles_ask_for_it():
    scene, cache, cells = Scene(100, 130), BlockCache(PLENTY), Scene(100, 130).cells()
    corners = [(row, col) for row in range(-3, 100, 20) for col in range(-3, 130, 20)]
    tiles = [window(*corner, 26, 26).clip(whole(scene)) for corner in corners]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda tile: cache.read("scene", cells, tile, scene.decode), tiles))
    assert scene.count.max() == 1
    stats = cache.stats
    assert stats.decoded == len(cells.touching(whole(scene)))
    assert stats.hits == sum(len(cells.touching(tile)) for tile in tiles) - stats.decoded
    assert stats.nbytes == scene.data.nbytes


class Crowd:
    """Readers of one window, whose decode is held until all of them have asked."""

    def __init__(self, monkeypatch, cache, readers):
        self.asked = threading.Semaphore(0)
        self.readers, self.calls = readers, []
        claim = cache._claim

        def noted(*args):
            claimed = claim(*args)
            self.asked.release()
            return claimed

        monkeypatch.setattr(cache, "_claim", noted)

    def decode(self, scene, area):
        self.calls.append(area)
        if len(self.calls) == 1:
            assert all(self.asked.acquire(timeout=WAIT) for _ in range(self.readers))
        return scene.decode(area)


def test_readers_that_want_one_cell_at_once_decode_it_once(monkeypatch):
    scene, cache, readers = Scene(16, 16), BlockCache(PLENTY), 6
    crowd = Crowd(monkeypatch, cache, readers)

    def read(_):
        area = window(2, 3, 9, 8)
        pixels = cache.read("scene", scene.cells(), area, lambda a: crowd.decode(scene, a))
        return equal(pixels, scene.expected(area))

    with ThreadPoolExecutor(readers) as pool:
        assert all(pool.map(read, range(readers)))
    assert len(crowd.calls) == 1
    assert (cache.stats.decoded, cache.stats.hits) == (1, readers - 1)


def test_a_reader_decodes_what_it_claimed_before_it_waits_for_others(monkeypatch):
    scene, cache, cells = Scene(16, 48), BlockCache(PLENTY), Scene(16, 48).cells()
    left, right = window(0, 0, 16, 32), window(0, 16, 16, 32)
    started, decoded = threading.Event(), threading.Event()

    def slow(area):
        started.set()
        # Of the first reader: ends when the second has decoded its own, and waits for the rest.
        assert decoded.wait(WAIT)
        return scene.decode(area)

    def quick(area):
        pixels = scene.decode(area)
        decoded.set()
        return pixels

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.read, "scene", cells, left, slow)
        assert started.wait(WAIT)
        second = pool.submit(cache.read, "scene", cells, right, quick)
        assert equal(first.result(WAIT), scene.expected(left))
        assert equal(second.result(WAIT), scene.expected(right))
    assert scene.count.max() == 1


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_reaches_all_who_wait_and_the_next_read_decodes_again(monkeypatch):
    scene, cache, readers = Scene(16, 16), BlockCache(PLENTY), 5
    crowd = Crowd(monkeypatch, cache, readers)

    def broken(area):
        crowd.decode(scene, area)
        raise OSError("block 7 is broken")

    def read(_):
        with pytest.raises(OSError, match="block 7 is broken"):
            cache.read("scene", scene.cells(), whole(scene), broken)
        return True

    with ThreadPoolExecutor(readers) as pool:
        assert all(pool.map(read, range(readers)))
    assert len(crowd.calls) == 1
    assert (cache.stats.decoded, cache.stats.nbytes) == (0, 0)
    again = cache.read("scene", scene.cells(), whole(scene), scene.decode)
    assert equal(again, scene.expected(whole(scene)))


def test_a_broken_block_fails_the_windows_that_need_it_and_no_other():
    scene, cache, cells = Scene(48, 48), BlockCache(PLENTY), Scene(48, 48).cells()
    broken = window(16, 16, 16, 16)

    def decode(area):
        pixels = scene.decode(area)
        if min(area.clip(broken).shape):
            raise OSError("the block in the middle is broken")
        return pixels

    with pytest.raises(OSError, match="the block in the middle"):
        cache.read("scene", cells, whole(scene), decode)
    assert cache.stats.decoded == 8
    calls = len(scene.calls)
    for index in cells.touching(whole(scene)):
        area = cells.window(index)
        if area != broken:
            assert equal(cache.read("scene", cells, area, decode), scene.expected(area))
    assert len(scene.calls) == calls


def test_an_interrupt_leaves_nothing_behind_that_others_would_wait_for():
    scene, cache, cells = Scene(48, 48), BlockCache(PLENTY), Scene(48, 48).cells()

    def interrupted(area):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.read("scene", cells, whole(scene), interrupted)
    assert equal(
        cache.read("scene", cells, whole(scene), scene.decode), scene.expected(whole(scene))
    )


# --- size -----------------------------------------------------------------------------------------

CELL = 16 * 16 * 4


@settings(max_examples=30)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=60))
def test_the_least_recently_used_cells_go_first(room, indexes):
    scene, cache, cells = Scene(80, 80), BlockCache(room * CELL + CELL - 1), Scene(80, 80).cells()
    recent = []
    for index in indexes:
        area = window(index[0] * 16 + 3, index[1] * 16 + 3, 2, 2)
        calls = len(scene.calls)
        cache.read("scene", cells, area, scene.decode)
        assert (len(scene.calls) == calls) == (index in recent[-room:])
        recent = [other for other in recent if other != index] + [index]
        assert cache.stats.nbytes == min(len(recent), room) * CELL


@pytest.mark.parametrize(
    ("capacity", "area", "straight"),
    [(CELL, window(3, 3, 9, 9), 0), (CELL - 1, window(3, 3, 9, 9), 1), (0, window(0, 0, 1, 1), 1),
     (4 * CELL, window(15, 15, 2, 2), 0), (3 * CELL, window(15, 15, 2, 2), 1)],
)  # fmt: skip
def test_a_window_whose_cells_do_not_fit_is_read_past_the_cache(capacity, area, straight):
    scene, cache = Scene(64, 64), BlockCache(capacity)
    cells = Cells((64, 64), cell=(16, 16), offset=(0, 0), pixel=4)
    assert equal(cache.read("scene", cells, area, scene.decode), scene.expected(area))
    assert cache.stats.straight == straight
    assert (scene.calls == [area.bounds()]) == bool(straight)
    assert (cache.stats.nbytes > 0) == (not straight)


def test_a_smaller_capacity_evicts_and_0_keeps_nothing():
    scene, cache, cells = Scene(64, 64), BlockCache(PLENTY), Scene(64, 64).cells()
    cache.read("scene", cells, whole(scene), scene.decode)
    for capacity in (5 * CELL, 0):
        cache.capacity = capacity
        assert cache.stats.nbytes == capacity
    cache.read("scene", cells, window(0, 0, 3, 3), scene.decode)
    assert cache.stats.nbytes == 0
    with pytest.raises(ValueError, match="capacity must be 0 bytes or more, got -1"):
        cache.capacity = -1


def test_a_cleared_cache_decodes_again():
    scene, cache, cells = Scene(20, 20), BlockCache(PLENTY), Scene(20, 20).cells()
    for times in (1, 2):
        cache.read("scene", cells, whole(scene), scene.decode)
        assert (scene.count == times).all()
        cache.clear()
        assert cache.stats.nbytes == 0


# --- one per process ------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """No cache made yet, and what the environment says of it."""
    monkeypatch.setattr(blockcache, "_shared", None)

    def environment(value):
        monkeypatch.setattr(blockcache, "_shared", None)
        monkeypatch.delenv("DASKINFER_CACHE_MB", raising=False)
        if value is not None:
            monkeypatch.setenv("DASKINFER_CACHE_MB", value)

    environment(None)
    return environment


def test_a_process_has_one_cache_of_256_mb_unless_the_environment_says_otherwise(fresh):
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: shared_cache(), range(8)))) == 1
    assert shared_cache().capacity == 256 << 20
    for value in ("64", "0"):
        fresh(value)
        assert shared_cache().capacity == int(value) << 20


@pytest.mark.parametrize("value", ["", "lots", "-1", "1.5", "256 MB"])
def test_a_size_in_the_environment_that_is_none_is_refused(fresh, value):
    fresh(value)
    with pytest.raises(ValueError, match=r"DASKINFER_CACHE_MB must be.*set DASKINFER_CACHE_MB=256"):
        shared_cache()


def test_a_need_enlarges_the_cache_up_to_its_limit_and_never_makes_it_smaller(fresh):
    assert cache_limit() == 1 << 30
    for need, holds, capacity in (
        (100 << 20, True, 256 << 20),
        (300 << 20, True, 300 << 20),
        (200 << 20, True, 300 << 20),
        ((1 << 30) + 1, False, 300 << 20),
        (1 << 30, True, 1 << 30),
    ):
        assert (reserve(need), shared_cache().capacity) == (holds, capacity)
    fresh("100")
    assert cache_limit() == 100 << 20
    assert [reserve(100 << 20), reserve(101 << 20)] == [True, False]
    assert shared_cache().capacity == 100 << 20
