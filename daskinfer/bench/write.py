"""``bench write``: ways to write a large raster as a COG, against what encoding alone costs.

The floors encode the same chunks with the same codec and write nothing.  Every way runs in a
process of its own, with as many processes or threads as the others; starting it, and starting the
cluster where there is one, is not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from daskinfer.bench.harness import (
    Bench,
    Case,
    Column,
    Result,
    Values,
    say,
)
from daskinfer.bench.watching import peak_memory, sampled

if TYPE_CHECKING:
    from daskinfer.bench.writers import Job

__all__ = ["BENCH"]

COLUMNS = (
    Column("wall", "wall, s"),
    Column("tail", "after the last chunk, s"),
    Column("cpu", "CPU, s", "{:.1f}"),
    Column("memory", "peak memory, MB", "{:.0f}"),
    Column("disk", "temporary disk, MB", "{:.0f}"),
    Column("file", "file, MB", "{:.1f}"),
)
_SIZES = {"classes": 20_000, "floats": 10_000}
_FLOOR, _ODC = "compress and overviews", "odc-geo"
_DIRECT, _DASK, _THREADS = "daskinfer, direct", "daskinfer, dask", "daskinfer, threads"
# What is asked of the writer, as multiples of the floor.
_ASKED = {_DIRECT: 1.25, _DASK: 1.6, _THREADS: 1.6}
_NEEDS = {"rio-cogeo": "rio_cogeo", _ODC: "odc.geo"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what ``bench write`` can be asked for."""
    parser.add_argument(
        "--kind", choices=("classes", "floats", "both"), default="both",
        help="one band of uint8 classes, or three bands of float32",
    )  # fmt: skip
    parser.add_argument(
        "--size", type=int, metavar="PX",
        help="rows and columns (default: 20000 for classes, 10000 for floats)",
    )  # fmt: skip
    parser.add_argument("--chunk", type=int, default=2048, metavar="PX", help="side of a chunk")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="at work")
    parser.add_argument("--compress", default="deflate", metavar="CODEC")
    parser.add_argument("--level", type=int, metavar="N", help="of the codec")
    parser.add_argument(
        "--ways", metavar="NAME,NAME", help="only those whose names start so, as: compress,dask"
    )


def cases(options: argparse.Namespace, folder: Path) -> Sequence[Case]:
    """All ways that are installed, for one or both rasters."""
    from daskinfer.bench.writers import Job

    kinds = list(_SIZES) if options.kind == "both" else [options.kind]
    made = []
    for kind in kinds:
        job = Job(
            kind,
            options.size or _SIZES[kind],
            options.chunk,
            options.processes,
            options.compress,
            options.level,
            str(folder),
        )
        job.make_template()
        checked: set[str] = set()
        made += [
            Case(f"{kind}: {name}", partial(_once, job, name, checked))
            for name in _ways(options.ways)
        ]
    return made


def _ways(asked: str | None) -> list[str]:
    from daskinfer.bench.writers import WRITERS

    starts = tuple(asked.split(",")) if asked else ("",)
    chosen = [name for name in WRITERS if name.startswith(starts)]
    if not chosen:
        raise SystemExit(f"--ways {asked}: expected some of {', '.join(WRITERS)}")
    there = [name for name in chosen if _installed(_NEEDS.get(name, "daskinfer"))]
    for name in set(chosen) - set(there):
        say(f"{name} is not installed and left out")
    return there


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _once(job: Job, name: str, checked: set[str]) -> Values:
    """Run one way in a process of its own, watched from outside."""
    from daskinfer.bench.writers import command

    # A folder of its own, so that what lies in it is what this way left there.
    own = Path(job.folder) / f"write-{os.getpid()}"
    own.mkdir()
    there = replace(job, folder=str(own))
    os.symlink(job.template, there.template)
    child = subprocess.Popen(command(there, name), stdout=subprocess.PIPE, text=True)
    with peak_memory(child.pid) as memory, _peak_disk(own) as disk:
        told, _ = child.communicate()
    if child.returncode:
        raise RuntimeError(f"{name} ended with status {child.returncode}: its error is above")
    values: dict[str, float] = json.loads(told)
    if values["file"] and name not in checked:
        _check(there)
        checked.add(name)
    for path in own.iterdir():
        path.unlink()
    own.rmdir()
    values["memory"] = memory.bytes / 1e6
    values["disk"] = max(0, disk[0] - values["file"]) / 1e6
    values["file"] /= 1e6
    if not values["file"]:
        del values["file"], values["tail"], values["disk"]
    elif name == _ODC:
        del values["tail"]  # its graph has no last chunk
    return values


@contextmanager
def _peak_disk(folder: Path, every: float = 0.02) -> Iterator[list[int]]:
    """Watch what the files of a folder take on the disk."""
    peak = [0]

    def look() -> None:
        peak[0] = max(peak[0], _allocated(folder))

    with sampled(look, every):
        yield peak


def _allocated(folder: Path) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue  # renamed or removed meanwhile
    return total


def _check(job: Job) -> None:
    """Compare every pixel of the output with what was to be written."""
    import numpy as np
    import rasterio

    from daskinfer.bench.writers import chunks_of

    with rasterio.open(job.output) as dataset:
        for window, pixels in chunks_of(job):
            if not np.array_equal(
                dataset.read(window=window), pixels, equal_nan=job.kind == "floats"
            ):
                raise RuntimeError(f"{job.output}: other pixels at {window}")
        if not dataset.overviews(1):
            raise RuntimeError(f"{job.output} has no overviews")


def notes(result: Result, group: str) -> list[str]:
    """How far from the floor, how much faster than the others, and how long the tail is."""
    there = [name for name in result.cases(group) if result.runs(name, "wall", group)]
    told = []
    for kind in _SIZES:
        names = {name.partition(": ")[2]: name for name in there if name.startswith(kind)}
        for own in _ASKED:
            if own not in names:
                continue
            wall = result.spread(names[own], "wall", group).median
            tail = result.spread(names[own], "tail", group).median
            told.append(f"{names[own]}: {tail / wall:.1%} of the time is after the last chunk")
            if _FLOOR in names:
                floor = result.spread(names[_FLOOR], "wall", group).median
                told.append(
                    f"{names[own]} takes {wall / floor:.2f} times as long as encoding alone "
                    f"(asked: {_ASKED[own]})"
                )
            if _ODC in names:
                share = _memory(result, group, names[own]) / _memory(result, group, names[_ODC])
                told.append(f"{names[own]} takes {share:.0%} of the memory of {names[_ODC]}")
        told += _against(result, group, names)
    return told


def _memory(result: Result, group: str, name: str) -> float:
    return result.spread(name, "memory", group).median


def _against(result: Result, group: str, names: dict[str, str]) -> list[str]:
    if _DIRECT not in names:
        return []
    own = result.spread(names[_DIRECT], "wall", group).median
    rivals = [name for name in names if name not in (*_ASKED, _FLOOR, "compress only")]
    ratios = [(name, result.spread(names[name], "wall", group).median / own) for name in rivals]
    return [f"{names[_DIRECT]} is {ratio:.1f} times as fast as {name}" for name, ratio in ratios]


BENCH = Bench(
    "write", "ways to write a COG, against what encoding costs", COLUMNS, add_options, cases, notes
)
