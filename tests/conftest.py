"""Rasters, models and clusters for the tests."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import rasterio
import torch
from affine import Affine
from hypothesis import settings
from torch import nn

import daskinfer as di
from models import FACTORY

# A deadline is a timed assert: on a busy machine it fails whatever the code does.  Examples are the
# same everywhere, so that a failure belongs to the change it appears with.
settings.register_profile("daskinfer", deadline=None, derandomize=True)
settings.load_profile("daskinfer")

TRANSFORM = Affine(10, 0, 500_000, 0, -10, 5_600_000)


class N3(nn.Sequential):
    """Three padded 3x3 convolutions with biases: radius 3."""

    def __init__(self, bands: int = 2, classes: int = 3) -> None:
        super().__init__(
            nn.Conv2d(bands, 6, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(6, classes, 3, padding=1),
        )


class P4(nn.Sequential):
    """A pooling net: total stride 4."""

    def __init__(self, bands: int = 2, classes: int = 3) -> None:
        super().__init__(
            nn.Conv2d(bands, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.Upsample(scale_factor=4, mode="nearest"),
            nn.Conv2d(6, classes, 3, padding=1),
        )


class Pixel(nn.Module):
    """Gives its input back: any shift shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def seeded(net, *args, seed: int = 0):
    """A net with weights that do not depend on which test ran before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return net(*args).eval()


def write_raster(path, data, **profile):
    """Write ``(band, y, x)`` as a GeoTIFF on a plain UTM grid."""
    options = {"crs": "EPSG:32632", "transform": TRANSFORM, "driver": "GTiff"} | profile
    descriptions = options.pop("descriptions", ())
    count, height, width = data.shape
    with rasterio.open(
        path, "w", count=count, height=height, width=width, dtype=data.dtype, **options
    ) as dataset:
        dataset.write(data)
        for number, name in enumerate(descriptions, 1):
            dataset.set_band_description(number, name)
    return str(path)


def noise(*shape, dtype="uint16", seed: int = 0):
    """Random raster ``(band, y, x)``."""
    return np.random.default_rng(seed).integers(0, 10_000, shape).astype(dtype)


def ramp(height: int, width: int):
    """One band in which every pixel has its own number."""
    return np.arange(height * width, dtype=np.float32).reshape(1, height, width)


@pytest.fixture(autouse=True)
def _one_thread():
    """Small nets are an order of magnitude slower on threads that wait for each other's cores."""
    torch.set_num_threads(1)


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """A module of the user's that is not installed, with factories of nets in it."""
    (tmp_path / "nets_of_users.py").write_text(FACTORY.format(seed=0))
    monkeypatch.syspath_prepend(tmp_path)
    yield "nets_of_users:make"
    sys.modules.pop("nets_of_users", None)


@pytest.fixture(scope="session")
def one_worker():
    """Threads of this process."""
    with di.cluster("local", dashboard_address=":0", set_as_default=False) as client:
        yield client


@pytest.fixture(scope="session")
def two_workers():
    """Two worker processes."""
    with di.cluster(
        "processes", n_workers=2, dashboard_address=":0", set_as_default=False
    ) as client:
        yield client
