"""`TimeStack`: dates of one place as one source, their bands one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..grid import Grid
from ..pixels import Array, Mask, Pixels
from ..selection import Bands, find_bands
from ..tiling import Window
from .protocol import Composite, aliases_of, digest_of

__all__ = ["TimeStack", "day_of", "holed_dtype"]


def day_of(time: Any) -> str:
    """A time as the second it is, or as its day where it says no more.

    >>> day_of("2020-06-01T00:00:00Z"), day_of(np.datetime64("2020-06-01T10:20:30"))
    ('2020-06-01', '2020-06-01T10:20:30')
    """
    text = str(time)
    try:
        # NumPy knows no time zones; STAC's are UTC.
        moment = np.datetime64(text.removesuffix("Z").removesuffix("+00:00"), "s")
    except ValueError as error:
        raise ValueError(
            f"time {text!r} is no date: write it as 2020-06-01 or 2020-06-01T10:20:30"
        ) from error
    if np.isnat(moment):
        raise ValueError(f"time {text!r} is no date")
    day = moment.astype("datetime64[D]")
    return str(day) if moment == day else str(moment)


def holed_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Floats that hold numbers of a dtype, and NaN.

    >>> holed_dtype(np.dtype("uint16")), holed_dtype(np.dtype("int32"))
    (dtype('float32'), dtype('float64'))
    """
    if dtype.kind == "f":
        return dtype
    return np.dtype("float32" if dtype.itemsize <= 2 else "float64")


@dataclass(frozen=True)
class TimeStack(Composite):
    """Sources of one grid in order of time, or nothing where a date has none.

    What a date lacks is NaN, so that the model sees its fill there; a pixel is nodata where every
    date lacks it.

    Attributes
    ----------
    steps : tuple of (Source or None)
    times : tuple of str
        As `day_of` writes them.
    picked : tuple of int or None
        Numbers of the bands that are used, of all dates, from 0; None for all.
    """

    steps: tuple[Any, ...]
    times: tuple[str, ...]
    picked: tuple[int, ...] | None = None

    def __dask_tokenize__(self) -> object:
        return type(self).__qualname__, self.identity, self.picked, repr(self.grid)

    @property
    def sources(self) -> tuple[Any, ...]:
        """Those that are there."""
        return tuple(step for step in self.steps if step is not None)

    @property
    def grid(self) -> Grid:  # type: ignore[override]
        """Of every date."""
        grid: Grid = self.sources[0].grid
        return grid

    @property
    def bands(self) -> tuple[str, ...]:
        """Of each date."""
        names: tuple[str, ...] = self.sources[0].band_names
        return names

    @cached_property
    def holes(self) -> bool:
        """Whether any date may lack a pixel."""
        return any(step is None or step.has_mask for step in self.steps)

    @property
    def band_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Time and band of each."""
        return self._of_picked([f"{time}/{band}" for time in self.times for band in self.bands])

    @property
    def dates(self) -> tuple[str, ...]:
        """Time of each band."""
        return self._of_picked([time for time in self.times for _ in self.bands])

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """Floats, where dates lack pixels."""
        own = np.dtype(self.sources[0].dtype)
        return str(holed_dtype(own) if self.holes else own)

    @property
    def scales(self) -> tuple[float, ...]:
        """Scale per band."""
        return self._of_picked(list(self.sources[0].scales) * len(self.times))

    @property
    def offsets(self) -> tuple[float, ...]:
        """Offset per band."""
        return self._of_picked(list(self.sources[0].offsets) * len(self.times))

    @property
    def nodata(self) -> tuple[float | int | None, ...]:
        """NaN, where dates lack pixels."""
        value = float("nan") if self.holes else None
        return self._of_picked([value] * (len(self.times) * len(self.bands)))

    def _of_picked(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values if self.picked is None else (values[i] for i in self.picked))

    @property
    def has_mask(self) -> bool:
        """Whether any pixel can be nodata at all dates."""
        return self.holes

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """What it is made of, for a plan."""
        count = len(self.times)
        missing = f", {count - len(self.sources)} of them missing" if None in self.steps else ""
        text = f"{count} dates, {self.times[0]} to {self.times[-1]}{missing}"
        rest = [note for note in self.sources[0].notes if note[0] == "warped"]
        return (("time", text), *rest)

    @cached_property
    def identity(self) -> str:
        """A digest of what its dates are."""
        facts = [
            (time, None if step is None else step.identity)
            for time, step in zip(self.times, self.steps, strict=True)
        ]
        return f"{len(facts)} dates, {digest_of(*facts)}"

    @property
    def block(self) -> tuple[int, int]:
        """Of the first date."""
        block: tuple[int, int] = self.sources[0].block
        return block

    def select(self, bands: Bands) -> TimeStack:
        """The stack with these bands only: of every date, or ``time/band`` of some."""
        if bands is None:
            return self
        if self.picked is None and not set(map(str, bands)) & set(self.band_names):
            picked = find_bands(bands, self.bands, "a date", aliases_of(self.sources[0]))
            names = [self.bands[i] for i in picked]
            steps = tuple(None if step is None else step.select(names) for step in self.steps)
            return replace(self, steps=steps)
        found = find_bands(bands, self.band_names, "the stack")
        chosen = range(len(self.times) * len(self.bands)) if self.picked is None else self.picked
        return replace(self, picked=tuple(chosen[i] for i in found))

    def crop(self, window: Window) -> TimeStack:
        """A window of every date."""
        return replace(
            self,
            steps=tuple(None if step is None else step.crop(window) for step in self.steps),
        )

    @cached_property
    def _used(self) -> tuple[tuple[Any, tuple[int, ...]], ...]:
        """Of each date of which bands are picked: its source with these alone, and their places.

        What is nodata in other bands, or at other dates, is not in these.
        """
        count = len(self.bands)
        picked = range(len(self.times) * count) if self.picked is None else self.picked
        used = []
        for date, step in enumerate(self.steps):
            places = tuple(place for place, i in enumerate(picked) if i // count == date)
            names = [self.bands[picked[place] % count] for place in places]
            if step is not None and places and names != list(self.bands):
                step = step.select(names)
            if places:
                used.append((step, places))
        return tuple(used)

    def read(self, window: Window) -> Pixels:
        """Pixels of a window at all dates."""
        self.check(window)
        each = [None if s is None else s.read(window) for s, _ in self._used]
        return self._joined(each, window.shape)

    def thinned(self, largest: int) -> Pixels:
        """Every n-th pixel of the whole raster."""
        each = [None if s is None else s.thinned(largest) for s, _ in self._used]
        shapes = [pixels.data.shape[1:] for pixels in each if pixels is not None]
        step = max(1, -(-max(self.grid.shape) // largest))
        height, width = shapes[0] if shapes else (-(-side // step) for side in self.grid.shape)
        return self._joined(each, (height, width))

    def cache_bytes(self, window: Window, threads: int = 1) -> int:
        """Bytes of cache with which tiles of windows like this one are read once."""
        return sum(s.cache_bytes(window, threads) for s, _ in self._used if s is not None)

    def _joined(self, each: Sequence[Pixels | None], shape: tuple[int, int]) -> Pixels:
        data: Array = np.empty((len(self.band_names), *shape), self.dtype)
        valid: Mask = np.zeros(shape, np.bool_)
        for (_, places), pixels in zip(self._used, each, strict=True):
            if pixels is None:
                data[list(places)] = np.nan
                continue
            own = np.ones(shape, np.bool_) if pixels.valid is None else pixels.valid
            data[list(places)] = np.where(own, pixels.data, np.nan) if self.holes else pixels.data
            valid |= own
        return Pixels(data, None if valid.all() else valid)
