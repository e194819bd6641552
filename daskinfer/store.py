"""Store a dask array as a COG: a task per chunk computes it, encodes it and appends it.

Workers import this module and nothing of models: torch would cost each of them seconds.  What
travels between tasks is the name of the work file; pixels stay where they were computed.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.delayed import Delayed
from numpy.typing import NDArray

from .cog import CogSpec, WorkFile, encode_chunk
from .objectstore import upload

__all__ = ["Storing", "store_cog"]

# Blocks along a chunk's side where chunks have to be made anew: so many that a chunk makes two
# overview levels alone, fewer where many bands would make it larger than this many bytes.
_BLOCKS = 4
_CHUNK_BYTES = 256 << 20


class Storing(Delayed):  # type: ignore[misc]
    """A COG that is written when this is computed; the result is its path or URL.

    If `compute` fails, the work file goes too.  Computed another way (``dask.compute``,
    ``Client.compute``), a failure leaves it beside the output, named ``<output>.<id>.writing``.
    """

    __slots__ = ("_partial",)

    def __init__(self, value: Delayed, partial: str) -> None:
        super().__init__(value.key, value.dask, layer=value._layer)
        self._partial = partial

    def compute(self, **kwargs: Any) -> Any:
        """Write the file.

        Parameters
        ----------
        **kwargs
            Of `dask.compute`.

        Returns
        -------
        str
            Path or URL.
        """
        try:
            return super().compute(**kwargs)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._partial)
            raise


@dataclass(frozen=True)
class _Draft:
    """A file that is being written.

    Attributes
    ----------
    partial, output : str
        Work file, and the file that it becomes.
    url : str or None
        Where the output goes when it is finished; it is then removed here.
    spec : CogSpec
    chunk : (int, int)
        Grid on which chunks lie.
    """

    partial: str
    output: str
    url: str | None
    spec: CogSpec
    chunk: tuple[int, int]


def store_cog(data: da.Array, spec: CogSpec, output: str, url: str | None = None) -> Storing:
    """Make the task that writes an array to a file.

    Parameters
    ----------
    data : dask array, shape (band, y, x)
        Of the dtype and size of `spec`.
    spec : CogSpec
        The file.
    output : str
        Its path, on a file system that all workers share.
    url : str, optional
        Object that the finished file becomes instead.

    Returns
    -------
    Storing
        Nothing has run yet.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ones = da.ones((1, 100, 90), chunks=50, dtype="uint8")
    ...     path = store_cog(ones, CogSpec(100, 90, 1, "uint8"), f"{folder}/ones.tif").compute()
    ...     os.listdir(folder)
    ['ones.tif']
    """
    data, chunk = on_grid(data, spec.blocksize)
    # Not the name of a run's work file, which can be resumed; this one cannot.
    own = f"{os.path.abspath(output)}.{uuid.uuid4().hex[:8]}"
    partial = f"{own}.writing"
    output = os.path.abspath(output) if url is None else f"{own}.tif"
    begun = dask.delayed(_begin)(_Draft(partial, output, url, spec, chunk))
    done = data.map_blocks(
        _append,
        begun,
        dtype=np.uint8,
        chunks=((1,), *((1,) * n for n in data.numblocks[1:])),
        meta=np.empty((0, 0, 0), np.uint8),
    )
    return Storing(dask.delayed(_finish)(begun, done.to_delayed().ravel().tolist()), partial)


def on_grid(data: da.Array, blocksize: int) -> tuple[da.Array, tuple[int, int]]:
    """Chunks that the writer can take, and the grid on which they lie.

    Parameters
    ----------
    data : dask array, shape (band, y, x)
        In any chunks.
    blocksize : int
        Side of the file's blocks in pixels.

    Returns
    -------
    dask array
        All bands together.  Chunks that lie on whole pairs of blocks are left as they are: each
        then makes at least one overview level alone, and a quarter of the pixels at most is read
        back for the others.
    (int, int)
        Side of the grid on each axis, in pixels.

    Examples
    --------
    >>> on_grid(da.zeros((1, 3000, 3000), chunks=1024), 512)[0].chunks[1]
    (1024, 1024, 952)
    >>> on_grid(da.zeros((1, 3000, 3000), chunks=1000), 512)[0].chunks[1]
    (2048, 952)
    """
    sides = tuple(_side_of(chunks, blocksize) for chunks in data.chunks[1:])
    if any(side % (2 * blocksize) for side in sides):
        sides = _sides_for(data, blocksize)
        return data.rechunk({0: -1, 1: sides[0], 2: sides[1]}), sides
    return data.rechunk({0: -1}), (sides[0], sides[1])


def _side_of(chunks: Sequence[int], blocksize: int) -> int:
    """The largest grid on which all inner borders lie."""
    side = gcd(*list(accumulate(chunks))[:-1])
    # One chunk has no inner border.
    return side or -(-chunks[0] // (2 * blocksize)) * 2 * blocksize


def _sides_for(data: da.Array, blocksize: int) -> tuple[int, int]:
    """Sides near those that the array has."""
    fewest = _BLOCKS
    if data.shape[0] * data.dtype.itemsize * (_BLOCKS * blocksize) ** 2 > _CHUNK_BYTES:
        fewest = 2
    pair = 2 * blocksize
    rows, cols = (max(fewest * blocksize, -(-c[0] // pair) * pair) for c in data.chunks[1:])
    return rows, cols


def _begin(draft: _Draft) -> _Draft:
    """Make the work file, unless this runs again because the worker that knew of it was lost."""
    if not os.path.exists(draft.partial):
        WorkFile.create(draft.partial, draft.spec, draft.chunk).close()
    return draft


def _append(block: NDArray[Any], draft: _Draft, block_info: Any = None) -> None:
    """Encode and append one chunk."""
    (row, _), (col, _) = block_info[0]["array-location"][1:]
    # Opening takes half a millisecond, and leaves no file open in a worker.
    with WorkFile.open(draft.partial, draft.spec, draft.chunk) as work:
        work.append(encode_chunk(work.spec, block, row, col, work.levels))


def _finish(draft: _Draft, _: Sequence[None]) -> str:
    """Turn the work file into the output, wherever that is."""
    with WorkFile.open(draft.partial, draft.spec, draft.chunk) as work:
        work.finish(draft.output)
    if draft.url is None:
        return draft.output
    try:
        upload(draft.output, draft.url)
    finally:
        os.unlink(draft.output)
    return draft.url
