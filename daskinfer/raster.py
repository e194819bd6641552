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
from typing import Any

import numpy as np
import rasterio
import rasterio.windows
from rasterio._err import CPLE_BaseError
from rasterio.enums import ColorInterp
from rasterio.errors import RasterioIOError

from .blockcache import Cells, cache_limit, shared_cache
from .display import bytes_text
from .grid import Grid
from .handles import (
    Sign,
    digest_of,
    drop_handle,
    files_of,
    handle,
    identity_of,
    open_dataset,
    read_bands,
    read_mask,
)
from .inputs.vrt import Covers, coverage, covered
from .metadata import (
    MaskKind,
    Nodata,
    Number,
    band_aliases,
    band_names,
    check_dataset,
    common_dtype,
    data_bands,
    mask_kind,
    nodata_of,
)
from .paths import absolute_name
from .pixels import Mask, Pixels, cutter, valid_pixels
from .remote import UnreachableError, environment, is_alone, is_remote, patiently
from .selection import Bands, area_of, find_bands, window_of
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
    nodata : tuple of (float, int or None)
        Per band, on raw numbers.
    scales, offsets : tuple of float
        Per band.
    block : tuple of int
        ``(height, width)`` of the file's storage blocks.
    mask : {None, "dataset", "alpha", "bands"}
        Where the file keeps a mask besides nodata.
    file : str
        Path, size and modification time.
    beside : str
        Names the state of the other files that its pixels come from.
    extent : tuple of int
        ``(height, width)`` of the whole file.
    opened : str
        Names this description.  Decoded blocks are shared under it: URLs, and the files behind a
        VRT, are not looked at again for every read, and are read anew by who opens them anew.
    sign : callable or None
        Gives the address to open for `path`, in the thread that opens it.
    alone : bool
        A remote file that is opened without looking for others beside it.
    aliases : tuple of tuple of str
        What the file says of each band beside its name, as its colour.
    covers : tuple of tuple or None
        What the sources of a VRT cover in each band, where that is not all and no nodata tells it.
    """

    path: str
    grid: Grid
    origin: tuple[int, int]
    indexes: tuple[int, ...]
    band_names: tuple[str, ...]
    dtype: str
    nodata: tuple[Number | None, ...]
    scales: tuple[float, ...]
    offsets: tuple[float, ...]
    block: tuple[int, int]
    mask: MaskKind
    file: str
    beside: str
    extent: tuple[int, int]
    opened: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False, repr=False)
    sign: Sign | None = field(default=None, compare=False)
    alone: bool = field(default=False, compare=False, repr=False)
    aliases: tuple[tuple[str, ...], ...] = field(default=(), compare=False, repr=False)
    covers: Covers | None = field(default=None, repr=False)

    def __dask_tokenize__(self) -> object:
        return type(self).__qualname__, self.identity

    @cached_property
    def identity(self) -> str:
        """The file, and a digest of all else that its pixels and their validity depend on."""
        cut = self.origin, repr(self.grid), self.indexes, self.dtype
        # As text, for NaN is not equal to itself.
        read = str(self.nodata), self.mask, self.scales, self.offsets, self.covers, self.beside
        return f"{self.file}|read as {digest_of(*cut, *read)}"

    @property
    def has_mask(self) -> bool:
        """Whether any pixel can be nodata."""
        return (
            self.mask is not None
            or self.covers is not None
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
        """All that decoded pixels depend on."""
        return self.identity, self.opened

    def changed(self) -> bool:
        """Whether the file is another one than was described."""
        return self.file != identity_of(self.path)

    def select(self, bands: Bands) -> Raster:
        """The raster with these bands only, in this order."""
        if bands is None:
            return self
        try:
            picked = find_bands(bands, self.band_names, self.path, self.aliases)
        except ValueError as error:
            raise ValueError(f"{error}{self.alpha_hint}") from error
        return replace(
            self,
            aliases=tuple(self.aliases[i] for i in picked) if self.aliases else (),
            indexes=tuple(self.indexes[i] for i in picked),
            band_names=tuple(self.band_names[i] for i in picked),
            nodata=tuple(self.nodata[i] for i in picked),
            scales=tuple(self.scales[i] for i in picked),
            offsets=tuple(self.offsets[i] for i in picked),
            covers=None if self.covers is None else tuple(self.covers[i] for i in picked),
        )

    @property
    def alpha_hint(self) -> str:
        """What to do where a band of data passes for alpha, as GDAL has it of the last of four."""
        if self.mask != "alpha":
            return ""
        dataset = handle(self.path, self.opened, self.sign)
        number = dataset.colorinterp.index(ColorInterp.alpha) + 1
        return (
            f"; band {number} ({dataset.descriptions[number - 1] or 'no name'}) is marked as alpha "
            "and taken for the mask: if it is data, say so with "
            f"gdal_edit.py -colorinterp_{number} undefined {self.path}"
        )

    def crop(self, window: Window) -> Raster:
        """A window of the raster, as a raster."""
        row, col = window.origin
        origin = (self.origin[0] + row, self.origin[1] + col)
        return replace(self, grid=self.grid.window(window), origin=origin)

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
            try:
                return self._read_once(window, shape)
            except RasterioIOError as error:
                # rasterio's own message names neither the file nor the reason.
                raise RasterioIOError(
                    f"{self.path}: window (row, col, height, width) = {window.bounds()} cannot be "
                    f"read: {error.__cause__ or error}"
                ) from (error.__cause__ or error)
        return patiently(
            partial(self._read_once, window, shape),
            self.path,
            f"window (row, col, height, width) = {window.bounds()}",
            partial(drop_handle, self.path, self.opened),
            alone=self.alone,
        )

    def _read_once(self, window: Window, shape: tuple[int, int]) -> Pixels:
        row, col = window.origin
        area = rasterio.windows.Window(
            col + self.origin[1], row + self.origin[0], window.shape[1], window.shape[0]
        )
        dataset = handle(self.path, self.opened, self.sign)
        data = read_bands(dataset, self.indexes, self.dtype, area, shape)
        if data.shape != (len(self.indexes), *shape):
            raise RasterioIOError(
                f"{self.path}: window {window.bounds()} came back as {data.shape[1:]}"
            )
        valid = valid_pixels(data, self.nodata) if self.has_mask else None
        if self.mask is not None:
            own = read_mask(dataset, self.mask, self.indexes, area, shape) > 0
            valid = own if valid is None else valid & own
        if self.covers is not None:
            here = Span(area.row_off, area.row_off + area.height)
            there = Window(here, Span(area.col_off, area.col_off + area.width))
            own = covered(self.covers, there, shape)
            valid = own if valid is None else valid & own
        return Pixels(data, None if valid is None or valid.all() else valid)


def describe(
    source: str | os.PathLike[str],
    *,
    bands: Bands = None,
    nodata: Nodata = None,
    window: tuple[int, int, int, int] | None = None,
    bounds: Sequence[float] | None = None,
    bounds_crs: Any = None,
    mask: bool = True,
    sign: Sign | None = None,
) -> Raster:
    """Read a raster's metadata into a `Raster`; parameters and errors as of `open_raster`."""
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source must be a path, a URL or a DataArray, got {type(source).__name__}")
    path = os.fspath(source)
    raster = _opened(path, nodata, mask, sign, alone=is_remote(path) and _is_alone(path, sign))
    if raster.alone and raster.grid.transform is None and not raster.grid.gcps:
        # Where it lies may be written beside it.
        raster = _opened(path, nodata, mask, sign, alone=False)
    raster = raster.select(bands)
    area = area_of(window, bounds, bounds_crs, raster.grid)
    return raster if area is None else raster.crop(area)


def _is_alone(path: str, sign: Sign | None) -> bool:
    try:
        return is_alone(path, sign)
    except RasterioIOError as error:
        raise ValueError(f"source {path!r} cannot be reached: {error}") from error


def _opened(path: str, nodata: Nodata, mask: bool, sign: Sign | None, *, alone: bool) -> Raster:
    with (
        environment(path, alone=alone) if is_remote(path) else nullcontext(),
        open_dataset(path, sign) as dataset,
    ):
        try:
            return replace(_described(dataset, path, nodata, mask, sign), alone=alone)
        except CPLE_BaseError as error:
            # GDAL reads a header as far as it is asked for.
            raise ValueError(f"source {path!r} is not a raster that GDAL opens: {error}") from error


def _described(
    dataset: rasterio.DatasetReader, path: str, nodata: Nodata, mask: bool, sign: Sign | None
) -> Raster:
    """All of an open dataset."""
    check_dataset(dataset, path)
    numbers = data_bands(dataset, path)
    scales, offsets = dataset.scales, dataset.offsets
    return Raster(
        path=path,
        grid=Grid.of_dataset(dataset),
        origin=(0, 0),
        indexes=numbers,
        band_names=band_names(dataset, numbers),
        dtype=common_dtype(dataset, numbers, path),
        nodata=nodata_of(dataset, numbers, nodata) if mask else (None,) * len(numbers),
        scales=tuple(float(scales[n - 1]) for n in numbers),
        offsets=tuple(float(offsets[n - 1]) for n in numbers),
        block=tuple(dataset.block_shapes[0]),
        mask=mask_kind(dataset) if mask else None,
        file=identity_of(path),
        # Over a network every name would be asked for.
        beside="" if is_remote(path) else files_of(dataset, path),
        extent=dataset.shape,
        sign=sign,
        aliases=band_aliases(dataset, numbers),
        covers=coverage(dataset, numbers) if mask else None,
    )


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


def _whole(grid: Grid) -> Window:
    return Window(Span(0, grid.height), Span(0, grid.width))
