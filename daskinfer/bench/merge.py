"""``bench merge``: from what overlapping tiles found to one box for each object.

Objects lie at random, several to a core; every tile that sees one reports it, a little off, so that
each is there once to four times.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daskinfer.bench.harness import Bench, Case, Column, Result, Values

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["BENCH", "seen_objects"]

_WAYS = ("tiles", "nms", "nmm")
_CORE, _HALO = 512, 128
_LARGEST = 64
# Square pixels of the raster for each object.
_ROOM = 64**2
_SHAKE = 0.5

COLUMNS = (
    Column("cpu", "CPU s", "{:.2f}"),
    Column("per_box", "us per box", "{:.2f}"),
    Column("boxes", "boxes", "{:.0f}"),
    Column("objects", "objects found", "{:.0f}"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``bench merge`` can be asked for."""
    parser.add_argument(
        "--objects", type=_numbers, default=(10_000, 100_000, 1_000_000), metavar="N,N",
        help="objects in the raster",
    )  # fmt: skip
    parser.add_argument("--ways", type=_words, default=_WAYS, metavar="A,B", help=", ".join(_WAYS))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    unknown = set(words) - set(_WAYS)
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown.pop()!r} is none of {', '.join(_WAYS)}")
    return words


def cases(options: argparse.Namespace, folder: Path) -> list[Case]:
    """One case per way and number of objects."""
    return [
        Case(f"{way}, {count:,} objects".replace(",", " ").replace("  ", ", "),
             partial(_merged, way, count))
        for way in options.ways
        for count in options.objects
    ]  # fmt: skip


def seen_objects(count: int, seed: int = 0) -> tuple[npt.NDArray[Any], Any]:
    """Rows of what tiles found of so many objects, and their tiling.

    Returns
    -------
    ndarray of OBJECT, Tiling
    """
    import numpy as np

    from daskinfer.objects.table import OBJECT
    from daskinfer.tiling import AxisTiling, Tiling

    rng = np.random.default_rng(seed)
    side = max(_CORE + 2 * _HALO, int((count * _ROOM) ** 0.5))
    axis = AxisTiling(side, _CORE + 2 * _HALO, _HALO)
    sizes = rng.uniform(4, _LARGEST, (count, 2))
    corners = rng.uniform(0, 1, (count, 2)) * (side - sizes)
    boxes = np.hstack([corners, corners + sizes])
    seen = []
    spans = np.array([axis.tile_span(i) for i in range(axis.tiles)])
    first = np.maximum(corners // _CORE - 1, 0).astype(int)
    for down in range(4):
        for right in range(4):
            tile = np.add(first, (right, down))
            there = (tile < axis.tiles).all(axis=1)
            span = spans[np.minimum(tile, axis.tiles - 1)]
            there &= (boxes[:, :2] > span[:, :, 0]).all(axis=1)
            there &= (boxes[:, 2:] < span[:, :, 1]).all(axis=1)
            rows = np.zeros(there.sum(), OBJECT)
            rows["box"] = boxes[there] + rng.uniform(-_SHAKE, _SHAKE, (len(rows), 4))
            rows["tile"] = tile[there][:, ::-1]
            rows["score"] = rng.uniform(0.3, 1, len(rows))
            seen.append(rows)
    return np.concatenate(seen), Tiling(axis, axis)


def _merged(way: Any, count: int) -> Values:
    from daskinfer.objects.keep import merged
    from daskinfer.objects.plan import Search
    from daskinfer.objects.table import Found

    rows, tiling = seen_objects(count)
    start = time.process_time()
    found = merged(Found(rows), tiling, Search(max_object=_HALO, merge=way))
    spent = time.process_time() - start
    return {
        "cpu": spent,
        "per_box": 1e6 * spent / len(rows),
        "boxes": len(rows),
        "objects": len(found),
    }


def notes(result: Result, group: str) -> list[str]:
    """What was merged."""
    return [
        f"Objects of 4 to {_LARGEST} px at random, one for each {_ROOM} px; tiles of "
        f"{_CORE + 2 * _HALO} px with a halo of {_HALO} px, each reporting what it sees whole, off "
        f"by up to {_SHAKE} px. Objects overlap by chance: nms and nmm take some for one."
    ]


BENCH = Bench(
    "merge", "one box for each object, of what overlapping tiles found", COLUMNS, add_options,
    cases, notes,
)  # fmt: skip
