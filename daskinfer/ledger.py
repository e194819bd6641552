"""What a run was asked to do and what went wrong in it, beside the output while it grows.

One JSON object per line, appended and flushed as it happens: first the settings, then a line per
chunk that failed for good, or that failed once and is done now.  What is *done* is not kept here:
the work file itself says it, block by block, and cannot disagree with itself.  A torn last line,
left by a kill, is ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .fileio import sync_file, write_at

__all__ = ["Failure", "Ledger", "announced", "differences", "read_ledger"]


@dataclass(frozen=True)
class Failure:
    """A chunk that failed for good.

    Attributes
    ----------
    chunk : int
        Number in row-major order.
    window : tuple of int
        ``(row, col, height, width)`` in pixels.
    error : str
        Type and message of what it raised, with its causes.
    worker : str
        Address of the worker of the last attempt.
    """

    chunk: int
    window: tuple[int, int, int, int]
    error: str
    worker: str


class Ledger:
    """The ledger of one output, locked while it is open.

    Parameters
    ----------
    path : path

    Raises
    ------
    RuntimeError
        If another run is writing this output.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("ab+", buffering=0)
        try:
            self._lock()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def begin(self, settings: dict[str, Any]) -> None:
        """Start again, with the settings (plain JSON values) that all runs on it must share."""
        self._file.truncate(0)
        self._write({"settings": settings})

    def go_on(self, settings: dict[str, Any], work_file: str) -> None:
        """Go on with an earlier run.

        Raises
        ------
        ValueError
            If that had other settings, which are named, or none that can be read.
        """
        earlier = read_ledger(self.path)[0]
        if earlier is None:
            raise ValueError(
                f"{work_file} has no ledger ({self.path}) that says what it holds: delete it, or "
                "pass overwrite=True to start again"
            )
        _refuse_other(earlier, settings, self.path)
        self._append("\n")  # ends a torn line, if there is one

    def announce(self, run: str) -> None:
        """Record the name of a run, by which others know that this is the file they look for."""
        self._write({"run": run})

    def failed(self, failure: Failure) -> None:
        """Record a chunk that failed for good."""
        self._write({"failed": asdict(failure)})

    def mended(self, chunk: int) -> None:
        """Record that a chunk which had failed is done."""
        self._write({"mended": chunk})

    def failures(self) -> tuple[Failure, ...]:
        """Chunks recorded as failed and not as mended."""
        return read_ledger(self.path)[1]

    def close(self) -> None:
        """Close the file, which releases the lock."""
        self._file.close()

    def remove(self) -> None:
        """Delete the ledger of a complete output."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _lock(self) -> None:
        try:
            # The kernel drops it with the process, however that ends.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(
                f"another run is writing this output (it holds {self.path}): wait for it, or "
                "choose another output"
            ) from error

    def _write(self, record: dict[str, Any]) -> None:
        self._append(json.dumps(record) + "\n")
        sync_file(str(self.path), self._file.fileno())

    def _append(self, text: str) -> None:
        # Unbuffered: what a full disk did not take must not come up again when the file is closed.
        at = os.fstat(self._file.fileno()).st_size
        write_at(str(self.path), self._file.fileno(), text.encode(), at)


def read_ledger(path: str | Path) -> tuple[dict[str, Any] | None, tuple[Failure, ...]]:
    """Settings and failures of a ledger; None where there are no settings yet."""
    settings = None
    failures: dict[int, Failure] = {}
    for record in _records(Path(path)):
        settings = record.get("settings", settings)
        if "failed" in record:
            fields = record["failed"]
            failure = Failure(**fields | {"window": tuple(fields["window"])})
            failures[failure.chunk] = failure
        failures.pop(record.get("mended", -1), None)
    return settings, tuple(failures.values())


def announced(path: str | Path, run: str) -> bool:
    """Tell whether a ledger is there, and is the one of a run."""
    try:
        return any(record.get("run") == run for record in _records(Path(path)))
    except FileNotFoundError:
        return False


def differences(earlier: Any, now: Any, name: str = "") -> list[str]:
    """Names of the settings that differ, with both values.

    >>> differences({"tile": 64, "halo": {"y": 8}}, {"tile": 64, "halo": {"y": 16}})
    ['halo.y: 8 then, 16 now']
    """
    if isinstance(earlier, dict) and isinstance(now, dict):
        keys = sorted(earlier.keys() | now.keys())
        prefix = f"{name}." if name else ""
        return [
            line
            for key in keys
            for line in differences(earlier.get(key), now.get(key), prefix + key)
        ]
    return [] if earlier == now else [f"{name}: {earlier} then, {now} now"]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        if isinstance(record, dict):
            yield record


def _refuse_other(earlier: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    lines = differences(earlier, now)
    if lines:
        raise ValueError(
            f"{path} belongs to a run with other settings ({'; '.join(lines)}): repeat that call "
            "to go on with it, or pass overwrite=True to start again"
        )
