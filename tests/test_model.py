"""The recipe of a model: what it holds, how it travels, what it refuses."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import daskinfer as di
from conftest import N3, seeded
from daskinfer.model import Model
from models import batch, export, in_new_process, run

# --- the recipe -----------------------------------------------------------------------------------


def test_a_model_is_returned_with_the_spec_applied():
    model = di.load_model(seeded(N3), scale=2, class_names=["a", "b", "c"])
    patched = di.load_model(model, scale=3)
    assert (patched.scale, patched.class_names) == ((3,), ("a", "b", "c"))
    assert model.scale == (2,)
    assert di.load_model(model) == model
    assert torch.equal(run(patched), run(model))


def test_one_number_or_one_per_band_in_any_form():
    spec = {"scale": np.float32(0.5), "offset": [1, 2], "mean": np.array([1, 2]), "std": (1, 2)}
    model = di.load_model(seeded(N3), **spec)
    assert (model.scale, model.offset, model.mean, model.std) == ((0.5,), (1, 2), (1, 2), (1, 2))
    assert hash(model) == hash(di.load_model(seeded(N3), **spec))


def test_metadata_in_an_exported_file_are_defaults(tmp_path):
    told = {"bands": ["red", "nir"], "scale": 1e-4, "class_names": ["a", "b", "c"], "fill": 0}
    # What no spec names, as in a dump of a whole Model, is passed over.
    others = {"source": "elsewhere", "kind": "module", "digest": "x", "licence": "MIT"}
    path = export(tmp_path / "net.pt2", seeded(N3), metadata=json.dumps(told | others))
    model = di.load_model(path, scale=2, tile=32)
    assert (model.bands, model.class_names, model.fill) == (("red", "nir"), ("a", "b", "c"), 0)
    assert (model.scale, model.tile) == ((2,), (32, 32))
    assert (model.source, model.kind) == (path, "pt2")


# --- the user's module ----------------------------------------------------------------------------


def test_a_module_in_train_mode_runs_as_in_eval_mode_and_stays_in_train_mode():
    net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.5))
    net.train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    actual = run(di.load_model(net))
    assert all(child.training for child in net.modules())
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    with torch.inference_mode():
        expected = net.eval()(batch())
    assert torch.equal(actual, expected)


def test_every_network_is_a_copy_of_its_own():
    net = seeded(N3)
    first, second = di.load_model(net).network(), di.load_model(net).network()
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(net.parameters()).abs().sum() > 0
    assert torch.equal(second(batch()), net(batch()))


# --- travelling -----------------------------------------------------------------------------------


def large():
    return nn.Conv2d(2, 13 * 10**6 // 18, 3)


def test_a_pickled_model_holds_no_weights():
    net = large()
    assert sum(p.nbytes for p in net.parameters()) > 50e6
    model = di.load_model(net, bands=["a", "b"], class_names=[str(n) for n in range(100)])
    packed = pickle.dumps(model)
    assert len(packed) < 100_000
    again = pickle.loads(packed)
    assert again == model
    assert again.module is None
    # In the process of the user's the module is found again.
    assert again.network().weight.shape == net.weight.shape


def test_a_model_whose_module_is_gone_says_how_to_name_it():
    packed = pickle.dumps(di.load_model(nn.Conv2d(2, 3, 1)))
    with pytest.raises(RuntimeError, match=r"Conv2d.*not in this process: save it"):
        pickle.loads(packed).network()


def test_a_shipped_module_computes_the_same_in_another_process(tmp_path):
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU())
    model = di.load_model(net)
    (tmp_path / "model").write_bytes(pickle.dumps((model, model.ship(), batch(), run(model))))
    code = """
        import pickle, sys, torch
        model, shipped, x, expected = pickle.loads(open(sys.argv[1], "rb").read())
        try:
            model.network()
        except RuntimeError:
            print("not there")
        shipped.receive()
        shipped.receive()
        with torch.inference_mode():
            print(torch.allclose(model.network()(x), expected, atol=1e-6))
        shipped.release()
        try:
            model.network()
        except RuntimeError:
            print("gone")
    """
    assert in_new_process(code, tmp_path / "model").split("\n") == ["not there", "True", "gone"]


def test_what_workers_can_load_themselves_is_not_shipped(tmp_path, factory):
    path = export(tmp_path / "net.pt2", seeded(N3))
    for source in (path, factory):
        model = di.load_model(source)
        assert model.ship() is None
        assert torch.equal(run(pickle.loads(pickle.dumps(model))), run(model))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["nowhere.pt2", "nowhere.onnx", "just words"])
def test_a_missing_file_is_said_to_be_missing(source):
    with pytest.raises(FileNotFoundError, match=f"model '{source}': no such file"):
        di.load_model(source)


@pytest.mark.parametrize("source", [7, None, [1], lambda x: x, N3])
def test_what_is_no_model_is_refused_with_its_type(source):
    with pytest.raises(TypeError, match=f"not a model: got {type(source).__name__}"):
        di.load_model(source)


def test_weights_of_a_module_are_refused():
    with pytest.raises(ValueError, match="weights= belongs to a 'package"):
        di.load_model(seeded(N3), weights="a.pt")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (
            {"scales": 1},
            TypeError,
            "unknown model option 'scales'; known: accelerator, activation, axes, bands",
        ),
        ({"digest": "a"}, TypeError, "unknown model option 'digest'"),
        ({"output": "labels"}, ValueError, "output must be one of 'classes'.*got 'labels'"),
        ({"activation": "relu"}, ValueError, "activation must be one of None.*got 'relu'"),
        ({"precision": "int8"}, ValueError, "precision must be one of 'float32'.*got 'int8'"),
        ({"bands": ["a", "a"]}, ValueError, "bands names 'a' twice"),
        ({"bands": "red"}, ValueError, r"bands must be a list, got 'red': pass \['red'\]"),
        ({"class_names": "water"}, ValueError, "class_names must be a list"),
        ({"bands": ["a", "b"], "mean": [1, 2, 3]}, ValueError, "mean has 3 entries for .* 2 bands"),
        ({"std": [1, float("nan")]}, ValueError, "std must be finite"),
        ({"mean": float("inf")}, ValueError, "mean must be finite"),
        ({"scale": 0}, ValueError, "scale must not be 0"),
        ({"fill": float("nan")}, ValueError, "fill must be a finite number"),
        ({"threshold": "x"}, ValueError, "threshold must be a finite number"),
        ({"tile": (1, 2, 3)}, ValueError, "tile must be a number of px"),
        ({"mean": "high"}, ValueError, "mean must be a number or one number per band"),
        ({"mean": [[1, 2]]}, ValueError, r"one number per band, got an array of shape \(1, 2\)"),
        ({"std": 0}, ValueError, r"std must be positive, got \[0.0\]"),
        ({"std": [1, -1]}, ValueError, "std must be positive"),
        ({"class_colors": ["red"]}, ValueError, "'#rrggbb', got 'red'"),
        ({"class_colors": ["#12345g"]}, ValueError, "'#rrggbb'"),
        (
            {"class_names": ["a"], "class_colors": ["#000000"] * 2},
            ValueError,
            "1 class_names but 2",
        ),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(spec, error, message):
    with pytest.raises(error, match=message):
        di.load_model(seeded(N3), **spec)


def test_numbers_per_band_must_agree_where_the_model_does_not_tell_its_bands():
    model = Model("somewhere", "factory", "", mean=(1, 2, 3))
    assert model.n_bands == 3
    with pytest.raises(ValueError, match="entries for a model of"):
        model.patch(std=[1, 2])
    with pytest.raises(ValueError, match="mean has 3 entries for a model of 2 bands"):
        model.patch(bands=["a", "b"])
