"""Histograms against numpy's quantiles; spans with a clock of their own."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.spans import STAGES, Recorder, StageTimes


def times_of(values):
    recorder = Recorder()
    for value in values:
        recorder.add("read", 10.0, 10.0 + value)
    return recorder.times()["read"]


@given(
    st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=200),
    st.sampled_from([0.01, 0.5, 0.95, 0.99, 1.0]),
)
def test_quantiles_are_those_of_numpy_to_ten_percent(values, share):
    expected = np.quantile(values, share, method="inverted_cdf")
    assert times_of(values).quantile(share) == pytest.approx(expected, rel=0.1)


def test_totals_and_counts_are_exact_and_survive_pickling():
    times = pickle.loads(pickle.dumps(times_of([0.25, 0.5, 0.0])))
    assert times.count == 3
    assert times.total == pytest.approx(0.75)


def test_no_durations_have_the_quantile_zero():
    assert StageTimes().quantile(0.5) == 0.0


def test_times_of_processes_add_up_in_the_order_of_the_stages():
    one = {"forward": times_of([1.0, 1.0]), "read": times_of([0.1])}
    other = {"read": times_of([0.1, 0.1])}
    merged = StageTimes.merged([one, other])
    assert list(merged) == ["read", "forward"]
    assert (merged["read"].count, merged["forward"].count) == (3, 2)
    assert merged["read"].total == pytest.approx(0.3)


def test_spans_are_kept_only_while_tracing_and_drained_once():
    recorder = Recorder()
    recorder.add("read", 1.0, 2.0, chunk=1)
    assert recorder.drain() == ()
    recorder.tracing = True
    recorder.add("read", 1.0, 3.5, chunk=2)
    (span,) = recorder.drain()
    assert (span.stage, span.seconds, span.about) == ("read", 2.5, {"chunk": 2})
    assert span.start == recorder.epoch + 1.0
    assert span.thread == threading.current_thread().name
    assert recorder.drain() == ()


def test_a_span_is_recorded_though_its_block_raises():
    recorder = Recorder()
    with pytest.raises(OSError, match="torn"), recorder.span("append"):
        raise OSError("torn")
    assert recorder.times()["append"].count == 1


def test_a_cleared_recorder_knows_nothing():
    recorder = Recorder(tracing=True)
    recorder.add("read", 1.0, 2.0)
    recorder.clear()
    assert recorder.times() == {}
    assert recorder.drain() == ()


def test_threads_lose_no_span():
    recorder = Recorder(tracing=True)

    def work():
        for n in range(200):
            recorder.add("read", n, n + 0.5)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.times()["read"].count == 1600
    assert recorder.times()["read"].total == 800.0
    assert len(recorder.drain()) == 1600


def test_stages_have_names_of_their_own():
    assert len(set(STAGES)) == len(STAGES)
