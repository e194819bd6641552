"""The engine: one halo'd chunk, cut into tiles, through the actor, stitched into one array.

`Inference` says everything about it that does not depend on the chunk, as a frozen value; the actor
of a process is found by it, so that all chunk tasks of a process share one model and one mailbox.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .actor import InferenceActor
from .forward import Array, Forward
from .inference import Inference
from .raster import Mask, Pixels
from .stitch import (
    blend,
    count_nonfinite,
    covered_window,
    output_mask,
    stitch,
    without_rim,
)
from .tiling import Window

__all__ = ["Stitched", "best_device", "infer_chunk", "release_actor", "using_actor"]

# Models of earlier predictions that stay loaded: a preview is followed by another one.
_KEPT_ACTORS = 2


@dataclass
class _Held:
    actor: InferenceActor
    users: int = 0


_actors: dict[Inference, _Held] = {}  # in order of last use
_lock = threading.Lock()


@dataclass(frozen=True)
class Stitched:
    """Result of one chunk.

    Attributes
    ----------
    data : ndarray, shape (band, y, x)
        Output pixels of the chunk.
    tiles : int
        Tiles that went through the model; tiles without a valid pixel do not.
    nonfinite : int
        Valid pixels that became nodata because the model's scores were not finite there.
    """

    data: Array
    tiles: int
    nonfinite: int


def best_device() -> str:
    """The device a process runs models on: its first CUDA device, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def using_actor(inference: Inference) -> Iterator[InferenceActor]:
    """This process's actor for an inference; made, and the model loaded, by its first user.

    The last `_KEPT_ACTORS` stay when nobody uses them, older ones are closed.
    """
    with _lock:
        held = _actors.pop(inference, None) or _Held(_start(inference))
        _actors[inference] = held
        held.users += 1
    try:
        yield held.actor
    finally:
        with _lock:
            held.users -= 1
            idle = [key for key, other in _actors.items() if not other.users]
            closing = [_actors.pop(key).actor for key in idle[:-_KEPT_ACTORS]]
        for actor in closing:
            actor.close()


def release_actor(inference: Inference) -> None:
    """Close this process's actor for an inference and free its model, unless it is in use."""
    with _lock:
        held = _actors.get(inference)
        if held is None or held.users:
            return
        del _actors[inference]
    held.actor.close()


def infer_chunk(
    inference: Inference,
    index: tuple[int, int],
    read: Callable[[Window], Pixels],
    actor: InferenceActor,
) -> Stitched:
    """Run the model over one chunk.

    Parameters
    ----------
    inference : Inference
    index : tuple of int
        Chunk ``(i, j)`` of the chunk grid.
    read : callable
        Gives the `Pixels` of the halo'd window of the chunk.
    actor : InferenceActor
        This process's actor.

    Returns
    -------
    Stitched
    """
    tiling, form = inference.tiling, inference.form
    chunk = tiling.chunk_at(index)
    with actor.producer():
        pixels = read(chunk.read)
        pending = [
            (tile, actor.submit(*_cut(pixels, tile.window, chunk.read)))
            for tile in tiling.tiles_of(index)
            if _any_valid(pixels.valid, tile.window if inference.blended else tile.core, chunk.read)
        ]
    outputs = [(tile, future.result()) for tile, future in pending]
    window = inference.window(index)
    result = (blend if inference.blended else stitch)(inference, window, outputs)
    valid = output_mask(pixels.valid, chunk, inference.scale)
    if valid is not None:
        result[:, ~valid] = form.nodata
    if not outputs:
        return Stitched(result, 0, 0)
    covered = covered_window(inference, outputs[0][1].shape[1:])
    lost = count_nonfinite(result, without_rim(window, covered, valid), form)
    return Stitched(result, len(outputs), lost)


def _start(inference: Inference) -> InferenceActor:
    forward = Forward(
        inference.model,
        raster_scale=inference.raster_scale,
        raster_offset=inference.raster_offset,
        device=best_device(),
        blended=inference.blended,
    )
    shape = (inference.in_bands, *inference.tiling.tile)
    return InferenceActor(forward, shape, inference.dtype, batch_size=inference.batch_size)


def _any_valid(mask: Mask | None, window: Window, read: Window) -> bool:
    """Whether a tile is worth running: False where all its pixels are nodata."""
    return mask is None or bool(mask[window.clip(read).slices(read.origin)].any())


def _cut(pixels: Pixels, window: Window, read: Window) -> tuple[Array, Mask | None]:
    """One tile; where it reaches past the raster, the raster's edge is repeated."""
    rows, cols = window.slices(read.origin)
    data = _pad(pixels.data[:, rows, cols], window)
    return data, None if pixels.valid is None else _pad(pixels.valid[rows, cols], window)


def _pad(array: Array, window: Window) -> Array:
    missing = [want - have for want, have in zip(window.shape, array.shape[-2:], strict=True)]
    if not any(missing):
        return array
    before = [(0, 0)] * (array.ndim - 2)
    return np.pad(array, [*before, (0, missing[0]), (0, missing[1])], mode="edge")
