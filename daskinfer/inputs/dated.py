"""Arrays ``(time, band, y, x)``, and the same with the bands of all dates on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from ..pixels import Array, Mask, valid_pixels
from .timestack import TimeStack, day_of, holed_dtype

__all__ = ["DATE", "NODATA", "flattened", "unflattened", "valid_at_any"]

NODATA = ("_FillValue", "missing_value", "nodata")
"""Attributes of an array that tell its nodata, the first that is there."""

DATE = "date"
"""Coordinate of the bands that says which date each belongs to."""


def flattened(array: xr.DataArray, nodata: float | int | None = None) -> xr.DataArray:
    """An array ``(time, band, y, x)`` as ``(band, y, x)``, the bands called ``time/band``.

    Where pixels can be nodata they are NaN, in all bands of a date that lacks one.
    """
    if tuple(array.dims) != ("time", "band", "y", "x"):
        raise ValueError(
            f"expected dimensions (band, y, x), got {array.dims}; dates come first, as in "
            "(time, band, y, x)"
        )
    times, bands = array.sizes["time"], array.sizes["band"]
    dates = [day_of(time) for time in array.coords["time"].values] if "time" in array.coords else [
        str(i + 1) for i in range(times)
    ]  # fmt: skip
    names = array.coords["band"].values if "band" in array.coords else range(1, bands + 1)
    own = [name for name in ("y", "x", "mask", "spatial_ref") if name in array.coords]
    coords: dict[str, Any] = {name: array.coords[name].variable for name in own}
    coords["band"] = [f"{date}/{name}" for date in dates for name in names]
    coords[DATE] = ("band", [date for date in dates for _ in names])
    data, attrs = array.data, dict(array.attrs)
    if nodata is not None or data.dtype.kind == "f":
        data = _holed(data, nodata)
        for name in NODATA:
            attrs.pop(name, None)
    for name in ("scale", "offset"):
        if name in array.coords:
            one = array.coords[name]
            told = dict(one.attrs)
            if told.get("dtype") == str(array.dtype):
                # They are the same numbers, as floats.
                told["dtype"] = str(data.dtype)
            coords[name] = ("band", np.tile(one.values, times), told)
    data = data.reshape(times * bands, *array.shape[2:])
    flat = xr.DataArray(data, coords, ("band", "y", "x"), array.name, attrs)
    flat.encoding = dict(array.encoding)
    return flat


def _holed(data: Any, nodata: float | int | None) -> Any:
    """Floats in which what a date lacks is NaN; `data` is an array of NumPy or Dask."""
    dtype = holed_dtype(data.dtype)
    if isinstance(data, np.ndarray):
        return _holed_block(data, nodata, dtype)
    return data.rechunk({1: -1}).map_blocks(
        _holed_block, nodata, dtype, dtype=dtype, meta=np.empty((0, 0, 0, 0), dtype)
    )


def _holed_block(block: Array, nodata: float | int | None, dtype: np.dtype[Any]) -> Array:
    holed: Array = block.astype(dtype)
    for raw, own in zip(block, holed, strict=True):
        own[:, ~valid_pixels(raw, (nodata,) * len(raw))] = np.nan
    return holed


def unflattened(array: xr.DataArray, stack: TimeStack) -> xr.DataArray:
    """The array of a stack as ``(time, band, y, x)``."""
    times, bands = len(stack.times), len(stack.bands)
    own = [name for name in ("y", "x", "mask", "spatial_ref") if name in array.coords]
    coords: dict[str, Any] = {name: array.coords[name].variable for name in own}
    coords["time"] = np.array(stack.times, "datetime64[ns]")
    coords["band"] = list(stack.bands)
    for name in ("scale", "offset"):
        if name in array.coords:
            one = array.coords[name]
            coords[name] = ("band", one.values[:bands], one.attrs)
    data = array.data.reshape(times, bands, *array.shape[1:])
    dated = xr.DataArray(data, coords, ("time", "band", "y", "x"), array.name, array.attrs)
    dated.encoding = dict(array.encoding)
    return dated


def valid_at_any(
    data: Array, nodata: Sequence[float | int | None], dates: Sequence[str] | None = None
) -> Mask:
    """Pixels ``(y, x)`` that are valid in all bands, or in all bands of any date.

    >>> two = np.array([[[1.0, np.nan, np.nan]], [[2.0, 2.0, np.nan]]])
    >>> valid_at_any(two, (None, None), ("a", "b")).tolist()
    [[True, True, False]]
    """
    if dates is None:
        return valid_pixels(data, nodata)
    valid: Mask = np.zeros(data.shape[1:], np.bool_)
    for date in dict.fromkeys(dates):
        own = [i for i, other in enumerate(dates) if other == date]
        valid |= valid_pixels(data[own], [nodata[i] for i in own])
    return valid
