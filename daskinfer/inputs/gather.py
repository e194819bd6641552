"""Put sources together: side by side, band on band, and on a grid that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr
from rasterio.warp import transform as transform_points

from ..grid import Grid, grid_of
from ..raster import Raster, describe
from ..tiling import Span, Window
from .bandstack import BandStack
from .lattice import ALIGNED, crs_of, footprint, offset_on, same_crs, snapped, spanning, wkt_of
from .mosaic import Mosaic, Part
from .physical import Physical
from .protocol import Source, whole_window
from .timestack import TimeStack
from .warped import Warped, resampling_name

__all__ = ["TargetGrid", "bands_of", "described", "items_of_bands", "mosaic_of", "steps_of",
           "target_grid"]  # fmt: skip

Named = tuple[str, Any]


@dataclass(frozen=True)
class TargetGrid:
    """The grid that is asked for.

    Attributes
    ----------
    like : Grid or None
        Exactly this one.
    crs : str or None
        WKT2; of the sources where None.
    resolution : tuple of float or None
        ``(y, x)`` in units of the CRS; of the sources where None.
    resampling : str
    """

    like: Grid | None = None
    crs: str | None = None
    resolution: tuple[float, float] | None = None
    resampling: str = "nearest"

    @classmethod
    def of(cls, like: Any, crs: Any, resolution: Any, resampling: Any) -> TargetGrid:
        """From the arguments of `open_raster`."""
        name = resampling_name(resampling)
        if like is not None and (crs is not None or resolution is not None):
            raise ValueError("like= says the whole grid: leave crs= and resolution= out")
        grid = None if like is None else _grid_like(like)
        if grid is not None and (grid.transform is None or grid.gcps or grid.rpcs):
            raise ValueError("like= has no transform, so that nothing can be put on its grid")
        wkt = None if crs is None else wkt_of(crs)
        return cls(grid, wkt, _resolution(resolution), name)

    @property
    def given(self) -> bool:
        """Whether a grid is asked for at all."""
        return self.like is not None or self.crs is not None or self.resolution is not None


def _grid_like(like: Any) -> Grid:
    if isinstance(like, Grid):
        return like
    return grid_of(like) if isinstance(like, xr.DataArray) else describe(like).grid


def _resolution(resolution: Any) -> tuple[float, float] | None:
    if resolution is None:
        return None
    pair = resolution if isinstance(resolution, (tuple, list)) else (resolution, resolution)
    if len(pair) != 2 or not all(
        isinstance(side, (int, float, np.number)) and not isinstance(side, bool) and side > 0
        for side in pair
    ):
        raise ValueError(
            f"resolution must be a positive number in units of the CRS, or (y, x) of them, got "
            f"{resolution!r}"
        )
    return float(pair[0]), float(pair[1])


def mosaic_of(named: Sequence[Named], wanted: TargetGrid, what: str = "files") -> Source:
    """Sources side by side, later ones over earlier ones.

    Parameters
    ----------
    named : sequence of (str, Source)
        With what to call each in errors.
    wanted : TargetGrid
    what : str
        What they are, for the plan.

    Raises
    ------
    ValueError
        If bands or dtypes differ, or they are on several grids and none is asked for.
    """
    named = _agreeing(named)
    if wanted.given:
        return _on_target(named, target_grid(named, wanted), wanted.resampling)
    if len(named) == 1:
        return named[0][1]  # type: ignore[no-any-return]
    (first, reference), *_ = named
    offsets = [_offset(source.grid, name, reference.grid, first) for name, source in named]
    pairs = [(source.grid, at) for (_, source), at in zip(named, offsets, strict=True)]
    grid = spanning(reference.grid, pairs)
    top, left = min(row for row, _ in offsets), min(col for _, col in offsets)
    parts = [
        Part(source, (row - top, col - left))
        for (_, source), (row, col) in zip(named, offsets, strict=True)
    ]
    return Mosaic.of(grid, parts, (("mosaic", f"{len(parts)} {what}, later ones on top"),))


def bands_of(named: Sequence[Named], wanted: TargetGrid) -> Source:
    """Sources band on band, in the order given.

    Those of other resolutions are resampled onto the finest grid, or all onto the one that is asked
    for.

    Parameters
    ----------
    named : sequence of (str, Source)
        With the name of the band, for sources of one band.
    wanted : TargetGrid
    """
    grid = target_grid(named, wanted) if wanted.given else _finest(named)
    stacked, warped = [], []
    for name, source in named:
        offset = offset_on(source.grid, grid) if same_crs(source.grid.crs, grid.crs) else None
        if offset == (0, 0) and source.grid.shape == grid.shape:
            stacked.append(source)
            continue
        stacked.append(_placed(source, grid, wanted.resampling))
        if offset is None:
            warped.append(name)
    names = tuple(
        band if len(source.band_names) > 1 else name
        for name, source in named
        for band in source.band_names
    )
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"band {doubled[0]!r} is there twice: {list(names)}")
    notes = [("bands", f"from {len(named)} files")]
    if warped:
        which = ", ".join(warped)
        notes.append(("warped", f"{which} to {_size_text(grid)}: {wanted.resampling}"))
    return BandStack(tuple(stacked), names, tuple(notes))


def items_of_bands(items: Sequence[tuple[str, Sequence[Named]]], wanted: TargetGrid) -> Source:
    """Items side by side, each with its bands in files of their own.

    A pixel has all of its bands from one item.  Every band is resampled once, onto the grid that
    is asked for, or onto the finest of its item.

    Parameters
    ----------
    items : sequence of (str, sequence of (str, Source))
        The name of each item, and its bands by name.
    wanted : TargetGrid
    """
    if not wanted.given:
        stacks = [(name, bands_of(bands, wanted)) for name, bands in items]
        return mosaic_of(stacks, wanted, "items")
    every = [(f"{band} of {name}", source) for name, bands in items for band, source in bands]
    grid = target_grid(every, wanted)
    fixed = TargetGrid(like=grid, resampling=wanted.resampling)
    parts, stacks = [], []
    for name, bands in items:
        areas = [_area_on(_warpable(source.grid, name), grid) for _, source in bands]
        found = [area for area in areas if area is not None]
        if found:
            stacks.append((name, bands_of(bands, fixed)))
            parts.append(_around(found))
    if not stacks:
        raise ValueError("none of the items lies on the target grid: check like= or crs=")
    cropped = [
        Part(stack.crop(area), area.origin)
        for (_, stack), area in zip(_agreeing(stacks), parts, strict=True)
    ]
    notes = (
        ("mosaic", f"{len(items)} items, later ones on top"),
        ("warped", f"every band to {_size_text(grid)}: {wanted.resampling}"),
    )
    return Mosaic.of(grid, cropped, notes)


def steps_of(dates: Sequence[tuple[str, Any]], wanted: TargetGrid) -> TimeStack:
    """Sources at dates, on one grid.

    Parameters
    ----------
    dates : sequence of (str, Source or None)
        In order of time; None where a date has nothing.
    wanted : TargetGrid
    """
    named = [(time, source) for time, source in dates if source is not None]
    if not named:
        raise ValueError(f"none of the dates {[time for time, _ in dates]} has a source")
    agreed = dict(_agreeing(named))
    if wanted.given:
        grid = target_grid(named, wanted)
    else:
        first, reference = named[0]
        pairs = [(s.grid, _offset(s.grid, name, reference.grid, first)) for name, s in named]
        grid = spanning(reference.grid, pairs)
        if all(source.grid == reference.grid for _, source in named):
            grid = reference.grid
    placed = {
        time: source if source.grid == grid else _placed(source, grid, wanted.resampling)
        for time, source in agreed.items()
    }
    return TimeStack(tuple(placed.get(time) for time, _ in dates), tuple(time for time, _ in dates))


def _around(areas: Sequence[Window]) -> Window:
    """The smallest window that holds windows."""
    rows, cols = (
        Span(min(span.start for span in spans), max(span.stop for span in spans))
        for spans in zip(*areas, strict=True)
    )
    return Window(rows, cols)


def target_grid(named: Sequence[Named], wanted: TargetGrid) -> Grid:
    """The grid that is asked for, around all sources where only its CRS or resolution is."""
    if wanted.like is not None:
        return wanted.like
    name, first = named[0]
    crs = wanted.crs or first.grid.crs
    if crs is None:
        raise ValueError(f"{name} has no CRS: pass like=, or give it one with gdal_edit -a_srs")
    if wanted.crs is None:
        for other, source in named[1:]:
            if not same_crs(source.grid.crs, crs):
                raise ValueError(
                    f"{other} is in {_crs_text(source.grid.crs)}, {name} in {_crs_text(crs)}: "
                    "pass crs= with resolution=, or like="
                )
    resolution = wanted.resolution or min(_default_resolution(s.grid, crs) for _, s in named)
    boxes = [footprint(_warpable(source.grid, name), crs) for name, source in named]
    union = tuple(choose(box[i] for box in boxes) for i, choose in enumerate((min, min, max, max)))
    # In their own CRS they keep their corner, so that twice the pixel size is half the pixels.
    anchored = all(same_crs(source.grid.crs, crs) for _, source in named)
    corner = (union[0], union[3]) if anchored else (0.0, 0.0)
    return snapped(union, resolution, crs, corner)  # type: ignore[arg-type]


def _default_resolution(grid: Grid, crs: str) -> tuple[float, float]:
    """Pixel size in a CRS: as it is, or of square pixels as large as the one in the middle."""
    if grid.transform is not None and same_crs(grid.crs, crs) and grid.axis_aligned:
        return abs(grid.transform.e), abs(grid.transform.a)
    there = _warpable(grid, "a source")
    if there.transform is None or there.crs is None:
        raise AssertionError("checked before")
    col, row = grid.width / 2, grid.height / 2
    x, y = there.transform @ (np.array([col, col + 1, col]), np.array([row, row, row + 1]))
    x, y = map(np.asarray, transform_points(crs_of(there.crs), crs_of(crs), x, y))
    area = abs((x[1] - x[0]) * (y[2] - y[0]) - (x[2] - x[0]) * (y[1] - y[0]))
    if not np.isfinite(area) or not area:
        raise ValueError(f"the middle of a source has no place in {_crs_text(crs)}: choose another")
    return float(area**0.5), float(area**0.5)


def _warpable(grid: Grid, name: str) -> Grid:
    if grid.transform is None or grid.crs is None:
        raise ValueError(
            f"{name} has no {'CRS' if grid.transform else 'transform'}, so that it cannot be put "
            "on another grid: georeference it first (gdalwarp does it from ground control points "
            "and RPCs)"
        )
    return grid


def _agreeing(named: Sequence[Named]) -> Sequence[Named]:
    """The sources, if bands and dtypes agree; in physical values where their scales do not."""
    named = described(named)
    (first, reference), *rest = named
    for name, source in rest:
        for what in ("band_names", "dtype"):
            own, others = getattr(source, what), getattr(reference, what)
            if own != others:
                text = {"band_names": "bands"}.get(what, what)
                own, others = (
                    list(value) if isinstance(value, tuple) else value for value in (own, others)
                )
                cure = (
                    "convert one with gdal_translate -ot, if their numbers mean the same"
                    if what == "dtype"
                    else "choose bands with bands=[...]"
                )
                raise ValueError(
                    f"{name} has {text} {own}, {first} has {others}: files of a mosaic must agree; "
                    f"{cure}, or pass stack='bands' for one file per band"
                )
    scaled = {(source.scales, source.offsets) for _, source in named}
    if len(scaled) > 1:
        return [(name, Physical(source)) for name, source in named]
    return named


def described(named: Sequence[Named]) -> Sequence[Named]:
    """Files without names of bands take those of the others, if they have as many bands."""
    every = {source.band_names for _, source in named}
    names = {own for own in every if own != _numbered(own)}
    if len(every) == 1 or len(names) != 1:
        return named
    (known,) = names
    return [
        (name, replace(source, band_names=known))
        if isinstance(source, Raster) and source.band_names == _numbered(known)
        else (name, source)
        for name, source in named
    ]


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(i + 1) for i in range(len(names)))


def _offset(grid: Grid, name: str, reference: Grid, first: str) -> tuple[int, int]:
    """Where a file lies on the grid of the first one, if it is on it."""
    remedy = "pass like=, or crs= with resolution=, to open_raster, which warps them onto one grid"
    if not same_crs(grid.crs, reference.crs):
        raise ValueError(
            f"{name} is in {_crs_text(grid.crs)}, {first} in {_crs_text(reference.crs)}: {remedy}"
        )
    if (grid.transform is None) or (reference.transform is None):
        raise ValueError(f"{name} or {first} has no transform: files of a mosaic need one")
    offset = offset_on(grid, reference)
    if offset is not None:
        return offset
    own, others = (_pixel_text(side) for side in (grid, reference))
    if own != others:
        raise ValueError(f"{name} has pixels of {own}, {first} of {others}: {remedy}")
    relative = ~reference.transform @ grid.transform
    raise ValueError(
        f"{name} lies (row, col) = ({relative.f:.4g}, {relative.c:.4g}) px from {first}: more than "
        f"{ALIGNED} px off whole pixels; {remedy}"
    )


def _on_target(named: Sequence[Named], grid: Grid, resampling: str) -> Source:
    """All sources on a grid, those of one other lattice warped together."""
    groups: list[list[tuple[Source, Window]]] = []
    warped = 0
    for name, source in named:
        area = _area_on(_warpable(source.grid, name), grid)
        if area is None:
            continue
        if _shares_pixels(source.grid, grid):
            groups.append([(source, area)])
            continue
        warped += 1
        _join(groups, source, area, grid)
    if not groups:
        raise ValueError("none of the sources lies on the target grid: check like= or crs=")
    text = f"{warped} of {len(named)} files to {_size_text(grid)}: {resampling}"
    notes = (("mosaic", f"{len(named)} files, later ones on top"),) if len(named) > 1 else ()
    notes = (*notes, ("warped", text)) if warped else notes
    parts = [_group_part(group, grid, resampling) for group in groups]
    return Mosaic.of(grid, parts, notes)


def _join(
    groups: list[list[tuple[Source, Window]]], source: Source, area: Window, grid: Grid
) -> None:
    """Put a source to others of its lattice, unless one between them would then be hidden."""
    for group in reversed(groups):
        there = group[0][0].grid
        same = same_crs(there.crs, source.grid.crs) and offset_on(source.grid, there) is not None
        if same and not _shares_pixels(there, grid):
            group.append((source, area))
            return
        if any(_meet(area, other) for _, other in group):
            break
    groups.append([(source, area)])


def _group_part(group: list[tuple[Source, Window]], grid: Grid, resampling: str) -> Part:
    """Sources of one lattice as a part of a mosaic on the target grid."""
    first = group[0][0]
    if _shares_pixels(first.grid, grid):
        return Part(first, offset_on(first.grid, grid) or (0, 0))
    if len(group) > 1:
        named = [(source.identity, source) for source, _ in group]
        first = mosaic_of(named, TargetGrid())
    area = _around([area for _, area in group])
    return Part(Warped.onto(first, grid, resampling).crop(area), area.origin)


def _placed(source: Source, grid: Grid, resampling: str) -> Source:
    """One source on a grid: warped, or, on the same pixels, cut and filled up."""
    offset = offset_on(source.grid, grid) if same_crs(source.grid.crs, grid.crs) else None
    if offset is None:
        return Warped.onto(source, grid, resampling)
    return Mosaic.of(grid, [Part(source, offset)])


def _shares_pixels(one: Grid, other: Grid) -> bool:
    return same_crs(one.crs, other.crs) and offset_on(one, other) is not None


def _area_on(source: Grid, grid: Grid) -> Window | None:
    """Pixels of a grid that a source may cover; None where it lies beside it."""
    if grid.transform is None or grid.crs is None:
        raise ValueError("the target grid has no transform or no CRS")
    left, bottom, right, top = footprint(source, grid.crs)
    xs, ys = np.array([left, left, right, right]), np.array([bottom, top, bottom, top])
    cols, rows = ~grid.transform @ (xs, ys)
    # A side may bulge between the places at which it was looked at.
    spans = [Span(int(np.floor(at.min())) - 2, int(np.ceil(at.max())) + 2) for at in (rows, cols)]
    area = Window(spans[0], spans[1]).clip(whole_window(grid))
    return area if area.rows.size and area.cols.size else None


def _meet(one: Window, other: Window) -> bool:
    common = one.clip(other)
    return bool(common.rows.size and common.cols.size)


def _finest(named: Sequence[Named]) -> Grid:
    """The grid of the source with the smallest pixels, if the others cover the same ground."""
    name, finest = min(named, key=lambda pair: _pixel_area(pair[1].grid))
    for other, source in named:
        if source.grid == finest.grid:
            continue
        if not same_crs(source.grid.crs, finest.grid.crs):
            raise ValueError(
                f"band {other!r} is in {_crs_text(source.grid.crs)}, {name!r} in "
                f"{_crs_text(finest.grid.crs)}: pass like=, or crs= with resolution=, to "
                "open_raster"
            )
        if source.grid.transform is None or finest.grid.transform is None:
            if source.grid.shape == finest.grid.shape:
                continue
            raise ValueError(
                f"band {other!r} has {source.grid.shape} px, {name!r} {finest.grid.shape}, and "
                "without a transform nothing says how they lie on each other"
            )
    return finest.grid  # type: ignore[no-any-return]


def _pixel_area(grid: Grid) -> float:
    return 1.0 if grid.transform is None else abs(grid.transform.determinant)


def _pixel_text(grid: Grid) -> str:
    if grid.transform is None:
        return "no size"
    sides = grid.transform.e, grid.transform.a
    text = " x ".join(f"{side:.10g}" for side in sides)
    turned = grid.transform.b or grid.transform.d
    return f"{text} (turned by {grid.transform.d:.6g}, {grid.transform.b:.6g})" if turned else text


def _crs_text(crs: str | None) -> str:
    if crs is None:
        return "no CRS"
    code = crs_of(crs).to_epsg()
    return f"EPSG:{code}" if code else crs_of(crs).to_string()[:80]


def _size_text(grid: Grid) -> str:
    return f"{grid.height} x {grid.width} px of {_pixel_text(grid)} in {_crs_text(grid.crs)}"
