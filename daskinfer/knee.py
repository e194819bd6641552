"""Find the batch size beyond which a device gets no faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .device import Device

__all__ = ["Knee", "batch_knee", "time_batch"]

# Less gain than this for twice the memory is none.
_GAIN = 1.05


@dataclass(frozen=True)
class Knee:
    """What was measured.

    Attributes
    ----------
    batch_size : int
        Smallest size beyond which doubling it gains less than 5 %.
    tried : dict of int to float
        Tiles per second by batch size.
    """

    batch_size: int
    tried: dict[int, float]

    def __str__(self) -> str:
        speeds = ", ".join(f"{size}: {speed:.3g}" for size, speed in self.tried.items())
        return f"{self.batch_size} (tiles/s by batch size: {speeds})"


def batch_knee(seconds: Callable[[int], float], largest: int) -> Knee:
    """Double the batch until that gains nothing or the device is short of memory.

    Parameters
    ----------
    seconds : callable
        Time of one batch of so many tiles; raises `MemoryError` where it does not fit.
    largest : int
        Never more tiles than this.

    Examples
    --------
    >>> batch_knee(lambda size: max(0.4, 0.1 * size), largest=32).batch_size
    4
    """
    tried: dict[int, float] = {}
    size = 1
    while size <= largest:
        try:
            speed = size / seconds(size)
        except MemoryError:
            break
        best = max(tried.values(), default=0.0)
        tried[size] = speed
        if speed < _GAIN * best:
            break
        size *= 2
    best = max(tried.values(), default=0.0)
    good = [size for size, speed in tried.items() if speed * _GAIN >= best]
    return Knee(good[0] if good else 1, tried)


def time_batch(
    device: Device, shape: tuple[int, int, int], dtype: str, size: int, repeats: int = 2
) -> float:
    """Seconds that a device takes for a batch of so many tiles, the fastest of a few.

    The first pass, in which kernels are chosen and memory is taken, does not count.
    """
    batch = device.allocate((size, *shape), dtype)
    batch[:] = np.ones((), dtype)
    device.run(batch)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        device.run(batch)
        times.append(time.perf_counter() - start)
    return min(times)
