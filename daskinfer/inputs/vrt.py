"""What the sources of a VRT cover.

A VRT without nodata reads 0 where none of its sources lies, and calls that valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from ..pixels import Mask
from ..tiling import Window

__all__ = ["Covers", "coverage", "covered"]

Rectangles = tuple[tuple[int, int, int, int], ...]
Covers = tuple[Rectangles, ...]
"""Rectangles ``(row, row end, column, column end)`` in pixels, for each band."""

_SOURCES = {
    "SimpleSource", "ComplexSource", "AveragedSource", "NoDataFromMaskSource",
    "KernelFilteredSource",
}  # fmt: skip
# Cells of a comparison, 4 bytes each.
_MOST_CELLS = 16 << 20


def coverage(dataset: Any, numbers: Sequence[int]) -> Covers | None:
    """What each band's sources cover; None where that is all, or nothing needs to tell it.

    Parameters
    ----------
    dataset : rasterio.DatasetReader
    numbers : sequence of int
        Of the bands that are wanted.
    """
    if dataset.driver != "VRT" or all(dataset.nodatavals[n - 1] is not None for n in numbers):
        return None
    text = dataset.tags(ns="xml:VRT").get("xml:VRT")
    if not text:
        return None
    root = ElementTree.fromstring(text)
    if root.get("subClass"):
        # Warped and pansharpened ones have no sources that lie anywhere.
        return None
    bands = {int(band.get("band", 0)): band for band in root.iter("VRTRasterBand")}
    shape = dataset.height, dataset.width
    covers = tuple(_rectangles(bands.get(n), shape) for n in numbers)
    gaps = any(not _is_full(rectangles, shape) for rectangles in set(covers))
    return covers if gaps else None


def covered(covers: Covers, window: Window, shape: tuple[int, int]) -> Mask:
    """Which pixels of a window lie on a source in every band, thinned to `shape`.

    >>> from daskinfer.tiling import Span
    >>> covered((((0, 2, 1, 3),),), Window(Span(1, 3), Span(0, 4)), (2, 4)).astype(int).tolist()
    [[0, 1, 1, 0], [0, 0, 0, 0]]
    """
    rows, cols = (
        np.floor(span.start + (np.arange(count) + 0.5) * span.size / count).astype(np.int64)
        for span, count in zip(window, shape, strict=True)
    )
    mask = np.ones(shape, np.bool_)
    for rectangles in set(covers):
        own = np.zeros(shape, np.bool_)
        for top, bottom, left, right in _touching(rectangles, window):
            down, across = (
                np.searchsorted(rows, (top, bottom)),
                np.searchsorted(cols, (left, right)),
            )
            own[slice(*down), slice(*across)] = True
        mask &= own
    return mask


def _touching(rectangles: Rectangles, window: Window) -> npt.NDArray[np.int64]:
    edges = np.array(rectangles, np.int64).reshape(-1, 4)
    hit = (edges[:, 0] < window.rows.stop) & (edges[:, 1] > window.rows.start)
    hit &= (edges[:, 2] < window.cols.stop) & (edges[:, 3] > window.cols.start)
    return edges[hit]


def _rectangles(band: Any, shape: tuple[int, int]) -> Rectangles:
    """Pixels whose centres the sources of a band cover; all, where it has none that say."""
    everything = ((0, shape[0], 0, shape[1]),)
    kind = None if band is None else band.get("subClass")
    if band is None or kind not in (None, "VRTSourcedRasterBand"):
        return everything
    if band.find("NoDataValue") is not None:
        return everything
    found = []
    for source in band:
        if source.tag not in _SOURCES:
            continue
        place = source.find("DstRect")
        if place is None:
            return everything
        left, top, width, height = (
            float(place.get(name, 0)) for name in ("xOff", "yOff", "xSize", "ySize")
        )
        found.append(
            (
                max(0, math.ceil(top - 0.5)),
                min(shape[0], math.ceil(top + height - 0.5)),
                max(0, math.ceil(left - 0.5)),
                min(shape[1], math.ceil(left + width - 0.5)),
            )
        )
    return tuple(found)


def _is_full(rectangles: Rectangles, shape: tuple[int, int]) -> bool:
    """Whether rectangles leave no pixel out."""
    if (0, shape[0], 0, shape[1]) in rectangles:
        return True
    edges = np.array(rectangles, np.int64).reshape(-1, 4)
    rows, cols = (
        np.unique([*edges[:, i], *edges[:, i + 1], 0, n]) for i, n in ((0, shape[0]), (2, shape[1]))
    )
    if len(rows) * len(cols) > _MOST_CELLS:
        return False
    # Each adds one from its corner on and takes it back behind its other corners.
    change = np.zeros((len(rows), len(cols)), np.int32)
    top, bottom = np.searchsorted(rows, edges[:, 0]), np.searchsorted(rows, edges[:, 1])
    left, right = np.searchsorted(cols, edges[:, 2]), np.searchsorted(cols, edges[:, 3])
    for i, j, sign in ((top, left, 1), (bottom, right, 1), (top, right, -1), (bottom, left, -1)):
        np.add.at(change, (i, j), sign)
    count = change.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
    return bool((count > 0).all())
