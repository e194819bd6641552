"""Rasters and networks that benchmarks make for themselves.

The rasters are the bundled Sentinel-2 scene and its mirror images side by side: compressed, they
are as large and as slow to decode as real data, because that is what they are.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import rasterio
from rasterio.windows import Window

from daskinfer.demo import demo_path

if TYPE_CHECKING:
    import torch

__all__ = [
    "decode_seconds",
    "heavy_unet",
    "macs_per_pixel",
    "mirrored_scene",
    "pixel_model",
    "scene_raster",
    "unet",
    "warm",
]

Array = npt.NDArray[Any]

DEMO_WIDTHS = (16, 32, 48, 48)
# Multiply-adds grow with the square of the width: about 20 times those of the demo model.
HEAVY_WIDTHS = (80, 144, 208, 224)
_CONVS = (1, 1, 2, 3)


def mirrored_scene(rows: range, cols: range) -> Array:
    """Pixels of the endless mirrored scene.

    Returns
    -------
    ndarray of uint16, shape (6, len(rows), len(cols))

    Examples
    --------
    >>> part = mirrored_scene(range(383, 385), range(10))
    >>> part.shape, bool((part[:, 0] == part[:, 1]).all())
    ((6, 2, 10), True)
    """
    scene = _scene()
    y, x = (_folded(axis, size) for axis, size in zip((rows, cols), scene.shape[1:], strict=True))
    return np.ascontiguousarray(scene[:, y[:, None], x])


@functools.cache
def _scene() -> Array:
    with rasterio.open(demo_path()) as dataset:
        return np.asarray(dataset.read())


def _folded(positions: range, size: int) -> Array:
    """Position in the scene: 0, 1, ..., n-1, n-1, ..., 1, 0, 0, 1, ..."""
    phase = np.asarray(positions) % (2 * size)
    return np.asarray(np.minimum(phase, 2 * size - 1 - phase))


def scene_raster(folder: Path, height: int, width: int, block: int = 512) -> str:
    """Path of a raster of 6 bands of uint16 in a folder; made unless it is there.

    Tiled GeoTIFF, deflate at GDAL's own default level and without predictor, bands interleaved by
    pixel, header first: what GDAL's COG driver writes by default, but without overviews, which
    nothing here reads.
    """
    path = folder / f"scene-{height}x{width}-{block}.tif"
    if path.exists():
        return str(path)
    unfinished = path.with_suffix(".making.tif")
    with rasterio.open(demo_path()) as scene:
        georeference = {"crs": scene.crs, "transform": scene.transform}
        names = scene.descriptions
    with rasterio.open(
        unfinished,
        "w",
        driver="GTiff",
        count=len(names),
        height=height,
        width=width,
        dtype="uint16",
        tiled=True,
        blockxsize=block,
        blockysize=block,
        compress="deflate",
        interleave="pixel",
        bigtiff="if_safer",
        num_threads="all_cpus",
        **georeference,
    ) as dataset:
        dataset.descriptions = names
        for row in range(0, height, block):
            rows = range(row, min(row + block, height))
            dataset.write(
                mirrored_scene(rows, range(width)), window=Window(0, row, width, len(rows))
            )
    os.replace(unfinished, path)
    return str(path)


def warm(path: str) -> int:
    """Read a file into the system's page cache, so that no design is the first to; its bytes."""
    size = 0
    with open(path, "rb", buffering=0) as file:
        while part := file.read(1 << 24):
            size += len(part)
    return size


def decode_seconds(path: str, repeats: int = 9) -> float:
    """Processor seconds in which one thread decodes one pixel (all bands) of a raster.

    Every block is decoded once, from the system's page cache.  The median of `repeats` times: a
    core is not as fast all the time as it was once, and less so while its neighbours work.
    """
    times = []
    for _ in range(repeats):
        with rasterio.open(path, sharing=False) as dataset:
            start = time.thread_time()
            dataset.read()
            times.append(time.thread_time() - start)
            pixels = int(dataset.width * dataset.height)
    return statistics.median(times) / pixels


def pixel_model(bands: int, classes: int) -> torch.nn.Module:
    """A network that looks at single pixels: for devices that do not run it."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Conv2d(bands, classes, 1).eval()


def unet(widths: tuple[int, ...] = DEMO_WIDTHS, bands: int = 6, classes: int = 3) -> Any:
    """A U-Net built as the demo model is, with other widths and fixed random weights.

    Parameters
    ----------
    widths : tuple of int
        Channels at full resolution, at half of it, and so on: four levels.
    bands, classes : int
        Channels of input and output.

    Returns
    -------
    torch.nn.Module
        In eval mode.

    Examples
    --------
    >>> import torch
    >>> unet()(torch.zeros(1, 6, 16, 16)).shape
    torch.Size([1, 3, 16, 16])
    """
    import torch

    from daskinfer.bench.unet import UNet

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return UNet(bands, classes, widths, _CONVS).eval()


def heavy_unet() -> Any:
    """The demo model's network with about 20 times its multiply-adds."""
    return unet(HEAVY_WIDTHS)


def macs_per_pixel(network: Any, bands: int = 6, side: int = 64) -> float:
    """Multiply-adds of all convolutions per input pixel.

    >>> import torch
    >>> macs_per_pixel(torch.nn.Conv2d(6, 2, 3, padding=1))
    108.0
    """
    import torch

    total = 0

    def count(module: Any, _: Any, output: Any) -> None:
        nonlocal total
        total += math.prod(output.shape[2:]) * module.weight.numel()

    convs = [module for module in network.modules() if isinstance(module, torch.nn.Conv2d)]
    hooks = [module.register_forward_hook(count) for module in convs]
    try:
        with torch.inference_mode():
            network(torch.zeros(1, bands, side, side))
    finally:
        for hook in hooks:
            hook.remove()
    return total / side**2
