"""Rasters in files: what is known of one, and its windows.

`Raster` is the picklable recipe of a file-backed source: path, bands, nodata, mask, grid.  It never
holds an open dataset: each thread opens its own handle, since a GDAL handle shared by threads
returns corrupt pixels, and none survives pickling.
"""

from __future__ import annotations

import math
import os
import shlex
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import rasterio
import rasterio.windows
from rasterio.enums import ColorInterp, MaskFlags
from rasterio.errors import RasterioIOError

from .blockcache import Cells, cache_limit, shared_cache
from .display import bytes_text
from .grid import Grid
from .handles import Sign, drop_handle, handle, identity_of, open_dataset
from .paths import absolute_name
from .pixels import Array, Mask, Pixels, cutter, valid_pixels
from .remote import UnreachableError, environment, is_remote, patiently
from .tiling import Span, Window

__all__ = [
    "Bands",
    "Mask",
    "Pixels",
    "Raster",
    "describe",
    "find_bands",
    "layout_warning",
    "valid_pixels",
    "window_of",
]

Bands = Sequence[str | int] | None

# How much of the blocks of a chunk a cache must hold, see `Raster.cache_bytes`.
_LIVE = 2 / 3
_STRIPS = 1.3


@dataclass(frozen=True)
class Raster:
    """Recipe of a file that GDAL opens.  Made by `describe`.

    Attributes
    ----------
    path : str
        What GDAL opens.
    grid : Grid
        Of the window that is used.
    origin : tuple of int
        ``(row, col)`` of that window in the file.
    indexes : tuple of int
        Band numbers in the file, from 1.
    band_names : tuple of str
        One per index.
    dtype : str
        Of the raw numbers.
    nodata : tuple of (float or None)
        Per band, on raw numbers.
    scales, offsets : tuple of float
        Per band.
    block : tuple of int
        ``(height, width)`` of the file's storage blocks.
    mask : {None, "dataset", "alpha"}
        Where the file keeps a mask besides nodata.
    identity : str
        Path, size, modification time and window.
    extent : tuple of int
        ``(height, width)`` of the whole file.
    opened : str
        Names this description.  Decoded blocks are shared under it: URLs, and the files behind a
        VRT, have no time of their own here, and are read anew by who opens them anew.
    sign : callable or None
        Gives the address to open for `path`, in the thread that opens it.
    """

    path: str
    grid: Grid
    origin: tuple[int, int]
    indexes: tuple[int, ...]
    band_names: tuple[str, ...]
    dtype: str
    nodata: tuple[float | None, ...]
    scales: tuple[float, ...]
    offsets: tuple[float, ...]
    block: tuple[int, int]
    mask: Literal["dataset", "alpha"] | None
    identity: str
    extent: tuple[int, int]
    opened: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False, repr=False)
    sign: Sign | None = field(default=None, compare=False)

    def __dask_tokenize__(self) -> object:
        return type(self).__qualname__, self.identity, self.indexes, self.nodata, repr(self.grid)

    @property
    def has_mask(self) -> bool:
        """Whether any pixel can be nodata."""
        return (
            self.mask is not None
            or np.dtype(self.dtype).kind == "f"
            or any(value is not None for value in self.nodata)
        )

    @property
    def striped(self) -> bool:
        """Whether the file is stored in strips as wide as it is, and in more than one."""
        return self.block[1] >= self.extent[1] and self.block[0] < self.extent[0]

    @property
    def remote(self) -> bool:
        """Whether reading goes over a network."""
        return is_remote(self.path)

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """Nothing was done to make it: no rows for a plan."""
        return ()

    def whole_blocks(self, window: Window) -> bool:
        """Whether a window has all of the raster's pixels in each block that it touches."""
        return all(
            (span.start == 0 or (span.start + origin) % block == 0)
            and (span.stop == size or (span.stop + origin) % block == 0)
            for span, origin, block, size in zip(
                window, self.origin, self.block, self.grid.shape, strict=True
            )
        )

    def nbytes(self, window: Window) -> int:
        """Bytes of a window's pixels."""
        return self._cells.nbytes(window)

    def decoded_bytes(self, window: Window) -> int:
        """Bytes that must be decoded for a window: of all blocks of the file that it touches."""
        sides = zip(window, self.origin, self.block, self.extent, strict=True)
        return self._pixel_bytes * math.prod(
            min(-(-(span.stop + start) // block) * block, size)
            - (span.start + start) // block * block
            for span, start, block, size in sides
        )

    @property
    def _pixel_bytes(self) -> int:
        return len(self.indexes) * np.dtype(self.dtype).itemsize + self.has_mask

    def __getstate__(self) -> dict[str, Any]:
        # Where it is unpickled the working folder may be another.
        return self.__dict__ | {"path": absolute_name(self.path)}

    @cached_property
    def _cells(self) -> Cells:
        return Cells.of(self.grid.shape, self.block, self.origin, self._pixel_bytes)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        """All that decoded pixels depend on.  As text, for NaN is not equal to itself."""
        cut = (self.origin, self.grid.shape)
        return self.identity, self.opened, self.indexes, str(self.nodata), self.mask, cut

    def changed(self) -> bool:
        """Whether the file is another one than was described."""
        # What follows the file's identity tells of the window.
        return not f"{self.identity}|".startswith(f"{identity_of(self.path)}|")

    def select(self, bands: Bands) -> Raster:
        """The raster with these bands only, in this order."""
        if bands is None:
            return self
        picked = find_bands(bands, self.band_names, self.path)
        return replace(
            self,
            indexes=tuple(self.indexes[i] for i in picked),
            band_names=tuple(self.band_names[i] for i in picked),
            nodata=tuple(self.nodata[i] for i in picked),
            scales=tuple(self.scales[i] for i in picked),
            offsets=tuple(self.offsets[i] for i in picked),
        )

    def crop(self, window: Window) -> Raster:
        """A window of the raster, as a raster."""
        row, col = window.origin
        origin = (self.origin[0] + row, self.origin[1] + col)
        # Without georeferencing, windows of one size have equal grids.
        identity = f"{self.identity}|{window.bounds()}"
        return replace(self, grid=self.grid.window(window), origin=origin, identity=identity)

    def thinned(self, largest: int) -> Pixels:
        """Every n-th pixel of the whole raster, from its overviews where it has some."""
        step = max(1, -(-max(self.grid.shape) // largest))
        height, width = (-(-side // step) for side in self.grid.shape)
        return self._read(_whole(self.grid), (height, width))

    def read(self, window: Window, *, cached: bool = True) -> Pixels:
        """Read a window, through the cache of decoded blocks that this process has.

        Parameters
        ----------
        window : Window
            Inside the raster, in its pixels.
        cached : bool, default True
            False for a window whose blocks no other will want: the cache would only hold and copy
            them.

        Returns
        -------
        Pixels
            In memory of their own.

        Raises
        ------
        rasterio.errors.RasterioIOError
            If GDAL cannot read it.
        ValueError
            If the window reaches outside the raster: rasterio would return a smaller array.
        """
        self._check(window)
        if not cached:
            return self._decode(window)
        try:
            return shared_cache().read(self._key, self._cells, window, self._decode)
        except UnreachableError:
            raise
        except RasterioIOError:
            # Of a cell of several blocks, the broken one may be none of this window's.
            return self._decode(window)

    def reader(self, window: Window) -> Callable[[Window], Pixels]:
        """Gives the pixels of windows inside this one, which will all be asked for.

        Each is read when it is asked for, through the cache.  Where the cache is too small for
        that, the blocks of a window would have left it when the next one wants them; all is read at
        once then.
        """
        self._check(window)
        if self.cache_bytes(window) <= shared_cache().capacity:
            return self.read
        return cutter(self._decode(window), window)

    def cache_bytes(self, window: Window, threads: int = 1) -> int:
        """Bytes of cache with which tiles of windows like this one find their blocks there.

        Parameters
        ----------
        window : Window
            A chunk with its halo.
        threads : int, default 1
            Chunks at work in the process.
        """
        # Simulated: of each chunk at work two thirds of its blocks are needed at a time; strips
        # are shared by all chunks of a row, and those of the next row come before they can go.
        share = max(_STRIPS, 0 if self.striped else threads * _LIVE)
        need = int(share * self._cells.nbytes_touched(window))
        return min(need, self._cells.nbytes(_whole(self.grid)))

    def _check(self, window: Window) -> None:
        if window.clip(_whole(self.grid)) != window:
            raise ValueError(f"window {window.bounds()} reaches outside {self.grid.shape}")
        if self.changed():
            raise RasterioIOError(f"{self.path} was changed since it was opened: open it again")

    def _decode(self, window: Window) -> Pixels:
        return self._read(window, window.shape)

    def _read(self, window: Window, shape: tuple[int, int]) -> Pixels:
        if not is_remote(self.path):
            return self._read_once(window, shape)
        return patiently(
            partial(self._read_once, window, shape),
            self.path,
            f"window (row, col, height, width) = {window.bounds()}",
            partial(drop_handle, self.path, self.opened),
        )

    def _read_once(self, window: Window, shape: tuple[int, int]) -> Pixels:
        row, col = window.origin
        area = rasterio.windows.Window(
            col + self.origin[1], row + self.origin[0], window.shape[1], window.shape[0]
        )
        dataset = handle(self.path, self.opened, self.sign)
        data = _read(dataset, self.indexes, self.dtype, area, shape)
        if data.shape != (len(self.indexes), *shape):
            raise RasterioIOError(
                f"{self.path}: window {window.bounds()} came back as {data.shape[1:]}"
            )
        valid = valid_pixels(data, self.nodata) if self.has_mask else None
        if self.mask is not None:
            own = _mask_of(dataset, self.mask, area, shape) > 0
            valid = own if valid is None else valid & own
        return Pixels(data, None if valid is None or valid.all() else valid)


def describe(
    source: str | os.PathLike[str],
    *,
    bands: Bands = None,
    nodata: float | None = None,
    window: tuple[int, int, int, int] | None = None,
    mask: bool = True,
    sign: Sign | None = None,
) -> Raster:
    """Read a raster's metadata into a `Raster`; parameters and errors as of `open_raster`."""
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source must be a path, a URL or a DataArray, got {type(source).__name__}")
    path = os.fspath(source)
    with (
        environment(path) if is_remote(path) else nullcontext(),
        open_dataset(path, sign) as dataset,
    ):
        numbers = _data_bands(dataset)
        raster = Raster(
            path=path,
            grid=Grid.of_dataset(dataset),
            origin=(0, 0),
            indexes=numbers,
            band_names=_band_names(dataset, numbers),
            dtype=_dtype(dataset, numbers, path),
            nodata=tuple(_band_nodata(dataset, n, nodata) if mask else None for n in numbers),
            scales=tuple(float(dataset.scales[n - 1]) for n in numbers),
            offsets=tuple(float(dataset.offsets[n - 1]) for n in numbers),
            block=tuple(dataset.block_shapes[0]),
            mask=_mask_kind(dataset) if mask else None,
            identity=identity_of(path),
            extent=dataset.shape,
            sign=sign,
        )
    raster = raster.select(bands)
    if window is None:
        return raster
    area = window_of(window, raster.grid)
    return raster.crop(area)


def layout_warning(source: object, window: Window) -> str | None:
    """What a file in strips will cost, and how to be rid of it; None where that is nothing.

    Parameters
    ----------
    source : Source
    window : Window
        A chunk with its halo.

    Returns
    -------
    str or None
        None too where the cache can hold the strips of a row of chunks: with chunks in row-major
        order each strip is decoded once then.
    """
    if not isinstance(source, Raster) or not source.striped:
        return None
    own, decoded = source.nbytes(window), source.decoded_bytes(window)
    if decoded < 2 * own or source.cache_bytes(window) <= cache_limit():
        return None
    height, width = source.block
    target = shlex.quote(f"{PurePath(source.path).stem}-cog.tif")
    return (
        f"{source.path} is stored in strips of {width} x {height} px, to be read and decoded "
        f"whole: a chunk of {bytes_text(own)} costs {bytes_text(decoded)}, "
        f"{decoded / own:.0f} times as much. Convert it first: "
        f"gdal_translate {shlex.quote(source.path)} {target} -of COG "
        f"(or: rio cogeo create {shlex.quote(source.path)} {target})"
    )


def find_bands(wanted: Sequence[str | int], names: tuple[str, ...], where: str) -> list[int]:
    """Positions of the wanted bands.

    >>> find_bands(["nir", 1], ("red", "nir"), "scene.tif")
    [1, 0]
    """
    picked = []
    for band in wanted:
        position = _position(band, names)
        if position is None:
            raise ValueError(
                f"{where} has no band {band!r}: wanted {list(wanted)}, there are {list(names)}"
            )
        picked.append(position)
    doubled = {names[i] for i in picked if picked.count(i) > 1}
    if doubled:
        raise ValueError(f"band {sorted(doubled)[0]!r} is asked for twice: {list(wanted)}")
    return picked


def _position(band: str | int, names: tuple[str, ...]) -> int | None:
    if isinstance(band, str):
        return names.index(band) if band in names else None
    return band - 1 if 1 <= band <= len(names) else None


def _whole(grid: Grid) -> Window:
    return Window(Span(0, grid.height), Span(0, grid.width))


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


def _dtype(dataset: rasterio.DatasetReader, numbers: Sequence[int], path: str) -> str:
    """A dtype that holds the numbers of all these bands."""
    common = str(np.result_type(*(dataset.dtypes[n - 1] for n in numbers)))
    if np.dtype(common).kind == "c":
        raise ValueError(f"source {path!r} is complex ({common}): pass its amplitude instead")
    return common


def _data_bands(dataset: rasterio.DatasetReader) -> tuple[int, ...]:
    """Numbers of the bands that hold data: alpha is a mask, not an input."""
    interpretations = zip(dataset.indexes, dataset.colorinterp, strict=True)
    return tuple(n for n, color in interpretations if color != ColorInterp.alpha)


def _band_names(dataset: rasterio.DatasetReader, numbers: Sequence[int]) -> tuple[str, ...]:
    """Descriptions where every band has one of its own, else numbers."""
    names = tuple(dataset.descriptions[n - 1] or "" for n in numbers)
    if all(names) and len(set(names)) == len(names):
        return names
    return tuple(str(n) for n in numbers)


def _band_nodata(
    dataset: rasterio.DatasetReader, number: int, override: float | None
) -> float | None:
    value = dataset.nodatavals[number - 1] if override is None else override
    return None if value is None else float(value)


def _read(
    dataset: rasterio.DatasetReader,
    numbers: Sequence[int],
    dtype: str,
    area: rasterio.windows.Window,
    shape: tuple[int, int],
) -> Array:
    if len({dataset.dtypes[n - 1] for n in numbers}) == 1:
        data = dataset.read(list(numbers), window=area, out_shape=(len(numbers), *shape))
        return np.asarray(data, dtype)
    # Bands of a VRT, which rasterio refuses to read at once.
    bands = (dataset.read(n, window=area, out_shape=shape) for n in numbers)
    return np.stack([band.astype(dtype) for band in bands])


def _mask_of(
    dataset: rasterio.DatasetReader,
    kind: str,
    area: rasterio.windows.Window,
    shape: tuple[int, int],
) -> npt.NDArray[Any]:
    if kind == "alpha":
        # Not dataset_mask: it takes alpha for a mask only where there are two or four bands.
        alpha = dataset.colorinterp.index(ColorInterp.alpha) + 1
        return np.asarray(dataset.read(alpha, window=area, out_shape=shape))
    return np.asarray(dataset.dataset_mask(window=area, out_shape=shape))


def _mask_kind(dataset: rasterio.DatasetReader) -> Literal["dataset", "alpha"] | None:
    if ColorInterp.alpha in dataset.colorinterp:
        return "alpha"
    flags = {flag for flags in dataset.mask_flag_enums for flag in flags}
    return "dataset" if MaskFlags.per_dataset in flags and MaskFlags.nodata not in flags else None
