"""The files that a source is made of, none of which an output may replace."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xarray as xr
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from .cog.spec import no_georeferencing_warning
from .handles import files_below, open_dataset
from .inputs.protocol import leaves
from .splitting.pieces import Places

__all__ = ["check_origins", "origins"]

# Rasters that hold their pixels themselves: they are not opened to find others in them.
_PLAIN = (".tif", ".tiff", ".jp2")


def check_origins(path: str, source: Any) -> None:
    """Refuse an output that would replace a file of its source.

    Parameters
    ----------
    path : str
        Of the output, a file or a Zarr store, or its URL.
    source : any source, or several in a list
        As the user named it, or opened.

    Raises
    ------
    ValueError
        If the output, or what it grows in, is one of those files.
    """
    places = [place for place in _replaced(path) if os.path.exists(place)]
    scheme, _, key = path.partition("://")
    if not places and not key:
        return
    for name in origins(source):
        if name in (path, f"/vsi{scheme}/{key}") or any(_lies_at(name, place) for place in places):
            raise ValueError(
                f"output {path!r} is the source itself, or would replace a file of it ({name!r}): "
                "choose another name"
            )


def origins(source: Any) -> Iterator[str]:
    """Names of the files and stores that a source reads, as far as they can be known.

    Parameters
    ----------
    source : any source, or several in a list
        Of a DataArray its graph tells; numbers in memory come from nowhere.

    Yields
    ------
    str
        Also of what is in VRTs.

    Examples
    --------
    >>> list(origins(["a.tif", {"red": "b.tif"}]))
    ['a.tif', 'b.tif']
    """
    if isinstance(source, (str, os.PathLike)):
        yield from _with_inner(os.fspath(source))
    elif isinstance(source, Mapping):
        # A Dataset too.
        yield from origins(list(source.values()))
    elif isinstance(source, (list, tuple)):
        for one in source:
            yield from origins(one)
    elif isinstance(source, xr.DataArray):
        yield from origins(source.encoding.get("source"))
        yield from _of_graph(source.__dask_graph__())  # type: ignore[no-untyped-call]
    else:
        for raster in leaves(source):
            yield from origins(raster.path)
        # Of an array as a source.
        yield from _of_graph(getattr(getattr(source, "data", None), "dask", None))


def _replaced(path: str) -> Iterator[str]:
    """What is not there any more, as it was, when an output is."""
    yield path
    yield f"{path}.partial"
    if path.lower().endswith(".vrt"):
        yield str(Places(path, (1, 1)).folder)


def _lies_at(name: str, place: str) -> bool:
    """Whether a file is that of another name, or in that folder."""
    if not os.path.exists(name):
        return False
    inside = Path(name).resolve().is_relative_to(Path(place).resolve())
    return inside or os.path.samefile(name, place)


def _with_inner(name: str) -> Iterator[str]:
    """A raster's name, and those of the files that GDAL reads for it."""
    yield name
    if name.lower().endswith(_PLAIN) and os.path.exists(name):
        return
    if not name.lower().endswith(".vrt") and ":" not in name:
        return
    try:
        with no_georeferencing_warning(), open_dataset(name) as dataset:
            yield from sorted(files_below(dataset, {name}))
    except (FileNotFoundError, ValueError):
        # Whoever opens the source says what is wrong with it.
        return


def _of_graph(graph: Any) -> Iterator[str]:
    """The files that tasks read: of `daskinfer.open_raster`, and of xarray's backends."""
    if not isinstance(graph, HighLevelGraph):
        return
    for layer in graph.layers.values():
        held: Iterable[Any] = ()
        if isinstance(layer, Blockwise):
            held = (value for value, axes in layer.indices if axes is None)
        elif isinstance(layer, MaterializedLayer):
            held = layer.mapping.values()
        for value in held:
            yield from _held_by(value)


def _held_by(value: Any) -> Iterator[str]:
    value = getattr(value, "value", value)
    # Of a task, or of a function that a source is bound to.
    for one in getattr(value, "args", ()):
        yield from _held_by(one)
    if hasattr(value, "band_names"):
        yield from origins(value)
    # An array in xarray's wrappings.
    while hasattr(value, "array"):
        value = value.array
    arguments = getattr(getattr(value, "manager", None), "_args", ())
    yield from (one for one in arguments if isinstance(one, str))
    root = getattr(getattr(getattr(value, "_array", None), "store", None), "root", None)
    if root is not None:
        yield str(root)
