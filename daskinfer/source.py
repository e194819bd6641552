"""Open rasters lazily, as an xarray; and take any raster as a source of windows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from .grid import Grid, grid_of
from .handles import Sign
from .inputs.gather import TargetGrid
from .inputs.opening import Reading, assembled
from .inputs.protocol import Source
from .pixels import Array, Mask, Pixels, cutter, valid_pixels
from .raster import Bands, Raster, find_bands, window_of
from .tiling import Span, Window

__all__ = ["ArraySource", "Source", "open_raster", "source_of"]

_KEPT_OPENED = 32
# By the name of their numbers, which any operation on them changes.
_lately_opened: OrderedDict[str, tuple[Source, xr.DataArray]] = OrderedDict()


class ArraySource:
    """A DataArray as a source: windows are computed where they are read.

    Parameters
    ----------
    array : DataArray
        Dimensions ``(band, y, x)``, or ``(y, x)`` for one band; lazy or in memory.
    """

    def __init__(self, array: xr.DataArray) -> None:
        if not isinstance(array, xr.DataArray):
            raise TypeError(
                f"expected an xarray.DataArray (band, y, x), got {type(array).__name__}: "
                "open_raster makes one"
            )
        if array.ndim == 2:
            array = array.expand_dims("band")
        if array.ndim != 3 or tuple(array.dims[1:]) != ("y", "x"):
            raise ValueError(f"expected dimensions (band, y, x), got {array.dims}")
        if array.dtype.kind not in "biuf":
            raise ValueError(f"a raster of dtype {array.dtype} cannot be fed to a model")
        self._array = array
        self._grid = grid_of(array)
        self._names = _names_of(array)
        self._nodata = _nodata_of(array)

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
        """The coordinate ``scale`` or rioxarray's attributes; 1 without them."""
        return _per_band(self._array, "scale", ("scale_factor", "scales"), 1.0)

    @property
    def offsets(self) -> tuple[float, ...]:
        """The coordinate ``offset`` or rioxarray's attributes; 0 without them."""
        return _per_band(self._array, "offset", ("add_offset", "offsets"), 0.0)

    @property
    def identity(self) -> str:
        """Dask's token of the array."""
        return str(tokenize(self._array.variable, self._names, self._grid))

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
        valid = None if mask is None else da.asarray(mask.data)
        if nodata is not None or data.dtype.kind == "f":
            numbers = data.rechunk({0: -1}).map_blocks(
                valid_pixels,
                (nodata,) * data.shape[0],
                dtype=bool,
                drop_axis=0,
                meta=np.empty((0, 0), bool),
            )
            valid = numbers if valid is None else numbers & valid
        return valid

    def select(self, bands: Bands) -> ArraySource:
        """The array with these bands only, in this order."""
        if bands is None:
            return self
        picked = find_bands(bands, self._names, "the array")
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
        """The attribute ``_FillValue`` or ``nodata``, for every band."""
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
    mask: bool = True,
    sign: Sign | None = None,
    stack: Literal["bands"] | None = None,
    like: Any = None,
    crs: Any = None,
    resolution: float | tuple[float, float] | None = None,
    resampling: Any = "nearest",
) -> xr.DataArray:
    """Open a raster lazily.

    Parameters
    ----------
    source : path, URL, list of paths, mapping or DataArray
        Anything GDAL opens; a DataArray passes through, with `bands` applied.  A list is a mosaic
        on one grid: later files lie over earlier ones where they are valid (as with
        ``gdalbuildvrt``), what none covers is nodata.  A mapping gives a file, or a list of files,
        for each band: ``{"B02": "b02.jp2", "B11": "b11.jp2"}``; bands of several resolutions come
        onto the finest grid.
    bands : sequence of str or int, optional
        Names (band descriptions) or numbers from 1, in the order wanted.
    chunks : int, tuple of int or "auto"
        Side of a chunk in pixels, or ``(y, x)``; "auto" takes a multiple of the file's blocks near
        2048.
    nodata : float, optional
        Replaces the files' own nodata.
    window : tuple of int, optional
        ``(row, col, height, width)`` in pixels.
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
    >>> open_raster(demo_path(), resolution=20, resampling="average").shape
    (6, 192, 384)
    """
    target = TargetGrid.of(like, crs, resolution, resampling)
    if isinstance(source, xr.DataArray):
        if target.given or stack is not None:
            raise ValueError(
                "an array is on its grid already: resample it with xarray or rioxarray, or pass "
                "the path to open_raster"
            )
        return _opened(source, bands, chunks, nodata, window, mask)
    reading = Reading(nodata, mask, sign, stack, target)
    opened = _cropped(assembled(source, reading, bands), window)
    return _lazy(opened, _chunk_sides(opened, chunks), mask)


def _cropped(source: Source, window: tuple[int, int, int, int] | None) -> Source:
    return source if window is None else source.crop(window_of(window, source.grid))


def _opened(
    array: xr.DataArray,
    bands: Bands,
    chunks: int | tuple[int, int] | Literal["auto"],
    nodata: float | None,
    window: tuple[int, int, int, int] | None,
    mask: bool,
) -> xr.DataArray:
    """A DataArray with the options of `open_raster` applied to it."""
    if window is not None:
        rows, cols = window_of(window, grid_of(array)).slices()
        array = array.isel(y=rows, x=cols)
    array = ArraySource(array).select(bands)._array
    if nodata is not None:
        array = array.drop_vars("mask", errors="ignore").assign_attrs(_FillValue=nodata)
    if not mask:
        array = array.drop_vars("mask", errors="ignore")
        array.attrs.pop("_FillValue", None)
    if chunks == "auto":
        return array
    y, x = (chunks, chunks) if isinstance(chunks, int) else chunks
    return array.chunk({array.dims[0]: -1, "y": y, "x": x})


def source_of(
    source: Any, *, bands: Bands = None, window: tuple[int, int, int, int] | None = None
) -> Source:
    """What `open_raster` takes as a `Source`.

    A DataArray as `open_raster` made it stands for its files again.  Read as an array, all of a
    chunk is decoded for whichever part of it is asked for: eight times the file in a run whose
    chunks have its size, for each touches eight others with its halo.
    """
    if not isinstance(source, xr.DataArray):
        return _cropped(assembled(source, Reading(), bands), window)
    files = _opened_raster(source)
    if files is not None:
        return _cropped(files, window).select(bands)
    if window is not None:
        rows, cols = window_of(window, grid_of(source)).slices()
        source = source.isel(y=rows, x=cols)
    return ArraySource(source).select(bands)


def _opened_raster(array: xr.DataArray) -> Source | None:
    """The files of an array that nothing was done to since it was opened."""
    if not isinstance(array.data, da.Array):
        return None
    source, made = _lately_opened.get(array.data.name, (None, array))
    same = (
        array.dims == made.dims
        and array.attrs == made.attrs
        and array.coords.keys() == made.coords.keys()
        and all(_same_coord(array.coords[name], made.coords[name]) for name in made.coords)
    )
    return source if same else None


def _same_coord(one: xr.DataArray, other: xr.DataArray) -> bool:
    if isinstance(one.data, da.Array) and isinstance(other.data, da.Array):
        return bool(one.data.name == other.data.name)
    return bool(one.variable.identical(other.variable))  # type: ignore[no-untyped-call]


def _lazy(raster: Any, sides: tuple[int, int], mask: bool) -> xr.DataArray:
    """The DataArray over a `Raster`, or over what is made of several."""
    count, shape = len(raster.band_names), raster.grid.shape
    chunks = da.core.normalize_chunks((count, *sides), (count, *shape), dtype=raster.dtype)
    name = f"daskinfer-read-{tokenize(raster, chunks)}"
    template = da.zeros((count, *shape), chunks=chunks, dtype=raster.dtype)
    data = template.map_blocks(
        _read_block,
        raster,
        chunks=chunks,
        dtype=raster.dtype,
        name=name,
        meta=np.empty((0, 0, 0), raster.dtype),
    )
    coords: dict[str, Any] = {"band": ("band", list(raster.band_names)), **raster.grid.coords()}
    if raster.has_mask and (mask or not isinstance(raster, Raster)):
        coords["mask"] = (("y", "x"), _lazy_mask(raster, data))
    # On the band axis, so that they follow a selection of bands.
    if any(scale != 1 for scale in raster.scales) or any(raster.offsets):
        # They belong to the numbers as stored: what is computed from those is told by its dtype.
        stored = {"dtype": raster.dtype}
        coords["scale"] = ("band", list(raster.scales), stored)
        coords["offset"] = ("band", list(raster.offsets), stored)
    attrs: dict[str, Any] = {}
    known = {value for value in raster.nodata if value is not None}
    if len(known) == 1:
        attrs["_FillValue"] = known.pop()
    title = Path(getattr(raster, "path", "")).stem or None
    array = xr.DataArray(data, coords, ("band", "y", "x"), title, attrs)
    _lately_opened[name] = raster, array.copy()
    while len(_lately_opened) > _KEPT_OPENED:
        _lately_opened.popitem(last=False)
    return array


def _lazy_mask(raster: Any, data: da.Array) -> da.Array:
    if isinstance(raster, Raster) and raster.mask is None:
        # From the numbers at hand: the file is read once for both.
        return data.map_blocks(
            valid_pixels, raster.nodata, drop_axis=0, dtype=bool, meta=np.empty((0, 0), bool)
        )
    rows_and_cols = data.chunks[1:]
    template = da.zeros(raster.grid.shape, chunks=rows_and_cols, dtype=bool)
    return template.map_blocks(_read_mask, raster, dtype=bool, meta=np.empty((0, 0), bool))


def _block_window(block_info: Any) -> Window:
    rows, cols = block_info[0]["array-location"][-2:]
    return Window(Span(*rows), Span(*cols))


def _read_block(block: Array, raster: Any, block_info: Any = None) -> Array:
    return _read_chunk(raster, _block_window(block_info)).data


def _read_mask(block: Array, raster: Any, block_info: Any = None) -> Mask:
    pixels = _read_chunk(raster, _block_window(block_info))
    return np.ones(block.shape, np.bool_) if pixels.valid is None else pixels.valid


def _read_chunk(raster: Any, window: Window) -> Pixels:
    if not isinstance(raster, Raster):
        pixels: Pixels = raster.read(window)
        return pixels
    # Chunks have no pixels in common.  A mask that the file keeps is a chunk of its own, for which
    # the numbers are read too.
    shared = raster.mask is not None or not raster.whole_blocks(window)
    return raster.read(window, cached=shared)


def _chunk_sides(raster: Any, chunks: int | tuple[int, int] | str) -> tuple[int, int]:
    if chunks != "auto":
        return (chunks, chunks) if isinstance(chunks, int) else tuple(chunks)  # type: ignore[return-value]
    height, width = (
        side * max(1, round(2048 / side)) if side < 4096 else 2048 for side in raster.block
    )
    return min(height, raster.grid.height), min(width, raster.grid.width)


def _names_of(array: xr.DataArray) -> tuple[str, ...]:
    first = array.dims[0]
    if first in array.coords:
        labels = tuple(str(name) for name in array.coords[first].values.ravel())
    else:
        labels = tuple(str(i + 1) for i in range(array.sizes[first]))
    # rioxarray numbers the bands and keeps their descriptions beside.
    described = array.attrs.get("long_name")
    if isinstance(described, (tuple, list)) and labels == _numbered(len(described)):
        return tuple(str(name) for name in described)
    return labels


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(str(i + 1) for i in range(count))


def _nodata_of(array: xr.DataArray) -> float | None:
    value = array.attrs.get("_FillValue", array.attrs.get("nodata"))
    return None if value is None else float(value)


def _per_band(
    array: xr.DataArray, coord: str, attrs: tuple[str, str], default: float
) -> tuple[float, ...]:
    """A number per band: a coordinate of the bands, or what rioxarray notes of the whole file."""
    count = array.shape[0]
    raw = array.coords[coord].attrs.get("dtype") if coord in array.coords else None
    if raw is not None and raw != str(array.dtype):
        raise ValueError(
            f"the array is {array.dtype} and was computed from {raw} numbers, to which its {coord} "
            f"belongs: drop_vars('{coord}') if it is applied already"
        )
    if coord in array.coords and array.coords[coord].size == count:
        return tuple(float(value) for value in array.coords[coord].values.ravel())
    one_for_all, one_each = attrs
    if one_each not in array.attrs:
        return (float(array.attrs.get(one_for_all, default)),) * count
    # The attribute does not follow a selection of bands; their coordinate, the numbers in the file,
    # does.
    values = array.attrs[one_each]
    bands = array.coords.get(str(array.dims[0]))
    numbers = range(1, count + 1) if bands is None else bands.values.ravel()
    try:
        return tuple(float(values[int(number) - 1]) for number in numbers)
    except (IndexError, ValueError) as error:
        raise ValueError(
            f"attribute {one_each!r} has {len(values)} entries, which do not tell of the bands "
            f"{list(numbers)}: pass {coord}= to load_model"
        ) from error
