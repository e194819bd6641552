"""Digests: equal for equal models, in every process, and for no others."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daskinfer as di
from conftest import N3, seeded, write_raster
from daskinfer.model.digest import module_digest


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Config:
    def __init__(self, value):
        self.value = value


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        return torch.cat([x * 0 + 1.5, x * 0 + self.config.value], dim=1)


def pooled(kernel):
    return Lambda(lambda x: F.avg_pool2d(x, kernel, 1, kernel // 2, count_include_pad=False))


def hooked():
    net = seeded(N3)
    net.register_forward_hook(lambda module, args, out: -out)
    return net


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pooled(3), pooled(9)),
        (Configured(Config(1.0)), Configured(Config(2.0))),
        (seeded(N3), hooked()),
        (seeded(N3), seeded(N3, seed=1)),
        (Lambda(torch.relu), Lambda(torch.tanh)),
        (Lambda({"a", "b"}.__contains__), Lambda({"a", "c"}.__contains__)),
    ],
)
def test_models_that_differ_have_other_digests(one, other):
    assert module_digest(one) != module_digest(other)


@pytest.mark.parametrize(
    "net",
    [pooled(3), Configured(Config(1.0)), hooked(), seeded(N3)],
    ids=lambda net: str(type(net)),
)
def test_a_copy_has_the_same_digest(net):
    assert module_digest(copy.deepcopy(net)) == module_digest(net)


def test_train_and_eval_mode_have_the_same_digest():
    net = seeded(N3)
    assert module_digest(copy.deepcopy(net).train()) == module_digest(net)


SCRIPT = """
import torch
from daskinfer.model.digest import module_digest
class Config:
    names = {"b", "a", "c", "delta", "epsilon"}
class Net(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(2, 3, 1)
        self.config = Config()
        self.names = frozenset(["x", "y", "z", "quite", "long"])
        self.act = lambda x: x * scale if "y" in {"x", "y", "z", "w"} else x
        self.conv.register_forward_hook(lambda m, a, o: o + 1)
    def forward(self, x):
        return self.act(super().__class__ and self.conv(x))
print(module_digest(Net(2.0)))
"""


def test_the_digest_is_the_same_in_every_process(tmp_path):
    (tmp_path / "a.py").write_text(SCRIPT)
    (tmp_path / "b.py").write_text("\n\n" + SCRIPT)
    digests = {
        subprocess.run(
            [sys.executable, str(tmp_path / name)],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name, seed in (("a.py", "1"), ("a.py", "2"), ("b.py", "3"))
    }
    assert len(digests) == 1


def test_a_module_that_cannot_be_hashed_is_equal_to_no_other():
    import threading

    net = Lambda(torch.relu)
    net.lock = threading.Lock()
    assert module_digest(net) != module_digest(net)


def test_each_model_gets_its_own_result(tmp_path):
    scene = write_raster(tmp_path / "s.tif", torch.ones(1, 20, 20).numpy())
    maps = [
        di.predict(di.open_raster(scene), Configured(Config(value))).compute().values
        for value in (1.0, 2.0)
    ]
    assert (maps[0] == 0).all()
    assert (maps[1] == 1).all()


def test_weights_changed_in_place_are_seen(tmp_path):
    scene = di.open_raster(write_raster(tmp_path / "s.tif", torch.ones(1, 20, 20).numpy()))
    net = nn.Conv2d(1, 2, 1)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor([1.0, 0.0]))
    model = di.load_model(net)
    assert (di.predict(scene, model).compute() == 0).all()
    with torch.no_grad():
        net.bias.copy_(torch.tensor([0.0, 1.0]))
    assert (di.predict(scene, model).compute() == 1).all()


class AlwaysDropping(nn.Module):
    def forward(self, x):
        return F.dropout(x.repeat(1, 2, 1, 1), 0.5, training=True)


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (AlwaysDropping(), "two results for one input"),
        (
            nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False,
                          track_running_stats=False)),
            "depends on the tiles beside it",
        ),
    ],
)  # fmt: skip
def test_unsteady_models_are_refused(tmp_path, net, reason):
    scene = write_raster(tmp_path / "s.tif", torch.rand(1, 40, 40).numpy())
    with pytest.raises(ValueError, match=reason):
        di.plan(scene, net, tmp_path / "o.tif", overlap=8, tile=32)


def test_the_first_registered_convolution_need_not_be_the_first_that_runs(tmp_path):
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Conv2d(16, 2, 1)
            self.body = nn.Conv2d(3, 16, 3, padding=1)

        def forward(self, x):
            return self.head(self.body(x))

    scene = write_raster(tmp_path / "s.tif", torch.rand(3, 40, 40).numpy())
    assert di.plan(scene, Backwards(), tmp_path / "o.tif").field.radius == (1, 1)
    two = write_raster(tmp_path / "two.tif", torch.rand(2, 40, 40).numpy())
    with pytest.raises(ValueError, match=r"takes (3|16) bands"):
        di.plan(two, Backwards(), tmp_path / "o.tif")


def test_networks_in_double_precision_run_in_single(tmp_path):
    scene = di.open_raster(write_raster(tmp_path / "s.tif", torch.rand(2, 40, 40).numpy()))
    net = seeded(N3)
    expected = di.predict(scene, net).compute()
    assert (di.predict(scene, copy.deepcopy(net).double()).compute() == expected).all()
