"""Zarr stores as arrays ``(band, y, x)``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from affine import Affine

from ..grid import GRID_MAPPING
from ..handles import digest_of, identity_of
from ..pixels import Array
from .attributes import STORED, as_stored

__all__ = ["array_of", "is_zarr", "open_zarr"]

_ROWS = {"y", "lat", "latitude", "northing", "row"}
_COLS = {"x", "lon", "longitude", "easting", "col", "column"}


def is_zarr(source: Any) -> bool:
    """Whether a source is the path or URL of a Zarr store, or of a group in one.

    >>> is_zarr("scene.zarr"), is_zarr("s3://bucket/scene.zarr/10m"), is_zarr("scene.tif")
    (True, True, False)
    """
    if not isinstance(source, (str, os.PathLike)):
        return False
    return any(part.lower().endswith(".zarr") for part in Path(os.fspath(source)).parts)


def open_zarr(path: Any) -> xr.DataArray:
    """A store as a lazy DataArray ``(band, y, x)`` of the numbers as stored.

    One with several dates is ``(time, band, y, x)``.

    The grid is that of its CF grid mapping and coordinates, or of GeoZarr's ``proj:`` and
    ``spatial:`` attributes.  Variables of one grid become bands; dimensions named for latitude and
    longitude, or row and column, become ``y`` and ``x``.

    Parameters
    ----------
    path : path or URL

    Raises
    ------
    ModuleNotFoundError
        Without the extra ``zarr``.
    FileNotFoundError
        If there is no store.
    ValueError
        If it holds no raster, or several that do not fit together.
    """
    name = os.fspath(path)
    try:
        import zarr
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {name} needs zarr: pip install 'daskinfer[zarr]'"
        ) from error
    remote = "://" in name
    if not remote and not os.path.exists(name):
        raise FileNotFoundError(f"source {name!r}: no such file")
    # Over a network there may be no list of what a store holds; on a disk there is.
    told: dict[str, Any] = {} if remote else {"consolidated": False}
    # mask_and_scale: nodata is matched on numbers as stored, and these are scaled once, by us.
    try:
        dataset = xr.open_zarr(name, mask_and_scale=False, decode_coords="all", **told)
    except (zarr.errors.GroupNotFoundError, zarr.errors.ContainsArrayError) as error:
        raise ValueError(
            f"source {name!r} is no Zarr group, in which arrays name their axes: open it with zarr "
            "and pass an xarray.DataArray (band, y, x) of it"
        ) from error
    if remote and not dataset.data_vars:
        raise ValueError(
            f"{name} tells of no variables: over a network they are known by consolidated metadata "
            "only, which zarr.consolidate_metadata writes"
        )
    if not remote:
        dataset = _told_apart(dataset, _state(name))
    return array_of(dataset, name)


def _state(folder: str) -> str:
    """Names the state of all files in a folder."""
    return digest_of(
        *sorted(
            identity_of(os.path.join(there, name))
            for there, _, names in os.walk(folder)
            for name in names
        )
    )


def _told_apart(dataset: xr.Dataset, state: str) -> xr.Dataset:
    """With names of numbers that tell the state of the store, of which Dask's own tell nothing."""
    named = {}
    for name, variable in dataset.data_vars.items():
        data = variable.data
        if isinstance(data, da.Array):
            token = f"daskinfer-zarr-{digest_of(data.name, state)}"
            named[name] = variable.copy(data=data.map_blocks(_same, name=token, meta=data._meta))
    return dataset.assign(named)


def _same(block: Array) -> Array:
    return block


def array_of(dataset: xr.Dataset, name: str) -> xr.DataArray:
    """The variables of a dataset as the bands of one array; errors as of `open_zarr`.

    Parameters
    ----------
    dataset : Dataset
    name : str
        For the errors.
    """
    rasters = [_named_axes(variable) for variable in dataset.data_vars.values()]
    rasters = [raster for raster in rasters if {"y", "x"} <= set(raster.dims)]
    if not rasters:
        raise ValueError(f"{name} holds no variable with two axes of space: {list(dataset)}")
    array = rasters[0] if len(rasters) == 1 else _joined(name, rasters)
    array = _three_axes(name, array)
    if array.ndim == 2:
        array = array.expand_dims(band=[str(array.name)])
    return _placed(array, dataset)


def _named_axes(array: xr.DataArray) -> xr.DataArray:
    """With space axes called y and x."""
    names = {}
    for dim in array.dims:
        for target, known in (("y", _ROWS), ("x", _COLS)):
            if str(dim).lower() in known and target not in array.dims:
                names[dim] = target
    return array.rename(names)


def _joined(name: str, rasters: Sequence[xr.DataArray]) -> xr.DataArray:
    """Variables of one grid as bands."""
    first = rasters[0]
    for other in rasters[1:]:
        same = other.dims == first.dims == ("y", "x") and other.shape == first.shape
        if not (same and other.dtype == first.dtype and _fill(other) == _fill(first)):
            raise ValueError(
                f"{name} holds {first.name} {first.dims} {first.shape} {first.dtype} and "
                f"{other.name} {other.dims} {other.shape} {other.dtype}, which are not bands of "
                "one raster: open it with xarray and pass one of them"
            )
    stacked = xr.concat(rasters, dim="band", compat="override", coords="minimal", join="override")
    stacked = stacked.assign_coords(band=[str(raster.name) for raster in rasters])
    if not all(as_stored(raster) for raster in rasters):
        stacked.encoding = {}
    scales = [float(raster.attrs.get("scale_factor", 1.0)) for raster in rasters]
    offsets = [float(raster.attrs.get("add_offset", 0.0)) for raster in rasters]
    stacked.attrs = {key: value for key, value in first.attrs.items() if key == "_FillValue"}
    if any(scale != 1 for scale in scales) or any(offsets):
        told = {"dtype": str(first.dtype), **STORED}
        stacked = stacked.assign_coords(
            scale=("band", scales, told), offset=("band", offsets, told)
        )
    return stacked.rename("scene")


def _fill(array: xr.DataArray) -> Any:
    value = array.attrs.get("_FillValue")
    return None if value is None else str(value)


def _three_axes(name: str, array: xr.DataArray) -> xr.DataArray:
    others = [dim for dim in array.dims if dim not in ("y", "x")]
    for dim in list(others):
        if len(others) > 1 and array.sizes[dim] == 1:
            array = array.isel({dim: 0}, drop=True)
            others.remove(dim)
    if set(others) == {"time", "band"}:
        return array.transpose("time", "band", "y", "x")
    if len(others) > 1:
        raise ValueError(
            f"{name} has axes {array.dims}: open it with xarray and choose of {others} down to one"
        )
    return array.transpose(*others, "y", "x")


def _is_mapping(variable: xr.Variable) -> bool:
    known = {"crs_wkt", "spatial_ref", "grid_mapping_name"}
    return variable.ndim == 0 and bool(known & set(variable.attrs))


def _placed(array: xr.DataArray, dataset: xr.Dataset) -> xr.DataArray:
    """With its grid mapping where `grid_of` looks for it."""
    mapping = array.attrs.pop("grid_mapping", None) or array.encoding.pop("grid_mapping", None)
    if mapping not in dataset.variables:
        # One that is there and that nobody refers to.
        found = [name for name, variable in dataset.variables.items() if _is_mapping(variable)]
        mapping = found[0] if len(found) == 1 else None
    if mapping is not None:
        array = array.drop_vars(mapping, errors="ignore").drop_vars(GRID_MAPPING, errors="ignore")
        array = array.assign_coords({GRID_MAPPING: ((), 0, dataset.variables[mapping].attrs)})
    attrs = {**dataset.attrs, **array.attrs}
    if array.rio.crs is None:
        code = attrs.get("proj:code") or attrs.get("proj:wkt2") or attrs.get("proj:projjson")
        # How GDAL writes it.
        code = code or dict(attrs.get("_CRS") or {}).get("wkt")
        epsg = attrs.get("proj:epsg")
        if code is not None or epsg is not None:
            array = array.rio.write_crs(f"EPSG:{epsg}" if code is None else code)
    transform = attrs.get("spatial:transform") or attrs.get("proj:transform")
    if transform is not None and "x" not in array.coords:
        array = array.rio.write_transform(Affine(*np.asarray(transform, float)[:6]))
    return array
