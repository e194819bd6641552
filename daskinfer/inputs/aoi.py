"""`AreaOfInterest`: the part of a raster that is wanted, as polygons.

A pixel is inside where its centre is, as with ``rasterio.features.geometry_mask``.  What the model
sees is not cut: pixels inside are those of a run over all of the raster.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from affine import Affine
from rasterio.features import geometry_mask
from rasterio.warp import transform as transform_points

from ..grid import Grid
from ..pixels import Mask
from ..tiling import Span, Tiling, Window
from .lattice import crs_of, same_crs, wkt_of
from .protocol import digest_of, whole_window

__all__ = ["AreaOfInterest"]

_LONLAT = "OGC:CRS84"
# An edge is followed in the other CRS until it is so near to it, in pixels.
_STRAIGHT = 0.1
_MOST_ROUNDS = 14
# Areas of no more pixels than this are looked at for one pixel inside before work starts.
_SMALL = 4096 * 4096

Ring = npt.NDArray[np.float64]
Polygon = tuple[Ring, ...]


@dataclass(frozen=True)
class AreaOfInterest:
    """Polygons in the CRS of a raster.  Made by `AreaOfInterest.of`.

    Attributes
    ----------
    digest : str
        Of the polygons and the grid; two areas with one digest are the same.
    grid : Grid
        Of the raster.
    polygons : tuple of tuple of ndarray
        Rings ``(point, xy)`` of each; those after the first are holes.

    Examples
    --------
    >>> grid = Grid(4, 4, Affine(10, 0, 0, 0, -10, 40))
    >>> area = AreaOfInterest.of((10, 0, 30, 30), grid)
    >>> area.inside(whole_window(grid)).astype(int).tolist()
    [[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0]]
    """

    digest: str
    grid: Grid = field(compare=False, repr=False)
    polygons: tuple[Polygon, ...] = field(compare=False, repr=False)

    @classmethod
    def of(cls, aoi: Any, grid: Grid) -> AreaOfInterest:
        """The area for a raster.

        Parameters
        ----------
        aoi : path, GeoJSON, geometry, GeoDataFrame or bounds
            A GeoJSON file, text or mapping: in longitude and latitude unless it says otherwise in
            ``crs``, or its numbers can only be the raster's own.  Any other file of polygons
            (GeoPackage, Shapefile) needs the extra ``vector``.  Geometries without a CRS, and
            bounds ``(left, bottom, right, top)``, are in the CRS of the raster.
        grid : Grid

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ModuleNotFoundError
            If it takes the extra ``vector`` to read it.
        ValueError
            If it holds no valid polygon, or none that has a pixel of the raster in it.
        """
        if grid.transform is None:
            raise ValueError("aoi= needs a raster with a transform; choose pixels with window=")
        polygons, crs = _read(aoi, grid)
        _check(polygons)
        if crs is not None and grid.crs is not None and not same_crs(crs, grid.crs):
            polygons = [tuple(_moved(ring, crs, grid) for ring in rings) for rings in polygons]
        facts = [ring.tobytes().hex() for rings in polygons for ring in (*rings, np.empty(0))]
        area = cls(digest_of(repr(grid), *facts), grid, tuple(polygons))
        area._check_overlap()
        return area

    def inside(self, window: Window, scale: Fraction = Fraction(1)) -> Mask:
        """Which pixels of a window are inside, bool ``(y, x)``.

        Parameters
        ----------
        window : Window
            In pixels of the raster at `scale`.
        scale : Fraction
            Pixels for each of the raster's.
        """
        box = self._box
        touched = box.scaled(scale).clip(window)
        mask: Mask = np.zeros(window.shape, np.bool_)
        if touched.rows.size and touched.cols.size:
            rows, cols = touched.slices(window.origin)
            mask[rows, cols] = self._burnt(touched, scale)
        return mask

    def chunks(self, tiling: Tiling) -> npt.NDArray[np.bool_]:
        """Which chunks may have a pixel inside, in row-major order."""
        down, across = tiling.grid
        if self.grid.transform is None:
            raise AssertionError("checked when it was made")
        cells = self.grid.transform @ Affine.scale(tiling.chunk[1], tiling.chunk[0])
        # The last chunk of an axis may be longer: it is what begins there and what comes after.
        shape = tuple(
            max(n, -(-size // chunk))
            for n, size, chunk in zip(tiling.grid, tiling.shape, tiling.chunk, strict=True)
        )
        touched = np.zeros((shape[0] + 2, shape[1] + 2), np.bool_)
        touched[1:-1, 1:-1] = geometry_mask(
            self._shapes(), shape, cells, all_touched=True, invert=True
        )
        near = sum(
            touched[1 + i : shape[0] + 1 + i, 1 + j : shape[1] + 1 + j]
            for i in (-1, 0, 1)
            for j in (-1, 0, 1)
        )
        certain = touched[1:-1, 1:-1]
        found = np.zeros((down, across), np.bool_)
        for i, j in np.argwhere(near):
            index = min(int(i), down - 1), min(int(j), across - 1)
            # Beside what GDAL calls touched nothing should be; it is looked at, not believed.
            if not found[index] and (
                certain[i, j] or self.inside(tiling.chunk_at(index).window).any()
            ):
                found[index] = True
        return found.ravel()

    @property
    def pixels(self) -> Window:
        """The smallest window that holds it."""
        return self._box

    @property
    def _box(self) -> Window:
        """Pixels of the raster around all polygons."""
        if self.grid.transform is None:
            raise AssertionError("checked when it was made")
        points = np.concatenate([rings[0] for rings in self.polygons])
        cols, rows = ~self.grid.transform @ (points[:, 0], points[:, 1])
        spans = [
            Span(int(np.floor(at.min())) - 1, int(np.ceil(at.max())) + 1) for at in (rows, cols)
        ]
        return Window(spans[0], spans[1]).clip(whole_window(self.grid))

    def _burnt(self, window: Window, scale: Fraction) -> Mask:
        if self.grid.transform is None:
            raise AssertionError("checked when it was made")
        row, col = window.origin
        pixels = self.grid.transform
        if scale != 1:
            pixels = pixels @ Affine.scale(1 / float(scale))
        pixels = pixels @ Affine.translation(col, row)
        mask: Mask = geometry_mask(self._shapes(), window.shape, pixels, invert=True)
        return mask

    def _shapes(self) -> list[dict[str, Any]]:
        return [
            {"type": "Polygon", "coordinates": [ring.tolist() for ring in rings]}
            for rings in self.polygons
        ]

    def _check_overlap(self) -> None:
        box = self._box
        empty = not (box.rows.size and box.cols.size)
        small = box.rows.size * box.cols.size <= _SMALL
        if empty or (small and not self.inside(box).any()):
            points = np.concatenate([rings[0] for rings in self.polygons])
            own = (*points.min(axis=0), *points.max(axis=0))
            raise ValueError(
                f"aoi= has no pixel of the raster in it: its bounds are {_bounds_text(own)}, the "
                f"raster's {_bounds_text(_grid_bounds(self.grid))}, both in the raster's CRS"
            )


def _read(aoi: Any, grid: Grid) -> tuple[list[Polygon], str | None]:
    """Polygons, and their CRS; None for that of the raster."""
    if isinstance(aoi, str) and aoi.lstrip().startswith("{"):
        aoi = json.loads(aoi)
    if isinstance(aoi, str) and "://" in aoi:
        raise ValueError(f"aoi {aoi!r} is an address: fetch the file and pass its path")
    if isinstance(aoi, (str, os.PathLike)):
        return _of_file(Path(aoi), grid)
    if isinstance(aoi, Mapping):
        return _of_geojson(aoi, grid)
    if _are_bounds(aoi):
        left, bottom, right, top = (float(number) for number in aoi)
        if not (left < right and bottom < top):
            raise ValueError(f"bounds must be (left, bottom, right, top), got {tuple(aoi)}")
        corners = [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]
        return [(np.array(corners),)], None
    told = getattr(aoi, "__geo_interface__", None)
    if told is None:
        raise TypeError(
            "aoi must be a path, a GeoJSON mapping, a geometry, a GeoDataFrame or bounds (left, "
            f"bottom, right, top), got {type(aoi).__name__}"
        )
    crs = getattr(aoi, "crs", None)
    return list(_polygons(told)), None if crs is None else wkt_of(crs.to_wkt())


def _are_bounds(aoi: Any) -> bool:
    return (
        isinstance(aoi, (tuple, list, np.ndarray))
        and len(aoi) == 4
        and all(isinstance(n, (int, float, np.number)) for n in aoi)
    )


def _of_file(path: Path, grid: Grid) -> tuple[list[Polygon], str | None]:
    if not path.exists():
        raise FileNotFoundError(f"aoi {str(path)!r}: no such file")
    if path.suffix.lower() in (".json", ".geojson"):
        try:
            return _of_geojson(json.loads(path.read_text(encoding="utf-8")), grid)
        except json.JSONDecodeError as error:
            raise ValueError(f"aoi {str(path)!r} is not GeoJSON: {error}") from error
    try:
        import geopandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {path.name} needs geopandas: pip install 'daskinfer[vector]', or pass GeoJSON"
        ) from error
    parquet = path.suffix.lower() in (".parquet", ".geoparquet")
    frame = geopandas.read_parquet(path) if parquet else geopandas.read_file(path)
    told = frame.__geo_interface__
    return list(_polygons(told)), None if frame.crs is None else wkt_of(frame.crs.to_wkt())


def _of_geojson(told: Mapping[str, Any], grid: Grid) -> tuple[list[Polygon], str | None]:
    """In longitude and latitude, as the standard has it, or in what it says itself."""
    polygons = list(_polygons(told))
    named = told.get("crs")
    if named is not None:
        name = named.get("properties", {}).get("name") if isinstance(named, Mapping) else named
        return polygons, wkt_of(name)
    if grid.crs is None:
        return polygons, None
    points = np.concatenate([ring for rings in polygons for ring in rings] or [np.zeros((1, 2))])
    beyond = np.abs(points[:, 0]).max() > 360 or np.abs(points[:, 1]).max() > 90
    if beyond and crs_of(grid.crs).is_projected:
        return polygons, None
    return polygons, wkt_of(_LONLAT)


def _polygons(told: Mapping[str, Any]) -> Iterator[Polygon]:
    """Polygons of anything that GeoJSON has."""
    kind = told.get("type")
    if kind == "FeatureCollection":
        for feature in told.get("features", ()):
            yield from _polygons(feature)
    elif kind == "Feature":
        if told.get("geometry") is not None:
            yield from _polygons(told["geometry"])
    elif kind == "GeometryCollection":
        for geometry in told.get("geometries", ()):
            yield from _polygons(geometry)
    elif kind == "Polygon":
        yield _rings(told["coordinates"])
    elif kind == "MultiPolygon":
        for rings in told["coordinates"]:
            yield _rings(rings)
    else:
        raise ValueError(f"aoi= takes polygons, got {kind!r}: a point or line has no area")


def _rings(coordinates: Sequence[Any]) -> Polygon:
    try:
        return tuple(
            np.array([point[:2] for point in ring], np.float64).reshape(-1, 2)
            for ring in coordinates
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"aoi= has a polygon that is not rings of points: {error}") from error


def _check(polygons: Sequence[Polygon]) -> None:
    """Refuse what has no area, or is not a polygon."""
    if not any(len(ring) for rings in polygons for ring in rings):
        raise ValueError("aoi= is empty: it holds no polygon")
    for number, rings in enumerate(polygons):
        what = f"aoi= has an invalid polygon (number {number})"
        for ring in rings:
            if len(ring) < 4 or not np.array_equal(ring[0], ring[-1]):
                raise ValueError(f"{what}: a ring has 4 points or more and ends where it begins")
            if not np.isfinite(ring).all():
                raise ValueError(f"{what}: its points are not finite")
            # From its first point: of large coordinates the products would not cancel.
            x, y = (ring - ring[0]).T
            if not np.sum(x[:-1] * y[1:] - x[1:] * y[:-1]):
                raise ValueError(f"{what}: a ring has no area")
        _check_crossings(rings, what)


def _check_crossings(rings: Polygon, what: str) -> None:
    try:
        import shapely
    except ModuleNotFoundError:
        # Lines that cross are then filled as GDAL does it: what is enclosed once is inside.
        return
    polygon = shapely.Polygon(rings[0], rings[1:])
    if not polygon.is_valid:
        raise ValueError(
            f"{what}: {shapely.is_valid_reason(polygon)}; shapely.make_valid or "
            "geometry.buffer(0) may mend it"
        )


def _moved(ring: Ring, crs: str, grid: Grid) -> Ring:
    """A ring in the CRS of the raster, its edges followed as the curves that they become there."""

    def there(points: Ring) -> Ring:
        moved = transform_points(crs_of(crs), crs_of(grid.crs or ""), points[:, 0], points[:, 1])
        return np.column_stack([np.asarray(axis, np.float64) for axis in moved])

    if grid.transform is None:
        raise AssertionError("checked before")
    pixel = abs(grid.transform.determinant) ** 0.5
    points, moved = ring, there(ring)
    for _ in range(_MOST_ROUNDS):
        if not np.isfinite(moved).all():
            raise ValueError("aoi= reaches to where the raster's CRS has no coordinates")
        middle = (points[:-1] + points[1:]) / 2
        exact = there(middle)
        off = np.hypot(*((moved[:-1] + moved[1:]) / 2 - exact).T)
        bent = np.flatnonzero(off > _STRAIGHT * pixel)
        if not len(bent):
            break
        points = np.insert(points, bent + 1, middle[bent], axis=0)
        moved = np.insert(moved, bent + 1, exact[bent], axis=0)
    return moved


def _grid_bounds(grid: Grid) -> tuple[float, float, float, float]:
    if grid.transform is None:
        raise AssertionError("checked before")
    cols, rows = np.array([0, 0, grid.width, grid.width]), np.array([0, grid.height] * 2)
    x, y = grid.transform @ (cols, rows)
    return float(x.min()), float(y.min()), float(x.max()), float(y.max())


def _bounds_text(bounds: Sequence[float]) -> str:
    return "(" + ", ".join(f"{number:.10g}" for number in bounds) + ")"
