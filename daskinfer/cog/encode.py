"""Encode a chunk of pixels into TIFF tiles, and with it the overview levels that it can make alone.

Encoding knows no file: it can run anywhere, and what it returns can be sent anywhere.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import Any

import imagecodecs
import numpy as np
from affine import Affine
from numpy.typing import NDArray
from rasterio.io import MemoryFile

from daskinfer.cog import tiff
from daskinfer.cog.overview import Array, reduce2x2
from daskinfer.cog.spec import CogSpec, gdal_profile
from daskinfer.cog.statistics import Table, blank_statistics, block_statistics

# Codecs that need no more of the file than the bytes of the tile; GDAL encodes the others, which
# have tables and parameters in tags of the file.
_OWN = ("deflate", "zstd", "lzw", "none")
# Buffers that are larger than this are not kept.
_KEPT_BYTES = 16 << 20
# For scratch files: rasterio warns of rasters without a place, and hiding a warning is not safe
# in threads.
_ANYWHERE = Affine(1, 0, 1, 0, -1, 1)


@dataclass(frozen=True, eq=False)
class EncodedPart:
    """Encoded tiles of a chunk at one level, and of one band where bands have their own.

    Parameters
    ----------
    level, row, col : int
        Level, and tile row and column of the chunk's corner in `Layout.grids`.
    sizes : ndarray of int64, shape (rows, columns)
        Bytes of each tile; 0 for one that is all nodata.
    """

    level: int
    row: int
    col: int
    sizes: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EncodedChunk:
    """An encoded chunk, ready to be appended; picklable.

    Parameters
    ----------
    parts : tuple of EncodedPart
        One per level, or one per level and band, from full resolution up.
    data : bytes-like
        Tiles of all parts, each part in reading order.
    statistics : ndarray of float64, shape (block rows, block columns, band, 5), optional
        Of the blocks at full resolution, as `cogstats.block_statistics`.
    """

    parts: tuple[EncodedPart, ...]
    data: bytes | bytearray
    statistics: Table | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles."""
        return len(self.data)


def encode_chunk(spec: CogSpec, array: Array, row: int, col: int, levels: int = 0) -> EncodedChunk:
    """Encode a chunk and the overview levels that it can make alone.

    Most of the time is spent in codecs that release the GIL.

    Parameters
    ----------
    spec : CogSpec
        The file.
    array : ndarray, shape (band, y, x)
        Pixels, of the dtype of the file.
    row, col : int
        Pixel of the chunk's corner: multiples of ``spec.chunk_step(levels)``.
    levels : int
        ``WorkFile.levels``, the same for all chunks of a run.

    Returns
    -------
    EncodedChunk
        Levels 0 to `levels`.

    Raises
    ------
    ValueError
        If the array is not of the file's dtype and bands, or is off the grid.
    """
    _check_chunk(spec, array, row, col, levels)
    return encode_levels(spec, array, (row, col), range(levels + 1))


def _check_chunk(spec: CogSpec, array: Array, row: int, col: int, levels: int) -> None:
    if array.ndim != 3 or array.shape[0] != spec.count:
        raise ValueError(f"chunk of shape {array.shape} for a file of {spec.count} bands")
    if array.dtype != np.dtype(spec.dtype):
        raise ValueError(f"chunk of {array.dtype} for a file of {spec.dtype}")
    step = spec.chunk_step(levels)
    sizes = (spec.height, spec.width)
    for origin, side, size in zip((row, col), array.shape[1:], sizes, strict=True):
        end = origin + side
        if origin % step or not 0 <= origin < end <= size or (end % step and end != size):
            raise ValueError(
                f"chunk from {origin} to {end} of {size} px: it must start, and end unless at the"
                f" edge, at multiples of {step}"
            )


def encode_levels(
    spec: CogSpec, array: Array, origin: tuple[int, int], levels: range
) -> EncodedChunk:
    """Encode several levels, each the reduction of the one before.

    Parameters
    ----------
    spec : CogSpec
        The file.
    array : ndarray, shape (band, y, x)
        Pixels of the level that comes before ``levels.start``, or of level 0 if that is 0.
    origin : (int, int)
        Pixel of the array's corner at its own level.
    levels : range
        Levels to encode.

    Returns
    -------
    EncodedChunk
        One part per level.
    """
    parts, data = [], bytearray()
    row, col = origin
    statistics = None
    if spec.with_statistics and levels.start == 0:
        statistics = block_statistics(array, spec.blocksize, spec.nodata)
    for level in levels:
        if level:
            array = reduce2x2(array, spec.resampling, spec.nodata)
            row, col = row // 2, col // 2
        rows = spec.grid(level)[0]
        for plane, bands in enumerate(np.split(array, spec.planes)):
            part = _encode_tiles(spec, bands, level, row, col, data)
            parts.append(replace(part, row=part.row + plane * rows))
    return EncodedChunk(tuple(parts), data, statistics)


def encode_nothing(spec: CogSpec, chunk: tuple[int, int], row: int, col: int) -> EncodedChunk:
    """Encode a chunk of which nothing is known: nodata, or 0, without looking at pixels.

    Parameters
    ----------
    spec : CogSpec
        The file.
    chunk : (int, int)
        Sides of the chunk grid in pixels.
    row, col : int
        Of the chunk in that grid.

    Returns
    -------
    EncodedChunk
        As `encode_chunk` of an array full of `spec.fill`.
    """
    parts = []
    for level in range(spec.local_levels(chunk) + 1):
        grid = spec.grid(level)
        # Rounding matters only where the chunk side is that of the raster: one chunk, from 0.
        across = [-(-side // spec.chunk_step(level)) for side in chunk]
        top, left = row * across[0], col * across[1]
        sizes = np.zeros((min(across[0], grid[0] - top), min(across[1], grid[1] - left)), int)
        parts += [
            EncodedPart(level, top + plane * grid[0], left, sizes) for plane in range(spec.planes)
        ]
    statistics = None
    if spec.with_statistics and spec.nodata is None:
        corner = row * chunk[0], col * chunk[1]
        height, width = (
            min(side, size - at)
            for side, size, at in zip(chunk, spec.shapes[0], corner, strict=True)
        )
        statistics = blank_statistics((height, width), spec.blocksize, spec.count)
    return EncodedChunk(tuple(parts), b"", statistics)


def _encode_tiles(
    spec: CogSpec, array: Array, level: int, row: int, col: int, data: bytearray
) -> EncodedPart:
    """Encode the tiles of a level, and append them to `data`."""
    side = spec.blocksize
    sizes = np.zeros([-(-n // side) for n in array.shape[1:]], np.int64)
    for i, j in np.ndindex(*sizes.shape):
        block = array[:, side * i : side * (i + 1), side * j : side * (j + 1)]
        if not _all_fill(block, spec):
            tile = _encode(block, spec)
            sizes[i, j] = len(tile)
            data += tile
    return EncodedPart(level, row // side, col // side, sizes)


def _all_fill(block: Array, spec: CogSpec) -> bool:
    """Whether every pixel is nodata, or 0 where there is none."""
    fill = block.dtype.type(spec.fill)
    if fill != fill:
        return bool(np.isnan(block[0, 0, 0]) and np.isnan(block).all())
    return bool(block[0, 0, 0] == fill and (block == fill).all())


def encode_tile(block: Array, spec: CogSpec) -> bytes:
    """Encode one tile.

    Parameters
    ----------
    block : ndarray, shape (band, y, x)
        Pixels of the bands that share a tile; short sides are filled up by repeating the edge.
    spec : CogSpec
        The file.

    Returns
    -------
    bytes
        As they go into the file.
    """
    return bytes(_encode(block, spec))


class _Scratch(threading.local):
    """Buffers that a thread keeps from tile to tile.

    Fresh ones come from the kernel page by page and go back to it, which under Dask, whose workers
    give memory back at once, took a seventh of the time of encoding floats.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of any content, valid until the next of that name."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = np.empty(size, np.uint8)
            if size <= _KEPT_BYTES:
                self._buffers[name] = buffer
        array: Array = buffer[:size].view(dtype).reshape(shape)
        return array


_scratch = _Scratch()


def _encode(block: Array, spec: CogSpec) -> bytes | memoryview:
    """Encode one tile as `encode_tile` does; valid until this thread encodes the next."""
    if spec.compress not in _OWN:
        return _encode_with_gdal(_filled_up(block, spec.blocksize), spec)
    return _compress(_predict(_interleaved(block, spec.blocksize), spec.tiff_predictor), spec)


def _filled_up(block: Array, side: int) -> Array:
    """Repeat the last row and column, which costs the fewest bytes; readers cut them off."""
    short = [side - n for n in block.shape[1:]]
    if not any(short):
        return block
    return np.pad(block, [(0, 0), (0, short[0]), (0, short[1])], mode="edge")


def _interleaved(block: Array, side: int) -> Array:
    """All bands of a pixel together, ``(y, x, band)``: PlanarConfiguration 1."""
    tile = _scratch.array("tile", (side, side, len(block)), block.dtype)
    # Band by band, which is twice as fast as all at once.
    for band, pixels in enumerate(_filled_up(block, side)):
        tile[..., band] = pixels
    return tile


def _predict(tile: Array, predictor: int) -> Array:
    """Apply TIFF 6.0 section 14, or Adobe's technical note 3 for floats."""
    if predictor == 1:
        return tile
    out = _scratch.array("predicted", tile.shape, tile.dtype)
    if predictor == 2:
        unsigned = f"u{tile.itemsize}"
        imagecodecs.delta_encode(tile.view(unsigned), axis=1, out=out.view(unsigned))
    else:
        imagecodecs.floatpred_encode(tile, axis=1, out=out)
    return out


def _compress(tile: Array, spec: CogSpec) -> bytes | memoryview:
    raw: Any = tile.reshape(-1).view(np.uint8)
    # What does not compress becomes longer, by less than this in both.
    out: Any = _scratch.array("encoded", (len(raw) + len(raw) // 64 + 1024,), np.uint8)
    match spec.compress:
        case "deflate":
            return memoryview(imagecodecs.deflate_encode(raw, level=spec.codec_level, out=out))
        case "zstd":
            return memoryview(imagecodecs.zstd_encode(raw, level=spec.codec_level, out=out))
        case "lzw":
            return bytes(imagecodecs.lzw_encode(raw.tobytes()))
    return memoryview(raw)


def _encode_with_gdal(block: Array, spec: CogSpec) -> bytes:
    """Let GDAL encode the one tile of a file in memory."""
    profile = gdal_profile(spec, spec.blocksize, spec.blocksize) | {"count": len(block)}
    with MemoryFile() as memory:
        with memory.open(**profile, transform=_ANYWHERE) as dataset:
            dataset.write(block)
        data = memory.getbuffer()
        ifd = tiff.parse_bytes(data)
        start = int(ifd[tiff.TILE_OFFSETS].ints()[0])
        return bytes(data[start : start + int(ifd[tiff.TILE_BYTE_COUNTS].ints()[0])])
