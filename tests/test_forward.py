"""`Forward`: raw numbers in, pixels of the output raster out, against plain numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import daskinfer as di
from conftest import N3, Pixel, seeded
from daskinfer.forward import Forward, OutputFormat, native, to_classes
from oracle import whole

DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
          ">i2", ">u2", ">f4", ">f8", "f2", "f4", "f8"]  # fmt: skip


def batch_of(dtype="float32", n=3, bands=2, side=(9, 7), seed=0):
    numbers = np.random.default_rng(seed).integers(0, 120, (n, bands, *side))
    return (numbers % 2 if dtype == "bool" else numbers).astype(dtype)


def forward(net, *, raster_scale=(1.0,), raster_offset=(0.0,), **spec):
    model = di.load_model(net, **{"output": "values"} | spec)
    return Forward(model, raster_scale=raster_scale, raster_offset=raster_offset).run


class Fixed(nn.Module):
    """Gives the scores it was made with, whatever it sees."""

    def __init__(self, scores):
        super().__init__()
        self.register_buffer("scores", torch.as_tensor(scores, dtype=torch.float32))

    def forward(self, x):
        return self.scores.expand(len(x), *self.scores.shape)


def scores_of(*columns):
    """Scores ``(channel, 1, x)`` from one column per pixel."""
    return np.array(columns, np.float32).T[:, None]


def classes(scores, **spec):
    batch = np.zeros((1, 1, *np.shape(scores)[1:]), np.float32)
    return forward(Fixed(scores), output="classes", **spec)(batch, None)[0, 0]


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_gives_the_float32_reference(dtype):
    net, raw = seeded(N3), batch_of(dtype)
    expected = [whole(net, tile, scale=0.01, offset=-0.2) for tile in raw]
    actual = forward(net, scale=0.01, offset=-0.2)(raw, None)
    assert actual.dtype == np.float32
    assert np.abs(actual - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("uint8", 255), ("uint16", 65535), ("uint32", 2**32 - 1), ("int64", -(2**40)),
     ("uint64", 2**63), ("f8", 1e30), (">f4", -1.5)],
)  # fmt: skip
def test_the_ends_of_a_dtype_arrive_as_float32(dtype, number):
    raw = np.full((1, 1, 2, 2), number, dtype)
    assert (forward(Pixel())(raw, None) == np.float32(number)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_keeps_the_numbers_and_is_contiguous_in_this_byte_order(dtype):
    raw = batch_of(dtype)[:, ::-1, ::2, ::-1]
    kept = native(raw)
    assert np.array_equal(kept, raw)
    assert kept.flags.c_contiguous
    assert kept.dtype.isnative
    assert torch.from_numpy(kept).shape == raw.shape


@pytest.mark.parametrize("flip", [1, -1])
def test_arrays_with_negative_strides_and_read_only_ones_are_taken_without_a_warning(flip):
    raw, valid = batch_of()[:, :, ::flip, ::flip], np.ones((3, 9, 7), bool)
    raw.flags.writeable = valid.flags.writeable = False
    net = seeded(N3)
    expected = [whole(net, tile, scale=0.01) for tile in raw]
    assert np.abs(forward(net, scale=0.01)(raw, valid) - expected).max() < 1e-6


# --- normalisation --------------------------------------------------------------------------------

NUMBERS = {"scale": (1e-4, 2e-4), "offset": (-0.1, 0.3), "mean": (0.2, 0.5), "std": (0.05, 0.7)}


def test_normalisation_is_raw_scale_offset_mean_std_in_this_order_per_band():
    raw = batch_of("uint16")
    shaped = {name: np.reshape(value, (2, 1, 1)) for name, value in NUMBERS.items()}
    expected = (raw * shaped["scale"] + shaped["offset"] - shaped["mean"]) / shaped["std"]
    actual = forward(Pixel(), **NUMBERS)(raw, None)
    assert actual == pytest.approx(expected, rel=1e-5)


def test_a_mean_that_is_large_against_the_spread_keeps_its_digits():
    raw = np.array([4_000_000, 4_000_001, 4_000_002], "float32").reshape(1, 1, 1, 3)
    actual = forward(Pixel(), mean=4_000_001, std=1.5)(raw, None).ravel()
    assert actual.tolist() == [np.float32(-1 / 1.5), 0, np.float32(1 / 1.5)]


def test_the_rasters_scale_and_offset_are_used_where_the_model_has_none():
    raw = np.array([9, 9], "uint8").reshape(1, 2, 1, 1)
    run = forward(Pixel(), raster_scale=(0.1, 0.5), raster_offset=(0.0, -1.0))
    assert run(raw, None).ravel() == pytest.approx([0.9, 3.5])


def test_the_models_scale_replaces_the_rasters_pair():
    raw = np.full((1, 2, 1, 1), 10, "uint8")
    rasters = {"raster_scale": (0.1, 0.5), "raster_offset": (5.0, 6.0)}
    assert forward(Pixel(), scale=2, **rasters)(raw, None).ravel().tolist() == [20, 20]
    assert forward(Pixel(), scale=2, offset=1, **rasters)(raw, None).ravel().tolist() == [21, 21]
    assert forward(Pixel(), offset=0, **rasters)(raw, None).ravel() == pytest.approx([1, 5])


def test_unsigned_numbers_do_not_wrap_below_zero():
    raw = np.full((1, 1, 1, 1), 500, "uint16")
    assert forward(Pixel(), scale=1e-4, offset=-0.1)(raw, None).item() == pytest.approx(-0.05)


# --- nodata ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [None, 0, 250])
def test_nodata_pixels_hold_the_mean_or_the_normalised_fill(fill):
    raw = batch_of("float32")
    valid = np.random.default_rng(1).random((3, 9, 7)) < 0.7
    raw[:, 0][~valid] = np.nan
    raw[:, 1][~valid] = np.inf
    filled = np.where(valid[:, None], raw, np.float32(0 if fill is None else fill))
    expected = forward(Pixel(), **NUMBERS)(filled, None)
    if fill is None:
        expected = np.where(valid[:, None], expected, np.float32(0))
    actual = forward(Pixel(), fill=fill, **NUMBERS)(raw, valid)
    assert np.isfinite(actual).all()
    assert np.array_equal(actual, expected)


def test_pixels_beside_nodata_see_the_fill_and_nothing_else():
    net, raw = seeded(N3), batch_of("float32", n=1)
    valid = np.ones((1, 9, 7), bool)
    valid[0, 4, 3] = False
    raw[:, :, 4, 3] = np.nan
    expected = whole(net, raw[0], valid=valid[0], scale=0.01)
    assert np.abs(forward(net, scale=0.01)(raw, valid)[0] - expected).max() < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
def test_a_model_that_works_in_place_leaves_the_input_as_it_was(dtype):
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(0)

    raw = batch_of(dtype)
    before = raw.copy()
    assert (forward(InPlace())(raw, None) == 0).all()
    assert np.array_equal(raw, before)


# --- outputs --------------------------------------------------------------------------------------


def test_classes_are_the_index_of_the_highest_score_as_uint8():
    scores = np.random.default_rng(0).normal(size=(5, 6, 7)).astype(np.float32)
    actual = classes(scores)
    assert actual.dtype == np.uint8
    assert np.array_equal(actual, scores.argmax(axis=0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_is_nodata_among_classes(bad):
    actual = classes(scores_of([1, bad, 3], [1, 2, 3], [bad, bad, bad], [3, 2, 1]))
    assert actual.tolist() == [[255, 2, 255, 0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_is_nan_among_values_and_spares_the_other_channels(bad):
    scores = scores_of([1, bad, 3], [1, 2, 3])
    actual = forward(Fixed(scores))(np.zeros((1, 1, 1, 2), np.float32), None)[0]
    expected = np.where(np.isfinite(scores), scores, np.nan)
    assert np.array_equal(actual, expected, equal_nan=True)


def test_three_hundred_classes_are_uint16():
    scores = np.zeros((300, 1, 2), np.float32)
    scores[299, 0, 0] = 1
    scores[0, 0, 1] = np.nan
    actual = classes(scores)
    assert actual.dtype == np.uint16
    assert actual.tolist() == [[299, 65535]]


@pytest.mark.parametrize(
    ("channels", "dtype", "nodata"),
    [(1, "uint8", 255), (2, "uint8", 255), (255, "uint8", 255), (256, "uint16", 65535),
     (65535, "uint16", 65535)],
)  # fmt: skip
def test_the_dtype_of_classes_has_room_for_all_of_them_and_nodata(channels, dtype, nodata):
    assert OutputFormat.of("classes", channels) == OutputFormat(1, dtype, nodata)
    assert nodata >= channels


def test_more_classes_than_uint16_holds_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"65536 classes.*65535"):
        OutputFormat.of("classes", 65536)


def test_values_and_probabilities_are_float32_with_nan_for_every_channel():
    for output in ("values", "probabilities"):
        form = OutputFormat.of(output, 7)
        assert (form.bands, form.dtype) == (7, "float32")
        assert np.isnan(form.nodata)


def test_one_channel_is_class_one_where_its_sigmoid_reaches_the_threshold():
    logits = np.array([-3, -0.01, 0, 0.01, 3], np.float32)
    probability = 1 / (1 + np.exp(-logits))
    for threshold in (0.1, 0.5, 0.9):
        actual = classes(scores_of(*logits[:, None]), threshold=threshold, activation="sigmoid")
        assert np.array_equal(actual[0], probability >= threshold)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_channel_that_is_not_finite_is_nodata(bad):
    assert classes(scores_of([bad], [5], [-5]), activation="sigmoid").tolist() == [[255, 1, 0]]


def test_softmax_and_sigmoid_turn_scores_into_probabilities():
    scores = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
    expected = {
        "softmax": np.exp(scores) / np.exp(scores).sum(axis=0),
        "sigmoid": 1 / (1 + np.exp(-scores)),
        None: scores,
    }
    batch = np.zeros((1, 1, 5, 6), np.float32)
    for activation, probabilities in expected.items():
        run = forward(Fixed(scores), output="probabilities", activation=activation)
        assert np.abs(run(batch, None)[0] - probabilities).max() < 1e-6


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (lambda x: x[:, 0], r"\(3, 9, 7\)"),
        (lambda x: {"out": x}, "dict"),
        (lambda x: (x, x), "tuple"),
    ],
)
def test_a_model_that_returns_no_scores_is_refused_with_what_it_returned(result, named):
    class Odd(nn.Module):
        def forward(self, x):
            return result(x)

    with pytest.raises(ValueError, match=rf"\(n, channel, y, x\), got {named}"):
        forward(Odd())(batch_of(), None)


# --- blending -------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("activation", [None, "softmax", "sigmoid"])
def test_blended_classes_are_probabilities_that_decide_as_the_scores_do(channels, activation):
    scores = np.random.default_rng(0).normal(size=(channels, 5, 6)).astype(np.float32)
    spec = {"output": "classes", "activation": activation}
    model = di.load_model(Fixed(scores), **spec)
    batch = np.zeros((1, 1, 5, 6), np.float32)
    values = Forward(model, blended=True).run(batch, None)
    assert values.dtype == np.float32
    assert values.shape == (1, channels, 5, 6)
    if channels > 1 or activation is not None:
        assert 0 <= values.min() <= values.max() <= 1
    decided = to_classes(torch.from_numpy(values), model).numpy()
    assert np.array_equal(decided, Forward(model).run(batch, None))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", [{"output": "classes"}, {"activation": "softmax"}])
def test_a_score_that_is_not_finite_is_nan_before_blending_as_well(bad, spec):
    scores = scores_of([1, bad, 3], [1, 2, 3])
    model = di.load_model(Fixed(scores), **{"output": "values"} | spec)
    values = Forward(model, blended=True).run(np.zeros((1, 1, 1, 2), np.float32), None)[0, :, 0]
    assert np.isnan(values[:, 0]).all()
    assert np.isfinite(values[:, 1]).all()


# --- precision and batches ------------------------------------------------------------------------


def test_bfloat16_differs_from_float32_by_its_rounding_and_no_more():
    # 8 bits of mantissa: 2**-8 per product, three layers, scores of size 1.
    net, raw = seeded(N3), batch_of()
    exact = forward(net, scale=0.01)(raw, None)
    rounded = forward(net, scale=0.01, precision="bfloat16")(raw, None)
    assert rounded.dtype == np.float32
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 0 < error < 3 * 2**-8


def test_normalisation_stays_in_float32_under_bfloat16():
    raw = np.full((1, 1, 1, 1), 1001, "uint16")
    run = forward(Pixel(), mean=1000, precision="bfloat16")
    assert run(raw, None).item() == 1


@pytest.mark.parametrize("size", [1, 3, 8])
def test_results_do_not_depend_on_the_batch(size):
    net, raw = seeded(N3), batch_of(n=8)
    expected = [whole(net, tile, scale=0.01) for tile in raw]
    run = forward(net, scale=0.01)
    batches = [run(raw[i : i + size], None) for i in range(0, 8, size)]
    assert np.abs(np.concatenate(batches) - expected).max() < 1e-5
