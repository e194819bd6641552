"""Where a raster is cut into files, and what they are called.

The files of ``maps/clouds.vrt`` lie in ``maps/clouds_files/``: ``clouds_r00_c03.tif`` is the one in
the first row and fourth column of files, and begins at row 0 and at column 3 times the side.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from affine import Affine
from numpy.typing import NDArray

from ..cog.encode import EncodedChunk, encode_chunk
from ..cog.overview import Array
from ..cog.spec import CogSpec
from ..tiling import Span, Window

__all__ = [
    "MOST_FILES",
    "EncodedPieces",
    "Pieces",
    "Places",
    "auto_side",
    "check_folder",
    "check_side",
    "dividing",
    "is_finished",
]

Index = tuple[int, int]

# A VRT of more is slow to open, and so is a folder to list.
MOST_FILES = 10_000
# Side of a file when none is asked for: its index takes 1 MB with blocks of 512 px, so that readers
# have it with their first requests, and a map of classes some GB, which tools still move in one go.
_AUTO_SIDE = 1 << 17


@dataclass(frozen=True, eq=False)
class EncodedPieces:
    """An encoded chunk, cut where files end; picklable.

    Parameters
    ----------
    parts : tuple of ((int, int), EncodedChunk)
        Index of a file, and what goes into it.
    """

    parts: tuple[tuple[Index, EncodedChunk], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles."""
        return sum(encoded.nbytes for _, encoded in self.parts)


@dataclass(frozen=True)
class Pieces:
    """A raster as a grid of files.

    Parameters
    ----------
    spec : CogSpec
        The whole raster.
    side : int
        Of each file in pixels, a multiple of the block size; those at the right and bottom edge
        are smaller.

    Raises
    ------
    ValueError
        If files would not consist of whole blocks, or be too many.

    Examples
    --------
    >>> pieces = Pieces(CogSpec(2500, 1000, 1, "uint8"), 1024)
    >>> pieces.grid, pieces.window((2, 0)).bounds()
    ((3, 1), (2048, 0, 452, 1000))
    """

    spec: CogSpec
    side: int

    def __post_init__(self) -> None:
        check_side(self.side, self.spec.blocksize)
        if math.prod(self.grid) > MOST_FILES:
            raise ValueError(
                f"split {self.side} makes {math.prod(self.grid)} files, more than {MOST_FILES}: "
                "pass a larger split"
            )

    @property
    def grid(self) -> Index:
        """Rows and columns of files."""
        return -(-self.spec.height // self.side), -(-self.spec.width // self.side)

    def __iter__(self) -> Iterator[Index]:
        rows, cols = map(range, self.grid)
        return itertools.product(rows, cols)

    def window(self, index: Index) -> Window:
        """Pixels of a file."""
        spans = [
            Span(self.side * i, min(self.side * (i + 1), size))
            for i, size in zip(index, self.spec.shapes[0], strict=True)
        ]
        return Window(*spans)

    def spec_of(self, index: Index) -> CogSpec:
        """What a file is to be: the whole, but for size and place."""
        spec, window = self.spec, self.window(index)
        height, width = window.shape
        placed: dict[str, Any] = {}
        if spec.transform is not None:
            row, col = window.origin
            moved = Affine(*spec.transform) @ Affine.translation(col, row)
            placed["transform"] = tuple(moved)[:6] if row or col else spec.transform
        if spec.gcps or spec.rpcs:
            placed |= _tied(spec, window)
        return replace(spec, height=height, width=width, **placed)

    def cut(self, window: Window) -> Iterator[tuple[Index, Window]]:
        """The files that a window meets, and the part of it in each."""
        rows, cols = (
            range(span.start // self.side, (span.stop - 1) // self.side + 1)
            for span in (window.rows, window.cols)
        )
        for index in itertools.product(rows, cols):
            yield index, self.window(index).clip(window)

    def chunk_in(self, chunk: tuple[int, int]) -> tuple[int, int]:
        """The chunk grid inside a file: a file is one chunk where chunks are larger."""
        return min(chunk[0], self.side), min(chunk[1], self.side)

    def encode(self, array: Array, row: int, col: int, chunk: tuple[int, int]) -> EncodedPieces:
        """Encode a chunk.

        Parameters
        ----------
        array : ndarray, shape (band, y, x)
            Pixels, of the dtype of the file.
        row, col : int
            Pixel of the chunk's corner in the whole raster.
        chunk : (int, int)
            Sides of the chunk grid in pixels: parts of `side`, or multiples.

        Returns
        -------
        EncodedPieces
            A part for each file that the chunk meets.
        """
        whole = Window(Span(row, row + array.shape[1]), Span(col, col + array.shape[2]))
        chunk = self.chunk_in(chunk)
        parts = []
        for index, part in self.cut(whole):
            spec, origin = self.spec_of(index), self.window(index).origin
            rows, cols = part.slices(whole.origin)
            at = part.rows.start - origin[0], part.cols.start - origin[1]
            encoded = encode_chunk(spec, array[:, rows, cols], *at, spec.local_levels(chunk))
            parts.append((index, encoded))
        return EncodedPieces(tuple(parts))

    def joined(self, blocks: dict[Index, NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """Put arrays of the files' blocks together to one of the raster's."""
        rows, cols = map(range, self.grid)
        return np.concatenate([np.concatenate([blocks[i, j] for j in cols], 1) for i in rows])


def check_side(side: Any, block: int) -> None:
    """Refuse a side of files that is not of whole blocks; ValueError says what would be."""
    if isinstance(side, bool) or not isinstance(side, (int, np.integer)) or side < 1:
        raise ValueError(f"split must be 'auto' or whole px from 1 up, got {side!r}")
    if side % block:
        near = -(-side // block) * block
        raise ValueError(
            f"split {side} is not a multiple of the block size {block}: pass split={near}"
        )


def dividing(side: int, wanted: int, unit: int) -> int:
    """The chunk side near `wanted` of which files of `side` px are made, or that is made of them.

    Parameters
    ----------
    side : int
        Of the files.
    wanted, unit : int
        The result is a multiple of `unit`, if `side` is.

    Returns
    -------
    int
        `wanted` where that fits, else the largest below that divides `side`.

    Examples
    --------
    >>> dividing(10240, 2048, 512), dividing(1024, 2048, 512), dividing(5120, 2048, 512)
    (2048, 2048, 1024)
    """
    if not wanted % side or not side % wanted:
        return wanted
    count = side // unit
    divisors = (n for n in range(min(count, wanted // unit), 0, -1) if count % n == 0)
    return unit * next(divisors, count)


def _tied(spec: CogSpec, window: Window) -> dict[str, Any]:
    """Ground control points and RPCs of a window."""
    # Imports xarray, which workers that only write can do without.
    from ..grid import Grid

    grid = Grid(spec.height, spec.width, None, None, spec.gcps, spec.gcps_crs, spec.rpcs)
    part = grid.window(window)
    return {"gcps": part.gcps, "rpcs": part.rpcs}


def auto_side(chunk: tuple[int, int]) -> int:
    """The side of files where none is asked for: about 131 072 px, and whole chunks.

    >>> auto_side((2048, 2048)), auto_side((3072, 2048))
    (131072, 129024)
    """
    unit = math.lcm(*chunk)
    return unit * max(1, _AUTO_SIDE // unit)


@dataclass(frozen=True)
class Places:
    """Paths of the files of an output.

    Parameters
    ----------
    output : str
        Path of the VRT, which ends in ``.vrt``.
    grid : (int, int)
        Rows and columns of files.
    """

    output: str
    grid: Index

    @property
    def folder(self) -> Path:
        """Where the files are."""
        path = Path(os.path.abspath(self.output))
        return path.with_name(f"{path.stem}_files")

    def piece(self, index: Index) -> str:
        """Path of a COG."""
        row, col = (
            f"{i:0{max(2, len(str(most - 1)))}}" for i, most in zip(index, self.grid, strict=True)
        )
        return str(self.folder / f"{Path(self.output).stem}_r{row}_c{col}.tif")

    def overview(self, factor: int) -> str:
        """Path of the VRT that is an overview."""
        return str(self.folder / f"{Path(self.output).stem}_overview_{factor}.vrt")

    @property
    def top(self) -> str:
        """Path of the COG of overviews that are too small to be found in the files."""
        return str(self.folder / f"{Path(self.output).stem}_overviews.tif")

    @property
    def collection(self) -> str:
        """Path of the STAC collection."""
        return str(self.folder / f"{Path(self.output).stem}.collection.json")

    def ours(self) -> Iterator[Path]:
        """Files in the folder that are named as an output of this name names them."""
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            if _pattern(self.output).fullmatch(path.name):
                yield path


def _pattern(output: str) -> re.Pattern[str]:
    stem = re.escape(Path(output).stem)
    kinds = (
        r"r\d+_c\d+\.(tif|json)",
        r"overview_\d+\.vrt",
        r"overviews\.tif",
    )
    return re.compile(rf"{stem}(_({'|'.join(kinds)})|\.collection\.json)(\.[\w.]+)?")


def is_finished(path: Path) -> bool:
    """Whether a file of an output, named as one, is finished; others may still be at work."""
    return path.suffix in (".tif", ".vrt", ".json") or path.name.endswith(".aux.xml")


def _check_name(name: str) -> None:
    r"""Refuse a name by which GDAL does not find files beside a VRT.

    >>> _check_name(r"a\b.vrt")
    Traceback (most recent call last):
    ValueError: output 'a\\b.vrt': files of a VRT are not found by a name with a backslash...
    """
    if "\\" in name:
        wrong = "with a backslash"
    elif name != name.lstrip():
        wrong = "that begins with a blank"
    elif any("\ud800" <= letter <= "\udfff" for letter in name):
        wrong = "that is not in UTF-8"
    else:
        return
    raise ValueError(
        f"output {name!r}: files of a VRT are not found by a name {wrong}: choose another name"
    )


def check_folder(output: str, overwrite: bool) -> None:
    """Check that the folder beside a VRT holds nothing that would be lost.

    Parameters
    ----------
    output : str
        Path of the VRT.
    overwrite : bool
        Whether files of an earlier output may be replaced.

    Raises
    ------
    ValueError
        If GDAL would not find the folder by its name.
    FileExistsError
        If it holds files of others, or those of an output whose VRT is gone.
    NotADirectoryError
        If it is a file.
    PermissionError
        If it cannot be written to.
    """
    places = Places(output, (1, 1))
    folder = places.folder
    _check_name(Path(output).name)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise NotADirectoryError(
            f"{str(folder)!r} is a file: the files of {output!r} go into a folder of that name"
        )
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"folder {str(folder)!r} is not writable")
    ours = set(places.ours())
    for path in sorted(folder.iterdir()):
        if path not in ours:
            raise FileExistsError(
                f"folder {str(folder)!r} holds {path.name!r}, which is not of {output!r}: move it, "
                "or choose another name"
            )
    # Others are of a run that was killed when it had hardly begun, and are made anew.
    finished = any(is_finished(path) for path in ours)
    if finished and not overwrite and not os.path.exists(f"{output}.partial"):
        raise FileExistsError(
            f"folder {str(folder)!r} holds files of an earlier output: pass overwrite=True to "
            "replace them"
        )
