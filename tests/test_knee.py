"""The batch size beyond which a device gets no faster."""

from __future__ import annotations

import numpy as np
import pytest

from daskinfer.device import FunctionDevice
from daskinfer.knee import Knee, batch_knee, time_batch


def test_a_device_that_takes_the_same_time_for_any_batch_gets_the_largest():
    assert batch_knee(lambda size: 1.0, 32).batch_size == 32
    assert batch_knee(lambda size: 1.0, 24).batch_size == 16


def test_a_device_that_takes_tiles_one_by_one_gets_one_and_two_are_tried():
    knee = batch_knee(lambda size: 0.5 * size, 32)
    assert knee == Knee(1, {1: 2.0, 2: 2.0})


@pytest.mark.parametrize("parallel", [2, 4, 8])
def test_a_device_of_so_many_lanes_gets_a_batch_that_fills_them(parallel):
    assert batch_knee(lambda size: -(-size // parallel), 32).batch_size == parallel


def test_sizes_beyond_the_memory_are_not_taken():
    def seconds(size):
        if size > 4:
            raise MemoryError
        return 1.0

    assert batch_knee(seconds, 32) == Knee(4, {1: 1.0, 2: 2.0, 4: 4.0})


def test_a_device_without_memory_for_one_tile_is_left_to_the_run_to_refuse():
    def seconds(size):
        raise MemoryError

    assert batch_knee(seconds, 8) == Knee(1, {})


def test_the_text_says_what_was_measured():
    assert str(Knee(2, {1: 10.0, 2: 19.5})) == "2 (tiles/s by batch size: 1: 10, 2: 19.5)"


def test_a_batch_is_timed_after_a_pass_that_does_not_count():
    seen = []

    def function(batch, valid):
        seen.append((batch.shape, batch.dtype, batch.min(), batch.max()))
        return batch

    assert time_batch(FunctionDevice(function), (3, 8, 6), "uint16", 5, repeats=2) > 0
    assert seen == 3 * [((5, 3, 8, 6), np.dtype("uint16"), 1, 1)]
