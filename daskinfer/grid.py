"""`Grid`: where a raster lies, and how that travels with an xarray.

The affine transform is carried as GDAL gave it and never rebuilt from coordinates: that would move
pixels by rounding, and cannot be done at all for rasters of one row or column.  An array that was
sliced tells from its coordinates by how many whole pixels it moved; the transform follows exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
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

from .errors import warn_user
from .tiling import Window

__all__ = ["Grid", "grid_of"]

GRID_MAPPING = "spatial_ref"
Points = tuple[tuple[float, float, float, float, float], ...]
Rpcs = tuple[tuple[str, str], ...]


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
    point : bool
        The file says that its pixels are points, at their centres (``AREA_OR_POINT=Point``).  The
        transform is that of pixel corners all the same, as GDAL gives it.

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
    gcps: Points = ()
    gcps_crs: str | None = None
    rpcs: Rpcs = ()
    point: bool = False

    @classmethod
    def of_dataset(cls, dataset: rasterio.DatasetReader) -> Grid:
        """The grid of an open rasterio dataset."""
        transform, (gcps, gcps_crs) = _real(dataset.transform), dataset.gcps
        if transform is not None and gcps:
            warn_user(
                f"{dataset.name} has a transform and {len(gcps)} ground control points: a GeoTIFF "
                "holds one or the other, the transform is kept"
            )
            gcps, gcps_crs = (), None
        return cls(
            dataset.height,
            dataset.width,
            transform,
            _wkt(dataset.crs),
            tuple((p.row, p.col, p.x, p.y, p.z or 0.0) for p in gcps),
            _wkt(gcps_crs) if gcps else None,
            tuple(sorted(dataset.tags(ns="RPC").items())),
            transform is not None and dataset.tags().get("AREA_OR_POINT") == "Point",
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(height, width)`` in pixels."""
        return self.height, self.width

    @property
    def axis_aligned(self) -> bool:
        """Rows and columns follow the axes of the CRS, so that 1-D coordinates exist."""
        return self.transform is not None and self.transform.b == self.transform.d == 0

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """``(left, bottom, right, top)`` of all corners; pixels where there is no transform.

        >>> Grid(100, 200, Affine(10, 0, 500000, 0, -10, 4600000)).bounds
        (500000.0, 4599000.0, 502000.0, 4600000.0)
        """
        transform = self.transform or Affine.identity()
        corners = [transform @ (col, row) for col in (0, self.width) for row in (0, self.height)]
        xs, ys = zip(*corners, strict=True)
        return min(xs), min(ys), max(xs), max(ys)

    def window(self, window: Window) -> Grid:
        """The grid of a window of this raster."""
        row, col = window.origin
        transform = self.transform
        if transform is not None and (row or col):
            transform = transform @ Affine.translation(col, row)
        height, width = window.shape
        return replace(
            self,
            height=height,
            width=width,
            transform=transform,
            gcps=_moved_points(self.gcps, (row, col), (1, 1)),
            rpcs=_moved_rpcs(self.rpcs, row, col),
        )

    def scaled(self, scale: Fraction) -> Grid:
        """The grid of an output with `scale` pixels for each of this raster, on the same corner.

        >>> grid = Grid(20, 30, Affine(10, 0, 0, 0, -10, 0)).scaled(Fraction(2))
        >>> grid.shape, grid.transform.a
        ((40, 60), 5.0)
        """
        if scale == 1:
            return self
        factor = float(scale)
        transform = self.transform
        if transform is not None:
            transform = transform @ Affine.scale(1 / factor)
        height, width = (math.ceil(side * scale) for side in self.shape)
        gcps = tuple((row * factor, col * factor, x, y, z) for row, col, x, y, z in self.gcps)
        return replace(
            self,
            height=height,
            width=width,
            transform=transform,
            gcps=gcps,
            rpcs=_scaled_rpcs(self.rpcs, factor),
        )

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
            # As it stands; pyproj would write it anew.
            told = {"crs_wkt": self.crs, "spatial_ref": self.crs}
            array.coords[GRID_MAPPING].attrs.update(told)
        if self.transform is not None:
            array = array.rio.write_transform(self.transform)
        if self.gcps:
            array = array.rio.write_gcps(self.ground_control_points(), self.gcps_crs)
        attrs = dict(array.coords[GRID_MAPPING].attrs) if GRID_MAPPING in array.coords else {}
        if self.rpcs:
            attrs["rpcs"] = dict(self.rpcs)
        if self.point:
            attrs["AREA_OR_POINT"] = "Point"
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
        If the array has no ``y`` and ``x``, its pixels are not evenly spaced, or RPCs tie it to the
        ground and rows or columns were left out or flipped.
    """
    for dim in ("y", "x"):
        if dim not in array.dims:
            raise ValueError(f"expected dimensions (band, y, x), got {array.dims}")
    height, width = array.sizes["y"], array.sizes["x"]
    reference = array.coords[GRID_MAPPING].attrs if GRID_MAPPING in array.coords else {}
    gcps = tuple((p.row, p.col, p.x, p.y, p.z or 0.0) for p in array.rio.get_gcps() or ())
    rpcs = tuple(sorted(reference.get("rpcs", {}).items()))
    crs = _wkt(reference.get("crs_wkt") or array.rio.crs)
    # Without a transform, the coordinates of such arrays count pixels.
    untold = not (reference.get("GeoTransform") or gcps or rpcs)
    if untold and crs and 1 in (height, width) and "x" in array.coords:
        raise ValueError(
            f"an array of {height} x {width} px does not tell the size of its pixels: say it with "
            "array.rio.write_transform(...)"
        )
    declared = _declared(reference) or (Affine.identity() if gcps or rpcs else None)
    declared, origin, steps = _moved(array, declared)
    transform = _real(_followed(declared, origin, steps))
    if gcps or (rpcs and _declared(reference) is None):
        # What was moved is the count of pixels.
        transform = None
    if rpcs and steps != (1, 1):
        raise ValueError(
            f"a raster that RPCs tie to the ground, of which every {steps} px (y, x) are left: cut "
            "it without steps or flips, or drop 'rpcs' of its 'spatial_ref'"
        )
    if rpcs:
        rpcs = _moved_rpcs(rpcs, *map(int, origin))
    point = "Point" in (reference.get("AREA_OR_POINT"), array.attrs.get("AREA_OR_POINT"))
    return Grid(
        height,
        width,
        transform,
        None if gcps else crs,
        _moved_points(gcps, origin, steps),
        crs if gcps else None,
        rpcs,
        point and transform is not None,
    )


def _real(transform: Affine | None) -> Affine | None:
    """The transform, unless it is the identity that GDAL reports where there is none."""
    return None if transform is None or transform.is_identity else transform


def _declared(reference: dict[Any, Any]) -> Affine | None:
    numbers = str(reference.get("GeoTransform", "")).split()
    return Affine.from_gdal(*map(float, numbers)) if len(numbers) == 6 else None


def _moved(
    array: xr.DataArray, declared: Affine | None
) -> tuple[Affine | None, tuple[float, float], tuple[int, int]]:
    """The declared transform, and the first corner ``(row, col)`` and step that a selection left.

    In whole pixels of the transform, for pixels of a step of 1.
    """
    still = (0.0, 0.0), (1, 1)
    rotated = declared is not None and bool(declared.b or declared.d)
    if "x" in array.coords and "y" in array.coords:
        x, y = array.coords["x"].values, array.coords["y"].values
    elif declared is not None and "xc" in array.coords and "yc" in array.coords:
        # How rioxarray puts it where rows do not follow the axes of the CRS.
        xc, yc = array.coords["xc"].values, array.coords["yc"].values
        x, y = (~declared @ (xc[0], yc[0]))[0], (~declared @ (xc[:, 0], yc[:, 0]))[1]
    else:
        return declared, *still
    if declared is None:
        if min(len(x), len(y)) < 2:
            return None, *still
        declared = _through(x, y)
    plain = Affine.identity() if rotated else declared
    col, col_step = _pixels(x, plain.c, plain.a, "x")
    row, row_step = _pixels(y, plain.f, plain.e, "y")
    return declared, (row, col), (row_step, col_step)


def _followed(
    declared: Affine | None, origin: tuple[float, float], steps: tuple[int, int]
) -> Affine | None:
    """A transform after a selection."""
    if declared is None or (origin, steps) == ((0, 0), (1, 1)):
        return declared
    return declared @ Affine.translation(origin[1], origin[0]) @ Affine.scale(steps[1], steps[0])


def _moved_points(points: Points, origin: tuple[float, float], steps: tuple[int, int]) -> Points:
    """Ground control points in pixels of a selection that begins at a corner ``(row, col)``."""
    (top, left), (down, right) = origin, steps
    return tuple(
        ((row - top) / down, (col - left) / right, x, y, z) for row, col, x, y, z in points
    )


def _moved_rpcs(rpcs: Rpcs, row: int, col: int) -> Rpcs:
    """RPCs of a window that begins at a pixel, in decimals as they were written."""
    moved = {"LINE_OFF": row, "SAMP_OFF": col}
    return tuple(
        (key, str(_decimal(value) - moved[key]) if moved.get(key) else value) for key, value in rpcs
    )


def _scaled_rpcs(rpcs: Rpcs, factor: float) -> Rpcs:
    """RPCs of a raster with `factor` pixels for each; they count from the first pixel's centre."""
    values = dict(rpcs)
    for axis in ("LINE", "SAMP"):
        if f"{axis}_OFF" in values:
            offset = float(_decimal(values[f"{axis}_OFF"]))
            values[f"{axis}_OFF"] = repr((offset + 0.5) * factor - 0.5)
        if f"{axis}_SCALE" in values:
            values[f"{axis}_SCALE"] = repr(float(_decimal(values[f"{axis}_SCALE"])) * factor)
    return tuple(sorted(values.items()))


def _decimal(text: str) -> Decimal:
    """A number of the RPC domain, which may have its unit behind it."""
    try:
        return Decimal(text.split()[0])
    except (IndexError, InvalidOperation) as error:
        raise ValueError(f"RPCs with {text!r} for a number cannot follow a window") from error


def _through(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Affine:
    """The transform whose pixel centres begin and end as the coordinates do."""
    width, height = (float(axis[-1] - axis[0]) / (len(axis) - 1) for axis in (x, y))
    if not width or not height:
        raise ValueError("coordinates x and y do not follow a transform: they do not change")
    return Affine(width, 0, float(x[0]) - width / 2, 0, height, float(y[0]) - height / 2)


def _pixels(centres: npt.NDArray[Any], origin: float, size: float, axis: str) -> tuple[float, int]:
    """Offset of the first pixel's outer edge, and the spacing, in whole pixels of the transform."""
    positions = (np.asarray(centres, float) - origin) / size - 0.5
    if not np.isfinite(positions).all():
        count = int((~np.isfinite(positions)).sum())
        raise ValueError(
            f"{count} of {len(positions)} coordinates {axis} are no numbers, as pad() leaves them: "
            f"array.assign_coords({axis}=...) with the centres of all pixels"
        )
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
    """WKT2 that stays as it is when it is read again: GDAL needs two passes for some."""
    if not crs:
        return None
    for _ in range(2):
        parsed = rasterio.CRS.from_user_input(crs)
        crs = str(parsed.to_wkt(version=WktVersion.WKT2_2019))
    return str(crs)
