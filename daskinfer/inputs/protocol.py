"""`Source`: what the engine needs of a raster; and what sources made of others share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from ..blockcache import shared_cache
from ..grid import Grid
from ..handles import digest_of
from ..pixels import Pixels, cutter
from ..raster import Raster
from ..remote import is_remote, served
from ..selection import Bands
from ..tiling import Span, Window

__all__ = ["Composite", "Source", "aliases_of", "digest_of", "leaves", "served_state",
           "whole_window"]  # fmt: skip

C = TypeVar("C", bound="Composite")

# More would be a burst on a server.
_ASKING = 8


class Source(Protocol):
    """What the engine needs of a raster; `Raster` reads files, `ArraySource` computes arrays."""

    @property
    def grid(self) -> Grid:
        """Shape and georeferencing."""
        ...

    @property
    def band_names(self) -> tuple[str, ...]:
        """One name per band."""
        ...

    @property
    def dtype(self) -> str:
        """Dtype of the raw numbers."""
        ...

    @property
    def scales(self) -> tuple[float, ...]:
        """Scale per band, from raw numbers to physical values."""
        ...

    @property
    def offsets(self) -> tuple[float, ...]:
        """Offset per band."""
        ...

    @property
    def nodata(self) -> tuple[float | int | None, ...]:
        """Nodata per band, on raw numbers."""
        ...

    @property
    def identity(self) -> str:
        """Changes when the content may have changed."""
        ...

    @property
    def striped(self) -> bool:
        """Whether it is stored in strips as wide as it is, and in more than one."""
        ...

    @property
    def remote(self) -> bool:
        """Whether reading goes over a network."""
        ...

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """What was done to make it, as rows ``(name, text)`` of a plan."""
        ...

    def changed(self) -> bool:
        """Whether the content is another one than was described."""
        ...

    def select(self, bands: Bands) -> Source:
        """The source with these bands only, in this order."""
        ...

    def crop(self, window: Window) -> Source:
        """A window of the source, as a source."""
        ...

    def read(self, window: Window) -> Pixels:
        """Pixels of a window inside the raster."""
        ...

    def reader(self, window: Window) -> Callable[[Window], Pixels]:
        """Gives the pixels of windows inside this one, which will all be asked for."""
        ...

    def cache_bytes(self, window: Window, threads: int = 1) -> int:
        """Bytes of cache with which tiles of windows like this one are read once; 0 for none."""
        ...

    def nbytes(self, window: Window) -> int:
        """Bytes of a window's pixels."""
        ...

    def thinned(self, largest: int) -> Pixels:
        """Every n-th pixel of the whole raster, so that no side exceeds `largest`."""
        ...


class Composite:
    """What sources made of other sources have in common."""

    grid: Grid
    dtype: str
    band_names: tuple[str, ...]

    @property
    def identity(self) -> str:
        """What it is made of, and how, as a text."""
        raise NotImplementedError

    def __dask_tokenize__(self) -> object:
        return type(self).__qualname__, self.identity, self.band_names, repr(self.grid)

    @property
    def sources(self) -> tuple[Any, ...]:
        """Those that it is made of."""
        raise NotImplementedError

    @property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Other names of each band, those of its first source."""
        return aliases_of(self.sources[0]) if self.sources else ()

    @property
    def has_mask(self) -> bool:
        """Whether any pixel can be nodata."""
        return True

    @property
    def physical(self) -> bool:
        """Whether scale and offset of its files are applied already."""
        return any(getattr(source, "physical", False) for source in self.sources)

    @property
    def striped(self) -> bool:
        """Whether any of its files is stored in strips."""
        return any(source.striped for source in self.sources)

    @property
    def remote(self) -> bool:
        """Whether any of its files is read over a network."""
        return any(source.remote for source in self.sources)

    def changed(self) -> bool:
        """Whether any of its files is another one than was described."""
        return any(source.changed() for source in self.sources)

    def nbytes(self, window: Window) -> int:
        """Bytes of a window's pixels."""
        import numpy as np

        height, width = window.shape
        return height * width * (len(self.band_names) * np.dtype(self.dtype).itemsize + 1)

    def read(self, window: Window) -> Pixels:
        """Pixels of a window inside the raster."""
        raise NotImplementedError

    def cache_bytes(self, window: Window, threads: int = 1) -> int:
        """Bytes of cache with which tiles of windows like this one are read once."""
        raise NotImplementedError

    def reader(self, window: Window) -> Callable[[Window], Pixels]:
        """Gives the pixels of windows inside this one, which will all be asked for.

        All at once where the cache is too small for the blocks of the files, as `Raster.reader`.
        """
        self.check(window)
        if self.cache_bytes(window) <= shared_cache().capacity:
            return self.read
        return cutter(self.read(window), window)

    def check(self, window: Window) -> None:
        """Refuse a window that reaches outside."""
        if window.clip(whole_window(self.grid)) != window:
            raise ValueError(f"window {window.bounds()} reaches outside {self.grid.shape}")


def whole_window(grid: Grid) -> Window:
    """All of a raster."""
    return Window(Span(0, grid.height), Span(0, grid.width))


def aliases_of(source: Any) -> tuple[tuple[str, ...], ...]:
    """What else the bands of a source are called; nothing, where that is not known."""
    known: tuple[tuple[str, ...], ...] = getattr(source, "aliases", ())
    return known or ((),) * len(source.band_names)


def leaves(source: Any) -> Iterator[Raster]:
    """The files of which a source is made, in its order."""
    if isinstance(source, Raster):
        yield source
        return
    for part in getattr(source, "sources", ()):
        yield from leaves(part)


def served_state(source: Any) -> str | None:
    """Names the state of the files of a source that are on servers; None where none is told.

    Asked anew each time, in one request for each file.
    """
    remote = [raster for raster in leaves(source) if is_remote(raster.path)]
    if not remote:
        return None
    with ThreadPoolExecutor(_ASKING) as pool:
        return digest_of(*pool.map(lambda raster: served(raster.path, raster.sign), remote))
