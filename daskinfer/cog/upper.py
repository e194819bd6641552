"""Overview levels that no chunk can make alone: each is made from regions of a level below.

A region is read back when the last of its tiles is there, by whoever wrote that tile; what is left
of it at the end is little.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import rasterio
from rasterio.errors import RasterioIOError
from rasterio.windows import Window

from daskinfer.cog.encode import EncodedChunk, EncodedPart, encode_levels
from daskinfer.cog.spec import CogSpec

__all__ = ["Region", "made_from", "regions"]

# A region has about this many bytes; more would be in memory in every thread at once.
_REGION_BYTES = 32 << 20
# Regions of a level, at least, where it can be cut so: threads then end together.
_FEWEST = 8


@dataclass(frozen=True)
class Region:
    """Tiles of a level, and the levels that are made from them.

    Attributes
    ----------
    level : int
        Of the tiles.
    step : int
        Levels that are made, one above the other.
    row, col : int
        First tile, in tiles of the level: multiples of ``2**step``.
    """

    level: int
    step: int
    row: int
    col: int

    def tiles(self, spec: CogSpec, up: int = 0) -> tuple[int, int, tuple[int, int]]:
        """Row, column and grid of its tiles, or of those that it makes so many levels up."""
        rows, cols = spec.grid(self.level + up)
        side, row, col = 1 << (self.step - up), self.row >> up, self.col >> up
        return row, col, (min(side, rows - row), min(side, cols - col))

    def encode(self, path: str, spec: CogSpec) -> EncodedChunk:
        """Read its pixels from a work file, and encode the levels that are made from them.

        Raises
        ------
        OSError
            If they cannot be read; names the file.
        """
        side = spec.blocksize
        corner = self.row * side, self.col * side
        height, width = (
            min(side << self.step, size - at)
            for size, at in zip(spec.shapes[self.level], corner, strict=True)
        )
        options = {"overview_level": self.level - 1} if self.level else {}
        try:
            with rasterio.open(path, **options) as dataset:
                array = dataset.read(window=Window(corner[1], corner[0], width, height))
        except RasterioIOError as error:
            raise OSError(errno.EIO, f"level {self.level} cannot be read", path) from error
        levels = range(self.level + 1, self.level + self.step + 1)
        return encode_levels(spec, array, corner, levels)


def _step(spec: CogSpec, level: int) -> int:
    """Levels to make from one region of a level; 0 above the last."""
    block = spec.blocksize**2 * spec.count * np.dtype(spec.dtype).itemsize
    fitting = max(1, int(np.log2(max(1, _REGION_BYTES // block))) // 2)
    rows, cols = spec.grid(level)
    while fitting > 1 and -(-rows >> fitting) * -(-cols >> fitting) < _FEWEST:
        fitting -= 1
    return min(fitting, len(spec.shapes) - 1 - level)


def regions(spec: CogSpec, level: int) -> Iterator[Region]:
    """All regions of a level; none of the last one.

    Parameters
    ----------
    spec : CogSpec
        The file.
    level : int
        That is read.
    """
    if step := _step(spec, level):
        rows, cols = spec.grid(level)
        for row, col in itertools.product(range(0, rows, 1 << step), range(0, cols, 1 << step)):
            yield Region(level, step, row, col)


def made_from(spec: CogSpec, part: EncodedPart) -> Iterator[Region]:
    """Regions that tiles belong to.

    Parameters
    ----------
    spec : CogSpec
        The file.
    part : EncodedPart
        The tiles; of the first plane.
    """
    if step := _step(spec, part.level):
        sides = zip((part.row, part.col), part.sizes.shape, strict=True)
        rows, cols = (range(at >> step, (at + n - 1 >> step) + 1) for at, n in sides)
        for row, col in itertools.product(rows, cols):
            yield Region(part.level, step, row << step, col << step)
