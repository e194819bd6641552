"""`BandStack`: the bands of several sources of one grid as one source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from ..grid import Grid
from ..pixels import Pixels
from ..selection import Bands, find_bands
from ..tiling import Window
from .protocol import Composite, aliases_of, digest_of

__all__ = ["BandStack"]


@dataclass(frozen=True)
class BandStack(Composite):
    """Sources of one grid, their bands one after another.

    A pixel is nodata where it is in any of them.

    Attributes
    ----------
    stacked : tuple of Source
    band_names : tuple of str
        Of all bands in order, whatever the sources call them.
    notes : tuple of (str, str)
        Rows for a plan.
    """

    stacked: tuple[Any, ...]
    band_names: tuple[str, ...]
    notes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if len({source.grid.shape for source in self.stacked}) != 1:
            raise ValueError("bands of a stack must have one grid")

    @property
    def sources(self) -> tuple[Any, ...]:
        """Those whose bands it has."""
        return self.stacked

    @property
    def grid(self) -> Grid:  # type: ignore[override]
        """Of every source."""
        grid: Grid = self.stacked[0].grid
        return grid

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """One that holds the numbers of all."""
        return str(np.result_type(*(source.dtype for source in self.stacked)))

    @property
    def scales(self) -> tuple[float, ...]:
        """Scale per band."""
        return self._each("scales")

    @property
    def offsets(self) -> tuple[float, ...]:
        """Offset per band."""
        return self._each("offsets")

    @property
    def nodata(self) -> tuple[float | int | None, ...]:
        """Nodata per band."""
        return self._each("nodata")

    def _each(self, name: str) -> tuple[Any, ...]:
        return tuple(value for source in self.stacked for value in getattr(source, name))

    @property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Other names of each band."""
        return tuple(known for source in self.stacked for known in aliases_of(source))

    @property
    def has_mask(self) -> bool:
        """Whether any pixel can be nodata."""
        return any(source.has_mask for source in self.stacked)

    @cached_property
    def identity(self) -> str:
        """A digest of what its sources are."""
        facts = [(source.identity, source.band_names) for source in self.stacked]
        return f"bands of {len(facts)}, {digest_of(*facts)}"

    @property
    def block(self) -> tuple[int, int]:
        """``(height, width)`` of the storage blocks of its first file."""
        block: tuple[int, int] = self.stacked[0].block
        return block

    def select(self, bands: Bands) -> BandStack:
        """The stack with these bands only, in this order."""
        if bands is None:
            return self
        places = [(i, name) for i, source in enumerate(self.stacked) for name in source.band_names]
        picked = find_bands(bands, self.band_names, "the stack", self.aliases)
        chosen = []
        for i, group in groupby((places[k] for k in picked), key=lambda place: place[0]):
            chosen.append(self.stacked[i].select([name for _, name in group]))
        return BandStack(tuple(chosen), tuple(self.band_names[k] for k in picked), self.notes)

    def crop(self, window: Window) -> BandStack:
        """A window of the stack, as a stack."""
        cropped = tuple(source.crop(window) for source in self.stacked)
        return BandStack(cropped, self.band_names, self.notes)

    def read(self, window: Window) -> Pixels:
        """Pixels of a window in all bands."""
        self.check(window)
        return self._joined([source.read(window) for source in self.stacked])

    def cache_bytes(self, window: Window, threads: int = 1) -> int:
        """Bytes of cache with which tiles of windows like this one are read once."""
        return sum(source.cache_bytes(window, threads) for source in self.stacked)

    def thinned(self, largest: int) -> Pixels:
        """Every n-th pixel of the whole raster."""
        return self._joined([source.thinned(largest) for source in self.stacked])

    def _joined(self, each: Sequence[Pixels]) -> Pixels:
        data = np.concatenate([pixels.data for pixels in each], dtype=self.dtype)
        masks = [pixels.valid for pixels in each if pixels.valid is not None]
        return Pixels(data, np.logical_and.reduce(masks) if masks else None)
