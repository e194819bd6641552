"""Write a Zarr store chunk by chunk, in any order, from any number of processes.

No two chunks of a run share a Zarr chunk, so that no lock is needed.  Zarr cannot say which chunks
are there: a nodata chunk is not stored, and one of a run is several of the store.  So a file that
is named for the corner of each chunk says so, and is written after it; it lies in a folder beside
the store, ``<output>.partial.done``.  The store grows in ``<output>.partial``, a name that it has
from when it is whole but for its pixels until it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from affine import Affine
from numpy.typing import NDArray

from .cog.overview import Shape
from .cog.spec import CogSpec
from .pixels import Array

__all__ = ["EncodedZarr", "ZarrDraft", "ZarrWork", "check_store", "is_zarr_output"]

# Beside the unfinished store: what chunks are done, what is made or removed, what it replaces.
_DONE, _SCRATCH, _OLD = ".done", ".tmp", ".old"
# Side of a chunk of the store, at most: what a viewer reads for one pixel.
_LARGEST = 1024
_NAME = "prediction"


def is_zarr_output(path: str) -> bool:
    """Whether an output of this name is a Zarr store.

    >>> is_zarr_output("maps/clouds.zarr"), is_zarr_output("maps/clouds.tif")
    (True, False)
    """
    return Path(path).suffix.lower() == ".zarr"


def check_store(path: str, overwrite: bool) -> None:
    """Refuse what cannot be written, or replaced, as a store.

    Raises
    ------
    FileExistsError
        If there is something that `overwrite` does not allow to replace, or is no store.
    ModuleNotFoundError
        Without the extra ``zarr``.
    """
    try:
        import zarr  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"writing {path} needs zarr: pip install 'daskinfer[zarr]'"
        ) from error
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise FileExistsError(f"output {path!r} exists: pass overwrite=True to replace it")
    if not any((Path(path) / name).exists() for name in ("zarr.json", ".zgroup", ".zattrs")):
        raise FileExistsError(f"output {path!r} is not a Zarr store: choose another name")


@dataclass(frozen=True)
class EncodedZarr:
    """A chunk for `ZarrWork.append`: its pixels, which the store encodes, and its corner."""

    data: Array
    row: int
    col: int

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels."""
        return int(self.data.nbytes)


@dataclass(frozen=True)
class ZarrDraft:
    """A store before there is one; picklable, with the methods of `daskinfer.draft.Draft`.

    Attributes
    ----------
    spec : CogSpec
        What is to be written; its codec and layout do not apply.
    chunk : (int, int)
        Sides of the chunk grid in pixels.
    """

    spec: CogSpec
    chunk: Shape

    @property
    def pieces(self) -> None:
        """One store, not a grid of files."""
        return

    def create(self, path: str) -> ZarrWork:
        """Make a store in which every chunk is missing."""
        return ZarrWork.create(path, self.spec, self.chunk)

    def open(self, path: str) -> ZarrWork:
        """Go on with it."""
        return ZarrWork(path, self.spec, self.chunk)

    def discard(self, path: str) -> None:
        """Remove it, if it is there."""
        _remove(path)

    def encode(self, array: Array, row: int, col: int) -> EncodedZarr:
        """The pixels of a chunk whose corner is this pixel."""
        return EncodedZarr(array, row, col)


class ZarrWork:
    """The store that chunks are appended to; made by `create` or opened.

    Parameters
    ----------
    path : str
    spec : CogSpec
    chunk : (int, int)

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    """

    def __init__(self, path: str, spec: CogSpec, chunk: Shape) -> None:
        import zarr

        self.path, self.spec, self.chunk = os.path.abspath(path), spec, chunk
        self._done = f"{self.path}{_DONE}"
        self._array: Any = zarr.open_array(os.path.join(self.path, _NAME), mode="r+")
        expected = (spec.count, spec.height, spec.width)
        if self._array.shape != expected:
            raise ValueError(f"{path} was made for {self._array.shape}, not {expected}")

    @classmethod
    def create(cls, path: str, spec: CogSpec, chunk: Shape) -> ZarrWork:
        """Make a store in which every chunk is missing.

        Raises
        ------
        FileExistsError
            If `path` exists: open it to go on, or delete it.
        """
        if os.path.exists(path):
            raise FileExistsError(f"{path} exists: open it to go on, or delete it")
        # Of a run that was killed here, or at its very end.
        _remove(path)
        os.mkdir(f"{path}{_DONE}")
        _write_template(f"{path}{_SCRATCH}", spec, _sides(spec, chunk))
        os.rename(f"{path}{_SCRATCH}", path)
        return cls(path, spec, chunk)

    def __reduce__(self) -> tuple[Any, ...]:
        return ZarrWork, (self.path, self.spec, self.chunk)

    def __enter__(self) -> ZarrWork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held open."""

    def append(self, encoded: EncodedZarr) -> None:
        """Write a chunk, then note that it is there.

        Raises
        ------
        OSError
            If the disk is full or fails, or the store was finished meanwhile.
        """
        data, row, col = encoded.data, encoded.row, encoded.col
        if not os.path.isdir(self.path):
            raise FileNotFoundError(f"{self.path} was finished or removed meanwhile")
        height, width = data.shape[1:]
        self._array[:, row : row + height, col : col + width] = data
        Path(self._done, f"{row}-{col}").touch()

    def done(
        self, rows: Sequence[int] | None = None, cols: Sequence[int] | None = None
    ) -> NDArray[np.bool_]:
        """Tell which chunks are there, of those with these first rows and columns."""
        rows = range(0, self.spec.height, self.chunk[0]) if rows is None else rows
        cols = range(0, self.spec.width, self.chunk[1]) if cols is None else cols
        there = set(os.listdir(self._done))
        found = [[f"{row}-{col}" in there for col in cols] for row in rows]
        return np.array(found, bool).reshape(len(rows), len(cols))

    def finish(
        self, output: str, layout: str = "strict", *, failed: Sequence[tuple[int, int]] = ()
    ) -> int:
        """Turn it into the output, which appears whole; returns its bytes.

        Can be called again after it was killed.

        Parameters
        ----------
        output : str
            Replaced if it exists.
        layout : str
            A store has none.
        failed : sequence of (int, int)
            First pixels of chunks that were given up and are nodata.

        Raises
        ------
        RuntimeError
            If chunks are missing.
        """
        import zarr

        missing = np.count_nonzero(~self.done(*self._corners()))
        if missing:
            raise RuntimeError(f"{self.path}: {missing} chunks are missing")
        if failed:
            zarr.open_group(self.path, mode="r+").attrs["FAILED_CHUNKS"] = len(failed)
        old = f"{self.path}{_OLD}"
        if os.path.exists(output):
            # What is of that name was replaced by a run that was killed before it had removed it.
            _remove_folder(old)
            os.rename(output, old)
        os.rename(self.path, output)
        # Readers may hold files of the old one, which some file systems then keep.
        shutil.rmtree(self._done, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        return sum(file.stat().st_size for file in Path(output).rglob("*") if file.is_file())

    def _corners(self) -> tuple[list[int], list[int]]:
        """First rows and columns of the chunks that were noted: the last may be longer."""
        names = os.listdir(self._done)
        starts = [[int(name.split("-")[i]) for name in names] for i in (0, 1)]
        found = []
        for own, size, side in zip(starts, self.spec.shapes[0], self.chunk, strict=True):
            every = set(range(0, size, side))
            # A remainder too short for a chunk of its own is part of the one before.
            last = max(every)
            if last not in own and last:
                every.discard(last)
            found.append(sorted(every))
        return found[0], found[1]


def _remove(path: str) -> None:
    """Remove an unfinished store, which at no moment is there in part."""
    _remove_folder(f"{path}{_SCRATCH}")
    if os.path.exists(path):
        os.rename(path, f"{path}{_SCRATCH}")
        _remove_folder(f"{path}{_SCRATCH}")
    _remove_folder(f"{path}{_DONE}")


def _remove_folder(path: str) -> None:
    if os.path.exists(path):
        shutil.rmtree(path)


def _sides(spec: CogSpec, chunk: Shape) -> tuple[int, int]:
    """Sides of the store's chunks: whole parts of a run's chunk, so that no two share one."""
    sides = []
    for side, size in zip(chunk, spec.shapes[0], strict=True):
        parts = 1
        while side / parts > _LARGEST or side % parts:
            parts += 1
        sides.append(min(side // parts, size))
    return sides[0], sides[1]


def _write_template(path: str, spec: CogSpec, sides: tuple[int, int]) -> None:
    """Everything of a store but its pixels: axes, grid mapping, nodata, what numbers mean."""
    import dask.array as da
    import xarray as xr

    transform = None if spec.transform is None else Affine(*spec.transform)
    # Imports rioxarray, which workers that only write COGs can do without.
    from .grid import Grid

    grid = Grid(
        spec.height,
        spec.width,
        transform,
        spec.crs,
        spec.gcps,
        spec.gcps_crs,
        spec.rpcs,
        dict(spec.tags).get("AREA_OR_POINT") == "Point",
    )
    shape = (spec.count, spec.height, spec.width)
    chunks = (spec.count, *sides)
    # Of a dtype that is not named Dask takes no notice, and makes float64.
    lazy = da.zeros(shape, dtype=spec.dtype, chunks=(spec.count, 4096, 4096))
    names = spec.descriptions or tuple(str(i + 1) for i in range(spec.count))
    coords = {"band": ("band", np.array(names, object)), **grid.coords()}
    if len(set(spec.scales)) > 1:
        # CF has one for all; open_raster takes one of each band.
        coords["scale"] = ("band", list(spec.scales))
    array = xr.DataArray(lazy, coords, ("band", "y", "x"), _NAME, _meanings(spec))
    encoding: dict[str, Any] = {"chunks": chunks, "grid_mapping": "spatial_ref"}
    if spec.nodata is not None:
        number = np.dtype(spec.dtype).type(spec.nodata)
        encoding |= {"_FillValue": number, "fill_value": number}
    dataset = array.to_dataset().assign_attrs(Conventions="CF-1.11")
    dataset.to_zarr(
        path,
        mode="w-",
        compute=False,
        consolidated=False,
        encoding={_NAME: encoding},
        zarr_format=3,
        safe_chunks=False,
    )


def _meanings(spec: CogSpec) -> dict[str, Any]:
    """Names and colours of classes in CF's words, and who wrote it."""
    tags = dict(spec.tags)
    attrs: dict[str, Any] = {}
    if len(set(spec.scales)) == 1 and spec.scales[0] != 1:
        attrs |= {"scale_factor": spec.scales[0], "add_offset": 0.0}
    if "CLASS_NAMES" in tags:
        names = json.loads(tags["CLASS_NAMES"])
        attrs["flag_values"] = list(range(len(names)))
        attrs["flag_meanings"] = " ".join("_".join(str(name).split()) for name in names)
        attrs["class_names"] = list(names)
    if spec.colors:
        attrs["flag_colors"] = " ".join(f"#{bytes(color[:3]).hex()}" for color in spec.colors)
    if "TIFFTAG_SOFTWARE" in tags:
        attrs["history"] = tags["TIFFTAG_SOFTWARE"]
    return attrs
