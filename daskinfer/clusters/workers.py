"""What inference needs of a worker, whatever kind of cluster it belongs to.

Part of it has to be there before the process starts: its threads, its share of the cores, the GPU
that it sees.  `WorkerSettings` says that to a nanny or on a command line.  The rest is brought to
every worker by a plugin, so also to those of a cluster that was not started here and to those that
join late.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import dask
from dask.system import CPU_COUNT
from distributed import Client, WorkerPlugin

from ..memory import GDAL_CACHE_MB, THREADS

__all__ = [
    "WorkerSettings",
    "cores_of_worker",
    "cuda_count",
    "declare_gpus",
    "keep_nannies",
    "neighbours",
    "prepare",
    "prepare_workers",
]

# Seconds until Dask closes the nanny of a lost worker, and what they are unless they were set.
_LOST, _LOST_DEFAULT = "distributed.deploy.lost-worker-timeout", "15s"

PRELOAD = "daskinfer.clusters.preload"

_ANY_PROCESS = {
    # Its default of 5 % of the memory is taken by each process.
    "GDAL_CACHEMAX": str(GDAL_CACHE_MB),
}


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker process.

    Attributes
    ----------
    threads : int
        Task threads, which is to say chunks at work.
    cores : int
        That torch may use.
    gpu : bool
        Whether the process has a CUDA device to itself.

    Examples
    --------
    >>> WorkerSettings(cores=4, gpu=True).command_line()
    ['--nthreads', '3', '--preload', 'daskinfer.clusters.preload', '--resources', 'GPU=3']
    """

    threads: int = THREADS
    cores: int = 1
    gpu: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables to set; those that the user has set already are left alone."""
        # A nanny would leave torch one thread.
        wanted = _ANY_PROCESS | {"OMP_NUM_THREADS": str(self.cores)}
        return {name: value for name, value in wanted.items() if name not in os.environ}

    @property
    def resources(self) -> dict[str, float]:
        """A unit of the GPU for every thread: the actor sees to the turns."""
        return {"GPU": self.threads} if self.gpu else {}

    def of_nanny(self) -> dict[str, Any]:
        """Options of `distributed.Nanny` and, but for the threads, of `LocalCluster`."""
        options = {"env": self.environment, "preload": PRELOAD}
        return options | ({"resources": self.resources} if self.gpu else {})

    def command_line(self) -> list[str]:
        """Options of the command ``dask worker``."""
        line = ["--nthreads", str(self.threads), "--preload", PRELOAD]
        resources = [f"{name}={amount:g}" for name, amount in self.resources.items()]
        return line + (["--resources", *resources] if resources else [])

    def exports(self) -> list[str]:
        """Lines for a script of the shell, before the worker starts."""
        return [f"export {name}={value}" for name, value in self.environment.items()]


def prepare_workers(client: Client) -> None:
    """Have all workers of a cluster fit for inference, those too that join later."""
    client.register_plugin(_plugin())


def _plugin() -> WorkerPlugin:
    """A plugin that goes to workers as bytecode.

    It stays on the scheduler, which may be shared: a worker without daskinfer could not join any
    more if it had to import this module for it.
    """

    class Prepared(WorkerPlugin):  # type: ignore[misc]
        name: ClassVar[str] = "daskinfer-worker"
        idempotent: ClassVar[bool] = True

        async def setup(self, worker: Any) -> None:
            try:
                from daskinfer.clusters.workers import prepare
            except ImportError:
                return
            await prepare(worker)

    return Prepared()


async def prepare(worker: Any) -> None:
    """What `prepare_workers` has each worker do."""
    if not str(worker.address).startswith("inproc://"):  # in a process of the user's own
        for name, value in _ANY_PROCESS.items():
            os.environ.setdefault(name, value)
    await declare_gpus(worker)


async def declare_gpus(worker: Any) -> None:
    """Have the scheduler know that a worker sees a CUDA device, unless it was told at its start.

    Chunks then go to workers with a GPU, where there are others too.
    """
    if "GPU" in worker.state.total_resources:
        return
    # Importing torch takes seconds, in which the event loop must go on.
    if await asyncio.to_thread(cuda_count):
        await worker.set_resources(GPU=worker.state.nthreads)


def keep_nannies() -> None:
    """Have clusters of this process keep a nanny whose worker is away when Dask looks.

    Some seconds after a worker was lost, Dask closes its nanny unless a worker of that name is
    there: one that starts for the third time just then, as where chunks kill their workers, counts
    as lost for good, and so in the end does every worker.  What the user has set stays.
    """
    if dask.config.get(_LOST) == _LOST_DEFAULT:
        dask.config.set({_LOST: "1 day"})


def cuda_count() -> int:
    """CUDA devices that torch sees in this process; does not initialise CUDA."""
    import torch

    return torch.cuda.device_count()


def neighbours(client: Client) -> dict[str, int]:
    """How many worker processes share cores, by the name of what they share.

    Processes, not workers: threads of one process share what the process has anyhow.
    """
    told = client.run(cores_of_worker, on_error="ignore")
    return dict(Counter(place for place, _ in {(place, pid) for place, _, pid in told.values()}))


def cores_of_worker(dask_worker: Any) -> tuple[str, int, int]:
    """Name of the cores that a worker has, how many they are, and its process.

    Workers on one host share its cores, unless they are bound to some of them or belong to batch
    jobs of their own: a job's number of cores is what it was given, whether or not the batch
    system enforces it.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    bound = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    given = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE") or ""
    cores = min(CPU_COUNT, int(given)) if job and given.isdigit() else CPU_COUNT
    return f"{dask_worker.ip}|{job}|{bound}", max(1, cores), os.getpid()
