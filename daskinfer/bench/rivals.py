"""Two designs that users follow today, doing the work that daskinfer does.

Both read with rasterio, run batches on a `Device`, and write the cores of the tiles into a tiled
deflate GeoTIFF.  They run the same tiles as daskinfer and give the same pixels, and are spared
what it does besides: they write no overviews and leave the file as it grew.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import rasterio
from rasterio.windows import Window as RasterWindow

from daskinfer.device import Device
from daskinfer.tiling import Tile, Tiling, Window

__all__ = ["Work", "naive_loop", "reader_queue"]

Array = npt.NDArray[Any]
T = TypeVar("T")

# Batches that readers may be ahead.
_QUEUED_BATCHES = 3


@dataclass(frozen=True)
class Work:
    """What every design has to do.

    Attributes
    ----------
    source : str
        Raster to read.
    output : str
        File to write: one band of uint8.
    tiling : Tiling
        Its tiles, all of which lie inside the raster.
    batch : int
        Tiles per batch.
    """

    source: str
    output: str
    tiling: Tiling
    batch: int

    @property
    def tiles(self) -> list[Tile]:
        """All tiles, row by row."""
        y, x = self.tiling.y, self.tiling.x
        return [
            Tile(Window(y.tile_span(i), x.tile_span(j)), Window(y.core(i), x.core(j)))
            for i in range(y.tiles)
            for j in range(x.tiles)
        ]


def naive_loop(work: Work, device: Device) -> None:
    """Read a batch of tiles, run it, write it, and so on."""
    with rasterio.open(work.source) as source, _output(work) as output:
        buffer = device.allocate((work.batch, source.count, *work.tiling.tile), source.dtypes[0])
        for tiles in _batches(work.tiles, work.batch):
            for slot, tile in enumerate(tiles):
                source.read(window=_window(tile.window), out=buffer[slot])
            _write(output, tiles, device.run(buffer[: len(tiles)]))


def reader_queue(work: Work, device: Device, readers: int) -> None:
    """Threads read tiles into a bounded queue; one loop batches them, runs and writes.

    Parameters
    ----------
    work : Work
    device : Device
    readers : int
        Threads, each with a dataset handle of its own.
    """
    with _output(work) as output, _Readers(work, readers) as arriving:
        buffer: Array | None = None
        for items in _batches(arriving, work.batch):
            if buffer is None:
                first = items[0][1]
                buffer = device.allocate((work.batch, *first.shape), first.dtype)
            for slot, (_, pixels) in enumerate(items):
                np.copyto(buffer[slot], pixels)
            _write(output, [tile for tile, _ in items], device.run(buffer[: len(items)]))


class _Readers:
    """Threads that read ahead, up to a bound; iterate over what they read."""

    def __init__(self, work: Work, readers: int) -> None:
        self._work = work
        self._todo = iter(work.tiles)
        self._lock = threading.Lock()
        self._queue: queue.Queue[Any] = queue.Queue(_QUEUED_BATCHES * work.batch)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, name=f"reader-{n}") for n in range(readers)
        ]

    def __enter__(self) -> Iterator[tuple[Tile, Array]]:
        for thread in self._threads:
            thread.start()
        return self._arriving()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        while any(thread.is_alive() for thread in self._threads):
            # Whoever waits for room gets it, and sees that it is over.
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                continue

    def _arriving(self) -> Iterator[tuple[Tile, Array]]:
        reading = len(self._threads)
        while reading:
            item = self._queue.get()
            if item is None:
                reading -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item

    def _read(self) -> None:
        try:
            # sharing=False: the threads would get one handle otherwise, which is not safe.
            with rasterio.open(self._work.source, sharing=False) as source:
                while (tile := self._next()) is not None:
                    self._queue.put((tile, source.read(window=_window(tile.window))))
            self._queue.put(None)
        except Exception as error:
            self._queue.put(error)

    def _next(self) -> Tile | None:
        with self._lock:
            return None if self._stop.is_set() else next(self._todo, None)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


@contextmanager
def _output(work: Work) -> Iterator[rasterio.io.DatasetWriter]:
    with rasterio.open(work.source) as source:
        georeference = {"crs": source.crs, "transform": source.transform}
    height, width = work.tiling.shape
    rows, cols = work.tiling.step
    with rasterio.open(
        work.output,
        "w",
        driver="GTiff",
        count=1,
        height=height,
        width=width,
        dtype="uint8",
        nodata=255,
        tiled=True,
        # A core is a block: every block is written whole, and once.
        blockysize=rows,
        blockxsize=cols,
        compress="deflate",
        bigtiff="if_safer",
        **georeference,
    ) as dataset:
        yield dataset


def _write(output: Any, tiles: Sequence[Tile], results: Array) -> None:
    for tile, result in zip(tiles, results, strict=True):
        rows, cols = tile.core.slices(tile.window.origin)
        output.write(result[:, rows, cols], window=_window(tile.core))


def _window(window: Window) -> RasterWindow:
    row, col, height, width = window.bounds()
    return RasterWindow(col, row, width, height)
