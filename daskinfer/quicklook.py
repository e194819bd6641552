"""A picture of a scene and of the map made from it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import rasterio
from rasterio.enums import Resampling
from rasterio.errors import NotGeoreferencedWarning

from .raster import describe

__all__ = ["class_picture", "quicklook", "true_color"]

Picture = npt.NDArray[np.uint8]
_GAP = 8


def quicklook(
    scene: str | os.PathLike[str],
    classes: str | os.PathLike[str],
    picture: str | os.PathLike[str],
    *,
    bands: Sequence[str | int] = (3, 2, 1),
    largest: int = 1024,
) -> None:
    """Write a PNG with a scene above the class map made from it.

    Parameters
    ----------
    scene : path
        Raster with the bands to show.
    classes : path
        Class map with a colour table.
    picture : path
        PNG to write.
    bands : sequence of str or int
        Red, green and blue.
    largest : int, default 1024
        Longest side of each of the two in pixels; read from overviews where there are some.
    """
    panels = [true_color(scene, bands, largest), class_picture(classes, largest)]
    width = max(panel.shape[2] for panel in panels)
    gap = np.full((3, _GAP, width), 255, np.uint8)
    joined = np.concatenate([panels[0], gap, panels[1]], axis=1)
    profile = {"driver": "PNG", "height": joined.shape[1], "width": width, "count": 3}
    with warnings.catch_warnings():
        # A picture has no georeferencing to lose.
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with rasterio.open(picture, "w", dtype="uint8", **profile) as dataset:
            dataset.write(joined)
    # GDAL leaves its statistics and the like beside a PNG.
    if os.path.exists(f"{os.fspath(picture)}.aux.xml"):
        os.unlink(f"{os.fspath(picture)}.aux.xml")


def true_color(
    scene: str | os.PathLike[str], bands: Sequence[str | int], largest: int = 1024
) -> Picture:
    """Three bands as 8-bit colour, stretched between their 2nd and 98th percentile together."""
    raster = describe(scene, bands=bands)
    with rasterio.open(raster.path) as dataset:
        data = dataset.read(
            list(raster.indexes),
            out_shape=(3, *_fit(dataset.shape, largest)),
            resampling=Resampling.average,
        )
    low, high = np.percentile(data, (2, 98))
    stretched = np.clip((data - low) / max(high - low, 1), 0, 1)
    return np.asarray(stretched * 255, np.uint8)


def class_picture(classes: str | os.PathLike[str], largest: int = 1024) -> Picture:
    """A class map in the colours of its colour table; nodata is black."""
    with rasterio.open(classes) as dataset:
        data = dataset.read(
            1, out_shape=_fit(dataset.shape, largest), resampling=Resampling.nearest
        )
        table: dict[int, tuple[int, ...]] = dataset.colormap(1)
        nodata = dataset.nodata
    colors = np.zeros((int(max(data.max(), *table)) + 1, 3), np.uint8)
    for value, rgba in table.items():
        colors[value] = rgba[:3]
    if nodata is not None and nodata < len(colors):
        colors[int(nodata)] = 0
    picture: Picture = np.ascontiguousarray(np.moveaxis(colors[data], -1, 0))
    return picture


def _fit(shape: tuple[int, int], largest: int) -> tuple[int, int]:
    factor: Any = max(1.0, max(shape) / largest)
    return max(1, round(shape[0] / factor)), max(1, round(shape[1] / factor))
