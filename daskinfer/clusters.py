"""Dask clusters for inference."""

from __future__ import annotations

import socket
from typing import Any

from dask.system import CPU_COUNT
from distributed import Client

from .memory import THREADS

__all__ = ["cluster"]

_DASHBOARD_PORT = 8787


def cluster(kind: str = "local", **options: Any) -> Client:
    """Start or reach a Dask cluster.

    Parameters
    ----------
    kind : str, default "local"
        ``"local"``: threads of this process, so that nothing is copied between processes.
        ``"processes"``: worker processes on this machine.  Anything with ``"://"``: the address of
        a scheduler.
    **options
        Passed to `distributed.LocalCluster` or `distributed.Client`, as ``n_workers=2``.

    Returns
    -------
    distributed.Client
        Close it, or use it in a ``with`` statement; a cluster that was started here ends with it.

    Raises
    ------
    ValueError
        If the kind is unknown.

    Examples
    --------
    >>> with cluster("local", dashboard_address=":0") as client:
    ...     sum(client.nthreads().values())
    3
    """
    if not isinstance(kind, str):
        raise TypeError(f"cluster kind must be a word or an address, got {kind!r}")
    if "://" in kind:
        return Client(kind, **options)
    if kind not in ("local", "processes"):
        raise ValueError(f"cluster {kind!r}: pass 'local', 'processes' or a scheduler's address")
    defaults: dict[str, Any] = {
        "processes": kind == "processes",
        "n_workers": 1 if kind == "local" else max(1, CPU_COUNT // 2),
        "threads_per_worker": THREADS,
        "dashboard_address": f":{_free_port()}",
    }
    # A client that starts its own cluster closes it too.
    return Client(**defaults | options)


def _free_port() -> int:
    """The dashboard's usual port where it is free, else any: a warning would be all we got."""
    with socket.socket() as probe:
        try:
            probe.bind(("", _DASHBOARD_PORT))
        except OSError:
            return 0
    return _DASHBOARD_PORT
