"""``scripts/check_gpu.py``: the table it writes, and its checks on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch

PATH = Path(__file__).parent.parent / "scripts" / "check_gpu.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("check_gpu", PATH)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # Dataclasses look their module up.
        patch.setitem(sys.modules, "check_gpu", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def context(script, tmp_path):
    options = Namespace(check_size=384, cpu_size=256, gpu_size=256, tile=64, seconds=0.01)
    return script.Context("cpu", tmp_path, options)


def rows(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def test_scores_of_a_run_equal_the_whole_image(script, context):
    check = script.scores_equal(context)
    assert check.passed
    assert float(check.text.split()[0]) <= 1e-5


def test_classes_of_a_run_equal_the_whole_image(script, context):
    check = script.classes_equal(context)
    assert check.passed
    wrong, of, total, _ = check.text.split()
    assert (wrong, of) == ("0", "of")
    assert 0.99 * 384**2 < int(total) <= 384**2


@pytest.mark.parametrize("name", ["scores_equal", "classes_equal"])
def test_another_result_is_a_failure(script, context, monkeypatch, name):
    real = script.Context.run

    def spoiled(self, *arguments, **options):
        report, pixels = real(self, *arguments, **options)
        changed = pixels + np.ones((), pixels.dtype)
        return report, changed

    monkeypatch.setattr(script.Context, "run", spoiled)
    check = getattr(script, name)(context)
    assert not check.passed
    assert script.cell(check).startswith("**FAILED** ")


def test_busy_is_that_of_the_report(script, context):
    check = script.busy("demo")(context)
    assert "% steady, " in check.text
    with rasterio.open(context.folder / "cpu-busy-demo.tif") as dataset:
        assert dataset.shape == (256, 256)


def test_without_a_gpu_its_column_is_not_measured(script):
    cpu = [script.Check(f"{number} px") for number in range(len(script.CHECKS))]
    head, _, *body = rows(script.section(cpu, None))
    assert head[0] == "check"
    assert head[2] == "GPU"
    expected = [[name, f"{n} px", "not measured"] for n, name in enumerate(script.CHECKS)]
    assert body == expected


def test_a_gpu_is_named_and_what_failed_is_marked(script, monkeypatch):
    about = script.machine() | {"gpu": "Card 9000"}
    monkeypatch.setattr(script, "machine", lambda: about)
    gpu = [script.Check("fine")] * (len(script.CHECKS) - 1) + [script.Check("bad", False)]
    head, _, *body = rows(script.section(None, gpu))
    assert head[2] == "GPU: Card 9000"
    assert [row[1] for row in body] == ["not measured"] * len(body)
    assert [row[2] for row in body] == ["fine"] * (len(body) - 1) + ["**FAILED** bad"]


@pytest.mark.parametrize("passed", [True, False])
def test_the_exit_code_tells_of_failed_checks(script, tmp_path, monkeypatch, capsys, passed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script, "CHECKS", {"one": lambda context: script.Check("text", passed)})
    path = tmp_path / "B.md"
    assert script.main([f"--markdown={path}"]) == (0 if passed else 1)
    begin, *body, end = path.read_text().splitlines()
    assert (begin, end) == ("<!-- check_gpu: begin -->", "<!-- check_gpu: end -->")
    assert capsys.readouterr().out.splitlines() == body


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_checks_pass_on_a_gpu(script, tmp_path):
    assert script.main([f"--markdown={tmp_path / 'B.md'}", "--no-cpu", "--gpu-size=2048"]) == 0
