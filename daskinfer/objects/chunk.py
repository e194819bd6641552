"""Objects of one chunk: found in its tiles, and put where they lie in the raster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskinfer.actor import InferenceActor
from daskinfer.infer import run_tiles
from daskinfer.inference import Inference
from daskinfer.objects.forward import TileObjects
from daskinfer.objects.table import OBJECT, Boxes, Found, concatenated
from daskinfer.pixels import Mask, Pixels
from daskinfer.readahead import ReadAhead
from daskinfer.tiling import AxisTiling, Span, Tile, Window

__all__ = ["FoundChunk", "find_chunk"]

# A box that ends so near to the end of its tile is taken as cut there: detectors are not exact.
_TOUCHING = 2.0


@dataclass(frozen=True, eq=False)
class FoundChunk:
    """Result of one chunk.

    Attributes
    ----------
    found : Found
        In pixels of the raster; an object that several tiles see is there several times.
    tiles : int
        Tiles that went through the model.
    dropped : int
        Boxes without a place: not finite, or with their corners the wrong way round.
    """

    found: Found
    tiles: int
    dropped: int


def find_chunk(
    inference: Inference,
    index: tuple[int, int],
    read: Callable[[Window], Pixels],
    actor: InferenceActor,
    ahead: ReadAhead | None = None,
    min_score: float = 0.0,
) -> FoundChunk:
    """Find the objects of one chunk.

    Kept are all objects that their tile shows whole, and of those that it cuts the ones whose
    centre is at least the halo away from where it cuts: what is seen of an object at the rim of a
    tile is seen better by its neighbour.

    Parameters
    ----------
    inference, index, read, actor, ahead
        As for `daskinfer.infer.infer_chunk`.
    min_score : float
        Objects below it are left out.
    """
    ran = run_tiles(inference, index, read, actor, ahead)
    chunk = inference.tiling.chunk_at(index)
    parts, dropped = [], 0
    for tile, output in ran.outputs:
        objects: Any = output
        part, lost = _placed(inference, tile, objects, min_score)
        parts.append(_on_valid(part, ran.mask, chunk.read))
        dropped += lost
    return FoundChunk(concatenated(parts), len(ran.outputs), dropped)


def _placed(
    inference: Inference, tile: Tile, objects: TileObjects, min_score: float
) -> tuple[Found, int]:
    """Objects of a tile that are worth keeping, and how many had no place."""
    boxes, scores = objects.boxes, objects.scores
    finite = np.isfinite(boxes).all(axis=1) & np.isfinite(scores)
    ordered = (boxes[:, 2] >= boxes[:, 0]) & (boxes[:, 3] >= boxes[:, 1])
    kept = np.flatnonzero(finite & ordered & (scores >= min_score))
    rows = np.zeros(len(kept), OBJECT)
    row, col = tile.window.origin
    axes = (inference.tiling.x, inference.tiling.y)
    rows["box"] = boxes[kept] + (col, row, col, row)
    rows["score"], rows["label"] = scores[kept], objects.labels[kept]
    rows["own"] = True
    central = np.ones(len(kept), np.bool_)
    for i, axis in enumerate(axes):
        span = (tile.window.cols, tile.window.rows)[i]
        rows["tile"][:, 1 - i] = number = _tile_number(axis, (tile.core.cols, tile.core.rows)[i])
        rows["box"][:, i::2] = np.clip(rows["box"][:, i::2], 0, axis.size)
        _judge(rows, central, i, axis, span, axis.core(number))
    some = (rows["box"][:, 2:] > rows["box"][:, :2]).all(axis=1) & (central | ~rows["cut"])
    masks = None if objects.masks is None else objects.masks[kept[some]]
    found = Found(rows[some], None if masks is None else _outlines(masks, rows["box"][some], tile))
    return found, int(np.count_nonzero(~(finite & ordered)))


def _judge(
    rows: npt.NDArray[Any], central: Mask, i: int, axis: AxisTiling, span: Span, core: Span
) -> None:
    """Note along one axis whether objects are cut, belong to the core, and are central."""
    low, high = rows["box"][:, i], rows["box"][:, i + 2]
    centre = (low + high) / 2
    rows["own"] &= (core.start <= centre) & (centre < core.stop)
    if span.start > 0:
        rows["cut"] |= low < span.start + _TOUCHING
        central &= centre >= span.start + axis.halo
    if span.stop < axis.size:
        rows["cut"] |= high > span.stop - _TOUCHING
        central &= centre < span.stop - axis.halo


def _tile_number(axis: AxisTiling, core: Span) -> int:
    return core.start // axis.step


def _on_valid(found: Found, mask: Mask | None, read: Window) -> Found:
    """Without the objects on nothing but nodata: the model saw only what it was filled with."""
    if mask is None or not len(found):
        return found
    row, col = read.origin
    boxes: Boxes = found.rows["box"] - (col, row, col, row)
    first = np.floor(boxes[:, :2]).astype(int)
    last = np.ceil(boxes[:, 2:]).astype(int)
    return found.pick(
        np.array(
            [
                mask[max(0, y1) : y2, max(0, x1) : x2].any()
                for (x1, y1), (x2, y2) in zip(first, last, strict=True)
            ],
            np.bool_,
        )
    )


def _outlines(masks: npt.NDArray[np.bool_], boxes: Boxes, tile: Tile) -> tuple[bytes, ...]:
    """Outline of each mask in pixels of the raster, as WKB; its box for an empty mask."""
    import shapely
    from affine import Affine
    from rasterio.features import shapes
    from shapely.geometry import shape

    row, col = tile.window.origin
    place = Affine.translation(col, row)
    outlines = []
    for mask, box in zip(masks, boxes, strict=True):
        pieces = [shape(piece) for piece, _ in shapes(mask.astype(np.uint8), mask, transform=place)]
        pieces = pieces or [shapely.box(*box)]
        outlines.append(bytes(shapely.to_wkb(shapely.unary_union(pieces))))
    return tuple(outlines)
