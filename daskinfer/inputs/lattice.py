"""Where grids lie on one another: whole pixels apart, or not on one lattice at all."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import rasterio
from affine import Affine
from rasterio.warp import transform as transform_points

from ..grid import Grid

__all__ = ["ALIGNED", "crs_of", "footprint", "offset_on", "same_crs", "spanning", "wkt_of"]

ALIGNED = 0.01
"""Fraction of a pixel by which pixels of two files may be apart and still be the same pixels."""

# A side of a footprint is looked at in so many places: in another CRS it is a curve.
_PLACES = 21


@functools.lru_cache(64)
def crs_of(wkt: str) -> rasterio.CRS:
    """The CRS with this definition; parsing takes longer than using it."""
    return rasterio.CRS.from_user_input(wkt)


@functools.lru_cache(256)
def same_crs(one: str | None, other: str | None) -> bool:
    """Whether two definitions are of one CRS."""
    if one is None or other is None:
        return one is other
    return one == other or bool(crs_of(one) == crs_of(other))


def wkt_of(crs: object) -> str:
    """WKT2 of whatever rasterio takes for a CRS.

    Raises
    ------
    ValueError
        If it is none.
    """
    from rasterio.enums import WktVersion
    from rasterio.errors import CRSError

    try:
        parsed = rasterio.CRS.from_user_input(crs)
    except CRSError as error:
        raise ValueError(
            f"crs {crs!r} is not a coordinate reference system: {error}; pass 'EPSG:32633' or WKT"
        ) from error
    return str(parsed.to_wkt(version=WktVersion.WKT2_2019))


def offset_on(grid: Grid, reference: Grid) -> tuple[int, int] | None:
    """Pixels ``(row, col)`` from the first of `reference` to the first of `grid`.

    None where the pixels of the two are not the same: where any corner of `grid` is more than
    `ALIGNED` of a pixel beside a corner of the reference's pixels.  CRSs are not compared.

    >>> there = Grid(4, 4, Affine(10, 0, 0, 0, -10, 100))
    >>> offset_on(Grid(2, 2, Affine(10, 0, 30.01, 0, -10, 80)), there)
    (2, 3)
    >>> offset_on(Grid(2, 2, Affine(10, 0, 35, 0, -10, 80)), there) is None
    True
    """
    if grid.transform is None or reference.transform is None:
        return (0, 0) if grid.transform is reference.transform else None
    relative = ~reference.transform @ grid.transform
    col, row = round(relative.c), round(relative.f)
    for down, right in ((0, 0), (0, grid.width), (grid.height, 0), (grid.height, grid.width)):
        x, y = relative @ (right, down)
        if max(abs(x - col - right), abs(y - row - down)) > ALIGNED:
            return None
    return row, col


def spanning(reference: Grid, placed: Sequence[tuple[Grid, tuple[int, int]]]) -> Grid:
    """The grid on the lattice of `reference` that holds grids at these offsets."""
    top = min(row for _, (row, _) in placed)
    left = min(col for _, (_, col) in placed)
    bottom = max(row + grid.height for grid, (row, _) in placed)
    right = max(col + grid.width for grid, (_, col) in placed)
    transform = reference.transform
    if transform is not None and (top or left):
        transform = transform @ Affine.translation(left, top)
    return Grid(bottom - top, right - left, transform, reference.crs)


def footprint(grid: Grid, crs: str) -> tuple[float, float, float, float]:
    """``(left, bottom, right, top)`` of a grid in a CRS, its sides followed as curves.

    Raises
    ------
    ValueError
        If it has no place in that CRS.
    """
    if grid.transform is None or grid.crs is None:
        raise ValueError("a raster without transform or CRS has no place in another CRS")
    along = np.linspace(0, 1, _PLACES)
    edges = [(along, 0 * along), (along, 0 * along + 1), (0 * along, along), (0 * along + 1, along)]
    cols = np.concatenate([x for x, _ in edges]) * grid.width
    rows = np.concatenate([y for _, y in edges]) * grid.height
    x, y = grid.transform @ (cols, rows)
    if not same_crs(grid.crs, crs):
        x, y = map(np.asarray, transform_points(crs_of(grid.crs), crs_of(crs), x, y))
    known = np.isfinite(x) & np.isfinite(y)
    if not known.any():
        raise ValueError("the raster has no place in that CRS")
    x, y = x[known], y[known]
    return float(x.min()), float(y.min()), float(x.max()), float(y.max())


def snapped(
    bounds: tuple[float, float, float, float],
    resolution: tuple[float, float],
    crs: str,
    corner: tuple[float, float] = (0.0, 0.0),
) -> Grid:
    """The north-up grid with pixels of ``(y, x)`` that holds the bounds.

    A corner of a pixel lies on `corner`, ``(x, y)``.

    >>> snapped((3.0, 1.0, 27.0, 19.0), (10.0, 10.0), "EPSG:32633").shape
    (2, 3)
    """
    height, width = resolution
    left, bottom, right, top = bounds
    x, y = corner
    # What rounding put beyond a line is not another pixel.
    first = math.floor((left - x) / width + ALIGNED)
    last = math.ceil((right - x) / width - ALIGNED)
    low, high = math.floor((bottom - y) / height + ALIGNED), math.ceil((top - y) / height - ALIGNED)
    transform = Affine(width, 0, x + first * width, 0, -height, y + high * height)
    return Grid(max(1, high - low), max(1, last - first), transform, crs)
