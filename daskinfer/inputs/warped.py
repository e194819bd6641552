"""`Warped`: a source resampled onto another grid, window by window.

Each pixel is computed in a cell of a lattice that is fixed to the target grid, whatever window asks
for it, and with kernels of one size: GDAL approximates the transform, and sizes its kernels, anew
for each rectangle it is given, so that windows of their own would leave lines where they meet.
What is read is a window of the source, all of its files together: kernels see across the edges
between files of one grid.

A pixel exists where its centre lies on a valid pixel of the source; nodata is left out of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from affine import Affine
from rasterio.enums import Resampling
from rasterio.warp import reproject
from rasterio.warp import transform as transform_points

from ..blockcache import Cells, shared_cache
from ..grid import Grid
from ..pixels import Array, Mask, Pixels
from ..selection import Bands
from ..tiling import Span, Window
from .lattice import crs_of, same_crs
from .protocol import Composite, digest_of, leaves, whole_window

__all__ = ["RESAMPLINGS", "Warped", "resampling_name"]

# Pixels to each side that a kernel needs where the source is not finer than the target.
_RADIUS = {"nearest": 1, "bilinear": 1, "cubic": 2, "cubic_spline": 2, "lanczos": 3}
_RADIUS |= dict.fromkeys(("average", "mode", "max", "min", "med", "q1", "q3", "rms"), 1)
RESAMPLINGS = tuple(_RADIUS)

_CELL = 256
# Pixels of the source along a side of a cell, about, at most: cells of a coarse target are small.
_MOST_SOURCE = 2048
# Along each side of a cell its place in the source is looked at.
_PLACES = 9
# As GDAL has it: below this, kernels are not widened.
_SAME = 0.05


def resampling_name(resampling: Any) -> str:
    """The name of a resampling, given as that or as rasterio's enum.

    >>> resampling_name("Bilinear"), resampling_name(Resampling.nearest)
    ('bilinear', 'nearest')
    """
    name = resampling.name if isinstance(resampling, Resampling) else str(resampling).lower()
    if name not in _RADIUS:
        raise ValueError(f"resampling must be one of {', '.join(RESAMPLINGS)}, got {resampling!r}")
    return name


@dataclass(frozen=True)
class Warped(Composite):
    """A source on another grid.  Made by `Warped.onto`.

    Attributes
    ----------
    source : Source
    target : Grid
        The whole grid onto which it is warped.
    window : Window
        The part of it that this is.
    resampling : str
    ratio : tuple of float
        Source pixels per target pixel, ``(y, x)``.
    """

    source: Any
    target: Grid
    window: Window
    resampling: str
    ratio: tuple[float, float]

    @classmethod
    def onto(cls, source: Any, target: Grid, resampling: str) -> Warped:
        """Warp a source onto a grid.

        Raises
        ------
        ValueError
            If one of the two has no transform or CRS, or they do not meet.
        """
        for what, grid in (("the source", source.grid), ("the target grid", target)):
            if grid.transform is None or (grid.crs is None) != (target.crs is None):
                raise ValueError(
                    f"{what} has no transform or no CRS, so that it cannot be warped: "
                    "georeference it first (gdalwarp does it from ground control points and RPCs)"
                )
        ratio = _ratio(source.grid, target)
        return cls(source, target, whole_window(target), resampling, ratio)

    @property
    def sources(self) -> tuple[Any, ...]:
        """What is warped."""
        return (self.source,)

    @cached_property
    def grid(self) -> Grid:  # type: ignore[override]
        """Of the part that is used."""
        return self.target.window(self.window)

    @property
    def band_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Of the source."""
        names: tuple[str, ...] = self.source.band_names
        return names

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """Of the source."""
        return str(self.source.dtype)

    @property
    def scales(self) -> tuple[float, ...]:
        """Of the source."""
        scales: tuple[float, ...] = self.source.scales
        return scales

    @property
    def offsets(self) -> tuple[float, ...]:
        """Of the source."""
        offsets: tuple[float, ...] = self.source.offsets
        return offsets

    @property
    def nodata(self) -> tuple[float | int | None, ...]:
        """Of the source."""
        nodata: tuple[float | int | None, ...] = self.source.nodata
        return nodata

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """What was done, as a row of a plan."""
        there, ratio = self.source.grid, "x".join(f"{side:.3g}" for side in self.ratio)
        text = f"{there.height} x {there.width} px, {self.resampling}, {ratio} px to one"
        return (("warped", text),)

    @cached_property
    def identity(self) -> str:
        """A digest of the source, the grid and how it is warped."""
        facts = self.source.identity, repr(self.target), self.resampling, self.window.bounds()
        return f"warped, {digest_of(*facts)}"

    @property
    def block(self) -> tuple[int, int]:
        """``(height, width)`` of the cells in which it is computed."""
        finest = max(1.0, *self.ratio)
        side = _CELL
        while side > 16 and side * finest > _MOST_SOURCE:
            side //= 2
        return side, side

    def select(self, bands: Bands) -> Warped:
        """The source with these bands only, in this order."""
        return self if bands is None else replace(self, source=self.source.select(bands))

    def crop(self, window: Window) -> Warped:
        """A window of it; its pixels stay the same."""
        row, col = self.window.origin
        rows, cols = window
        moved = Window(
            Span(rows.start + row, rows.stop + row), Span(cols.start + col, cols.stop + col)
        )
        return replace(self, window=moved)

    def read(self, window: Window) -> Pixels:
        """Pixels of a window, through the cache of computed cells that this process has."""
        self.check(window)
        return shared_cache().read(self._key, self._cells, window, self._compute)

    def cache_bytes(self, window: Window, threads: int = 1) -> int:
        """Bytes of cache with which tiles of windows like this one are computed once."""
        own = self._cells.nbytes_touched(window) * threads
        area = self._source_window(self._targeted(window))
        below = 0 if area is None else int(self.source.cache_bytes(area, threads))
        return own + below

    def thinned(self, largest: int) -> Pixels:
        """About every n-th pixel, from overviews of the source where it has some."""
        step = max(1, -(-max(self.grid.shape) // largest))
        height, width = (-(-side // step) for side in self.grid.shape)
        ratio = max(1.0, step * min(self.ratio))
        thin = self.source.thinned(max(1, math.ceil(max(self.source.grid.shape) / ratio)))
        scale = [
            have / size
            for have, size in zip(self.source.grid.shape, thin.data.shape[1:], strict=True)
        ]
        there = self.source.grid.transform @ Affine.scale(scale[1], scale[0])
        here = self.grid.transform @ Affine.scale(step) if self.grid.transform else None
        return self._warped(thin, there, here, (height, width), "nearest", None, inside=False)

    @cached_property
    def _cells(self) -> Cells:
        pixel = len(self.band_names) * np.dtype(self.dtype).itemsize + 1
        return Cells.of(self.grid.shape, self.block, self.window.origin, pixel)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        # Decoded pixels of URLs and VRTs are shared by who has the same description only.
        opened = tuple(raster.opened for raster in leaves(self.source))
        return self.identity, self.band_names, digest_of(*opened)

    def _targeted(self, window: Window) -> Window:
        """A window of this in pixels of the whole target grid."""
        rows, cols = (
            Span(span.start + start, span.stop + start)
            for span, start in zip(window, self.window.origin, strict=True)
        )
        return Window(rows, cols)

    def _compute(self, window: Window) -> Pixels:
        """Pixels of a window, cell by cell."""
        wanted = self._targeted(window)
        data: Array = np.zeros((len(self.band_names), *window.shape), self.dtype)
        valid = np.zeros(window.shape, np.bool_)
        for cell in self._cells_of(wanted):
            area = cell.clip(wanted)
            pixels = self._cell(cell).cut(*area.slices(cell.origin))
            here = area.slices(wanted.origin)
            data[:, *here] = pixels.data
            valid[here] = True if pixels.valid is None else pixels.valid
        return Pixels(data, None if valid.all() else valid)

    def _cells_of(self, window: Window) -> Iterator[Window]:
        """Cells of the lattice that a window of the target grid touches, inside that grid."""
        side = self.block[0]
        rows, cols = (range(span.start // side, -(-span.stop // side)) for span in window)
        for i in rows:
            for j in cols:
                cell = Window(Span(i * side, (i + 1) * side), Span(j * side, (j + 1) * side))
                yield cell.clip(whole_window(self.target))

    def _cell(self, cell: Window) -> Pixels:
        area = self._source_window(cell)
        if area is None:
            data: Array = np.zeros((len(self.band_names), *cell.shape), self.dtype)
            return Pixels(data, np.zeros(cell.shape, np.bool_))
        inside = area.clip(whole_window(self.source.grid))
        pixels = self.source.read(inside)
        return self._warped(
            pixels,
            self.source.grid.window(inside).transform,
            self.target.window(cell).transform,
            cell.shape,
            self.resampling,
            self.ratio,
            inside=inside == area,
        )

    def _warped(
        self,
        pixels: Pixels,
        there: Affine | None,
        here: Affine | None,
        shape: tuple[int, int],
        resampling: str,
        ratio: tuple[float, float] | None,
        *,
        inside: bool,
    ) -> Pixels:
        """Resample pixels at hand; `inside` if all of the target lies on them."""
        georeferencing: dict[str, Any] = {
            "src_transform": there,
            "dst_transform": here,
            "src_crs": crs_of(self.source.grid.crs or "EPSG:3857"),
            "dst_crs": crs_of(self.target.crs or "EPSG:3857"),
            "resampling": Resampling[resampling],
        }
        if ratio is not None and resampling in ("bilinear", "cubic", "cubic_spline", "lanczos"):
            for name, side in (("YSCALE", ratio[0]), ("XSCALE", ratio[1])):
                georeferencing[name] = 1.0 if abs(side - 1) < _SAME else 1 / side
        data = _safe(pixels.data)
        if inside and pixels.valid is None:
            result = np.zeros((len(data), *shape), data.dtype)
            reproject(data, result, **georeferencing)
            return Pixels(result.astype(self.dtype), None)
        if resampling == "nearest":
            return _nearest(data, pixels.valid, shape, self.dtype, georeferencing)
        return _around_nodata(data, pixels.valid, shape, self.dtype, georeferencing)

    def _source_window(self, cell: Window) -> Window | None:
        """Pixels of the source that a cell needs, in part maybe outside; None where none."""
        rows, cols = (np.linspace(*span, _PLACES) for span in cell)
        x, y = np.meshgrid(cols, rows)
        transform, back = self.target.transform, self.source.grid.transform
        if transform is None or back is None:
            return None
        x, y = transform @ (x.ravel(), y.ravel())
        if self.target.crs is not None and not same_crs(self.target.crs, self.source.grid.crs):
            x, y = map(
                np.asarray,
                transform_points(crs_of(self.target.crs), crs_of(self.source.grid.crs), x, y),
            )
        x, y = ~back @ (x, y)
        known = np.isfinite(x) & np.isfinite(y)
        if not known.any():
            return None
        radius = _RADIUS[self.resampling]
        spans = []
        for at, ratio in ((y[known], self.ratio[0]), (x[known], self.ratio[1])):
            # Between the places looked at, a side may bulge.
            bulge = 0.02 * (at.max() - at.min())
            margin = math.ceil((radius + 1) * max(1.0, ratio) + 2 + bulge)
            spans.append(Span(math.floor(at.min()) - margin, math.ceil(at.max()) + margin))
        window = Window(spans[0], spans[1])
        touched = window.clip(whole_window(self.source.grid))
        return window if math.prod(touched.shape) else None


def _nearest(
    data: Array, valid: Mask | None, shape: tuple[int, int], dtype: str, georeferencing: Any
) -> Pixels:
    """Nearest neighbours, whatever is nodata."""
    result = np.zeros((len(data), *shape), data.dtype)
    reproject(data, result, **georeferencing)
    # Also where all are valid: outside of the source nothing is.
    own = np.ones(data.shape[1:], np.uint8) if valid is None else valid.astype(np.uint8)
    mask = np.zeros(shape, np.uint8)
    reproject(own, mask, **georeferencing)
    return Pixels(result.astype(dtype), None if mask.all() else mask > 0)


def _around_nodata(
    data: Array, valid: Mask | None, shape: tuple[int, int], dtype: str, georeferencing: Any
) -> Pixels:
    """Kernels that leave nodata out, which NaN in a float array has GDAL do."""
    # float32 holds what has no more than 24 bits.
    small = data.dtype == np.float32 or data.dtype.itemsize <= 2
    holed = data.astype(np.float32 if small else np.float64)
    if valid is not None:
        holed[:, ~valid] = np.nan
    result = np.full((len(data), *shape), np.nan, holed.dtype)
    reproject(holed, result, src_nodata=np.nan, dst_nodata=np.nan, **georeferencing)
    mask: Mask = np.asarray(~np.isnan(result).any(axis=0))
    return Pixels(_back(result, mask, dtype), None if mask.all() else mask)


def _back(values: Array, mask: Mask, dtype: str) -> Array:
    """Floats as numbers of another dtype, rounded and clipped as GDAL does."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return values.astype(dtype)
    if kind.kind == "b":
        return np.where(mask, values, 0) >= 0.5
    limits = np.iinfo(dtype)
    rounded = np.floor(np.where(mask, values, 0) + 0.5)
    clipped: Array = np.clip(rounded, limits.min, limits.max).astype(dtype)
    return clipped


def _safe(data: Array) -> Array:
    """The array in a dtype that GDAL warps."""
    if data.dtype.kind == "b":
        return data.astype(np.uint8)
    if data.dtype == np.float16:
        return data.astype(np.float32)
    return np.ascontiguousarray(data.astype(data.dtype.newbyteorder("="), copy=False))


def _ratio(source: Grid, target: Grid) -> tuple[float, float]:
    """Source pixels per target pixel ``(y, x)``, where the two meet."""
    if source.transform is None or target.transform is None:
        raise ValueError("a raster without transform has no pixel size")
    col, row = source.width / 2, source.height / 2
    x, y = source.transform @ (np.array([col, col + 1, col]), np.array([row, row, row + 1]))
    if source.crs is not None and target.crs is not None and not same_crs(source.crs, target.crs):
        x, y = map(np.asarray, transform_points(crs_of(source.crs), crs_of(target.crs), x, y))
    x, y = ~target.transform @ (np.asarray(x), np.asarray(y))
    steps = np.array([[y[1] - y[0], y[2] - y[0]], [x[1] - x[0], x[2] - x[0]]])
    sizes = np.abs(steps).max(axis=1)
    if not np.isfinite(sizes).all() or not sizes.all():
        raise ValueError("the source has no place on the target grid: choose another crs")
    return float(1 / sizes[0]), float(1 / sizes[1])
