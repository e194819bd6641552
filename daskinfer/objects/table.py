"""Objects as rows of a numpy array, and as bytes of a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

__all__ = ["OBJECT", "Boxes", "Found", "concatenated", "load_found", "save_found"]

Boxes = npt.NDArray[np.float64]

# box: x1, y1, x2, y2 in pixels of the raster, from the corner of its first pixel.  tile: row and
# column of the tile in which it was found.  cut: the box ends where its tile does, not at an end of
# the raster, so that the object may go on.  own: its centre is in the core of the tile.
OBJECT = np.dtype(
    [
        ("box", "f8", 4),
        ("score", "f4"),
        ("label", "i4"),
        ("tile", "i4", 2),
        ("cut", "?"),
        ("own", "?"),
    ]
)


@dataclass(frozen=True, eq=False)
class Found:
    """Objects found in one chunk, or in all of them.

    Attributes
    ----------
    rows : ndarray of OBJECT, shape (n,)
    shapes : tuple of bytes or None
        Outline of each in pixels of the raster, as WKB; None where the model gives boxes only.
    """

    rows: npt.NDArray[Any]
    shapes: tuple[bytes, ...] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def pick(self, which: npt.NDArray[Any] | slice) -> Found:
        """Some of the objects: indices, a mask or a slice."""
        shapes = self.shapes
        if shapes is not None:
            shapes = tuple(shapes[i] for i in np.arange(len(self.rows))[which])
        return Found(self.rows[which], shapes)


def concatenated(parts: Iterable[Found]) -> Found:
    """Objects of several chunks together, in this order."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return Found(np.empty(0, OBJECT))
    rows = np.concatenate([part.rows for part in parts])
    if any(part.shapes is None for part in parts):
        return Found(rows)
    return Found(rows, tuple(shape for part in parts for shape in part.shapes or ()))


def save_found(file: IO[bytes], chunk: int, found: Found) -> None:
    """Append the objects of a chunk to a file: plain arrays, one after another."""
    shapes = found.shapes
    lengths = [] if shapes is None else [len(shape) for shape in shapes]
    np.save(file, np.array([chunk, len(found), shapes is not None], "i8"), allow_pickle=False)
    np.save(file, found.rows.view(np.uint8).ravel(), allow_pickle=False)
    np.save(file, np.array(lengths, "i8"), allow_pickle=False)
    np.save(file, np.frombuffer(b"".join(shapes or ()), np.uint8), allow_pickle=False)


def load_found(file: IO[bytes]) -> tuple[int, Found] | None:
    """The next chunk of a file and its objects; None at its end, which a kill may have torn."""
    try:
        (chunk, count, shaped), raw, lengths, joined = (
            np.load(file, allow_pickle=False) for _ in range(4)
        )
    except (EOFError, ValueError):
        return None
    rows = raw.view(OBJECT)
    if len(rows) != count:
        return None
    if not shaped:
        return int(chunk), Found(rows)
    ends = np.cumsum(lengths)
    text = joined.tobytes()
    shapes = tuple(text[end - n : end] for n, end in zip(lengths, ends, strict=True))
    return int(chunk), Found(rows, shapes)
