"""What a GeoTIFF is to be, and the tags that GDAL writes for it.

Tags are not built by hand: GDAL writes an empty one-tile file with the wanted CRS, nodata, colour
table and metadata, and its tags are taken as they are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from affine import Affine
from rasterio.control import GroundControlPoint
from rasterio.errors import NotGeoreferencedWarning
from rasterio.io import DatasetWriter, MemoryFile

from daskinfer.cog import tiff
from daskinfer.cog.overview import RESAMPLINGS, Shape, level_shapes
from daskinfer.cog.statistics import failed_placeholder, placeholders

_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
DTYPES = (*_INTEGERS, "float32", "float64")

# Codec: GDAL's option for the level, its largest value, the level taken when none is asked for.
# On floats, higher levels of zstd take longer (9: four times as long) for 2 % at most.
_LEVELS = {
    "deflate": ("ZLEVEL", 9, 6),
    "zstd": ("ZSTD_LEVEL", 22, 1),
    "lerc_deflate": ("ZLEVEL", 9, 6),
    "lerc_zstd": ("ZSTD_LEVEL", 22, 1),
    "jpeg": ("JPEG_QUALITY", 100, 75),
    "webp": ("WEBP_LEVEL", 100, 75),
}
CODECS = (*_LEVELS, "lzw", "lerc", "webp_lossless", "none")
INTERLEAVES = ("pixel", "band")
_PREDICTED = ("deflate", "zstd", "lzw")
# Codecs of pictures: which bands they take together in one tile, always of uint8.
_PICTURES = {"jpeg": (1, 3), "webp": (3, 4), "webp_lossless": (3, 4)}
_LOSSY = ("jpeg", "webp")
_INSTEAD = "pass compress='deflate'"


@dataclass(frozen=True)
class CogSpec:
    """Everything about a file but its pixels.

    Parameters
    ----------
    height, width, count : int
        Rows, columns and bands.
    dtype : str
        numpy name; any integer or float type of GDAL, but not bool or complex.
    transform : tuple of 6 float, optional
        ``a, b, c, d, e, f`` of `affine.Affine`.
    crs : str, optional
        WKT or whatever `rasterio.crs.CRS.from_user_input` takes.
    gcps : tuple of (row, col, x, y, z), optional
        Ground control points in `gcps_crs`; `transform` and `crs` are then not written, as a
        GeoTIFF holds one or the other.
    gcps_crs : str, optional
        As `crs`.
    rpcs : tuple of (str, str), optional
        Items of GDAL's RPC metadata domain.
    nodata : float, optional
        Kept as `dtype` holds it: -3.4e38 becomes the nearest float32.
    descriptions : tuple of str, optional
        One per band.
    scales : tuple of float, optional
        One per band: what readers multiply its numbers by.
    colors : tuple of (red, green, blue, alpha), optional
        Colour table from value 0 up.  TIFF keeps no alpha.
    tags, band_tags : tuple of (str, str), optional
        Metadata of the file, and of each band.
    blocksize : int
        Side of a tile in pixels, a multiple of 16 (TIFF 6.0 section 15).
    compress : str
        ``deflate``, ``zstd``, ``lzw``, ``lerc``, ``lerc_deflate``, ``lerc_zstd`` or ``none``; for
        pictures of uint8 also ``jpeg`` (1 or 3 bands in a tile; 3 become YCbCr) and ``webp`` or
        ``webp_lossless`` (3 or 4 bands).  ``auto`` is zstd for floats, as small as deflate in a
        quarter of its time, and deflate for integers, which it makes smaller.
    level : int, optional
        Of deflate or zstd; of jpeg and webp, the quality.
    predictor : int or "auto"
        1 (none), 2 (differences) or 3 (floats), for deflate, zstd and lzw; ``auto`` is 3 for
        floats, 1 for what is resampled by ``mode``, as labels have no differences, else 2.
    interleave : {"pixel", "band"}
        ``pixel`` has all bands of a place in one tile, ``band`` a tile for each: better for
        readers that take few of many bands.
    resampling : {"mode", "average", "nearest"} or tuple of them
        How overviews are made, of all bands or of each.
    max_z_error : float
        Largest error that lerc may make; 0 loses nothing.
    sparse : bool
        Leave out tiles that are all nodata, as GDAL does with SPARSE_OK: where most are, a file in
        strict layout gets smaller, but not every reader knows of missing tiles.
    statistics : bool or "auto"
        Write minimum, maximum, mean, standard deviation and share of valid pixels of each band
        into the header; ``auto`` does so for floats.
    failures : bool
        Keep room in the header for the number of chunks that were given up.

    Raises
    ------
    ValueError
        If these do not go together.

    Examples
    --------
    >>> spec = CogSpec(2100, 600, 1, "uint8", nodata=255)
    >>> spec.shapes
    ((2100, 600), (1050, 300), (525, 150), (263, 75))
    >>> spec.local_levels((2048, 2048))
    2
    """

    height: int
    width: int
    count: int
    dtype: str
    transform: tuple[float, ...] | None = None
    crs: str | None = None
    gcps: tuple[tuple[float, float, float, float, float], ...] = ()
    gcps_crs: str | None = None
    rpcs: tuple[tuple[str, str], ...] = ()
    # NaN differs from itself; specs are compared by `_nodata_key`.
    nodata: float | None = field(default=None, compare=False)
    descriptions: tuple[str, ...] = ()
    scales: tuple[float, ...] = ()
    colors: tuple[tuple[int, int, int, int], ...] = ()
    tags: tuple[tuple[str, str], ...] = ()
    band_tags: tuple[tuple[tuple[str, str], ...], ...] = ()
    blocksize: int = 512
    compress: str = "auto"
    level: int | None = None
    predictor: str | int = "auto"
    resampling: str | tuple[str, ...] = "mode"
    max_z_error: float = 0.0
    interleave: str = "pixel"
    sparse: bool = False
    statistics: bool | str = "auto"
    failures: bool = False
    _nodata_key: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        _check_shape(self)
        if self.compress == "auto":
            is_float = np.dtype(self.dtype).kind == "f"
            object.__setattr__(self, "compress", "zstd" if is_float else "deflate")
        object.__setattr__(self, "nodata", _held_nodata(self.nodata, self.dtype))
        object.__setattr__(self, "_nodata_key", repr(self.nodata))
        _check_codec(self)
        _check_metadata(self)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Height and width of each level, full resolution first, until one block holds all.

        Levels go on to 512 px with larger blocks too: validators warn above that.
        """
        return level_shapes(self.height, self.width, min(self.blocksize, 512))

    @property
    def fill(self) -> float:
        """What missing pixels are: nodata, or 0."""
        return 0 if self.nodata is None else self.nodata

    @property
    def tiff_predictor(self) -> int:
        """Value of the Predictor tag: 1, 2 or 3."""
        if self.compress not in _PREDICTED:
            return 1
        if self.predictor == "auto":
            if np.dtype(self.dtype).kind == "f":
                return 3
            return 1 if "mode" in (self.resampling, self.resampling[0]) else 2
        return int(self.predictor)

    @property
    def with_statistics(self) -> bool:
        """Whether the header tells statistics of the pixels."""
        if self.statistics == "auto":
            return np.dtype(self.dtype).kind == "f"
        return bool(self.statistics)

    @property
    def planes(self) -> int:
        """Tiles at one place: one for all bands together, or one for each."""
        return self.count if self.interleave == "band" else 1

    @property
    def codec_level(self) -> int:
        """Level of deflate or zstd, quality of jpeg or webp; 0 for codecs without one."""
        default = _LEVELS.get(self.compress, ("", 0, 0))[2]
        return default if self.level is None else self.level

    def grid(self, level: int) -> tuple[int, int]:
        """Count the tiles of a level, of one plane.

        Parameters
        ----------
        level : int
            0 is full resolution.

        Returns
        -------
        (int, int)
            Rows and columns of tiles.
        """
        height, width = self.shapes[level]
        return -(-height // self.blocksize), -(-width // self.blocksize)

    def chunk_step(self, levels: int = 0) -> int:
        """Pixels that a chunk's origin and side must be multiples of.

        Parameters
        ----------
        levels : int
            Overview levels that a chunk shall make alone.

        Returns
        -------
        int
            ``blocksize * 2**levels``.
        """
        return self.blocksize << levels

    def local_levels(self, chunk: Shape) -> int:
        """Count the overview levels that a chunk can make alone.

        Parameters
        ----------
        chunk : (int, int)
            Side of the chunk grid in pixels; as long as the raster or longer means one chunk
            on that axis.

        Returns
        -------
        int
            The largest k for which both sides are multiples of ``chunk_step(k)``.

        Raises
        ------
        ValueError
            If a side is no multiple of the block size.
        """
        pairs = zip(chunk, (self.height, self.width), strict=True)
        sides = [side for side, size in pairs if side < size]
        for side in sides:
            if side < 1 or side % self.blocksize:
                raise ValueError(
                    f"chunk side {side} is not a multiple of the block size {self.blocksize}"
                )
        levels = range(1, len(self.shapes))
        return sum(all(side % self.chunk_step(k) == 0 for side in sides) for k in levels)


def _check_shape(spec: CogSpec) -> None:
    if min(spec.height, spec.width, spec.count) < 1:
        raise ValueError(f"shape {(spec.count, spec.height, spec.width)} has no pixels")
    if spec.count > 65535:
        raise ValueError(f"{spec.count} bands: TIFF holds 65535 at most")
    if spec.dtype not in DTYPES:
        raise ValueError(f"dtype {spec.dtype!r} is not one of {', '.join(DTYPES)}")
    if spec.blocksize < 16 or spec.blocksize % 16:
        raise ValueError(f"block size {spec.blocksize} is not a multiple of 16")
    each = (spec.resampling,) if isinstance(spec.resampling, str) else spec.resampling
    if not set(each) <= set(RESAMPLINGS):
        raise ValueError(f"resampling {spec.resampling!r} is not one of {', '.join(RESAMPLINGS)}")
    if len(each) not in (1, spec.count):
        raise ValueError(f"{len(each)} resamplings for {spec.count} bands")


def _held_nodata(nodata: float | None, dtype: str) -> float | None:
    """Nodata as a pixel holds it."""
    if nodata is None:
        return None
    if np.dtype(dtype).kind == "f":
        with np.errstate(over="ignore"):
            held = float(np.dtype(dtype).type(nodata))
        if math.isinf(held) and not math.isinf(nodata):
            raise ValueError(f"nodata {nodata} does not fit {dtype}: it would become {held}")
        return math.nan if math.isnan(held) else held
    info = np.iinfo(dtype)
    if not math.isfinite(nodata) or nodata != int(nodata) or not info.min <= nodata <= info.max:
        raise ValueError(f"nodata {nodata} is not a {dtype}, which holds {info.min} to {info.max}")
    return int(nodata)


def _check_codec(spec: CogSpec) -> None:
    if spec.compress not in CODECS:
        raise ValueError(f"compress {spec.compress!r} is not one of auto, {', '.join(CODECS)}")
    if spec.interleave not in INTERLEAVES:
        raise ValueError(f"interleave {spec.interleave!r} is not 'pixel' or 'band'")
    if spec.compress in _PICTURES:
        _check_picture(spec)
    if spec.level is not None:
        _, largest, _ = _LEVELS.get(spec.compress, ("", 0, 0))
        if not 1 <= spec.level <= largest:
            known = f"1 to {largest}" if largest else "none"
            raise ValueError(f"level {spec.level} for {spec.compress}, which has {known}")
    _check_predictor(spec)
    if spec.compress.startswith("lerc") and spec.dtype in ("int64", "uint64"):
        raise ValueError(f"{spec.compress} cannot hold {spec.dtype}: pass compress='zstd'")
    if spec.max_z_error < 0 or (spec.max_z_error and not spec.compress.startswith("lerc")):
        raise ValueError(f"max_z_error {spec.max_z_error} with {spec.compress}: only lerc has one")
    # Of floats lerc keeps nodata apart.
    lossy = spec.max_z_error >= 1 and np.dtype(spec.dtype).kind in "ui"
    if (lossy or spec.compress in _LOSSY) and (spec.nodata is not None or spec.colors):
        raise ValueError(
            f"{spec.compress} changes pixels a little, which nodata and the values of a colour"
            f" table do not survive: {'drop max_z_error' if lossy else _INSTEAD}"
        )


def _check_predictor(spec: CogSpec) -> None:
    if spec.predictor not in ("auto", 1, 2, 3):
        raise ValueError(f"predictor {spec.predictor!r} is not 1, 2, 3 or 'auto'")
    if spec.predictor == 3 and np.dtype(spec.dtype).kind != "f":
        raise ValueError(f"predictor 3 is for floats, not {spec.dtype}: pass 2")
    if spec.predictor in (2, 3) and spec.compress not in _PREDICTED:
        raise ValueError(
            f"predictor {spec.predictor} with {spec.compress}, which has none: leave it out, or"
            f" pass compress={' or '.join(map(repr, _PREDICTED))}"
        )


def _check_picture(spec: CogSpec) -> None:
    """Refuse what a codec of pictures cannot hold, or would change without a word."""
    together, bands = _PICTURES[spec.compress], spec.count // spec.planes
    if spec.dtype != "uint8":
        raise ValueError(f"{spec.compress} cannot hold {spec.dtype}: {_INSTEAD}")
    if bands not in together:
        raise ValueError(
            f"{spec.compress} takes {' or '.join(map(str, together))} bands in a tile, not {bands}:"
            f" pass {'interleave=' + repr('band') + ' or ' if 1 in together else ''}"
            "compress='deflate'"
        )


def _check_metadata(spec: CogSpec) -> None:
    if not isinstance(spec.statistics, bool) and spec.statistics != "auto":
        raise ValueError(f"statistics {spec.statistics!r} is not True, False or 'auto'")
    if spec.transform is not None and len(spec.transform) != 6:
        raise ValueError(f"transform has {len(spec.transform)} numbers, not 6")
    if bool(spec.gcps) != bool(spec.gcps_crs):
        raise ValueError("gcps and gcps_crs go together")
    if spec.descriptions and len(spec.descriptions) != spec.count:
        raise ValueError(f"{len(spec.descriptions)} descriptions for {spec.count} bands")
    if spec.scales and len(spec.scales) != spec.count:
        raise ValueError(f"{len(spec.scales)} scales for {spec.count} bands")
    if spec.band_tags and len(spec.band_tags) != spec.count:
        raise ValueError(f"{len(spec.band_tags)} band_tags for {spec.count} bands")
    if spec.colors:
        _check_colors(spec)


def _check_colors(spec: CogSpec) -> None:
    if spec.dtype not in ("uint8", "uint16") or spec.count != 1:
        raise ValueError(
            f"colors need one band of uint8 or uint16, not {spec.count} of {spec.dtype}"
        )
    most = np.iinfo(spec.dtype).max + 1
    if len(spec.colors) > most:
        raise ValueError(f"{len(spec.colors)} colors: {spec.dtype} has {most} values")
    if any(len(c) != 4 or not all(0 <= v <= 255 for v in c) for c in spec.colors):
        raise ValueError("each color is 4 numbers from 0 to 255")


@contextmanager
def no_georeferencing_warning() -> Iterator[None]:
    """Silence rasterio where a file without georeferencing is meant: scratch, or by the spec."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        yield


def gdal_profile(spec: CogSpec, height: int, width: int) -> dict[str, Any]:
    """Give the arguments with which GDAL encodes tiles of a spec.

    Parameters
    ----------
    spec : CogSpec
        The file.
    height, width : int
        Size of the raster that GDAL is to make.

    Returns
    -------
    dict
        For `rasterio.open`; always a little-endian BigTIFF.
    """
    profile: dict[str, Any] = {
        "driver": "GTiff", "height": height, "width": width,
        "count": spec.count, "dtype": spec.dtype, "interleave": spec.interleave,
        "tiled": True, "blockxsize": spec.blocksize, "blockysize": spec.blocksize,
        "BIGTIFF": "YES", "ENDIANNESS": "LITTLE",
    }  # fmt: skip
    if not spec.colors:
        profile["photometric"] = _photometric(spec)
    if spec.compress != "none":
        profile["compress"] = spec.compress.removesuffix("_lossless").upper()
    if spec.compress == "webp_lossless":
        profile["WEBP_LOSSLESS"] = "TRUE"
    if spec.compress in _PREDICTED:
        profile["predictor"] = spec.tiff_predictor
    if spec.compress in _LEVELS:
        profile[_LEVELS[spec.compress][0]] = spec.codec_level
    if spec.compress.startswith("lerc"):
        profile["MAX_Z_ERROR"] = spec.max_z_error
    return profile


def _photometric(spec: CogSpec) -> str:
    """Meaning of the bands: left open, as GDAL takes three or four of uint8 for a picture."""
    if spec.compress == "jpeg" and spec.planes == 1 and spec.count == 3:
        return "YCBCR"
    return "RGB" if spec.compress.startswith("webp") else "MINISBLACK"


@contextmanager
def template_file(spec: CogSpec) -> Iterator[MemoryFile]:
    """Let GDAL write an empty raster of one tile with everything of a file but its size.

    Parameters
    ----------
    spec : CogSpec
        The file.

    Yields
    ------
    MemoryFile
        A GeoTIFF; statistics are `cogstats.placeholders`.
    """
    profile = gdal_profile(spec, spec.blocksize, spec.blocksize)
    profile |= {"SPARSE_OK": "TRUE", "nodata": spec.nodata}
    if spec.gcps:
        profile |= {"gcps": [_control_point(*p) for p in spec.gcps], "crs": spec.gcps_crs}
    else:
        profile["crs"] = spec.crs
        if spec.transform is not None:
            profile["transform"] = Affine(*spec.transform)
    with MemoryFile() as memory:
        with no_georeferencing_warning(), memory.open(**profile) as dataset:
            _describe(dataset, spec)
        yield memory


@lru_cache(maxsize=8)
def template(spec: CogSpec) -> tiff.Ifd:
    """Let GDAL write the tags of a file.

    Parameters
    ----------
    spec : CogSpec
        The file.

    Returns
    -------
    mapping of int to Entry
        Tags of an empty raster of one tile; statistics are `cogstats.placeholders`.
    """
    with template_file(spec) as memory:
        tags = tiff.parse_bytes(memory.getbuffer())
    is_float = np.dtype(spec.dtype).kind == "f"
    if spec.nodata is not None and not is_float and abs(spec.nodata) > 2**53:
        # rasterio hands nodata to GDAL as a double, which would round it.
        text = f"{int(spec.nodata)}\0".encode()
        tags[tiff.GDAL_NODATA] = tiff.Entry(2, len(text), text)
    return tags


def _control_point(row: float, col: float, x: float, y: float, z: float) -> GroundControlPoint:
    return GroundControlPoint(row=row, col=col, x=x, y=y, z=z)


def _describe(dataset: DatasetWriter, spec: CogSpec) -> None:
    if spec.colors:
        dataset.write_colormap(1, dict(enumerate(spec.colors)))
    if spec.tags:
        dataset.update_tags(**dict(spec.tags))
    if spec.failures:
        dataset.update_tags(**failed_placeholder())
    if spec.rpcs:
        dataset.update_tags(ns="RPC", **dict(spec.rpcs))
    if spec.scales:
        dataset.scales = spec.scales
    for band, text in enumerate(spec.descriptions, 1):
        dataset.set_band_description(band, text)
    for band, tags in enumerate(spec.band_tags, 1):
        dataset.update_tags(band, **dict(tags))
    if spec.with_statistics:
        for band in range(1, spec.count + 1):
            dataset.update_tags(band, **placeholders())
