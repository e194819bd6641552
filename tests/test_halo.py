"""The receptive field is measured, so each test knows it another way: by formula or by cutting."""

from __future__ import annotations

import subprocess
import sys
import warnings
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from daskinfer.halo import DEFAULT_OVERLAP, choose_halo
from daskinfer.receptive.field import ReceptiveField
from daskinfer.receptive.probe import measure_field
from daskinfer.tiling import round_up
from nets import (
    Attention,
    CleansNan,
    Compares,
    Conv,
    CoordConv,
    Deconv,
    Lagged,
    Level,
    Multiple,
    OneSize,
    Patches,
    Pool,
    ResNetUNet,
    Shuffle,
    SqueezeExcite,
    Strided,
    Up,
    Valid,
    analytic_radius,
    body,
    build,
    dependence,
    family,
    total_stride,
)


@pytest.fixture(autouse=True)
def _one_thread():
    """Small convolutions on contended cores spend their time waiting for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seeded(make, *args):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make(*args).eval()


def conv(kernel=3, width=4, **options):
    return nn.Conv2d(width, width, kernel, padding=kernel // 2, **options)


def sequence(*layers):
    return nn.Sequential(*layers).eval()


@torch.no_grad()
def cut_error(net, cut_at, halo, length=512, bands=3, scale=1.0):
    """Largest difference to the whole beyond `halo` px after a cut along x, in units of its std."""
    x = torch.randn(1, bands, 64, length, generator=torch.Generator().manual_seed(3))
    whole, part = net(x), net(x[..., cut_at:])
    kept = int((cut_at + halo) * scale)
    difference = whole[..., kept:] - part[..., int(halo * scale) :]
    return (difference.abs().max() / whole.std()).item()


# --- the analytic family -------------------------------------------------------------------------


def check_radius(layers, seed):
    expected = analytic_radius(layers, 384)
    field = measure_field(build(layers, seed=seed), 3, limit=512)
    assert field.exact, field
    assert field.radius == (expected, expected)
    assert field.stride == (total_stride(layers),) * 2
    assert (field.scale, field.margin, field.bands) == (1.0, (0, 0), 2)


@settings(max_examples=20, deadline=None)
@given(family(), st.integers(0, 99))
def test_radius_equals_the_analytic_one(layers, seed):
    check_radius(layers, seed)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(family(), st.integers(0, 99))
def test_radius_equals_the_analytic_one_often(layers, seed):
    check_radius(layers, seed)


@settings(max_examples=10, deadline=None)
@given(family(), st.integers(0, 99), st.integers(1, 6))
def test_a_cut_with_the_halo_equals_the_whole(layers, seed, steps):
    net = build(layers, seed=seed)
    field = measure_field(net, 3, limit=512)
    assert cut_error(net, steps * field.stride[1], field.halo[1]) <= 1e-5


@pytest.mark.parametrize(
    "layers",
    [
        (Conv(3),) * 3,
        (Conv(5, 2), Conv(2)),
        (Conv(3), Level(4, (Conv(3),)), Conv(3)),
        (Conv(3), Level(2, (Conv(3), Level(2, (Conv(3),), "bilinear"))), Conv(3)),
    ],
)
def test_one_stride_less_than_the_halo_differs(layers):
    net = build(layers)
    field = measure_field(net, 3)
    stride, halo = field.stride[1], field.halo[1]
    assert cut_error(net, 8 * stride, halo) <= 1e-5
    # Even kernels look further to one side: only that side's cut needs the whole halo.
    flipped = lambda x: net(x.flip(-1)).flip(-1)  # noqa: E731
    short = [cut_error(f, 8 * stride, halo - stride) for f in (net, flipped)]
    assert max(short) > 1e-4


# --- single kinds of layers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "radius", "stride", "scale"),
    [
        ((Conv(3),) * 3, 3, 1, 1),
        ((Conv(3),) * 5, 5, 1, 1),
        ((Conv(3, 2), Conv(3)), 3, 1, 1),
        ((Conv(1),), 0, 1, 1),
        # A kernel of 4 looks 1 px to one side and 2 to the other.
        ((Conv(4),), 2, 1, 1),
        # 256 px away, unseen by any probe shorter than that.
        ((Conv(3, 256),), 256, 1, 1),
        ((Conv(3), Pool(4), Conv(3), Up(4), Conv(3)), 9, 4, 1),
        ((Conv(3), Pool(3), Conv(3), Up(3), Conv(3)), 7, 3, 1),
        ((Conv(3), Pool(5), Conv(3), Up(5)), None, 5, 1),
        ((Conv(3), Pool(6, "avg"), Conv(3), Up(6)), None, 6, 1),
        ((Conv(3), Pool(7), Conv(3), Up(7)), None, 7, 1),
        ((Strided(3, 2, 1), Conv(3), Deconv(4, 2)), None, 2, 1),
        ((Strided(3, 2, 1), Conv(3), Deconv(3, 2)), None, 2, 1),
        ((Strided(2, 2), Conv(3), Deconv(2, 2), Conv(3)), None, 2, 1),
        ((Conv(3), Conv(3), Shuffle(2)), 2, 1, 2),
        ((Conv(3), Up(4, "bilinear"), Conv(3)), None, 1, 4),
        ((Conv(3), Pool(2), Conv(3), Shuffle(4), Conv(3)), None, 2, 2),
        ((Conv(3), Pool(4, "avg"), Conv(3)), 8, 4, Fraction(1, 4)),
        ((Strided(7, 4, 3), Conv(3), Strided(3, 4, 1)), None, 16, Fraction(1, 16)),
    ],
)
def test_layers(layers, radius, stride, scale):
    expected = analytic_radius(layers, 840, Fraction(scale))
    assert radius in (None, expected)
    field = measure_field(build(layers), 3)
    assert field == ReceptiveField(
        radius=(expected, expected),
        stride=(stride, stride),
        scale=float(scale),
        bands=2,
        looked=field.looked,
    )


def test_a_valid_net_says_what_it_does_not_output():
    field = measure_field(build((Valid(3), Valid(3), Valid(3))), 3)
    assert (field.radius, field.margin, field.stride) == ((3, 3), (3, 3), (1, 1))
    assert field.exact


def test_the_far_side_of_a_valid_net_lacks_the_odd_pixel():
    layers = (Valid(4), Conv(3))
    field = measure_field(build(layers), 3)
    assert field.margin == (1, 1)
    assert field.radius[0] == analytic_radius(layers, 128, margin=1)


def test_a_valid_net_with_pooling():
    layers = (Valid(3), Pool(2), Valid(3), Up(2), Valid(3))
    out = dependence(layers, 128).shape[0]
    field = measure_field(build(layers), 3)
    assert field.margin == ((128 - out) // 2,) * 2
    assert field.radius[0] == analytic_radius(layers, 128, margin=field.margin[0])
    assert field.stride == (2, 2)


def test_axes_are_measured_apart():
    net = sequence(
        nn.Conv2d(3, 4, (1, 5), padding=(0, 2)),
        nn.MaxPool2d((2, 3)),
        conv(),
        nn.Upsample(scale_factor=(2, 3)),
    )
    field = measure_field(net, 3)
    assert field.stride == (2, 3)
    # A conv column of 2 rows is spoilt, or one of 3 columns beyond the one the 5-kernel reaches.
    assert field.radius == (2, 6)


def test_depthwise_and_grouped():
    net = sequence(conv(5, 8, groups=8), nn.SiLU(), conv(3, 8, groups=2))
    assert measure_field(net, 8).radius == (3, 3)


# --- infinite, or not equivariant ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (lambda: nn.GroupNorm(2, 4), "GroupNorm"),
        (lambda: nn.InstanceNorm2d(4), "InstanceNorm2d"),
        (lambda: SqueezeExcite(4), "SqueezeExcite"),
        (lambda: Attention(4), "Attention"),
    ],
)
def test_whatever_mixes_the_whole_image_is_infinite(layer, named):
    field = measure_field(seeded(lambda: sequence(conv(), layer(), conv())), 4)
    assert not field.finite
    assert not field.exact
    assert field.radius == (2048, 2048)
    assert "did not end within the 2048 px" in field.reason
    assert named in field.reason


def test_global_pooling_behind_nan_to_num_is_infinite():
    net = seeded(lambda: CleansNan(sequence(conv(), SqueezeExcite(4))))
    assert not measure_field(net, 4).finite


def test_infinite_along_one_axis():
    class Rows(nn.Module):
        def forward(self, x):
            return x - x.mean(3, keepdim=True)

    field = measure_field(sequence(conv(), Rows()), 4)
    assert not field.finite
    assert field.radius == (1, 2048)
    assert field.reason.startswith("along x:")


def test_one_sided_fields_without_an_end_are_infinite():
    for flip in (False, True):

        def net(x, flip=flip):
            return (x.flip(-1).cumsum(-1).flip(-1) if flip else x.cumsum(-1)) / 100

        assert not measure_field(net, 1).finite


@pytest.mark.parametrize(
    ("layer", "radius"),
    [
        (lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), None),
        (lambda: sequence(nn.Upsample(scale_factor=2), CoordConv(4)), 5),
    ],
)
def test_finite_yet_not_equivariant(layer, radius):
    net = seeded(lambda: sequence(conv(), nn.MaxPool2d(2), conv(), layer()))
    field = measure_field(net, 4)
    assert field.finite
    assert not field.equivariant
    assert not field.exact
    assert "no shift of the input up to 64 px" in field.reason
    assert radius is None or field.radius == (radius, radius)
    assert field.stride == (2, 2)


def test_a_random_net_is_told_to_call_eval():
    field = measure_field(nn.Sequential(conv(), nn.Dropout(0.5)).train(), 4)
    assert not field.exact
    assert "eval()" in field.reason


# --- nets that swallow NaN -----------------------------------------------------------------------


def three():
    return body((Conv(3), Conv(3), Conv(3)), 4)


@pytest.mark.parametrize(
    ("make", "radius"),
    [
        (lambda: CleansNan(three()), 3),
        (lambda: CleansNan(body((Conv(3), Level(4, (Conv(3),)), Conv(3)), 4)), 9),
        (lambda: Compares(three(), conv(5)), 5),
        (lambda: sequence(three(), nn.Hardtanh()), 3),
    ],
)
def test_swallowed_nan(make, radius):
    field = measure_field(seeded(make), 4)
    assert field.exact
    assert field.radius == (radius, radius)


def test_one_branch_swallows():
    deep = seeded(lambda: CleansNan(three()))
    near = seeded(conv)
    assert measure_field(lambda x: near(x) + deep(x), 4).radius == (3, 3)


def test_argmax_inside():
    net = seeded(three)
    field = measure_field(lambda x: net(x).argmax(1, keepdim=True), 4)
    assert (field.radius, field.bands, field.exact) == ((3, 3), 1, True)


def test_padding_that_is_felt_further_than_its_pixels():
    field = measure_field(seeded(lambda: Lagged(4, 3)), 4)
    # Output i reads inputs i+2 .. i+4, so a cut before i is felt through the padding only.
    assert field.radius == (4, 4)
    assert field.exact
    ahead = seeded(lambda: sequence(Lagged(4, 3), conv()))
    assert measure_field(ahead, 4).exact


def test_a_net_that_ignores_its_input():
    field = measure_field(lambda x: torch.full_like(x[:, :1], 3.0), 2)
    assert (field.radius, field.stride, field.exact) == ((0, 0), (1, 1), True)


# --- what nets come as ---------------------------------------------------------------------------

UNET = (Conv(3), Level(4, (Conv(3),)), Conv(3))


def test_exported_with_dynamic_sizes(tmp_path):
    y, x = (torch.export.Dim(n, min=2, max=300) for n in "yx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            build(UNET),
            (torch.zeros(1, 3, 32, 32),),
            dynamic_shapes={"input": {2: 4 * y, 3: 4 * x}},
        )
        torch.export.save(program, tmp_path / "net.pt2")
        net = torch.export.load(tmp_path / "net.pt2").module()
    field = measure_field(net, 3)
    assert (field.radius, field.stride, field.exact) == ((9, 9), (4, 4), True)
    assert field.size is None


def test_exported_with_one_size():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.export.export(build(UNET), (torch.zeros(1, 3, 96, 128),)).module()
    field = measure_field(net, 3)
    assert field.size == (96, 128)
    assert (field.radius, field.stride, field.exact) == ((9, 9), (4, 4), True)


def test_traced(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(build(UNET), torch.zeros(1, 3, 32, 32)).save(tmp_path / "net.pt")
        net = torch.jit.load(tmp_path / "net.pt")
    field = measure_field(net, 3)
    assert (field.radius, field.stride, field.exact) == ((9, 9), (4, 4), True)


def test_a_function_is_probed_in_float32():
    net = build(UNET)
    field = measure_field(lambda x: net(x), 3)
    assert (field.radius, field.stride, field.exact) == ((9, 9), (4, 4), True)


def test_a_fixed_size_is_found():
    field = measure_field(seeded(lambda: OneSize(three(), 224)), 4)
    assert field.size == (224, 224)
    assert (field.radius, field.stride, field.exact) == ((3, 3), (1, 1), True)


def test_a_fixed_size_with_positions_is_not_equivariant():
    field = measure_field(seeded(lambda: OneSize(Patches(4, 128), 128)), 4, size=(128, 128))
    assert (field.finite, field.equivariant, field.size) == (True, False, (128, 128))


@pytest.mark.parametrize(
    ("layers", "size", "radius", "stride"), [(None, 16, 3, 1), (None, 64, 3, 1), (UNET, 64, 9, 4)]
)
def test_a_fixed_size_may_be_small(layers, size, radius, stride):
    net = seeded(lambda: OneSize(three() if layers is None else build(layers), size))
    field = measure_field(net, 4 if layers is None else 3)
    assert (field.size, field.radius, field.stride) == ((size,) * 2, (radius,) * 2, (stride,) * 2)
    assert field.exact


def test_positions_are_seen_in_a_small_size_too():
    field = measure_field(seeded(lambda: OneSize(Patches(4, 32), 32)), 4, size=(32, 32))
    assert (field.finite, field.equivariant, field.size) == (True, False, (32, 32))


def test_a_fixed_size_that_mixes_everything():
    field = measure_field(seeded(lambda: OneSize(Attention(4), 64)), 4)
    assert not field.finite
    assert "no input much longer than 64" in field.reason


@pytest.mark.parametrize("multiple", [8, 12, 28, 32, 45])
def test_sizes_the_net_insists_on(multiple):
    field = measure_field(seeded(lambda: Multiple(three(), multiple)), 4)
    assert (field.radius, field.stride, field.exact) == ((3, 3), (multiple,) * 2, True)


def test_an_infinite_net_keeps_its_size_lattice():
    net = seeded(lambda: Multiple(sequence(conv(), nn.GroupNorm(2, 4)), 16))
    assert measure_field(net, 4).stride == (16, 16)


def test_a_net_with_a_longest_input():
    net = seeded(three)

    def short(x):
        if max(x.shape[2:]) > 400:
            raise RuntimeError("too long")
        return net(x)

    field = measure_field(short, 4)
    assert (field.radius, field.exact, field.size) == ((3, 3), True, None)
    assert field.looked < 400


def test_a_field_beyond_the_limit_is_infinite():
    field = measure_field(build((Conv(3, 96), Conv(3, 96))), 3, limit=64)
    assert not field.finite
    assert field.reason == "the reach did not end within the 64 px looked at"


def test_a_gap_does_not_pass_for_an_end():
    # In a first look of 128 px the outer taps of the second layer meet nothing but padding.
    assert measure_field(build((Conv(3, 96), Conv(3, 96))), 3, limit=128).radius == (192, 192)


def test_a_reach_that_grows_with_the_input_is_infinite():
    class Shrunk(nn.Module):
        """A fixed grid of 16 cells, however large the input."""

        def forward(self, x):
            cells = nn.functional.adaptive_avg_pool2d(x, 16)
            return nn.functional.interpolate(cells, size=x.shape[2:], mode="bilinear")

    field = measure_field(Shrunk(), 4)
    assert not field.finite
    assert "still grew" in field.reason


def test_batch_statistics_are_told_to_call_eval():
    field = measure_field(sequence(conv(), nn.BatchNorm2d(4)).train(), 4, limit=128)
    assert not field.exact
    assert "BatchNorm2d in training mode: call eval()" in field.reason


def test_wrong_bands_are_reported_with_the_nets_own_error():
    with pytest.raises(ValueError, match=r"float32 inputs with 5 bands .*expected input.* 3 chan"):
        measure_field(build(UNET), 5)


def test_outputs_must_be_four_dimensional():
    with pytest.raises(ValueError, match="must return one tensor"):
        measure_field(lambda x: {"out": x}, 3)


def test_scales_must_agree():
    with pytest.raises(ValueError, match="differs per axis"):
        measure_field(sequence(conv(), nn.AvgPool2d((1, 2))), 4)


def test_the_callers_state_is_left_alone():
    net = build(UNET)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    measure_field(net, 3, limit=128)
    assert torch.equal(torch.rand(1), expected)
    assert torch.backends.mkldnn.enabled
    assert all(torch.equal(v, before[k]) and v.dtype == torch.float32
               for k, v in net.state_dict().items())  # fmt: skip


def test_importing_does_not_import_torch():
    code = "import sys, daskinfer.halo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_resnet34_unet():
    net = seeded(ResNetUNet)
    field = measure_field(net, 3)
    assert field.exact
    assert (field.radius, field.stride, field.halo) == ((543, 543), (32, 32), (544, 544))
    assert cut_error(net, 64, 544, length=1216) <= 1e-5


def test_small_resnet_unet():
    assert measure_field(seeded(ResNetUNet, 3, 2, 4), 3).halo == (544, 544)


# --- choosing the halo ---------------------------------------------------------------------------

FIELD = ReceptiveField(radius=(13, 5), stride=(4, 4))
GLOBAL = ReceptiveField(radius=(2048, 2048), stride=(32, 48), finite=False)


@given(st.integers(0, 10_000), st.integers(1, 100))
def test_round_up_is_the_next_multiple(value, multiple):
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@pytest.mark.parametrize(
    ("field", "requested", "expected"),
    [
        (FIELD, "auto", (16, 8)),
        (FIELD, 13, (16, 16)),
        (FIELD, (20, 6), (20, 8)),
        (GLOBAL, "auto", (DEFAULT_OVERLAP, 144)),
        (GLOBAL, 0, (0, 0)),
        (ReceptiveField(radius=(1, 1), stride=(1, 1), margin=(2, 0)), "auto", (2, 1)),
    ],
)
def test_choose_halo(field, requested, expected):
    assert choose_halo(field, requested) == expected


def test_a_halo_below_the_radius_warns_with_both_numbers():
    with pytest.warns(UserWarning, match=r"halo 8 px is below .* 13 x 5 px .*halo=\(16, 8\)"):
        assert choose_halo(FIELD, 5) == (8, 8)


def test_three_convolutions_with_a_halo_of_two():
    net = build((Conv(3),) * 3)
    field = measure_field(net, 3)
    with pytest.warns(UserWarning, match="halo 2 px is below the receptive-field radius 3 px"):
        choose_halo(field, 2)
    assert cut_error(net, 16, 2) > 1e-3
    assert cut_error(net, 16, 3) < 1e-6


@pytest.mark.parametrize(
    ("requested", "error", "match"),
    [
        (-1, ValueError, "negative"),
        ((4, -4), ValueError, "negative"),
        ((1, 2, 3), ValueError, "has 3 numbers"),
        ("big", ValueError, "unknown"),
        (2.5, TypeError, "not whole px"),
        (True, TypeError, "not whole px"),
        (None, TypeError, "not whole px"),
    ],
)
def test_odd_requests_are_refused(requested, error, match):
    with pytest.raises(error, match=match):
        choose_halo(FIELD, requested)


@pytest.mark.parametrize(
    "change", [{"radius": (-1, 0)}, {"stride": (0, 1)}, {"scale": 0.0}, {"margin": (0, -1)}]
)
def test_impossible_fields_are_refused(change):
    with pytest.raises(ValueError, match="must"):
        ReceptiveField(**{"radius": (1, 1), "stride": (1, 1)} | change)
