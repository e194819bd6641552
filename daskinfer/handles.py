"""Open datasets, each thread its own.

A GDAL handle shared by threads returns corrupt pixels, and none survives pickling.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable

import rasterio
from rasterio._err import CPLE_BaseError
from rasterio.errors import RasterioIOError

__all__ = ["Sign", "drop_handle", "handle", "identity_of", "open_dataset"]

Sign = Callable[[str], str]

_HANDLES_PER_THREAD = 8
_local = threading.local()


def open_dataset(path: str, sign: Sign | None = None) -> rasterio.DatasetReader:
    """Open a raster.

    Parameters
    ----------
    path : str
    sign : callable, optional
        Gives the address to open for a path; called each time.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If GDAL does not open it.
    """
    try:
        # sharing=False: GDAL would hand the same handle to every thread that opens this path.
        return rasterio.open(path if sign is None else sign(path), sharing=False)
    # Of some broken headers rasterio passes on GDAL's own error.
    except (RasterioIOError, CPLE_BaseError) as error:
        if "://" not in path and not path.startswith("/vsi") and not os.path.exists(path):
            raise FileNotFoundError(f"source {path!r}: no such file") from error
        raise ValueError(f"source {path!r} is not a raster that GDAL opens: {error}") from error


def handle(path: str, opened: str, sign: Sign | None = None) -> rasterio.DatasetReader:
    """This thread's own open dataset; `opened` tells descriptions of one path apart."""
    handles, key = _handles(), _key(path, opened)
    if key not in handles:
        handles[key] = open_dataset(path, sign)
        if len(handles) > _HANDLES_PER_THREAD:
            handles.popitem(last=False)[1].close()
    handles.move_to_end(key)
    return handles[key]


def drop_handle(path: str, opened: str) -> None:
    """Close this thread's dataset, if it is open: the next read opens it anew."""
    dataset = _handles().pop(_key(path, opened), None)
    if dataset is not None:
        dataset.close()


def identity_of(path: str) -> str:
    """Path, size and modification time of a file; the name alone of what is none."""
    try:
        status = os.stat(path)
    except OSError:
        # A URL, or a driver's own name for a subdataset.
        return path
    return f"{os.path.abspath(path)}|{status.st_size}|{status.st_mtime_ns}"


def _handles() -> OrderedDict[str, rasterio.DatasetReader]:
    if not hasattr(_local, "handles"):
        _local.handles = OrderedDict()
    handles: OrderedDict[str, rasterio.DatasetReader] = _local.handles
    return handles


def _key(path: str, opened: str) -> str:
    return f"{identity_of(path)}|{opened}"
