"""Progress in a notebook: a bar, a small map of the chunks, and the figures.

One HTML display that is replaced in place, which every front end can show and which stays in the
saved notebook; no widget protocol, so that nothing has to be installed or running to look at it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ..events import Event, RunFinished, RunFinishing, RunStarted, RunStopped, RunStopping
from .html import overview
from .view import RunView

__all__ = ["NotebookProgress", "in_notebook"]

_EVERY = 0.25  # seconds between pictures


class NotebookProgress:
    """Callback that draws a run in a notebook.

    Its own HTML is what was drawn last: `_repr_html_` gives it.

    Parameters
    ----------
    side : int, default 220
        Of the map's longer side in CSS pixels.
    display : callable, optional
        Shows an object with an HTML form and returns a handle with ``update``, as
        `IPython.display.display` does with ``display_id=True``; that is the default.
    """

    def __init__(self, side: int = 220, display: Any = None) -> None:
        self._view = RunView()
        self._side = side
        self._display = display or _shown
        self._handle: Any = None
        self._drawn = 0.0
        self._link = ""

    def __call__(self, event: Event) -> None:
        """Take an event."""
        self._view(event)
        if isinstance(event, RunStarted):
            self._link = event.dashboard
            self._handle = self._display(self)
            return
        milestone = isinstance(event, (RunStopping, RunFinishing, RunStopped, RunFinished))
        if milestone or time.perf_counter() - self._drawn > _EVERY:
            self._draw()

    def stop(self) -> None:
        """Nothing to put in order."""

    def _repr_html_(self) -> str:
        run = self._view.snapshot()
        link = ""
        if self._link and not run.ended:
            link = f"<div><a href='{self._link}' target='_blank'>dashboard</a></div>"
        return f"{overview(run, self._side)}{link}"

    def _draw(self) -> None:
        self._drawn = time.perf_counter()
        if self._handle is not None:
            self._handle.update(self)


def _shown(what: object) -> Any:
    from IPython import display

    return display.display(what, display_id=True)  # type: ignore[no-untyped-call]


def in_notebook() -> bool:
    """Whether this runs in a kernel, whose front end shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
