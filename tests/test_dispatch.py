"""Chunks on their way: groups, bounds, what comes back, what is lost."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import pytest
from distributed import Status
from hypothesis import given
from hypothesis import strategies as st

import daskinfer as di
from daskinfer.dispatch import MOST, TASK_SECONDS, Dispatch, Pace


@dataclass(frozen=True)
class Did:
    done: tuple[int, ...]
    left: tuple[int, ...] = ()
    spent: float = 0.0


def do_all(run, numbers):
    return Did(numbers)


def do_some(run, numbers):
    """Begins no more than three."""
    return Did(numbers[:3], numbers[3:], 1e-6)


def do_slowly(run, numbers):
    return Did(numbers, (), 2 * TASK_SECONDS * len(numbers))


def fail_on_seven(run, numbers):
    if 7 in numbers:
        raise ArithmeticError("seven")
    return Did(numbers)


def dispatch_of(client, task, **options):
    return Dispatch(client, task, f"test-{os.urandom(4).hex()}", client.nthreads, **options)


@pytest.mark.parametrize("task", [do_all, do_some, do_slowly])
def test_every_chunk_is_done_once(one_worker, task):
    dispatch = dispatch_of(one_worker, task)
    done = [n for answer in dispatch.answers(range(500), 500) for n in answer.outcome.done]
    assert sorted(done) == list(range(500))


def test_cheap_chunks_share_a_task_and_dear_ones_do_not(one_worker):
    cheap, dear = dispatch_of(one_worker, do_all), dispatch_of(one_worker, do_slowly)
    sizes = [len(answer.numbers) for answer in cheap.answers(range(2000), 2000)]
    assert max(sizes) == MOST
    assert cheap.tasks < 200
    assert {len(answer.numbers) for answer in dear.answers(range(50), 50)} == {1}


def test_chunks_are_taken_from_their_source_as_room_is_made(one_worker):
    taken = 0

    def todo():
        nonlocal taken
        for number in range(10**9):
            taken = number + 1
            yield number

    dispatch = dispatch_of(one_worker, do_all, most=1)
    answers = dispatch.answers(todo(), 10**9)
    seen = [next(answers) for _ in range(20)]
    assert len(seen) == 20
    assert taken <= 20 + 2 * 2 * sum(one_worker.nthreads().values())
    dispatch.cancel()


def test_a_task_that_raises_is_an_answer_and_its_chunk_can_have_another_try(one_worker):
    dispatch = dispatch_of(one_worker, fail_on_seven, most=1)
    done, errors = [], []
    for answer in dispatch.answers(range(10), 10):
        if answer.error is None:
            done += answer.outcome.done
        else:
            errors.append(str(answer.error))
            if len(errors) < 3:
                dispatch.again(answer.numbers[0], avoid=["tcp://nowhere"])
    assert sorted(done) == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert errors == ["seven"] * 3


def test_another_try_is_made_on_another_worker(two_workers):
    first, second = sorted(two_workers.nthreads())
    dispatch = dispatch_of(two_workers, where)
    for number, avoid, expected in ((0, first, second), (1, second, first)):
        dispatch.again(number, avoid=[avoid])
        assert [answer.outcome.worker for answer in dispatch.answers([], 0)] == [expected]
    # There is no other: it is better than none.
    dispatch.again(2, avoid=[first, second])
    assert len(list(dispatch.answers([], 0))) == 1


def test_another_try_does_not_wait_for_workers_that_are_gone(monkeypatch):
    """All are lost at once, the preferred one too, when the task has not begun; another joins."""
    monkeypatch.setattr("daskinfer.dispatch._THREADS_EVERY", 0.05)
    with di.cluster("local", dashboard_address=":0", set_as_default=False) as client:
        looks = []

        def workers():
            looks.append(client.nthreads())
            if len(looks) == 1:
                return {"inproc://gone": 1}
            # As when it joins.
            client.run(set_status, "running")
            return looks[-1]

        client.run(set_status, "paused")
        dispatch = Dispatch(client, do_all, "test-gone", workers)
        dispatch.again(3, avoid=["inproc://bad"])
        answers = list(dispatch.answers([], 0))
        assert [answer.outcome.done for answer in answers] == [(3,)]
        assert dispatch.tasks == 2


def set_status(status, dask_worker):
    dask_worker.status = Status[status]


def where(run, numbers):
    from distributed import get_worker

    return At(numbers, (), 0.0, get_worker().address)


@dataclass(frozen=True)
class At(Did):
    worker: str = ""


def test_what_is_in_flight_can_be_drained_and_cancelled(one_worker):
    gate = GATES["open"] = threading.Event()
    dispatch = dispatch_of(one_worker, wait_at_the_gate, most=1)
    answers = dispatch.answers(range(100), 100)
    threading.Timer(0.1, gate.set).start()
    assert next(answers).error is None
    drained = list(dispatch.drain(30.0))
    assert 1 <= len(drained) <= 2 * sum(one_worker.nthreads().values())
    dispatch.cancel()
    assert list(dispatch.drain(30.0)) == []


GATES: dict[str, threading.Event] = {}


def wait_at_the_gate(run, numbers):
    assert GATES["open"].wait(60)
    return Did(numbers)


@given(seconds=st.floats(1e-9, 100), left=st.integers(0, 10**7), lanes=st.integers(1, 1000))
def test_a_group_is_bounded(seconds, left, lanes):
    pace = Pace()
    pace.note(1, seconds)
    size = pace.size(left, lanes)
    assert 1 <= size <= MOST
    assert size == 1 or size * seconds <= TASK_SECONDS * (1 + 1e-9)
    assert size == 1 or size * 2 * lanes <= left


def test_the_pace_follows_what_chunks_cost():
    pace = Pace()
    pace.note(64, 0.064)
    assert pace.size(10**6, 2) == MOST
    for _ in range(10):
        pace.note(1, 1.0)
    assert pace.size(10**6, 2) == 1
    pace.note(0, 5.0)  # nothing was done: nothing is learnt
    assert pace.seconds == pytest.approx(1.0, rel=0.01)
