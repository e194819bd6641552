"""The engine: one halo'd chunk, cut into tiles, through the actor, stitched into one array.

`Inference` says everything about it that does not depend on the chunk, as a frozen value; the actor
of a process is found by it, so that all chunk tasks of a process share one model and one mailbox.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from .actor import InferenceActor
from .cuda import CudaForward
from .device import Device, best_device
from .forward import Forward
from .inference import Inference
from .knee import batch_knee, time_batch
from .objects.forward import ObjectForward
from .pixels import Array, Mask, Pixels
from .preflight import check_device_runs
from .readahead import ReadAhead
from .stitch import blend, count_nonfinite, covered_window, output_mask, stitch, without_rim
from .tiling import Tile, Window

__all__ = [
    "RanTiles",
    "Stitched",
    "infer_chunk",
    "make_device",
    "release_actor",
    "run_tiles",
    "using_actor",
]

# Models of earlier predictions that stay loaded: a preview is followed by another one.
_KEPT_ACTORS = 2
# Trying batch sizes takes some ten batches: not worth it for a run of little more than that.
_WORTH_TUNING = 256


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
    ahead: ReadAhead | None = None,
) -> Stitched:
    """Run the model over one chunk.

    Parameters
    ----------
    inference : Inference
    index : tuple of int
        Chunk ``(i, j)`` of the chunk grid.
    read : callable
        Gives the `Pixels` of a window inside the chunk's halo'd window; called once per tile, so
        that the device starts on the first tile while the others are read.
    actor : InferenceActor
        This process's actor.
    ahead : ReadAhead, optional
        Reads tiles before they are needed; by default each is read when it is.

    Returns
    -------
    Stitched
    """
    recorder, number = actor.recorder, _number(inference, index)
    ran = run_tiles(inference, index, read, actor, ahead)
    form, outputs = inference.form, ran.outputs
    with recorder.span("stitch", chunk=number):
        window = inference.window(index)
        result = (blend if inference.blended else stitch)(inference, window, outputs)
        chunk = inference.tiling.chunk_at(index)
        mask = None if ran.mask is None else inference.trusted(ran.mask, chunk.read.origin)
        valid = output_mask(mask, chunk, inference.scale)
        if ran.inside is not None:
            valid = ran.inside if valid is None else valid & ran.inside
        if valid is not None:
            result[:, ~valid] = form.nodata
    if not outputs:
        return Stitched(result, 0, 0)
    covered = covered_window(inference, outputs[0][1].shape[1:])
    lost = count_nonfinite(result, without_rim(window, covered, valid), form)
    return Stitched(result, len(outputs), lost)


@dataclass(frozen=True)
class RanTiles:
    """What the model made of the tiles of one chunk.

    Attributes
    ----------
    outputs : list of (Tile, ndarray)
        Without the tiles that were not worth running.
    mask : ndarray of bool, shape (y, x), or None
        Valid pixels of the chunk with its halo; None where all are.
    inside : ndarray of bool, shape (y, x), or None
        Output pixels of the chunk that are wanted; None where all are.
    """

    outputs: list[tuple[Tile, Array]]
    mask: Mask | None
    inside: Mask | None = None


def run_tiles(
    inference: Inference,
    index: tuple[int, int],
    read: Callable[[Window], Pixels],
    actor: InferenceActor,
    ahead: ReadAhead | None = None,
) -> RanTiles:
    """Run the model over the tiles of one chunk; parameters as of `infer_chunk`."""
    tiling, recorder = inference.tiling, actor.recorder
    chunk, number = tiling.chunk_at(index), _number(inference, index)
    inside = inference.inside(index)
    tiles = [tile for tile in tiling.tiles_of(index) if _is_wanted(inference, index, tile, inside)]
    windows = [tile.window.clip(chunk.read) for tile in tiles]
    mask: Mask | None = None
    pending = []

    def timed(window: Window) -> Pixels:
        with recorder.span("read", chunk=number):
            return read(window)

    # Closed also where a tile is refused: what was read ahead counts until then.
    streaming = (ReadAhead(0) if ahead is None else ahead).stream(timed, windows)
    with actor.producer(), contextlib.closing(streaming) as stream:
        for tile, window, pixels in zip(tiles, windows, stream, strict=True):
            mask = _noted(mask, pixels.valid, window, chunk.read)
            wanted = tile.window if inference.blended else tile.core
            if ahead is not None:
                ahead.adapt(hungry=actor.hungry, full=actor.full)
            if not _any_valid(inference, pixels.valid, wanted, window):
                continue
            data, valid = _padded(pixels, tile.window)
            pending.append((tile, actor.submit(data, valid, number)))
    with recorder.span("results", chunk=number):
        return RanTiles([(tile, future.result()) for tile, future in pending], mask, inside)


def _is_wanted(
    inference: Inference, index: tuple[int, int], tile: Tile, inside: Mask | None
) -> bool:
    """Whether any output pixel of a tile is wanted: what is not is not even read."""
    if inside is None:
        return True
    window = inference.window(index)
    core = tile.core.scaled(inference.scale).clip(window)
    return bool(inside[core.slices(window.origin)].any())


def _number(inference: Inference, index: tuple[int, int]) -> int:
    return index[0] * inference.tiling.grid[1] + index[1]


def _start(inference: Inference) -> InferenceActor:
    device = make_device(inference)
    if isinstance(device, ObjectForward):
        device.check(inference.tile_shape, inference.dtype)
    elif isinstance(device, Forward):
        check_device_runs(device, inference)
    size = inference.batch_size
    knee = None
    if inference.tuned and size > 1 and inference.tiling.runs >= _WORTH_TUNING:
        measure = partial(time_batch, device, inference.tile_shape, inference.dtype)
        knee = batch_knee(measure, size)
        size = knee.batch_size
    return InferenceActor(
        device,
        inference.tile_shape,
        inference.dtype,
        batch_size=size,
        fixed=inference.fixed or inference.model.compile,
        note="" if knee is None else str(knee),
    )


def make_device(inference: Inference) -> Device:
    """The device that an inference asks for, with its model loaded."""
    if not isinstance(inference.device, str):
        return inference.device(inference)
    name = best_device(inference.device, inference.model.accelerator)
    make: type[Forward] = CudaForward if name.startswith("cuda") else Forward
    if inference.model.output == "objects":
        make = ObjectForward
    return make(
        inference.model,
        raster_scale=inference.raster_scale,
        raster_offset=inference.raster_offset,
        device=name,
        blended=inference.blended,
    )


def _noted(mask: Mask | None, valid: Mask | None, window: Window, read: Window) -> Mask | None:
    """The mask of a chunk's halo'd window with that of one tile put in; None while all is valid."""
    if valid is None:
        return mask
    if mask is None:
        mask = np.ones(read.shape, np.bool_)
    mask[window.slices(read.origin)] = valid
    return mask


def _any_valid(inference: Inference, mask: Mask | None, wanted: Window, window: Window) -> bool:
    """Whether a tile is worth running: False where all the pixels wanted of it will be nodata."""
    if mask is None:
        return True
    kept = inference.trusted(mask, window.origin)
    return bool(kept[wanted.clip(window).slices(window.origin)].any())


def _padded(pixels: Pixels, window: Window) -> tuple[Array, Mask | None]:
    """One tile; where it reaches past the raster, the raster's edge is repeated."""
    valid = None if pixels.valid is None else _pad(pixels.valid, window)
    return _pad(pixels.data, window), valid


def _pad(array: Array, window: Window) -> Array:
    missing = [want - have for want, have in zip(window.shape, array.shape[-2:], strict=True)]
    if not any(missing):
        return array
    before = [(0, 0)] * (array.ndim - 2)
    return np.pad(array, [*before, (0, missing[0]), (0, missing[1])], mode="edge")
