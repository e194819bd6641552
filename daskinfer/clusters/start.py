"""One call for every kind of Dask cluster."""

from __future__ import annotations

import re
import socket
from inspect import signature
from pathlib import Path
from typing import Any

from dask.system import CPU_COUNT
from distributed import Client

from .check import check_versions
from .cuda import cuda_cluster
from .slurm import slurm_cluster
from .spec import ClusterSpec, read_spec, started
from .workers import WorkerSettings, keep_nannies, prepare_workers

__all__ = ["KINDS", "cluster"]

KINDS = ("local", "processes", "cuda", "slurm")

_DASHBOARD_PORT = 8787
# Not "cuda:0", which means something else.
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d{2,5}")
_OF_CLIENT = ("set_as_default", "name", "timeout", "heartbeat_interval")


def cluster(kind: str = "local", **options: Any) -> Client:
    """Start or reach a Dask cluster.

    Parameters
    ----------
    kind : str, default "local"
        - ``"local"``: threads of this process, so that nothing is copied between processes.
        - ``"processes"``: worker processes on this machine.
        - ``"cuda"``: a worker process for each CUDA device of this machine, which sees no other.
          ``devices`` says which, or how many.  Made by dask-cuda where that is installed.
        - ``"slurm"``: batch jobs that run workers (extra ``slurm``).  ``jobs`` says how many, or
          ``(least, most)``; ``gpus`` per job; ``walltime``, before whose end workers stop taking
          chunks; ``cores``, ``memory``, ``queue`` and all else of `dask_jobqueue.SLURMCluster`.
        - the address of a scheduler, ``"tcp://host:8786"``, or its ``scheduler.json``.
        - a ``.yaml`` file that names any class of cluster, see `daskinfer.clusters.spec`.
    **options
        Of the kind, as ``n_workers=2`` for ``"processes"``; and of `distributed.Client`.

    Returns
    -------
    distributed.Client
        Close it, or use it in a ``with`` statement; a cluster that was started here ends with it.

    Raises
    ------
    TypeError
        If an option is none of the kind's.
    ValueError
        If the kind is unknown, or asks for what there is not: no CUDA device, no such partition.
    FileNotFoundError
        If there is no such file, or no SLURM.
    ImportError
        If the kind needs a package that is not installed.

    Examples
    --------
    >>> with cluster("local", dashboard_address=":0") as client:
    ...     sum(client.nthreads().values())
    3
    """
    if not isinstance(kind, str):
        raise TypeError(f"cluster kind must be a word or an address, got {kind!r}")
    if kind == "local":
        # Nothing to prepare: it shares the environment, and torch, of this process.
        return _own_local(processes=False, **{"n_workers": 1} | options)
    client = _client(kind, options)
    try:
        check_versions(client)
        prepare_workers(client)
    except BaseException:
        client.close()
        raise
    return client


def _client(kind: str, options: dict[str, Any]) -> Client:
    """A client of any kind but threads of this process."""
    suffix = Path(kind).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return _of_spec(read_spec(kind), options)
    if suffix == ".json":
        if not Path(kind).is_file():
            raise FileNotFoundError(f"cluster {kind!r}: no such scheduler file")
        return _reached(options, scheduler_file=kind)
    if "://" in kind or _HOST_AND_PORT.fullmatch(kind):
        return _reached(options, address=kind)
    if kind == "processes":
        return _processes(**options)
    if kind in ("cuda", "slurm"):
        mine = {name: options.pop(name) for name in _OF_CLIENT if name in options}
        options.setdefault("dashboard_address", f":{_free_port()}")
        make = cuda_cluster if kind == "cuda" else slurm_cluster
        return _owned(make(**options), mine)
    raise ValueError(
        f"cluster {kind!r}: pass {', '.join(map(repr, KINDS))}, a scheduler's address (tcp://...) "
        "or its scheduler.json, or a .yaml file"
    )


def _reached(options: dict[str, Any], **where: str) -> Client:
    """A client of a scheduler that runs."""
    known = sorted(set(signature(Client).parameters) - {"address", "scheduler_file", "kwargs"})
    # Dask would take any, and forget it.
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(
            f"a cluster that runs already takes no {unknown[0]!r}; known: {', '.join(known)}"
        )
    return Client(**where, **options)


def _of_spec(spec: ClusterSpec, options: dict[str, Any]) -> Client:
    """The cluster that a file names; options replace its arguments."""
    if spec.names_class:
        mine = {name: options.pop(name) for name in _OF_CLIENT if name in options}
        return _owned(started(spec, options), mine)
    if spec.cluster == "local":
        return _own_local(processes=False, **{"n_workers": 1} | dict(spec.arguments) | options)
    return _client(spec.cluster, dict(spec.arguments) | options)


def _processes(**options: Any) -> Client:
    workers = options.setdefault("n_workers", max(1, CPU_COUNT // 2))
    cores = max(1, CPU_COUNT // max(1, workers))
    threads = options.get("threads_per_worker", WorkerSettings.threads)
    settings = WorkerSettings(threads=threads, cores=cores).of_nanny()
    settings["env"] |= options.pop("env", {})
    keep_nannies()
    return _own_local(processes=True, **settings | options)


def _own_local(**options: Any) -> Client:
    defaults = {
        "threads_per_worker": WorkerSettings.threads,
        "dashboard_address": f":{_free_port()}",
    }
    # A client that starts its own cluster closes it too.
    return Client(**defaults | options)


class _OwningClient(Client):  # type: ignore[misc]
    """A client that ends the cluster which was started for it, as one without arguments does."""

    def close(self, *args: Any, **options: Any) -> Any:
        closing = super().close(*args, **options)
        if self.cluster is not None:
            self.cluster.close()
        return closing


def _owned(made: Any, options: dict[str, Any]) -> Client:
    try:
        return _OwningClient(made, **options)
    except BaseException:
        made.close()
        raise


def _free_port() -> int:
    """The dashboard's usual port where it is free, else any: a warning would be all we got."""
    with socket.socket() as probe:
        try:
            probe.bind(("", _DASHBOARD_PORT))
        except OSError:
            return 0
    return _DASHBOARD_PORT
