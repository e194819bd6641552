"""What an open dataset says of its bands: names, dtype, nodata, where it keeps a mask.

Lists of a dataset are taken once each: rasterio builds them anew for every access, and files may
claim 65 535 bands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import rasterio
import rasterio.shutil
from rasterio.enums import ColorInterp, MaskFlags
from rasterio.io import MemoryFile

from .display import bytes_text

__all__ = ["MaskKind", "Nodata", "Number", "band_aliases", "band_names", "check_dataset",
           "common_dtype", "data_bands", "mask_kind", "nodata_of"]  # fmt: skip

MaskKind = Literal["dataset", "alpha", "bands"] | None
Number = float | int
Nodata = Number | Sequence[Number | None] | None

# One block has to be decoded whole for any of its pixels, and fit a worker's memory.
_LARGEST_BLOCK = 1 << 30
# Floats hold the whole numbers up to here.
_EXACT = 2**53


def check_dataset(dataset: rasterio.DatasetReader, path: str) -> None:
    """Refuse what is no raster, lies where no GeoTIFF can say, or cannot be read in parts."""
    if not dataset.count:
        parts = "".join(f"\n  {name}" for name in dataset.subdatasets[:50])
        raise ValueError(
            f"source {path!r} has no bands of its own"
            + (f", but rasters inside; pass one of them:{parts}" if parts else "")
        )
    points, crs = dataset.gcps
    if points and not crs and dataset.transform.is_identity:
        raise ValueError(
            f"source {path!r} has {len(points)} ground control points in no CRS. Say in which: "
            "gdal_translate SOURCE TARGET.tif -a_srs EPSG:4326"
        )
    located = dataset.tags(ns="GEOLOCATION")
    if located and dataset.transform.is_identity and not (dataset.gcps[0] or dataset.rpcs):
        raise ValueError(
            f"source {path!r} is tied to the ground by geolocation arrays "
            f"({located.get('X_DATASET', '')}), which a GeoTIFF cannot hold. Warp it first: "
            "gdalwarp -geoloc SOURCE TARGET.tif"
        )
    # A VRT reads windows of its sources, whatever it says of blocks.
    if dataset.driver != "VRT":
        _check_blocks(dataset, path)


def _check_blocks(dataset: rasterio.DatasetReader, path: str) -> None:
    height, width = dataset.block_shapes[0]
    together = dataset.count if dataset.profile.get("interleave") == "pixel" else 1
    itemsize = np.dtype(_plain(dataset.dtypes[0])).itemsize
    size = height * width * together * itemsize
    if size > _LARGEST_BLOCK:
        raise ValueError(
            f"source {path!r} is stored in blocks of {width} x {height} px, {bytes_text(size)} "
            f"each, to be decoded whole; {bytes_text(_LARGEST_BLOCK)} is the most. Convert it "
            "first: gdal_translate SOURCE TARGET.tif -of COG"
        )


def data_bands(dataset: rasterio.DatasetReader, path: str) -> tuple[int, ...]:
    """Numbers of the bands that hold data: alpha is a mask, not an input."""
    interpretations = zip(dataset.indexes, dataset.colorinterp, strict=True)
    numbers = tuple(n for n, color in interpretations if color != ColorInterp.alpha)
    if not numbers:
        raise ValueError(f"source {path!r} has no bands but alpha, which is a mask")
    return numbers


def band_names(dataset: rasterio.DatasetReader, numbers: Sequence[int]) -> tuple[str, ...]:
    """Descriptions where every band has one of its own, else numbers."""
    descriptions = dataset.descriptions
    names = tuple(descriptions[n - 1] or "" for n in numbers)
    if all(names) and len(set(names)) == len(names):
        return names
    return tuple(str(n) for n in numbers)


def band_aliases(
    dataset: rasterio.DatasetReader, numbers: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """Other names of each band: its colour, and the band of GDAL's "B4, central wavelength ..."."""
    colors, descriptions = dataset.colorinterp, dataset.descriptions
    plain = (ColorInterp.undefined, ColorInterp.gray, ColorInterp.palette)
    return tuple(
        (
            *((colors[n - 1].name,) if colors[n - 1] not in plain else ()),
            *re.findall(r"^(\w+), ", descriptions[n - 1] or ""),
        )
        for n in numbers
    )


def common_dtype(dataset: rasterio.DatasetReader, numbers: Sequence[int], path: str) -> str:
    """A dtype that holds the numbers of all these bands."""
    dtypes = dataset.dtypes
    kinds = {dtypes[n - 1] for n in numbers}
    for name in kinds:
        if "complex" in name:
            raise ValueError(f"source {path!r} is complex ({name}): pass its amplitude instead")
    return str(np.result_type(*kinds))


def _plain(dtype: str) -> str:
    # GDAL's complex integers are no dtype of numpy's.
    return "complex64" if dtype.startswith("complex_int") else dtype


def nodata_of(
    dataset: rasterio.DatasetReader, numbers: Sequence[int], override: Nodata
) -> tuple[Number | None, ...]:
    """Nodata of each band, as it stands in the file or as the user says."""
    if override is None:
        values = dataset.nodatavals
        if not {"int64", "uint64"}.isdisjoint(dataset.dtypes):
            values = _exact_nodata(dataset, values)
        return tuple(values[n - 1] for n in numbers)
    if isinstance(override, (str, bytes)):
        raise TypeError(f"nodata must be a number, got {override!r}")
    if isinstance(override, Sequence):
        if len(override) != len(numbers):
            raise ValueError(f"nodata has {len(override)} numbers for {len(numbers)} bands")
        return tuple(_number(value) for value in override)
    return (_number(override),) * len(numbers)


def _number(value: Any) -> Number | None:
    """A float, or the whole number itself where a float would round it."""
    if value is None:
        return None
    if isinstance(value, (int, np.integer)) and abs(int(value)) >= _EXACT:
        return int(value)
    return float(value)


def _exact_nodata(
    dataset: rasterio.DatasetReader, values: Sequence[float | None]
) -> tuple[Number | None, ...]:
    """Nodata of 64-bit bands to the last digit.

    rasterio asks GDAL for a float, and reports none where that is beyond the dtype.
    """
    with MemoryFile(ext=".vrt") as memory:
        # GDAL's description of the dataset; no pixel is read.
        rasterio.shutil.copy(dataset, memory.name, driver="VRT")
        text = memory.read().decode("utf-8", "replace")
    told = dict.fromkeys(range(1, dataset.count + 1))
    for number, body in re.findall(
        r'<VRTRasterBand[^>]* band="(\d+)"[^>]*>(.*?)</VRTRasterBand>', text, re.S
    ):
        match = re.search(r"<NoDataValue>\s*([+-]?\d+)\s*</NoDataValue>", body)
        told[int(number)] = int(match[1]) if match else None
    exact = []
    for number, (value, dtype) in enumerate(zip(values, dataset.dtypes, strict=True), 1):
        whole = dtype in ("int64", "uint64") and told[number] is not None
        exact.append(told[number] if whole else value)
    return tuple(exact)


def mask_kind(dataset: rasterio.DatasetReader) -> MaskKind:
    """Where the dataset keeps a mask besides nodata."""
    if ColorInterp.alpha in dataset.colorinterp:
        return "alpha"
    every = dataset.mask_flag_enums
    if any(not own for own in every):
        # Bands of a VRT may have a mask each.
        return "bands"
    flags = {flag for own in every for flag in own}
    if MaskFlags.per_dataset not in flags:
        return None
    # Of both: pixels that are nodata in all bands at once, GDAL's NODATA_VALUES.
    told = MaskFlags.nodata in flags and any(value is not None for value in dataset.nodatavals)
    return None if told else "dataset"
