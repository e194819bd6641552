"""What an array tells of its numbers: names of bands, nodata, scale and offset.

Attributes ride along through xarray's arithmetic, and then tell of other numbers than those at
hand.  The encoding does not: xarray keeps it through selections only, so that an array which has
the dtype of its file there still has the file's numbers.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from .dated import NODATA

__all__ = ["STORED", "as_stored", "names_of", "nodata_of", "per_band", "with_nodata"]

STORED = {"numbers": "as stored"}
"""Attribute of the coordinates ``scale`` and ``offset`` that belong to a file's numbers alone."""

# The user's own word, which no reader of files writes.
_SAID = NODATA[-1]
# With what is nodata, readers of files write one of these.
_READ = ("scale_factor", "add_offset", "scales", "offsets", "AREA_OR_POINT")


def as_stored(array: xr.DataArray) -> bool:
    """Whether the numbers of an array are known to be those of the file it was opened from."""
    told = array.encoding.get("rasterio_dtype", array.encoding.get("dtype"))
    if told is None:
        return False
    stored = np.dtype(told)
    # Opened as masked, whole numbers are floats with NaN for nodata.
    masked = "dtype" in array.encoding and array.dtype.kind == "f" and stored.kind in "iu"
    return masked or stored.newbyteorder("=") == array.dtype.newbyteorder("=")


def with_nodata(array: xr.DataArray, nodata: float) -> xr.DataArray:
    """An array with this nodata, in place of what it tells."""
    array = array.drop_vars("mask", errors="ignore").assign_attrs()
    name = NODATA[0] if as_stored(array) else _SAID
    for other in NODATA:
        array.attrs.pop(other, None)
    return array.assign_attrs({name: nodata})


def names_of(array: xr.DataArray) -> tuple[str, ...]:
    """Labels of the first dimension, or what rioxarray notes beside them."""
    first = array.dims[0]
    if first in array.coords:
        labels = tuple(str(name) for name in array.coords[first].values.ravel())
    else:
        labels = tuple(str(i + 1) for i in range(array.sizes[first]))
    # rioxarray numbers the bands and keeps their descriptions beside, all of them where some of the
    # bands are left.
    described = array.attrs.get("long_name")
    if isinstance(described, (tuple, list)) and set(labels) <= set(_numbered(len(described))):
        names = [str(name) for name in described]
        if all(names) and len(set(names)) == len(names):
            return tuple(names[int(label) - 1] for label in labels)
    return labels


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(str(i + 1) for i in range(count))


def nodata_of(array: xr.DataArray) -> float | int | None:
    """The attribute that tells it, if it is still that of these numbers.

    Raises
    ------
    ValueError
        If the array was computed from a file's numbers, to which its attribute belongs.
    """
    for name in NODATA:
        value = array.attrs.get(name)
        if value is None:
            continue
        read = name != _SAID and any(other in array.attrs for other in _READ)
        # Beside a mask it is not looked at, and NaN it is in any numbers.
        told = "mask" in array.coords or value != value
        if read and not told and not as_stored(array):
            raise ValueError(
                f"the array was computed, and its attribute {name} = {value} is that of the file's "
                f"numbers: del array.attrs[{name!r}] where none of these is nodata, or say which "
                "is: open_raster(array, nodata=...)"
            )
        # A float would round what 64-bit numbers are compared with.
        return int(value) if isinstance(value, (int, np.integer)) else float(value)
    return None


def per_band(
    array: xr.DataArray, coord: str, attrs: tuple[str, str], default: float
) -> tuple[float, ...]:
    """A number per band: a coordinate of the bands, or what rioxarray notes of the whole file.

    Raises
    ------
    ValueError
        If it belongs to other numbers than those of the array, or nothing tells which band has
        which.
    """
    if coord in array.coords and array.coords[coord].size == array.shape[0]:
        return _of_coordinate(array, coord, default)
    values = _of_attributes(array, coord, attrs, default)
    if any(value != default for value in values) and not as_stored(array):
        named = next(name for name in reversed(attrs) if name in array.attrs)
        raise ValueError(
            f"the array's attribute {named} = {array.attrs[named]} belongs to numbers as stored in "
            f"a file, and nothing tells that these {array.dtype} are: del array.attrs[{named!r}] "
            f"if it is applied already, else array.assign_coords({coord}=({array.dims[0]!r}, "
            f"{list(values)}))"
        )
    return values


def _of_coordinate(array: xr.DataArray, coord: str, default: float) -> tuple[float, ...]:
    told = array.coords[coord]
    # What changes nothing belongs to any numbers.
    if bool((told.values != default).any()):
        raw = told.attrs.get("dtype", str(array.dtype))
        if raw != str(array.dtype) or (
            STORED.items() <= told.attrs.items() and not as_stored(array)
        ):
            raise ValueError(
                f"the array is {array.dtype} and was computed from {raw} numbers, to which its "
                f"{coord} belongs: drop_vars({coord!r}) if it is applied already, else "
                f"array.assign_coords({coord}=({array.dims[0]!r}, {told.values.ravel().tolist()}))"
            )
    return tuple(float(value) for value in told.values.ravel())


def _of_attributes(
    array: xr.DataArray, coord: str, attrs: tuple[str, str], default: float
) -> tuple[float, ...]:
    count = array.shape[0]
    one_for_all, one_each = attrs
    if one_each not in array.attrs:
        return (float(array.attrs.get(one_for_all, default)),) * count
    # The attribute does not follow a selection of bands; their coordinate, the numbers in the file,
    # does.
    values = array.attrs[one_each]
    bands = array.coords.get(str(array.dims[0]))
    numbers = range(1, count + 1) if bands is None else bands.values.ravel()
    try:
        return tuple(float(values[int(number) - 1]) for number in numbers)
    except (IndexError, ValueError) as error:
        raise ValueError(
            f"attribute {one_each!r} has {len(values)} entries, which do not tell of the bands "
            f"{list(numbers)}: pass {coord}= to load_model"
        ) from error
