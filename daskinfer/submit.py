"""A batch job of SLURM that runs a run: scheduler and client in one job, workers where they go.

The job asks for no GPU itself; the cluster that the file names brings the workers, most often in
jobs of their own.  A minute or two before its walltime ends the job is told to stop, begins no
other chunk, and puts itself into the queue again; so it goes on, under the same number, until the
output is complete.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ._version import __version__
from .clusters.spec import read_spec
from .paths import absolute_name, absolute_path

__all__ = ["BatchJob", "batch_job", "log_of", "submit"]

# Longer than a run takes to stop: 20 s for the chunks at work, and what a cluster takes to close.
_NOTICE = 120


@dataclass(frozen=True)
class BatchJob:
    """The key ``submit`` of a cluster's file: the job that drives the run.

    Attributes
    ----------
    walltime : str
        As SLURM writes it; the run goes on in further jobs where it is not enough.
    cores : int
    memory : str
    queue, account : str, optional
    notice : int
        Seconds before the end of the walltime at which the run is stopped.
    name : str, optional
        Of the job; by default after the output.
    log : str, optional
        File for what the run prints; ``%j`` in it is the job's number.  By default beside the
        output.
    directives : tuple of str
        Other options of ``sbatch``, as ``"--qos=long"``.
    setup : tuple of str
        Lines of shell that come before the run, as ``"module load cuda"``.
    python : str
        That runs daskinfer; by default this one.
    """

    walltime: str = "24:00:00"
    cores: int = 2
    memory: str = "4G"
    queue: str | None = None
    account: str | None = None
    notice: int = _NOTICE
    name: str | None = None
    log: str | None = None
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str = sys.executable

    def __post_init__(self) -> None:
        for name in ("directives", "setup"):
            lines = getattr(self, name)
            if isinstance(lines, str) or not all(isinstance(line, str) for line in lines):
                raise ValueError(f"submit: {name} must be a list of lines, got {lines!r}")
            object.__setattr__(self, name, tuple(lines))
        for f in fields(self):
            values = getattr(self, f.name)
            texts = values if isinstance(values, tuple) else (values,)
            if f.name != "setup" and any("\n" in str(text) for text in texts):
                raise ValueError(f"submit: {f.name} must be one line, got {values!r}")

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> BatchJob:
        """From names and values, of which those that are not known are refused."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(told) - set(known), key=str)
        if unknown:
            raise ValueError(f"submit: unknown key {unknown[0]!r}; known: {', '.join(known)}")
        return cls(**told)


def batch_job(
    spec: str | os.PathLike[str],
    source: str | os.PathLike[str],
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: Sequence[str] = (),
) -> str:
    """Write the script of the job.

    Parameters
    ----------
    spec : path
        The file that names the cluster, see `daskinfer.clusters.spec`.
    source, model, output : path
        As for `run`; made absolute.
    options : sequence of str
        Of the command ``daskinfer run``, as ``["--halo", "48"]``.

    Returns
    -------
    str
        A script for ``sbatch``.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it holds keys that are not known, or an option is not one for a job.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = os.path.join(folder, "cluster.yaml")
    ...     _ = Path(file).write_text("cluster: processes")
    ...     script = batch_job(file, "/data/my scene.tif", "/data/unet.pt2", "/data/map.tif")
    >>> [line for line in script.splitlines() if "--job-name" in line]
    ['#SBATCH --job-name=daskinfer-map']
    >>> "'/data/my scene.tif'" in script
    True
    """
    job = BatchJob.of(read_spec(Path(spec)).submit)
    _check_options(options)
    named = [absolute_name(os.fspath(source)), absolute_name(os.fspath(model))]
    target = absolute_path(os.fspath(output))
    cluster = os.path.abspath(spec)
    command = [job.python, "-m", "daskinfer", "run", *named, target, "--cluster", cluster, *options]
    return _SCRIPT.format(
        header="\n".join(f"#SBATCH {line}" for line in _directives(job, target)),
        setup="\n".join(job.setup) or ":",
        command=shlex.join(command),
        made_by=f"daskinfer {__version__}",
    )


def _check_options(options: Sequence[str]) -> None:
    if any(option.partition("=")[0] == "--cluster" for option in options):
        raise ValueError("--cluster: a job takes its cluster from the file that names it")
    if "--overwrite" in options:
        raise ValueError(
            "--overwrite: a job that is queued again would begin anew each time; delete the output "
            "first"
        )


def submit(script: str) -> str:
    """Hand a script to ``sbatch``; returns the number of the job.

    Raises
    ------
    FileNotFoundError
        If there is no SLURM on this machine.
    ValueError
        If SLURM does not take the job.
    """
    if shutil.which("sbatch") is None:
        raise FileNotFoundError(
            "no sbatch on this machine: submit from a login node, or look at the script with "
            "--dry-run"
        )
    done = subprocess.run(
        ["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"SLURM does not take the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


def log_of(script: str, number: str) -> str:
    """The log of a job that was submitted."""
    line = next(line for line in script.splitlines() if line.startswith("#SBATCH --output="))
    return shlex.split(line.partition("=")[2])[0].replace("%j", number)


def _directives(job: BatchJob, output: str) -> list[str]:
    stem = re.sub(r"[^\w.-]", "_", Path(output).stem)
    log = job.log or f"{_logs_beside(output)}.%j.log"
    lines = [
        f"--job-name={_quoted(job.name or f'daskinfer-{stem}')}",
        f"--output={_quoted(absolute_path(log))}",
        # Jobs that go on from here write on.
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{job.notice}",
        f"--time={_quoted(job.walltime)}",
        "--ntasks=1",
        f"--cpus-per-task={job.cores}",
        f"--mem={_quoted(job.memory)}",
        f"--chdir={_quoted(os.getcwd())}",
    ]
    lines += [f"--partition={_quoted(job.queue)}"] if job.queue else []
    lines += [f"--account={_quoted(job.account)}"] if job.account else []
    return lines + list(job.directives)


def _logs_beside(output: str) -> str:
    """The output's name; for an object, that name in the working folder."""
    return output if output.startswith("/") else Path(output).name


def _quoted(text: str) -> str:
    """Text as sbatch reads it: with double quotes where there are spaces."""
    if '"' in text:
        raise ValueError(f"sbatch takes no quotes in {text!r}")
    return f'"{text}"' if re.search(r"[\s'\\#]", text) else text


# USR1 comes before the end of the walltime and has the job go on in another; TERM comes when it is
# cancelled, and has not.  A trap ends `wait` early, so it is waited for once more; 127 means that
# the end was told already.
_SCRIPT = """\
#!/usr/bin/env bash
{header}
# Made by {made_by}.

{setup}

again=no signalled=no code=1 run=
stop() {{ signalled=yes; [ -z "$run" ] || kill -TERM "$run" 2>/dev/null; }}
trap 'again=yes; stop' USR1
trap 'again=no; stop' TERM

{command} &
run=$!
# A signal may have come before there was anything to stop.
[ "$signalled" = no ] || stop
while :; do
    signalled=no
    wait "$run"
    told=$?
    [ "$told" = 127 ] || code=$told
    [ "$signalled" = yes ] || break
done

echo "daskinfer ended with $code"
# 143: stopped, and everything that was done is kept.
if [ "$code" = 143 ] && [ "$again" = yes ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$code"
"""
