"""Dask's own report of a run: its tasks, workers and scheduler."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from distributed import Client, performance_report

__all__ = ["dask_reporting"]


@contextlib.contextmanager
def dask_reporting(client: Client, path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Write what Dask has seen of the client's work inside to an HTML file; None: do not."""
    if path is None:
        yield
        return
    with client.as_current(), contextlib.ExitStack() as stack:
        report = performance_report(filename=os.fspath(path))
        stack.enter_context(report)
        try:
            yield
        except BaseException as error:
            # Where the cluster was lost there is none to be had, and that is not the news.
            stack.pop_all()
            with contextlib.suppress(Exception):
                report.__exit__(type(error), error, error.__traceback__)
            raise
