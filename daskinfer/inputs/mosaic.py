"""`Mosaic`: rasters side by side on one grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..grid import Grid
from ..pixels import Array, Pixels
from ..selection import Bands, find_bands
from ..tiling import Span, Window
from .protocol import Composite, Source, digest_of, whole_window

__all__ = ["Mosaic", "Part"]


@dataclass(frozen=True)
class Part:
    """A source and the pixel ``(row, col)`` of the mosaic on which its first one lies."""

    source: Any
    origin: tuple[int, int]

    @property
    def window(self) -> Window:
        """What it covers, in pixels of the mosaic; may reach outside of it."""
        (row, col), (height, width) = self.origin, self.source.grid.shape
        return Window(Span(row, row + height), Span(col, col + width))


@dataclass(frozen=True)
class Mosaic(Composite):
    """Sources on one grid, later ones over earlier ones; what none covers is nodata.

    Only valid pixels of a source count: below the nodata of a later one an earlier one shows.  This
    is the order of ``gdalbuildvrt`` and ``gdalwarp``; ``rasterio.merge`` takes the first.

    Attributes
    ----------
    grid : Grid
    parts : tuple of Part
        In order, the last on top.
    band_names, dtype, scales, offsets
        Of every source.
    nodata : tuple of (float or None)
        The number that stands in gaps, where the sources have one for all.
    notes : tuple of (str, str)
        Rows for a plan.
    """

    grid: Grid
    parts: tuple[Part, ...]
    band_names: tuple[str, ...]
    dtype: str
    scales: tuple[float, ...]
    offsets: tuple[float, ...]
    nodata: tuple[float | int | None, ...]
    notes: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls, grid: Grid, parts: Sequence[Part], notes: tuple[tuple[str, str], ...] = ()
    ) -> Mosaic:
        """Parts, at least one, whose bands and dtype agree."""
        first: Source = parts[0].source
        same = all(part.source.nodata == first.nodata for part in parts)
        return cls(
            grid,
            tuple(parts),
            first.band_names,
            first.dtype,
            first.scales,
            first.offsets,
            first.nodata if same else (None,) * len(first.band_names),
            notes,
        )

    @property
    def sources(self) -> tuple[Any, ...]:
        """Those side by side."""
        return tuple(part.source for part in self.parts)

    @cached_property
    def identity(self) -> str:
        """A digest of what its sources are, and where."""
        parts = [(part.source.identity, part.origin) for part in self.parts]
        return f"mosaic of {len(parts)}, {digest_of(repr(self.grid), *parts)}"

    @property
    def block(self) -> tuple[int, int]:
        """``(height, width)`` of the storage blocks of its first file."""
        return self.parts[0].source.block if self.parts else (512, 512)

    def select(self, bands: Bands) -> Mosaic:
        """The mosaic with these bands only, in this order."""
        if bands is None:
            return self
        picked = find_bands(bands, self.band_names, "the mosaic", self.aliases)

        def chosen(source: Any) -> Any:
            # The names of a file's bands may be others than those of the mosaic.
            return source.select([source.band_names[i] for i in picked])

        return replace(
            self,
            parts=tuple(Part(chosen(part.source), part.origin) for part in self.parts),
            band_names=tuple(self.band_names[i] for i in picked),
            scales=tuple(self.scales[i] for i in picked),
            offsets=tuple(self.offsets[i] for i in picked),
            nodata=tuple(self.nodata[i] for i in picked),
        )

    def crop(self, window: Window) -> Mosaic:
        """A window of the mosaic, as a mosaic of the sources that reach into it."""
        row, col = window.origin
        parts = tuple(
            Part(part.source, (part.origin[0] - row, part.origin[1] - col))
            for part in (self.parts[i] for i in self._touching(window))
        )
        return replace(self, grid=self.grid.window(window), parts=parts)

    def read(self, window: Window) -> Pixels:
        """Pixels of a window; sources that others hide there are not read."""
        self.check(window)
        data = self._gap(window.shape)
        valid = np.zeros(window.shape, np.bool_)
        for i in reversed(self._touching(window)):
            part = self.parts[i]
            area = part.window.clip(window)
            here = area.slices(window.origin)
            if valid[here].all():
                continue
            rows, cols = (
                Span(span.start - start, span.stop - start)
                for span, start in zip(area, part.origin, strict=True)
            )
            pixels: Pixels = part.source.read(Window(rows, cols))
            free = ~valid[here] if pixels.valid is None else ~valid[here] & pixels.valid
            np.copyto(data[:, *here], pixels.data, where=free)
            valid[here] |= free
        return Pixels(data, None if valid.all() else valid)

    def cache_bytes(self, window: Window, threads: int = 1) -> int:
        """Bytes of cache with which tiles of windows like this one are read once."""
        need = 0
        for i in self._touching(window):
            part = self.parts[i]
            area = part.window.clip(window)
            rows, cols = (
                Span(span.start - start, span.stop - start)
                for span, start in zip(area, part.origin, strict=True)
            )
            need += part.source.cache_bytes(Window(rows, cols), threads)
        return need

    def thinned(self, largest: int) -> Pixels:
        """About every n-th pixel, from the overviews of the files that have some."""
        step = max(1, -(-max(self.grid.shape) // largest))
        shape = tuple(-(-side // step) for side in self.grid.shape)
        data, valid = self._gap((shape[0], shape[1])), np.zeros(shape, np.bool_)
        for part in self.parts:
            area = part.window.clip(whole_window(self.grid))
            spans = [range(-(-span.start // step), -(-span.stop // step)) for span in area]
            if not all(spans):
                continue
            thin: Pixels = part.source.thinned(max(1, -(-max(part.source.grid.shape) // step)))
            at = np.ix_(
                *(
                    (np.arange(span.start, span.stop) * step - start) * have // size
                    for span, start, have, size in zip(
                        spans, part.origin, thin.data.shape[1:], part.source.grid.shape, strict=True
                    )
                )
            )
            here = tuple(slice(span.start, span.stop) for span in spans)
            own = np.ones(thin.data.shape[1:], np.bool_) if thin.valid is None else thin.valid
            np.copyto(data[:, *here], thin.data[:, *at], where=own[at])
            valid[here] |= own[at]
        return Pixels(data, None if valid.all() else valid)

    def _gap(self, shape: tuple[int, int]) -> Array:
        """Pixels that no source covers."""
        kind = np.dtype(self.dtype).kind
        data: Array = np.zeros((len(self.band_names), *shape), self.dtype)
        for band, value in zip(data, self.nodata, strict=True):
            if value is not None and (kind == "f" or _fits(value, self.dtype)):
                band[:] = value
            elif kind == "f":
                band[:] = np.nan
        return data

    @cached_property
    def _edges(self) -> npt.NDArray[np.int64]:
        """Row and column spans of all parts: asking each of thousands for every tile is slow."""
        edges = [[*part.window.rows, *part.window.cols] for part in self.parts]
        return np.array(edges, np.int64).reshape(-1, 4)

    def _touching(self, window: Window) -> list[int]:
        """Numbers of the parts that reach into a window, in order."""
        rows, cols = window
        edges = self._edges
        hit = (edges[:, 0] < rows.stop) & (edges[:, 1] > rows.start)
        hit &= (edges[:, 2] < cols.stop) & (edges[:, 3] > cols.start)
        return [int(i) for i in np.flatnonzero(hit)]


def _fits(value: float | int, dtype: str) -> bool:
    if np.isnan(value) or np.dtype(dtype).kind == "b":
        return False
    limits = np.iinfo(dtype)
    return float(value).is_integer() and limits.min <= value <= limits.max
