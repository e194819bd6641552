"""Areas that chunk borders cut into pieces, put together while chunks are gone through in rows.

Everything is in pixels, so that coordinates are whole numbers and pieces fit exactly.  A piece that
touches no border is finished where it is found.  The others wait: along each border, pixels that
belong together link the pieces they lie in, and once a row of chunks is through, what does not
reach its lower border is complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskinfer.objects.merge import components
from daskinfer.pixels import Array, Mask
from daskinfer.tiling import Window

__all__ = ["Area", "Assembly"]

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Area:
    """One connected area of one value: a shapely polygon or multipolygon in pixels."""

    value: int
    outline: Any


class Assembly:
    """Turns the chunks of a class map into areas.

    Parameters
    ----------
    shape : tuple of int
        ``(height, width)`` of the raster in pixels.
    connectivity : {4, 8}
        Whether pixels that touch at a corner belong together.
    """

    def __init__(self, shape: tuple[int, int], connectivity: int) -> None:
        self._shape = shape
        self._eight = connectivity == 8
        self._count = 0
        self._pieces: dict[int, Area] = {}
        self._links: list[tuple[Numbers, Numbers]] = []
        # Number of the piece, and value, of each pixel above the row of chunks that is gone
        # through, and of each pixel to the left of the chunk; 0 where there is none.
        self._above, self._below = _Line(shape[1]), _Line(shape[1])
        self._left = _Line(0)

    def add(self, values: Array, valid: Mask | None, window: Window) -> Iterator[Area]:
        """Take a chunk, in row-major order; gives the areas that end inside of it.

        Parameters
        ----------
        values : ndarray of integers, shape (y, x)
        valid : ndarray of bool, shape (y, x), or None
            Pixels that are part of any area; None where all are.
        window : Window
            Where the chunk lies.
        """
        open_pieces = []
        for piece in self._polygons(values, valid):
            if self._is_open(piece.outline.bounds, window):
                open_pieces.append(piece)
            else:
                yield _moved(_valid(piece.outline), piece.value, window)
        numbers = _numbered(open_pieces, values.shape)
        numbers[numbers > 0] += self._count
        for piece in open_pieces:
            self._count += 1
            outline = _stepped(piece.outline, window.shape)
            self._pieces[self._count] = _moved(outline, piece.value, window)
        self._link(numbers, values.astype(np.int64), window)

    def end_row(self, last: bool = False) -> Iterator[Area]:
        """Close a row of chunks; gives the areas that are complete with it."""
        self._above, self._below = self._below, _Line(self._shape[1])
        self._left = _Line(0)
        known = np.array(sorted(self._pieces), np.int64)
        one, other = (
            np.concatenate([np.searchsorted(known, pair[i]) for pair in self._links])
            if self._links
            else np.empty(0, np.int64)
            for i in (0, 1)
        )
        groups = components(len(known), one, other)
        waiting = set()
        if not last:
            reached = np.unique(self._above.numbers)
            waiting = set(groups[np.searchsorted(known, reached[reached > 0])].tolist())
        members = defaultdict(list)
        for number, group in zip(known.tolist(), groups.tolist(), strict=True):
            members[group].append(number)
        self._links = []
        for group, numbers in members.items():
            if group in waiting:
                rest = np.array(numbers[1:], np.int64)
                self._links.append((np.full(len(rest), numbers[0]), rest))
                continue
            pieces = [self._pieces.pop(number) for number in numbers]
            yield Area(pieces[0].value, _joined([piece.outline for piece in pieces]))

    def _polygons(self, values: Array, valid: Mask | None) -> Iterator[Area]:
        import shapely
        from rasterio.features import shapes

        connectivity = 8 if self._eight else 4
        for outline, value in shapes(values, valid, connectivity):
            # shapely's own reading of such dicts takes each point by itself.
            ring, *holes = (np.array(ring) for ring in outline["coordinates"])
            yield Area(int(value), shapely.Polygon(ring, holes))

    def _is_open(self, bounds: tuple[float, float, float, float], window: Window) -> bool:
        """Whether a piece may go on in another chunk."""
        height, width = window.shape
        left, top, right, bottom = bounds
        return (
            (top == 0 and window.rows.start > 0)
            or (left == 0 and window.cols.start > 0)
            or (bottom == height and window.rows.stop < self._shape[0])
            or (right == width and window.cols.stop < self._shape[1])
        )

    def _link(self, numbers: Numbers, values: Numbers, window: Window) -> None:
        first, last = window.cols
        self._above.link(numbers[0], values[0], first, self._eight, self._links)
        if first:
            self._left.link(numbers[:, 0], values[:, 0], 0, self._eight, self._links)
        self._left = _Line(len(numbers), numbers[:, -1].copy(), values[:, -1].copy())
        self._below.numbers[first:last] = numbers[-1]
        self._below.values[first:last] = values[-1]


class _Line:
    """Pixels along a border: the number of the piece that each is in, and its value."""

    def __init__(
        self, size: int, numbers: Numbers | None = None, values: Numbers | None = None
    ) -> None:
        self.numbers = np.zeros(size, np.int64) if numbers is None else numbers
        self.values = np.zeros(size, np.int64) if values is None else values

    def link(
        self,
        numbers: Numbers,
        values: Numbers,
        start: int,
        eight: bool,
        links: list[tuple[Numbers, Numbers]],
    ) -> None:
        """Note which pieces meet those on the other side, which begin at pixel `start` of this."""
        for shift in (-1, 0, 1) if eight else (0,):
            low = max(0, start + shift)
            high = min(len(self.numbers), start + shift + len(numbers))
            here = slice(low, high)
            there = slice(low - start - shift, high - start - shift)
            together = (self.values[here] == values[there]) & (self.numbers[here] > 0)
            together &= numbers[there] > 0
            pairs = np.stack([self.numbers[here][together], numbers[there][together]], axis=1)
            pairs = np.unique(pairs, axis=0)
            if len(pairs):
                links.append((pairs[:, 0], pairs[:, 1]))


def _numbered(pieces: list[Area], shape: tuple[int, int]) -> Numbers:
    """Which piece each pixel is in, from 1 up; 0 for none."""
    from rasterio.features import rasterize

    if not pieces:
        return np.zeros(shape, np.int64)
    outlines = ((piece.outline, number) for number, piece in enumerate(pieces, 1))
    numbers: Numbers = rasterize(outlines, shape, dtype="int32").astype(np.int64)
    return numbers


def _moved(outline: Any, value: int, window: Window) -> Area:
    import shapely

    row, col = window.origin
    return Area(value, shapely.transform(outline, lambda places: np.add(places, (col, row))))


def _joined(outlines: list[Any]) -> Any:
    """Pieces as one outline without points on its straight lines."""
    import shapely

    # Pieces have the same points along their borders: edges need no intersecting, which takes ten
    # times as long for areas with many holes.
    whole = outlines[0] if len(outlines) == 1 else shapely.coverage_union_all(outlines)
    return _valid(shapely.simplify(whole, 0))


def _valid(outline: Any) -> Any:
    """The outline as OGC wants it.

    Where an area touches itself at a corner GDAL lets its ring do so too, which is not valid; the
    same area is one whose hole touches its ring, or two parts that touch.
    """
    import shapely

    return outline if shapely.is_valid(outline) else shapely.make_valid(outline)


def _stepped(outline: Any, shape: tuple[int, int]) -> Any:
    """An outline with a point at every pixel along the borders of its chunk."""
    import shapely

    ring = shapely.get_coordinates(outline.exterior)
    along = np.diff(ring, axis=0)
    on_border = np.zeros(len(along), np.bool_)
    for axis, end in ((0, shape[1]), (1, shape[0])):
        on_border |= (along[:, axis] == 0) & np.isin(ring[:-1, axis], (0, end))
    pixels = np.where(on_border, np.abs(along).sum(axis=1), 1).astype(np.int64)
    starts = np.cumsum(pixels) - pixels
    count = np.arange(pixels.sum()) - np.repeat(starts, pixels)
    points = np.repeat(ring[:-1], pixels, axis=0)
    points = points + count[:, None] * np.repeat(np.sign(along), pixels, axis=0)
    return shapely.Polygon(np.vstack([points, ring[-1:]]), outline.interiors)
