"""The laws of `daskinfer.tiling`, against arrays in which every pixel is painted one by one."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from daskinfer.tiling import AxisTiling, Span, Tiling, Window, round_up


@st.composite
def axes(draw, largest=400, blended=False):
    """Any valid axis: size, tile, halo or overlap, stride, chunk and smallest input."""
    stride = draw(st.integers(1, 9))
    context = stride * draw(st.integers(int(blended), 6))
    halo, overlap = (0, context) if blended else (context, 0)
    tile = 2 * halo + overlap + stride * draw(st.integers(1, 12))
    return AxisTiling(
        size=draw(st.integers(1, largest)),
        tile=tile,
        halo=halo,
        overlap=overlap,
        stride=stride,
        chunk=draw(st.integers(1, largest + 50)),
        least=draw(st.integers(1, tile)),
    )


@st.composite
def whole_step_axes(draw, blended=False):
    """Axes as `predict` makes them: chunks of whole steps, none smaller than ``tile - halo``."""
    axis = draw(axes(blended=blended))
    smallest = round_up(axis.tile - axis.halo, axis.step) if axis.tiles > 1 else axis.step
    return dataclasses.replace(axis, chunk=smallest + axis.step * draw(st.integers(0, 3)))


def painted(spans, size):
    """How often each pixel of an axis is covered."""
    count = np.zeros(size, int)
    for span in spans:
        assert 0 <= span.start < span.stop <= size
        count[span.start : span.stop] += 1
    return count


# --- law 1: partitions ----------------------------------------------------------------------------


@given(axes())
def test_cores_partition_the_axis(axis):
    assert (painted(map(axis.core, range(axis.tiles)), axis.size) == 1).all()


@given(axes() | axes(blended=True))
@example(AxisTiling(100, tile=64, halo=16, chunk=48))
def test_chunks_partition_the_axis(axis):
    assert (painted(map(axis.chunk_span, range(axis.chunks)), axis.size) == 1).all()


@given(axes(largest=60), axes(largest=60))
def test_tiles_of_all_chunks_partition_the_raster(y, x):
    tiling = Tiling(y, x)
    count = np.zeros(tiling.shape, int)
    runs = 0
    for number in range(tiling.chunks):
        index = tiling.index_of(number)
        chunk = tiling.chunk_at(index)
        for tile in tiling.tiles_of(index):
            assert tile.core.clip(chunk.window) == tile.core
            assert min(tile.core.shape) > 0
            assert tile.window.shape == tiling.tile
            count[tile.core.slices()] += 1
            runs += 1
    assert (count == 1).all()
    assert runs == tiling.runs


# --- law 2: one size, on the lattice, inside the padded raster ------------------------------------


@given(axes() | axes(blended=True))
def test_every_tile_has_one_size_lies_on_the_stride_and_inside_the_padded_raster(axis):
    assert axis.padded == round_up(max(axis.size, axis.least), axis.stride)
    for i in range(axis.tiles):
        span = axis.tile_span(i)
        assert span.size == axis.tile
        assert span.start % axis.stride == 0
        assert span.start >= 0
        assert span.stop <= axis.padded


@given(axes())
def test_the_padding_is_less_than_a_stride_beyond_the_raster_or_the_smallest_input(axis):
    assert 0 <= axis.padded - max(axis.size, axis.least) < axis.stride


# --- law 3: the halo ------------------------------------------------------------------------------


@given(axes())
def test_a_core_has_its_halo_wherever_its_tile_is_cut(axis):
    for i in range(axis.tiles):
        core, span = axis.core(i), axis.tile_span(i)
        assert span.start == 0 or core.start - span.start >= axis.halo
        assert span.stop == axis.padded or span.stop - core.stop >= axis.halo
        assert span.start <= core.start
        assert core.stop <= span.stop


# --- law 4: chunks do not move tiles --------------------------------------------------------------


@given(axes() | axes(blended=True), st.integers(1, 500))
def test_tiles_do_not_depend_on_chunks(axis, chunk):
    other = dataclasses.replace(axis, chunk=chunk)
    tiles = [(axis.core(i), axis.tile_span(i)) for i in range(axis.tiles)]
    assert [(other.core(i), other.tile_span(i)) for i in range(other.tiles)] == tiles


# --- law 5: blending ------------------------------------------------------------------------------


@given(axes(blended=True))
def test_blended_tiles_cover_every_pixel(axis):
    assert (painted(map(axis.core, range(axis.tiles)), axis.size) >= 1).all()
    spans = [axis.tile_span(i) for i in range(axis.tiles)]
    assert all(
        ahead.stop - behind.start >= axis.overlap for ahead, behind in itertools.pairwise(spans)
    )


@given(axes(blended=True), st.sampled_from([1, 2, 4]))
def test_no_weight_is_zero_and_ramps_of_two_neighbours_add_up_to_one(axis, finer):
    total, sharing = np.zeros(axis.padded * finer), np.zeros(axis.padded * finer, int)
    for i in range(axis.tiles):
        span = axis.tile_span(i)
        inside = slice(span.start * finer, span.stop * finer)
        weights = axis.weights(span, (np.arange(inside.start, inside.stop) + 0.5) / finer)
        assert (weights > 0).all()
        assert (weights <= 1).all()
        total[inside] += weights
        sharing[inside] += 1
    assert (sharing >= 1).all()
    assert (total[sharing == 1] == 1).all()
    if axis.tiles > 1 and 2 * axis.overlap <= axis.tile:
        # The last tile, shifted inward, shares more than the overlap with the one before.
        regular = slice(0, axis.tile_span(axis.tiles - 1).start * finer)
        assert total[regular] == pytest.approx(1)


def test_weights_are_a_hann_ramp_inside_and_one_at_the_rasters_edge():
    axis = AxisTiling(size=20, tile=8, overlap=4)
    ramp = np.sin(np.pi / 2 * np.array([0.125, 0.375, 0.625, 0.875])) ** 2
    flat, centres = np.ones(4), np.arange(20) + 0.5
    spans = [axis.tile_span(i) for i in range(axis.tiles)]
    actual = [axis.weights(span, centres[slice(*span)]) for span in spans]
    assert [tuple(span) for span in spans] == [(0, 8), (4, 12), (8, 16), (12, 20)]
    assert actual[0] == pytest.approx([*flat, *ramp[::-1]])
    assert actual[1] == pytest.approx([*ramp, *ramp[::-1]])
    assert actual[3] == pytest.approx([*ramp, *flat])


# --- chunks and what they read --------------------------------------------------------------------


@given(axes(largest=90), axes(largest=90), st.integers(1, 40))
def test_the_order_has_every_chunk_once_and_goes_down_strips(y, x, columns):
    tiling = Tiling(y, x)
    numbers = list(tiling.order(columns))
    assert sorted(numbers) == list(range(tiling.chunks))
    strips = [(j // columns, i, j) for i, j in map(tiling.index_of, numbers)]
    assert strips == sorted(strips)
    assert list(tiling.order(tiling.grid[1])) == list(range(tiling.chunks))


def test_the_order_of_a_million_chunks_is_made_as_it_is_asked_for():
    axis = AxisTiling(2048 * 100_000, tile=608, halo=48)
    order = Tiling(axis, axis).order()
    assert [next(order) for _ in range(4)] == [0, 1, 2, 100_000]


def test_a_strip_without_columns_is_refused():
    axis = AxisTiling(100, tile=20)
    with pytest.raises(ValueError, match="columns must be at least 1, got 0"):
        Tiling(axis, axis).order(0)


def decodes(order, tiling, capacity, threads=3):
    """Decodes per block of 512 px, with chunks in an order on threads that take turns by tile."""
    cache, count = {}, 0
    whole = Window(Span(0, tiling.y.size), Span(0, tiling.x.size))
    todo = iter(order)
    at_work = [iter(()) for _ in range(threads)]
    while at_work:
        for thread in list(at_work):
            tile = next(thread, None)
            if tile is None:
                at_work.remove(thread)
                at_work += [tiling.tiles_of(tiling.index_of(n)) for n in itertools.islice(todo, 1)]
                continue
            rows, cols = (
                range(span.start // 512, -(-span.stop // 512)) for span in tile.window.clip(whole)
            )
            for block in itertools.product(rows, cols):
                count += block not in cache
                # The newest is last.
                cache[block] = cache.pop(block, None)
            while len(cache) > capacity:
                cache.pop(next(iter(cache)))
    return count / (-(-tiling.y.size // 512) * -(-tiling.x.size // 512))


def test_strips_have_blocks_decoded_less_often_than_rows_have():
    axis = AxisTiling(20_480, tile=608, halo=48, stride=16)
    tiling, capacity = Tiling(axis, axis), 78  # blocks of 6 bands of uint16 in 256 MB
    rows, strips = (decodes(tiling.order(n), tiling, capacity) for n in (10, 3))
    # Rows of chunks share two rows of blocks in four, strips of 3 two columns in twelve.
    assert rows == pytest.approx(1.45, abs=0.05)
    assert strips == pytest.approx(1.15, abs=0.05)


@given(axes(largest=120) | axes(largest=120, blended=True))
def test_tiles_of_a_chunk_are_those_whose_core_meets_it(axis):
    for k in range(axis.chunks):
        chunk = axis.chunk_span(k)
        meeting = [i for i in range(axis.tiles) if axis.core(i).clip(chunk).size]
        assert list(axis.tiles_of(k)) == meeting


@given(axes() | axes(blended=True))
def test_a_chunk_reads_exactly_what_its_tiles_see_of_the_raster(axis):
    for k in range(axis.chunks):
        seen = np.zeros(axis.padded, bool)
        for i in axis.tiles_of(k):
            span = axis.tile_span(i)
            seen[span.start : span.stop] = True
        pixels = np.flatnonzero(seen[: axis.size])
        assert axis.read_span(k) == Span(int(pixels[0]), int(pixels[-1]) + 1)


@given(whole_step_axes() | whole_step_axes(blended=True))
@example(AxisTiling(101, tile=48, halo=8, stride=4, chunk=64))
@example(AxisTiling(101, tile=48, overlap=24, stride=4, chunk=48))
def test_a_chunk_of_whole_steps_needs_no_more_than_its_reach_of_its_neighbours(axis):
    before, after = axis.reach
    if not axis.overlap:
        assert max(before, after) <= axis.halo
    for k in range(axis.chunks):
        chunk, read = axis.chunk_span(k), axis.read_span(k)
        assert chunk.start - before <= read.start
        assert read.stop <= chunk.stop + after


@given(whole_step_axes())
def test_chunks_of_whole_cores_run_every_tile_once(axis):
    assert axis.aligned
    assert axis.runs == axis.tiles


@given(axes() | axes(blended=True))
def test_runs_count_a_tile_on_a_chunk_border_twice(axis):
    assert axis.runs == sum(len(axis.tiles_of(k)) for k in range(axis.chunks))


@given(axes())
def test_a_remainder_shorter_than_the_tail_is_merged(axis):
    sizes = [axis.chunk_span(k).size for k in range(axis.chunks)]
    assert sizes[:-1] == [axis.chunk] * (axis.chunks - 1)
    if axis.chunks > 1:
        assert sizes[-1] < axis.chunk + axis.tail
        assert sizes[-1] >= min(axis.chunk, axis.tail)


def test_a_remainder_of_the_tail_stays_a_chunk_and_one_pixel_less_does_not():
    axis = AxisTiling(size=2 * 64 + 40, tile=48, halo=8, stride=4, chunk=64)
    assert axis.tail == 40
    assert [axis.chunk_span(k).size for k in range(axis.chunks)] == [64, 64, 40]
    less = dataclasses.replace(axis, size=axis.size - 1)
    assert [less.chunk_span(k).size for k in range(less.chunks)] == [64, 64 + 39]


def test_a_raster_smaller_than_a_tile_is_one_tile_of_the_padded_raster():
    axis = AxisTiling(size=5, tile=64, halo=16, stride=4, chunk=32, least=10)
    assert (axis.padded, axis.tile, axis.tiles, axis.step) == (12, 12, 1, 12)
    assert axis.tile_span(0) == Span(0, 12)
    assert axis.read_span(0) == Span(0, 5)


# --- the product of two axes ----------------------------------------------------------------------


@given(axes(largest=60), axes(largest=60))
def test_chunks_are_numbered_in_row_major_order(y, x):
    tiling = Tiling(y, x)
    expected = [(i, j) for i in range(y.chunks) for j in range(x.chunks)]
    assert [tiling.index_of(n) for n in range(tiling.chunks)] == expected
    for i, j in expected:
        chunk = tiling.chunk_at((i, j))
        assert chunk.window == Window(y.chunk_span(i), x.chunk_span(j))
        assert chunk.read == Window(y.read_span(i), x.read_span(j))


@given(axes(largest=60), axes(largest=60))
def test_overhead_is_the_share_of_pixels_computed_beyond_the_raster(y, x):
    tiling = Tiling(y, x)
    computed = sum(
        tile.window.shape[0] * tile.window.shape[1]
        for n in range(tiling.chunks)
        for tile in tiling.tiles_of(tiling.index_of(n))
    )
    assert tiling.overhead == pytest.approx(computed / (y.size * x.size) - 1)


# --- spans and windows ----------------------------------------------------------------------------

SPANS = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda s: Span(min(s), max(s)))


@given(SPANS, SPANS)
def test_clip_keeps_the_pixels_that_both_spans_hold(a, b):
    common = set(range(*a)) & set(range(*b))
    clipped = a.clip(b)
    assert set(range(*clipped)) == common
    assert clipped.size == len(common)


@given(SPANS, SPANS)
def test_slices_of_a_window_cut_its_pixels_out_of_an_array(rows, cols):
    raster = np.arange(400).reshape(20, 20)
    window = Window(rows, cols)
    cut = raster[window.slices()]
    assert cut.shape == window.shape
    assert window.bounds() == (*window.origin, *window.shape)
    from_five = raster[min(5, rows.start) :, min(5, cols.start) :]
    origin = (min(5, rows.start), min(5, cols.start))
    assert np.array_equal(from_five[window.slices(origin)], cut)


@given(st.integers(0, 1000), st.integers(1, 70))
def test_round_up_is_the_first_multiple_not_below(value, multiple):
    assert round_up(value, multiple) == next(
        n for n in range(value, value + multiple) if n % multiple == 0
    )


# --- refusals -------------------------------------------------------------------------------------


@given(
    name=st.sampled_from(["halo", "overlap"]),
    stride=st.integers(1, 9),
    context=st.integers(1, 40),
    tile=st.integers(1, 90),
    size=st.integers(100, 1000),
)
def test_context_too_large_for_the_tile_names_both_and_the_advice_works(
    name, stride, context, tile, size
):
    tile, numbers = tile * stride, {name: context * stride, "stride": stride}
    filled = context * stride * (2 if name == "halo" else 1)
    assume(tile < filled + stride <= round_up(size, stride))
    both = rf"{name} {numbers[name]} px .* got {tile}: pass tile=(\d+)"
    with pytest.raises(ValueError, match=both) as refusal:
        AxisTiling(size, tile, **numbers)
    advised = int(re.search(both, str(refusal.value)).group(1))
    assert AxisTiling(size, advised, **numbers).tiles >= 1


@pytest.mark.parametrize(("name", "advice"), [("tile", 52), ("halo", 12)])
def test_numbers_off_the_stride_name_the_stride_and_the_next_multiple(name, advice):
    numbers = {"tile": 48, "halo": 8, "stride": 4} | {name: advice - 1}
    with pytest.raises(ValueError, match=f"stride 4, got {advice - 1}: pass {name}={advice}"):
        AxisTiling(500, **numbers)


@pytest.mark.parametrize("name", ["size", "tile", "stride", "chunk"])
def test_sides_below_one_pixel_are_refused_by_name(name):
    numbers = {"size": 100, "tile": 32, "stride": 1, "chunk": 64} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1 px, got 0"):
        AxisTiling(**numbers)


@pytest.mark.parametrize(("halo", "overlap"), [(-1, 0), (0, -1)])
def test_negative_context_is_refused(halo, overlap):
    with pytest.raises(ValueError, match=f"must not be negative, got {halo} and {overlap}"):
        AxisTiling(100, tile=32, halo=halo, overlap=overlap)


def test_a_tile_below_the_smallest_input_is_refused_with_both():
    with pytest.raises(ValueError, match="at least 30 px, got tile 16: pass tile=32"):
        AxisTiling(100, tile=16, stride=4, least=30)


def test_halo_and_overlap_exclude_each_other():
    with pytest.raises(ValueError, match="a halo or overlap to be blended, not both"):
        AxisTiling(100, tile=32, halo=4, overlap=4)
