"""`Physical`: a source in physical values, for files of one mosaic that are scaled differently."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..grid import Grid
from ..pixels import Pixels
from ..selection import Bands
from ..tiling import Window
from .protocol import Composite

__all__ = ["Physical"]


@dataclass(frozen=True)
class Physical(Composite):
    """A source with its scale and offset applied, in float32; nodata is NaN.

    Attributes
    ----------
    source : Source
    """

    source: Any

    @property
    def sources(self) -> tuple[Any, ...]:
        """The source of the raw numbers."""
        return (self.source,)

    @property
    def physical(self) -> bool:
        """Yes."""
        return True

    @property
    def grid(self) -> Grid:  # type: ignore[override]
        """Of the source."""
        grid: Grid = self.source.grid
        return grid

    @property
    def band_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Of the source."""
        names: tuple[str, ...] = self.source.band_names
        return names

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """Of physical values."""
        return "float32"

    @property
    def scales(self) -> tuple[float, ...]:
        """Applied already."""
        return (1.0,) * len(self.band_names)

    @property
    def offsets(self) -> tuple[float, ...]:
        """Applied already."""
        return (0.0,) * len(self.band_names)

    @property
    def nodata(self) -> tuple[float | int | None, ...]:
        """NaN."""
        return (float("nan"),) * len(self.band_names)

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """Of the source."""
        notes: tuple[tuple[str, str], ...] = self.source.notes
        return notes

    @property
    def block(self) -> tuple[int, int]:
        """Of the source."""
        block: tuple[int, int] = self.source.block
        return block

    @property
    def identity(self) -> str:
        """Of the source, with the numbers that are applied."""
        return f"physical|{self.source.scales}|{self.source.offsets}|{self.source.identity}"

    def select(self, bands: Bands) -> Physical:
        """The source with these bands only, in this order."""
        return self if bands is None else replace(self, source=self.source.select(bands))

    def crop(self, window: Window) -> Physical:
        """A window of the source."""
        return replace(self, source=self.source.crop(window))

    def read(self, window: Window) -> Pixels:
        """Physical values of a window."""
        return self._applied(self.source.read(window))

    def thinned(self, largest: int) -> Pixels:
        """Every n-th pixel of the whole raster."""
        return self._applied(self.source.thinned(largest))

    def cache_bytes(self, window: Window, threads: int = 1) -> int:
        """Bytes of cache with which tiles of windows like this one are read once."""
        return int(self.source.cache_bytes(window, threads))

    def _applied(self, pixels: Pixels) -> Pixels:
        scale, offset = (
            np.asarray(values, np.float64)[:, None, None]
            for values in (self.source.scales, self.source.offsets)
        )
        values = (pixels.data * scale + offset).astype(np.float32)
        if pixels.valid is not None:
            values[:, ~pixels.valid] = np.nan
        return Pixels(values, pixels.valid)
