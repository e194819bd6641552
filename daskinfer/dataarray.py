"""A source of windows as a lazy DataArray, and from that array back to the source."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from .inputs.attributes import STORED
from .inputs.dated import DATE, unflattened
from .inputs.protocol import Source
from .inputs.timestack import TimeStack
from .pixels import Array, Mask, Pixels, valid_pixels
from .raster import Raster
from .tiling import Span, Window

__all__ = ["ChunkSides", "lazy_array", "opened_source"]

ChunkSides = int | tuple[int, int] | Literal["auto"]
Sizes = tuple[tuple[int, ...], tuple[int, ...]]

# Coordinates of so many pixels take 128 MB an axis.
_LONGEST = 1 << 24
_KEPT_OPENED = 32
# By the name of their numbers, which any operation on them changes.
_lately_opened: OrderedDict[str, tuple[Source, xr.DataArray]] = OrderedDict()


def lazy_array(raster: Any, chunks: ChunkSides, mask: bool) -> xr.DataArray:
    """The DataArray over a `Raster`, or over what is made of several.

    Parameters
    ----------
    raster : Source
    chunks : int, tuple of int or "auto"
        As of `daskinfer.open_raster`.
    mask : bool
        Whether a mask that the file keeps is the coordinate ``mask``.

    Raises
    ------
    ValueError
        If a side is so long that the coordinates alone would fill the memory.
    """
    count, shape = len(raster.band_names), raster.grid.shape
    if max(shape) > _LONGEST:
        raise ValueError(
            f"a raster of {shape[0]} x {shape[1]} px is too long for an array, whose coordinates "
            f"are in memory; {_LONGEST} px is the most: open a part of it with window= or bounds="
        )
    sides = _chunk_sides(raster, chunks)
    sizes = da.core.normalize_chunks((count, *sides), (count, *shape), dtype=raster.dtype)
    name = f"daskinfer-read-{tokenize(raster, sizes)}"
    template = da.zeros((count, *shape), chunks=sizes, dtype=raster.dtype)
    data = template.map_blocks(
        partial(_read_block, raster),
        sizes=sizes[1:],
        chunks=sizes,
        dtype=raster.dtype,
        name=name,
        meta=np.empty((0, 0, 0), raster.dtype),
    )
    coords: dict[str, Any] = {"band": ("band", list(raster.band_names)), **raster.grid.coords()}
    if raster.has_mask and (mask or not isinstance(raster, Raster)):
        coords["mask"] = (("y", "x"), _lazy_mask(raster, data))
    # On the band axis, so that they follow a selection of bands.
    if any(scale != 1 for scale in raster.scales) or any(raster.offsets):
        # They belong to the numbers as stored: what is computed from those has another dtype, or
        # no encoding.
        stored = {"dtype": raster.dtype, **STORED}
        coords["scale"] = ("band", list(raster.scales), stored)
        coords["offset"] = ("band", list(raster.offsets), stored)
    attrs: dict[str, Any] = {}
    known = {value for value in raster.nodata if value is not None}
    if len(known) == 1:
        attrs["_FillValue"] = known.pop()
    if getattr(raster, "physical", False):
        attrs["physical"] = "scale and offset of the files are applied"
    title = Path(getattr(raster, "path", "scene")).stem or None
    array = xr.DataArray(data, coords, ("band", "y", "x"), title, attrs)
    array.encoding["dtype"] = np.dtype(raster.dtype)
    if isinstance(raster, TimeStack) and raster.picked is None:
        array = unflattened(array, raster)
        name = array.data.name
    elif isinstance(raster, TimeStack):
        array = array.assign_coords({DATE: ("band", list(raster.dates))})
    _lately_opened[name] = raster, array.copy()
    while len(_lately_opened) > _KEPT_OPENED:
        _lately_opened.popitem(last=False)
    return array


def _lazy_mask(raster: Any, data: da.Array) -> da.Array:
    if isinstance(raster, Raster) and raster.mask is None and raster.covers is None:
        # From the numbers at hand: the file is read once for both.
        return data.map_blocks(
            partial(valid_pixels, nodata=raster.nodata),
            drop_axis=0,
            dtype=bool,
            meta=np.empty((0, 0), bool),
        )
    sizes = data.chunks[1:]
    template = da.zeros(raster.grid.shape, chunks=sizes, dtype=bool)
    return template.map_blocks(
        partial(_read_mask, raster), sizes=sizes, dtype=bool, meta=np.empty((0, 0), bool)
    )


def _block_window(block_id: tuple[int, ...], sizes: Sizes) -> Window:
    """Pixels of a block, from the heights and widths of all."""
    rows, cols = (
        Span(sum(own[:k]), sum(own[: k + 1])) for k, own in zip(block_id[-2:], sizes, strict=True)
    )
    return Window(rows, cols)


# Blocks are told by number, not by `block_info`: Dask would list that for all of them in advance, a
# minute for a raster of a million px a side.  The raster is bound to the function: of an argument
# Dask would look at every field for arrays of its own, at length where there are 65 535 bands.
def _read_block(raster: Any, block: Array, sizes: Sizes, block_id: Any = None) -> Array:
    return _read_chunk(raster, _block_window(block_id, sizes)).data


def _read_mask(raster: Any, block: Array, sizes: Sizes, block_id: Any = None) -> Mask:
    pixels = _read_chunk(raster, _block_window(block_id, sizes))
    return np.ones(block.shape, np.bool_) if pixels.valid is None else pixels.valid


def _read_chunk(raster: Any, window: Window) -> Pixels:
    if not isinstance(raster, Raster):
        pixels: Pixels = raster.read(window)
        return pixels
    # Chunks have no pixels in common.  A mask that the file keeps is a chunk of its own, for which
    # the numbers are read too.
    shared = bool(raster.mask or raster.covers) or not raster.whole_blocks(window)
    return raster.read(window, cached=shared)


def _chunk_sides(raster: Any, chunks: ChunkSides) -> tuple[int, int]:
    if chunks != "auto":
        return (chunks, chunks) if isinstance(chunks, int) else tuple(chunks)  # type: ignore[return-value]
    height, width = (
        side * max(1, round(2048 / side)) if side < 4096 else 2048 for side in raster.block
    )
    return min(height, raster.grid.height), min(width, raster.grid.width)


def opened_source(array: xr.DataArray) -> Source | None:
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
