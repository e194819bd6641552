"""Reading ahead: order, bounds, errors and depth, with reads that wait for the test."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

import daskinfer as di
from conftest import Pixel
from daskinfer.infer import infer_chunk, release_actor, using_actor
from daskinfer.readahead import ReadAhead
from daskinfer.settle import Choice, settle
from daskinfer.source import ArraySource

WAIT = 30  # seconds after which a test that hangs fails
PATIENCE = 16  # tiles in a row that are early and wait for room, for one step down


class Gate:
    """A read that is held until the test lets it go, and notes who is in it."""

    def __init__(self):
        self.changed = threading.Condition()
        self.started, self.ended, self.allowed = [], [], set()
        self.threads = set()
        self.most = 0

    def __call__(self, window):
        with self.changed:
            self.started.append(window)
            self.threads.add(threading.current_thread())
            self.most = max(self.most, len(self.started) - len(self.ended))
            self.changed.notify_all()
            let_go = self.changed.wait_for(lambda: {window, "all"} & self.allowed, WAIT)
            self.ended.append(window)
            self.changed.notify_all()
        assert let_go
        return window * 10

    def open(self, *windows):
        with self.changed:
            self.allowed.update(windows)
            self.changed.notify_all()

    def await_started(self, *windows):
        with self.changed:
            assert self.changed.wait_for(lambda: set(windows) <= set(self.started), WAIT)

    def await_ended(self, *windows):
        with self.changed:
            assert self.changed.wait_for(lambda: set(windows) <= set(self.ended), WAIT)


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.open("all")


@pytest.fixture
def reading(gate):
    """Makes a `ReadAhead` of some depth, whose reads end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda depth, **options: stack.enter_context(ReadAhead(depth, **options))
        gate.open("all")


# --- order and bounds -----------------------------------------------------------------------------


@given(st.integers(0, 30), st.integers(0, 5), st.lists(st.sampled_from(["hungry", "full"])))
def test_every_window_comes_once_and_in_order_whatever_the_depth_does(count, depth, seen):
    with ReadAhead(depth, most=5) as ahead:
        got = []
        for window in ahead.stream(lambda window: -window, range(count)):
            got.append(window)
            saw = seen.pop() if seen else None
            ahead.adapt(hungry=saw == "hungry", full=saw == "full")
            assert ahead.outstanding <= 5
        assert got == [-n for n in range(count)]
        assert ahead.outstanding == 0


def test_tiles_come_in_order_though_later_ones_are_read_first(reading, gate):
    stream = reading(3).stream(gate, range(4))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, stream)
        gate.await_started(0, 1, 2, 3)
        gate.open(3, 2, 1)
        gate.await_ended(3, 2, 1)
        assert not first.done()
        gate.open(0)
        assert first.result(WAIT) == 0
    assert list(stream) == [10, 20, 30]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_more_than_the_depth_is_read_ahead(reading, gate, depth):
    ahead = reading(depth)
    gate.open(0)
    stream = ahead.stream(gate, range(100))
    assert next(stream) == 0
    gate.await_started(*range(depth + 1))
    gate.open(*range(depth + 1))
    gate.await_ended(*range(depth + 1))
    # All that were read ahead have ended, and wait: nothing further begins until one is taken.
    assert (ahead.outstanding, sorted(gate.started)) == (depth, list(range(depth + 1)))
    gate.open("all")
    assert next(stream) == 10
    assert ahead.outstanding == depth
    stream.close()
    assert gate.most <= depth + 1


def test_at_depth_0_tiles_are_read_in_the_thread_that_asks(reading, gate):
    gate.open("all")
    assert list(reading(0).stream(gate, range(5))) == [0, 10, 20, 30, 40]
    assert gate.threads == {threading.current_thread()}


def test_streams_take_turns_and_share_one_depth(reading, gate, monkeypatch):
    monkeypatch.setattr("daskinfer.readahead._STALLED", WAIT)
    ahead = reading(2)
    with ThreadPoolExecutor(2) as pool:
        gate.open(10)
        first, second = ahead.stream(gate, range(10, 14)), ahead.stream(gate, range(20, 24))
        assert next(first) == 100
        gate.await_started(10, 11, 12)
        waits = pool.submit(next, second)
        # The first has a tile left to begin: nothing of the second is read, whoever is idle.
        gate.open(11, 12)
        gate.await_ended(11, 12)
        assert not waits.done()
        assert sorted(gate.started) == [10, 11, 12]
        # With its last tile the first hands on its turn, and what is left of the depth.
        assert next(first) == 110
        gate.await_started(13, 20)
        assert not waits.done()
        gate.open(20)
        assert waits.result(WAIT) == 200
        assert ahead.outstanding == 2
        gate.open("all")
        assert [*first, *second] == [120, 130, 210, 220, 230]
    assert ahead.outstanding == 0


def test_a_stream_that_waits_for_a_server_loses_its_turn(reading, gate, monkeypatch):
    monkeypatch.setattr("daskinfer.readahead._STALLED", 0.01)
    ahead = reading(0)
    with ThreadPoolExecutor(2) as pool:
        stuck = pool.submit(lambda: list(ahead.stream(gate, [1, 2, 3])))
        gate.await_started(1)
        gate.open(11, 12)
        assert pool.submit(lambda: list(ahead.stream(gate, [11, 12]))).result(WAIT) == [110, 120]
        assert not stuck.done()
        gate.open("all")
        assert stuck.result(WAIT) == [10, 20, 30]


@pytest.mark.parametrize("end", ["error", "close"])
def test_a_stream_that_ends_before_its_last_tile_hands_on_its_turn(end):
    def read(window):
        if window == "broken":
            raise OSError("a broken block")
        return window

    with ReadAhead(0) as ahead:
        stream = ahead.stream(read, [1, "broken", 3, 4])
        assert next(stream) == 1
        if end == "close":
            stream.close()
        else:
            with pytest.raises(OSError, match="broken"):
                next(stream)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: list(ahead.stream(read, [5, 6]))).result(WAIT) == [5, 6]


def test_many_streams_at_once_stay_within_the_depth_together():
    inside, most, lock = [0], [0], threading.Lock()
    streams, depth = 4, 3

    def read(window):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        work = sum(range(window % 7 * 1000))
        with lock:
            inside[0] -= 1
        return window if work >= 0 else None

    with ReadAhead(depth) as ahead, ThreadPoolExecutor(streams) as pool:
        done = list(pool.map(lambda start: list(ahead.stream(read, range(start, start + 200))),
                             range(0, 4000, 1000)))  # fmt: skip
    assert done == [list(range(start, start + 200)) for start in range(0, 4000, 1000)]
    # Beside what is read ahead, each stream reads at most one itself.
    assert most[0] <= depth + streams


@pytest.mark.parametrize("depth", [0, 1, 16])
def test_instant_reads_never_run_further_ahead_than_the_depth_and_the_tile_in_hand(depth):
    read, taken, lock = [0], [0], threading.Lock()
    most = [0]

    def instant(window):
        with lock:
            read[0] += 1
            most[0] = max(most[0], read[0] - taken[0])
        return window

    with ReadAhead(depth) as ahead:
        for window in ahead.stream(instant, range(400)):
            with lock:
                taken[0] += 1
            # A slow model: the mailbox is full at each tile, so that the depth only shrinks.
            ahead.adapt(hungry=False, full=True)
            assert window == taken[0] - 1
    assert (read, taken) == ([400], [400])
    # Those ahead, and the one that was read and is about to be taken.
    assert most[0] <= depth + 1


def test_no_thread_is_started_before_something_is_read_ahead():
    def readers():
        return sum(thread.name.startswith("daskinfer-read") for thread in threading.enumerate())

    before = readers()
    with ReadAhead(0) as ahead:
        assert list(ahead.stream(abs, [1, 2])) == [1, 2]
        assert readers() == before
    with ReadAhead(16) as ahead:
        assert list(ahead.stream(abs, range(50))) == list(range(50))
        assert before < readers() <= before + 16
    assert readers() == before


# --- errors and ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 2, 8])
def test_an_error_is_raised_at_its_tile(depth):
    def read(window):
        if window == 3:
            raise OSError("block 3 is broken")
        return window

    with ReadAhead(depth) as ahead:
        stream = ahead.stream(read, range(10))
        assert [next(stream) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="block 3 is broken"):
            next(stream)
        assert list(stream) == []
        # The others are not held up by it.
        assert list(ahead.stream(read, range(4, 10))) == list(range(4, 10))
    assert ahead.outstanding == 0


def test_what_a_closed_stream_still_reads_counts_until_it_ends(reading, gate):
    ahead = reading(2)
    gate.open(0)
    with contextlib.closing(ahead.stream(gate, range(9))) as stream:
        assert next(stream) == 0
        gate.await_started(1, 2)
    assert ahead.outstanding == 2
    # No third read starts beside the two that nobody wants any more: others read in line.
    gate.open(100, 101)
    gate.threads.clear()
    assert list(ahead.stream(gate, [100, 101])) == [1000, 1010]
    assert gate.threads == {threading.current_thread()}
    assert sorted(gate.started) == [0, 1, 2, 100, 101]
    gate.open("all")
    ahead.close()
    assert ahead.outstanding == 0


def test_streams_go_on_in_line_after_the_close(gate):
    ahead = ReadAhead()
    gate.open("all")
    stream = ahead.stream(gate, range(6))
    assert next(stream) == 0
    ahead.close()
    assert list(stream) == [10, 20, 30, 40, 50]
    assert list(ahead.stream(abs, [-1, -2])) == [1, 2]


@pytest.mark.parametrize(("depth", "most"), [(-1, 4), (5, 4)])
def test_a_depth_out_of_range_is_refused_with_both_numbers(depth, most):
    with pytest.raises(ValueError, match=f"between 0 and most, {most}, got {depth}"):
        ReadAhead(depth, most=most)


# --- depth ----------------------------------------------------------------------------------------


def test_tiles_of_nodata_that_come_late_are_read_ahead_too():
    raw = np.zeros((1, 40, 400), "uint16")
    source = ArraySource(xr.DataArray(raw, dims=("band", "y", "x"), attrs={"_FillValue": 0}))
    inference, _ = settle(
        source, di.load_model(Pixel(), output="values"), Choice(tile=32, chunk=400)
    )
    with using_actor(inference) as actor, ReadAhead(0, most=4) as ahead:
        done = infer_chunk(inference, (0, 0), source.read, actor, ahead)
        depth = ahead.depth
    release_actor(inference)
    assert done.tiles == 0
    assert depth > 0


class Clock:
    """A device that takes a tile per step out of a mailbox, and reads that take `latency` steps."""

    def __init__(self, latency, room=6):
        self.now, self.latency, self.room = 0, latency, room
        self.mailbox, self.idle = 0, 0

    def advance(self, to):
        while self.now < to:
            self.now += 1
            self.idle += not self.mailbox
            self.mailbox = max(0, self.mailbox - 1)

    def put(self):
        while self.mailbox >= self.room:
            self.advance(self.now + 1)
        self.mailbox += 1

    def read(self, window):
        self.advance(self.now + self.latency)
        return window

    def executor(self, *args, initializer=None):
        return self

    def submit(self, read, window):
        return Read(self, window)

    def shutdown(self):
        pass


class Read:
    """A read in a thread of its own, on a `Clock`."""

    def __init__(self, clock, window):
        self.clock, self.window, self.due = clock, window, clock.now + clock.latency

    def done(self):
        return self.due <= self.clock.now

    def result(self):
        self.clock.advance(self.due)
        return self.window

    def cancel(self):
        return False

    def add_done_callback(self, function):
        self.clock.advance(self.due)
        function(self)


def depths(ahead, read, tiles, *, hungry, full):
    """Depth after each tile, where the mailbox always looks the same."""
    for _ in ahead.stream(read, range(tiles)):
        ahead.adapt(hungry=hungry, full=full)
        yield ahead.depth


@pytest.fixture
def clocked(monkeypatch):
    def make(latency):
        clock = Clock(latency)
        monkeypatch.setattr("daskinfer.readahead.ThreadPoolExecutor", clock.executor)
        return clock

    return make


@pytest.mark.parametrize("latency", [0, 1, 2, 5, 12, 30])
def test_the_depth_settles_where_the_device_is_just_fed(clocked, latency):
    clock, ahead, seen = clocked(latency), ReadAhead(), []
    for _ in ahead.stream(clock.read, range(3000)):
        if len(seen) == 1000:
            clock.idle = 0
        ahead.adapt(hungry=clock.mailbox == 0, full=clock.mailbox == clock.room)
        clock.put()
        seen.append(ahead.depth)
    # A read of 5 steps needs 5 at a time; one of no time needs none.
    assert set(seen[1000:]) == {min(latency, 16)}
    # The device idles where 16 at a time are too few for it: 16 tiles come in 30 steps.
    expected = 2000 * (30 / 16 - 1) if latency == 30 else 0
    assert clock.idle == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("latency", [0, 1, 3, 9])
def test_the_depth_settles_in_short_streams_too(clocked, latency):
    clock, ahead, seen = clocked(latency), ReadAhead(), []
    for _ in range(150):
        for _ in ahead.stream(clock.read, range(16)):
            ahead.adapt(hungry=clock.mailbox == 0, full=clock.mailbox == clock.room)
            clock.put()
            seen.append(ahead.depth)
    assert max(seen[1200:]) <= latency + 2


def test_a_hungry_device_deepens_at_once_up_to_the_most(clocked):
    late = clocked(100).read
    steps = list(depths(ReadAhead(most=4), late, 20, hungry=True, full=False))
    # The first tile tells nothing.
    assert steps == [1, 1, 2, 3] + [4] * 16


def test_a_hungry_device_whose_tiles_come_early_is_not_helped_by_reading(clocked):
    early = clocked(0).read
    assert set(depths(ReadAhead(3), early, 50, hungry=True, full=False)) == {3}


def test_early_tiles_and_a_full_mailbox_go_down_slowly_as_far_as_none(clocked):
    early = clocked(0).read
    steps = list(depths(ReadAhead(2), early, 4 * PATIENCE, hungry=False, full=True))
    expected = [2] * PATIENCE + [1] * PATIENCE + [0] * 2 * PATIENCE
    assert steps == expected


def test_a_full_mailbox_whose_tiles_come_late_changes_nothing(clocked):
    late = clocked(100).read
    assert set(depths(ReadAhead(2), late, 4 * PATIENCE, hungry=False, full=True)) == {2}


def test_a_hungry_moment_undoes_the_patience_and_a_calm_one_does_not(clocked):
    early = clocked(0).read
    ahead = ReadAhead(2)
    for n, _ in enumerate(ahead.stream(early, range(100))):
        ahead.adapt(hungry=n % PATIENCE == 0, full=n % PATIENCE > 0)
        assert ahead.depth == 2
    for n, _ in zip(range(2 * PATIENCE + 2), ahead.stream(early, range(100)), strict=False):
        ahead.adapt(hungry=False, full=n % 2 == 1)
    assert ahead.depth == 1


def test_a_mailbox_of_one_batch_that_is_full_and_hungry_is_not_helped_by_reading(clocked):
    late = clocked(100).read
    assert set(depths(ReadAhead(1), late, 50, hungry=True, full=True)) == {1}
