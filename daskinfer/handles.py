"""Open datasets, each thread its own; what is read of one, and which files it is made of.

A GDAL handle shared by threads returns corrupt pixels, and none survives pickling.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rasterio
import rasterio.windows
from rasterio._err import CPLE_BaseError
from rasterio.enums import ColorInterp
from rasterio.errors import RasterioIOError

from .metadata import MaskKind
from .pixels import Array
from .recycled import recycled

__all__ = ["Sign", "digest_of", "drop_handle", "files_below", "files_of", "handle", "identity_of",
           "open_dataset", "read_bands", "read_mask"]  # fmt: skip

Sign = Callable[[str], str]

_HANDLES_PER_THREAD = 8
# What they say of pixels is in the description of a raster; viewers write them on the way.
_NO_PIXELS = (".aux.xml", ".ovr")
# What GDAL opens in an archive.
_PACKED = re.compile(r"/vsi(?:zip|tar|gzip|7z|rar)/")
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


def digest_of(*facts: object) -> str:
    """A short name for facts, the same in every process."""
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:32]


def files_of(dataset: rasterio.DatasetReader, path: str) -> str:
    """Names the state of the files that a dataset's pixels come from, beside its own.

    A mask beside it, headers, the archive it lies in, and, however deep, the files of a VRT.
    """
    names = [path, *files_below(dataset, {path})]
    return digest_of(*sorted({identity_of(_on_disk(name)) for name in names}))


def files_below(dataset: rasterio.DatasetReader, known: set[str]) -> Iterator[str]:
    """Files that GDAL reads for a dataset, those of the VRTs among them too, each once.

    Parameters
    ----------
    dataset : DatasetReader
    known : set of str
        Names that are left out; every name that is given is put there.
    """
    for name in dataset.files:
        if name in known or name.lower().endswith(_NO_PIXELS):
            continue
        known.add(name)
        yield name
        if name.lower().endswith(".vrt"):
            # GDAL lists the files of a VRT, not those of the VRTs among them.
            try:
                with open_dataset(name) as inner:
                    yield from files_below(inner, known)
            except (FileNotFoundError, ValueError):
                continue


def _on_disk(name: str) -> str:
    """The archive that a file lies in; any other file itself."""
    inside = _PACKED.sub("", name)
    if inside == name:
        return name
    return next((str(p) for p in (Path(inside), *Path(inside).parents) if p.is_file()), name)


def read_bands(
    dataset: rasterio.DatasetReader,
    numbers: Sequence[int],
    dtype: str,
    area: rasterio.windows.Window,
    shape: tuple[int, int],
) -> Array:
    """Pixels of bands, one dtype for all."""
    if len({dataset.dtypes[n - 1] for n in numbers}) == 1:
        stored = dataset.dtypes[numbers[0] - 1]
        data = dataset.read(
            list(numbers), window=area, out=recycled((len(numbers), *shape), stored)
        )
        return np.asarray(data, dtype)
    # Bands of a VRT, which rasterio refuses to read at once.
    bands = (dataset.read(n, window=area, out_shape=shape) for n in numbers)
    return np.stack([band.astype(dtype) for band in bands])


def read_mask(
    dataset: rasterio.DatasetReader,
    kind: MaskKind,
    numbers: Sequence[int],
    area: rasterio.windows.Window,
    shape: tuple[int, int],
) -> npt.NDArray[Any]:
    """What a file keeps as its mask, 0 where a pixel is nodata."""
    if kind == "bands":
        masks = dataset.read_masks(list(numbers), window=area, out_shape=(len(numbers), *shape))
        return np.asarray(masks.min(axis=0))
    if kind == "alpha":
        # Not dataset_mask: it takes alpha for a mask only where there are two or four bands.
        alpha = dataset.colorinterp.index(ColorInterp.alpha) + 1
        return np.asarray(dataset.read(alpha, window=area, out_shape=shape))
    return np.asarray(dataset.dataset_mask(window=area, out_shape=shape))


def _handles() -> OrderedDict[str, rasterio.DatasetReader]:
    if not hasattr(_local, "handles"):
        _local.handles = OrderedDict()
    handles: OrderedDict[str, rasterio.DatasetReader] = _local.handles
    return handles


def _key(path: str, opened: str) -> str:
    return f"{identity_of(path)}|{opened}"
