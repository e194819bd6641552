"""``bench cpu`` and ``bench batch`` at toy size: their numbers agree with each other."""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import pytest
import rasterio
import torch

from daskinfer.bench import batch, cpu
from daskinfer.bench.command import add_bench, run_bench
from daskinfer.bench.onebatch import measure_batch
from daskinfer.bench.synthetic import heavy_unet, macs_per_pixel, mirrored_scene, unet
from daskinfer.demo import demo_model
from daskinfer.halo import receptive_field

PARTS = ("model", "decode", "encode")


def asked(bench, *words):
    parser = argparse.ArgumentParser()
    bench.add_options(parser)
    return parser.parse_args(words)


# --- the networks ---------------------------------------------------------------------------------


def test_the_heavy_network_is_about_twenty_times_as_heavy():
    demo, heavy = (macs_per_pixel(network) for network in (unet(), heavy_unet()))
    assert 19 < heavy / demo < 21


def test_multiply_adds_are_counted_per_input_pixel():
    network = torch.nn.Sequential(
        torch.nn.Conv2d(6, 10, 3, padding=1), torch.nn.MaxPool2d(2), torch.nn.Conv2d(10, 4, 1)
    )
    assert macs_per_pixel(network) == 6 * 10 * 9 + 10 * 4 / 4


def test_the_networks_look_as_far_as_the_demo_model():
    want = receptive_field(demo_model())
    got = receptive_field(unet(), bands=6)
    assert (got.radius, got.stride, got.bands) == (want.radius, want.stride, want.bands)
    assert got.exact


def test_random_weights_are_the_same_every_time():
    x = torch.from_numpy(mirrored_scene(range(32), range(32))[None].astype(np.float32))
    with torch.inference_mode():
        torch.testing.assert_close(unet()(x), unet()(x), rtol=0, atol=0)


# --- bench cpu ------------------------------------------------------------------------------------

SMALL = ("--size=256", "--heavy-size=128", "--chunk=128", "--tile=160", "--threads=2")


@pytest.fixture(scope="module")
def floor(tmp_path_factory):
    """Both models, one run."""
    folder = str(tmp_path_factory.mktemp("cpu"))
    return run_bench(cpu.BENCH, {"": asked(cpu.BENCH, *SMALL)}, 1, folder)


@pytest.mark.slow
def test_the_floor_is_the_sum_of_its_parts(floor):
    assert floor.cases() == ["demo", "heavy"]
    sides = {"demo": 256, "heavy": 128}
    for (_, name), runs in floor.values.items():
        for run in runs:
            assert run["floor"] == pytest.approx(sum(run[part] for part in PARTS))
            assert run["ratio"] == pytest.approx(run["run"] / run["floor"])
            assert run["speed"] == pytest.approx(sides[name] ** 2 / 1e6 / run["run"])
            assert all(run[part] > 0 for part in (*PARTS, "cpu", "cpu_ratio"))


@pytest.mark.slow
def test_shares_add_up_to_the_run(floor):
    for name, note in zip(floor.cases(), floor.notes, strict=False):
        assert note.startswith(f"{name}: the model alone is")
        shares = [int(word.rstrip("%,.")) for word in note.split() if "%" in word]
        # Rounded to whole percent.
        assert sum(shares) == pytest.approx(100, abs=2)


@pytest.mark.slow
def test_the_weight_of_the_heavy_model_is_told(floor):
    told = next(note for note in floor.notes if "multiply-adds" in note)
    counted = macs_per_pixel(heavy_unet()) / macs_per_pixel(unet())
    assert f"{counted:.1f} times the multiply-adds" in told


def test_the_parts_do_what_the_run_does(tmp_path, monkeypatch):
    """All tiles once, every pixel of the source, every chunk of the result."""
    import daskinfer.cog
    import daskinfer.infer
    from daskinfer.runner import run

    tiles, encoded = [], []
    make_device, encode_chunk = daskinfer.infer.make_device, daskinfer.cog.encode_chunk

    def making(inference):
        device = make_device(inference)
        run_batch = device.run

        def counted(batch, valid=None):
            tiles.append(len(batch))
            return run_batch(batch, valid)

        device.run = counted
        return device

    def encoding(spec, array, row, col, levels):
        encoded.append((row, col, array))
        return encode_chunk(spec, array, row, col, levels)

    options = asked(cpu.BENCH, "--models=demo", "--batch=2", *SMALL)
    job = cpu._job("demo", options, tmp_path)
    run(job.plan)
    with rasterio.open(job.plan.output) as dataset:
        expected = dataset.read()
    monkeypatch.setattr(daskinfer.infer, "make_device", making)
    monkeypatch.setattr(daskinfer.cog, "encode_chunk", encoding)
    for work in cpu.parts(job).values():
        work()
    assert sum(tiles) == job.plan.tiling.runs
    assert max(tiles) == 2
    got = np.full_like(expected, 77)
    for row, col, array in encoded:
        got[:, row : row + array.shape[1], col : col + array.shape[2]] = array
    np.testing.assert_array_equal(got, expected)
    assert len(encoded) == job.plan.tiling.chunks == 4


def test_the_heavy_model_takes_the_same_numbers_as_the_demo_model():
    demo, heavy = cpu.bench_model("demo"), cpu.bench_model("heavy")
    for name in ("bands", "scale", "mean", "std"):
        assert getattr(demo, name) == getattr(heavy, name)


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        asked(cpu.BENCH, "--models=demo,giant")
    assert "known models: demo, heavy; got demo,giant" in capsys.readouterr().err


# --- bench batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({1: 10.0, 2: 10.0, 4: 10.0}, 1),
        ({1: 5.0, 2: 9.4, 4: 10.0}, 4),
        ({1: 5.0, 2: 9.5, 4: 10.0}, 2),
        ({1: 5.0, 2: 10.0, 4: 6.0}, 2),
        ({8: 3.0}, 8),
    ],
)
def test_the_knee_is_the_smallest_within_five_percent(speeds, expected):
    assert batch.knee(speeds) == expected


def one(**changed):
    asked = {
        "model": "demo",
        "tile": 64,
        "size": 2,
        "device": "cpu",
        "precision": "float32",
        "threads": 1,
        "seconds": 0.01,
    }
    return measure_batch(asked | changed)


def test_speed_is_that_of_the_pixels_of_a_batch():
    values = one(size=3)
    assert values["speed"] == pytest.approx(3 * 64 * 64 / 1e6 / values["seconds"])
    assert 0 <= values["added"] < values["memory"]


def test_a_batch_that_does_not_fit_has_no_numbers(monkeypatch):
    def short(inference):
        class Short:
            def allocate(self, shape, dtype):
                return np.empty(shape, dtype)

            def run(self, batch):
                raise MemoryError("full")

        return Short()

    monkeypatch.setattr("daskinfer.bench.onebatch.make_device", short)
    assert one() == {}


@pytest.mark.slow
def test_the_command_marks_the_knee(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers(required=True), batch.BENCH)
    path = tmp_path / "batch.json"
    words = ["--sizes=1,4", "--tile=64", "--seconds=0.01", "--threads=1", "--device=cpu"]
    arguments = parser.parse_args(["batch", *words, "--runs=1", f"--json={path}"])
    assert arguments.command(arguments) == 0
    content = json.loads(path.read_text())
    speeds = {int(row["case"]): row["runs"][0]["speed"] for row in content["rows"]}
    assert set(speeds) == {1, 4}
    assert f"knee: batch size {batch.knee(speeds)}, the smallest" in capsys.readouterr().out
    # A process of its own each: the larger batch does not add to the smaller one's memory.
    added = {int(row["case"]): row["runs"][0]["added"] for row in content["rows"]}
    assert all(math.isfinite(number) for number in added.values())


def test_a_size_that_fails_otherwise_stops_the_benchmark(tmp_path, capfd):
    options = asked(batch.BENCH, "--model=nothing:there", "--sizes=1", "--tile=64")
    [case] = batch.cases(options, tmp_path)
    with pytest.raises(RuntimeError, match="batch size 1 failed; its error is above"):
        case.once()
    assert "No module named 'nothing'" in capfd.readouterr().err


def test_a_process_that_was_killed_is_a_size_that_does_not_fit(tmp_path, monkeypatch, capsys):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    real = batch.subprocess.run

    def killed(command, **options):
        return real([command[0], "-c", code], **options)

    monkeypatch.setattr(batch.subprocess, "run", killed)
    [case] = batch.cases(asked(batch.BENCH, "--sizes=64"), tmp_path)
    assert case.once() == {}
    assert "64 tiles do not fit into memory" in capsys.readouterr().err
