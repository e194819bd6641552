"""The objects of a run: kept chunk by chunk while it goes on, and turned into the output."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from affine import Affine

from daskinfer.errors import warn_user
from daskinfer.inputs.aoi import AreaOfInterest
from daskinfer.ledger import Failure, Ledger
from daskinfer.objects.merge import same_objects, suppress
from daskinfer.objects.plan import ObjectPlan, Search
from daskinfer.objects.report import ObjectReport
from daskinfer.objects.table import Boxes, Found, concatenated, load_found, save_found
from daskinfer.objects.write import FeatureWriter
from daskinfer.report import Report
from daskinfer.tiling import Tiling

__all__ = ["ObjectOutputs", "merged"]

# Features that are made at once.
_BATCH = 1 << 16


@dataclass
class ObjectOutputs:
    """Objects and ledger of a run; made by `prepare`.

    What the chunks found is appended to ``<output>.partial`` as it comes, and is in memory too: a
    box takes 60 bytes.
    """

    plan: ObjectPlan
    ledger: Ledger
    file: IO[bytes]
    chunks: dict[int, Found]
    broken: set[int]
    counts: tuple[tuple[str, int], ...] = field(default=())

    @classmethod
    @contextlib.contextmanager
    def prepare(cls, plan: ObjectPlan) -> Iterator[ObjectOutputs]:
        """Begin, or go on with what an earlier run has found."""
        path = f"{plan.output}.partial"
        with Ledger(f"{path}.jsonl") as ledger:
            if plan.overwrite or not os.path.exists(path):
                Path(path).unlink(missing_ok=True)
                ledger.begin(plan.settings())
            else:
                ledger.go_on(plan.settings(), path)
            with open(path, "a+b") as file:
                chunks = _kept(file)
                broken = {failure.chunk for failure in ledger.failures()}
                yield cls(plan, ledger, file, chunks, broken)

    def finished(self) -> npt.NDArray[np.bool_]:
        """Whether each chunk is done, in row-major order."""
        done = np.zeros(self.plan.tiling.chunks, np.bool_)
        done[[*self.chunks, *self.plan.outside()]] = True
        return done

    def todo(self, finished: npt.NDArray[np.bool_] | None = None) -> tuple[Iterator[int], int]:
        """Chunks that are still to be done, in order, and how many they are."""
        done = self.finished() if finished is None else finished
        left = (number for number in self.plan.tiling.order() if not done[number])
        return left, int(done.size - np.count_nonzero(done))

    def take(self, result: Any) -> None:
        """Keep what a chunk found."""
        self.chunks[result.chunk] = result.found
        save_found(self.file, result.chunk, result.found)
        self.file.flush()

    def mended(self, number: int) -> None:
        """Note that a chunk is done, if it had failed in an earlier run."""
        if number in self.broken:
            self.broken.discard(number)
            self.ledger.mended(number)

    def leave_nodata(self, failure: Failure) -> None:
        """Nothing: a chunk that failed has no objects."""

    def finish(self, failures: Sequence[Failure]) -> int:
        """Merge the objects of all chunks and write the output; returns its bytes."""
        plan = self.plan
        # In order of place: the result does not depend on which chunk came first.
        found = concatenated(self.chunks[number] for number in sorted(self.chunks))
        found = merged(found, plan.tiling, plan.search)
        if plan.area is not None:
            found = _centred(found, plan.area, plan.tiling)
        names = plan.model.class_names
        _check_labels(found, names)
        self.counts = _counted(found, names)
        _write(found, plan.output, plan.source.grid.transform, plan.source.grid.crs, names)
        os.unlink(self.file.name)
        lacking = Path(f"{plan.output}.failed.jsonl")
        if failures:
            os.replace(self.ledger.path, lacking)
        else:
            lacking.unlink(missing_ok=True)
            self.ledger.remove()
        return os.path.getsize(plan.output)

    def told(self, report: Report) -> ObjectReport:
        """The report, with how many objects there are."""
        return ObjectReport.of(report, self.counts)


def _kept(file: IO[bytes]) -> dict[int, Found]:
    """What an earlier run wrote; a torn end is cut off."""
    file.seek(0)
    chunks: dict[int, Found] = {}
    whole = 0
    while (loaded := load_found(file)) is not None:
        number, found = loaded
        chunks[number] = found
        whole = file.tell()
    file.truncate(whole)
    file.seek(whole)
    return chunks


def merged(found: Found, tiling: Tiling, search: Search) -> Found:
    """One object for everything that several tiles found of it, in order of place.

    Parameters
    ----------
    found : Found
        Of all chunks.
    tiling : Tiling
    search : Search
    """
    rows = found.rows
    if search.merge == "core":
        found = found.pick(rows["own"])
    elif len(rows):
        labels = rows["label"] if search.per_class else None
        if search.merge == "tiles":
            extents = _extents(rows["tile"], tiling)
            groups = same_objects(rows["box"], rows["tile"], extents, labels, search.threshold)
            found = _joined(found, groups, united=rows["cut"])
        else:
            groups = suppress(
                rows["box"],
                rows["score"],
                labels,
                threshold=search.threshold,
                metric=search.metric,
            )
            found = _joined(found, groups, united=np.full(len(rows), search.merge == "nmm"))
    x1, y1, x2, y2 = found.rows["box"].T
    return found.pick(np.lexsort((found.rows["label"], x2, y2, x1, y1)))


def _centred(found: Found, area: AreaOfInterest, tiling: Tiling) -> Found:
    """The objects whose centre is in a pixel of the area."""
    if not len(found):
        return found
    boxes, grid = found.rows["box"], tiling.grid
    # (row, col), of an object that ends at the raster's edge too.
    centres = np.floor((boxes[:, 1::-1] + boxes[:, :1:-1]) / 2).astype(int)
    indices = np.minimum(centres // tiling.chunk, np.array(grid) - 1)
    kept = np.zeros(len(found), np.bool_)
    chunks, places = np.unique(indices, axis=0, return_inverse=True)
    for number, (i, j) in enumerate(chunks.tolist()):
        window = tiling.chunk_at((i, j)).window
        here = np.flatnonzero(places.ravel() == number)
        rows, cols = (centres[here] - window.origin).T
        kept[here] = area.inside(window)[rows, cols]
    return found.pick(kept)


def _extents(tiles: npt.NDArray[Any], tiling: Tiling) -> Boxes:
    """``x1, y1, x2, y2`` of tiles given by row and column."""
    extents = np.empty((len(tiles), 4))
    for i, axis in enumerate((tiling.x, tiling.y)):
        numbers, places = np.unique(tiles[:, 1 - i], return_inverse=True)
        spans = np.array([axis.tile_span(int(number)) for number in numbers], np.float64)
        extents[:, i::2] = spans[places.ravel()]
    return extents


def _joined(found: Found, groups: npt.NDArray[np.int64], united: npt.NDArray[np.bool_]) -> Found:
    """One object for each group: its best, as large as all of it where that one is to be united.

    The best is one that is not cut, then the one with the highest score, then the one in whose
    core it lies.
    """
    rows = found.rows
    order = np.lexsort((~rows["own"], -rows["score"], united & rows["cut"], groups))
    first = np.ones(len(order), np.bool_)
    first[1:] = np.diff(groups[order]) != 0
    starts = np.flatnonzero(first)
    best = order[starts]
    joined = found.pick(best)
    grown = united[best]
    boxes = rows["box"][order]
    low = np.minimum.reduceat(boxes[:, :2], starts) if len(starts) else boxes[:, :2]
    high = np.maximum.reduceat(boxes[:, 2:], starts) if len(starts) else boxes[:, 2:]
    whole = joined.rows.copy()
    whole["box"][grown] = np.hstack([low, high])[grown]
    whole["score"] = np.maximum.reduceat(rows["score"][order], starts)
    if found.shapes is None:
        return Found(whole)
    members = np.split(order, starts[1:])
    shapes = tuple(
        _united(found.shapes, own) if grows and len(own) > 1 else found.shapes[top]
        for top, own, grows in zip(best, members, grown, strict=True)
    )
    return Found(whole, shapes)


def _united(shapes: tuple[bytes, ...], members: npt.NDArray[Any]) -> bytes:
    import shapely

    pieces = shapely.from_wkb([shapes[i] for i in members])
    return bytes(shapely.to_wkb(shapely.unary_union(pieces)))


def _counted(found: Found, names: tuple[str, ...] | None) -> tuple[tuple[str, int], ...]:
    labels, counts = np.unique(found.rows["label"], return_counts=True)
    return tuple(
        (_name(int(label), names), int(count)) for label, count in zip(labels, counts, strict=True)
    )


def _check_labels(found: Found, names: tuple[str, ...] | None) -> None:
    """Warn of labels without a name: those that have one may have the wrong one then."""
    labels = np.unique(found.rows["label"])
    if names is None or not len(labels) or (labels[0] >= 0 and labels[-1] < len(names)):
        return
    nameless = [int(label) for label in labels if not 0 <= label < len(names)]
    warn_user(
        f"objects have the labels {nameless}, and class_names has {len(names)} names, for 0 to "
        f"{len(names) - 1}: where labels start at 1, as torchvision's, name the background first, "
        f"as class_names={['background', *names]}"
    )


def _name(label: int, names: tuple[str, ...] | None) -> str:
    return names[label] if names is not None and 0 <= label < len(names) else str(label)


def _write(
    found: Found,
    path: str,
    transform: Affine | None,
    crs: str | None,
    names: tuple[str, ...] | None,
) -> None:
    kind = "Polygon" if found.shapes is None else "MultiPolygon"
    place = Affine.identity() if transform is None else transform
    with FeatureWriter(path, crs, kind, _columns(found.pick(slice(0)), names)) as writer:
        for start in range(0, len(found), _BATCH):
            part = found.pick(slice(start, start + _BATCH))
            writer.write(_geometries(part, place), _columns(part, names))


def _columns(found: Found, names: tuple[str, ...] | None) -> dict[str, npt.NDArray[Any]]:
    labels = found.rows["label"]
    columns = {"score": found.rows["score"].astype(np.float64), "label": labels}
    if names is not None:
        columns["class"] = np.array([_name(int(label), names) for label in labels], object)
    return columns


def _geometries(found: Found, place: Affine) -> npt.NDArray[Any]:
    """Outlines in the raster's CRS."""
    import shapely

    def on_map(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        x, y = place @ (pixels[:, 0], pixels[:, 1])
        return np.stack([x, y], axis=1)

    if found.shapes is None:
        x1, y1, x2, y2 = found.rows["box"].T
        corners = [(x1, y1), (x2, y1), (x2, y2), (x1, y2), (x1, y1)]
        rings = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
        flat = on_map(rings.reshape(-1, 2)).reshape(rings.shape)
        return np.asarray(shapely.polygons(flat), object)
    outlines = shapely.transform(shapely.from_wkb(list(found.shapes)), on_map)
    return np.array([_multi(outline) for outline in outlines], object)


def _multi(outline: Any) -> Any:
    import shapely

    return outline if outline.geom_type == "MultiPolygon" else shapely.multipolygons([outline])
