"""The one runtime error of daskinfer.

Bad arguments and bad input are refused before work starts with the built-in errors
(``FileNotFoundError``, ``FileExistsError``, ``ValueError``, ``TypeError``).  What goes wrong once
work has started is an `InferenceError`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

__all__ = ["InferenceError", "warn_user"]


class InferenceError(RuntimeError):
    """A run failed after it had started.

    Parameters
    ----------
    message : str
        What went wrong and what to do about it.
    window : tuple of int, optional
        ``(row, col, height, width)`` of the failed chunk in pixels of the source.
    chunk : tuple of int, optional
        Index ``(i, j)`` of the failed chunk in the chunk grid.
    worker : str, optional
        Address of the Dask worker that ran it.

    Notes
    -----
    The error that the chunk raised is chained as ``__cause__``.

    Examples
    --------
    >>> error = InferenceError("chunk failed", window=(0, 0, 512, 512), chunk=(0, 0))
    >>> error.window
    (0, 0, 512, 512)
    """

    def __init__(
        self,
        message: str,
        *,
        window: tuple[int, int, int, int] | None = None,
        chunk: tuple[int, int] | None = None,
        worker: str | None = None,
    ) -> None:
        super().__init__(message)
        self.window = window
        self.chunk = chunk
        self.worker = worker


def warn_user(text: str) -> None:
    """Warn at the line of the user's that led here, however deep in the package this is called."""
    package = str(Path(__file__).parent)
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(text, UserWarning, stacklevel=level)
