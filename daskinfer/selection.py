"""Which bands and which window of a raster are meant, by what people say of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import rasterio

from .grid import Grid
from .tiling import Span, Window

__all__ = ["Bands", "area_of", "find_bands", "window_of", "window_of_bounds"]

Bands = Sequence[str | int] | None

# Bounds that lie on pixel edges are not a pixel larger for the rounding of their last digit.
_ROUNDING = 1e-6
# Bounds in another CRS are looked at in so many places a side.
_PLACES = 21
# Names in an error.
_LISTED = 100


def find_bands(
    wanted: Sequence[str | int],
    names: tuple[str, ...],
    where: str,
    aliases: tuple[tuple[str, ...], ...] = (),
) -> list[int]:
    """Positions of the wanted bands.

    A name is that of a band as it stands; else the one name that differs from it by zeros before
    its number only (B02 and B2, but not B8 and B8A); else what is said of one band beside its name.
    A number, also as text, is that of the band in its file where bands have no names, else its
    place among them.

    Parameters
    ----------
    wanted : sequence of str or int
        Names, or numbers from 1.
    names : tuple of str
        Of all bands.
    where : str
        What has the bands, for the errors.
    aliases : tuple of tuple of str
        Other names of each band, as its colour ("red").

    Raises
    ------
    ValueError
        If a band is unknown or asked for twice, or a name could be several.

    Examples
    --------
    >>> find_bands(["nir", 1], ("red", "nir"), "scene.tif")
    [1, 0]
    >>> find_bands(["B8A", "B02"], ("B2", "B8", "B8A"), "scene.tif")
    [2, 0]
    """
    if isinstance(wanted, (str, int)) or not len(wanted):
        raise ValueError(f"bands must be a list of names or numbers, got {wanted!r}")
    picked = []
    for band in wanted:
        position = _position(band, names, aliases)
        if position is None:
            raise ValueError(
                f"{where} has no band {band!r}: wanted {list(wanted)}, there are {_listed(names)}"
                f"{_hint(band, names)}"
            )
        picked.append(position)
    doubled = {names[i] for i in picked if picked.count(i) > 1}
    if doubled:
        raise ValueError(f"band {sorted(doubled)[0]!r} is asked for twice: {list(wanted)}")
    return picked


def _position(
    band: str | int, names: tuple[str, ...], aliases: tuple[tuple[str, ...], ...]
) -> int | None:
    """Position of a band; None where there is none, or no telling which."""
    if isinstance(band, (bool, float)):
        return None
    if names.count(str(band)) == 1:
        return names.index(str(band))
    if re.fullmatch("[0-9]+", str(band)):
        # Names that are numbers are those of the bands in their file: a third of two bands, or one
        # where alpha is the first, is not to be found by counting.  Bands of several files may all
        # be called 1.
        told = all(re.fullmatch("[0-9]+", name) for name in names)
        counted = not told or len(set(names)) < len(names)
        return int(band) - 1 if counted and 1 <= int(band) <= len(names) else None
    plain = _without_zeros(str(band))
    alike = [i for i, name in enumerate(names) if _without_zeros(name) == plain]
    alike = alike or [i for i, known in enumerate(aliases) if band in known]
    return alike[0] if len(alike) == 1 else None


def _without_zeros(name: str) -> str:
    """B02 as B2, band_01 as band_1; anything that is not letters and a number as it is."""
    match = re.fullmatch(r"([A-Za-z]+[ _-]?)0+(\d+[A-Za-z]?)", name)
    return "".join(match.groups()) if match else name


def _listed(names: tuple[str, ...]) -> str:
    if len(names) <= _LISTED:
        return str(list(names))
    return f"{len(names)}: {list(names[:_LISTED])} ..."


def _hint(band: object, names: tuple[str, ...]) -> str:
    near = [name for name in names if name.casefold() == str(band).casefold()]
    return f"; did you mean {near[0]!r}?" if near else ""


def area_of(
    window: Any, bounds: Sequence[float] | None, bounds_crs: Any, grid: Grid
) -> Window | None:
    """The window that is asked for in pixels or in coordinates; None for all of the raster."""
    if bounds is None:
        if bounds_crs is not None:
            raise ValueError("bounds_crs= says what bounds= are in: pass those too")
        return None if window is None else window_of(window, grid)
    if window is not None:
        raise ValueError("pass window= (pixels) or bounds= (coordinates), not both")
    return window_of_bounds(bounds, grid, bounds_crs)


def window_of(bounds: tuple[int, int, int, int], grid: Grid) -> Window:
    """``(row, col, height, width)`` as a `Window` inside a grid."""
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 4:
        raise ValueError(f"window must be (row, col, height, width), got {bounds!r}")
    if not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in bounds):
        raise ValueError(f"window must be four whole numbers of px, got {bounds!r}")
    row, col, height, width = bounds
    window = Window(Span(row, row + height), Span(col, col + width))
    if height < 1 or width < 1 or window.clip(_whole(grid)) != window:
        raise ValueError(
            f"window (row, col, height, width) = {tuple(bounds)} lies outside the raster of "
            f"{grid.height} x {grid.width} px"
        )
    return window


def window_of_bounds(bounds: Sequence[float], grid: Grid, crs: Any = None) -> Window:
    """The pixels that bounds touch, as a `Window` inside a grid.

    Parameters
    ----------
    bounds : sequence of float
        ``(left, bottom, right, top)``.  Where rows and columns do not follow the axes of the CRS,
        the window holds all of them that the rectangle touches, and others.
    grid : Grid
    crs : optional
        What the bounds are in; by default the CRS of the grid.

    Raises
    ------
    ValueError
        If the bounds do not meet the grid, or in several parts, or the grid has no transform.

    Examples
    --------
    >>> from affine import Affine
    >>> grid = Grid(100, 200, Affine(10, 0, 500000, 0, -10, 4600000))
    >>> window_of_bounds((500205, 4599000, 500300, 4599500), grid).bounds()
    (50, 20, 50, 10)
    """
    left, bottom, right, top = _checked(bounds)
    if grid.transform is None:
        raise ValueError(
            "bounds= needs a raster with a transform, which this one has not: pass window= (pixels)"
        )
    spans = [(left, right)]
    if crs is not None:
        left, bottom, right, top = _projected((left, bottom, right, top), crs, grid)
        spans = _turned(left, right, grid)
    if len(spans) > 1:
        raise ValueError(
            "the raster has the bounds in parts that lie apart, x = "
            f"{' and '.join(f'{west:.10g} to {east:.10g}' for west, east in sorted(spans))}: pass "
            "those of one part after the other, in the raster's CRS"
        )
    [(left, right)] = spans
    corners = [~grid.transform @ (x, y) for x in (left, right) for y in (bottom, top)]
    cols, rows = (_touched([corner[i] for corner in corners]) for i in (0, 1))
    window = Window(rows, cols).clip(_whole(grid))
    if not math.prod(window.shape):
        raise ValueError(
            f"bounds (left, bottom, right, top) = {(left, bottom, right, top)} do not meet the "
            f"raster, which has {grid.bounds}"
        )
    return window


def _turned(left: float, right: float, grid: Grid) -> list[tuple[float, float]]:
    """Bounds in x as a raster in degrees counts them, all that meet it; in other CRSs as they are.

    Where it holds all of them in one piece, that one.
    """
    if not _in_degrees(grid):
        return [(left, right)]
    # What crosses the antimeridian comes with its left edge right of the other.
    right += 360.0 if left > right else 0.0
    west, _, east, _ = grid.bounds
    if right - left >= 360.0:
        return [(west, east)]
    turned = [(left + turn, right + turn) for turn in (0.0, 360.0, -360.0)]
    for span in turned:
        if west <= span[0] and span[1] <= east:
            return [span]
    slack = _ROUNDING * (east - west)
    meeting = [
        (max(span[0], west), min(span[1], east))
        for span in turned
        if span[0] < east - slack and span[1] > west + slack
    ]
    return meeting or turned[:1]


def _in_degrees(grid: Grid) -> bool:
    return bool(rasterio.CRS.from_user_input(grid.crs).is_geographic)


def _checked(bounds: Sequence[float]) -> tuple[float, float, float, float]:
    named = "bounds must be (left, bottom, right, top)"
    try:
        left, bottom, right, top = (float(number) for number in bounds)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{named}, got {bounds!r}") from error
    if not (math.isfinite(left + bottom + right + top) and left < right and bottom < top):
        raise ValueError(f"{named}, left < right and bottom < top, got {bounds!r}")
    return left, bottom, right, top


def _projected(
    bounds: tuple[float, float, float, float], crs: Any, grid: Grid
) -> tuple[float, float, float, float]:
    from rasterio.warp import transform_bounds

    if grid.crs is None:
        raise ValueError("bounds_crs= needs a raster with a CRS, which this one has not")
    left, bottom, right, top = transform_bounds(crs, grid.crs, *bounds)
    if not _in_degrees(grid):
        _refuse_torn(bounds, crs, grid.crs)
    return left, bottom, right, top


def _refuse_torn(bounds: tuple[float, float, float, float], crs: Any, target: str) -> None:
    """Refuse bounds that the target CRS tears apart, as a map of the world at its antimeridian."""
    from rasterio.warp import transform

    left, bottom, right, top = bounds
    along = np.linspace(0, 1, _PLACES)
    xs, ys = np.meshgrid(left + along * (right - left), bottom + along * (top - bottom))
    for values in transform(crs, target, xs.ravel(), ys.ravel()):
        places = np.where(np.isfinite(values), values, np.nan).reshape(xs.shape)
        steps = np.concatenate([np.diff(places, axis=axis).ravel() for axis in (0, 1)])
        steps = np.abs(steps[np.isfinite(steps)])
        if steps.size and steps.max() > 0.5 * (np.nanmax(places) - np.nanmin(places)):
            raise ValueError(
                f"bounds (left, bottom, right, top) = {bounds} lie on both sides of where the "
                "raster's CRS is cut, at its antimeridian: split them there, and pass one part "
                "after the other"
            )


def _touched(ends: list[float]) -> Span:
    """Pixels that an interval reaches into, at least one."""
    start = math.floor(min(ends) + _ROUNDING)
    return Span(start, max(start + 1, math.ceil(max(ends) - _ROUNDING)))


def _whole(grid: Grid) -> Window:
    return Window(Span(0, grid.height), Span(0, grid.width))
