"""What is to be written, as a value: one file, or a grid of files and a VRT.

Encoding needs no file, so that it can run where the file cannot be reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .cog import WorkFile
from .cog.encode import EncodedChunk, encode_chunk
from .cog.overview import Array, Shape
from .cog.spec import CogSpec
from .splitting.pieces import EncodedPieces, Pieces
from .splitting.work import SplitWork
from .zarrwork import EncodedZarr

__all__ = ["Draft", "Encoded", "Work", "is_split"]

Encoded = EncodedChunk | EncodedPieces | EncodedZarr


class Work(Protocol):
    """What chunks are appended to, as `daskinfer.cog.WorkFile` says it."""

    @property
    def path(self) -> str:
        """Where it is."""

    def append(self, encoded: Any) -> None:
        """Write a chunk and commit it."""

    def done(
        self, rows: Sequence[int] | None = None, cols: Sequence[int] | None = None
    ) -> NDArray[np.bool_]:
        """Tell which chunks are committed."""

    def finish(
        self,
        output: str,
        layout: str = "strict",
        *,
        failed: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Turn it into the output; returns its bytes."""

    def close(self) -> None:
        """Close it."""

    def __enter__(self) -> Work: ...

    def __exit__(self, *exc: object) -> None: ...


def is_split(path: str) -> bool:
    """Tell whether an output of this name is a grid of files.

    >>> is_split("maps/clouds.vrt"), is_split("maps/clouds.tif")
    (True, False)
    """
    return Path(path).suffix.lower() == ".vrt"


@dataclass(frozen=True)
class Draft:
    """An output before there is a file; picklable.

    Attributes
    ----------
    spec : CogSpec
        The whole raster.
    chunk : (int, int)
        Sides of the chunk grid in pixels.
    split : int or None
        Side of each file in pixels, a multiple of the chunk's or a part of it; None for one file.
    layout : {"strict", "append"}
        How it is to be finished.

    Raises
    ------
    ValueError
        If files would not consist of whole chunks and blocks, or be too many.

    Examples
    --------
    >>> import tempfile
    >>> draft = Draft(CogSpec(100, 100, 1, "uint8"), (100, 100))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with draft.create(f"{folder}/ones.tif.partial") as work:
    ...         work.append(draft.encode(np.ones((1, 100, 100), "u1"), 0, 0))
    ...         work.finish(f"{folder}/ones.tif") > 0
    True
    """

    spec: CogSpec
    chunk: Shape
    split: int | None = None
    layout: str = "strict"

    def __post_init__(self) -> None:
        if self.split is None:
            return
        Pieces(self.spec, self.split)
        for side in self.chunk:
            if self.split % side and side % self.split:
                near = -(-self.split // side) * side
                raise ValueError(
                    f"split {self.split} is neither a multiple nor a part of the chunk side "
                    f"{side}: pass split={near}, or another chunk"
                )

    @property
    def pieces(self) -> Pieces | None:
        """The grid of files."""
        return None if self.split is None else Pieces(self.spec, self.split)

    def create(self, path: str) -> Work:
        """Make what chunks are appended to, as `WorkFile.create`."""
        if self.pieces is None:
            return WorkFile.create(path, self.spec, self.chunk, ahead=self.layout == "strict")
        return SplitWork.create(path, self.pieces, self.chunk)

    def open(self, path: str) -> Work:
        """Go on with it, as `WorkFile.open`."""
        if self.pieces is None:
            return WorkFile.open(path, self.spec, self.chunk)
        return SplitWork.open(path, self.pieces, self.chunk)

    def discard(self, path: str) -> None:
        """Remove it, if it is there."""
        if self.pieces is None:
            WorkFile.discard(path)
        else:
            SplitWork.discard(path, self.pieces)

    def encode(self, array: Array, row: int, col: int) -> Encoded:
        """Encode a chunk, and the overview levels that it can make alone.

        Parameters
        ----------
        array : ndarray, shape (band, y, x)
            Pixels, of the dtype of the file.
        row, col : int
            Pixel of the chunk's corner.

        Returns
        -------
        EncodedChunk or EncodedPieces
            For `Work.append`.
        """
        if self.pieces is None:
            return encode_chunk(self.spec, array, row, col, self.spec.local_levels(self.chunk))
        return self.pieces.encode(array, row, col, self.chunk)
