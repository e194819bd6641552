"""Sources of models: modules, factories and exported files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import torch

# A file of Python; `seed` is to be put in.
FACTORY = """\
import torch
from torch import nn

def make():
    with torch.random.fork_rng():
        torch.manual_seed({seed})
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))

def make_number():
    return 7

def make_nothing():
    raise RuntimeError("no such checkpoint")
"""


def batch(bands=2, side=12):
    return torch.from_numpy(
        np.random.default_rng(0).normal(size=(2, bands, side, side)).astype(np.float32)
    )


def run(model, x=None):
    with torch.inference_mode():
        return model.network()(batch() if x is None else x)


def export(path, net, *, bands=2, metadata=None, sides=("dynamic", "dynamic")):
    """Write a ``.pt2``; sides are "dynamic" or a number."""
    dims = {
        axis: torch.export.Dim(f"side{axis}", min=2, max=4096)
        for axis, side in zip((2, 3), sides, strict=True)
        if side == "dynamic"
    }
    example = torch.zeros(2, bands, *(16 if side == "dynamic" else side for side in sides))
    shapes = ({0: torch.export.Dim("n", min=1, max=64)} | dims,)
    extra = {} if metadata is None else {"daskinfer.json": metadata}
    with quiet():
        program = torch.export.export(net, (example,), dynamic_shapes=shapes)
        torch.export.save(program, path, extra_files=extra)
    return str(path)


@contextlib.contextmanager
def quiet():
    """torch warns of its own exporter, compiler and TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_script(path, net, example=None):
    """Write TorchScript: traced with an example, else scripted."""
    with quiet():
        script = torch.jit.script(net) if example is None else torch.jit.trace(net, example)
        script.save(str(path))
    return str(path)


def in_new_process(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def onnx_file(path, net, *, bands=2, shape=("n", "y", "x"), layout="nchw"):
    """Write a Sequential of convolutions, ReLUs, pools and upsamplings as ONNX.

    `shape` is batch, height and width, numbers where they are fixed.
    """
    from onnx import TensorProto, checker, helper, numpy_helper, save

    nodes, weights, last = [], [], "input"

    def add(kind, *inputs, **attributes):
        nonlocal last
        nodes.append(helper.make_node(kind, [last, *inputs], [f"t{len(nodes)}"], **attributes))
        last = nodes[-1].output[0]

    def stored(array):
        weights.append(numpy_helper.from_array(np.asarray(array), f"w{len(weights)}"))
        return weights[-1].name

    if layout == "nhwc":
        add("Transpose", perm=[0, 3, 1, 2])
    for layer in net:
        match layer:
            case torch.nn.Conv2d():
                pads = [*layer.padding, *layer.padding]
                tensors = (stored(t.detach().numpy()) for t in (layer.weight, layer.bias))
                add("Conv", *tensors, pads=pads, strides=list(layer.stride))
            case torch.nn.ReLU():
                add("Relu")
            case torch.nn.MaxPool2d(kernel_size=side):
                add("MaxPool", kernel_shape=[side, side], strides=[side, side])
            case torch.nn.Upsample(scale_factor=factor):
                scales = stored(np.array([1, 1, factor, factor], np.float32))
                add("Resize", "", scales, mode="nearest", nearest_mode="floor",
                    coordinate_transformation_mode="asymmetric")  # fmt: skip
    if layout == "nhwc":
        add("Transpose", perm=[0, 2, 3, 1])
    n, y, x = shape
    sizes = (n, bands, y, x) if layout == "nchw" else (n, y, x, bands)
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, [None] * 4)], weights,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    checker.check_model(model)
    save(model, str(path))
    return str(path)
