"""Formats of networks: read, told apart, refused; never trusted."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import daskinfer as di
from conftest import N3, seeded
from models import batch, export, in_new_process, run

# --- formats --------------------------------------------------------------------------------------


def test_module_factory_and_exported_file_compute_the_same(tmp_path, factory):
    net = pytest.importorskip("nets_of_users").make().eval()
    with torch.inference_mode():
        expected = net(batch())
    path = export(tmp_path / "net.pt2", net)
    for kind, source in (("module", net), ("factory", factory), ("pt2", path)):
        model = di.load_model(source)
        assert model.kind == kind
        assert (model.in_bands or model.likely_bands) == 2
        assert torch.allclose(run(model), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("sides", "tile"),
    [(("dynamic", "dynamic"), None), ((32, 48), (32, 48)), ((32, "dynamic"), None)],
)
def test_a_fixed_input_size_of_an_exported_file_is_the_tile(tmp_path, sides, tile):
    assert di.load_model(export(tmp_path / "net.pt2", seeded(N3), sides=sides)).tile == tile


def test_weights_are_loaded_from_safetensors_and_state_dicts(tmp_path, factory):
    net = pytest.importorskip("nets_of_users").make()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 1
    save_file(net.state_dict(), tmp_path / "a.safetensors")
    torch.save(net.state_dict(), tmp_path / "a.pt")
    plain = di.load_model(factory)
    for name in ("a.safetensors", "a.pt"):
        model = di.load_model(factory, weights=tmp_path / name)
        assert torch.allclose(run(model), net.eval()(batch()), atol=1e-6)
        assert model.digest == di.load_model(net).digest
        assert model.digest != plain.digest


# --- the digest -----------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, factor, **attributes):
        super().__init__()
        self.factor = factor
        vars(self).update(attributes)

    def forward(self, x):
        return x * self.factor


class Shifted(Scaled):
    def forward(self, x):
        return x + self.factor


def digest(module):
    return di.load_model(module).digest


def test_equal_modules_have_equal_digests_in_train_and_eval_mode():
    net = seeded(N3)
    assert digest(net) == digest(seeded(N3).train())
    assert di.load_model(net) == di.load_model(seeded(N3))


def changed_weight():
    net = seeded(N3)
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] += 1e-6
    return net


def changed_buffer():
    net = nn.BatchNorm2d(2)
    net.running_mean += 1
    return net


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: seeded(N3), changed_weight),
        (lambda: nn.BatchNorm2d(2), changed_buffer),
        (lambda: nn.BatchNorm2d(2), lambda: nn.BatchNorm2d(2, eps=1e-4)),
        (lambda: Scaled(1), lambda: Scaled(2)),
        (lambda: Scaled(1), lambda: Shifted(1)),
        (lambda: Scaled(1, act=torch.relu), lambda: Scaled(1, act=torch.tanh)),
        (lambda: Scaled(1, act=max), lambda: Scaled(1, act=min)),
        (lambda: Scaled(1, config={"rate": 1}), lambda: Scaled(1, config={"rate": 2})),
        (lambda: Scaled(1, table=np.arange(5000)), lambda: Scaled(1, table=np.arange(5000)[::-1])),
        (lambda: Scaled(1, table=torch.zeros(9)), lambda: Scaled(1, table=torch.ones(9))),
        (lambda: Scaled(1, flag=None), lambda: Scaled(1, flag=True)),
        (lambda: nn.Sequential(nn.ReLU(), nn.Tanh()), lambda: nn.Sequential(nn.Tanh(), nn.ReLU())),
    ],
)
def test_another_weight_attribute_class_or_order_is_another_digest(one, other):
    assert digest(one()) == digest(one())
    assert digest(one()) != digest(other())


def test_the_digest_is_the_same_in_another_process():
    attributes = "act=max, names={'b', 'a', 'c'}, hooks=[N3, print], part=partial(max, 1)"
    code = f"""
        from functools import partial
        import daskinfer as di
        from conftest import N3, seeded
        from test_formats import Scaled
        print(di.load_model(seeded(N3)).digest, di.load_model(Scaled(1, {attributes})).digest)
    """
    here = Scaled(
        1, act=max, names={"b", "a", "c"}, hooks=[N3, print], part=functools.partial(max, 1)
    )
    assert in_new_process(code).split() == [digest(seeded(N3)), digest(here)]


NET = """
from torch import nn

class Base(nn.Module):
    def forward(self, x):
        return x {base} + self.more(x)

class Net(Base):
    def more(self, x):
        return x {own}
"""


def test_changed_code_of_a_class_or_its_bases_is_another_digest(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for base, own in (("+ 1", "+ 1"), ("+ 1", "+ 2"), ("+ 2", "+ 1"), ("+ 1", "+ 1")):
        # Under another name, or Python would take the first one's compiled code for it.
        path = tmp_path / f"net{len(digests)}.py"
        path.write_text(NET.format(base=base, own=own))
        importlib.invalidate_caches()
        net = importlib.import_module(path.stem).Net()
        monkeypatch.setattr(type(net).__mro__[0], "__module__", "net")
        monkeypatch.setattr(type(net).__mro__[1], "__module__", "net")
        monkeypatch.setitem(sys.modules, "net", sys.modules.pop(path.stem))
        digests.append(digest(net))
    assert len(set(digests)) == 3
    assert digests[0] == digests[3]


def test_another_content_of_the_file_is_another_digest(tmp_path):
    paths = [export(tmp_path / f"{n}.pt2", seeded(N3, seed=seed)) for n, seed in enumerate((0, 1))]
    first, second = map(di.load_model, paths)
    assert first.digest != second.digest
    assert first.digest == di.load_model(paths[0]).digest


# --- safety ---------------------------------------------------------------------------------------


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_code_in_a_pickle_of_weights_is_refused_and_not_run(tmp_path, factory):
    torch.save({"0.weight": Malicious(tmp_path / "harm")}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt"):
        di.load_model(factory, weights=tmp_path / "a.pt")
    assert not (tmp_path / "harm").exists()
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "harm").exists(), "the pickle was harmless"


# --- refusals -------------------------------------------------------------------------------------


def test_missing_weights_are_said_to_be_missing(factory):
    with pytest.raises(FileNotFoundError, match=r"weights 'nowhere\.pt': no such file"):
        di.load_model(factory, weights="nowhere.pt")


def test_files_that_hold_no_model_are_refused(tmp_path):
    for name, message in (
        ("a.pt2", "not a torch.export archive"),
        ("a.h5", r"\.h5 is not a format"),
    ):
        (tmp_path / name).write_text("not a model")
        with pytest.raises(ValueError, match=message):
            di.load_model(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("no_such_package:make", ValueError, "no module named 'no_such_package'"),
        ("nets_of_users:mak", ValueError, "nets_of_users has no 'mak'"),
        ("nets_of_users:make_number", TypeError, "the factory returned int"),
        ("nets_of_users:make_nothing", RuntimeError, "no such checkpoint"),
    ],
)
def test_a_factory_that_makes_no_module_is_refused(factory, name, error, message):
    with pytest.raises(error, match=message):
        di.load_model(name)


def test_weights_that_do_not_fit_are_refused_with_both_names(tmp_path, factory):
    torch.save({"elsewhere": torch.zeros(3)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt' do not fit Sequential: (.|\n)*elsewhere"):
        di.load_model(factory, weights=tmp_path / "a.pt")


def test_an_exported_file_of_two_inputs_is_refused(tmp_path):
    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Two(), (torch.zeros(1, 2, 8, 8),) * 2)
        torch.export.save(program, tmp_path / "a.pt2")
    with pytest.raises(ValueError, match=r"takes \(1, 2, 8, 8\), \(1, 2, 8, 8\).*one input"):
        di.load_model(tmp_path / "a.pt2")
