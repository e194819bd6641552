"""What is found before the first chunk: on the client's CPU, and on every worker's device."""

from __future__ import annotations

import os

import numpy as np
import pytest
import rasterio
import torch
import xarray as xr
from torch import nn

import daskinfer as di
from conftest import N3, noise, seeded, write_raster
from daskinfer.forward import Forward
from daskinfer.halo import accepts_bands
from daskinfer.infer import make_device
from daskinfer.preflight import check_device_runs
from daskinfer.receptive.measured import is_remembered
from daskinfer.receptive.netrun import Runner
from daskinfer.settle import Choice, settle
from daskinfer.source import ArraySource
from models import quiet, save_script
from oracle import whole


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 8, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(8, 3, 1))


@pytest.fixture
def scene(tmp_path):
    return write_raster(tmp_path / "scene.tif", noise(2, 60, 60))


def settled(net, **choice):
    source = ArraySource(xr.DataArray(noise(2, 60, 60), dims=("band", "y", "x")))
    model = di.load_model(net, output="values")
    return settle(source, model, Choice(tile=32, **choice))[0]


# --- modes that are baked in ----------------------------------------------------------------------


def test_dropout_of_an_eager_model_in_train_mode_is_off(tmp_path, scene, one_worker):
    net = seeded(Dropping)
    expected = whole(net, noise(2, 60, 60))
    net.train()
    di.run(scene, di.load_model(net, output="values"), tmp_path / "out.tif", client=one_worker)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        assert np.allclose(dataset.read(), expected, atol=1e-2, rtol=1e-5)
    assert net.training


@pytest.mark.parametrize("way", ["traced", "exported", "module"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_mode_that_is_baked_in_is_found(tmp_path, scene, way, mode):
    net = seeded(Dropping).train(mode == "train")
    with quiet():
        if way == "traced":
            source = save_script(tmp_path / "net.pt", net, torch.zeros(1, 2, 8, 8))
        else:
            sides = {2: torch.export.Dim("y", min=2), 3: torch.export.Dim("x", min=2)}
            program = torch.export.export(net, (torch.zeros(1, 2, 16, 24),), dynamic_shapes=[sides])
            source = program.module() if way == "module" else tmp_path / "net.pt2"
            if way == "exported":
                torch.export.save(program, source)
    if mode == "eval":
        di.plan(scene, source, tmp_path / "out.tif")
        return
    with pytest.raises(ValueError, match=r"two results for one input .*export it after"):
        di.plan(scene, source, tmp_path / "out.tif")


def test_weights_that_are_nan_are_found(tmp_path, scene):
    net = seeded(nn.Conv2d, 2, 3, 1)
    with torch.no_grad():
        net.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"no finite number .* weights NaN"):
        di.plan(scene, net, tmp_path / "out.tif")


def test_a_network_that_wants_large_numbers_is_no_such(tmp_path, scene):
    class Root(nn.Module):
        def forward(self, x):
            return (x - 100).sqrt()

    di.plan(scene, di.load_model(Root(), output="values"), tmp_path / "out.tif")


# --- the device -----------------------------------------------------------------------------------


class Elsewhere(nn.Module):
    """Runs in one process only, as constants that were traced for one device."""

    def __init__(self, process: int, how: str = "device") -> None:
        super().__init__()
        self.process = process
        self.how = how
        self.conv = nn.Conv2d(2, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if os.getpid() == self.process:
            return y
        if self.how == "device":
            raise RuntimeError("Expected all tensors to be on the same device, cuda:0 and cpu!")
        if self.how == "nan":
            return y * float("nan")
        if self.how == "random":
            return y + torch.rand_like(y)
        if self.how == "batch":
            return y + len(x)
        return y[:, :2]


MESSAGES = {
    "device": "it fails there: RuntimeError: Expected all tensors to be on the same device",
    "nan": "it gives no finite number for a tile of noise",
    "random": "it gives two results for one input",
    "batch": "it gives another result for a tile among 4",
    "shape": "it gives 2 scores per pixel, measured were 3",
}


@pytest.mark.parametrize("how", MESSAGES)
def test_what_is_wrong_on_the_workers_stops_the_run_before_any_chunk(
    tmp_path, scene, two_workers, how
):
    model = di.load_model(seeded(Elsewhere, os.getpid(), how), output="values")
    plan = di.plan(scene, model, tmp_path / "out.tif", chunk=32, tile=32, batch_size=4)
    begun = []
    with pytest.raises(di.InferenceError, match=f"on device cpu, .*{MESSAGES[how]}") as caught:
        di.run(plan, client=two_workers, callbacks=[lambda event: begun.append(type(event))])
    assert str(caught.value).startswith(f"worker {caught.value.worker} cannot do its part")
    assert caught.value.worker in two_workers.scheduler_info()["workers"]
    assert di.monitor.ChunkDone not in begun
    assert di.monitor.ChunkFailed not in begun


def test_a_worker_that_has_not_measured_the_model_checks_it(two_workers):
    inference = settled(seeded(N3), batch_size=4)
    assert is_remembered("steady", inference.model, 2)
    shipped = inference.model.ship()

    def count(inference, shipped):
        from daskinfer import forward, preflight
        from daskinfer.infer import make_device

        shipped.receive()
        sizes = []
        original = forward.Forward.scores

        def scores(self, x):
            sizes.append(tuple(x.shape))
            return original(self, x)

        forward.Forward.scores = scores
        try:
            preflight.check_device_runs(make_device(inference), inference)
        finally:
            forward.Forward.scores = original
            shipped.release()
        return sizes

    one, tile = next(iter(two_workers.scheduler_info()["workers"])), (2, 32, 32)
    sizes = two_workers.run(count, inference, shipped, workers=[one])[one]
    assert sizes == [(1, *tile), (1, *tile), (4, *tile)]


def test_nothing_is_run_twice_where_the_client_measured_on_the_same_device(monkeypatch):
    inference = settled(seeded(N3, seed=5))
    device = make_device(inference)
    monkeypatch.setattr(device, "scores", None)
    check_device_runs(device, inference)


@pytest.mark.parametrize("options", [{"reproducible": True}])
def test_batches_of_one_size_are_checked_in_that_size(monkeypatch, options):
    inference = settled(seeded(N3, seed=6), batch_size=3, **options)
    monkeypatch.setattr("daskinfer.preflight.is_remembered", lambda *_: False)
    device = make_device(inference)
    sizes = []
    scores = Forward.scores

    def counted(x):
        sizes.append(len(x))
        return scores(device, x)

    monkeypatch.setattr(device, "scores", counted)
    check_device_runs(device, inference)
    assert sizes == [3, 3]


def test_a_model_for_another_device_is_refused_with_both_names():
    inference = settled(seeded(N3).to("cpu"), device="cpu")
    model = inference.model.patch(accelerator="cuda")
    with pytest.raises(ValueError, match="the model runs on cuda only, not on cpu"):
        make_device(type(inference)(**{**vars(inference), "model": model}))


def test_a_model_that_fails_on_its_first_tile_is_refused_by_the_plan_with_the_device(
    tmp_path, scene
):
    class Failing(nn.Module):
        def forward(self, x):
            raise RuntimeError("Expected all tensors to be on the same device, cuda:0 and cpu!")

    with pytest.raises(ValueError, match=r"device cpu.*same device, cuda:0"):
        di.plan(scene, di.load_model(Failing()), tmp_path / "out.tif")
    assert not (tmp_path / "out.tif.partial").exists()


# --- networks that work in place, and sizes that do not fit ---------------------------------------


class InPlace(nn.Module):
    """Normalises in place, as many training scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 5000
        x /= 3000
        return self.conv(x)


@pytest.mark.parametrize("tta", [(), ("identity", "hflip")])
def test_networks_that_work_in_place_run(tmp_path, scene, one_worker, tta):
    net = seeded(InPlace)
    model = di.load_model(net, output="values", tta=tta)
    assert di.receptive_field(model, bands=2).radius == (1, 1)
    di.run(scene, model, tmp_path / "out.tif", client=one_worker, tile=32, chunk=32)
    raw = noise(2, 60, 60)
    parts = [whole(net, raw.copy())]
    if tta:
        parts.append(whole(net, raw[..., ::-1])[..., ::-1])
    with rasterio.open(tmp_path / "out.tif") as dataset:
        assert np.allclose(dataset.read(), np.mean(parts, axis=0), atol=1e-4)


def test_a_network_whose_input_is_used_again_gets_a_copy():
    x = torch.ones(2, 8, 8)
    runner = Runner(seeded(InPlace), 2, torch.float32)
    assert torch.equal(runner(x), runner(x))
    assert (x == 1).all()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: nn.Conv2d(2, 3, 3, padding=2), "34 px for an input of 32 px, where 32 px"),
        (lambda: nn.Conv2d(2, 3, 3, 2, padding=2), "17 px for an input of 32 px, where 16 px"),
    ],
)
def test_outputs_larger_than_the_input_are_refused_by_the_plan(tmp_path, scene, make, told):
    with pytest.raises(ValueError, match=f"returns {told} have room: crop"):
        di.plan(scene, seeded(make), tmp_path / "out.tif")


class Last(nn.Conv2d):
    """Returns ``(n, y, x, channel)``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).permute(0, 2, 3, 1)


class Pooled(nn.Conv2d):
    """One score for a whole tile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean((2, 3), keepdim=True)


@pytest.mark.parametrize(
    ("net", "told"), [(Last, "62 px along y for 1088 px and 62"), (Pooled, "1 px along y .* and 1")]
)
def test_outputs_that_do_not_grow_with_the_input_are_refused(tmp_path, scene, net, told):
    with pytest.raises(ValueError, match=rf"{told} for 64: .* permute its output"):
        di.plan(scene, seeded(net, 2, 3, 3), tmp_path / "out.tif")


@pytest.mark.parametrize("side", [3, 5, 7, 9])
def test_bands_that_the_network_unshuffles_are_not_those_of_its_first_layer(tmp_path, scene, side):
    net = seeded(
        nn.Sequential,
        nn.PixelUnshuffle(side),
        nn.Conv2d(2 * side * side, 3, 1),
        nn.Upsample(scale_factor=side),
    )
    plan = di.plan(scene, net, tmp_path / "out.tif")
    assert plan.field.stride == (side, side)


def test_bands_are_tried_on_the_only_size():
    class OneSize(nn.Sequential):
        def forward(self, x):
            if x.shape[2:] != (36, 36):
                raise RuntimeError("36 px only")
            return super().forward(x)

    net = OneSize(nn.PixelUnshuffle(2), nn.Conv2d(8, 3, 1), nn.Upsample(scale_factor=2))
    assert accepts_bands(di.load_model(net, tile=36), 2)
    assert not accepts_bands(di.load_model(net, tile=36), 3)
