"""One small network in every format it can be saved in gives the same pixels through `run`."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import torch
from safetensors.torch import save_file

import daskinfer as di
from conftest import P4, noise, seeded, write_raster
from models import export, onnx_file, quiet, save_script
from oracle import whole

SCALE = 1e-4
FACTORY = "test_formats_run:make"
SPEC = {"scale": SCALE, "output": "values"}


def make():
    """The factory of the formats that are weights only; its own weights are others."""
    return seeded(P4, seed=1)


def net():
    return seeded(P4)


def module(folder):
    return di.load_model(net(), **SPEC)


def safetensors(folder):
    save_file(net().state_dict(), folder / "net.safetensors")
    return di.load_model(FACTORY, weights=folder / "net.safetensors", **SPEC)


def state_dict(folder):
    torch.save(net().state_dict(), folder / "net.pth")
    return di.load_model(FACTORY, weights=folder / "net.pth", **SPEC)


def lightning(folder):
    state = {f"model.{name}": value for name, value in net().state_dict().items()}
    loop = {"epoch": 3, "hyper_parameters": {"rate": 1e-3}, "optimizer_states": [{"step": 1}]}
    torch.save({"state_dict": state, **loop}, folder / "net.ckpt")
    return di.load_model(FACTORY, weights=folder / "net.ckpt", **SPEC)


def pickled(folder):
    torch.save(net(), folder / "net.pt")
    return di.load_model(folder / "net.pt", trust=True, **SPEC)


def exported(folder):
    return di.load_model(net(), **SPEC).save(folder / "net.pt2")


def exported_fixed(folder):
    path = folder / "net.pt2"
    program = torch.export.export(net(), (torch.zeros(3, 2, 128, 160),))
    torch.export.save(program, path)
    return di.load_model(path, **SPEC)


def exported_program(folder):
    return di.load_model(torch.export.export(net(), (torch.zeros(1, 2, 128, 128),)), **SPEC)


def scripted(folder):
    return di.load_model(save_script(folder / "net.pt", net()), **SPEC)


def traced(folder):
    return di.load_model(save_script(folder / "net.ts", net(), torch.zeros(1, 2, 16, 16)), **SPEC)


def onnx(folder):
    return di.load_model(onnx_file(folder / "net.onnx", net()), **SPEC)


def onnx_fixed(folder):
    return di.load_model(onnx_file(folder / "net.onnx", net(), shape=(3, 128, 160)), **SPEC)


def onnx_channels_last(folder):
    path = onnx_file(folder / "net.onnx", net(), layout="nhwc")
    return di.load_model(path, axes="nhwc", **SPEC)


def item(folder):
    exported(folder).to_mlm(folder / "net.json")
    return di.load_model(folder / "net.json")


def onnx_item(folder):
    onnx(folder).to_mlm(folder / "net.json")
    return di.load_model(folder / "net.json")


FORMATS = [
    module, safetensors, state_dict, lightning, pickled, exported, exported_fixed,
    exported_program, scripted, traced, onnx, onnx_fixed, onnx_channels_last, item, onnx_item,
]  # fmt: skip


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    raw = noise(2, 150, 190)
    path = write_raster(tmp_path_factory.mktemp("scene") / "scene.tif", raw)
    return path, whole(net(), raw, stride=4, scale=SCALE)


@pytest.mark.parametrize("saved", FORMATS, ids=lambda saved: saved.__name__)
def test_every_format_gives_the_same_pixels(tmp_path, one_worker, scene, saved):
    path, expected = scene
    with quiet():
        model = saved(tmp_path)
    di.run(path, model, tmp_path / "out.tif", tile=model.tile or 64, chunk=64, client=one_worker)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        actual = dataset.read()
    assert np.abs(actual - expected).max() <= 1e-5


@pytest.mark.slow
def test_a_compiled_package_gives_the_same_pixels(tmp_path, one_worker, scene):
    path, expected = scene
    compiled = str(tmp_path / "compiled.pt2")
    with quiet():
        program = torch.export.load(export(tmp_path / "net.pt2", net(), sides=(128, 128)))
        torch._inductor.aoti_compile_and_package(program, package_path=compiled)
    with pytest.raises(ValueError, match="AOTInductor package, a shared library"):
        di.load_model(compiled)
    model = di.load_model(compiled, trust=True, tile=128, **SPEC)
    assert (model.kind, model.accelerator) == ("aoti", "cpu")
    di.run(path, model, tmp_path / "out.tif", chunk=64, client=one_worker)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        assert np.abs(dataset.read() - expected).max() <= 1e-5
    with pytest.raises(ValueError, match=r"does not run on cuda: it was compiled for linux, "):
        model.patch(accelerator=None).network("cuda")
