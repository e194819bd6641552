"""Arrays in memory that was used before: never in memory that is in use."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer import recycled as module
from daskinfer.recycled import drop_recycled, recycled

MB = 1 << 20


@pytest.fixture(autouse=True)
def none_kept():
    drop_recycled()
    yield
    drop_recycled()


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_once_the_last_view_is_gone():
    array = recycled((2, 1024, 1024), "uint16")
    place, view = address(array), array[1, ::2]
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((2, 1024, 1024), "uint16", True)
    assert array.flags.writeable
    del array
    assert address(recycled((2, 1024, 1024), "uint16")) != place
    del view
    # Of the same bytes, whatever they are.
    assert address(recycled((1024, 1024), "float32")) == place


def test_the_last_one_given_back_is_the_first_to_be_used_again():
    first, last = recycled((MB,), "uint8"), recycled((MB,), "uint8")
    places = [address(first), address(last)]
    del first
    del last
    held = [recycled((MB,), "uint8"), recycled((MB,), "uint8")]
    assert [address(one) for one in held] == places[::-1]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 9)), max_size=40))
def test_arrays_in_use_never_share_memory(steps):
    held = []
    for number, (take, size, which) in enumerate(steps):
        if take or not held:
            array = recycled((size, MB), "uint8")
            array[:] = number
            held.append((number, array))
        else:
            held.pop(which % len(held))
        for value, array in held:
            assert (array[:, :: MB // 4] == value).all()


def test_threads_do_not_get_the_same_memory():
    def work(seed):
        pick = random.Random(seed)
        for _ in range(200):
            array = recycled((pick.choice([1, 2]), MB), "uint8")
            mark = pick.randrange(256)
            array[:, ::4096] = mark
            if not (array[:, ::4096] == mark).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_no_more_than_64_mb_is_kept():
    held = [recycled((MB,), "uint8") for _ in range(100)]
    del held
    module._collect()
    assert sum(buffer.nbytes for buffer in module._kept) == 64 * MB
    drop_recycled()
    assert not module._kept


def test_small_arrays_are_ordinary_ones():
    assert recycled((10, 10), "uint8").base is None
    assert recycled((0, 3), "uint8").shape == (0, 3)
