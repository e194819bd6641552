"""``bench batch``: speed and memory of a model against the batch size.

Each size is measured in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from daskinfer.bench.harness import Bench, Case, Column, Result, Values, say

__all__ = ["BENCH", "knee"]

# Less gain than this for more memory is none.
_GAIN = 0.05

COLUMNS = (
    Column("speed", "Mpx/s of tiles", "{:.3f}"),
    Column("seconds", "s per batch", "{:.4f}"),
    Column("memory", "peak memory, MB", "{:.0f}"),
    Column("added", "of it for the batches, MB", "{:.0f}"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``bench batch`` can be asked for."""
    parser.add_argument(
        "--model", default="demo", metavar="NAME",
        help="demo, heavy, a .pt2 file or package.module:factory (6 bands)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", type=_numbers, default=(1, 2, 4, 8, 16), metavar="N,N", help="batch sizes"
    )
    parser.add_argument("--tile", type=int, default=608, metavar="PX", help="side of a tile")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "float16"), default="float32"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of torch, on a CPU (default: all cores)"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="to measure each size for"
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def cases(options: argparse.Namespace, folder: Path) -> list[Case]:
    """One case per batch size."""
    return [Case(str(size), partial(_in_process, options, size)) for size in options.sizes]


def _in_process(options: argparse.Namespace, size: int) -> Values:
    """Measure one batch size in a new process; nothing where it does not fit into memory."""
    asked = {
        name: getattr(options, name)
        for name in ("model", "tile", "device", "precision", "threads", "seconds")
    }
    done = subprocess.run(
        [sys.executable, "-m", "daskinfer.bench.onebatch", json.dumps(asked | {"size": size})],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    # Killed for its memory, by the system.
    if done.returncode == -9:
        say(f"  {size} tiles do not fit into memory")
        return {}
    if done.returncode:
        raise RuntimeError(f"batch size {size} failed; its error is above")
    values: dict[str, float] = json.loads(done.stdout)
    if not values:
        say(f"  {size} tiles do not fit into the device's memory")
    return values


def knee(speeds: dict[int, float]) -> int:
    """The smallest batch size within 5 % of the best speed.

    >>> knee({1: 50.0, 2: 90.0, 4: 97.0, 8: 100.0})
    4
    """
    enough = (1 - _GAIN) * max(speeds.values())
    return min(size for size, speed in speeds.items() if speed >= enough)


def notes(result: Result, group: str) -> list[str]:
    """The knee, and what was measured."""
    options = result.options[group]
    speeds = {
        int(case): result.spread(case, "speed", group).median
        for case in result.cases(group)
        if result.runs(case, "speed", group)
    }
    told = [
        f"case: tiles per batch, of {options['tile']} px; pixels of tiles, halo included, "
        "normalising and post-processing too. Memory: on CUDA the peak that torch allocated, else "
        "the peak resident memory of the process, interpreter and libraries included; for the "
        "batches: what it grew from the loaded model on."
    ]
    if speeds:
        best = knee(speeds)
        told.insert(
            0,
            f"knee: batch size {best}, the smallest within {_GAIN:.0%} of the best speed "
            f"({speeds[best]:.3f} of {max(speeds.values()):.3f} Mpx/s).",
        )
    return told


BENCH = Bench(
    "batch", "speed and memory against batch size, and the knee", COLUMNS, add_options, cases, notes
)
