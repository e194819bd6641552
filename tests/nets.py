"""A small zoo of test networks, and an oracle for what each output depends on.

A network of the analytic family is described by a tuple of layers (`Conv`, `Pool`, `Level`, ...).
`build` makes the module; `dependence` says, without torch, which inputs each output depends on: a
boolean matrix per layer from the layer's own index formula, multiplied up. `analytic_radius`
reads the radius off that matrix by its definition, trying every lattice-aligned cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

# --- the analytic family -------------------------------------------------------------------------


@dataclass(frozen=True)
class Conv:
    kernel: int
    dilation: int = 1


@dataclass(frozen=True)
class Strided:
    """Convolution with stride, zero-padded on both sides."""

    kernel: int
    stride: int
    padding: int = 0


@dataclass(frozen=True)
class Deconv:
    """Transposed convolution that multiplies the size by its stride."""

    kernel: int
    stride: int


@dataclass(frozen=True)
class Pool:
    factor: int
    kind: str = "max"


@dataclass(frozen=True)
class Up:
    factor: int
    mode: str = "nearest"


@dataclass(frozen=True)
class Shuffle:
    factor: int


@dataclass(frozen=True)
class Valid:
    kernel: int


@dataclass(frozen=True)
class Level:
    """A U-Net level: pool, inner layers, upsample, and the skip connection around them."""

    factor: int
    inner: tuple[Layer, ...]
    mode: str = "nearest"
    skip: bool = True
    pool: str = "max"


Layer = Conv | Strided | Deconv | Pool | Up | Shuffle | Valid | Level
Layers = Sequence[Layer]


def total_stride(layers: Layers) -> int:
    """Product of the strides down to the deepest level."""
    here, deepest = 1, 1
    for layer in layers:
        match layer:
            case Pool(factor=f) | Strided(stride=f):
                here *= f
            case Level(factor=f, inner=inner):
                deepest = max(deepest, here * f * total_stride(inner))
        deepest = max(deepest, here)
    return deepest


class LevelNet(nn.Module):
    def __init__(self, level: Level, width: int) -> None:
        super().__init__()
        self.level = level
        self.down = module(Pool(level.factor, level.pool), width)
        self.inner = body(level.inner, width)
        self.up = upsample(level.factor, level.mode)
        self.merge = nn.Conv2d(2 * width if level.skip else width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        deep = self.up(self.inner(self.down(x)))
        return self.merge(torch.cat([x, deep], 1) if self.level.skip else deep)


class Same(nn.Module):
    """Convolution that keeps the size; even kernels get the odd px at the far side."""

    def __init__(self, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        total = dilation * (kernel - 1)
        self.pad = (total // 2, total - total // 2)
        self.conv = nn.Conv2d(width, width, kernel, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.pad * 2))


def upsample(factor: int, mode: str) -> nn.Module:
    if mode == "nearest":
        return nn.Upsample(scale_factor=factor)
    return nn.Upsample(scale_factor=factor, mode=mode, align_corners=False)


def module(layer: Layer, width: int) -> nn.Module:
    match layer:
        case Conv(k, d):
            return nn.Sequential(Same(width, k, d), nn.LeakyReLU(0.3))
        case Strided(k, s, p):
            return nn.Conv2d(width, width, k, stride=s, padding=p)
        case Deconv(k, s):
            extra = (k - s) % 2
            return nn.ConvTranspose2d(width, width, k, s, (k - s + extra) // 2, extra)
        case Pool(f, kind):
            return nn.MaxPool2d(f) if kind == "max" else nn.AvgPool2d(f)
        case Up(f, mode):
            return upsample(f, mode)
        case Shuffle(f):
            return nn.Sequential(nn.Conv2d(width, width * f * f, 1), nn.PixelShuffle(f))
        case Valid(k):
            return nn.Conv2d(width, width, k)
    return LevelNet(layer, width)


def body(layers: Layers, width: int) -> nn.Sequential:
    return nn.Sequential(*(module(layer, width) for layer in layers))


def build(
    layers: Layers, bands: int = 3, outputs: int = 2, width: int = 4, seed: int = 0
) -> nn.Module:
    """Build the network of these layers, between two 1x1 convolutions."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ends = nn.Conv2d(bands, width, 1), nn.Conv2d(width, outputs, 1)
        return nn.Sequential(ends[0], *body(layers, width), ends[1]).eval()


_CONVS = st.builds(Conv, st.integers(1, 5), st.integers(1, 3))
_STACKS = st.lists(_CONVS, min_size=0, max_size=2).map(tuple)
_MODES = st.sampled_from(["nearest", "bilinear"])


def _level(inner):
    return st.builds(
        Level,
        st.sampled_from([2, 4]),
        inner,
        _MODES,
        st.booleans(),
        st.sampled_from(["max", "avg"]),
    )


@st.composite
def family(draw):
    """Depth 1 to 4: convolutions, and up to two U-Net levels, with convolutions inside."""
    deep = _level(_STACKS).map(lambda one: (one,))
    inner = draw(st.one_of(_STACKS, deep, st.tuples(_CONVS, _level(_STACKS))))
    levels = draw(st.lists(_level(st.just(inner)), max_size=1))
    before, after = draw(_CONVS), draw(st.lists(_CONVS, max_size=1))
    return (before, *levels, *after)


# --- the oracle ----------------------------------------------------------------------------------


def taps(layer: Layer, n: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the output size and (output, input) index pairs of one layer on n inputs."""
    match layer:
        case Conv(k, d):
            left = d * (k - 1) // 2
            return n, [(i, i - left + t * d) for i in range(n) for t in range(k)]
        case Valid(k):
            return n - k + 1, [(i, i + t) for i in range(n - k + 1) for t in range(k)]
        case Strided(k, s, p):
            out = (n + 2 * p - k) // s + 1
            return out, [(i, i * s - p + t) for i in range(out) for t in range(k)]
        case Deconv(k, s):
            p = (k - s + (k - s) % 2) // 2
            return n * s, [(j * s - p + t, j) for j in range(n) for t in range(k)]
        case Pool(f, _):
            return n // f, [(i, i * f + t) for i in range(n // f) for t in range(f)]
        case Shuffle(f) | Up(f, "nearest"):
            return n * f, [(i, i // f) for i in range(n * f)]
        case Up(f, _):
            # Half-pixel centres; both neighbours unless the centre falls on one.
            at = [Fraction(2 * i + 1, 2 * f) - Fraction(1, 2) for i in range(n * f)]
            return n * f, [(i, j) for i, c in enumerate(at) for j in {floor(c), ceil(c)}]
    raise TypeError(layer)


def layer_dependence(layer: Layer, n: int) -> np.ndarray:
    if isinstance(layer, Level):
        deep = dependence((Pool(layer.factor), *layer.inner, Up(layer.factor, layer.mode)), n)
        return deep | np.eye(n, dtype=bool) if layer.skip else deep
    out, pairs = taps(layer, n)
    matrix = np.zeros((out, n), dtype=bool)
    for i, j in pairs:
        if 0 <= i < out and 0 <= j < n:
            matrix[i, j] = True
    return matrix


def dependence(layers: Layers, n: int) -> np.ndarray:
    """Return the boolean matrix (output, input): which inputs each output depends on."""
    matrix = np.eye(n, dtype=bool)
    for layer in layers:
        step = layer_dependence(layer, matrix.shape[0])
        matrix = (step.astype(np.float32) @ matrix.astype(np.float32)) > 0
    return matrix


def analytic_radius(layers: Layers, n: int, scale: Fraction = Fraction(1), margin: int = 0) -> int:
    """Return the largest reach over all lattice cuts in the middle half, to either side, in px."""
    matrix = dependence(layers, n)
    stride = total_stride(layers)
    first, last = matrix.argmax(1), n - 1 - matrix[:, ::-1].argmax(1)
    begin = np.array([floor(margin + j / scale) for j in range(len(first))])
    end = np.array([ceil(margin + (j + 1) / scale) for j in range(len(first))])
    reach = 0
    for cut in range(n // 4 // stride * stride, 3 * n // 4, stride):
        right = end[(begin >= cut) & (first < cut)] - cut
        left = cut - begin[(end <= cut) & (last >= cut)]
        reach = max([reach, *right.tolist(), *left.tolist()])
    return reach


# --- nets outside the family ---------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Conv2d(width, width, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean((2, 3), keepdim=True))


class Attention(nn.Module):
    """Every pixel attends to every other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.AvgPool2d(16), nn.Upsample(scale_factor=16)
        self.heads = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        small = self.down(x)
        tokens = small.flatten(2).transpose(1, 2)
        mixed = self.heads(tokens, tokens, tokens, need_weights=False)[0]
        return x + self.up(mixed.transpose(1, 2).reshape(small.shape))


class CoordConv(nn.Module):
    """Appends the position within the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width + 1, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.linspace(0, 1, x.shape[3], dtype=x.dtype).expand(len(x), 1, *x.shape[2:])
        ramp = ramp + torch.linspace(0, 1, x.shape[2], dtype=x.dtype)[:, None]
        return self.conv(torch.cat([x, ramp], 1))


class Patches(nn.Module):
    """ViT-like: one fixed input size, a learned position per patch, no mixing between patches."""

    def __init__(self, width: int, size: int, patch: int = 8) -> None:
        super().__init__()
        self.down = nn.Conv2d(width, width, patch, stride=patch)
        self.position = nn.Parameter(torch.randn(1, width, size // patch, size // patch))
        self.up = nn.ConvTranspose2d(width, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x) + self.position)


class OneSize(nn.Module):
    """Takes one size only."""

    def __init__(self, net: nn.Module, size: int) -> None:
        super().__init__()
        self.net, self.size = net, size

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] != (self.size, self.size):
            raise ValueError(f"input {tuple(x.shape[2:])} is not {self.size} x {self.size}")
        return self.net(x)


class Multiple(OneSize):
    """Takes multiples of a size only, as U-Nets without padding do."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] % self.size or x.shape[3] % self.size:
            raise RuntimeError(f"sizes must be multiples of {self.size}, got {tuple(x.shape[2:])}")
        return self.net(x)


class CleansNan(nn.Module):
    """Replaces NaN at its input."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.nan_to_num(x))


class Compares(nn.Module):
    """Votes over the strongest channel: NaN compares false everywhere."""

    def __init__(self, net: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.net, self.after = net, after

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return self.after(torch.where(y > 0, torch.ones_like(y), torch.zeros_like(y)))


class Lagged(nn.Module):
    """Shifts its features, so its padding is felt further than its pixels are."""

    def __init__(self, width: int, lag: int) -> None:
        super().__init__()
        self.lag = lag
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        ahead = F.pad(x, (-self.lag, self.lag, -self.lag, self.lag))
        return self.conv(ahead) + 1


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        same = stride == 1 and inputs == width
        self.short = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class Decode(nn.Module):
    def __init__(self, inputs: int, skip: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs + skip, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor, *skip: Tensor) -> Tensor:
        return self.body(torch.cat([F.interpolate(x, scale_factor=2.0), *skip], 1))


class ResNetUNet(nn.Module):
    """U-Net on a ResNet-34 encoder (24.4 M parameters at width 64), the common segmentation net."""

    def __init__(self, bands: int = 3, outputs: int = 2, width: int = 64) -> None:
        super().__init__()
        w, depths = width, (3, 4, 6, 3)
        self.stem = nn.Sequential(
            nn.Conv2d(bands, w, 7, 2, 3, bias=False), nn.BatchNorm2d(w), nn.ReLU())  # fmt: skip
        self.pool = nn.MaxPool2d(3, 2, 1)
        widths = [w, w, 2 * w, 4 * w, 8 * w]
        self.stages = nn.ModuleList(
            nn.Sequential(*(
                BasicBlock(widths[i] if b == 0 else widths[i + 1], widths[i + 1],
                           2 if b == 0 and i > 0 else 1) for b in range(depth)))
            for i, depth in enumerate(depths))  # fmt: skip
        ups = [4 * w, 2 * w, w, w // 2, w // 4]
        skips = [4 * w, 2 * w, w, w, 0]
        self.decoder = nn.ModuleList(
            Decode(i, s, o) for i, s, o in zip([8 * w, *ups[:-1]], skips, ups, strict=True)
        )
        self.head = nn.Conv2d(ups[-1], outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        y = self.pool(features[0])
        for stage in self.stages:
            y = stage(y)
            features.append(y)
        for decode, skip in zip(self.decoder, [*features[-2::-1], None], strict=True):
            y = decode(y) if skip is None else decode(y, skip)
        return self.head(y)
