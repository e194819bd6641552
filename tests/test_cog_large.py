"""Rasters that a classic TIFF, or a count in 32 bits, does not hold."""

from __future__ import annotations

import os

import numpy as np
import pytest
import rasterio
import tifffile
from rasterio.windows import Window

from cogs import assert_valid, class_map, halved, noise_of, spec_of
from daskinfer.cog import WorkFile, encode_chunk

SIDE, CHUNK = 70_000, 2048
# Corners, and what lies on both sides of a border between regions.
PLACES = [(0, 0), (0, 34), (17, 16), (17, 17), (34, 0), (34, 34)]


def large_spec(**options):
    return spec_of(SIDE, SIDE, nodata=255, **options)


def pixels_of(spec, place, make):
    sides = [min(CHUNK, SIDE - CHUNK * n) for n in place]
    return make(spec_of(*sides, spec.count, spec.dtype, nodata=spec.nodata), seed=hash(place) % 999)


def write_places(work, make):
    for row, col in PLACES:
        array = pixels_of(work.spec, (row, col), make)
        work.append(encode_chunk(work.spec, array, CHUNK * row, CHUNK * col, work.levels))


def assert_places(path, spec, make):
    """Every written chunk is there at every level, and nodata between them."""
    with rasterio.open(path) as dataset:
        levels = len(dataset.overviews(1))
        assert (dataset.read(1, window=Window(CHUNK, CHUNK, 1500, 1500)) == 255).all()
    assert levels == len(spec.shapes) - 1
    for place in PLACES:
        expected = pixels_of(spec, place, make)
        for level in range(levels + 1):
            if level:
                expected = halved(expected, spec.resampling, 255)
            row, col = (CHUNK * n >> level for n in place)
            window = Window(col, row, expected.shape[2], expected.shape[1])
            options = {"overview_level": level - 1} if level else {}
            with rasterio.open(path, **options) as dataset:
                np.testing.assert_array_equal(dataset.read(window=window), expected)


def test_tiles_beyond_4_gb_are_found(tmp_path):
    """Real tiles behind 5 GB of nothing, which takes no room: while writing, and in the end."""
    spec = large_spec()
    work = WorkFile.create(tmp_path / "w", spec, (CHUNK, CHUNK))
    os.truncate(work.path, 5 << 30)
    write_places(work, class_map)
    with tifffile.TiffFile(work.path) as file:
        assert max(file.pages[0].dataoffsets) > 5 << 30
    for row, col in PLACES:
        expected = pixels_of(spec, (row, col), class_map)
        window = Window(CHUNK * col, CHUNK * row, expected.shape[2], expected.shape[1])
        with rasterio.open(work.path) as dataset:
            np.testing.assert_array_equal(dataset.read(window=window), expected)
    work.finish(tmp_path / "out.tif", "append", allow_missing=True)
    assert os.path.getsize(tmp_path / "out.tif") > 5 << 30
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert max(file.pages[0].dataoffsets) > 5 << 30
    assert_valid(tmp_path / "out.tif", spec)
    assert_places(tmp_path / "out.tif", spec, class_map)


@pytest.mark.slow
def test_a_strict_file_of_70000_px(tmp_path):
    spec = large_spec(interleave="band", compress="zstd", sparse=True)
    work = WorkFile.create(tmp_path / "w", spec, (CHUNK, CHUNK))
    write_places(work, noise_of)
    work.finish(tmp_path / "out.tif", allow_missing=True)
    assert_valid(tmp_path / "out.tif", spec)
    assert_places(tmp_path / "out.tif", spec, noise_of)


@pytest.mark.slow
def test_a_strict_file_over_4_gb(tmp_path):
    """Every tile takes its 256 kB, the empty ones too: the last are beyond 4 GB."""
    spec = large_spec(compress="none")
    work = WorkFile.create(tmp_path / "w", spec, (CHUNK, CHUNK))
    write_places(work, noise_of)
    work.finish(tmp_path / "out.tif", allow_missing=True)
    assert os.path.getsize(tmp_path / "out.tif") > SIDE * SIDE
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert max(file.pages[0].dataoffsets) > 1 << 32
    assert_valid(tmp_path / "out.tif", spec)
    assert_places(tmp_path / "out.tif", spec, noise_of)
