"""How fast a run is, and how long the rest of it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from .display import duration_text

__all__ = ["Pacer"]

# Seconds of the past that tell how long the rest will take.
_RECENT = 120.0


class Pacer:
    """How fast a run is, and how long the rest takes at the pace of the last two minutes.

    Parameters
    ----------
    now : callable
        A clock in seconds.

    Examples
    --------
    >>> clock = iter([0, 10, 20])
    >>> pacer = Pacer(lambda: next(clock))
    >>> pacer.add(2_000_000)
    >>> pacer.left(4_000_000, now=10.0)
    20.0
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.start = now()
        self.pixels = 0
        self._past = [(self.start, 0)]

    def add(self, pixels: int) -> None:
        """Take a chunk that is done."""
        now = self._now()
        self.pixels += pixels
        # A hundred readings are enough, however many chunks there are.
        if len(self._past) > 1 and now - self._past[-2][0] <= _RECENT / 100:
            self._past[-1] = now, self.pixels
            return
        self._past.append((now, self.pixels))
        while len(self._past) > 2 and now - self._past[1][0] > _RECENT:
            self._past.pop(0)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._now() - self.start

    @property
    def speed(self) -> float:
        """Megapixels per second since the start."""
        return self.pixels / 1e6 / max(self.seconds, 1e-9)

    def left(self, pixels: int, now: float | None = None) -> float | None:
        """Seconds that so many pixels more take; None before the first chunk is done."""
        then, before = self._past[0]
        done = self.pixels - before
        return ((now or self._now()) - then) * pixels / done if done else None

    def text(self, pixels: int) -> str:
        """Speed, and the time left for so many pixels more."""
        left = self.left(pixels)
        return f"{self.speed:.2f} Mpx/s" + ("" if left is None else f", {duration_text(left)} left")
