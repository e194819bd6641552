"""The command line: exit codes, what goes to stdout and stderr, and that it mirrors Python."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import rasterio

import daskinfer as di
from conftest import noise, write_raster
from daskinfer.cli import main
from models import FACTORY, in_new_process
from oracle import assert_classes, whole

NAMES = ("red", "nir")
REFUSED, FAILED, INCOMPLETE, INTERRUPTED = 2, 1, 3, 130
# Batches of one: tiles of different chunks in one batch share its fate.
CHUNKS = ("--chunk", "64", "--tile", "32", "--blocksize", "64", "--batch-size", "1")


@pytest.fixture
def source(tmp_path):
    return write_raster(tmp_path / "scene.tif", noise(2, 120, 120), descriptions=NAMES)


@pytest.fixture
def shy(tmp_path, factory):
    """A factory whose network fails on numbers above 1e4, and a scene with one such pixel."""
    code = """
        import torch
        from torch import nn

        class Shy(nn.Conv2d):
            def forward(self, x):
                if x.max() > 1e4:
                    raise ValueError("too bright for me")
                return super().forward(x)

        def make():
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return Shy(2, 3, 3, padding=1)
    """
    (tmp_path / "shy_nets.py").write_text(textwrap.dedent(code))
    raw = noise(2, 120, 120)
    raw[0, 10, 100] = 20_000
    yield write_raster(tmp_path / "bright.tif", raw), "shy_nets:make"
    sys.modules.pop("shy_nets", None)


def rows(text):
    """Rows of the tables in a text, by name."""
    lines = (line.strip().split("  ", 1) for line in text.splitlines() if line.startswith("  "))
    return {name: value.strip() for name, value in (line for line in lines if len(line) == 2)}


# --- run ------------------------------------------------------------------------------------------


def test_run_writes_the_whole_images_classes_and_exits_with_0(source, factory, tmp_path, capsys):
    output = tmp_path / "out.tif"
    options = ["--bands", "nir,red", "--scale", "1e-4", "--mean", "0.4,0.6", "--std", "0.2,0.3",
               "--tile", "40,32", "--chunk", "64", "--batch-size", "3",
               "--class-names", "water, soil,plants"]  # fmt: skip
    assert main(["run", source, factory, str(output), *options]) == 0
    out, err = capsys.readouterr()
    assert rows(out)["tile"] == "40 x 32 px"
    assert rows(out)["failed"] == "0 chunks"
    assert "4 of 4 chunks" in err
    net = sys.modules["nets_of_users"].make().eval()
    with rasterio.open(source) as dataset:
        raw = dataset.read([2, 1])
    expected = whole(net, raw, scale=1e-4, mean=[0.4, 0.6], std=[0.2, 0.3])
    with rasterio.open(output) as dataset:
        assert_classes(dataset.read(1), expected)
        assert dataset.tags()["CLASS_NAMES"] == '["water", "soil", "plants"]'


def test_run_that_loses_chunks_exits_with_3_and_names_them(shy, tmp_path, capsys):
    output = tmp_path / "out.tif"
    options = ["--on-error", "nodata", *CHUNKS]
    assert main(["run", *shy, str(output), *options]) == INCOMPLETE
    out, err = capsys.readouterr()
    assert "Report: INCOMPLETE" in out
    assert rows(out)["failed"] == "1 chunks"
    assert "too bright for me" in rows(out)["chunk 1"]
    assert "(rows 0-64, columns 64-120) failed" in err
    with rasterio.open(output) as dataset:
        lost = dataset.read(1) == 255
    expected = np.zeros((120, 120), bool)
    expected[:64, 64:] = True
    assert np.array_equal(lost, expected)


def test_run_that_fails_exits_with_1_keeps_the_partial_output_and_info_tells_of_it(
    shy, tmp_path, capsys
):
    output = tmp_path / "out.tif"
    assert main(["run", *shy, str(output), *CHUNKS]) == FAILED
    err = capsys.readouterr().err
    where = "daskinfer: chunk 1 at (row, col, height, width) = (0, 64, 64, 56)"
    assert f"{where} failed on inproc" in err
    assert "ValueError: too bright for me" in err
    assert not output.exists()

    assert main(["info", f"{output}.partial"]) == 0
    told = rows(capsys.readouterr().out)
    assert told["size"] == "1 x 120 x 120 (band, y, x)"
    assert told["failed"] == "1 chunks"
    assert "too bright for me" in told["chunk 1"]
    assert told["source"] == shy[0]
    done, blocks = (int(told["done"].split()[i]) for i in (0, 2))
    assert blocks == 4
    assert done < blocks


def test_a_factory_may_lie_in_the_folder_where_the_command_is_given(tmp_path, monkeypatch, capsys):
    (tmp_path / "nets_here.py").write_text(FACTORY.format(seed=0))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert main(["model-info", "nets_here:make"]) == 0
    assert "nets_here:make" in capsys.readouterr().out
    sys.modules.pop("nets_here")
    assert main(["model-info", "nets_there:make"]) == REFUSED
    assert "add its folder to PYTHONPATH" in capsys.readouterr().err


def test_heads_are_counted_from_the_end_too():
    from daskinfer.arguments import _heads

    assert [_heads(text) for text in ("-1", "0,-2", "out", "a-1")] == [-1, [0, -2], "out", "a-1"]


def test_info_of_an_output_in_several_files(tmp_path, capsys):
    pixels = np.arange(90 * 80, dtype=np.uint16).reshape(1, 90, 80)
    array = di.open_raster(write_raster(tmp_path / "s.tif", pixels))
    di.write_cog(array, tmp_path / "o.vrt", split=64)
    assert main(["info", str(tmp_path / "o.vrt")]) == 0
    told = rows(capsys.readouterr().out)
    assert (told["blocks"], told["layout"]) == ("64 x 64", "files in a VRT")


def test_ctrl_c_exits_with_130_and_says_how_to_go_on(
    source, factory, tmp_path, capsys, monkeypatch
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("daskinfer.runner.run", interrupted)
    assert main(["run", source, factory, str(tmp_path / "out.tif")]) == INTERRUPTED
    assert capsys.readouterr().err.endswith("stopped; the same command goes on from here\n")


# --- plan -----------------------------------------------------------------------------------------


def test_plan_shows_what_run_would_do_and_writes_nothing(source, factory, tmp_path, capsys):
    output = tmp_path / "out.tif"
    before = set(os.listdir(tmp_path))
    options = ["--window", "10,20,50,60", "--halo", "4", "--output", "probabilities",
               "--activation", "softmax", "--compress", "zstd"]  # fmt: skip
    assert main(["plan", source, factory, str(output), *options]) == 0
    told = rows(capsys.readouterr().out)
    assert told["source"] == "50 x 60 px, bands red, nir"
    assert told["halo"] == "4 px"
    assert told["output"] == f"{output}, 3 x float32, nodata nan"
    assert told["bytes"] == "36.0 kB before zstd"
    assert set(os.listdir(tmp_path)) - {"__pycache__"} == before - {"__pycache__"}


def test_refused_input_exits_with_2_and_says_why_on_stderr(source, factory, tmp_path, capsys):
    output = str(tmp_path / "out.tif")
    (tmp_path / "there.tif").write_text("")
    refused = {
        "no such file": ["nowhere.tif", factory, output],
        "exists: pass --overwrite": [source, factory, str(tmp_path / "there.tif")],
        "no such file, and not a 'package": [source, "no model", output],
        "no band 'swir'": [source, factory, output, "--bands", "red,swir"],
        "std must be positive": [source, factory, output, "--std", "0"],
        "the factory returned int": [source, "nets_of_users:make_number", output],
    }
    for command in ("run", "plan"):
        for message, arguments in refused.items():
            assert main([command, *arguments]) == REFUSED
            out, err = capsys.readouterr()
            assert out == ""
            assert message in err.splitlines()[-1]
            assert err.splitlines()[-1].startswith("daskinfer: ")
    assert not os.path.exists(output)


@pytest.mark.parametrize(
    "arguments",
    [[], ["run"], ["nonsense"], ["plan", "a", "b", "c.tif", "--nonsense"],
     ["plan", "a", "b", "c.tif", "--tile", "large"], ["plan", "a", "b", "c.tif", "--scale", "x"]],
)  # fmt: skip
def test_arguments_that_make_no_sense_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == REFUSED
    assert "usage: daskinfer" in capsys.readouterr().err


# --- the mirror -----------------------------------------------------------------------------------


def help_of(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["run", "plan"])
def test_every_keyword_of_plan_and_load_model_is_an_option(command, capsys):
    text = help_of([command], capsys)
    keywords = [
        name
        for name, parameter in inspect.signature(di.plan).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    spec = ["bands", "scale", "offset", "mean", "std", "fill", "output", "activation", "threshold",
            "class_names", "class_colors", "weights"]  # fmt: skip
    missing = [name for name in (*keywords, *spec) if f"--{name.replace('_', '-')}" not in text]
    assert missing == []


def test_help_lists_every_command(capsys):
    text = help_of([], capsys)
    for command in ("demo", "plan", "run", "info"):
        assert f"    {command} " in text
        assert help_of([command], capsys).startswith(f"usage: daskinfer {command}")


# --- demo, info, version --------------------------------------------------------------------------


def test_demo_makes_a_map_and_a_picture(tmp_path, capsys):
    folder = tmp_path / "new" / "demo"
    assert main(["demo", str(folder)]) == 0
    told = rows(capsys.readouterr().out)
    assert told["failed"] == "0 chunks"
    assert told["picture"] == str(folder / "clouds.png")
    assert (folder / "clouds.png").stat().st_size > 10_000
    with rasterio.open(folder / "clouds.tif") as dataset:
        classes = dataset.read(1)
        assert dataset.shape == di.demo_scene().shape[1:]
    assert {0, 1} <= set(np.unique(classes)) <= {0, 1, 2, 255}


def test_info_tells_what_rasterio_tells(source, capsys):
    assert main(["info", source]) == 0
    told = rows(capsys.readouterr().out)
    assert told["size"] == "2 x 120 x 120 (band, y, x)"
    assert told["dtype"] == "uint16, nodata None"
    assert told["crs"] == "EPSG:32632"
    assert told["bands"] == "red, nir"
    assert "done" not in told


def test_info_refuses_what_is_no_raster(tmp_path, capsys):
    (tmp_path / "a.tif").write_text("not a raster")
    for name, message in (("nowhere.tif", "no such file"), ("a.tif", "not a raster that GDAL")):
        assert main(["info", str(tmp_path / name)]) == REFUSED
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err


def test_the_module_runs_as_a_command_and_tells_its_version():
    done = subprocess.run(
        [sys.executable, "-m", "daskinfer", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"daskinfer {di.__version__}\n"
    assert done.stderr == ""


def test_telling_the_version_and_help_imports_nothing_heavy():
    code = """
        import contextlib, io, sys
        from daskinfer.cli import main
        for arguments in (["--version"], ["--help"], ["run", "--help"]):
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
                main(arguments)
        print([name for name in ("torch", "dask", "rasterio", "xarray") if name in sys.modules])
    """
    assert in_new_process(code) == "[]"


def test_a_failing_command_exits_with_its_code_from_the_shell(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "daskinfer", "info", str(tmp_path / "nowhere.tif")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == REFUSED
    assert "nowhere.tif" in done.stderr
    assert "Traceback" not in done.stderr
