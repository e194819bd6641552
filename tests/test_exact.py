"""Seams, edges, output scale, unpadded and blended models."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import torch
from torch import nn

import daskinfer as di
from conftest import N3, P4, TRANSFORM, Pixel, noise, ramp, seeded, write_raster
from oracle import whole


def values(net, **spec):
    return di.load_model(net, output="values", **spec)


def run(tmp_path, client, raw, model, **options):
    """Write `raw`, run, read back: ``(pixels, profile)``."""
    source = write_raster(tmp_path / "scene.tif", raw)
    di.run(source, model, tmp_path / "out.tif", client=client, overwrite=True, **options)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        return dataset.read(), dataset.profile


def both(tmp_path, client, raw, model, **options):
    """Pixels of `run`, checked to equal those of `predict` and its declared shape."""
    pixels, _ = run(tmp_path, client, raw, model, **options)
    lazy = di.predict(di.open_raster(tmp_path / "scene.tif"), model, **options)
    computed = lazy.compute(scheduler="threads")
    assert computed.shape == lazy.shape == pixels.shape
    assert computed.dtype == lazy.dtype == pixels.dtype
    np.testing.assert_allclose(computed.values, pixels, atol=1e-6)
    return pixels


class Widened(nn.Sequential):
    """Three 3x3 convolutions, of which one is dilated by 14: radius 1 + 14 + 16 = 31."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=14, dilation=14),
            nn.ReLU(),
            nn.Conv2d(4, 2, 3, padding=16, dilation=16),
        )


def test_every_pixel_is_predicted_where_it_lies(tmp_path, one_worker):
    pixels = both(tmp_path, one_worker, ramp(83, 61), values(Pixel()), tile=32, chunk=32)
    assert np.array_equal(pixels, ramp(83, 61))


@pytest.mark.parametrize("shape", [(1, 1), (1, 200), (7, 5), (40, 200)])
def test_rasters_smaller_than_tile_or_halo(tmp_path, one_worker, shape):
    net = seeded(Widened)
    raw = noise(1, *shape, dtype="float32") / 1e4
    # Cores of (16, 48) px, with the halo of 31 px around them.
    pixels = both(tmp_path, one_worker, raw, values(net), tile=(16 + 62, 48 + 62), chunk=64)
    assert np.abs(pixels - whole(net, raw)).max() < 1e-5


def test_chunks_stay_on_the_stride_lattice(tmp_path, one_worker):
    net = seeded(P4)
    raw = noise(2, 101, 101, dtype="float32") / 1e4
    pixels = both(tmp_path, one_worker, raw, values(net), tile=48, chunk=32, halo=16)
    assert np.abs(pixels - whole(net, raw, stride=4)).max() < 1e-5


def test_a_halo_below_the_radius_warns_with_both_numbers_and_is_off(tmp_path, one_worker):
    net = seeded(N3)
    raw = noise(2, 70, 90, dtype="float32") / 1e4
    with pytest.warns(UserWarning, match=r"halo 2 px is below .* radius 3 px"):
        pixels, _ = run(tmp_path, one_worker, raw, values(net), tile=32, chunk=32, halo=2)
    assert np.abs(pixels - whole(net, raw)).max() > 1e-3


def test_edges_and_corners_are_exact(tmp_path, one_worker):
    net = seeded(N3)
    raw = noise(2, 70, 90, dtype="float32") / 1e4
    pixels = both(tmp_path, one_worker, raw, values(net), tile=32, chunk=32, halo=3)
    assert np.abs(pixels - whole(net, raw)).max() < 1e-6


class Doubled(nn.Module):
    def forward(self, x):
        return torch.stack([x[:, 0], 2 * x[:, 0]], dim=1)


def test_a_model_may_change_the_number_of_bands(tmp_path, one_worker):
    raw = noise(4, 100, 100, dtype="float32")
    pixels = both(tmp_path, one_worker, raw, values(Doubled()), tile=25, chunk=25, halo=2)
    assert np.array_equal(pixels, np.stack([raw[0], 2 * raw[0]]))


class Valid(nn.Sequential):
    """Two unpadded convolutions: 3 px of rim."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 5))


@pytest.mark.parametrize("chunk", [32, 2048])
def test_unpadded_models_leave_a_rim_of_nodata(tmp_path, one_worker, chunk):
    net = seeded(Valid)
    raw = noise(1, 90, 75, dtype="float32") / 1e4
    pixels = both(tmp_path, one_worker, raw, values(net), tile=32, chunk=chunk)
    expected = np.full((2, 90, 75), np.nan, np.float32)
    with torch.inference_mode():
        expected[:, 3:-3, 3:-3] = net(torch.from_numpy(raw)[None])[0].numpy()
    np.testing.assert_allclose(pixels, expected, atol=1e-5)


@pytest.mark.parametrize("kernels", [(2,), (4,), (4, 1), (2, 3), (5,), (3, 3)])
@pytest.mark.parametrize("shape", [(33, 50), (54, 101), (105, 146)])
def test_unpadded_models_of_any_kernel_and_size(tmp_path, one_worker, kernels, shape):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Conv2d(1, 1, kernel) for kernel in kernels))
    raw = noise(1, *shape, dtype="float32") / 1e4
    near = sum(kernel - 1 for kernel in kernels) // 2
    with torch.inference_mode():
        inner = net(torch.from_numpy(raw)[None])[0].numpy()
    expected = np.full((1, *shape), np.nan, np.float32)
    expected[:, near : near + inner.shape[1], near : near + inner.shape[2]] = inner
    pixels = both(tmp_path, one_worker, raw, values(net), tile=(24, 18), chunk=(40, 32))
    np.testing.assert_allclose(pixels, expected, atol=1e-5)


def test_the_rim_of_unpadded_models_is_not_counted_as_non_finite(tmp_path, one_worker):
    source = write_raster(tmp_path / "scene.tif", noise(1, 60, 75))
    report = di.run(source, values(seeded(Valid)), tmp_path / "out.tif", tile=32, client=one_worker)
    assert report.nonfinite == 0


class Up2(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.ConvTranspose2d(4, 1, 2, stride=2))


class Down4(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 4, stride=4))


class Up4(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.PixelShuffle(4), nn.Conv2d(1, 1, 3, padding=1)
        )


@pytest.mark.parametrize(("build", "scale", "stride"), [(Up2, 2, 1), (Up4, 4, 1), (Down4, 0.25, 4)])
@pytest.mark.parametrize("shape", [(20, 30), (100, 76), (33, 50)])
def test_output_scale(tmp_path, one_worker, build, scale, stride, shape):
    net = seeded(build)
    raw = noise(1, *shape, dtype="float32") / 1e4
    height, width = (int(np.ceil(side * scale)) for side in shape)
    padded = np.pad(raw, [(0, 0), *((0, -side % stride) for side in shape)], mode="edge")
    with torch.inference_mode():
        expected = net(torch.from_numpy(padded)[None])[0, :, :height, :width].numpy()
    pixels = both(tmp_path, one_worker, raw, values(net), tile=24, chunk=32)
    assert pixels.shape == (1, height, width)
    assert np.abs(pixels - expected).max() < 1e-5


def test_output_scale_moves_the_transform(tmp_path, one_worker):
    _, profile = run(tmp_path, one_worker, noise(1, 20, 30), values(seeded(Up2)))
    assert (profile["height"], profile["width"]) == (40, 60)
    assert profile["transform"] == TRANSFORM @ TRANSFORM.scale(0.5)
    _, profile = run(tmp_path, one_worker, noise(1, 20, 32), values(seeded(Down4)))
    assert profile["transform"] == TRANSFORM @ TRANSFORM.scale(4)


def test_a_window_moves_the_origin(tmp_path, one_worker):
    pixels, profile = run(
        tmp_path, one_worker, ramp(120, 100), values(Pixel()), window=(50, 20, 50, 50)
    )
    assert np.array_equal(pixels, ramp(120, 100)[:, 50:100, 20:70])
    assert profile["transform"] == TRANSFORM @ TRANSFORM.translation(20, 50)
    assert (profile["transform"].c, profile["transform"].f) == (500_200, 5_599_500)


def test_nodata_of_finer_and_coarser_outputs(tmp_path, one_worker):
    raw = np.ones((1, 16, 16), np.float32)
    raw[0, :4, :4] = np.nan
    raw[0, 8, 8] = np.nan
    fine = both(tmp_path, one_worker, raw, values(seeded(Up2)))
    assert np.array_equal(np.isnan(fine[0]), np.isnan(raw[0]).repeat(2, 0).repeat(2, 1))
    coarse = both(tmp_path, one_worker, raw, values(seeded(Down4)))
    expected = np.zeros((4, 4), bool)
    expected[0, 0] = True
    assert np.array_equal(np.isnan(coarse[0]), expected)


class One(nn.Module):
    """1 everywhere, and never shift-equivariant nor finite: its mean is of the whole tile."""

    def forward(self, x):
        return torch.ones_like(x[:, :1]) + 0 * x.mean(dim=(1, 2, 3), keepdim=True)


class Instance(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 3, 1))


@pytest.mark.filterwarnings("ignore:no halo is exact")
@pytest.mark.parametrize("shape", [(70, 90), (33, 200), (1, 1), (64, 64)])
@pytest.mark.parametrize("overlap", [8, 24, 31])
def test_blending_weights_add_up_to_one_everywhere(tmp_path, one_worker, shape, overlap):
    raw = noise(1, *shape, dtype="float32") / 1e4
    pixels = both(tmp_path, one_worker, raw, values(One()), tile=32, chunk=32, overlap=overlap)
    np.testing.assert_allclose(pixels, 1, atol=1e-6)


@pytest.mark.filterwarnings("ignore:no halo is exact")
def test_blended_result_does_not_depend_on_chunks(tmp_path, one_worker):
    raw = noise(1, 150, 170, dtype="float32") / 1e4
    model = values(seeded(Instance))
    results = [
        both(tmp_path, one_worker, raw, model, tile=48, overlap=16, chunk=chunk)
        for chunk in (48, 64, 2048)
    ]
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=1e-5)


def test_models_without_an_exact_halo_are_named_and_blended(tmp_path, one_worker):
    raw = noise(1, 300, 300)
    with pytest.warns(UserWarning, match=r"no halo is exact .* blended over 128 px"):
        plan = di.plan(write_raster(tmp_path / "s.tif", raw), seeded(Instance), tmp_path / "o.tif")
    assert plan.inference.blended
    assert "blended" in repr(plan)


def test_exact_models_may_be_blended_on_request(tmp_path, one_worker):
    raw = noise(2, 90, 90, dtype="float32") / 1e4
    net = seeded(N3)
    blended = both(tmp_path, one_worker, raw, values(net), tile=48, overlap=16)
    inner = np.abs(blended - whole(net, raw))
    assert 0 < inner.max() < 0.5
    with pytest.raises(ValueError, match="not both"):
        di.plan(tmp_path / "scene.tif", net, tmp_path / "o.tif", halo=8, overlap=8)
