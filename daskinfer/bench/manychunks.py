"""One run of very many chunks in this process, for ``bench scale``: prints its numbers as JSON.

Scheduler and workers are processes of their own, so that each one's time and memory are its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from daskinfer.dispatch import MOST, Dispatch
from daskinfer.metrics import ActorMetrics
from daskinfer.station import ChunkResult, GroupResult

__all__ = ["empty_task", "main", "measure_chunks"]

_LOOK_EVERY = 1.0  # seconds between looks at the processes
# Side of the chunks of the whole engine: what is run is the way around the model, not the model.
_SIDE = 16
_IN_FLIGHT = 64


def empty_task(run: str, numbers: tuple[int, ...]) -> GroupResult:
    """What a task returns, without what it does."""
    done = tuple(ChunkResult(number, 1, 0, 0.0) for number in numbers)
    return GroupResult(done, (), (), 0.0, "", ("", 0), ActorMetrics(), {}, ())


class _Watch:
    """Processor time and peak memory of client, scheduler and workers."""

    def __init__(self, client: Any) -> None:
        import psutil

        scheduler = client.run_on_scheduler(os.getpid)
        self._processes = {
            "client": [psutil.Process()],
            "scheduler": [psutil.Process(scheduler)],
            "worker": [psutil.Process(pid) for pid in client.run(os.getpid).values()],
        }
        self._client = client
        self._looked = 0.0
        self._before = self._cpu()
        self.memory = dict.fromkeys(self._processes, 0.0)
        self.held = 0

    def look(self, *, now: bool = False) -> None:
        """Take a sample, if the last one is old enough."""
        if not now and time.monotonic() - self._looked < _LOOK_EVERY:
            return
        self._looked = time.monotonic()
        for name, processes in self._processes.items():
            used = max(process.memory_info().rss for process in processes) / 1e6
            self.memory[name] = max(self.memory[name], used)
        self.held = max(self.held, self._client.run_on_scheduler(_tasks_held))

    def cpu(self) -> dict[str, float]:
        """Seconds of processor time since the start, of all workers together."""
        return {name: used - self._before[name] for name, used in self._cpu().items()}

    def _cpu(self) -> dict[str, float]:
        return {
            name: sum(sum(process.cpu_times()[:2]) for process in processes)
            for name, processes in self._processes.items()
        }


def _tasks_held(dask_scheduler: Any = None) -> int:
    return len(dask_scheduler.tasks)


def measure_chunks(asked: Mapping[str, Any]) -> dict[str, float]:
    """Time, memory and tasks of a number of chunks.

    Parameters
    ----------
    asked : dict
        ``chunks``; ``way``: "single" (one chunk to a task), "grouped" or "engine"; ``workers``.

    Returns
    -------
    dict
        By the keys of `daskinfer.bench.scale.COLUMNS`.
    """
    from distributed import Client
    from distributed.deploy.subprocess import SubprocessCluster

    with (
        SubprocessCluster(
            n_workers=asked["workers"], threads_per_worker=1, dashboard_address=":0"
        ) as processes,
        Client(processes) as client,
    ):
        client.wait_for_workers(asked["workers"])
        watch = _Watch(client)
        watch.look(now=True)
        start = time.perf_counter()
        work = _engine if asked["way"] == "engine" else _runner
        counts = work(client, asked, watch.look)
        seconds = time.perf_counter() - start
        watch.look(now=True)
        chunks = counts.pop("chunks")
        cpu = {f"{name}_ms": 1e3 * used / chunks for name, used in watch.cpu().items()}
        memory = {f"{name}_mb": used for name, used in watch.memory.items()}
        whole = {"ms": 1e3 * seconds / chunks, "held": float(watch.held)}
        return whole | counts | cpu | memory


def _runner(client: Any, asked: Mapping[str, Any], look: Callable[[], None]) -> dict[str, float]:
    def threads() -> dict[str, int]:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        return {address: worker["nthreads"] for address, worker in workers.items()}

    single, chunks = asked["way"] == "single", asked["chunks"]
    dispatch = Dispatch(client, empty_task, "bench", threads, most=1 if single else MOST)
    done = 0
    # Tasks that take no time leave a thread idle until the next one comes: as many in flight as on
    # a large cluster show what a task costs, not how long it is on its way.
    for answer in dispatch.answers(range(chunks), chunks, _IN_FLIGHT if single else None):
        done += len(answer.outcome.done)
        look()
    if done != asked["chunks"]:
        raise RuntimeError(f"{done} of {asked['chunks']} chunks were done")
    return {"chunks": done, "tasks": dispatch.tasks}


def _engine(client: Any, asked: Mapping[str, Any], look: Callable[[], None]) -> dict[str, float]:
    """A whole run of a network that does nothing; its chunks and blocks are tiny."""
    import torch

    from daskinfer.model import load_model
    from daskinfer.runner import run

    with tempfile.TemporaryDirectory() as folder:
        source = _raster(Path(folder) / "scene.tif", round(asked["chunks"] ** 0.5) * _SIDE)
        model = load_model(torch.nn.Identity(), output="values")
        report = run(
            source, model, Path(folder) / "o.tif", client=client, callbacks=[lambda _: look()],
            tile=_SIDE, chunk=_SIDE, blocksize=_SIDE, batch_size=1,
        )  # fmt: skip
    return {"chunks": report.chunks}


def _raster(path: Path, side: int) -> str:
    import numpy as np
    import rasterio

    profile = {
        "driver": "GTiff", "count": 1, "dtype": "float32", "tiled": True, "crs": "EPSG:32632",
        "transform": rasterio.Affine(10, 0, 500_000, 0, -10, 5_600_000),
    }  # fmt: skip
    with rasterio.open(path, "w", height=side, width=side, **profile) as dataset:
        for row in range(0, side, 256):
            rows = min(256, side - row)
            strip = np.ones((1, rows, side), "float32")
            dataset.write(strip, window=rasterio.windows.Window(0, row, side, rows))
    return str(path)


def main(arguments: list[str]) -> None:
    """Measure what is asked for in JSON, and print JSON."""
    print(json.dumps(measure_chunks(json.loads(arguments[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])
