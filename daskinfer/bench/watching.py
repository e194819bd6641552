"""Watch what a benchmark takes, from outside and while it runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

__all__ = ["PeakMemory", "peak_memory", "sampled"]

# A look at the memory of three processes takes 15 ms of a processor: one in ten would be lost.
_LOOKING = 1 / 30


class PeakMemory:
    """Peak memory of a process and its descendants, sampled; see `peak_memory`.

    Attributes
    ----------
    bytes : int
        The largest sum seen so far.
    """

    def __init__(self, pid: int | None = None) -> None:
        import psutil

        self.bytes = 0
        self._root = psutil.Process(pid)

    def look(self) -> int:
        """Take a sample; returns what the processes hold now, in bytes."""
        import psutil

        now = 0
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return 0
        for process in tree:
            # A process may end meanwhile.
            with contextlib.suppress(psutil.Error):
                now += _share(process)
        self.bytes = max(self.bytes, now)
        return now


def _share(process: psutil.Process) -> int:
    """Proportional set size, so that shared pages count once; RSS where there is none."""
    full = process.memory_full_info()
    return int(getattr(full, "pss", full.rss))


@contextlib.contextmanager
def peak_memory(pid: int | None = None, *, every: float = 0.1) -> Iterator[PeakMemory]:
    """Watch the memory of a process tree; of this process by default.

    Parameters
    ----------
    pid : int, optional
        Root of the tree.
    every : float, default 0.1
        Seconds between samples.

    Examples
    --------
    >>> with peak_memory() as peak:
    ...     block = bytearray(1000)
    >>> peak.bytes > 1000
    True
    """
    peak = PeakMemory(pid)
    peak.look()
    with sampled(peak.look, every):
        yield peak
    peak.look()


@contextlib.contextmanager
def sampled(look: Callable[[], object], every: float) -> Iterator[None]:
    """Call a function every so many seconds, in a thread of its own.

    Less often where looking takes long: of one processor, what is measured loses a thirtieth.
    """
    over = threading.Event()

    def watch() -> None:
        wait = every
        while not over.wait(wait):
            start = time.perf_counter()
            look()
            wait = max(every, (time.perf_counter() - start) / _LOOKING)

    watcher = threading.Thread(target=watch, name="daskinfer-sampler", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
