"""COGs for the tests: what goes in, what must come out, and who is asked.

Everything expected is computed here the plain way; nothing of the writer's own arithmetic is used.
"""

from __future__ import annotations

import itertools
import os

import numpy as np
import rasterio
import tifffile
from rio_cogeo import cog_validate

from cogrules import broken_rules
from daskinfer.cog import CogSpec, WorkFile, encode_chunk

NORTH_UP = (10.0, 0.0, 300000.0, 0.0, -10.0, 6000000.0)


def spec_of(height, width, count=1, dtype="uint8", **options):
    placed = {"transform": NORTH_UP, "crs": "EPSG:32633"}
    return CogSpec(height, width, count, dtype, **(placed | options))


def class_map(spec, seed=0):
    """Random patches of few values, with nodata (or 0) in the corner."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 5, (spec.count, -(-spec.height // 7), -(-spec.width // 7)))
    array = small.repeat(7, 1).repeat(7, 2)[:, : spec.height, : spec.width].astype(spec.dtype)
    array[:, : spec.height // 3, : spec.width // 2] = spec.fill
    return array


def noise_of(spec, seed=0):
    """Every bit random; floats are finite, so that every codec keeps them."""
    shape = (spec.count, spec.height, spec.width)
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(spec.dtype).itemsize)
    array = np.frombuffer(raw, spec.dtype).reshape(shape).copy()
    if array.dtype.kind == "f":
        # Small enough that the mean of four does not overflow.
        array[~np.isfinite(array) | (np.abs(array) > 1e30)] = 1
    return array


def chunks_of(spec, chunk):
    """Origins and slices of the regular grid."""
    for row, col in itertools.product(
        range(0, spec.height, chunk[0]), range(0, spec.width, chunk[1])
    ):
        yield row, col, np.s_[:, row : row + chunk[0], col : col + chunk[1]]


def write_all(work, array, order=None):
    chunks = list(chunks_of(work.spec, work.chunk))
    for i in range(len(chunks)) if order is None else order:
        row, col, part = chunks[i]
        work.append(encode_chunk(work.spec, array[part], row, col, work.levels))


def write_file(folder, spec, array, chunk, layout="strict", order=None):
    path = folder / "out.tif"
    work = WorkFile.create(f"{path}.partial", spec, chunk)
    write_all(work, array, order)
    work.finish(path, layout, allow_missing=order is not None)
    assert os.listdir(folder) == ["out.tif"]
    return path


def halved(array, how, nodata):
    """One level up, from counts and sums over the pixels that exist and are valid."""
    rows, cols = (-(-n // 2) for n in array.shape[1:])
    cells = np.zeros((4, len(array), rows, cols), array.dtype)
    there = np.zeros(cells.shape, bool)
    for k, (y, x) in enumerate(itertools.product((0, 1), (0, 1))):
        pixels = array[:, y::2, x::2]
        cells[k, :, : pixels.shape[1], : pixels.shape[2]] = pixels
        there[k, :, : pixels.shape[1], : pixels.shape[2]] = True
    if how == "nearest":
        return cells[0]
    valid = there & (cells == cells)
    if nodata is not None:
        valid &= cells != nodata
    if how == "mode":
        votes = [((cells == cells[k]) & valid).sum(axis=0) * valid[k] for k in range(4)]
        out = np.take_along_axis(cells, np.argmax(votes, axis=0)[None], axis=0)[0]
    else:
        total = np.where(valid, cells, 0).sum(axis=0, dtype="f8")
        mean = total / np.maximum(valid.sum(axis=0), 1)
        out = (mean if array.dtype.kind == "f" else np.floor(mean + 0.5)).astype(array.dtype)
        if nodata is not None:
            out[out == nodata] = next_number(array.dtype, nodata)
    empty = ~valid.any(axis=0)
    out[empty] = np.nan if nodata is None and array.dtype.kind == "f" else (nodata or 0)
    return out


def next_number(dtype, nodata):
    if dtype.kind == "f":
        return np.nextafter(dtype.type(nodata), dtype.type(np.inf))
    return nodata - 1 if nodata == np.iinfo(dtype).max else nodata + 1


def pyramid(array, spec):
    """All levels, each the reduction of the whole level below."""
    levels = [array]
    while spec.width > 1 and max(levels[-1].shape[1:]) > min(spec.blocksize, 512):
        levels.append(halved(levels[-1], spec.resampling, spec.nodata))
    return levels


def assert_valid(path, spec):
    """By the rules of rio-cogeo and of GDAL."""
    # No file one pixel wide and longer than 512 passes in strict mode, not GDAL's own either.
    valid, errors, warnings = cog_validate(path, strict=spec.width > 1, quiet=True)
    assert valid, (errors, warnings)
    assert broken_rules(path) == []


def levels_of(path):
    """Pixels of all levels, read by rasterio."""
    with rasterio.open(path) as dataset:
        levels = [dataset.read()]
        count = len(dataset.overviews(1))
    for level in range(count):
        with rasterio.open(path, overview_level=level) as dataset:
            levels.append(dataset.read())
    return levels


def check(path, array, spec):
    """Valid, and equal to `array` at every level for every reader."""
    assert_valid(path, spec)
    expected, levels = pyramid(array, spec), levels_of(path)
    assert [level.shape for level in levels] == [level.shape for level in expected]
    assert [level.dtype for level in levels] == [array.dtype] * len(levels)
    np.testing.assert_array_equal(levels[0], array)
    # Sums of float32 depend on their order.
    rounded = spec.resampling == "average" and array.dtype.kind == "f"
    for i, (level, wanted) in enumerate(zip(levels, expected, strict=True)):
        np.testing.assert_allclose(level, wanted, 1e-5 * rounded, 1e-6 * rounded, err_msg=f"{i}")
    if "lerc" in spec.compress and np.isnan(array).any():
        return  # tifffile reads what lerc masks as 0
    if spec.sparse and spec.dtype == "int8" and spec.nodata:
        return  # tifffile takes no nodata of int8, and reads missing tiles as 0
    with tifffile.TiffFile(path) as file:
        read = file.pages[0].asarray()
    if spec.planes == 1:
        read = read[None] if spec.count == 1 else np.moveaxis(read, -1, 0)
    np.testing.assert_array_equal(read.reshape(array.shape), array)
