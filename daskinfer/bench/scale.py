"""``bench scale``: what a chunk costs beside its work, from thousands of them to a million.

Time and memory of client, scheduler and workers are measured on runs in which nothing is computed;
how many devices a scheduler can feed is calculated from them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from daskinfer.bench.harness import Bench, Case, Column, Result, Values, markdown

__all__ = ["BENCH", "devices_fed"]

_WAYS = ("single", "grouped", "engine")
_SIDES = (512, 1024, 2048, 4096)
# As `daskinfer.dispatch.TASK_SECONDS` and `MOST`: importing that takes Dask along.
_TASK_SECONDS = 0.3
_MOST = 64
# Of one core that is to be left idle, for what else a scheduler does.
_LOAD = 0.8

COLUMNS = (
    Column("ms", "ms per chunk", "{:.3f}"),
    Column("scheduler_ms", "CPU ms per chunk, scheduler", "{:.3f}"),
    Column("client_ms", "client", "{:.3f}"),
    Column("worker_ms", "workers", "{:.3f}"),
    Column("tasks", "tasks", "{:.0f}"),
    Column("held", "held at once", "{:.0f}"),
    Column("scheduler_mb", "MB, scheduler", "{:.0f}"),
    Column("client_mb", "client", "{:.0f}"),
    Column("worker_mb", "worker", "{:.0f}"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``bench scale`` can be asked for."""
    for way, counts, text in (
        ("single", (10_000, 100_000), "with one chunk to a task"),
        ("grouped", (10_000, 100_000, 1_000_000), "in groups, as for chunks that cost nothing"),
        ("engine", (10_000,), "through the whole engine, with a network that does nothing"),
    ):
        parser.add_argument(
            f"--{way}", type=_numbers, default=counts, metavar="N,N", help=f"chunks {text}; 0: none"
        )
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread")
    parser.add_argument(
        "--speed", type=float, default=10.0, metavar="MPX", help="Mpx/s of a device, to calculate "
        "how many of them a scheduler feeds"
    )  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def cases(options: argparse.Namespace, folder: Path) -> list[Case]:
    """One case per way and number of chunks."""
    return [
        Case(f"{way}, {chunks:,} chunks".replace(",", " ").replace("  ", ", "),
             partial(_in_process, way, chunks, options.workers))
        for way in _WAYS
        for chunks in getattr(options, way)
        if chunks
    ]  # fmt: skip


def _in_process(way: str, chunks: int, workers: int) -> Values:
    asked = {"way": way, "chunks": chunks, "workers": workers}
    done = subprocess.run(
        [sys.executable, "-m", "daskinfer.bench.manychunks", json.dumps(asked)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{way} with {chunks} chunks failed; its error is above")
    values: dict[str, float] = json.loads(done.stdout)
    return values


def devices_fed(task_ms: float, speed: float, side: int) -> float:
    """How many devices one scheduler can keep at work.

    Parameters
    ----------
    task_ms : float
        Processor time of a task at its busiest place, scheduler or client.
    speed : float
        Mpx/s of one device.
    side : int
        Of a chunk in pixels.

    Examples
    --------
    A chunk of 2048 px lasts 0.42 s at 10 Mpx/s, long enough for a task of its own:

    >>> round(devices_fed(1.0, speed=10, side=2048))
    336
    >>> round(devices_fed(1.0, speed=10, side=4096))
    1342
    """
    seconds = side**2 / 1e6 / speed
    # Cheaper chunks share a task.
    task = max(seconds, min(_TASK_SECONDS, _MOST * seconds))
    return _LOAD * task / (task_ms / 1e3)


def notes(result: Result, group: str) -> list[str]:
    """Where the scheduler becomes the limit, and what was measured."""
    options = result.options[group]
    told = []
    single = [case for case in result.cases(group) if case.startswith("single")]
    if single:
        costs = {
            key: result.spread(single[-1], f"{key}_ms", group).median
            for key in ("scheduler", "client")
        }
        place = max(costs, key=lambda key: costs[key])
        speed = options["speed"]
        rows = [
            [f"{side} px", f"{side**2 / 1e6 / speed:.2f}",
             f"{devices_fed(costs[place], speed, side):.0f}"]
            for side in _SIDES
        ]  # fmt: skip
        table = markdown(["chunk side", "s per chunk", "devices"], rows)
        told.append(
            f"A task costs the {place} {costs[place]:.2f} ms. At {_LOAD:.0%} of one core it feeds "
            f"so many devices of {speed:g} Mpx/s, calculated:\n\n{table}\n"
        )
    told.append(
        f"single, grouped: dispatching, submitting, scheduling and gathering are real, on "
        f"{options['workers']} worker processes; tasks return at once what real ones return. "
        "single: 64 tasks in flight, as with 32 threads. "
        "engine: a whole run, with 16 px chunks of a network that does nothing, start and finish "
        "of the file included. Memory: the largest of each kind, looked at every second."
    )
    return told


BENCH = Bench(
    "scale", "what a chunk costs beside its work, up to a million of them", COLUMNS, add_options,
    cases, notes,
)  # fmt: skip
