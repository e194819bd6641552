"""Overview reductions against slow, obvious ones."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.cog.overview import level_shapes, reduce2x2

INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]


def slow_cell(values, how, nodata):
    """Reduce the existing pixels of one cell, in reading order."""
    valid = [v for v in values if v == v and v != nodata]
    if how == "nearest":
        return values[0]
    if not valid:
        return np.nan if nodata is None else nodata
    if how == "mode":
        counts = Counter(valid)
        return max(valid, key=counts.get)  # the first of the most frequent
    mean = sum(Fraction(v) for v in valid) / len(valid)
    if isinstance(valid[0], int):
        mean = int((mean + Fraction(1, 2)) // 1)
    return mean


def slow_reduce(array, how, nodata):
    rows, cols = (-(-n // 2) for n in array.shape)
    cells = [
        [
            slow_cell(array[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].ravel().tolist(), how, nodata)
            for j in range(cols)
        ]
        for i in range(rows)
    ]
    return [[v if isinstance(v, int) else float(v) for v in row] for row in cells]


@st.composite
def arrays(draw, dtypes):
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):  # few values: ties and twins
        return rng.integers(0, 4, shape).astype(dtype)
    if dtype.kind == "f":
        return rng.normal(0, 1e3, shape).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype, endpoint=True)


@settings(max_examples=150, deadline=None)
@given(
    arrays([*INTEGERS, "float32"]), st.sampled_from(["mode", "nearest"]), st.sampled_from([None, 0])
)
def test_mode_and_nearest_equal_the_slow_way(array, how, nodata):
    expected = np.array(slow_reduce(array, how, nodata), array.dtype)
    out = reduce2x2(array, how, nodata)
    assert out.dtype == array.dtype
    np.testing.assert_array_equal(out, expected)


@settings(max_examples=150, deadline=None)
@given(arrays(INTEGERS), st.sampled_from([None, 0, 3]))
def test_integer_average_is_exact_and_never_nodata(array, nodata):
    slow = slow_reduce(array, "average", nodata)
    some = ~np.array(slow_reduce((array != nodata).astype("u1"), "mode", 0), bool)
    expected = np.array(slow, array.dtype)
    if nodata is not None:  # a mean that is nodata by accident moves up by one
        expected[~some & (expected == nodata)] += 1
    np.testing.assert_array_equal(reduce2x2(array, "average", nodata), expected)


@settings(max_examples=100, deadline=None)
@given(arrays(["float32", "float64"]), st.floats(0, 1), st.sampled_from([None, np.nan, -9999.0]))
def test_float_average_ignores_nodata_and_nan(array, share, nodata):
    rng = np.random.default_rng(1)
    array[rng.random(array.shape) < share] = np.nan
    if nodata is not None:
        array[rng.random(array.shape) < share / 2] = nodata
    expected = np.array(slow_reduce(array, "average", nodata))
    tolerance = 4 * np.finfo(array.dtype).eps * 1e4
    np.testing.assert_allclose(reduce2x2(array, "average", nodata), expected, 1e-6, tolerance)


@pytest.mark.parametrize("how", ["mode", "average", "nearest"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_parts_on_even_lines_equal_the_whole(how, dtype):
    array = np.random.default_rng(0).integers(0, 5, (3, 37, 53)).astype(dtype)
    whole = reduce2x2(array, how, 0)
    rows = [reduce2x2(part, how, 0) for part in (array[:, :10], array[:, 10:24], array[:, 24:])]
    np.testing.assert_array_equal(np.concatenate(rows, 1), whole)
    cols = [reduce2x2(part, how, 0) for part in (array[..., :2], array[..., 2:])]
    np.testing.assert_array_equal(np.concatenate(cols, 2), whole)


def test_mode_counts_only_valid_pixels():
    cell = np.array([[0, 5], [7, 7]], "u1")
    assert reduce2x2(cell, "mode", 0).item() == 7
    assert reduce2x2(np.array([[0, 0], [0, 9]], "u1"), "mode", 0).item() == 9
    assert reduce2x2(np.array([[0, 0], [0, 9]], "u1"), "mode").item() == 0


def test_mode_of_floats_ignores_nan():
    cell = np.array([[np.nan, np.nan], [3, 4]], "f4")
    assert reduce2x2(cell, "mode", np.nan).item() == 3
    assert np.isnan(reduce2x2(np.full((2, 2), np.nan, "f4"), "mode", np.nan)).all()


@pytest.mark.parametrize(
    ("nodata", "pixels", "expected"),
    [(255, [254, 254, 255, 255], 254), (127, [126, 128, 126, 128], 128)],
)
def test_average_is_never_nodata(nodata, pixels, expected):
    cell = np.array(pixels, "u1").reshape(2, 2)
    assert reduce2x2(cell, "average", nodata).item() == expected


def test_average_of_extremes_does_not_overflow():
    big = np.finfo("f4").max
    np.testing.assert_array_equal(reduce2x2(np.full((2, 2), big, "f4"), "average"), [[big]])
    wild = np.array([[np.inf, -np.inf], [1, 1]], "f4")
    assert np.isnan(reduce2x2(wild, "average")).all()


def test_level_shapes_round_up():
    assert level_shapes(1, 1, 512) == ((1, 1),)
    assert level_shapes(1, 513, 512) == ((1, 513), (1, 257))
    assert level_shapes(513, 1, 512) == ((513, 1),)
    assert level_shapes(1025, 300, 512) == ((1025, 300), (513, 150), (257, 75))


def test_unknown_resampling_is_refused():
    with pytest.raises(ValueError, match="cubic"):
        reduce2x2(np.zeros((2, 2)), "cubic")
