"""States of chunks: their names and colours, and the grid of them as a picture of bounded size."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "COLORS",
    "DONE",
    "FAILED",
    "LARGEST",
    "MISSING",
    "RESUMED",
    "RUNNING",
    "SKIPPED",
    "STATES",
    "ChunkMap",
    "data_url",
    "png",
    "thinned",
]

STATES = ("missing", "done", "skipped", "failed", "running", "resumed")
"""Of a chunk, by number.  Skipped: done, and all of it nodata.  Resumed: done by an earlier run."""

MISSING, DONE, SKIPPED, FAILED, RUNNING, RESUMED = range(len(STATES))

COLORS = (
    (70, 70, 70),
    (52, 160, 88),
    (190, 216, 198),
    (214, 56, 44),
    (250, 178, 40),
    (74, 124, 190),
)
"""Red, green and blue of each state."""

LARGEST = 512
"""Cells of a `ChunkMap` a side at most: 1e6 chunks are no more to send than 2.6e5."""

# Where several chunks share a cell, the first of these that one of them has.
_WORST = (FAILED, RUNNING, MISSING, DONE, RESUMED, SKIPPED)


def thinned(states: NDArray[np.uint8], largest: int) -> tuple[NDArray[np.uint8], int]:
    """States of cells of step x step chunks, which show the worst of them; and the step.

    >>> states = np.array([[DONE, DONE, MISSING], [DONE, FAILED, MISSING]], np.uint8)
    >>> thinned(states, largest=2)[0].tolist()
    [[3, 0]]
    """
    step = -(-max(states.shape) // largest)
    if step == 1:
        return states, 1
    rank = np.argsort(_WORST).astype(np.uint8)[states]
    for axis in (0, 1):
        rank = np.minimum.reduceat(rank, range(0, states.shape[axis], step), axis=axis)
    return np.asarray(_WORST, np.uint8)[rank], step


@dataclass(frozen=True)
class ChunkMap:
    """The states of all chunks, several to a cell where they are many.

    Attributes
    ----------
    shape : tuple of int
        Rows and columns of cells.
    step : int
        Chunks per cell and side.
    cells : bytes
        Number of a state for each cell, row by row.
    counts : tuple of int
        Chunks in each of `STATES`.

    Examples
    --------
    >>> chunk_map = ChunkMap.of(np.array([[DONE, FAILED], [DONE, MISSING]], np.uint8))
    >>> chunk_map.count("done"), chunk_map.array().tolist()
    (2, [[1, 3], [1, 0]])
    """

    shape: tuple[int, int]
    step: int
    cells: bytes
    counts: tuple[int, ...]

    @classmethod
    def of(cls, states: NDArray[np.uint8], largest: int = LARGEST) -> ChunkMap:
        """The map of states ``(chunk row, chunk column)``."""
        cells, step = thinned(states, largest)
        counts = np.bincount(states.ravel(), minlength=len(STATES))
        rows, cols = cells.shape
        return cls((rows, cols), step, cells.tobytes(), tuple(int(n) for n in counts))

    def array(self) -> NDArray[np.uint8]:
        """Numbers of states by cell, ``(row, column)``."""
        return np.frombuffer(self.cells, np.uint8).reshape(self.shape)

    def count(self, state: str) -> int:
        """Chunks in a state."""
        return self.counts[STATES.index(state)]

    def message(self) -> dict[str, Any]:
        """As plain values, small: what is alike lies together."""
        return {
            "shape": list(self.shape),
            "step": self.step,
            "cells": zlib.compress(self.cells, 1),
            "counts": list(self.counts),
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> ChunkMap:
        """Undo `message`."""
        rows, cols = message["shape"]
        cells = zlib.decompress(message["cells"])
        return cls((rows, cols), message["step"], cells, tuple(message["counts"]))

    def picture(self, alphas: Sequence[int] = (255,) * len(STATES)) -> bytes:
        """A PNG with a pixel per cell.

        Parameters
        ----------
        alphas : sequence of int
            Opacity of each state, 0 to 255.
        """
        palette = np.array([(*color, a) for color, a in zip(COLORS, alphas, strict=True)], np.uint8)
        return png(palette[self.array()])


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG of ``(row, column, 3 or 4)``.

    Written here for GDAL's would leave files of statistics, and the scheduler may have no GDAL.
    """
    height, width, channels = pixels.shape
    kind = {3: 2, 4: 6}[channels]
    # Each row begins with the number of its filter: none.
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )


def data_url(picture: bytes) -> str:
    """A PNG as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
