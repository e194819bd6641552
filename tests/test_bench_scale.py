"""``bench scale``: few chunks of each way, and what is calculated from them."""

from __future__ import annotations

import pytest

from daskinfer import dispatch
from daskinfer.bench import scale
from daskinfer.bench.harness import Result
from daskinfer.bench.manychunks import empty_task, measure_chunks


@pytest.mark.parametrize(
    "way", ["single", *(pytest.param(way, marks=pytest.mark.slow) for way in ("grouped", "engine"))]
)
def test_chunks_are_counted_and_bounded(way):
    values = measure_chunks({"way": way, "chunks": 400, "workers": 1})
    assert set(values) <= {column.key for column in scale.COLUMNS}
    assert values["ms"] > 0
    assert values["scheduler_mb"] > 10
    if way == "single":
        assert values["tasks"] == 400
        assert values["held"] <= 64
    elif way == "grouped":
        assert 400 / dispatch.MOST <= values["tasks"] < 200
        assert values["held"] <= 2


def test_a_task_of_the_benchmark_returns_what_a_real_one_does():
    result = empty_task("run", (3, 4))
    assert [chunk.chunk for chunk in result.done] == [3, 4]
    assert (result.left, result.failed) == ((), ())


def test_larger_chunks_let_a_scheduler_feed_more_devices():
    fed = [scale.devices_fed(1.0, 10, side) for side in (128, 512, 2048, 4096)]
    assert fed == sorted(fed)
    # 0.8 s of 1 ms tasks are 800 tasks a second; each 4096 px chunk lasts 1.68 s.
    assert fed[-1] == pytest.approx(800 * 4096**2 / 1e7)
    assert fed[0] == pytest.approx(800 * dispatch.MOST * 128**2 / 1e7)


def test_it_assumes_the_groups_that_the_runner_makes():
    assert scale._TASK_SECONDS == dispatch.TASK_SECONDS
    assert scale._MOST == dispatch.MOST


def test_notes_name_the_place_that_is_the_limit():
    run = {"scheduler_ms": 1.0, "client_ms": 2.0}
    values = {("", "single, 100 chunks"): [run]}
    result = Result("scale", scale.COLUMNS, values, (), {"": {"workers": 2, "speed": 10.0}})
    assert "A task costs the client 2.00 ms" in scale.notes(result, "")[0]
