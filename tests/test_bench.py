"""The harness of the benchmarks and their command line, with cases that cost nothing."""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import daskinfer as di
from daskinfer.bench.command import add_bench, benches, run_bench
from daskinfer.bench.harness import (
    Bench,
    Case,
    Column,
    Result,
    Spread,
    machine,
    measure,
    scratch_folder,
    write_section,
)
from daskinfer.bench.watching import peak_memory

FOLDER = Path(di.__file__).parent / "bench"
COLUMNS = (Column("s", "time, s", "{:.1f}"), Column("mb", "memory, MB", "{:.0f}"))


def quiet(text):
    pass


def counting(order, name, values):
    """A case that notes its turn and gives one of the values after another."""
    left = iter(values)

    def once():
        order.append(name)
        return {"s": next(left)}

    return Case(name, once)


def toy(made=None):
    """A benchmark of one option: a case takes ``scale`` seconds, and twice that."""

    def options(parser):
        parser.add_argument("--scale", type=float, default=1.0)
        parser.add_argument("--unit-name", default="px")

    def cases(asked, folder):
        if made is not None:
            made.append((asked.scale, asked.unit_name, folder))
        return [
            Case("small", lambda: {"s": asked.scale, "mb": 10.0}),
            Case("large", lambda: {"s": 2 * asked.scale}),
        ]

    def notes(result, group):
        return ["shared by all", f"scale {result.options[group]['scale']:g}"]

    return Bench("toy", "a toy", COLUMNS, options, cases, notes)


def command(bench, *words):
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers(required=True), bench)
    arguments = parser.parse_args([bench.name, *words])
    return arguments.command(arguments)


# --- measuring ------------------------------------------------------------------------------------


def test_cases_take_turns():
    order = []
    cases = [counting(order, "A", [1, 2, 3]), counting(order, "B", [9, 8, 7])]
    values = measure(cases, 3, tell=quiet)
    assert order == ["A", "B"] * 3
    assert values == {
        ("", "A"): [{"s": 1}, {"s": 2}, {"s": 3}],
        ("", "B"): [{"s": 9}, {"s": 8}, {"s": 7}],
    }


def test_progress_names_each_run():
    said = []
    measure([counting([], "A", [1, 2])], 2, tell=said.append)
    assert said == ["run 1 of 2: A", "  s 1", "run 2 of 2: A", "  s 2"]


@pytest.mark.parametrize(
    ("cases", "runs", "message"),
    [
        ([], 1, "a case and a run, got 0 and 1"),
        ([Case("A", dict)], 0, "a case and a run, got 1 and 0"),
        ([Case("A", dict), Case("A", dict)], 1, "two cases share a name"),
    ],
)
def test_what_cannot_be_measured_is_refused(cases, runs, message):
    with pytest.raises(ValueError, match=message):
        measure(cases, runs, tell=quiet)


def test_an_error_of_a_case_is_not_swallowed():
    def fails():
        raise ZeroDivisionError("of the case")

    with pytest.raises(ZeroDivisionError, match="of the case"):
        measure([Case("A", fails)], 1, tell=quiet)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([4.0], (4.0, 4.0, 4.0, 1)),
        ([5.0, 1.0, 3.0], (3.0, 1.0, 5.0, 3)),
        ([1.0, 2.0, 3.0, 10.0], (2.5, 1.0, 10.0, 4)),
    ],
)
def test_median_and_range(values, expected):
    spread = Spread.of(values)
    assert (spread.median, spread.low, spread.high, spread.runs) == expected


# --- tables ---------------------------------------------------------------------------------------


def test_the_table_has_a_row_per_case_and_leaves_out_what_was_not_measured():
    values = {("", "loop"): [{"s": 1.0, "mb": 5.0}, {"s": 3.0, "mb": 5.0}], ("", "none"): [{}, {}]}
    assert Result("toy", COLUMNS, values).table().splitlines() == [
        "| case | time, s | memory, MB |",
        "| --- | ---: | ---: |",
        "| loop | 2.0 (1.0..3.0) | 5 (5..5) |",
        "| none |  |  |",
    ]


def test_the_comparison_pairs_runs_that_followed_each_other():
    # The machine became three times as slow between the first and the second run of both.
    values = {("a", "loop"): [{"s": 1.0}, {"s": 3.0}], ("b", "loop"): [{"s": 2.0}, {"s": 6.0}]}
    result = Result("toy", COLUMNS, values)
    assert result.groups == ["a", "b"]
    assert result.comparison().splitlines()[2:] == [
        "| loop | time, s | 2.0 (1.0..3.0) | 4.0 (2.0..6.0) | 2.00 (2.00..2.00) |"
    ]


def test_a_ratio_to_nothing_is_left_out():
    values = {("a", "loop"): [{"s": 0.0}], ("b", "loop"): [{"s": 2.0}]}
    last = Result("toy", COLUMNS, values).comparison().splitlines()[-1]
    assert last == "| loop | time, s | 0.0 | 2.0 |  |"


def test_json_holds_every_run_and_what_follows():
    values = {("", "loop"): [{"s": 1.0}, {"s": 3.0}]}
    made = Result("toy", COLUMNS, values, ("a note",), {"": {"scale": 2.0}}, {"cores": 2})
    content = json.loads(made.to_json())
    assert content["rows"] == [
        {
            "setting": "",
            "case": "loop",
            "runs": [{"s": 1.0}, {"s": 3.0}],
            "summary": {"s": {"median": 2.0, "low": 1.0, "high": 3.0, "runs": 2}},
        }
    ]
    assert content["columns"] == {"s": "time, s", "mb": "memory, MB"}
    assert (content["notes"], content["machine"]) == (["a note"], {"cores": 2})
    assert content["options"] == {"": {"scale": 2.0}}


# --- the machine ----------------------------------------------------------------------------------


def test_the_machine_is_described():
    about = machine()
    assert about["cores"] >= 1
    assert about["daskinfer"] == di.__version__
    assert about["torch"][0].isdigit()
    json.dumps(about)


def test_peak_memory_sees_what_is_gone_again():
    size = 64 << 20
    with peak_memory(every=3600) as peak:
        before = peak.bytes
        block = bytearray(b"x") * size
        held = peak.look()
        del block
        after = peak.look()
    assert held - before > size // 2
    assert after < held
    assert peak.bytes >= held


def test_peak_memory_counts_child_processes():
    code = "block = bytearray(b'x') * (64 << 20); print('ready', flush=True); input()"
    with peak_memory(every=3600) as peak:
        before = peak.bytes
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout.readline() == b"ready\n"
            assert peak.look() - before > 32 << 20
            child.communicate(b"\n")


def test_a_scratch_folder_of_ones_own_stays(tmp_path):
    mine = tmp_path / "deep" / "folder"
    with scratch_folder(str(mine)) as folder:
        (folder / "raster").touch()
    assert (mine / "raster").exists()
    with scratch_folder(None) as folder:
        (folder / "raster").touch()
    assert not folder.exists()


# --- sections of a file ---------------------------------------------------------------------------


def test_a_section_is_replaced_and_the_rest_stays(tmp_path):
    path = tmp_path / "B.md"
    path.write_text("# Numbers\n\n<!-- a: begin -->\nold\n<!-- a: end -->\n\nThe end\n")
    expected = "# Numbers\n\n<!-- a: begin -->\nnew \\1\n<!-- a: end -->\n\nThe end\n"
    for _ in range(2):
        write_section(path, "a", "new \\1")
        assert path.read_text() == expected


def test_a_section_without_marks_goes_to_the_end(tmp_path):
    path = tmp_path / "B.md"
    path.write_text("# Numbers\n")
    write_section(path, "a", "new")
    assert path.read_text() == "# Numbers\n\n<!-- a: begin -->\nnew\n<!-- a: end -->\n"
    write_section(path, "b", "other")
    assert path.read_text().endswith(
        "<!-- a: end -->\n\n<!-- b: begin -->\nother\n<!-- b: end -->\n"
    )


# --- the command line -----------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    path = tmp_path / "toy.json"
    assert command(toy(), "--runs", "2", "--scale", "1.5", "--json", str(path)) == 0
    printed = capsys.readouterr()
    assert "### bench toy" in printed.out
    assert "| large | 3.0 (3.0..3.0) |  |" in printed.out
    assert "run 2 of 2: large" in printed.err
    content = json.loads(path.read_text())
    assert content["options"] == {"": {"scale": 1.5, "unit_name": "px"}}
    assert [row["case"] for row in content["rows"]] == ["small", "large"]
    assert content["notes"] == ["shared by all", "scale 1.5"]
    assert content["machine"]["cores"] >= 1


@pytest.mark.parametrize(("suffix", "name"), [("", "toy"), ("#of mine", "of mine")])
def test_the_command_fills_a_section(tmp_path, capsys, suffix, name):
    path = tmp_path / "B.md"
    assert command(toy(), "--runs=2", f"--markdown={path}{suffix}") == 0
    text = path.read_text()
    assert text.startswith(f"<!-- {name}: begin -->\n| case | time, s | memory, MB |")
    assert "Medians of 2 runs (lowest..highest); " in text
    printed = capsys.readouterr().out
    assert text.partition("\n")[2].rpartition("\n<!--")[0] in printed


def test_compare_sets_options_and_keeps_the_others(tmp_path, capsys):
    made = []
    words = ["--compare", "scale=2", "scale=4,unit-name=m,n", "--runs=1", f"--scratch={tmp_path}"]
    assert command(toy(made), *words) == 0
    assert made == [(2.0, "px", tmp_path), (4.0, "m,n", tmp_path)]
    out = capsys.readouterr().out
    assert "| scale=2 | small | 2.0 | 10 |" in out
    assert "| small | time, s | 2.0 | 4.0 | 2.00 |" in out
    # One note is the same for both settings.
    assert out.count("shared by all") == 1
    assert "scale=4,unit-name=m,n: scale 4" in out


def test_settings_that_are_compared_take_turns(tmp_path):
    order = []

    def cases(asked, folder):
        return [counting(order, f"of {asked.name}", [1, 2])]

    bench = Bench("turns", "", COLUMNS, lambda parser: None, cases)
    settings = {name: argparse.Namespace(name=name) for name in "ab"}
    result = run_bench(bench, settings, 2, str(tmp_path))
    assert order == ["of a", "of b", "of a", "of b"]
    assert result.runs("of b", "s", "b") == [1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "scale=2"], "needs two settings that differ"),
        (["--compare", "scale=2", "scale=2"], "needs two settings that differ"),
        (["--compare", "scale", "scale=2"], "expected OPTION=VALUE, got 'scale'"),
        (["--compare", "runs=2", "scale=2"], "expected OPTION=VALUE, got 'runs=2'"),
        (["--compare", "scale=2", "scale=much"], "invalid float value: 'much'"),
        (["--compare", "scale=2", "size=3"], "unrecognized arguments: --size=3"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, message, capsys):
    made = []
    with pytest.raises(SystemExit) as stopped:
        command(toy(made), *words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert made == []


def test_every_benchmark_has_a_name_help_and_columns_of_its_own():
    names = [bench.name for bench in benches()]
    assert {"feed", "cpu", "batch"} <= set(names)
    assert len(names) == len(set(names))
    for bench in benches():
        keys = [column.key for column in bench.columns]
        assert len(keys) == len(set(keys))
        assert bench.help


# --- how they hang together -----------------------------------------------------------------------


def imported(path, *, top_only):
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_the_command_line_imports_nothing_heavy():
    code = (
        "import sys; from daskinfer.bench.command import benches; benches();"
        "heavy = ('torch', 'numpy', 'rasterio', 'dask', 'distributed', 'psutil');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_command_line_knows_the_benchmarks():
    knowing = {
        path.stem
        for path in FOLDER.parent.glob("*.py")
        if any(".bench" in name or name == "bench" for name in imported(path, top_only=False))
    }
    assert knowing <= {"cli"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_is_short_and_does_not_import_the_package_root(path):
    assert path.read_text().count("\n") <= 500
    assert "daskinfer" not in set(imported(path, top_only=False))


def test_every_command_of_the_document_is_one_and_has_its_section():
    root = FOLDER.parent.parent
    text = (root / "BENCHMARKS.md").read_text()
    commands = re.findall(r"^daskinfer bench (.*) --markdown BENCHMARKS.md#(\S+)$", text, re.M)
    assert {name for _, name in commands} >= {"feed", "feed-workers", "cpu", "batch"}
    parser = argparse.ArgumentParser()
    kinds = parser.add_subparsers(required=True)
    for bench in benches():
        add_bench(kinds, bench)
    for words, name in commands:
        assert words.split()[0] in kinds.choices
        parser.parse_args(words.split())
        assert f"<!-- {name}: begin -->" in text
        assert f"<!-- {name}: end -->" in text
    sections = re.findall(r"^<!-- (\S+): begin -->$", text, re.M)
    assert sorted(sections) == sorted({name for _, name in commands} | {"check_gpu"})
