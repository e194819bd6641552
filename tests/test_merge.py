"""Which boxes are one object: against loops over all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.objects.merge import components, overlaps, same_objects, suppress, touching_pairs


def random_boxes(count, seed, side=40):
    rng = np.random.default_rng(seed)
    corners = rng.uniform(0, side, (count, 2))
    return np.hstack([corners, corners + rng.uniform(1, 12, (count, 2))])


def share(one, other, metric):
    w = min(one[2], other[2]) - max(one[0], other[0])
    h = min(one[3], other[3]) - max(one[1], other[1])
    common = max(w, 0) * max(h, 0)
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (one, other)]
    return common / (sum(areas) - common if metric == "iou" else min(areas))


def greedy(boxes, scores, labels, threshold, metric):
    """Non-maximum suppression as it is defined, one box after another."""
    stays, keeper = [], {}
    for i in sorted(range(len(boxes)), key=lambda i: (-scores[i], i)):
        over = (
            k for k in stays
            if labels[k] == labels[i] and share(boxes[k], boxes[i], metric) > threshold
        )  # fmt: skip
        keeper[i] = next(over, i)
        if keeper[i] == i:
            stays.append(i)
    return [keeper[i] for i in range(len(boxes))]


@pytest.mark.parametrize("metric", ["iou", "ios"])
def test_overlaps_are_those_of_each_pair(metric):
    one, other = random_boxes(200, 1), random_boxes(200, 2)
    expected = [share(a, b, metric) for a, b in zip(one, other, strict=True)]
    np.testing.assert_allclose(overlaps(one, other, metric), expected, rtol=1e-12)


def test_touching_pairs_are_all_pairs_that_touch():
    boxes = random_boxes(150, 3)
    labels = np.arange(150) % 2
    expected = {
        (i, j) for i in range(150) for j in range(i + 1, 150)
        if labels[i] == labels[j]
        and (np.maximum(boxes[i, :2], boxes[j, :2]) <= np.minimum(boxes[i, 2:], boxes[j, 2:])).all()
    }  # fmt: skip
    pairs = [tuple(pair) for pair in touching_pairs(boxes, labels).tolist()]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected


@pytest.mark.parametrize("metric", ["iou", "ios"])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("seed", range(4))
def test_suppression_is_the_greedy_one(metric, threshold, seed):
    boxes = random_boxes(120, seed)
    # Equal scores too: the first comes first.
    scores = np.random.default_rng(seed).integers(0, 20, 120) / 20
    labels = np.arange(120) % 3
    keeper = suppress(boxes, scores, labels, threshold=threshold, metric=metric)
    assert keeper.tolist() == greedy(boxes, scores, labels, threshold, metric)


def test_suppression_across_classes_where_it_is_asked_for():
    boxes = np.array([[0, 0, 4, 4], [0, 0, 4, 4.0]])
    assert suppress(boxes, np.array([0.5, 0.9]), np.array([1, 2])).tolist() == [0, 1]
    assert suppress(boxes, np.array([0.5, 0.9])).tolist() == [1, 1]


def test_no_boxes_and_one():
    nothing = np.empty((0, 4))
    assert len(touching_pairs(nothing)) == 0
    assert len(suppress(nothing, np.empty(0))) == 0
    assert len(same_objects(nothing, np.empty((0, 2), int), nothing)) == 0
    assert suppress(np.array([[0, 0, 1, 1.0]]), np.array([1.0])).tolist() == [0]


@settings(max_examples=50)
@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=60))
def test_components_are_those_of_a_walk_along_the_links(count, links):
    links = [(a % count, b % count) for a, b in links]
    expected = list(range(count))
    changed = True
    while changed:
        changed = False
        for a, b in links:
            low = min(expected[a], expected[b])
            changed |= {expected[a], expected[b]} != {low}
            expected[a] = expected[b] = low
    one, other = np.array(links, np.int64).reshape(-1, 2).T
    assert components(count, one, other).tolist() == expected


def test_a_chain_of_a_million_things_is_one_component():
    order = np.random.default_rng(0).permutation(1_000_000)
    assert not components(len(order), order[:-1], order[1:]).any()


# --- the same object in several tiles -------------------------------------------------------------

LEFT, RIGHT = [0, 0, 64, 64], [48, 0, 112, 64]


def grouped(*seen, threshold=0.5, labels=None):
    """Groups of ``(tile, box)``."""
    tiles = np.array([[0, 0] if tile is LEFT else [0, 1] for tile, _ in seen])
    extents = np.array([tile for tile, _ in seen], float)
    boxes = np.array([box for _, box in seen], float)
    return same_objects(boxes, tiles, extents, labels, threshold).tolist()


def test_a_whole_box_and_a_piece_of_it_are_one():
    assert grouped((LEFT, [40, 9, 60, 20]), (RIGHT, [48, 9, 60, 20])) == [0, 0]


def test_two_pieces_that_agree_where_both_tiles_look_are_one():
    assert grouped((LEFT, [10, 9, 64, 20]), (RIGHT, [48, 9, 100, 20])) == [0, 0]


def test_neighbours_stay_apart_however_near():
    seen = (LEFT, [40, 0, 56, 10]), (LEFT, [40, 10, 56, 20]), (RIGHT, [48, 0, 56, 10])
    assert grouped(*seen) == [0, 1, 0]


def test_boxes_of_one_tile_are_never_merged_not_even_through_another_tile():
    crowd = [50, 10, 62, 22], [51, 10, 63, 22]
    seen = [(tile, box) for tile in (LEFT, RIGHT) for box in crowd]
    assert grouped(*seen) == [0, 1, 0, 1]


def test_boxes_that_shake_are_still_one():
    assert grouped((LEFT, [49, 10, 60, 22]), (RIGHT, [50, 11, 61, 21])) == [0, 0]
    assert grouped((LEFT, [49, 10, 60, 22]), (RIGHT, [55, 16, 66, 28])) == [0, 1]


def test_labels_keep_boxes_apart():
    seen = (LEFT, [50, 9, 60, 20]), (RIGHT, [50, 9, 60, 20])
    assert grouped(*seen, labels=np.array([1, 2])) == [0, 1]


def test_boxes_of_tiles_that_share_no_pixel_are_not_the_same():
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 10.0]])
    extents = np.array([[0, 0, 10, 10], [10, 0, 20, 10.0]])
    assert same_objects(boxes, np.array([[0, 0], [0, 1]]), extents).tolist() == [0, 1]
