"""Workers in batch jobs of SLURM, by way of dask-jobqueue."""

from __future__ import annotations

import importlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from typing import Any

from .workers import WorkerSettings

__all__ = ["jobqueue_options", "seconds_of", "slurm_cluster"]

_WALLTIME = "00:30:00"
# Before the walltime ends a worker takes no more chunks, and those at work are finished: of the
# walltime a tenth, of which half is there so that not all workers go at once.
_DRAIN = 0.1
_LONGEST_DRAIN = 600.0


def slurm_cluster(
    *,
    jobs: int | tuple[int, int] = 1,
    gpus: int = 0,
    walltime: str = _WALLTIME,
    drain: float | None = None,
    check: bool = True,
    **options: Any,
) -> Any:
    """Start a scheduler here, and workers in batch jobs; see `daskinfer.cluster`.

    Parameters
    ----------
    jobs : int or (int, int), default 1
        How many jobs, or how many at least and at most.  One that ends, is cancelled or runs into
        its walltime is followed by another.
    gpus : int, default 0
        For each job, which then has as many worker processes, each with a GPU of its own.
    walltime : str, default "00:30:00"
        Of a job, as SLURM writes it.
    drain : float, optional
        Seconds before the end of the walltime at which workers begin to take no more chunks; by
        default a tenth of it, 10 min at most.
    check : bool, default True
        Ask SLURM whether it would take such a job before one is submitted.
    **options
        Of `dask_jobqueue.SLURMCluster`: ``cores``, ``memory``, ``queue``, ``account``,
        ``interface``, ``job_extra_directives``, ``log_directory`` ...

    Returns
    -------
    dask_jobqueue.SLURMCluster

    Raises
    ------
    ImportError
        If dask-jobqueue is not installed.
    FileNotFoundError
        If there is no SLURM on this machine.
    ValueError
        If SLURM would not take the job; lists what its partitions offer.
    """
    kind = _jobqueue().SLURMCluster
    least, most = _bounds(jobs)
    if gpus:
        options.setdefault("processes", gpus)
        own = options.get("job_extra_directives") or []
        options["job_extra_directives"] = [f"--gres=gpu:{gpus}", *own]
    options = jobqueue_options(options, gpu=bool(gpus), walltime=walltime, drain=drain)
    dashboard = options.pop("dashboard_address", None)
    if dashboard is not None:
        chosen = options.get("scheduler_options") or {}
        options["scheduler_options"] = {"dashboard_address": dashboard} | chosen
    if check and shutil.which("sbatch") is None:
        raise FileNotFoundError(
            "cluster 'slurm': no sbatch on this machine; start from a login node or from a job"
        )
    made = kind(walltime=walltime, **options)
    try:
        if check:
            _ask(made.job_script())
        # Not scale(): that does not replace a job which ends or is cancelled.
        made.adapt(minimum_jobs=least, maximum_jobs=most)
    except BaseException:
        made.close()
        raise
    return made


def jobqueue_options(
    options: dict[str, Any],
    *,
    gpu: bool = False,
    walltime: str | None = None,
    drain: float | None = None,
) -> dict[str, Any]:
    """Options of any cluster of dask-jobqueue, with what inference needs of its workers added.

    Parameters
    ----------
    options : dict
        As the user gave them, which are not overruled.
    gpu : bool, default False
        Whether each worker process has a GPU.
    walltime : str, optional
        Of a job, where workers are to end before it does.
    drain : float, optional
        Seconds before that.
    """
    options = {**{"processes": 1, "job_name": "daskinfer-worker"}, **options}
    cores = int(options.get("cores") or 1) // int(options["processes"])
    settings = WorkerSettings(cores=max(1, cores), gpu=gpu)
    line = settings.command_line()
    if walltime is not None:
        total = seconds_of(walltime)
        margin = min(_LONGEST_DRAIN, _DRAIN * total) if drain is None else float(drain)
        if not 0 < margin < total:
            raise ValueError(
                f"drain must be more than 0 s and less than the walltime of {total:g} s, got "
                f"{margin:g}"
            )
        # The stagger is added or taken away.
        lifetime = [f"{total - 0.75 * margin:.0f}s", "--lifetime-stagger", f"{margin / 4:.0f}s"]
        line += ["--lifetime", *lifetime]
    options["worker_extra_args"] = line + list(options.get("worker_extra_args") or [])
    prologue = list(options.get("job_script_prologue") or [])
    options["job_script_prologue"] = settings.exports() + prologue
    return options


def seconds_of(walltime: str) -> float:
    """Seconds of a time as SLURM writes it.

    Examples
    --------
    >>> seconds_of("30"), seconds_of("01:30:00"), seconds_of("2-12")
    (1800.0, 5400.0, 216000.0)
    """
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(walltime).strip())
    if parts is None:
        raise ValueError(
            f"walltime {walltime!r}: write minutes, 'MM:SS', 'HH:MM:SS', 'D-HH' or 'D-HH:MM:SS'"
        )
    days, *rest = parts.groups()
    first, second, third = (int(part or 0) for part in rest)
    if days is not None:
        return 86400.0 * int(days) + 3600 * first + 60 * second + third
    if rest[2] is None:
        return 60.0 * first + second
    return 3600.0 * first + 60 * second + third


def _bounds(jobs: Any) -> tuple[int, int]:
    least, most = jobs if isinstance(jobs, (tuple, list)) else (jobs, jobs)
    if not 0 <= least <= most or most < 1:
        raise ValueError(f"jobs must be a number from 1 up or (least, most), got {jobs!r}")
    return int(least), int(most)


def _jobqueue() -> Any:
    try:
        return import_cluster("dask_jobqueue")
    except ModuleNotFoundError as error:
        raise ImportError(
            "clusters of batch jobs need dask-jobqueue: pip install 'daskinfer[slurm]'"
        ) from error


def import_cluster(module: str) -> Any:
    """Import a module that starts clusters, and keep what Ctrl-C does.

    dask_jobqueue 0.9 has it exit the process, from when it is imported; a run would then end
    without taking what is nearly done.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        return importlib.import_module(module)
    finally:
        # Only the main thread may set a handler, so no other had it replaced.
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGINT, before)


def _ask(script: str) -> None:
    """Have SLURM say whether it would ever run such a job: one that it takes may wait for ever."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        asked = _told(["sbatch", "--test-only", file.name])
    if asked.returncode:
        offers = _told(["sinfo", "--format=%P %D nodes, %c cores, %m MB, %G, up to %l"])
        said = " ".join(asked.stderr.split())
        raise ValueError(f"SLURM would not run a worker: {said}\nIt offers\n{offers.stdout}")


def _told(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
