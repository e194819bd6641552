"""A run in a process of its own: prints what its plan says of memory, and by how much it grew.

The process is warm when it is first looked at: it has made a small run with the same model.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import psutil
import rasterio
import torch

import daskinfer as di
from conftest import TRANSFORM

SHAPES = {
    # side and bands of the raster, model, options
    "few big chunks": (8192, 6, (3, {}), {"chunk": 4096, "tile": 512, "batch_size": 2}),
    "many small chunks": (4096, 6, (3, {}), {"chunk": 512, "tile": 512, "batch_size": 2}),
    "many classes": (
        4096, 3, (32, {"output": "probabilities", "activation": "softmax"}),
        {"chunk": 2048, "tile": 512, "batch_size": 2},
    ),
}  # fmt: skip


def raster(path, side, bands):
    block = np.random.default_rng(0).integers(0, 9000, (bands, 512, 512)).astype("uint16")
    profile = {"driver": "GTiff", "count": bands, "dtype": "uint16", "tiled": True}
    profile |= {"blockxsize": 512, "blockysize": 512, "compress": "deflate", "zlevel": 1}
    profile |= {"crs": "EPSG:32632", "transform": TRANSFORM}
    with rasterio.open(path, "w", width=side, height=side, **profile) as dataset:
        for _, window in dataset.block_windows(1):
            dataset.write(block[:, : window.height, : window.width], window=window)
    return path


class Peak(threading.Thread):
    """Looks at this process all the time."""

    def __init__(self):
        super().__init__(daemon=True)
        self.process, self.ended = psutil.Process(), threading.Event()
        self.base = self.peak = self.process.memory_info().rss

    def run(self):
        while not self.ended.wait(0.005):
            self.peak = max(self.peak, self.process.memory_info().rss)


def main(name, folder):
    side, bands, (channels, spec), options = SHAPES[name]
    torch.set_num_threads(1)
    model = di.load_model(torch.nn.Conv2d(bands, channels, 3, padding=1), **spec)
    source = raster(folder / "scene.tif", side, bands)
    warm = raster(folder / "warm.tif", 600, bands)
    with di.cluster("local", dashboard_address=":0") as client:
        small = {"tile": 128, "chunk": 128, "batch_size": 1}
        di.run(warm, model, folder / "w.tif", client=client, **small)
        plan = di.plan(source, model, folder / "o.tif", **options)
        watch = Peak()
        watch.start()
        di.run(plan, client=client)
        watch.ended.set()
        watch.join()
    print(plan.memory, watch.peak - watch.base)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(sys.argv[1], Path(made))
