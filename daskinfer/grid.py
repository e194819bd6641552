"""`Grid`: where a raster lies, and how that travels with an xarray.

The affine transform is carried as GDAL gave it and never rebuilt from coordinates: that would move
pixels by rounding, and cannot be done at all for rasters of one row or column.  An array that was
sliced tells from its coordinates by how many whole pixels it moved; the transform follows exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import rasterio
import rioxarray  # noqa: F401  registers the .rio accessor
import xarray as xr
from affine import Affine
from rasterio.control import GroundControlPoint
from rasterio.enums import WktVersion

from .tiling import Window

__all__ = ["Grid", "grid_of"]

GRID_MAPPING = "spatial_ref"
_TIED = (
    "a window of a raster with ground control points or RPCs is not supported: run the whole raster"
)


@dataclass(frozen=True)
class Grid:
    """Shape and georeferencing of a raster.

    Attributes
    ----------
    height, width : int
        Pixels.
    transform : Affine or None
        Pixel to CRS coordinates; None where the raster has none (ground control points only).
    crs : str or None
        WKT2.
    gcps : tuple of tuple
        Ground control points ``(row, col, x, y, z)`` in `gcps_crs`.
    gcps_crs : str or None
        WKT2.
    rpcs : tuple of tuple
        Rational polynomial coefficients as ``(key, value)`` pairs of GDAL's RPC domain.

    Examples
    --------
    >>> grid = Grid(100, 200, Affine(10, 0, 500000, 0, -10, 4600000))
    >>> from daskinfer.tiling import Span
    >>> tuple(grid.window(Window(Span(50, 100), Span(20, 70))).transform)[:6]
    (10.0, 0.0, 500200.0, 0.0, -10.0, 4599500.0)
    """

    height: int
    width: int
    transform: Affine | None = None
    crs: str | None = None
    gcps: tuple[tuple[float, float, float, float, float], ...] = ()
    gcps_crs: str | None = None
    rpcs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_dataset(cls, dataset: rasterio.DatasetReader) -> Grid:
        """The grid of an open rasterio dataset."""
        gcps, gcps_crs = dataset.gcps
        return cls(
            dataset.height,
            dataset.width,
            _real(dataset.transform),
            _wkt(dataset.crs),
            tuple((p.row, p.col, p.x, p.y, p.z or 0.0) for p in gcps),
            _wkt(gcps_crs),
            tuple(sorted(dataset.tags(ns="RPC").items())),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(height, width)`` in pixels."""
        return self.height, self.width

    @property
    def axis_aligned(self) -> bool:
        """Rows and columns follow the axes of the CRS, so that 1-D coordinates exist."""
        return self.transform is not None and self.transform.b == self.transform.d == 0

    def window(self, window: Window) -> Grid:
        """The grid of a window of this raster."""
        row, col = window.origin
        if (self.gcps or self.rpcs) and (row or col):
            raise ValueError(_TIED)
        transform = self.transform
        if transform is not None and (row or col):
            transform = transform @ Affine.translation(col, row)
        height, width = window.shape
        return replace(self, height=height, width=width, transform=transform)

    def scaled(self, scale: Fraction) -> Grid:
        """The grid of an output with `scale` pixels for each of this raster, on the same corner.

        >>> grid = Grid(20, 30, Affine(10, 0, 0, 0, -10, 0)).scaled(Fraction(2))
        >>> grid.shape, grid.transform.a
        ((40, 60), 5.0)
        """
        if scale == 1:
            return self
        if self.rpcs:
            raise ValueError(
                "a model that changes the resolution cannot keep RPCs: orthorectify the source"
            )
        factor = float(scale)
        transform = self.transform
        if transform is not None:
            transform = transform @ Affine.scale(1 / factor)
        height, width = (math.ceil(side * scale) for side in self.shape)
        gcps = tuple((row * factor, col * factor, x, y, z) for row, col, x, y, z in self.gcps)
        return replace(self, height=height, width=width, transform=transform, gcps=gcps)

    def ground_control_points(self) -> list[GroundControlPoint]:
        """The ground control points as rasterio takes them."""
        return [GroundControlPoint(row, col, x, y, z) for row, col, x, y, z in self.gcps]

    def coords(self) -> dict[str, Any]:
        """Coordinates ``y``, ``x`` (pixel centres) and ``spatial_ref`` for a DataArray.

        Where rows and columns do not follow the axes of the CRS, ``y`` and ``x`` count pixels.
        """
        to_map = (
            self.transform
            if self.transform is not None and self.axis_aligned
            else Affine.identity()
        )
        x = to_map.c + (np.arange(self.width) + 0.5) * to_map.a
        y = to_map.f + (np.arange(self.height) + 0.5) * to_map.e
        return {"y": ("y", y), "x": ("x", x), GRID_MAPPING: self._spatial_ref()}

    def _spatial_ref(self) -> xr.Variable:
        array = xr.DataArray(0)
        if self.crs is not None:
            array = array.rio.write_crs(self.crs)
        if self.transform is not None:
            array = array.rio.write_transform(self.transform)
        if self.gcps:
            array = array.rio.write_gcps(self.ground_control_points(), self.gcps_crs)
        attrs = dict(array.coords[GRID_MAPPING].attrs) if GRID_MAPPING in array.coords else {}
        if self.rpcs:
            attrs["rpcs"] = dict(self.rpcs)
        return xr.Variable((), 0, attrs)


def grid_of(array: xr.DataArray) -> Grid:
    """The grid of a DataArray with dimensions ``y`` and ``x``.

    Parameters
    ----------
    array : DataArray
        From `open_raster` or rioxarray; may have been sliced.

    Raises
    ------
    ValueError
        If the array has no ``y`` and ``x``, its pixels are not evenly spaced, or it is a part of
        a raster that ground control points or RPCs tie to the ground.
    """
    for dim in ("y", "x"):
        if dim not in array.dims:
            raise ValueError(f"expected dimensions (band, y, x), got {array.dims}")
    height, width = array.sizes["y"], array.sizes["x"]
    reference = array.coords[GRID_MAPPING].attrs if GRID_MAPPING in array.coords else {}
    gcps = tuple((p.row, p.col, p.x, p.y, p.z or 0.0) for p in array.rio.get_gcps() or ())
    rpcs = tuple(sorted(reference.get("rpcs", {}).items()))
    crs = _wkt(array.rio.crs)
    # Without a transform, the coordinates of such arrays count pixels.
    untold = not (reference.get("GeoTransform") or gcps or rpcs)
    if untold and crs and 1 in (height, width) and "x" in array.coords:
        raise ValueError(
            f"an array of {height} x {width} px does not tell the size of its pixels: say it with "
            "array.rio.write_transform(...)"
        )
    declared = _declared(reference) or (Affine.identity() if gcps or rpcs else None)
    transform = _moved(array, declared)
    if (gcps or rpcs) and transform != declared:
        raise ValueError(_TIED)
    return Grid(
        height,
        width,
        _real(transform),
        None if gcps else crs,
        gcps,
        crs if gcps else None,
        rpcs,
    )


def _real(transform: Affine | None) -> Affine | None:
    """The transform, unless it is the identity that GDAL reports where there is none."""
    return None if transform is None or transform.is_identity else transform


def _declared(reference: dict[Any, Any]) -> Affine | None:
    numbers = str(reference.get("GeoTransform", "")).split()
    return Affine.from_gdal(*map(float, numbers)) if len(numbers) == 6 else None


def _moved(array: xr.DataArray, declared: Affine | None) -> Affine | None:
    """The declared transform, moved by the whole pixels that a selection moved the array."""
    rotated = declared is not None and bool(declared.b or declared.d)
    if "x" in array.coords and "y" in array.coords:
        x, y = array.coords["x"].values, array.coords["y"].values
    elif declared is not None and "xc" in array.coords and "yc" in array.coords:
        # How rioxarray puts it where rows do not follow the axes of the CRS.
        xc, yc = array.coords["xc"].values, array.coords["yc"].values
        x, y = (~declared @ (xc[0], yc[0]))[0], (~declared @ (xc[:, 0], yc[:, 0]))[1]
    else:
        return declared
    if declared is None:
        if min(len(x), len(y)) < 2:
            return None
        declared = _through(x, y)
    plain = Affine.identity() if rotated else declared
    col, col_step = _pixels(x, plain.c, plain.a, "x")
    row, row_step = _pixels(y, plain.f, plain.e, "y")
    if (col, row, col_step, row_step) == (0, 0, 1, 1):
        return declared
    return declared @ Affine.translation(col, row) @ Affine.scale(col_step, row_step)


def _through(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Affine:
    """The transform whose pixel centres begin and end as the coordinates do."""
    width, height = (float(axis[-1] - axis[0]) / (len(axis) - 1) for axis in (x, y))
    if not width or not height:
        raise ValueError("coordinates x and y do not follow a transform: they do not change")
    return Affine(width, 0, float(x[0]) - width / 2, 0, height, float(y[0]) - height / 2)


def _pixels(centres: npt.NDArray[Any], origin: float, size: float, axis: str) -> tuple[float, int]:
    """Offset of the first pixel's outer edge, and the spacing, in whole pixels of the transform."""
    positions = (np.asarray(centres, float) - origin) / size - 0.5
    first = round(float(positions[0]))
    step = round(float(positions[1] - positions[0])) if len(positions) > 1 else 1
    if step == 0 or np.abs(positions - (first + step * np.arange(len(positions)))).max() > 0.01:
        raise ValueError(
            f"coordinates {axis} do not follow the array's transform (pixel size {size}): "
            "resample onto one grid, or drop the stale 'spatial_ref' coordinate"
        )
    # A pixel of `step` pixels that keeps its centre begins half the difference earlier.
    return first - (step - 1) / 2, step


def _wkt(crs: Any) -> str | None:
    if not crs:
        return None
    return str(rasterio.CRS.from_user_input(crs).to_wkt(version=WktVersion.WKT2_2019))
