"""How much ground each class covers: counted chunk by chunk while the pixels are at hand.

Pixels of a projected CRS are as large as its units say, as long as these are true to the ground
within 1 %.  Where they are not (Web Mercator), pixels are measured on the ellipsoid, as large in a
cell of 32 px as in its middle; where they are degrees, row by row.

Counts are kept in a file beside the one that grows, a record for each chunk, so that a run that
goes on has those of the chunks before.  A chunk whose record is missing, as after a kill, is
counted again from what was written.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import rasterio
from affine import Affine
from rasterio.errors import RasterioIOError
from rasterio.windows import Window as RasterWindow

from . import display
from .ledger import Failure
from .pixels import Array

if TYPE_CHECKING:
    from .planner import Plan

__all__ = [
    "AreaTally",
    "ChunkAreas",
    "ClassArea",
    "Ground",
    "area_rows",
    "area_tally",
    "chunk_areas",
    "count_classes",
    "ground_of",
    "total_areas",
]

Numbers = npt.NDArray[np.float64]

# Largest error of planar areas that is taken for none.
_DISTORTION = 0.01
# Places at which the distortion of a CRS is looked at, on each axis of the raster.
_SAMPLES = 5
# CRSs whose objects are kept, and threads for which they are.
_KEPT, _THREADS = 8, 16
# Side of the cells whose pixels are taken for equally large.
_CELL = 32


@dataclass(frozen=True)
class ClassArea:
    """How much of the output is of one class.

    Attributes
    ----------
    name : str
    pixels : int
    area : float
        Square metres; NaN where the raster does not say where it lies.

    Examples
    --------
    >>> ClassArea("water", 250, 25_000.0).km2
    0.025
    """

    name: str
    pixels: int
    area: float

    @property
    def km2(self) -> float:
        """Square kilometres."""
        return self.area / 1e6


@dataclass(frozen=True)
class Ground:
    """How large the pixels of a grid are.

    Attributes
    ----------
    pixel : float
        Square metres of a pixel as the units of the CRS tell; NaN where they do not.
    transform : tuple of 6 float or None
        For pixels that are measured on the ellipsoid; None where `pixel` holds for all.
    crs : str
        WKT.

    Examples
    --------
    >>> ground = ground_of((10.0, 0.0, 5e5, 0.0, -10.0, 5.6e6), "EPSG:32632", (100, 100))
    >>> ground.pixel, ground.uniform
    (100.0, True)
    """

    pixel: float
    transform: tuple[float, ...] | None = None
    crs: str = ""

    @property
    def uniform(self) -> bool:
        """Whether all pixels are of one size."""
        return self.transform is None

    def cell(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Sides of the cells of a window whose pixels are equally large."""
        if self._by_rows:
            return 1, shape[1]
        return (_CELL, shape[1]) if self.uniform else (_CELL, _CELL)

    def areas(self, row: int, col: int, shape: tuple[int, int]) -> Numbers:
        """Square metres of a pixel in each cell of a window, cell rows x cell columns."""
        starts = [np.arange(0, n, side) for n, side in zip(shape, self.cell(shape), strict=True)]
        if self.transform is None:
            return np.full([len(axis) for axis in starts], self.pixel)
        place, crs = Affine(*self.transform), _crs(self.crs)
        if self._by_rows:
            return _degree_cells(place, crs, row + np.arange(shape[0] + 1))
        ends = [np.minimum(axis + _CELL, n) for axis, n in zip(starts, shape, strict=True)]
        rows, cols = (
            origin + (first + last) / 2
            for origin, first, last in zip((row, col), starts, ends, strict=True)
        )
        return _local_areas(place, crs, *np.meshgrid(rows, cols, indexing="ij"))

    @property
    def _by_rows(self) -> bool:
        """Whether pixels are cells between parallels."""
        if self.transform is None or self.transform[1] or self.transform[3]:
            return False
        return bool(_crs(self.crs).is_geographic)


@lru_cache(maxsize=32)
def ground_of(
    transform: tuple[float, ...] | None, crs: str | None, shape: tuple[int, int]
) -> Ground:
    """How large the pixels of a raster are.

    Parameters
    ----------
    transform : tuple of 6 float or None
        ``a, b, c, d, e, f`` of `affine.Affine`.
    crs : str or None
        Whatever pyproj takes.
    shape : tuple of int
        ``(height, width)`` in pixels.
    """
    if transform is None or crs is None:
        return Ground(math.nan)
    system, place = _crs(crs), Affine(*transform)
    if system.is_geographic:
        return Ground(math.nan, transform, crs)
    if not system.is_projected:
        return Ground(math.nan)
    unit = system.axis_info[0].unit_conversion_factor
    pixel = abs(place.determinant) * unit**2
    ends = [np.linspace(0, side, _SAMPLES) for side in shape]
    measured = _local_areas(place, system, *np.meshgrid(*ends, indexing="ij"))
    measured = measured[np.isfinite(measured)]
    if not len(measured) or abs(measured / pixel - 1).max() <= _DISTORTION:
        return Ground(pixel)
    return Ground(pixel, transform, crs)


@lru_cache(maxsize=_KEPT)
def _crs(text: str) -> Any:
    from pyproj import CRS

    return CRS.from_user_input(text)


def _degree_cells(place: Affine, crs: Any, edges: npt.NDArray[Any]) -> Numbers:
    """Areas ``(rows, 1)`` of the cells between parallels, exact on the ellipsoid."""
    unit = crs.axis_info[0].unit_conversion_factor
    latitudes = np.clip((place.f + edges * place.e) * unit, -math.pi / 2, math.pi / 2)
    b2, e = crs.ellipsoid.semi_minor_metre**2, _eccentricity(crs)
    sine = np.sin(latitudes)
    # Area from the equator, per radian of longitude.
    zone = b2 * sine
    if e:
        zone = b2 / 2 * (sine / (1 - (e * sine) ** 2) + np.arctanh(e * sine) / e)
    cells: Numbers = np.abs(np.diff(zone) * place.a * unit)[:, None]
    return cells


def _local_areas(
    place: Affine, crs: Any, rows: npt.NDArray[Any], cols: npt.NDArray[Any]
) -> Numbers:
    """Square metres on the ellipsoid of the pixels around these places; NaN beside the Earth.

    From how far the middles of their edges are apart: PROJ's own factors are those of a sphere
    where its projection is one, as Web Mercator.
    """
    west, latitude = _radians(place, crs, rows, cols - 0.5)
    east, latitude_east = _radians(place, crs, rows, cols + 0.5)
    north, latitude_north = _radians(place, crs, rows - 0.5, cols)
    south, latitude_south = _radians(place, crs, rows + 0.5, cols)
    along = _turned(east - west), latitude_east - latitude
    down = _turned(south - north), latitude_south - latitude_north
    middle = (latitude + latitude_east) / 2
    cell = np.abs(along[0] * down[1] - along[1] * down[0]) * _per_square_radian(crs, middle)
    areas: Numbers = np.where(np.isfinite(cell), cell, np.nan)
    return areas


def _radians(place: Affine, crs: Any, rows: Any, cols: Any) -> tuple[Numbers, Numbers]:
    """Longitude and latitude of places."""
    x, y = place @ (cols, rows)
    below = crs if crs.is_geographic else crs.geodetic_crs
    if not crs.is_geographic:
        x, y = _to_degrees(crs, threading.get_ident()).transform(x, y)
    unit = below.axis_info[0].unit_conversion_factor
    return np.asarray(x) * unit, np.asarray(y) * unit


@lru_cache(maxsize=_KEPT * _THREADS)
def _to_degrees(crs: Any, thread: int) -> Any:
    """What transforms from a projected CRS to the one below it.

    It takes milliseconds to make, and threads must not share one: each has that of its number.
    """
    from pyproj import Transformer

    return Transformer.from_crs(crs, crs.geodetic_crs, always_xy=True)


def _turned(angle: Numbers) -> Numbers:
    """Differences of longitudes, across the antimeridian too."""
    with np.errstate(invalid="ignore"):
        turned: Numbers = np.remainder(angle + math.pi, 2 * math.pi) - math.pi
    return turned


def _per_square_radian(crs: Any, latitude: npt.NDArray[Any]) -> Numbers:
    """Square metres for a radian north times a radian east, at latitudes in radians."""
    e2 = _eccentricity(crs) ** 2
    a = crs.ellipsoid.semi_major_metre
    density: Numbers = a**2 * (1 - e2) * np.cos(latitude) / (1 - e2 * np.sin(latitude) ** 2) ** 2
    return density


def _eccentricity(crs: Any) -> float:
    inverse = crs.ellipsoid.inverse_flattening
    flattening = 1 / inverse if inverse else 0.0
    return math.sqrt(flattening * (2 - flattening))


@dataclass(frozen=True, eq=False)
class ChunkAreas:
    """Pixels and square metres of each class in a chunk: float64, so that they are one record."""

    pixels: Numbers
    areas: Numbers


def count_classes(
    classes: Array, count: int, ground: Ground, origin: tuple[int, int]
) -> ChunkAreas:
    """Count the pixels of each class, and measure them.

    Parameters
    ----------
    classes : ndarray of unsigned integers, shape (y, x)
        Values from `count` up are nodata.
    count : int
        Number of classes.
    ground : Ground
    origin : tuple of int
        ``(row, col)`` of the first pixel in the raster.

    Examples
    --------
    >>> counted = count_classes(np.array([[0, 1], [1, 255]]), 2, Ground(100.0), (0, 0))
    >>> counted.pixels.tolist(), counted.areas.tolist()
    ([1.0, 2.0], [100.0, 200.0])
    """
    down, across = ground.cell(classes.shape)
    sizes = ground.areas(*origin, classes.shape)
    pixels, areas = np.zeros(count), np.zeros(count)
    # Numbers of their own for the classes, and nodata, of each cell in a row of cells.
    first = np.arange(classes.shape[1]) // across * (count + 1)
    for row, size in enumerate(sizes):
        strip = np.minimum(classes[down * row : down * (row + 1)], count)
        numbers = strip + first if len(size) > 1 else strip
        cells = np.bincount(numbers.ravel(), minlength=len(size) * (count + 1))
        counted = cells.reshape(len(size), count + 1)[:, :count]
        pixels += counted.sum(axis=0)
        areas += size @ counted
    return ChunkAreas(pixels, areas)


class AreaTally:
    """Counts of all chunks, in a file.

    Parameters
    ----------
    path : str
        The file; made where it is not there.
    chunks, classes : int
        How many there are.
    """

    def __init__(self, path: str, chunks: int, classes: int) -> None:
        self._path, self._chunks, self._classes = path, chunks, classes
        # 1 where it is written, pixels, areas.  What is not written is a hole.
        self._record = 8 * (1 + 2 * classes)
        self._file: IO[bytes] = open(path, "r+b" if os.path.exists(path) else "w+b")  # noqa: SIM115
        self._file.truncate(self._record * chunks)

    def put(self, chunk: int, counted: ChunkAreas) -> None:
        """Note what a chunk counted."""
        record = np.concatenate([[1.0], counted.pixels, counted.areas])
        os.pwrite(self._file.fileno(), record.astype("<f8").tobytes(), chunk * self._record)

    def total(
        self, skipped: Iterable[int], recount: Callable[[int], ChunkAreas]
    ) -> tuple[Numbers, Numbers]:
        """Pixels and areas of each class in all chunks but those skipped.

        Parameters
        ----------
        skipped : iterable of int
            Chunks that are nodata.
        recount : callable
            Counts a chunk whose record is missing.
        """
        left_out = set(skipped)
        pixels, areas = np.zeros(self._classes), np.zeros(self._classes)
        step = max(1, (1 << 20) // self._record)
        for first in range(0, self._chunks, step):
            number = min(step, self._chunks - first)
            raw = os.pread(self._file.fileno(), number * self._record, first * self._record)
            records = np.frombuffer(raw, "<f8").reshape(number, -1)
            for i in np.flatnonzero(records[:, 0] == 0):
                if first + int(i) not in left_out:
                    counted = recount(first + int(i))
                    pixels += counted.pixels
                    areas += counted.areas
            kept = [i for i in range(number) if first + i not in left_out]
            pixels += records[kept, 1 : 1 + self._classes].sum(axis=0)
            areas += records[kept, 1 + self._classes :].sum(axis=0)
        return pixels, areas

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def remove(self) -> None:
        """Delete the file."""
        self.close()
        Path(self._path).unlink(missing_ok=True)


def chunk_areas(plan: Plan, data: Array, origin: tuple[int, int]) -> ChunkAreas | None:
    """Count the classes of a chunk of the output; None where it has none.

    Parameters
    ----------
    plan : Plan
    data : ndarray, shape (band, y, x)
        Pixels of the output.
    origin : tuple of int
        ``(row, col)`` of the first.
    """
    count = _classes(plan)
    if not count:
        return None
    cog = plan.cog
    return count_classes(data[0], count, ground_of(cog.transform, cog.crs, plan.shape), origin)


def _classes(plan: Plan) -> int:
    return max(plan.inference.channels, 2) if plan.model.output == "classes" else 0


@contextlib.contextmanager
def area_tally(plan: Plan, path: str) -> Iterator[AreaTally | None]:
    """The counts of a run whose output grows at `path`; None where it has no classes."""
    count = _classes(plan)
    if not count:
        yield None
        return
    with contextlib.closing(AreaTally(f"{path}.areas", plan.tiling.chunks, count)) as tally:
        yield tally


def total_areas(
    plan: Plan, tally: AreaTally | None, failures: Iterable[Failure], path: str
) -> tuple[ClassArea, ...]:
    """Area of each class in all of an output.

    Parameters
    ----------
    plan : Plan
    tally : AreaTally or None
    failures : iterable of Failure
        Chunks that are nodata.
    path : str
        The output while it grows, for chunks whose counts are missing.

    Returns
    -------
    tuple of ClassArea
        Empty where there are no classes, or where counts are missing and cannot be made again.
    """
    if tally is None:
        return ()
    with contextlib.ExitStack() as held:
        opened: list[Any] = []

        def recount(number: int) -> ChunkAreas:
            if not opened:
                opened.append(held.enter_context(rasterio.open(path)))
            rows, cols = plan.inference.window(plan.tiling.index_of(number))
            window = RasterWindow.from_slices(tuple(rows), tuple(cols))
            counted = chunk_areas(plan, opened[0].read(window=window), (rows.start, cols.start))
            assert counted is not None
            return counted

        skipped = {failure.chunk for failure in failures} | set(plan.outside())
        try:
            pixels, areas = tally.total(skipped, recount)
        except RasterioIOError:
            # Of several files, or a Zarr store: GDAL does not open them while they grow.
            return ()
    names = plan.model.class_names or [str(number) for number in range(len(pixels))]
    return tuple(
        ClassArea(name, int(count), float(area))
        for name, count, area in zip(names, pixels, areas, strict=True)
    )


def area_rows(areas: Iterable[ClassArea], most: int = 20) -> list[display.Row]:
    """Lines for a report: the classes that are there, the largest first."""
    there = sorted((one for one in areas if one.pixels), key=lambda one: -one.pixels)
    total = sum(one.pixels for one in there)
    rows: list[display.Row] = []
    for one in there[:most]:
        size = "" if math.isnan(one.area) else f"{one.km2:,.6g} km2, "
        share = f"{one.pixels / total:.1%}"
        rows.append((f"  {one.name}", f"{size}{share}, {display.count_text(one.pixels)} px"))
    if len(there) > most:
        rows.append(("  ...", f"{len(there) - most} more, in report.areas"))
    return [("areas", "of classes"), *rows] if rows else []
