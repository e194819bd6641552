"""The example of the README prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from daskinfer.spans import STAGES

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
# Lines that tell of the machine and of its codec, not of the result.
VARY = ("  output ", "  time ", "  tiles ", "  device ", "  queue ", "  diagnosis ")
VARY += tuple(f"    {stage} " for stage in STAGES)
PACKAGE = ROOT / "daskinfer"


def example():
    """The first block of Python, and the block of text that says what it prints."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    code = next(i for i, (language, _) in enumerate(blocks) if language == "python")
    assert blocks[code + 1][0] == "text"
    return blocks[code][1], blocks[code + 1][1]


def steady(text):
    """Lines with those that vary cut down to their names."""
    lines = text.rstrip().splitlines()
    return [next((name for name in VARY if line.startswith(name)), line) for line in lines]


def test_the_example_prints_what_it_says(tmp_path):
    code, expected = example()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert steady(done.stdout) == steady(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["clouds.tif"]


def test_the_example_has_about_ten_lines():
    code, _ = example()
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 11


def test_what_the_readme_links_to_exists():
    targets = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    missing = [t for t in targets if "://" not in t and not (ROOT / t).exists()]
    assert targets
    assert missing == []


def test_the_module_map_names_every_module():
    table = README.read_text().partition("## Modules")[2].partition("## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    told = {name for cell in cells for name in re.findall(r"`(\w+)/?`", cell)}
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    there = {path.parts[0].removesuffix(".py") for path in files}
    assert there - told == {"__init__", "__main__", "_version"}
    # Of packages it may name the modules too.
    assert told - {name.removesuffix(".py") for path in files for name in path.parts} == set()
