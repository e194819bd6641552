"""Formats of networks: read, told apart, refused; never trusted."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import sys
import warnings
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import daskinfer as di
from conftest import N3, P4, Pixel, seeded
from daskinfer.forward import Forward
from models import batch, export, in_new_process, onnx_file, quiet, run

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


@pytest.fixture
def harm(tmp_path):
    """A pickle that makes a folder, and the folder."""
    return Malicious(tmp_path / "harm"), tmp_path / "harm"


def test_a_pickled_module_is_run_only_if_it_is_trusted(tmp_path):
    net = seeded(N3)
    torch.save(net, tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"net\.pt' is a pickle that wants to run .*trust=True"):
        di.load_model(tmp_path / "net.pt")
    model = di.load_model(tmp_path / "net.pt", trust=True)
    assert (model.kind, model.likely_bands) == ("pickle", 2)
    assert torch.equal(run(model), net(batch()))


@pytest.mark.parametrize("name", ["net.pt", "net.ckpt", "net.bin", "old.pt"])
def test_code_in_a_pickle_of_a_model_is_not_run(tmp_path, harm, name):
    code, folder = harm
    torch.save({"model": code}, tmp_path / name, _use_new_zipfile_serialization=name != "old.pt")
    with pytest.raises(ValueError, match="wants to run code"):
        di.load_model(tmp_path / name)
    assert not folder.exists()


def test_trusted_weights_may_run_code(tmp_path, factory, harm):
    code, folder = harm
    net = pytest.importorskip("nets_of_users").make()
    torch.save({"state_dict": net.state_dict(), "loop": code}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="do whatever you can"):
        di.load_model(factory, weights=tmp_path / "a.pt")
    assert not folder.exists()
    di.load_model(factory, weights=tmp_path / "a.pt", trust=True)
    assert folder.exists()


def repacked(path, change):
    """Another archive of the same entries, each put through `change`."""
    other = path.with_name("other.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return other


def pickled_inputs(code):
    """Sample inputs, which torch.export.load unpickles."""

    def change(name, content):
        if "/data/sample_inputs/" not in name:
            return content
        file = io.BytesIO()
        torch.save(code, file)
        return file.getvalue()

    return change


def evaluated_size(folder):
    """A symbolic size, which torch.export.load evaluates."""

    def change(name, content):
        if not name.endswith("models/model.json"):
            return content
        program = json.loads(content)

        def put(value):
            if isinstance(value, dict):
                for key, inner in value.items():
                    if key == "expr_str":
                        value[key] = f"__import__('os').mkdir({str(folder)!r})"
                    else:
                        put(inner)
            elif isinstance(value, list):
                for inner in value:
                    put(inner)

        put(program)
        return json.dumps(program).encode()

    return change


@pytest.mark.parametrize(
    ("way", "message"),
    [("inputs", "a pickle of more than tensors"), ("size", "a size in it is the expression")],
)
def test_code_in_an_exported_program_is_refused_and_not_run(tmp_path, harm, way, message):
    code, folder = harm
    path = tmp_path / "net.pt2"
    export(path, seeded(N3))
    change = pickled_inputs(code) if way == "inputs" else evaluated_size(folder)
    evil = repacked(path, change)
    with pytest.raises(ValueError, match=f"{message}.*trust=True"):
        di.load_model(evil)
    assert not folder.exists()
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.load(evil)
    assert folder.exists(), "the archive was harmless"


def test_a_file_does_not_say_of_itself_that_it_is_to_be_trusted(tmp_path):
    path = export(tmp_path / "net.pt2", seeded(N3), metadata='{"trust": true, "scale": 2}')
    model = di.load_model(path)
    assert (model.trust, model.scale) == (False, (2,))


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nest", ["state_dict", "model_state_dict", "model", "weights", None])
@pytest.mark.parametrize("prefix", ["module.", "model.", "net._orig_mod.", "module.model.", ""])
def test_checkpoints_of_training_loops_are_understood(tmp_path, factory, nest, prefix):
    net = pytest.importorskip("nets_of_users").make()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 1
    state = {prefix + name: value for name, value in net.state_dict().items()}
    content = state if nest is None else {"epoch": 7, "optimizer": {"lr": 1e-3}, nest: state}
    torch.save(content, tmp_path / "a.ckpt")
    model = di.load_model(factory, weights=tmp_path / "a.ckpt")
    assert torch.equal(run(model), net.eval()(batch()))


def test_prefixes_that_belong_to_the_network_stay():
    from daskinfer.model.loaders.checkpoint import without_prefixes

    state = {"model.0.weight": 1, "model.1.weight": 2}
    assert without_prefixes(state, state) == state


def test_missing_and_unexpected_weights_are_listed(tmp_path, factory):
    state = pytest.importorskip("nets_of_users").make().state_dict()
    state["model.extra"] = state.pop("2.bias")
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"1 missing \(2\.bias\); 1 unexpected \(model\.extra\)"):
        di.load_model(factory, weights=tmp_path / "a.pt")


def test_weights_of_another_shape_are_refused_with_both(tmp_path, factory):
    state = pytest.importorskip("nets_of_users").make().state_dict()
    state["2.bias"] = torch.zeros(7)
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"2\.bias.*\[7\].*\[3\]"):
        di.load_model(factory, weights=tmp_path / "a.pt")


def test_weights_without_a_network_say_how_to_name_it(tmp_path):
    state = seeded(N3).state_dict()
    torch.save(state, tmp_path / "a.pth")
    save_file(state, tmp_path / "a.safetensors")
    for name in ("a.pth", "a.safetensors"):
        with pytest.raises(ValueError, match=r"holds weights without.*package\.module:factory"):
            di.load_model(tmp_path / name)


# --- forms of inputs and outputs ------------------------------------------------------------------


def test_a_program_of_half_precision_takes_float32(tmp_path):
    net = seeded(N3).to(torch.bfloat16)
    with quiet():
        program = torch.export.export(net, (torch.zeros(1, 2, 12, 12, dtype=torch.bfloat16),))
        torch.export.save(program, tmp_path / "a.pt2")
    model = di.load_model(tmp_path / "a.pt2")
    assert model.tile == (12, 12)
    assert torch.equal(run(model), net(batch().bfloat16()))


def test_a_program_of_whole_numbers_is_refused(tmp_path):
    with quiet():
        program = torch.export.export(Shifted(1), (torch.zeros(1, 2, 8, 8, dtype=torch.uint8),))
        torch.export.save(program, tmp_path / "a.pt2")
    with pytest.raises(ValueError, match="takes uint8; daskinfer gives it normalised float32"):
        di.load_model(tmp_path / "a.pt2")


def test_a_model_is_saved_with_its_recipe_and_what_it_may_be_fed(tmp_path):
    net = seeded(P4)
    spec = {"bands": ["red", "nir"], "scale": 1e-4, "clip_max": [1, float("inf")], "tta": "d4"}
    saved = di.load_model(net, **spec).save(tmp_path / "net.pt2")
    assert saved.recipe() == di.load_model(net, **spec).recipe()
    assert (saved.kind, saved.in_bands, saved.tile) == ("pt2", 2, None)
    plain = saved.patch(tta=())
    for side in (4, 12, 20):
        x = batch(side=side)
        assert torch.allclose(run(plain, x), net(x), atol=1e-6)
    with pytest.raises(ValueError, match="exported programs are named"):
        saved.save(tmp_path / "net.onnx")


def test_values_are_clipped_before_they_are_normalised():
    model = di.load_model(
        Pixel(), output="values", scale=0.1, clip_min=2, clip_max=[5, float("inf")], mean=2, std=3
    )
    raw = np.arange(0, 100, 5, dtype=np.uint8).reshape(1, 2, 2, 5).repeat(2, axis=0)
    expected = (np.clip(raw * np.float32(0.1), 2, np.array([5, np.inf])[:, None, None]) - 2) / 3
    assert np.allclose(Forward(model).run(raw, None), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"clip_min": 3, "clip_max": [4, 2]}, "clip_min must be below clip_max, got 3.0 and 2.0"),
        ({"axes": "nhcw"}, "axes must be one of 'nchw', 'nhwc', got 'nhcw'"),
        ({"accelerator": "tpu"}, "accelerator must be one of None, 'cpu', 'cuda', got 'tpu'"),
        ({"trust": "yes"}, "trust must be one of True, False, got 'yes'"),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        di.load_model(seeded(N3), **spec)


# --- ONNX -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [N3, P4])
def test_the_receptive_field_of_onnx_is_that_of_its_network(tmp_path, net):
    model = di.load_model(onnx_file(tmp_path / "net.onnx", seeded(net)))
    assert di.receptive_field(model) == di.receptive_field(seeded(net))


@pytest.mark.parametrize(
    ("shape", "axes", "told"),
    [
        (("n", "y", "x"), "nchw", (2, None)),
        ((4, 32, 48), "nchw", (2, (32, 48))),
        ((4, 32, 48), "nhwc", (2, (32, 48))),
    ],
)
def test_the_input_of_onnx_is_read(tmp_path, shape, axes, told):
    path = onnx_file(tmp_path / "net.onnx", seeded(N3), shape=shape, layout=axes)
    model = di.load_model(path, axes=axes)
    assert (model.in_bands, model.tile) == told
    x = torch.randn(5, 2, *(model.tile or (20, 24)))
    assert torch.allclose(run(model, x), seeded(N3)(x), atol=1e-6)


@pytest.mark.parametrize("name", ["weights.bin", "net.onnx.data", "of a name that is long " * 8])
def test_weights_beside_onnx_are_part_of_the_model(tmp_path, name):
    import onnx

    plain = onnx.load(onnx_file(tmp_path / "plain.onnx", seeded(N3)))
    path = tmp_path / "net.onnx"
    options = {"save_as_external_data": True, "location": name, "size_threshold": 0}
    onnx.save_model(plain, path, **options)
    model = di.load_model(path)
    assert model.digest == di.load_model(path).digest
    weights = bytearray((tmp_path / name).read_bytes())
    weights[3] ^= 1
    (tmp_path / name).write_bytes(weights)
    assert di.load_model(path).digest != model.digest


def test_what_is_no_onnx_is_refused(tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"a\.onnx' is not ONNX that runs here"):
        di.load_model(tmp_path / "a.onnx")


def test_without_onnx_runtime_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = onnx_file(tmp_path / "net.onnx", seeded(N3))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r'pip install "daskinfer\[onnx\]"'):
        di.load_model(path)


def test_onnx_on_a_device_that_it_does_not_reach_is_refused(tmp_path):
    model = di.load_model(onnx_file(tmp_path / "net.onnx", seeded(N3)))
    with pytest.raises(ValueError, match="ONNX Runtime does not reach cuda: pip install"):
        model.network("cuda")


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
    "content", [b"", b"hello", b"version https://git-lfs", b"\x80\x02", b"\x89PNG"]
)
def test_bytes_that_are_no_weights_are_said_to_be_none(tmp_path, factory, content):
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    for source, options in ((path, {}), (factory, {"weights": path})):
        with pytest.raises(ValueError, match=r"a\.pt' cannot be read; it is not what torch\.save"):
            di.load_model(source, **options)


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
