"""A worker process for each CUDA device of this machine."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from dask.system import CPU_COUNT
from distributed import Nanny, Scheduler, SpecCluster
from distributed.system import MEMORY_LIMIT

from .workers import WorkerSettings, cuda_count, keep_nannies

__all__ = ["cuda_cluster", "visible_devices"]


def cuda_cluster(
    *,
    devices: int | Sequence[int | str] | None = None,
    threads_per_worker: int = WorkerSettings.threads,
    dashboard_address: str = ":0",
    **options: Any,
) -> SpecCluster:
    """Start it; see `daskinfer.cluster`.

    Parameters
    ----------
    devices : int or sequence, optional
        How many, or which: numbers or the names that ``nvidia-smi -L`` gives; by default all.
    threads_per_worker : int, default 3
    dashboard_address : str
    **options
        Of `distributed.Nanny`, or of ``LocalCUDACluster`` where dask-cuda is installed.

    Raises
    ------
    ValueError
        If there are not so many devices.
    """
    names = visible_devices(devices)
    cores = max(1, CPU_COUNT // len(names))
    settings = WorkerSettings(threads=threads_per_worker, cores=cores, gpu=True)
    keep_nannies()
    if importlib.util.find_spec("dask_cuda") is not None:
        # It knows of NUMA nodes and of faster links between devices.
        made: SpecCluster = importlib.import_module("dask_cuda").LocalCUDACluster(
            CUDA_VISIBLE_DEVICES=names,
            threads_per_worker=threads_per_worker,
            resources=settings.resources,
            dashboard_address=dashboard_address,
            **options,
        )
        return made
    given = settings.of_nanny() | {
        "nthreads": threads_per_worker,
        "memory_limit": MEMORY_LIMIT // len(names),
    }
    environment = given.pop("env") | options.pop("env", {})
    workers = {
        # Kept through a restart of the process: it is the nanny's, not the worker's.
        f"cuda-{name}": {
            "cls": Nanny,
            "options": given | options | {"env": environment | {"CUDA_VISIBLE_DEVICES": name}},
        }
        for name in names
    }
    scheduler = {
        "cls": Scheduler,
        "options": {"host": "127.0.0.1", "port": 0, "dashboard_address": dashboard_address},
    }
    return SpecCluster(workers=workers, scheduler=scheduler)


def visible_devices(devices: int | Sequence[int | str] | None = None) -> list[str]:
    """Names of CUDA devices as for ``CUDA_VISIBLE_DEVICES``.

    Raises
    ------
    ValueError
        If there are none, not so many, or not these; says what torch sees.
    """
    count = cuda_count()
    set_by_user = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in (set_by_user or "").split(",") if name.strip()]
    names = names[:count] or [str(number) for number in range(count)]
    if devices is None:
        wanted = names
    elif isinstance(devices, int):
        wanted = names[:devices]
    else:
        wanted = [str(device) for device in devices]
    asked = devices if isinstance(devices, int) else max(1, len(wanted))
    missing = [name for name in wanted if name not in names]
    # By its long name a device is known to CUDA, not to us.
    missing = [name for name in missing if name.isdigit()]
    if count == 0 or missing or len(wanted) < asked or not wanted:
        raise ValueError(_lacking(devices, names, set_by_user))
    return wanted


def _lacking(devices: Any, names: list[str], set_by_user: str | None) -> str:
    import torch

    asked = "" if devices is None else f" with devices={devices!r}"
    seen = f"devices {', '.join(names)}" if names else "no CUDA device"
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    limits = "" if set_by_user is None else f", CUDA_VISIBLE_DEVICES is {set_by_user!r}"
    return (
        f"cluster 'cuda'{asked}: torch {torch.__version__} ({built}) sees {seen}{limits}; "
        "pass 'processes' to run on the CPU"
    )
