"""Measured seams: halo tables, calibration, blending, augmentation, statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import rasterio
import torch
from torch import nn

import daskinfer as di
from conftest import N3, P4, Pixel, noise, seeded, write_raster
from daskinfer.demo import demo_path
from daskinfer.model.spec import SYMMETRIES
from daskinfer.seam import halo_table
from daskinfer.wrappers import apply, undo
from oracle import whole


class SqueezeExcite(nn.Module):
    """Convolutions gated by the mean over the whole tile: no halo is exact."""

    def __init__(self, bands: int = 6, classes: int = 3) -> None:
        super().__init__()
        self.head = nn.Conv2d(bands, 8, 3, padding=1)
        self.gate = nn.Linear(8, 8)
        self.tail = nn.Conv2d(8, classes, 3, padding=1)

    def forward(self, x):
        x = torch.relu(self.head(x))
        gate = torch.sigmoid(self.gate(x.mean(dim=(2, 3))))
        return self.tail(x * gate[:, :, None, None])


def test_the_exact_halo_leaves_no_seam_and_a_smaller_one_does():
    net = seeded(P4, 6)
    exact = di.seam_error(di.demo_scene(), di.load_model(net, scale=1e-4), tile=64)
    short = di.seam_error(di.demo_scene(), di.load_model(net, scale=1e-4), halo=0, tile=64)
    assert exact.maximum <= 1e-5
    assert exact.changed == 0
    assert short.maximum > 1e-3


def test_seam_error_equals_the_difference_of_two_runs(tmp_path, one_worker):
    net = seeded(N3)
    raw = noise(2, 150, 170, dtype="float32") / 1e4
    source = write_raster(tmp_path / "scene.tif", raw)
    model = di.load_model(net, output="values")
    error = di.seam_error(source, model, halo=1, tile=48)
    with pytest.warns(UserWarning, match="halo 1 px is below"):
        di.run(source, model, tmp_path / "o.tif", halo=1, tile=48, client=one_worker)
    with rasterio.open(tmp_path / "o.tif") as dataset:
        difference = np.abs(dataset.read() - whole(net, raw))
    assert error.maximum == pytest.approx(difference.max(), rel=1e-4)
    assert error.mean == pytest.approx(difference.mean(), rel=1e-4)
    assert error.pixels == 150 * 170


def test_only_classes_are_told_to_change():
    net = nn.Conv2d(6, 2, 3, padding=1)
    for output, told in (("values", False), ("classes", True)):
        error = di.seam_error(demo_path(), di.load_model(net, output=output), halo=0)
        assert math.isnan(error.changed) != told
        assert ("px changed" in repr(error)) == told
        assert "nan" not in repr(error) + error._repr_html_()


def test_a_halo_table_falls_to_zero_at_the_exact_halo():
    rows = halo_table(di.demo_scene(), di.load_model(seeded(P4, 6), scale=1e-4))
    errors = [row.maximum for row in rows]
    assert errors[0] > 1e-3
    assert errors[-1] <= 1e-5
    overheads = [row.overhead for row in rows]
    assert overheads == sorted(overheads)
    assert overheads[0] == 0


class Fading(nn.Sequential):
    """Radius 24, of which the outer 16 px hardly count."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(6, 4, 17, padding=8), nn.ReLU(), nn.Conv2d(4, 2, 33, padding=16))
        with torch.no_grad():
            outer = torch.ones(33, 33, dtype=torch.bool)
            outer[8:-8, 8:-8] = False
            self[2].weight[:, :, outer] *= 1e-6


@pytest.mark.slow
def test_a_calibrated_halo_is_the_smallest_within_the_tolerance(tmp_path):
    model = di.load_model(seeded(Fading), scale=1e-4)
    assert di.receptive_field(model).radius == (24, 24)
    plan = di.plan(demo_path(), model, tmp_path / "o.tif", halo="calibrated", tol=1e-4)
    (halo, _), error = plan.tiling.halo, plan.seam.maximum
    assert error <= 1e-4
    assert 8 <= halo <= 16
    below = di.seam_error(demo_path(), model, halo=halo - 1)
    assert below.maximum > 1e-4
    assert "calibrated" in repr(plan)


def test_calibration_needs_a_model_with_an_exact_halo(tmp_path):
    with pytest.raises(ValueError, match="needs a model with an exact halo"):
        di.plan(demo_path(), seeded(SqueezeExcite), tmp_path / "o.tif", halo="calibrated")


@pytest.mark.parametrize("make", [SqueezeExcite])
def test_blended_classes_change_no_more_across_tile_lines_than_elsewhere(make):
    model = di.load_model(
        seeded(make), scale=1e-4, mean=di.demo_model().mean, std=di.demo_model().std
    )
    error = di.seam_error(di.demo_scene(), model, tile=256)
    assert error.overlap == (128, 128)
    assert error.line_ratio <= 1.2


@pytest.mark.parametrize("name", SYMMETRIES)
def test_symmetries_are_undone(name):
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert torch.equal(undo(apply(x, name), name), x)


def test_the_symmetries_of_the_square_differ():
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert len({tuple(apply(x, name).ravel().tolist()) for name in SYMMETRIES}) == 8


@pytest.mark.parametrize("tta", ["d4", ["identity", "hflip"], ["rot90"]])
def test_augmentation_is_exact_too(tmp_path, one_worker, tta):
    net = seeded(P4)
    names = SYMMETRIES if tta == "d4" else tta

    def averaged(x):
        return torch.stack([undo(net(apply(x, name)), name) for name in names]).mean(dim=0)

    raw = noise(2, 90, 70, dtype="float32") / 1e4
    source = write_raster(tmp_path / "scene.tif", raw)
    model = di.load_model(net, output="values")
    di.run(source, model, tmp_path / "o.tif", tta=tta, tile=48, client=one_worker)
    with rasterio.open(tmp_path / "o.tif") as dataset:
        pixels = dataset.read()
    assert np.abs(pixels - whole(averaged, raw, stride=4)).max() < 1e-5


def test_an_unknown_symmetry_is_refused():
    with pytest.raises(ValueError, match="'rot45'"):
        di.load_model(seeded(N3), tta=["rot45"])


def test_global_statistics_are_those_of_the_raster_and_the_same_for_any_tile(tmp_path, one_worker):
    raw = np.linspace(0, 1000, 64 * 64, dtype=np.float32).reshape(1, 64, 64)
    raw[0, :4] = -1
    source = write_raster(tmp_path / "scene.tif", raw, nodata=-1)
    kept = raw[raw >= 0].astype(np.float64)
    expected = (raw - np.float32(kept.mean())) / np.float32(kept.std())
    expected[raw < 0] = np.nan
    results = []
    for tile in (16, 32, 64):
        output = tmp_path / f"{tile}.tif"
        model = di.load_model(Pixel(), output="values")
        di.run(source, model, output, tile=tile, statistics="global", client=one_worker)
        with rasterio.open(output) as dataset:
            results.append(dataset.read())
    np.testing.assert_allclose(results[0], expected, atol=1e-5)
    assert all(np.array_equal(results[0], other, equal_nan=True) for other in results)


def test_global_statistics_are_of_the_numbers_that_the_model_sees(tmp_path):
    raw = noise(1, 64, 64, dtype="float32")
    source = write_raster(tmp_path / "scene.tif", raw)
    for spec, shift in (({"offset": 100}, 100), ({"scale": 2}, 0), ({"scale": 2, "offset": 5}, 5)):
        model = di.load_model(Pixel(), output="values", **spec)
        plan = di.plan(source, model, tmp_path / "o.tif", statistics="global")
        expected = raw.astype(np.float64).mean() * spec.get("scale", 1) + shift
        assert plan.model.mean == pytest.approx((expected,))


def test_statistics_per_tile_are_refused(tmp_path):
    with pytest.raises(ValueError, match="visible squares"):
        di.plan(demo_path(), seeded(N3, 6), tmp_path / "o.tif", statistics="tile")


def test_global_statistics_do_not_replace_those_of_the_model(tmp_path):
    with pytest.raises(ValueError, match="replace the model's own"):
        di.plan(demo_path(), di.demo_model(), tmp_path / "o.tif", statistics="global")


class Instance(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(6, 8, 3, padding=1),
            nn.InstanceNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 3, 3, padding=1),
        )


@pytest.mark.parametrize("make", [SqueezeExcite, Instance])
def test_default_blending_of_the_scene_warns_and_leaves_no_line(tmp_path, make):
    model = di.load_model(
        seeded(make), scale=1e-4, mean=di.demo_model().mean, std=di.demo_model().std
    )
    with pytest.warns(UserWarning, match="no halo is exact .* blended over 128 px"):
        di.plan(demo_path(), model, tmp_path / "o.tif")
    error = di.seam_error(di.demo_scene(), model)
    assert error.overlap == (128, 128)
    assert error.line_ratio <= 1.2


class OneSize(nn.Module):
    """Positions are added to the input, of one size only: as in a vision transformer."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, 6, size, size) * 0.1)
        self.head = nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x):
        return self.head(x + self.place)


@pytest.mark.parametrize("shape", [(100, 150), (40, 200), (64, 64), (1, 1)])
def test_models_of_one_input_size_are_blended(tmp_path, one_worker, shape):
    net = seeded(OneSize)
    raw = noise(6, *shape, dtype="float32") / 1e4
    source = write_raster(tmp_path / "s.tif", raw)
    with pytest.warns(UserWarning, match="no halo is exact"):
        report = di.run(
            source, di.load_model(net, output="values"), tmp_path / "o.tif", client=one_worker
        )
    with rasterio.open(tmp_path / "o.tif") as dataset:
        pixels = dataset.read()
    assert report.nonfinite == 0
    assert pixels.shape == (3, *shape)
    padded = np.pad(raw, [(0, 0), *((0, max(0, 64 - side)) for side in shape)], mode="edge")
    with torch.inference_mode():
        corner = net(torch.from_numpy(padded[None, :, :64, :64].copy()))[0].numpy()
    # The first tile alone covers the corner.
    np.testing.assert_allclose(
        pixels[:, :20, :20], corner[:, : shape[0], : shape[1]][:, :20, :20], atol=1e-5
    )


# --- numbers that cannot be averaged --------------------------------------------------------------


class Made(nn.Module):
    """What a function makes of scores."""

    def __init__(self, make) -> None:
        super().__init__()
        self.net = seeded(N3)
        self.make = make

    def forward(self, x):
        return self.make(self.net(x))


IDS = {
    "ids": lambda y: y.argmax(1, keepdim=True),
    "ids as floats": lambda y: y.argmax(1, keepdim=True).float(),
    "mask": lambda y: y[:, :1] > 0,
    "count": lambda y: y.relu().round(),
}


@pytest.mark.parametrize("make", IDS)
@pytest.mark.parametrize(("spec", "choice"), [({"tta": "d4"}, {}), ({}, {"overlap": 16})])
def test_ids_are_not_averaged(tmp_path, make, spec, choice):
    path = write_raster(tmp_path / "s.tif", noise(2, 90, 90))
    model = di.load_model(Made(IDS[make]), output="values", **spec)
    cure = "leave tta= out" if spec else "leave overlap= out"
    with pytest.raises(ValueError, match=f"gives whole numbers.*: {cure}, or leave the argmax"):
        di.plan(path, model, tmp_path / "o.tif", **choice)


def test_ids_without_an_exact_halo_are_not_blended(tmp_path):
    path = write_raster(tmp_path / "s.tif", noise(2, 90, 90))
    net = Made(lambda y: (y - y.mean((2, 3), keepdim=True)).argmax(1, keepdim=True))
    model = di.load_model(net, output="values")
    with (
        pytest.warns(UserWarning, match="no halo is exact"),
        pytest.raises(ValueError, match=r"whole numbers.*: pass halo= to cut tiles, or leave"),
    ):
        di.plan(path, model, tmp_path / "o.tif")
    with pytest.warns(UserWarning, match="no halo is exact"):
        assert di.plan(path, model, tmp_path / "o.tif", halo=8).inference.tiling.halo == (8, 8)


def test_ids_are_cut_exactly(tmp_path, one_worker):
    raw = noise(2, 90, 90, dtype="float32") / 1e4
    path, net = write_raster(tmp_path / "s.tif", raw), Made(IDS["ids"])
    model = di.load_model(net, output="values")
    di.run(path, model, tmp_path / "o.tif", tile=32, chunk=32, client=one_worker)
    top = np.sort(whole(net.net, raw), axis=0)
    certain = top[-1] - top[-2] > 1e-5
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert np.array_equal(dataset.read(1)[certain], whole(net, raw)[0][certain])


@pytest.mark.parametrize(
    ("make", "spec"),
    [
        (lambda y: y, {"output": "values"}),
        # Votes.
        (IDS["mask"], {"output": "classes", "threshold": 0.5}),
        (lambda y: (y == y.amax(1, keepdim=True)).long(), {"output": "classes"}),
    ],
)
def test_what_has_a_mean_is_averaged(tmp_path, make, spec):
    path = write_raster(tmp_path / "s.tif", noise(2, 90, 90))
    model = di.load_model(Made(make), **spec)
    assert di.plan(path, model, tmp_path / "o.tif", overlap=16).inference.blended
