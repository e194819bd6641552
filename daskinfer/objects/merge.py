"""Which of many boxes are one object.

Tiles overlap, so most objects near their borders are found several times, and those larger than the
overlap in pieces.  Two ways to tell:

`same_objects` asks what two tiles say of the pixels that both saw: there, the box of one object is
the same in both.  It holds for whole boxes, for pieces, and for chains of pieces, and never merges
two boxes of one tile, so that crowds stay as the model saw them.

`suppress` knows nothing of tiles: of boxes that overlap too much the one with the highest score
stays (non-maximum suppression), or takes the others in (non-maximum merging).

Candidates come from a spatial index, and everything after is arithmetic on whole arrays: the cost
grows with the number of boxes and of the pairs that touch.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from daskinfer.objects.table import Boxes

__all__ = ["Metric", "components", "overlaps", "same_objects", "suppress", "touching_pairs"]

Indices = npt.NDArray[np.int64]
Metric = Literal["iou", "ios"]

# Boxes of which the index is asked for neighbours at once: bounds the pairs in memory.
_BATCH = 1 << 17


def touching_pairs(boxes: Boxes, labels: npt.NDArray[Any] | None = None) -> Indices:
    """Pairs of boxes that touch, each once.

    Parameters
    ----------
    boxes : ndarray, shape (n, 4)
        ``x1, y1, x2, y2``.
    labels : ndarray, shape (n,), optional
        Only pairs with equal labels are given.

    Returns
    -------
    ndarray of int64, shape (pairs, 2)
        Indices, the lower one first.

    Examples
    --------
    >>> touching_pairs(np.array([[0, 0, 4, 4], [9, 9, 10, 10], [3, 3, 5, 5.0]])).tolist()
    [[0, 2]]
    """
    import shapely

    if not len(boxes):
        return np.empty((0, 2), np.int64)
    outlines = shapely.box(*boxes.T)
    tree = shapely.STRtree(outlines)
    parts = []
    for start in range(0, len(boxes), _BATCH):
        one, other = tree.query(outlines[start : start + _BATCH])
        one = one + start
        kept = one < other
        if labels is not None:
            kept &= labels[one] == labels[other]
        parts.append(np.stack([one[kept], other[kept]], axis=1))
    return np.concatenate(parts)


def overlaps(one: Boxes, other: Boxes, metric: Metric = "iou") -> npt.NDArray[np.float64]:
    """How much boxes have in common with others, pair by pair.

    Parameters
    ----------
    one, other : ndarray, shape (n, 4)
        ``x1, y1, x2, y2``; a box whose corners are the wrong way round is empty.
    metric : {"iou", "ios"}
        Intersection over union, or over the smaller of the two.

    Returns
    -------
    ndarray of float64, shape (n,)
        0 to 1.

    Examples
    --------
    >>> small, large = np.array([[0, 0, 1, 2.0]]), np.array([[0, 0, 2, 2.0]])
    >>> overlaps(small, large).tolist(), overlaps(small, large, "ios").tolist()
    ([0.5], [1.0])
    """
    common = _area(np.maximum(one[:, :2], other[:, :2]), np.minimum(one[:, 2:], other[:, 2:]))
    areas = [_area(boxes[:, :2], boxes[:, 2:]) for boxes in (one, other)]
    of = areas[0] + areas[1] - common if metric == "iou" else np.minimum(*areas)
    shares: npt.NDArray[np.float64] = np.divide(
        common, of, out=np.zeros(len(one), np.float64), where=of > 0
    )
    return shares


def _area(low: npt.NDArray[Any], high: npt.NDArray[Any]) -> npt.NDArray[Any]:
    sides = np.maximum(high - low, 0)
    return np.asarray(sides[:, 0] * sides[:, 1])


def same_objects(
    boxes: Boxes,
    tiles: npt.NDArray[Any],
    extents: Boxes,
    labels: npt.NDArray[Any] | None = None,
    threshold: float = 0.5,
) -> Indices:
    """Group the boxes that different tiles gave to the same object.

    Two boxes belong together if, inside the pixels that both of their tiles saw, they have more
    than `threshold` in common (intersection over union), and neither has more in common with
    another box of the other's tile.

    Parameters
    ----------
    boxes : ndarray, shape (n, 4)
        ``x1, y1, x2, y2`` in pixels of the raster.
    tiles : ndarray, shape (n, 2)
        Row and column of each one's tile.
    extents : ndarray, shape (n, 4)
        ``x1, y1, x2, y2`` of each one's tile.
    labels : ndarray, shape (n,), optional
        Boxes of different labels stay apart.
    threshold : float, default 0.5

    Returns
    -------
    ndarray of int64, shape (n,)
        For each box the lowest index in its group.

    Examples
    --------
    Two tiles of 10 px overlap by 4 px; each sees a part of one long box:

    >>> boxes = np.array([[2, 0, 10, 3], [6, 0, 14, 3.0]])
    >>> extents = np.array([[0, 0, 10, 10], [6, 0, 16, 10.0]])
    >>> same_objects(boxes, np.array([[0, 0], [0, 1]]), extents).tolist()
    [0, 0]
    """
    pairs = touching_pairs(boxes, labels)
    tile = tiles[:, 0].astype(np.int64) * (int(tiles[:, 1].max(initial=0)) + 1) + tiles[:, 1]
    pairs = pairs[tile[pairs[:, 0]] != tile[pairs[:, 1]]]
    a, b = pairs.T
    low = np.maximum(extents[a, :2], extents[b, :2])
    high = np.minimum(extents[a, 2:], extents[b, 2:])
    shared = np.hstack([low, high])
    agreed = overlaps(_inside(boxes[a], shared), _inside(boxes[b], shared))
    agreeing = agreed > threshold
    a, b, agreed = a[agreeing], b[agreeing], agreed[agreeing]
    mutual = _best(a, tile[b], agreed) & _best(b, tile[a], agreed)
    return components(len(boxes), a[mutual], b[mutual])


def _inside(boxes: Boxes, bounds: Boxes) -> Boxes:
    low = np.maximum(boxes[:, :2], bounds[:, :2])
    return np.hstack([low, np.minimum(boxes[:, 2:], bounds[:, 2:])])


def _best(box: Indices, tile: Indices, agreed: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which pairs are the best that a box has in a tile."""
    order = np.lexsort((-agreed, tile, box))
    first = np.ones(len(order), np.bool_)
    first[1:] = (np.diff(box[order]) != 0) | (np.diff(tile[order]) != 0)
    best = np.zeros(len(order), np.bool_)
    best[order[first]] = True
    return best


def components(count: int, one: Indices, other: Indices) -> Indices:
    """Group things by which of them are linked, directly or through others.

    Parameters
    ----------
    count : int
        How many things there are.
    one, other : ndarray of int64, shape (links,)
        Indices of linked things.

    Returns
    -------
    ndarray of int64, shape (count,)
        For each thing the lowest index in its group.

    Examples
    --------
    >>> components(5, np.array([3, 1]), np.array([4, 3])).tolist()
    [0, 1, 2, 1, 1]
    """
    roots = np.arange(count)
    while True:
        a, b = roots[one], roots[other]
        apart = a != b
        if not apart.any():
            return roots
        one, other, a, b = one[apart], other[apart], a[apart], b[apart]
        # Every root takes the lowest that it is linked to; then all follow their roots' roots.
        np.minimum.at(roots, np.maximum(a, b), np.minimum(a, b))
        while (roots[roots] != roots).any():
            roots = roots[roots]


def suppress(
    boxes: Boxes,
    scores: npt.NDArray[Any],
    labels: npt.NDArray[Any] | None = None,
    *,
    threshold: float = 0.5,
    metric: Metric = "iou",
) -> Indices:
    """Greedy non-maximum suppression, over any number of boxes.

    From the highest score down, a box stays unless it has more than `threshold` in common with one
    that stayed; of equal scores the first comes first.

    Parameters
    ----------
    boxes : ndarray, shape (n, 4)
        ``x1, y1, x2, y2``.
    scores : ndarray, shape (n,)
    labels : ndarray, shape (n,), optional
        Boxes of different labels do not touch each other.
    threshold : float, default 0.5
    metric : {"iou", "ios"}

    Returns
    -------
    ndarray of int64, shape (n,)
        For each box the index of the one that stands for it: itself where it stays, else the
        highest-scored one that stayed and that it has too much in common with.

    Examples
    --------
    >>> boxes = np.array([[0, 0, 4, 4], [0, 0, 4, 5], [8, 8, 9, 9.0]])
    >>> suppress(boxes, np.array([0.6, 0.9, 0.5])).tolist()
    [1, 1, 2]
    """
    pairs = touching_pairs(boxes, labels)
    pairs = pairs[overlaps(boxes[pairs[:, 0]], boxes[pairs[:, 1]], metric) > threshold]
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    ranks = np.sort(rank[pairs], axis=1)
    strong, weak = ranks.T
    stays = _greedy(len(boxes), strong, weak)
    keeper = np.arange(len(boxes))
    keeper[~stays] = len(boxes)
    held = stays[strong]
    np.minimum.at(keeper, weak[held], strong[held])
    by_box = np.empty(len(order), np.int64)
    by_box[order] = order[keeper]
    return by_box


def _greedy(count: int, strong: Indices, weak: Indices) -> npt.NDArray[np.bool_]:
    """Which ranks stay: in each round all those that nothing undecided stands above."""
    stays = np.zeros(count, np.bool_)
    decided = np.zeros(count, np.bool_)
    while not decided.all():
        top = ~decided
        top[weak] = False
        stays |= top
        decided |= top
        decided[weak[top[strong]]] = True
        open_pairs = ~decided[strong] & ~decided[weak]
        strong, weak = strong[open_pairs], weak[open_pairs]
    return stays
