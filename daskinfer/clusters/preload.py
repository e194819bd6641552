"""What a worker process does while it starts: ``dask worker --preload daskinfer.clusters.preload``.

It keeps to one CUDA device, and imports the engine meanwhile, in a thread: a run would wait seconds
for that, and so would whoever waits for the cluster.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

__all__ = ["dask_setup", "device_of"]


def dask_setup(worker: Any) -> None:
    """Called by Dask before the worker reaches its scheduler."""
    device = device_of(str(worker.name), os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    threading.Thread(target=_warm, daemon=True, name="daskinfer-import").start()


def device_of(name: str, visible: str) -> str | None:
    """The device of a worker's own among those that its job was given.

    Parameters
    ----------
    name : str
        Of the worker; workers of one job are numbered, ``"name-0"``, ``"name-1"``.
    visible : str
        ``CUDA_VISIBLE_DEVICES``.

    Returns
    -------
    str or None
        None where there is nothing to choose.

    Examples
    --------
    >>> device_of("SLURMCluster-3-1", "0,1"), device_of("SLURMCluster-3", "0")
    ('1', None)
    """
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    number = name.rpartition("-")[2]
    if len(devices) < 2 or not number.isdigit():
        return None
    return devices[int(number) % len(devices)]


def _warm() -> None:
    importlib.import_module("daskinfer.station")
    importlib.import_module("torch")
