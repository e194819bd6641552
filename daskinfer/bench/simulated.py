"""A device whose speed is known: every batch takes the same time, whatever the processor does.

What a benchmark of feeding needs is not a fast model but a known one: how many batches ran, and
how long the device had nothing to do.  Each device appends one line per batch to a log file, so
that devices of several processes, and designs that know nothing of each other, are counted alike.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from daskinfer.device import Device

__all__ = ["CLASSES", "SimulatedDevice", "TimedDevice", "Timeline", "classes_of"]

Array = npt.NDArray[Any]

CLASSES = 16


def classes_of(raw: Array) -> Array:
    """The class map a simulated device gives: by the first band, in steps of 512.

    A function of each pixel alone, so that any two designs must agree on every pixel.  It is
    about as costly to encode as a map of land cover: 5 % of neighbouring pixels differ, and 1 % of
    those in the demo model's map of the same scene.

    Parameters
    ----------
    raw : ndarray, shape (..., band, y, x)
        Unsigned raw numbers.

    Returns
    -------
    ndarray of uint8, shape (..., 1, y, x)

    Examples
    --------
    >>> classes_of(np.array([[[0, 511, 512, 8192]]], "uint16")).ravel().tolist()
    [0, 0, 1, 0]
    """
    first = raw[..., :1, :, :]
    return np.asarray(((first >> 9) & (CLASSES - 1)).astype(np.uint8))


class TimedDevice(Device):
    """Takes a fixed time for each batch, one batch at a time, without holding the GIL.

    Parameters
    ----------
    service : float
        Seconds per batch, however full it is.
    log : str
        File that a line is appended to for every batch.
    clock, wait : callable
        For tests.
    """

    def __init__(
        self,
        service: float,
        log: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._service = service
        self._log = log
        self._clock = clock
        self._wait = wait
        self._alone = threading.Lock()

    def forward(self, loaded: Any) -> Array:
        """Wait for the device, then for the time a batch takes."""
        batch, _ = loaded
        with self._alone:
            start = self._clock()
            result = classes_of(batch)
            # Up to the deadline, not for a duration: making the classes is part of the time.
            while (left := start + self._service - self._clock()) > 0:
                self._wait(left)
            stop = self._clock()
        line = json.dumps([f"{os.getpid()}-{id(self)}", start, stop, len(batch)])
        os.write(self._opened, f"{line}\n".encode())
        return result

    @cached_property
    def _opened(self) -> int:
        """The log, which stays open: after each call to the system a thread waits for the GIL."""
        opened = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        weakref.finalize(self, os.close, opened)
        return opened

    def copy_out(self, result: Any) -> Array:
        """As it is: `forward` made it anew."""
        return np.asarray(result)


@dataclass(frozen=True)
class SimulatedDevice:
    """What to pass as ``device=`` to `plan` or `run`: makes a `TimedDevice` in each worker.

    Attributes
    ----------
    service : float
        Seconds per batch.
    log : str
        File that all devices append to.
    """

    service: float
    log: str

    def __call__(self, inference: Any) -> TimedDevice:
        """Make a device; every inference runs alike on it."""
        return TimedDevice(self.service, self.log)


@dataclass(frozen=True)
class Timeline:
    """When devices ran their batches.

    Attributes
    ----------
    batches : tuple of (str, float, float, int)
        Device, start and stop in seconds of the system's monotonic clock, and tiles.

    Examples
    --------
    >>> timeline = Timeline((("a", 10.0, 11.0, 8), ("a", 11.5, 12.5, 4)))
    >>> timeline.whole(service=1.0, wall=4.0), timeline.steady(service=1.0), timeline.fill(8)
    (0.5, 0.8, 0.75)
    """

    batches: tuple[tuple[str, float, float, int], ...]

    @classmethod
    def read(cls, log: str) -> Timeline:
        """From a log that devices have written; empty where none has."""
        path = Path(log)
        lines = path.read_text().splitlines() if path.exists() else []
        return cls(tuple(tuple(json.loads(line)) for line in lines))

    @property
    def devices(self) -> list[str]:
        """Names of the devices that ran a batch."""
        return sorted({device for device, *_ in self.batches})

    @property
    def tiles(self) -> int:
        """Tiles that were run."""
        return sum(tiles for *_, tiles in self.batches)

    def whole(self, service: float, wall: float, devices: int = 1) -> float:
        """Share of the wall time in which the devices ran batches.

        Time beyond `service` that a batch took does not count as busy.
        """
        return service * len(self.batches) / (wall * devices)

    def steady(self, service: float) -> float:
        """The same share between each device's first start and last stop."""
        span = sum(
            max(stop for _, stop in times) - min(start for start, _ in times)
            for times in map(self._times, self.devices)
        )
        return service * len(self.batches) / span

    def fill(self, batch: int) -> float:
        """Tiles per slot, 1.0 where every batch was full."""
        return self.tiles / (batch * len(self.batches))

    def overlaps(self) -> bool:
        """Whether any device ran two batches at once."""
        return any(_overlap(sorted(self._times(device))) for device in self.devices)

    def _times(self, device: str) -> list[tuple[float, float]]:
        return [(start, stop) for name, start, stop, _ in self.batches if name == device]


def _overlap(times: Iterable[tuple[float, float]]) -> bool:
    last = -float("inf")
    for start, stop in times:
        if start < last:
            return True
        last = stop
    return False
