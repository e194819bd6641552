"""Open rasters lazily, as an xarray; and take any raster as a source of windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from .dataarray import lazy_array, opened_source
from .grid import Grid, grid_of
from .handles import Sign
from .inputs.attributes import as_stored, names_of, nodata_of, per_band, with_nodata
from .inputs.dated import DATE, NODATA, flattened, valid_at_any
from .inputs.gather import TargetGrid
from .inputs.opening import Reading, assembled
from .inputs.protocol import Source
from .inputs.zarrstore import array_of, is_zarr, open_zarr
from .pixels import Pixels, cutter
from .selection import Bands, area_of, find_bands
from .tiling import Span, Window

__all__ = ["ArraySource", "Source", "open_raster", "source_of"]


class ArraySource:
    """A DataArray as a source: windows are computed where they are read.

    Parameters
    ----------
    array : DataArray
        Dimensions ``(band, y, x)``, or ``(y, x)`` for one band, or ``(time, band, y, x)``; lazy or
        in memory.
    """

    def __init__(self, array: xr.DataArray) -> None:
        if not isinstance(array, xr.DataArray):
            raise TypeError(
                f"expected an xarray.DataArray (band, y, x), got {type(array).__name__}: "
                "open_raster makes one"
            )
        self._files = opened_source(array)
        if array.ndim == 2 and "band" not in array.dims:
            array = array.expand_dims("band")
        if array.ndim == 4:
            array = flattened(array, nodata_of(array))
        if array.ndim != 3 or tuple(array.dims[1:]) != ("y", "x"):
            raise ValueError(f"expected dimensions (band, y, x), got {array.dims}")
        if 0 in array.shape:
            raise ValueError(f"an array (band, y, x) of shape {array.shape} has no pixels")
        if array.dtype.kind not in "biuf":
            raise ValueError(f"a raster of dtype {array.dtype} cannot be fed to a model")
        self._array = array
        self._grid = grid_of(array)
        self._names = names_of(array)
        self._nodata = nodata_of(array)
        mask = array.coords.get("mask")
        if mask is not None and mask.dims != ("y", "x"):
            raise ValueError(f"the mask of an array is (y, x), True where it is valid: {mask.dims}")

    @property
    def grid(self) -> Grid:
        """Shape and georeferencing."""
        return self._grid

    @property
    def band_names(self) -> tuple[str, ...]:
        """Labels of the first dimension."""
        return self._names

    @property
    def dtype(self) -> str:
        """Dtype of the array."""
        return str(self._array.dtype)

    @property
    def scales(self) -> tuple[float, ...]:
        """The coordinate ``scale`` or rioxarray's attributes; 1 without them.

        Those of a file are refused for numbers that were computed from it, for they may be applied.
        """
        return per_band(self._array, "scale", ("scale_factor", "scales"), 1.0)

    @property
    def offsets(self) -> tuple[float, ...]:
        """The coordinate ``offset`` or rioxarray's attributes; 0 without them."""
        return per_band(self._array, "offset", ("add_offset", "offsets"), 0.0)

    @property
    def identity(self) -> str:
        """Dask's token of the array, and of all that tells what its numbers mean."""
        told = [
            (name, self._array.coords[name].variable)
            for name in ("mask", DATE)
            if name in self._array.coords
        ]
        meant = self._nodata, self.scales, self.offsets
        return str(tokenize(self._array.variable, self._names, self._grid, told, meant))

    @property
    def data(self) -> da.Array:
        """The numbers as a dask array ``(band, y, x)``."""
        data = self._array.data
        return data if isinstance(data, da.Array) else da.from_array(data, chunks=-1)

    @property
    def in_memory(self) -> bool:
        """Whether the numbers are there, so that looking at some computes nothing."""
        return isinstance(self._array.data, np.ndarray)

    @property
    def valid(self) -> da.Array | None:
        """The mask as a dask array of bool ``(y, x)``; None where every pixel is valid."""
        data = self.data
        mask = self._array.coords.get("mask")
        # A mask was made with the nodata; numbers that were computed since may be it by chance.
        nodata = self._nodata if mask is None else None
        valid = None if mask is None else da.asarray(mask.data).astype(bool)
        if nodata is not None or data.dtype.kind == "f":
            numbers = data.rechunk({0: -1}).map_blocks(
                valid_at_any,
                (nodata,) * data.shape[0],
                self._dates,
                dtype=bool,
                drop_axis=0,
                meta=np.empty((0, 0), bool),
            )
            valid = numbers if valid is None else numbers & valid
        return valid

    @property
    def _dates(self) -> tuple[str, ...] | None:
        """The date of each band, where there are several."""
        dates = self._array.coords.get(DATE)
        return None if dates is None else tuple(dates.values.tolist())

    def select(self, bands: Bands) -> ArraySource:
        """The array with these bands only, in this order; of every date, where there are several.

        Bands of one date are called ``time/band``.
        """
        if bands is None:
            return self
        if self._dates and not set(map(str, bands)) & set(self._names):
            bands = [f"{date}/{band}" for date in dict.fromkeys(self._dates) for band in bands]
        picked = find_bands(bands, self._names, "the array")
        if self._files is not None:
            # What is nodata in other bands only is not in these; and they are not read.
            names = [self._files.band_names[i] for i in picked]
            chosen, sizes = self._files.select(names), self.data.chunks[1:]
            return ArraySource(lazy_array(chosen, sizes, "mask" in self._array.coords))
        return ArraySource(self._array.isel({self._array.dims[0]: picked}))

    def changed(self) -> bool:
        """Never: an array is a value."""
        return False

    def crop(self, window: Window) -> ArraySource:
        """A window of the array, as a source."""
        rows, cols = window.slices()
        return ArraySource(self._array.isel(y=rows, x=cols))

    def thinned(self, largest: int) -> Pixels:
        """Every n-th pixel of the whole array."""
        step = max(1, -(-max(self._grid.shape) // largest))
        thin = ArraySource(self._array.isel(y=slice(None, None, step), x=slice(None, None, step)))
        return thin.read(Window(Span(0, thin.grid.height), Span(0, thin.grid.width)))

    def read(self, window: Window) -> Pixels:
        """Compute a window in the calling thread."""
        rows, cols = window.slices()
        valid = self.valid
        lazy = [self.data[:, rows, cols], None if valid is None else valid[rows, cols]]
        # The calling thread is a worker's already: a pool of its own would oversubscribe the cores.
        data, mask = dask.compute(*lazy, scheduler="synchronous")
        return Pixels(data, None if mask is None or mask.all() else mask)

    def reader(self, window: Window) -> Callable[[Window], Pixels]:
        """Compute the window once, and cut it: the windows inside it share chunks of the array."""
        return cutter(self.read(window), window)

    def cache_bytes(self, window: Window, threads: int = 1) -> int:
        """None: what is computed is not cached."""
        return 0

    @property
    def nodata(self) -> tuple[float | None, ...]:
        """The attribute ``_FillValue`` or ``nodata``, for every band, if it is of these numbers."""
        return (self._nodata,) * len(self._names)

    @property
    def striped(self) -> bool:
        """Never: how its numbers come about is not known."""
        return False

    @property
    def remote(self) -> bool:
        """Never, as far as is known."""
        return False

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """None."""
        return ()

    @property
    def physical(self) -> bool:
        """Whether scale and offset of its files are applied already."""
        return "physical" in self._array.attrs

    def nbytes(self, window: Window) -> int:
        """Bytes of a window's pixels."""
        height, width = window.shape
        return int(height * width * len(self._names) * self._array.dtype.itemsize)


def open_raster(
    source: Any,
    *,
    bands: Bands = None,
    chunks: int | tuple[int, int] | Literal["auto"] = "auto",
    nodata: float | None = None,
    window: tuple[int, int, int, int] | None = None,
    bounds: Sequence[float] | None = None,
    bounds_crs: Any = None,
    mask: bool = True,
    sign: Sign | None = None,
    stack: Literal["bands"] | None = None,
    like: Any = None,
    crs: Any = None,
    resolution: float | tuple[float, float] | None = None,
    resampling: Any = "nearest",
    scale: Any = None,
    offset: Any = None,
    time: Any = None,
) -> xr.DataArray:
    """Open a raster lazily.

    Parameters
    ----------
    source : path, URL, list of paths, mapping, STAC items, DataArray or Dataset
        Anything GDAL opens; a DataArray passes through, with `bands` applied, and of a Dataset the
        variables of one grid are the bands.  A list is a mosaic
        on one grid: later files lie over earlier ones where they are valid (as with
        ``gdalbuildvrt``), what none covers is nodata.  A mapping gives a file, or a list of files,
        for each band: ``{"B02": "b02.jp2", "B11": "b11.jp2"}``; bands of several resolutions come
        onto the finest grid.  STAC items come as pystac objects, as mappings, or as the path or
        URL of an item or a FeatureCollection (``.json``); `bands` are then keys of assets, names or
        common names, and each item has its own scale, offset and nodata.  Of Sentinel-2 numbers
        the shift of processing baseline 04.00 is taken off where that was not done already.
    bands : sequence of str or int, optional
        Names (band descriptions) or numbers from 1, in the order wanted.
    chunks : int, tuple of int or "auto"
        Side of a chunk in pixels, or ``(y, x)``; "auto" takes a multiple of the file's blocks near
        2048.
    nodata : float, optional
        Replaces the files' own nodata.
    window : tuple of int, optional
        ``(row, col, height, width)`` in pixels.
    bounds : tuple of float, optional
        ``(left, bottom, right, top)``, instead of `window`: all pixels that they touch, as far as
        there are any.
    bounds_crs : optional
        What `bounds` are in, as "EPSG:4326"; by default the raster's CRS.  Bounds across the
        antimeridian are found where the raster has them in one piece, else refused.
    mask : bool, default True
        Honour nodata, NaN, alpha and mask bands; False takes every pixel as valid.  Gaps of a
        mosaic are nodata even so.
    sign : callable, optional
        For URLs that expire: gives the address to open for `source`.  It is called by the worker
        that reads, whenever it opens the file, also when a read has failed.  A function of a
        module that workers can import.
    stack : {None, "bands"}
        "bands": a list is one single-band file per band, named by description or file.
    like : path, DataArray or Grid, optional
        Put everything on this grid.
    crs, resolution : optional
        Put everything on a grid of this CRS and this pixel size, one number or ``(y, x)``, around
        all files: on their corner where the CRS is theirs, else in whole multiples of the pixel
        size.  What is left out is that of the files.
    resampling : str, default "nearest"
        How files come onto a grid that is not theirs: nearest, bilinear, cubic, cubic_spline,
        lanczos, average, mode, max, min, med, q1, q3 or rms.  Nodata is left out of kernels.
    scale, offset : float or mapping of str to float, optional
        Physical values are ``number * scale + offset``: replace what files and items say.
    time : sequence of dates or "all", optional
        For models that take several dates: of a list of sources the date of each; of STAC items,
        or of a mapping ``{date: path}``, the dates that are wanted, or "all".  The array is then
        ``(time, band, y, x)`` in order of time, and the model sees ``(n, time * band, y, x)``, or
        ``(n, time, band, y, x)`` through `daskinfer.wrappers.TimeSteps`.  What a date lacks is NaN,
        which the model sees as its fill; a pixel is nodata where every date lacks it.

    Returns
    -------
    DataArray
        Dimensions ``(band, y, x)``, the raw numbers in the file's dtype.  Where pixels can be
        nodata the coordinate ``mask`` ``(y, x)`` is True on the valid ones.  A pixel is nodata when
        any of the bands is.  Transform, CRS, ground control points and RPCs are in ``spatial_ref``;
        the file's scale and offset, where it has them, are the coordinates ``scale`` and ``offset``
        of the bands.  Files of a mosaic that are scaled differently come as physical values in
        float32.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is not a raster, a band is unknown or doubled, or the window lies outside; if files
        of a mosaic differ in bands or dtype, or are on several grids and none is asked for.

    Examples
    --------
    >>> from daskinfer.demo import demo_path
    >>> scene = open_raster(demo_path(), bands=["red", "nir"])
    >>> scene.dims, scene.shape, scene.band.values.tolist()
    (('band', 'y', 'x'), (2, 384, 768), ['red', 'nir'])
    >>> open_raster(demo_path(), resolution=40, resampling="average").shape
    (6, 192, 384)
    """
    target = TargetGrid.of(like, crs, resolution, resampling)
    source = _as_array(source)
    if isinstance(source, xr.DataArray):
        if target.given or any(option is not None for option in (stack, scale, offset, time)):
            raise ValueError(
                "an array is on its grid and scaled already: change it with xarray or rioxarray, "
                "or pass the path to open_raster"
            )
        source = _part(source, window, bounds, bounds_crs)
        return _opened(source, bands, chunks, nodata, mask)
    reading = Reading(nodata, mask, sign, stack, target, scale, offset, time)
    opened = _cropped(assembled(source, reading, bands), window, bounds, bounds_crs)
    return lazy_array(opened, chunks, mask)


def _as_array(source: Any) -> Any:
    """Zarr stores and Datasets as arrays, anything else as it is."""
    if is_zarr(source):
        return open_zarr(source)
    if isinstance(source, xr.Dataset):
        return array_of(source, "the dataset")
    return source


def _cropped(source: Source, window: Any, bounds: Any, bounds_crs: Any) -> Source:
    area = area_of(window, bounds, bounds_crs, source.grid)
    return source if area is None else source.crop(area)


def _part(array: xr.DataArray, window: Any, bounds: Any, bounds_crs: Any) -> xr.DataArray:
    if window is None and bounds is None and bounds_crs is None:
        return array
    area = area_of(window, bounds, bounds_crs, grid_of(array))
    return array if area is None else array.isel(y=area.slices()[0], x=area.slices()[1])


def _opened(
    array: xr.DataArray,
    bands: Bands,
    chunks: int | tuple[int, int] | Literal["auto"],
    nodata: float | None,
    mask: bool,
) -> xr.DataArray:
    """A DataArray with the options of `open_raster` applied to it."""
    if array.ndim == 4 or not as_stored(array):
        # Dates lack pixels by the nodata that is meant; what was computed may tell a wrong one.
        array = ArraySource(_masked_as(array, nodata, mask)).select(bands)._array
    else:
        array = _masked_as(ArraySource(array).select(bands)._array, nodata, mask)
    if chunks == "auto":
        return array
    y, x = (chunks, chunks) if isinstance(chunks, int) else chunks
    return array.chunk({array.dims[0]: -1, "y": y, "x": x})


def _masked_as(array: xr.DataArray, nodata: float | None, mask: bool) -> xr.DataArray:
    """With the nodata that is asked for, or none."""
    if nodata is not None:
        array = with_nodata(array, nodata)
    if not mask:
        array = array.drop_vars("mask", errors="ignore")
        array = array.assign_attrs()
        for name in NODATA:
            array.attrs.pop(name, None)
    return array


def source_of(
    source: Any,
    *,
    bands: Bands = None,
    window: tuple[int, int, int, int] | None = None,
    bounds: Sequence[float] | None = None,
    bounds_crs: Any = None,
) -> Source:
    """What `open_raster` takes as a `Source`.

    A DataArray as `open_raster` made it stands for its files again.  Read as an array, all of a
    chunk is decoded for whichever part of it is asked for: eight times the file in a run whose
    chunks have its size, for each touches eight others with its halo.
    """
    source = _as_array(source)
    if not isinstance(source, xr.DataArray):
        return _cropped(assembled(source, Reading(), bands), window, bounds, bounds_crs)
    files = opened_source(source)
    if files is not None:
        return _cropped(files, window, bounds, bounds_crs).select(bands)
    return ArraySource(_part(source, window, bounds, bounds_crs)).select(bands)
