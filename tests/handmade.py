"""A Dask cluster as users start one by hand: a scheduler, and workers wherever they please."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

from distributed import Client

HERE = os.path.dirname(os.path.abspath(__file__))  # workers need the tests' models
PATIENCE = 60  # seconds for a process to start


def until(there, what):
    """Wait for something that another process does."""
    stop = time.monotonic() + PATIENCE
    while not (found := there()):
        if time.monotonic() > stop:
            raise TimeoutError(f"after {PATIENCE} s still no {what}")
        time.sleep(0.05)
    return found


class Handmade:
    """A scheduler; `worker` adds workers.  Ends all of them in `close`.

    `wrap` is a command in front, as ``["ip", "netns", "exec", "b"]``.
    """

    def __init__(self, folder, host="127.0.0.1"):
        self.folder, self.host = folder, host
        self.file = folder / "scheduler.json"
        self._stack = contextlib.ExitStack()
        self.process = self._start(
            "scheduler", "--port", "0", "--dashboard-address", ":0", "--host", host,
            "--scheduler-file", str(self.file),
        )  # fmt: skip

    @property
    def address(self):
        def written():
            with contextlib.suppress(OSError, ValueError):
                return json.loads(self.file.read_text())["address"]

        return until(written, "scheduler")

    def client(self):
        return Client(self.address, set_as_default=False)

    def worker(self, name, *arguments, nanny=False, **how):
        """Start a worker, and wait until the scheduler knows it."""
        nannied = [] if nanny else ["--no-nanny"]
        process = self._start(
            "worker", self.address, "--name", name, "--nthreads", "2", "--dashboard-address", ":0",
            *nannied, *arguments, **how,
        )  # fmt: skip
        with self.client() as client:
            until(lambda: name in names(client), f"worker {name}")
        return process

    def stop(self, process):
        end(process)
        process.wait()
        with self.client() as client:
            alive = len(client.nthreads())
            until(lambda: len(client.nthreads()) <= alive, "end of the worker")

    def close(self):
        self._stack.close()

    def _start(self, *command, cwd=None, wrap=(), **env):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(
            [*wrap, sys.executable, "-m", "dask", *command],
            cwd=cwd or self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": HERE} | env,
            start_new_session=True,
            **quiet,
        )
        self._stack.callback(process.wait)
        self._stack.callback(end, process)
        return process


def names(client):
    """Addresses of workers by name."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {worker["name"]: address for address, worker in workers.items()}


def end(process):
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
