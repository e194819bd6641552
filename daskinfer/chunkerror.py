"""What a chunk raised, on its way from a worker to the client."""

from __future__ import annotations

import contextlib
from typing import Any

import cloudpickle

__all__ = ["ChunkError", "OutputError", "StoppedError", "causes", "pickled"]


class ChunkError(Exception):
    """What a chunk raised, in a form that always reaches the client.

    Pickling drops the causes of an exception, in which GDAL names the block that it could not read,
    and some exceptions cannot be pickled at all.

    Parameters
    ----------
    text : str
        Type and message of the error and of its causes.
    worker : str
        Address.
    payload : bytes or None
        The error pickled, where it can be.
    """

    def __init__(self, text: str, worker: str, payload: bytes | None) -> None:
        super().__init__(text, worker, payload)
        self.text = text
        self.worker = worker
        self.payload = payload

    def original(self) -> BaseException:
        """The error that the chunk raised; this one where it cannot be pickled."""
        if self.payload is None:
            return self
        try:
            error = cloudpickle.loads(self.payload)
        except Exception:
            return self
        return error if isinstance(error, BaseException) else self


class OutputError(Exception):
    """The output could not be written to."""


class StoppedError(Exception):
    """The run was stopped before the chunk was done."""


def pickled(error: BaseException) -> bytes | None:
    """The error as it is where it can be loaded again, else without what led to it."""
    kind: Any = type(error)
    for make in (lambda: error, lambda: kind(*error.args)):
        with contextlib.suppress(Exception):
            payload = bytes(cloudpickle.dumps(make()))
            # GDAL's own errors, as a cause, are pickled and cannot be loaded.
            cloudpickle.loads(payload)
            return payload
    return None


def causes(error: BaseException) -> str:
    """Type and message of an error and of what caused it."""
    lines = []
    cause: BaseException | None = error
    while cause is not None:
        lines.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return " <- ".join(lines)
