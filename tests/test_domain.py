"""Networks that noise does not suit: logarithms, classes, rectifiers that stay shut.

The field of such a network is that of the convolutions behind its first layer, which looks at one
pixel.
"""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import torch
from torch import nn
from torch.nn import functional as F

import daskinfer as di
from conftest import N3, P4, noise, seeded, write_raster
from daskinfer.forward import Forward
from daskinfer.preflight import check_device_runs
from daskinfer.receptive.domain import CLASSES, REAL, drawn
from daskinfer.receptive.probe import measure_field
from daskinfer.settle import Choice, settle
from daskinfer.source import source_of
from oracle import whole

TABLE = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))


def embedded(ids):
    return F.embedding(ids.long(), TABLE).permute(0, 3, 1, 2)


FIRST = {
    "decibel": lambda x: (10 * torch.log10(x) + 15) / 10,
    "root": torch.sqrt,
    "power": lambda x: x**0.3,
    "ratio": lambda x: torch.log(x[:, :1] / x[:, 1:]).repeat(1, 2, 1, 1),
    "logit": torch.logit,
    "high root": lambda x: (x - 900).sqrt(),
    "shut": lambda x: F.relu(x - 500),
    "one-hot": lambda x: F.one_hot(x[:, 0].long(), 2).permute(0, 3, 1, 2).float(),
    "table": lambda x: embedded(x[:, 0]),
    "table of tens": lambda x: embedded(x[:, 0] // 10),
}
TAKEN = {
    "high root": "large numbers", "shut": "large numbers", "one-hot": "2 classes",
    "table": "10 classes", "table of tens": "100 classes",
}  # fmt: skip

WITHOUT_POOL = ("decibel", "table")


class After(nn.Module):
    """A network behind a function of single pixels."""

    def __init__(self, first, net) -> None:
        super().__init__()
        self.first = FIRST[first]
        self.net = net

    def forward(self, x):
        return self.net(self.first(x))


def read(path):
    with rasterio.open(path) as dataset:
        return dataset.read()


@pytest.mark.parametrize("first", FIRST)
def test_the_field_is_measured_on_numbers_that_show_it(first):
    # A pool of 4 spoils up to 3 px more, the 3x3 behind it 4, the two others 1 each.
    net, radius, stride = (N3, 3, 1) if first in WITHOUT_POOL else (P4, 9, 4)
    field = measure_field(After(first, seeded(net)), 2, limit=256)
    assert (field.radius, field.stride) == ((radius, radius), (stride, stride))
    assert (field.scale, field.margin, field.exact) == (1, (0, 0), True)
    assert field.domain == TAKEN.get(first, "fractions")


def test_what_noise_suits_is_measured_on_noise():
    assert measure_field(seeded(N3), 2, limit=128).domain == "noise"


def test_what_always_gives_the_same_has_no_seams():
    class Shut(nn.Module):
        def forward(self, x):
            return F.relu(x - 1e9)

    field = measure_field(nn.Sequential(Shut(), seeded(P4)), 2)
    assert (field.radius, field.stride, field.scale) == ((9, 9), (4, 4), 1)
    assert field.exact


def test_what_shows_on_no_numbers_is_not_exact_and_says_so():
    class Lost(nn.Module):
        def forward(self, x):
            return torch.log(-1 - x.abs())

    field = measure_field(nn.Sequential(Lost(), seeded(P4)), 2)
    assert not field.exact
    # Sizes are seen all the same.
    assert (field.stride, field.scale) == ((4, 4), 1)
    assert "pass halo=" in field.reason


def test_a_channel_that_is_never_finite_hides_nothing():
    class Masked(nn.Module):
        def forward(self, x):
            return torch.cat([x, torch.full_like(x[:, :1], -torch.inf)], 1)

    field = measure_field(nn.Sequential(seeded(P4), Masked()), 2)
    assert (field.radius, field.stride, field.domain) == ((9, 9), (4, 4), "noise")


@pytest.mark.parametrize(("first", "high"), [("decibel", 3), ("table", 10)])
def test_a_run_equals_the_whole(tmp_path, first, high, one_worker):
    raw = noise(2, 150, 130, dtype="float32") / 1e4 * high
    raw = np.floor(raw) if first == "table" else raw + 1e-3
    path, net = write_raster(tmp_path / "s.tif", raw), After(first, seeded(P4))
    model = di.load_model(net, output="values")
    di.run(path, model, tmp_path / "o.tif", tile=64, chunk=64, client=one_worker)
    assert np.allclose(read(tmp_path / "o.tif"), whole(net, raw, stride=4), atol=1e-4)


def test_workers_try_a_model_on_the_numbers_it_was_measured_on(tmp_path, monkeypatch):
    raw = np.zeros((2, 64, 64), np.uint8)
    model = di.load_model(After("table", seeded(N3)), output="values")
    source = source_of(write_raster(tmp_path / "s.tif", raw))
    inference, _ = settle(source, model, Choice(batch_size=2, tile=32))
    monkeypatch.setattr("daskinfer.preflight.is_remembered", lambda *_: False)
    device, seen = Forward(model), []
    scores = device.scores

    def noted(x):
        seen.append(x.unique().tolist())
        return scores(x)

    monkeypatch.setattr(device, "scores", noted)
    check_device_runs(device, inference)
    assert seen == [list(range(10))] * 3


@pytest.mark.parametrize("domain", [*REAL, *CLASSES])
def test_domains_hold_what_they_say(domain):
    x = drawn(domain, (1, 2, 64, 64), seed=3)
    assert x.dtype == torch.float32
    assert torch.equal(x, drawn(domain, (1, 2, 64, 64), seed=3))
    if domain in CLASSES:
        count = int(domain.split()[0])
        assert x.unique().tolist() == list(range(count))
    elif domain != "noise":
        low, high = (0, 1) if domain == "fractions" else (1000, torch.inf)
        assert low < x.min() < x.max() < high
