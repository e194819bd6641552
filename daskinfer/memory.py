"""How much memory a worker process of a run will take, part by part.

What a network needs for its own layers is not known before it has run on the device, and is not
counted; its input and its scores are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from .actor import RING
from .blockcache import cache_limit, first_capacity
from .inference import Inference
from .raster import window_of
from .readahead import MOST
from .source import Source

__all__ = ["GDAL_CACHE_MB", "THREADS", "Memory", "expected_memory"]

THREADS = 3
"""Chunks at work in one worker process.

Chunk reads and writes must overlap the device: with two threads both can be waiting for tiles.
"""

GDAL_CACHE_MB = 64
"""GDAL's own block cache; its default of 5 % of the memory is taken by each process."""

# Of the result of the chunk that ends: its tiles, the array that they are put into; then that, its
# blocks, its overviews.  The larger of the two, and a quarter for what is not freed at once.
# Chunks are read in turns, so that those behind it hold their tiles at most.
_RESULT = 2.25


@dataclass(frozen=True)
class Memory:
    """Bytes in one worker process.

    Attributes
    ----------
    cache : int
        Decoded blocks of the source, GDAL's own cache included.
    reading : int
        Pixels on their way from there to the batches.
    batches : int
        Batches that are filled, waiting, or on the device's way out.
    running : int
        Input and scores of the batch that runs, as float32.
    results : int
        Output of the chunks at work.

    Examples
    --------
    >>> Memory(cache=64, reading=8, batches=16, running=8, results=4).total
    100
    """

    cache: int
    reading: int
    batches: int
    running: int
    results: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part.name) for part in fields(self))


def expected_memory(source: Source, inference: Inference) -> Memory:
    """What a run of an inference over a source will take in one worker process.

    Parameters
    ----------
    source : Source
    inference : Inference

    Returns
    -------
    Memory
    """
    tiling, form = inference.tiling, inference.form
    threads = min(THREADS, tiling.chunks)
    pixel = inference.in_bands * np.dtype(inference.dtype).itemsize + 1
    tile = math.prod(tiling.tile)
    cache, whole = _cached(source, inference, threads)
    read = math.prod(tiling.chunk_at((0, 0)).read.shape)
    reading = threads * read * pixel if whole else 0
    # Beside the tiles that the chunks hold, reading ahead goes as far as the device needs.
    reading += (threads + min(MOST, tiling.runs)) * tile * pixel
    # Scores once as they are and once as probabilities or in order.
    running = inference.batch_size * tile * 4 * inference.in_bands
    running += int(
        inference.batch_size * tile * float(inference.scale) ** 2 * 8 * inference.channels
    )
    delivered = math.prod(inference.window((0, 0)).shape)
    tiles = form.bands * np.dtype(form.dtype).itemsize
    ending = _RESULT * tiles
    if inference.blended:
        # Scores of every tile, their sum, and the sum of the weights.
        tiles = 4 * inference.channels
        ending += 2 * tiles + 4
    return Memory(
        cache=cache,
        reading=reading,
        batches=RING * inference.batch_size * tile * pixel,
        running=running,
        results=int(delivered * (ending + (threads - 1) * tiles)),
    )


def _cached(source: Source, inference: Inference, threads: int) -> tuple[int, bool]:
    """Bytes of the caches, and whether chunks are read whole because they do not fit there."""
    chunk = inference.tiling.chunk_at((0, 0)).read
    need = source.cache_bytes(chunk, threads)
    if not need:
        return 0, True
    capacity = max(first_capacity(), need if need <= cache_limit() else 0)
    whole = source.cache_bytes(chunk) > capacity
    everything = source.nbytes(window_of((0, 0, *source.grid.shape), source.grid))
    return min(capacity, everything) + min(GDAL_CACHE_MB << 20, everything), whole
