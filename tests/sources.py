"""Sources made from one file, and what is read of them."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio

import daskinfer as di
from conftest import TRANSFORM
from daskinfer.raster import describe
from daskinfer.source import ArraySource
from daskinfer.tiling import Span, Window

# rioxarray multiplies transforms with the operator that affine 3 is about to deprecate.
of_rioxarray = pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning")


def window(row, col, height, width):
    return Window(Span(row, row + height), Span(col, col + width))


def everything(source):
    return source.read(window(0, 0, *source.grid.shape))


def valid_of(source):
    """The mask of a source, all True where it has none."""
    valid = everything(source).valid
    return np.ones(source.grid.shape, bool) if valid is None else valid


def three_ways(path, **options):
    """One file as a `Raster`, as a lazy array, and as that array computed."""
    scene = di.open_raster(path, chunks=4, **options)
    return describe(path, **options), ArraySource(scene), ArraySource(scene.compute())


def vrt(path, source, bands):
    """A VRT over bands of a file: ``(dtype, band, extra XML)`` each."""
    with rasterio.open(source) as dataset:
        width, height = dataset.width, dataset.height
    body = "".join(
        f'<VRTRasterBand dataType="{dtype}" band="{n}">{extra}<SimpleSource>'
        f'<SourceFilename relativeToVRT="0">{source}</SourceFilename>'
        f"<SourceBand>{band}</SourceBand></SimpleSource></VRTRasterBand>"
        for n, (dtype, band, extra) in enumerate(bands, 1)
    )
    geo = ", ".join(map(str, TRANSFORM.to_gdal()))
    head = f'rasterXSize="{width}" rasterYSize="{height}"><GeoTransform>{geo}</GeoTransform>'
    path.write_text(f"<VRTDataset {head}{body}</VRTDataset>")
    return str(path)
