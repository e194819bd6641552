"""`InferenceActor` with fakes: no torch, no sleeps; waiting is proved by events, never by time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from daskinfer.actor import InferenceActor
from daskinfer.device import Device
from daskinfer.metrics import ActorMetrics
from daskinfer.spans import Recorder

SHAPE = (2, 4, 3)
# Nothing may take this long; a test that reaches it has hung.
HANG = 60.0
# With this, only a full batch or the last producer's leaving can send a batch off.
NEVER = 3600.0


def tile(number):
    return np.full(SHAPE, number, np.int32)


class Doubles:
    """Batch function that doubles, and keeps what it was given."""

    def __init__(self):
        self.batches = []
        self.masks = []

    def __call__(self, batch, valid):
        self.batches.append(batch.copy())
        self.masks.append(None if valid is None else valid.copy())
        return batch * 2

    @property
    def sizes(self):
        return [len(batch) for batch in self.batches]


class Gated(Doubles):
    """Doubles, but holds every batch on the device until the gate opens."""

    def __init__(self):
        super().__init__()
        self.started = threading.Event()
        self.gate = threading.Event()

    def __call__(self, batch, valid):
        self.started.set()
        assert self.gate.wait(HANG)
        return super().__call__(batch, valid)


def told_when_full(actor):
    """An event that is set by a caller who finds the mailbox full, before it waits."""
    # Under the actor's lock: nobody can make room between this look and the waiting.
    return told(actor, "wait_for", lambda predicate: not predicate())


def told_when_patient(actor):
    """An event that is set when the device thread waits for more tiles of an open batch."""
    return told(actor, "wait", lambda timeout=None: timeout is not None)


def told(actor, method, when):
    event, original = threading.Event(), getattr(actor._changed, method)

    def telling(*arguments):
        if when(*arguments):
            event.set()
        return original(*arguments)

    setattr(actor._changed, method, telling)
    return event


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_ten_tiles_in_batches_of_four_run_as_four_four_two():
    function = Doubles()
    with InferenceActor(function, SHAPE, "int32", batch_size=4, timeout=NEVER) as actor:
        with actor.producer():
            futures = [actor.submit(tile(n)) for n in range(10)]
        results = [future.result(HANG) for future in futures]
    assert function.sizes == [4, 4, 2]
    for n, result in enumerate(results):
        assert type(result) is np.ndarray
        assert np.array_equal(result, 2 * tile(n))


def test_a_batch_that_is_not_full_waits_for_a_producer_at_work():
    function = Doubles()
    with InferenceActor(function, SHAPE, "int32", batch_size=4, timeout=NEVER) as actor:
        patient = told_when_patient(actor)
        with actor.producer():
            first = actor.submit(tile(0))
            assert patient.wait(HANG)
            assert not first.done()
            futures = [first, *(actor.submit(tile(n)) for n in (1, 2, 3))]
            results = [int(future.result(HANG).max()) for future in futures]
    assert function.sizes == [4]
    assert results == [0, 2, 4, 6]


def test_a_batch_that_is_not_full_leaves_when_the_last_producer_does():
    function = Doubles()
    with InferenceActor(function, SHAPE, "int32", batch_size=8, timeout=NEVER) as actor:
        with actor.producer():
            futures = [actor.submit(tile(n)) for n in range(3)]
            assert not any(future.done() for future in futures)
        for n, future in enumerate(futures):
            assert np.array_equal(future.result(HANG), 2 * tile(n))
    assert function.sizes == [3]


def test_a_batch_that_is_not_full_leaves_after_the_timeout_while_a_producer_is_at_work():
    with (
        InferenceActor(Doubles(), SHAPE, "int32", batch_size=8, timeout=0.01) as actor,
        actor.producer(),
    ):
        assert np.array_equal(actor.submit(tile(5)).result(HANG), 2 * tile(5))


def test_tiles_of_different_producers_share_a_batch(pool):
    function, here = Doubles(), threading.Barrier(2, timeout=HANG)

    def produce(actor, number):
        with actor.producer():
            here.wait()
            future = actor.submit(tile(number))
        return future.result(HANG)

    with InferenceActor(function, SHAPE, "int32", batch_size=2, timeout=NEVER) as actor:
        waiting = [pool.submit(produce, actor, n) for n in (1, 2)]
        assert np.array_equal(waiting[0].result(HANG), 2 * tile(1))
        assert np.array_equal(waiting[1].result(HANG), 2 * tile(2))
    assert function.sizes == [2]


def test_many_producers_get_back_their_own_tiles(pool):
    def produce(actor, first):
        with actor.producer():
            futures = [actor.submit(tile(first + n)) for n in range(25)]
        return [int(future.result(HANG).max()) for future in futures]

    function = Doubles()
    with InferenceActor(function, SHAPE, "int32", batch_size=4, ring=2) as actor:
        answers = list(pool.map(lambda i: produce(actor, 100 * i), range(8)))
    assert answers == [[2 * (100 * i + n) for n in range(25)] for i in range(8)]
    assert sum(function.sizes) == 200
    assert max(function.sizes) <= 4


def test_two_threads_that_wait_for_one_tile_both_get_it(pool):
    function = Gated()
    with InferenceActor(function, SHAPE, "int32", batch_size=1) as actor:
        future = actor.submit(tile(7))
        waiting = [pool.submit(future.result, HANG) for _ in range(2)]
        assert function.started.wait(HANG)
        function.gate.set()
        for waiter in waiting:
            assert np.array_equal(waiter.result(HANG), 2 * tile(7))


def test_results_stay_as_they_are_when_the_function_gives_its_input_back():
    with InferenceActor(lambda batch, valid: batch, SHAPE, "int32", batch_size=1) as actor:
        results = [actor.submit(tile(n)).result(HANG) for n in range(9)]
    assert [int(result.max()) for result in results] == list(range(9))


def test_a_caller_that_cancels_neither_stops_the_actor_nor_its_batch():
    function = Gated()
    with InferenceActor(function, SHAPE, "int32", batch_size=2, timeout=NEVER) as actor:
        with actor.producer():
            futures = [actor.submit(tile(n)) for n in (1, 2)]
        assert not futures[0].cancel()
        function.gate.set()
        assert np.array_equal(futures[1].result(HANG), 2 * tile(2))
        assert np.array_equal(actor.submit(tile(3)).result(HANG), 2 * tile(3))


def test_read_only_tiles_are_copied_before_submit_returns_and_never_changed():
    def in_place(batch, valid):
        assert gate.wait(HANG)
        batch *= 2
        return batch

    gate, owned = threading.Event(), tile(7)
    given = owned[:]
    given.flags.writeable = False
    with InferenceActor(in_place, SHAPE, "int32", batch_size=1) as actor:
        future = actor.submit(given)
        owned[:] = 5
        gate.set()
        assert np.array_equal(future.result(HANG), tile(14))
    assert (given == 5).all()


def test_tiles_of_another_byte_order_and_with_negative_strides_keep_their_numbers():
    numbers = np.arange(np.prod(SHAPE), dtype=">i4").reshape(SHAPE)[:, ::-1, ::-1]
    with InferenceActor(Doubles(), SHAPE, "int32", batch_size=1) as actor:
        assert np.array_equal(actor.submit(numbers).result(HANG), 2 * numbers)


def test_masked_and_unmasked_tiles_share_a_batch_and_old_masks_are_forgotten():
    function = Doubles()
    mask = np.zeros(SHAPE[1:], bool)
    with InferenceActor(function, SHAPE, "int32", batch_size=2, ring=1, timeout=NEVER) as actor:
        for masks in ((mask, None), (None, None), (None, mask)):
            with actor.producer():
                futures = [actor.submit(tile(1), valid) for valid in masks]
            for future in futures:
                future.result(HANG)
    first, second, third = function.masks
    every = np.ones(SHAPE[1:], bool)
    assert np.array_equal(first, [mask, every])
    assert second is None
    assert np.array_equal(third, [every, mask])


@pytest.mark.parametrize(
    ("given", "valid", "error", "message"),
    [
        (np.zeros((2, 4, 4), np.int32), None, ValueError, r"\(2, 4, 4\).*\(2, 4, 3\)"),
        (np.zeros((1, 2, 4, 3), np.int32), None, ValueError, r"\(1, 2, 4, 3\)"),
        (tile(0).astype("int64"), None, TypeError, "int64.*int32"),
        (tile(0).astype("float32"), None, TypeError, "float32.*int32"),
        (tile(0), np.ones((1, 3), bool), ValueError, r"mask.*\(1, 3\).*\(4, 3\)"),
    ],
)
def test_a_tile_that_does_not_fit_is_refused_and_takes_no_slot(given, valid, error, message):
    function = Doubles()
    with InferenceActor(function, SHAPE, "int32", batch_size=2, timeout=NEVER) as actor:
        with actor.producer():
            with pytest.raises(error, match=message):
                actor.submit(given, valid)
            futures = [actor.submit(tile(n)) for n in (1, 2)]
        assert np.array_equal(futures[1].result(HANG), 2 * tile(2))
    assert function.sizes == [2]


class NeedsTwoError(Exception):
    """An error that cannot be made again from its message."""

    def __init__(self, where, why):
        super().__init__(f"{where}: {why}")
        self.where = where


class Unlucky(Doubles):
    """Doubles, but fails on every batch with a 13 in it."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __call__(self, batch, valid):
        doubled = super().__call__(batch, valid)
        if (batch == 13).any():
            raise self.error
        return doubled


@pytest.mark.parametrize(
    "error",
    [ValueError("13"), NeedsTwoError("tile", 13), SystemExit(13)],
    ids=lambda error: type(error).__name__,
)
def test_an_error_reaches_the_caller_of_the_tile_that_caused_it_and_no_other(error):
    function, numbers = Unlucky(error), (1, 2, 3, 4, 13, 6, 7, 8, 9)
    with InferenceActor(function, SHAPE, "int32", batch_size=4, timeout=NEVER) as actor:
        with actor.producer():
            futures = [actor.submit(tile(n)) for n in numbers]
        for n, future in zip(numbers, futures, strict=True):
            if n == 13:
                assert future.exception(HANG) is error
            else:
                assert np.array_equal(future.result(HANG), 2 * tile(n))
    # The batch that failed is run again in halves.
    assert function.sizes == [4, 4, 2, 1, 1, 2, 1]


def test_a_batch_too_large_for_the_device_gets_through_in_parts():
    def small(batch, valid):
        if len(batch) > 2:
            raise MemoryError
        return np.where(valid[:, None], batch * 2, -1)

    masks = [np.full(SHAPE[1:], n % 2 == 0) for n in range(5)]
    with InferenceActor(small, SHAPE, "int32", batch_size=5, timeout=NEVER) as actor:
        with actor.producer():
            futures = [actor.submit(tile(n), mask) for n, mask in enumerate(masks)]
        results = [future.result(HANG) for future in futures]
    assert [set(result.ravel().tolist()) for result in results] == [{0}, {-1}, {4}, {-1}, {8}]


def test_a_function_that_returns_no_result_is_an_error_with_both_numbers():
    def nothing(batch, valid):
        return batch[:0].copy()

    with InferenceActor(nothing, SHAPE, "int32", batch_size=3, timeout=NEVER) as actor:
        with actor.producer():
            futures = [actor.submit(tile(n)) for n in range(3)]
        for future in futures:
            with pytest.raises(ValueError, match="0 results for 3 tiles"):
                future.result(HANG)


def test_submit_blocks_while_the_ring_is_full_and_goes_on_when_a_batch_is_done(pool):
    function = Gated()
    batch_size, ring = 2, 3
    with InferenceActor(
        function, SHAPE, "int32", batch_size=batch_size, ring=ring, timeout=NEVER
    ) as actor:
        full = told_when_full(actor)
        with actor.producer():
            # These return although nothing has run: the mailbox holds them.
            futures = [actor.submit(tile(n)) for n in range(batch_size * ring)]
        assert function.started.wait(HANG)
        assert not full.is_set()
        late = pool.submit(actor.submit, tile(99))
        assert full.wait(HANG)
        assert not late.done()
        assert function.batches == []
        function.gate.set()
        assert np.array_equal(late.result(HANG).result(HANG), 2 * tile(99))
        for n, future in enumerate(futures):
            assert np.array_equal(future.result(HANG), 2 * tile(n))


def test_close_runs_what_is_left_though_a_producer_is_still_at_work():
    function = Doubles()
    actor = InferenceActor(function, SHAPE, "int32", batch_size=8, timeout=NEVER)
    with actor.producer():
        futures = [actor.submit(tile(n)) for n in range(3)]
        actor.close()
        assert all(future.done() for future in futures)
    assert function.sizes == [3]
    assert np.array_equal(futures[2].result(), 2 * tile(2))


def test_a_closed_actor_refuses_tiles_and_can_be_closed_again():
    actor = InferenceActor(Doubles(), SHAPE, "int32")
    actor.close()
    actor.close()
    with pytest.raises(RuntimeError, match="closed"):
        actor.submit(tile(0))


def test_a_caller_that_waits_for_room_is_told_when_the_actor_closes(pool):
    function = Gated()
    actor = InferenceActor(function, SHAPE, "int32", batch_size=1, ring=1)
    full = told_when_full(actor)
    first = actor.submit(tile(1))
    late = pool.submit(actor.submit, tile(2))
    assert full.wait(HANG)
    closing = pool.submit(actor.close)
    assert isinstance(late.exception(HANG), RuntimeError)
    function.gate.set()
    closing.result(HANG)
    assert np.array_equal(first.result(HANG), 2 * tile(1))


def test_close_lets_go_of_the_model():
    freed = threading.Event()

    class Heavy(Doubles):
        def __del__(self):
            freed.set()

    actor = InferenceActor(Heavy(), SHAPE, "int32")
    actor.submit(tile(1)).result(HANG)
    actor.close()
    assert freed.wait(HANG)


def test_metrics_count_tiles_batches_and_slots_of_every_result_handed_out():
    with InferenceActor(Doubles(), SHAPE, "int32", batch_size=4, timeout=NEVER) as actor:
        assert actor.metrics == ActorMetrics(batch_size=4, device="a device of its own")
        assert actor.metrics.fill == 0
        with actor.producer():
            futures = [actor.submit(tile(n)) for n in range(10)]
        for future in futures:
            future.result(HANG)
        done = actor.metrics
    assert (done.tiles, done.batches, done.slots) == (10, 3, 12)
    assert done.fill == 10 / 12
    assert 0 < done.busy <= done.elapsed


class Staged(Device):
    """Tells which batch is in which stage, and holds each stage until it is let go."""

    def __init__(self, fails=()):
        self.entered = {stage: threading.Semaphore(0) for stage in ("in", "forward", "out")}
        self.go = {stage: threading.Semaphore(0) for stage in ("in", "forward", "out")}
        self.inside = set()
        self.at_once = []
        self.fails = fails
        self.lock = threading.Lock()

    def _stage(self, stage, batch):
        with self.lock:
            assert stage not in {name for name, _ in self.inside}
            self.inside.add((stage, int(batch.max())))
            self.at_once.append(frozenset(self.inside))
        self.entered[stage].release()
        assert self.go[stage].acquire(timeout=HANG)
        with self.lock:
            self.inside.discard((stage, int(batch.max())))
        if stage in self.fails:
            raise OSError(f"{stage} failed")
        return batch

    def copy_in(self, batch, valid):
        return self._stage("in", batch)

    def forward(self, loaded):
        return self._stage("forward", loaded)

    def copy_out(self, result):
        return self._stage("out", result).copy()

    def let(self, **times):
        for stage, count in times.items():
            for _ in range(count):
                self.go[stage].release()

    def wait(self, *stages):
        for stage in stages:
            assert self.entered[stage].acquire(timeout=HANG)


def test_one_batch_is_copied_in_while_one_runs_and_one_is_copied_out():
    device = Staged()
    with InferenceActor(device, SHAPE, "int32", batch_size=1, timeout=NEVER) as actor:
        with actor.producer():
            futures = [actor.submit(tile(n)) for n in (1, 2, 3)]
            device.let(**{"in": 2}, forward=1)
            device.wait("in", "in", "in", "forward", "forward", "out")
            # All three stages are held now, each by another batch.
            assert frozenset({("in", 3), ("forward", 2), ("out", 1)}) in device.at_once
            device.let(**{"in": 1}, forward=2, out=3)
        assert [int(future.result(HANG).max()) for future in futures] == [1, 2, 3]


@pytest.mark.parametrize("stage", ["in", "out"])
def test_an_error_while_copying_reaches_the_callers_of_that_batch_and_the_actor_lives_on(stage):
    device = Staged(fails={stage})
    device.let(**{"in": 99}, forward=99, out=99)
    with InferenceActor(device, SHAPE, "int32", batch_size=2, timeout=NEVER) as actor:
        with actor.producer():
            futures = [actor.submit(tile(n)) for n in (1, 2)]
        for future in futures:
            with pytest.raises(OSError, match=f"{stage} failed"):
                future.result(HANG)
        device.fails = ()
        assert np.array_equal(actor.submit(tile(3)).result(HANG), tile(3))


def test_after_a_batch_too_large_for_the_device_batches_are_no_larger_than_what_fits():
    sizes = []

    def small(batch, valid):
        sizes.append(len(batch))
        if len(batch) > 2:
            raise MemoryError("2 fit")
        return batch * 2

    with InferenceActor(small, SHAPE, "int32", batch_size=8, timeout=NEVER) as actor:
        for _ in range(2):
            with actor.producer():
                futures = [actor.submit(tile(n)) for n in range(8)]
            assert [int(future.result(HANG).max()) for future in futures] == [
                2 * n for n in range(8)
            ]
        metrics = actor.metrics
    # The first eight: whole, then in halves; the next eight in twos from the start.
    assert sizes == [8, 4, 2, 2, 4, 2, 2, 2, 2, 2, 2]
    assert (metrics.batch_size, metrics.shrunk) == (2, True)
    assert metrics.batches == 1 + 4


def test_a_tile_that_alone_is_too_large_for_the_device_says_so_with_its_shape():
    def none_fits(batch, valid):
        raise MemoryError("out of memory")

    with InferenceActor(none_fits, SHAPE, "int32", batch_size=2, timeout=NEVER) as actor:
        future = actor.submit(tile(1))
        with pytest.raises(
            MemoryError, match=r"one tile of .* = \(2, 4, 3\): pass a smaller tile="
        ):
            future.result(HANG)


def test_batches_of_fixed_size_are_run_whole_and_give_only_the_tiles_that_were_in_them():
    function = Doubles()
    with InferenceActor(function, SHAPE, "int32", batch_size=4, timeout=NEVER, fixed=True) as actor:
        with actor.producer():
            futures = [actor.submit(tile(n)) for n in range(1, 7)]
        results = [int(future.result(HANG).max()) for future in futures]
        assert (actor.metrics.tiles, actor.metrics.slots) == (6, 8)
    assert function.sizes == [4, 4]
    assert results == [2, 4, 6, 8, 10, 12]


def test_a_batch_that_is_not_full_does_not_leave_while_the_device_is_at_work():
    """Waiting costs nothing then, and the batch may still fill up."""
    function = Gated()
    with InferenceActor(function, SHAPE, "int32", batch_size=2, timeout=0) as actor:
        first = actor.submit(tile(1))
        assert function.started.wait(HANG)
        # No producer is announced, and the timeout is over at once: still it waits for its pair.
        second, third = actor.submit(tile(2)), actor.submit(tile(3))
        function.gate.set()
        for n, future in enumerate((first, second, third), 1):
            assert np.array_equal(future.result(HANG), 2 * tile(n))
    assert function.sizes == [1, 2]


def test_a_device_that_runs_behind_its_calls_tells_when_it_was_busy():
    class Behind(Device):
        def forward(self, loaded):
            return loaded[0]

        def interval(self, result):
            return float(result.max()), float(result.max()) + 0.75

    with InferenceActor(Behind(), SHAPE, "int32", batch_size=1, timeout=NEVER) as actor:
        for n in (100, 101):
            actor.submit(tile(n)).result(HANG)
        metrics = actor.metrics
    assert metrics.busy == 1.5
    assert metrics.elapsed == pytest.approx(1.75)


def test_every_stage_of_every_tile_and_batch_is_timed_and_traced():
    recorder = Recorder(tracing=True)
    with InferenceActor(
        Doubles(), SHAPE, "int32", batch_size=2, timeout=NEVER, recorder=recorder
    ) as actor:
        with actor.producer():
            futures = [actor.submit(tile(n), label=chunk) for n, chunk in ((1, 7), (2, 8), (3, 8))]
        for future in futures:
            future.result(HANG)
    counts = {stage: times.count for stage, times in recorder.times().items()}
    assert counts == {"room": 3, "copy in": 2, "queue": 2, "forward": 2, "copy out": 2}
    forward = [span for span in recorder.drain() if span.stage == "forward"]
    assert [span.about for span in forward] == [
        {"batch": 1, "tiles": 2, "chunks": [7, 8]},
        {"batch": 2, "tiles": 1, "chunks": [8]},
    ]


def test_cleared_metrics_start_anew_and_keep_what_the_actor_is():
    with InferenceActor(Doubles(), SHAPE, "int32", batch_size=4, note="measured") as actor:
        actor.submit(tile(1)).result(HANG)
        actor.clear_metrics()
        metrics = actor.metrics
        assert actor.recorder.times() == {}
    assert (metrics.tiles, metrics.busy, metrics.start) == (0, 0, 0)
    assert (metrics.batch_size, metrics.note) == (4, "measured")


@pytest.mark.parametrize("name", ["batch_size", "ring"])
def test_an_actor_without_room_is_refused(name):
    with pytest.raises(ValueError, match="must be at least 1"):
        InferenceActor(Doubles(), SHAPE, "int32", **{name: 0})
