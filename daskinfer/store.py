"""Store a dask array as a COG: a task per chunk computes it, encodes it and appends it.

Workers import this module and nothing of models: torch would cost each of them seconds.  What
travels between tasks is the name of the work file; pixels stay where they were computed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from pathlib import Path
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np
from dask.delayed import Delayed
from numpy.typing import NDArray

from .cog import CogSpec
from .draft import Draft
from .objectstore import upload
from .splitting.pieces import auto_side, dividing

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

    __slots__ = ("_draft", "_partial")

    def __init__(self, value: Delayed, draft: Draft, partial: str) -> None:
        super().__init__(value.key, value.dask, layer=value._layer)
        self._draft, self._partial = draft, partial

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

        Raises
        ------
        FileNotFoundError
            If workers of a cluster do not share the output's folder with this process.
        """
        _check_shared(self._partial, kwargs.get("scheduler"))
        try:
            return super().compute(**kwargs)
        except BaseException:
            self._draft.discard(self._partial)
            raise


def _check_shared(partial: str, scheduler: Any) -> None:
    """Refuse, before any work, workers whose files would be other files."""
    # A bound method of a client, where tasks go to one.
    client = getattr(dask.base.get_scheduler(scheduler=scheduler), "__self__", None)
    if client is None or not hasattr(client, "run"):
        return
    token = f"{partial}.seen"
    Path(token).touch()
    try:
        seen = client.run(os.path.exists, token)
    finally:
        os.unlink(token)
    apart = sorted(address for address, there in seen.items() if not there)
    if apart:
        raise FileNotFoundError(
            f"{len(apart)} of {len(seen)} workers do not share the folder "
            f"{os.path.dirname(partial)!r} with this process, as {apart[0]}: write where they do, "
            "or with daskinfer.run, which needs no such folder"
        )


@dataclass(frozen=True)
class _Target:
    """An output that is being written.

    Attributes
    ----------
    partial, output : str
        What chunks are appended to, and what it becomes.
    url : str or None
        Where the output goes when it is finished; it is then removed here.
    draft : Draft
    """

    partial: str
    output: str
    url: str | None
    draft: Draft


def store_cog(
    data: da.Array,
    spec: CogSpec,
    output: str,
    url: str | None = None,
    *,
    layout: str = "strict",
    split: int | Literal["auto"] | None = None,
) -> Storing:
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
    layout : {"strict", "append"}
        As for `daskinfer.cog.WorkFile.finish`.
    split : int or "auto", optional
        Side in pixels of the files of an output that is a grid of them.

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
    if split is not None:
        split = auto_side(chunk) if split == "auto" else split
        data, chunk = in_files(data, chunk, split, spec.blocksize)
    draft = Draft(spec, chunk, split, layout)
    # Not the name of a run's work file, which can be resumed; this one cannot.
    own = f"{os.path.abspath(output)}.{uuid.uuid4().hex[:8]}"
    partial = f"{own}.writing"
    output = os.path.abspath(output) if url is None else f"{own}.tif"
    target = _Target(partial, output, url, draft)
    begun = dask.delayed(_begin)(target)
    done = data.map_blocks(
        _append,
        begun,
        dtype=np.uint8,
        chunks=((1,), *((1,) * n for n in data.numblocks[1:])),
        meta=np.empty((0, 0, 0), np.uint8),
    )
    # Of the chunks alone: a single one has `begun` fused into its own task, and it would run for
    # this one once more.
    finished = dask.delayed(_finish)(target, done.to_delayed().ravel().tolist())
    return Storing(finished, draft, partial)


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


def in_files(
    data: da.Array, chunk: tuple[int, int], split: int, blocksize: int
) -> tuple[da.Array, tuple[int, int]]:
    """Chunks of which files can be made.

    Parameters
    ----------
    data : dask array, shape (band, y, x)
    chunk : (int, int)
        Sides of its grid, from `on_grid`.
    split, blocksize : int
        Sides of the files, and of their blocks, in pixels.

    Returns
    -------
    dask array, (int, int)
        As of `on_grid`.
    """
    y, x = (dividing(split, side, blocksize) for side in chunk)
    if (y, x) == chunk:
        return data, chunk
    return data.rechunk({1: y, 2: x}), (y, x)


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


def _begin(target: _Target) -> _Target:
    """Make the work file, unless this runs again because the worker that knew of it was lost."""
    if not os.path.exists(target.partial):
        target.draft.create(target.partial).close()
    return target


def _append(block: NDArray[Any], target: _Target, block_info: Any = None) -> None:
    """Encode and append one chunk."""
    (row, _), (col, _) = block_info[0]["array-location"][1:]
    # Opening takes half a millisecond, and leaves no file open in a worker.
    with target.draft.open(target.partial) as work:
        work.append(target.draft.encode(block, row, col))


def _finish(target: _Target, _: Sequence[None]) -> str:
    """Turn the work file into the output, wherever that is."""
    with target.draft.open(target.partial) as work:
        work.finish(target.output, target.draft.layout)
    if target.url is None:
        return target.output
    try:
        upload(target.output, target.url)
    finally:
        os.unlink(target.output)
    return target.url
