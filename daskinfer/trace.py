"""A run as a timeline: every stage of every tile, batch and chunk, for Perfetto or chrome://tracing.

The format is the JSON of Chrome's "Trace Event Format": complete events (``"ph": "X"``) with times
in microseconds, one process per worker process and one lane per thread.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from .events import ChunkDone, Event
from .spans import Span

__all__ = ["TraceWriter", "tracing"]


class TraceWriter:
    """Callback that writes the spans of a run to a file, as they arrive.

    Parameters
    ----------
    path : path
        Replaced if it exists.

    Raises
    ------
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> import json, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "trace.json")
    ...     with TraceWriter(path) as trace:
    ...         trace.add("worker", Span("read", 12.0, 0.5, "reader-1", {"chunk": 3}))
    ...     with open(path) as file:
    ...         events = json.load(file)["traceEvents"]
    >>> [event["name"] for event in events]
    ['process_name', 'thread_name', 'read']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        self._processes: dict[Any, int] = {}
        self._threads: dict[tuple[int, str], int] = {}
        self._written = 0

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, ChunkDone):
            host, number = event.process
            for span in event.spans:
                self.add(f"{host} process {number}", span)

    def add(self, process: str, span: Span) -> None:
        """Write one span of a process."""
        pid = self._processes.get(process)
        if pid is None:
            pid = self._processes[process] = len(self._processes) + 1
            self._name("process_name", process, pid=pid)
        tid = self._threads.get((pid, span.thread))
        if tid is None:
            tid = self._threads[pid, span.thread] = len(self._threads) + 1
            self._name("thread_name", span.thread, pid=pid, tid=tid)
        self._write(
            name=span.stage,
            cat="daskinfer",
            ph="X",
            ts=round(span.start * 1e6, 1),
            dur=round(span.seconds * 1e6, 1),
            pid=pid,
            tid=tid,
            args=dict(span.about),
        )

    def close(self) -> None:
        """Complete the file; a second time does nothing."""
        if not self._file.closed:
            self._file.write("\n]}\n")
            self._file.close()

    def _name(self, kind: str, name: str, **where: int) -> None:
        self._write(name=kind, ph="M", args={"name": name}, **where)

    def _write(self, **event: Any) -> None:
        separator = ",\n" if self._written else "\n"
        self._file.write(separator + json.dumps(event))
        self._written += 1


@contextlib.contextmanager
def tracing(path: str | os.PathLike[str] | None) -> Iterator[list[TraceWriter]]:
    """The callbacks that write a timeline: one, or none where no path is given."""
    if path is None:
        yield []
        return
    with TraceWriter(path) as writer:
        yield [writer]
