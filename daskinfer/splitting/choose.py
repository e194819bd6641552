"""The sides of files, blocks and chunks that go together."""

from __future__ import annotations

import math
from typing import Any

from ..draft import is_split
from ..inference import Inference
from ..tiling import round_up
from .pieces import check_side, dividing

__all__ = ["block_side", "chunk_in_files", "chunk_of_files", "fits", "split_side"]

_BLOCK = 512


def split_side(path: str, split: Any) -> Any:
    """Side of the files of an output, "auto", or None for one file.

    Parameters
    ----------
    path : str
        Of the output, which says by its name whether it is split.
    split : int or "auto"
        As asked for.

    Raises
    ------
    ValueError
        If that is not a number of pixels, or is one for a single file.

    Examples
    --------
    >>> split_side("a.vrt", 1024), split_side("a.vrt", "auto"), split_side("a.tif", "auto")
    (1024, 'auto', None)
    """
    if is_split(path):
        if split != "auto":
            check_side(split, 1)
        return split if split == "auto" else int(split)
    if split != "auto":
        raise ValueError(
            f"output {path!r} is one file: name it .vrt to have it in files of split={split} px"
        )
    return None


def block_side(blocksize: int | str, chunk: Any, split: Any = None) -> int:
    """Side of the storage blocks: 512 px, or less where chunks or files ask for it.

    Parameters
    ----------
    blocksize : int or "auto"
        As asked for.
    chunk : int, tuple of int or "auto"
        Side of chunks, ``(y, x)``.
    split : int, "auto" or None
        From `split_side`.

    Raises
    ------
    ValueError
        If `blocksize` is neither, or files would not be of whole blocks.
    """
    if blocksize != "auto":
        if isinstance(blocksize, bool) or not isinstance(blocksize, int):
            raise ValueError(f"blocksize must be 'auto' or a multiple of 16, got {blocksize!r}")
        block = blocksize
    else:
        sides = chunk if isinstance(chunk, (tuple, list)) else (chunk,)
        smallest = min((side for side in sides if isinstance(side, int)), default=_BLOCK)
        block = max(16, min(_BLOCK, round_up(smallest, 16)))
        if isinstance(split, int) and split % block:
            # Small blocks only where files are small.
            fitting = (256, 128) if split >= 2 * _BLOCK else (256, 128, 64, 32, 16)
            block = next((n for n in fitting if n < block and split % n == 0), block)
    if isinstance(split, int) and block > 0:
        check_side(split, block)
    return block


def fits(split: int, inference: Inference) -> bool:
    """Whether files are made of whole chunks, or chunks of whole files."""
    return all(not side % split or not split % side for side in inference.chunk)


def chunk_of_files(split: int, inference: Inference, block: int) -> tuple[int, int]:
    """A chunk, in input pixels, that is made of files: where tiles are too large to fit in one."""
    sides = (math.lcm(side, split) if split % side else side for side in inference.chunk)
    y, x = (int(side / inference.scale) for side in sides)
    return y, x


def chunk_in_files(split: int, inference: Inference, block: int) -> tuple[int, int]:
    """A chunk, in input pixels, that files are made of, near the one that was chosen."""
    y, x = (int(dividing(split, side, block) / inference.scale) for side in inference.chunk)
    return y, x
