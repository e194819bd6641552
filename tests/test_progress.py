"""How far an unfinished output is: the states of its chunks, as counts and as a map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch

import daskinfer as di
from conftest import write_raster
from daskinfer import progress as progress_module
from daskinfer.cli import main
from daskinfer.cog import CogSpec, WorkFile, encode_chunk
from daskinfer.ledger import Failure
from daskinfer.outputs import Outputs
from daskinfer.progress import STATES, Progress, read_progress, write_map
from test_runner import Poisoned

MISSING, DONE, SKIPPED, FAILED = range(4)


class Half(torch.nn.Module):
    """Gives an output of half the size."""

    def forward(self, x):
        return torch.nn.functional.avg_pool2d(torch.cat([x, x + 1], dim=1), 2)


def partial_run(tmp_path, client, net, shape=(96, 130), **job):
    """Chunk 0 is nodata, chunk 4 fails for good; the run stops there, one chunk at a time."""
    raw = np.ones((1, *shape), np.uint8)
    raw[0, :32, :32] = 0
    raw[0, 40, 40] = 13
    source = write_raster(tmp_path / "scene.tif", raw, nodata=0)
    output = tmp_path / "o.tif"
    plan = di.plan(source, net, output, tile=32, chunk=32, **job)
    with pytest.raises(di.InferenceError):
        di.run(plan, client=client)
    return plan, f"{output}.partial"


def test_states_are_those_of_the_work_file_and_the_ledger(tmp_path, one_worker):
    plan, path = partial_run(tmp_path, one_worker, Poisoned())
    progress = read_progress(path)
    assert progress.states.shape == plan.tiling.grid == (3, 4)
    with rasterio.open(path) as dataset:
        written = dataset.read(1) != 255
    with Outputs.prepare(plan) as outputs:
        todo = set(outputs.todo()[0])
    expected = np.full(12, MISSING)
    for number in set(range(12)) - todo:
        rows, cols = plan.inference.window(plan.tiling.index_of(number)).slices()
        expected[number] = DONE if written[rows, cols].any() else SKIPPED
    expected[4 + 1] = FAILED
    assert np.array_equal(progress.states.ravel(), expected)
    assert progress.states[0, 0] == SKIPPED
    assert progress.failures[0].window == (32, 32, 32, 32)


def test_an_output_of_another_scale_has_the_same_chunks(tmp_path, one_worker):
    raw = np.ones((1, 100, 230), np.uint8)
    source = write_raster(tmp_path / "scene.tif", raw)

    def stop(event):
        if type(event).__name__ == "RunStarted":
            raise KeyboardInterrupt

    plan = di.plan(source, Half(), tmp_path / "o.tif", tile=32, chunk=32, blocksize=16)
    with pytest.raises(KeyboardInterrupt):
        di.run(plan, client=one_worker, callbacks=[stop])
    with Outputs.prepare(plan) as outputs:
        outputs.leave_nodata(Failure(9, (0, 0, 0, 0), "", ""))
    progress = read_progress(f"{plan.output}.partial")
    expected = np.full(plan.tiling.grid, MISSING)
    expected[plan.tiling.index_of(9)] = SKIPPED
    assert np.array_equal(progress.states, expected)


def test_info_counts_and_draws(tmp_path, one_worker, capsys):
    _, path = partial_run(tmp_path, one_worker, Poisoned())
    progress = read_progress(path)
    picture = tmp_path / "map.png"
    assert main(["info", path, "--map", str(picture)]) == 0
    told = capsys.readouterr().out
    done = progress.count("done") + progress.count("skipped")
    assert f"{done} of 12 chunks" in told
    assert "ArithmeticError: thirteen" in told
    with rasterio.open(picture) as dataset:
        drawn, colors = dataset.read(1), dataset.colormap(1)
    side = 1024 // 4
    assert np.array_equal(drawn[side // 2 :: side, side // 2 :: side], progress.states)
    assert len({colors[state] for state in range(len(STATES))}) == 4
    assert not Path(f"{picture}.aux.xml").exists()


def test_a_map_of_what_is_no_unfinished_output_is_refused(tmp_path, capsys):
    source = write_raster(tmp_path / "scene.tif", np.ones((1, 20, 20), np.uint8))
    assert main(["info", source, "--map", str(tmp_path / "map.png")]) == 2
    assert "no map" in capsys.readouterr().err
    assert not (tmp_path / "map.png").exists()


def test_chunks_that_share_a_pixel_of_the_map_show_the_worst(tmp_path):
    states = np.full((3000, 2100), DONE, np.uint8)
    states[7, 9] = FAILED
    states[1500, 1:4] = (MISSING, SKIPPED, DONE)
    states[2997:, 2097:] = SKIPPED
    write_map(Progress(states, (), {}), tmp_path / "map.png")
    with rasterio.open(tmp_path / "map.png") as dataset:
        drawn = dataset.read(1)
    assert drawn.shape == (1000, 700)
    assert drawn[2, 3] == FAILED
    assert drawn[500, 0] == MISSING
    assert drawn[999, 699] == SKIPPED
    assert np.count_nonzero(drawn == DONE) >= drawn.size - 4


def test_an_index_that_is_not_read_whole(tmp_path):
    """More blocks than the parser of tags takes with them."""
    spec = CogSpec(16 * 600, 16 * 600, 1, "uint8", nodata=255, blocksize=16)
    with WorkFile.create(tmp_path / "w", spec, (160, 160)) as work:
        work.append(encode_chunk(spec, np.ones((1, 160, 160), "u1"), 160, 320, work.levels))
    there, empty, block, size = progress_module._blocks(str(tmp_path / "w"))
    assert (there.shape, block, size) == ((600, 600), 16, (9600, 9600))
    expected = np.zeros((600, 600), bool)
    expected[10:20, 20:30] = True
    np.testing.assert_array_equal(there, expected)
    assert not empty.any()
