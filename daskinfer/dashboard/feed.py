"""Brings what is known of a run to the scheduler's page while the run goes on.

A message holds all there is to show, not a change: one that is lost does no harm, and a page that
is opened late needs no history.  A thread of its own sends at most two a second, so that the run
never waits for a scheduler and a million chunks are no more messages than a few.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import warn_user
from ..events import Event, RunFinished, RunStarted, RunStopped
from .backdrop import backdrop
from .view import TOPIC, RunView

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["Feed", "feeding"]

_EVERY = 0.5  # seconds between messages
_PATIENCE = 5.0  # seconds for the last message, where the scheduler does not answer


class Feed:
    """Callback that sends snapshots of a run.

    Parameters
    ----------
    send : callable
        Takes a message of plain values.
    view : RunView
        Is told of each event before this is.
    every : float, default 0.5
        Seconds between messages.

    Examples
    --------
    >>> import daskinfer as di, numpy as np, torch, xarray as xr
    >>> scene = xr.DataArray(np.ones((1, 64, 64), "float32"), dims=("band", "y", "x"))
    >>> plan = di.plan(scene, torch.nn.Conv2d(1, 2, 1), "o.tif")
    >>> sent, view = [], RunView()
    >>> with Feed(sent.append, view) as feed:
    ...     for listener in (view, feed):
    ...         listener(RunStarted(plan, chunks=1, done=0, dashboard="", run="a"))
    >>> sent[-1]["run"], sent[-1]["state"], sent[-1]["chunks"]
    ('a', 'running', 1)
    """

    def __init__(
        self, send: Callable[[dict[str, Any]], object], view: RunView, every: float = _EVERY
    ) -> None:
        self._send = send
        self._every = every
        self._view = view
        self._source: Any = None
        self._news = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="daskinfer-feed", daemon=True)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, RunStarted):
            self._source = event.plan.source
            self._thread.start()
        if not self._news.is_set():
            self._news.set()
        if isinstance(event, (RunFinished, RunStopped)):
            self.close()

    def close(self) -> None:
        """Send what is left; a scheduler that does not answer is waited for a few seconds."""
        self._over.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE)

    def _run(self) -> None:
        # A scheduler that is gone ends the run by itself, with an error that says so.
        with contextlib.suppress(Exception):
            self._send(self._view.snapshot().message())
            self._send_backdrop()
            while True:
                self._news.wait()
                self._news.clear()
                over = self._over.is_set()
                self._send(self._view.snapshot().message())
                if over:
                    return
                self._over.wait(self._every)

    def _send_backdrop(self) -> None:
        """The source, once: a picture that cannot be had is no reason to do without the rest."""
        picture = None
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture = backdrop(self._source)
        if picture is not None:
            run = self._view.snapshot().run
            shape = list(picture.shape)
            self._send({"run": run, "backdrop": picture.tobytes(), "shape": shape})


@contextlib.contextmanager
def feeding(client: Client, view: RunView, wanted: bool) -> Iterator[tuple[list[Feed], str]]:
    """Put the page on the client's scheduler and feed it.

    A scheduler that cannot have it, for it lacks bokeh, is no reason not to run: one warning says
    what is missing.

    Yields
    ------
    list of Feed
        What is to be told the run's events; none where there is no page.
    str
        Where to look.
    """
    link = str(client.dashboard_link or "")
    if not wanted:
        yield [], link
        return
    try:
        from .plugin import PagePlugin

        client.register_plugin(PagePlugin())
    except Exception as error:
        warn_user(
            f"no page of this run on Dask's dashboard ({type(error).__name__}: {error}): the "
            "scheduler's environment needs bokeh; pass dashboard=False to go without"
        )
        yield [], link
        return
    base, slash, last = link.rpartition("/")
    with Feed(lambda message: client.log_event(TOPIC, message), view) as feed:
        yield [feed], f"{base}/daskinfer" if slash and last == "status" else link
