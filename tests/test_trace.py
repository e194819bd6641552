"""A trace is JSON that viewers open, with one lane per thread."""

from __future__ import annotations

import json

import pytest

from daskinfer.monitor import ChunkDone
from daskinfer.spans import Span
from daskinfer.trace import TraceWriter


def events_of(path):
    return json.loads(path.read_text())["traceEvents"]


def chunk_done(process, *spans):
    return ChunkDone(0, (0, 0, 8, 8), 1, 0.1, "tcp://w", tuple(spans), process)


def test_spans_become_complete_events_in_microseconds(tmp_path):
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        trace(chunk_done(("host", 7), Span("read", 12.25, 0.5, "reader", {"chunk": 3})))
    (event,) = [event for event in events_of(path) if event["ph"] == "X"]
    assert event["name"] == "read"
    assert event["ts"] == 12.25e6
    assert event["dur"] == 0.5e6
    assert event["args"] == {"chunk": 3}


def test_each_process_and_each_of_its_threads_has_a_lane_with_a_name(tmp_path):
    path = tmp_path / "trace.json"
    spans = [Span("read", 1.0, 1.0, name, {}) for name in ("a", "b", "a")]
    with TraceWriter(path) as trace:
        trace(chunk_done(("one", 1), *spans))
        trace(chunk_done(("two", 2), spans[0]))
    events = events_of(path)
    lanes = [(event["pid"], event["tid"]) for event in events if event["ph"] == "X"]
    assert len(set(lanes)) == 3
    assert lanes[0] == lanes[2]
    named = {
        event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"
    }
    assert named == {"one process 1": lanes[0][0], "two process 2": lanes[3][0]}
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert threads == ["a", "b", "a"]


def test_a_trace_that_ends_early_is_valid(tmp_path):
    path = tmp_path / "trace.json"
    trace = TraceWriter(path)
    trace(chunk_done(("one", 1), Span("read", 1.0, 1.0, "a", {})))
    trace.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert [event["ph"] for event in events_of(path)] == ["M", "M", "X"]


def test_a_trace_without_spans_is_valid(tmp_path):
    path = tmp_path / "trace.json"
    with TraceWriter(path):
        pass
    assert events_of(path) == []


def test_a_trace_in_a_missing_folder_is_refused_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        TraceWriter(tmp_path / "nowhere" / "trace.json")
