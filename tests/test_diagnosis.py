"""The sentence that a user needs, for each thing that can limit a run."""

from __future__ import annotations

import dataclasses

import pytest

from daskinfer.diagnosis import Load, diagnose
from daskinfer.spans import StageTimes


def stages(**seconds):
    return {name.replace("_", " "): StageTimes({0: 1}, total) for name, total in seconds.items()}


LOAD = Load(
    busy=0.5,
    busy_whole=0.48,
    fill=1.0,
    batches=100,
    batch_size=8,
    shrunk=False,
    stages=stages(read=1.0, room=0.1, results=0.1, encode=0.2, append=0.1),
    device="cuda:0, NVIDIA H200",
    precision="float32",
)


def told(**changes):
    return diagnose(dataclasses.replace(LOAD, **changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(busy=0.97, busy_whole=0.95), "device is the limit .97%.*precision='bfloat16'"),
        (dict(busy=0.97, busy_whole=0.95, precision="bfloat16"), "device is the limit.*compile"),
        (dict(busy=0.97, busy_whole=0.95, device="mine"), "device is the limit.*more devices"),
        (dict(busy=0.97, busy_whole=0.95, device="cpu"), "device is the limit.*GPU"),
        ({}, "readers are behind .*idle for 50%.*threads per worker"),
        (dict(source_note="the source is striped"), "readers are behind.*: the source is striped"),
        (
            dict(stages=stages(read=0.2, encode=2.0, append=0.5, results=0.1)),
            "writing is behind.*level=",
        ),
        (dict(stages=stages(read=0.2, room=0.5, results=2.0)), "too few chunks at once"),
    ],
)
def test_the_first_sentence_names_what_limits_the_run(changes, expected):
    import re

    assert re.search(expected, told(**changes)[0]), told(**changes)[0]


def test_a_busy_device_in_a_short_run_is_told_from_its_start_and_finish():
    assert "start and finish took 50% of the run" in told(busy=0.96, busy_whole=0.48)[1]


def test_part_filled_batches_are_told():
    assert any("40% full" in note for note in told(fill=0.4))
    assert not any("full" in note for note in told(fill=0.4, batches=2))


def test_a_batch_that_was_cut_is_told_with_what_to_pass():
    assert any("batch_size=2" in note for note in told(shrunk=True, batch_size=2))


def test_a_run_without_batches_has_no_limit():
    assert told(batches=0) == ()
