"""`bench write` at a small size: all ways write the same pixels, and what is told is told right."""

from __future__ import annotations

import argparse
import os

import numpy as np
import pytest
import rasterio

from daskinfer.bench import write
from daskinfer.bench.command import benches, run_bench
from daskinfer.bench.harness import Result
from daskinfer.bench.writers import WRITERS, Job, chunks_of

OWN = (
    "compress only",
    "compress and overviews",
    "daskinfer, direct",
    "daskinfer, dask",
    "daskinfer, threads",
)


def options(*words):
    parser = argparse.ArgumentParser()
    write.BENCH.add_options(parser)
    return parser.parse_args(["--size", "1500", "--chunk", "1024", *words])


def job(folder, kind="classes", size=1500):
    made = Job(kind, size, 1024, 2, "deflate", None, str(folder))
    made.make_template()
    return made


def test_it_is_on_the_command_line():
    assert write.BENCH in benches()


@pytest.mark.parametrize(("kind", "bands"), [("classes", 1), ("floats", 3)])
def test_the_raster_is_the_same_however_it_is_cut(tmp_path, kind, bands):
    whole = np.zeros((bands, 1500, 1500), job(tmp_path, kind).dtype)
    for window, pixels in chunks_of(job(tmp_path, kind)):
        whole[(slice(None), *window.toslices())] = pixels
    (tmp_path / "again").mkdir()
    for row, col in job(tmp_path / "again", kind).corners():
        pixels = job(tmp_path / "again", kind).pixels(row, col)
        part = whole[:, row : row + pixels.shape[1], col : col + pixels.shape[2]]
        np.testing.assert_array_equal(part, pixels)
    nodata = np.isnan(whole) if kind == "floats" else whole == 255
    assert nodata[:, :512, :512].all()
    assert 0.1 < nodata.mean() < 0.5
    # Not so smooth that any codec would do, and not noise.
    assert len(np.unique(whole[0, 1024:, 1024:])) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classes", "floats"])
def test_own_ways_give_numbers_and_leave_nothing(tmp_path, kind):
    result = run_bench(
        write.BENCH, {"": options("--kind", kind, "--ways", "compress,daskinfer")}, 1, str(tmp_path)
    )
    assert result.cases() == [f"{kind}: {name}" for name in OWN]
    for name in result.cases():
        assert result.spread(name, "wall").median > 0
        assert result.spread(name, "memory").median > 10
    files = [result.spread(f"{kind}: {name}", "file").median for name in OWN[2:]]
    assert min(files) > 0.1
    # The same tiles by all; those through Dask say in a tag what wrote them.
    assert max(files) - min(files) < 0.001
    for name in OWN[:2]:
        assert result.runs(f"{kind}: {name}", "file") == []
    assert os.listdir(tmp_path) == [f"{kind}-1024.npy"]
    text = result.text()
    assert f"{kind}: daskinfer, direct takes" in text
    assert "times as long as encoding alone (asked: 1.6)" in text


@pytest.mark.parametrize("name", ["GDAL's COG driver", "rio-cogeo", "odc-geo"])
def test_the_others_write_the_same_pixels(tmp_path, name):
    if name == "odc-geo":
        pytest.importorskip("odc.geo", reason="needs: pip install odc-geo")
    # Compared with the pixels by the benchmark itself, which raises where they differ.
    result = run_bench(
        write.BENCH, {"": options("--kind", "floats", "--ways", name)}, 1, str(tmp_path)
    )
    assert result.spread(f"floats: {name}", "file").median > 0.1


def test_other_pixels_are_an_error(tmp_path):
    made = job(tmp_path)
    WRITERS["daskinfer, direct"](made)
    write._check(made)
    with rasterio.open(made.output, "r+", IGNORE_COG_LAYOUT_BREAK="YES") as dataset:
        dataset.write(np.uint8([[[9]]]), window=((1400, 1401), (1400, 1401)))
    with pytest.raises(RuntimeError, match="other pixels at"):
        write._check(made)


def test_a_way_that_fails_is_an_error(tmp_path):
    wrong = options("--ways", "compress only", "--compress", "nonsense", "--kind", "classes")
    with pytest.raises(RuntimeError, match="compress only ended with status 1"):
        run_bench(write.BENCH, {"": wrong}, 1, str(tmp_path))


def test_an_unknown_way_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--ways nonsense: expected some of compress only"):
        run_bench(write.BENCH, {"": options("--ways", "nonsense")}, 1, str(tmp_path))


def test_what_follows_from_the_numbers():
    walls = {"compress and overviews": 4.0, "daskinfer, direct": 5.0, "GDAL's COG driver": 20.0}
    values = {("", f"floats: {name}"): [{"wall": s, "tail": s / 10}] for name, s in walls.items()}
    assert write.notes(Result("", (), values), "") == [
        "floats: daskinfer, direct: 10.0% of the time is after the last chunk",
        "floats: daskinfer, direct takes 1.25 times as long as encoding alone (asked: 1.25)",
        "floats: daskinfer, direct is 4.0 times as fast as GDAL's COG driver",
    ]
