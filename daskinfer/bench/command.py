"""``daskinfer bench``: the command line of all benchmarks."""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from daskinfer.bench.harness import (
    Bench,
    Case,
    Result,
    machine,
    measure,
    say,
    scratch_folder,
    write_section,
)

__all__ = ["add_bench", "add_parser", "benches", "run_bench"]

# Of the command line, not of what is measured.
_OURS = {"command", "runs", "json", "markdown", "compare", "scratch"}


def benches() -> tuple[Bench, ...]:
    """All benchmarks."""
    from daskinfer.bench import batch, cpu, feed, merge, scale, write

    return feed.BENCH, cpu.BENCH, batch.BENCH, write.BENCH, scale.BENCH, merge.BENCH


def add_parser(commands: Any) -> None:
    """Add ``bench`` and its benchmarks to the subparsers of the command line."""
    parser = commands.add_parser("bench", help="measure: repeated runs, medians and spreads")
    kinds = parser.add_subparsers(required=True, metavar="BENCH")
    for bench in benches():
        add_bench(kinds, bench)


def add_bench(kinds: Any, bench: Bench) -> None:
    """Add one benchmark: its own options, and those that all have."""
    parser: argparse.ArgumentParser = kinds.add_parser(bench.name, help=bench.help)
    bench.add_options(parser)
    common = parser.add_argument_group("all benchmarks")
    common.add_argument("--runs", type=int, default=3, metavar="N", help="of every case, in turn")
    common.add_argument("--json", metavar="PATH", help="also write everything as JSON")
    common.add_argument(
        "--markdown", metavar="PATH[#NAME]",
        help="also put the table between the marks of this name (default: the benchmark's) in a "
        "file, as: BENCHMARKS.md#feed",
    )  # fmt: skip
    common.add_argument(
        "--scratch", metavar="FOLDER", help="keep rasters there for the next time; else removed"
    )
    common.add_argument(
        "--compare",
        nargs="+",
        metavar="OPTION=VALUE[,OPTION=VALUE]",
        help="two or more settings side by side, as: --compare batch=4 batch=8",
    )
    parser.set_defaults(command=partial(_command, bench, parser))


def _command(bench: Bench, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    settings = _settings(parser, arguments)
    result = run_bench(bench, settings, arguments.runs, arguments.scratch)
    print(result.text())
    if arguments.json:
        Path(arguments.json).write_text(result.to_json() + "\n")
    if arguments.markdown:
        path, _, name = arguments.markdown.partition("#")
        write_section(Path(path), name or bench.name, result.body())
    return 0


def run_bench(
    bench: Bench, settings: dict[str, argparse.Namespace], runs: int, scratch: str | None = None
) -> Result:
    """Run a benchmark for one or several settings, in turn.

    Parameters
    ----------
    bench : Bench
    settings : dict
        Options by name of the setting; the name is empty where there is one.
    runs : int
        Of every case.
    scratch : str, optional
        Folder that stays, for rasters that the next time can use.
    """
    about = machine()
    with scratch_folder(scratch) as folder:
        cases: list[Case] = []
        for group, options in settings.items():
            cases += [replace(case, group=group) for case in bench.cases(options, folder)]
        say(f"{len(cases)} cases, {runs} runs of each")
        values = measure(cases, runs)
    asked = {group: _plain(options) for group, options in settings.items()}
    result = Result(f"bench {bench.name}", bench.columns, values, (), asked, about)
    return replace(result, notes=tuple(_notes(bench, result, list(settings))))


def _notes(bench: Bench, result: Result, groups: Sequence[str]) -> list[str]:
    """Notes of all settings; those that are the same for all of them once, at the end."""
    told = {group: list(bench.notes(result, group)) for group in groups}
    shared = [note for note in told[groups[0]] if all(note in notes for notes in told.values())]
    own = [
        f"{group}: {note}" if group else note
        for group, notes in told.items()
        for note in notes
        if note not in shared
    ]
    return own + shared


def _settings(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> dict[str, argparse.Namespace]:
    """The options of each setting of ``--compare``, by its text."""
    if not arguments.compare:
        return {"": arguments}
    if len(set(arguments.compare)) < 2:
        parser.error("--compare needs two settings that differ, as: --compare batch=4 batch=8")
    return {text: _changed(parser, arguments, text) for text in arguments.compare}


def _changed(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, text: str
) -> argparse.Namespace:
    words: list[str] = []
    # A comma before anything but a name is part of a value, as in readers=1,2.
    for pair in re.split(r",(?=[\w-]+=)", text):
        name, equals, value = pair.partition("=")
        if not equals or name in _OURS:
            parser.error(f"--compare {text}: expected OPTION=VALUE, got {pair!r}")
        words.append(f"--{name}={value}")
    # What is parsed into a namespace leaves alone what is there and not named.
    return parser.parse_args(words, namespace=copy.copy(arguments))


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in _OURS}
