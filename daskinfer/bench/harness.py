"""Run settings of a benchmark in turn, and say what came out: table, comparison, JSON.

The cases of a benchmark take turns (A B A B, not A A B B): a machine that gets slower, or busy with
something else, slows all of them.  Medians and the whole range are shown, never a best run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daskinfer._version import __version__

if TYPE_CHECKING:
    import argparse

__all__ = [
    "Bench",
    "Case",
    "Column",
    "Result",
    "Spread",
    "machine",
    "markdown",
    "measure",
    "say",
    "scratch_folder",
    "write_section",
]

Values = Mapping[str, float]

_PACKAGES = ("torch", "dask", "distributed", "rasterio", "numpy", "imagecodecs")


@dataclass(frozen=True)
class Case:
    """One setting of a benchmark.

    Attributes
    ----------
    name : str
        Row of the table.
    once : callable
        Does the work one time; returns numbers by the keys of the benchmark's columns.  A key
        may be left out where it means nothing for this case.
    group : str
        Setting of ``--compare`` that it belongs to.
    """

    name: str
    once: Callable[[], Values]
    group: str = ""


@dataclass(frozen=True)
class Column:
    """A number that is measured.

    Attributes
    ----------
    key : str
        In what a case returns, and in the JSON.
    title : str
        Head of the table's column, with the unit.
    form : str
        Format of one number.
    """

    key: str
    title: str
    form: str = "{:.2f}"


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated runs.

    Examples
    --------
    >>> spread = Spread.of([3.0, 1.0, 2.0])
    >>> spread.text("{:.1f}"), Spread.of([1.0]).text("{:.1f}")
    ('2.0 (1.0..3.0)', '1.0')
    """

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, form: str) -> str:
        """``median (low..high)``, the median alone where there was one run."""
        if self.runs == 1:
            return form.format(self.median)
        return f"{form.format(self.median)} ({form.format(self.low)}..{form.format(self.high)})"


@dataclass(frozen=True)
class Result:
    """What the runs of a benchmark gave.

    Attributes
    ----------
    title : str
    columns : tuple of Column
    values : dict
        ``(group, case)`` to the values of each of its runs, in the order they were first run.
    notes : tuple of str
        What follows from the numbers, one sentence each.
    options : dict
        What the benchmark was asked for.
    machine : dict
        Where it ran.

    Examples
    --------
    >>> values = {("", "loop"): [{"s": 2.0}, {"s": 4.0}]}
    >>> result = Result("demo", (Column("s", "time, s"),), values)
    >>> print(result.table())
    | case | time, s |
    | --- | ---: |
    | loop | 3.00 (2.00..4.00) |
    """

    title: str
    columns: tuple[Column, ...]
    values: Mapping[tuple[str, str], Sequence[Values]]
    notes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> list[str]:
        """Settings that are compared; one empty name without ``--compare``."""
        return list(dict.fromkeys(group for group, _ in self.values))

    def cases(self, group: str = "") -> list[str]:
        """Names of the cases of a group."""
        return [case for other, case in self.values if other == group]

    def runs(self, case: str, key: str, group: str = "") -> list[float]:
        """The values of each run; empty where the case has none."""
        return [run[key] for run in self.values.get((group, case), ()) if key in run]

    def spread(self, case: str, key: str, group: str = "") -> Spread:
        """Median and range of one number."""
        return Spread.of(self.runs(case, key, group))

    def table(self) -> str:
        """All cases and columns as a Markdown table."""
        compared = len(self.groups) > 1
        rows = []
        for group, case in self.values:
            cells = [self._cell(case, column, group) for column in self.columns]
            rows.append([*([group] if compared else []), case, *cells])
        names = [*(["setting"] if compared else []), "case"]
        return markdown([*names, *(column.title for column in self.columns)], rows, len(names))

    def comparison(self) -> str:
        """Settings side by side, one line per case and number, and their ratio to the first.

        The ratio is taken run by run, of runs that followed each other, and its median shown.
        """
        groups = self.groups
        cases = list(dict.fromkeys(case for _, case in self.values))
        rows = []
        for case in cases:
            for column in self.columns:
                cells = [self._cell(case, column, group) for group in groups]
                if any(cells):
                    ratios = [self._ratio(case, column, groups[0], other) for other in groups[1:]]
                    rows.append([case, column.title, *cells, *ratios])
        ratios = [f"{other} / {groups[0]}" for other in groups[1:]]
        return markdown(["case", "number", *groups, *ratios], rows, 2)

    def text(self) -> str:
        """Title, tables, notes and machine, as Markdown."""
        return f"### {self.title}\n\n{self.body()}"

    def body(self) -> str:
        """The same without the title."""
        parts = [self.table()]
        if len(self.groups) > 1:
            parts.append(self.comparison())
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        if self.machine:
            parts.append(self.where())
        return "\n\n".join(parts)

    def where(self) -> str:
        """One line about runs and machine."""
        about, most = self.machine, max(map(len, self.values.values()))
        runs = "One run" if most == 1 else f"Medians of {most} runs (lowest..highest)"
        gpu = "no GPU" if about["gpu"] == "none" else about["gpu"]
        return (
            f"{runs}; {about['cores']} cores of {about['processor']}, {about['memory_gb']} GB, "
            f"{gpu}, load {about['load_before']} before; daskinfer {about['daskinfer']}, "
            f"torch {about['torch']}, dask {about['dask']}, rasterio {about['rasterio']}."
        )

    def to_json(self) -> str:
        """Everything, each single run included."""
        rows = [
            {
                "setting": group,
                "case": case,
                "runs": [dict(run) for run in runs],
                "summary": {
                    column.key: vars(self.spread(case, column.key, group))
                    for column in self.columns
                    if self.runs(case, column.key, group)
                },
            }
            for (group, case), runs in self.values.items()
        ]
        content = {
            "title": self.title,
            "machine": dict(self.machine),
            "options": dict(self.options),
            "columns": {column.key: column.title for column in self.columns},
            "rows": rows,
            "notes": list(self.notes),
        }
        return json.dumps(content, indent=2, default=str)

    def _cell(self, case: str, column: Column, group: str) -> str:
        values = self.runs(case, column.key, group)
        return Spread.of(values).text(column.form) if values else ""

    def _ratio(self, case: str, column: Column, first: str, other: str) -> str:
        below = self.runs(case, column.key, first)
        above = self.runs(case, column.key, other)
        if not below or len(below) != len(above) or not all(below):
            return ""
        return Spread.of([a / b for a, b in zip(above, below, strict=True)]).text("{:.2f}")


@dataclass(frozen=True)
class Bench:
    """A benchmark, as the command line runs it.

    Modules of benchmarks are imported with the command line: what they need of torch, rasterio or
    Dask they import inside their functions.

    Attributes
    ----------
    name : str
        Word of the command line.
    help : str
        One line.
    columns : tuple of Column
    add_options : callable
        Adds its own options to a parser.
    cases : callable
        ``(options, scratch folder)`` to its cases; prepares what they share.
    notes : callable
        ``(result, group)`` to sentences about the numbers of one setting.
    """

    name: str
    help: str
    columns: tuple[Column, ...]
    add_options: Callable[[argparse.ArgumentParser], None]
    cases: Callable[[argparse.Namespace, Path], Sequence[Case]]
    notes: Callable[[Result, str], Sequence[str]] = lambda result, group: ()


def say(text: str) -> None:
    """A line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def measure(
    cases: Sequence[Case], runs: int, tell: Callable[[str], None] = say
) -> dict[tuple[str, str], list[Values]]:
    """Run all cases `runs` times, in turn.

    Returns
    -------
    dict
        ``(group, name)`` to the values of each run.

    Raises
    ------
    ValueError
        If there is no case, no run, or two cases share a name.

    Examples
    --------
    >>> order = []
    >>> a, b = (Case(n, lambda n=n: order.append(n) or {"s": 1.0}) for n in "AB")
    >>> measure([a, b], 2, tell=lambda text: None)[("", "B")], order
    ([{'s': 1.0}, {'s': 1.0}], ['A', 'B', 'A', 'B'])
    """
    if not cases or runs < 1:
        raise ValueError(f"a benchmark needs a case and a run, got {len(cases)} and {runs}")
    values: dict[tuple[str, str], list[Values]] = {(case.group, case.name): [] for case in cases}
    if len(values) != len(cases):
        raise ValueError(f"two cases share a name: {[(c.group, c.name) for c in cases]}")
    for number in range(1, runs + 1):
        for case in cases:
            tell(f"run {number} of {runs}: {' '.join(filter(None, (case.group, case.name)))}")
            got = case.once()
            tell("  " + ", ".join(f"{key} {value:.4g}" for key, value in got.items()))
            values[case.group, case.name].append(got)
    return values


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A Markdown table whose first `names` columns are words and the others numbers.

    >>> print(markdown(["case", "s"], [["loop", "1"]]))
    | case | s |
    | --- | ---: |
    | loop | 1 |
    """
    rule = ["---"] * names + ["---:"] * (len(head) - names)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def write_section(path: Path, name: str, text: str) -> None:
    """Put text between a file's marks ``<!-- name: begin -->`` and ``<!-- name: end -->``.

    What is there is replaced.  Without marks, they are put at the end.

    Examples
    --------
    >>> with scratch_folder(None) as folder:
    ...     for text in ("old", "new"):
    ...         write_section(folder / "B.md", "feed", text)
    ...     print((folder / "B.md").read_text(), end="")
    <!-- feed: begin -->
    new
    <!-- feed: end -->
    """
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    old = path.read_text() if path.exists() else ""
    before, mark, rest = old.partition(begin)
    if mark:
        after = rest.partition(end)[2]
    else:
        before, after = f"{old}\n" if old else "", "\n"
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def machine() -> dict[str, Any]:
    """Cores, processor, memory and versions of what does the work.

    >>> sorted(machine())[:3]
    ['cores', 'dask', 'daskinfer']
    """
    import psutil

    versions = {name: _installed(name) for name in _PACKAGES}
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "gpu": _gpu(),
        "daskinfer": __version__,
        **versions,
    }


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


@contextlib.contextmanager
def scratch_folder(path: str | None) -> Iterator[Path]:
    """The folder given, which stays, or one that is removed afterwards."""
    if path is not None:
        Path(path).mkdir(parents=True, exist_ok=True)
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="daskinfer-bench-") as folder:
        yield Path(folder)
