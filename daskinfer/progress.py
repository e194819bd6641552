"""How far an unfinished output is, chunk by chunk: counts, and a map as a picture.

All of it is read from the work file and its ledger, without the plan that made them, also while a
run is writing.
"""

from __future__ import annotations

import os
import struct
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.errors import NotGeoreferencedWarning

from .cog import tiff
from .cog.tileindex import IndexedFile, whole_chunks
from .dashboard import states as chunk_states
from .dashboard.states import DONE, FAILED, MISSING, SKIPPED, thinned
from .fileio import read_at
from .ledger import Failure, read_ledger
from .tiling import AxisTiling

__all__ = ["STATES", "Progress", "read_progress", "write_map"]

STATES = chunk_states.STATES[:4]
"""Of a chunk, by number.  Skipped: done, and all of it nodata."""

_COLORS = {state: (*chunk_states.COLORS[state], 255) for state in range(len(STATES))}
# Between the header and the one tile of nodata, as `daskinfer.cog` writes it.
_SHARED = struct.Struct("<IQ")
_LARGEST = 1024


@dataclass(frozen=True, eq=False)
class Progress:
    """State of an unfinished output.

    Attributes
    ----------
    states : ndarray of uint8, shape (chunk rows, chunk columns)
        Numbers into `STATES`.
    failures : tuple of Failure
    settings : dict
        What the ledger says of the run.
    """

    states: NDArray[np.uint8]
    failures: tuple[Failure, ...]
    settings: dict[str, Any]

    def count(self, state: str) -> int:
        """Chunks in a state."""
        return int(np.count_nonzero(self.states == STATES.index(state)))


def read_progress(path: str | os.PathLike[str]) -> Progress | None:
    """Read the state of an unfinished output.

    Parameters
    ----------
    path : path
        The ``.partial`` file.

    Returns
    -------
    Progress or None
        None where there is no ledger, which alone knows the chunks.
    """
    ledger = Path(f"{os.fspath(path)}.jsonl")
    settings, failures = read_ledger(ledger) if ledger.exists() else (None, ())
    if settings is None:
        return None
    blocks, nodata, block, size = _blocks(os.fspath(path))
    starts = [
        _block_starts(AxisTiling(**settings["tiling"][axis]), side, block)
        for axis, side in zip("yx", size, strict=True)
    ]
    there = whole_chunks(blocks, *starts)
    empty = whole_chunks(blocks & nodata, *starts)
    states = np.where(there, np.where(empty, SKIPPED, DONE), MISSING).astype(np.uint8)
    states.flat[[failure.chunk for failure in failures]] = FAILED
    return Progress(states, failures, settings)


def write_map(progress: Progress, picture: str | os.PathLike[str]) -> None:
    """Write a PNG of the chunk grid, a square per chunk in the colour of its state.

    Missing is dark grey, done green, skipped light green, failed red.

    Parameters
    ----------
    progress : Progress
    picture : path
        Up to 1024 px a side: the chunks of very large grids share pixels, which show the worst.
    """
    states, _ = thinned(progress.states, _LARGEST)
    states = states.repeat(side := max(1, _LARGEST // max(states.shape)), 0).repeat(side, 1)
    profile = {"driver": "PNG", "height": states.shape[0], "width": states.shape[1], "count": 1}
    with warnings.catch_warnings():
        # A picture has no georeferencing to lose.
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with rasterio.open(picture, "w", dtype="uint8", **profile) as dataset:
            dataset.write(states, 1)
            dataset.write_colormap(1, _COLORS)
    # GDAL leaves its statistics and the like beside a PNG.
    Path(f"{os.fspath(picture)}.aux.xml").unlink(missing_ok=True)


# Which blocks are there, which are all nodata, side of a block, size of the raster.
_Blocks = tuple[NDArray[np.bool_], NDArray[np.bool_], int, tuple[int, int]]


def _blocks(path: str) -> _Blocks:
    """Blocks of an output in one file, or in several."""
    return _blocks_of_vrt(path) if path.lower().endswith(".vrt.partial") else _blocks_of_file(path)


def _blocks_of_vrt(path: str) -> _Blocks:
    """Blocks of all files that a VRT of unfinished ones shows; those that are gone are finished."""
    root = ElementTree.parse(path).getroot()
    band = root.find("VRTRasterBand")
    if band is None:
        raise ValueError(f"{path!r} has no band")
    size = int(root.get("rasterYSize", 0)), int(root.get("rasterXSize", 0))
    block = int(band.get("blockYSize", 0))
    there = np.ones([-(-side // block) for side in size], bool)
    nodata = np.zeros_like(there)
    for source in band.iter("SimpleSource"):
        name, place = source.findtext("SourceFilename", ""), source.find("DstRect")
        if place is not None and (file := Path(path).parent / name).exists():
            part, empty, _, _ = _blocks_of_file(str(file))
            row, col = (int(place.get(key, 0)) // block for key in ("yOff", "xOff"))
            at = np.s_[row : row + part.shape[0], col : col + part.shape[1]]
            there[at], nodata[at] = part, empty
    return there, nodata, block, size


def _blocks_of_file(path: str) -> _Blocks:
    """Blocks of a work file; one counts once all its planes are there."""
    with open(path, "rb") as file:
        ifds = tiff.parse(partial(read_at, path, file.fileno()))
        main, block = ifds[0], int(ifds[0][tiff.TILE_WIDTH].ints()[0])
        shapes = [tiff.shape_of(ifd) for ifd in ifds]
        layout = tiff.plan_layout(main, shapes, block, tiff.WORK_GHOST)
        index = IndexedFile(path, file.fileno(), layout)
        rows, cols = (-(-side // block) for side in shapes[0])
        counts = index.counts(0).reshape(-1, rows, cols).min(axis=0)
        offsets = index.offsets(0).reshape(-1, rows, cols).max(axis=0)
    shared = layout.data_start + _SHARED.size
    return counts > 0, offsets == shared, block, shapes[0]


def _block_starts(axis: AxisTiling, size: int, block: int) -> list[int]:
    """First block of each chunk on an axis of the output, which may have another scale."""
    side = round(axis.chunk * size / axis.size / block)
    return [k * side for k in range(axis.chunks)]
