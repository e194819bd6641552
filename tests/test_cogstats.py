"""Statistics in the header against numpy over all pixels."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import rasterio
from hypothesis import given, settings
from hypothesis import strategies as st

from cogs import assert_valid, chunks_of, noise_of, spec_of, write_all
from daskinfer.cog import WorkFile, encode_chunk
from daskinfer.cog.statistics import FIELDS, blank_statistics, block_statistics, merged

NAMES = ("MINIMUM", "MAXIMUM", "MEAN", "STDDEV", "VALID_PERCENT")


def plain(band, nodata):
    """Minimum, maximum, mean, deviation and share of valid pixels; None where there are none."""
    valid = np.isfinite(band)
    if nodata is not None:
        valid &= band != nodata
    values = band[valid].astype("f8")
    if not values.size:
        return None
    return (
        values.min(), values.max(), values.mean(), values.std(), 100 * values.size / band.size
    )  # fmt: skip


def told(path, band):
    with rasterio.open(path) as dataset:
        tags = dataset.tags(band)
    texts = [tags.get(f"STATISTICS_{name}") for name in NAMES]
    return None if set(texts) == {None} else tuple(float(text) for text in texts)


def assert_told(path, array, nodata):
    for number, band in enumerate(array, 1):
        expected, found = plain(band, nodata), told(path, number)
        if expected is None:
            assert found is None
        else:
            assert found[:2] == expected[:2]
            np.testing.assert_allclose(found, expected, 1e-12, 1e-12 * abs(expected[1]))


def values_of(spec, seed=0):
    """Numbers far from 0, so that sums of squares would cancel, with every kind of gap."""
    rng = np.random.default_rng(seed)
    array = (1e4 + rng.normal(0, 3, (spec.count, spec.height, spec.width))).astype(spec.dtype)
    array[:, : spec.height // 2, : spec.width // 3] = spec.fill
    if array.dtype.kind == "f":
        array[rng.random(array.shape) < 0.1] = np.nan
        array[rng.random(array.shape) < 0.01] = -np.inf
    return array


@settings(max_examples=100)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 90), st.integers(1, 90)),
    st.sampled_from(["uint8", "int16", "float32", "float64"]),
    st.sampled_from([None, 3, 10000]),
    st.integers(0, 2**31),
)
def test_merged_blocks_equal_the_whole(shape, dtype, nodata, seed):
    if dtype == "uint8" and nodata == 10000:
        nodata = 255
    array = values_of(spec_of(*shape[1:], shape[0], dtype, nodata=nodata), seed)
    table = block_statistics(array, 32, nodata)
    assert table.shape == (-(-shape[1] // 32), -(-shape[2] // 32), shape[0], FIELDS)
    whole = merged(table.reshape(-1, shape[0], FIELDS))
    for (count, mean, square, low, high), band in zip(whole, array, strict=True):
        expected = plain(band, nodata)
        if expected is None:
            assert count == mean == square == low == high == 0
            continue
        found = low, high, mean, np.sqrt(square / count), 100 * count / band.size
        np.testing.assert_allclose(found, expected, 1e-9, 1e-9)


def test_blank_blocks_are_those_of_zeros():
    zeros = np.zeros((2, 70, 40), "f4")
    np.testing.assert_array_equal(
        blank_statistics((70, 40), 32, 2), block_statistics(zeros, 32, None)
    )


@pytest.mark.parametrize("layout", ["strict", "append"])
@pytest.mark.parametrize("interleave", ["pixel", "band"])
@pytest.mark.parametrize(
    ("dtype", "nodata"), [("float32", np.nan), ("float32", None), ("float64", -1), ("int16", 0)]
)
def test_the_header_tells_them(tmp_path, dtype, nodata, interleave, layout):
    spec = spec_of(
        300, 500, 2, dtype, nodata=nodata, blocksize=64, statistics=True, interleave=interleave,
        resampling="average", band_tags=((("NAME", "<a>"),), ()),
    )  # fmt: skip
    array = values_of(spec)
    work = WorkFile.create(tmp_path / "w", spec, (128, 192))
    write_all(work, array)
    assert told(work.path, 1) is None
    work.finish(tmp_path / "out.tif", layout)
    assert_told(tmp_path / "out.tif", array, nodata)
    assert_valid(tmp_path / "out.tif", spec)
    with rasterio.open(tmp_path / "out.tif") as dataset:
        assert dataset.tags(1)["NAME"] == "<a>"
        np.testing.assert_array_equal(dataset.read(), array)
    assert os.listdir(tmp_path) == ["out.tif"]  # no .aux.xml


@pytest.mark.parametrize("nodata", [None, -1])
def test_chunks_replaced_missing_or_written_in_a_later_run_count_once(tmp_path, nodata):
    spec = spec_of(300, 500, 1, "float32", nodata=nodata, blocksize=64)
    array = values_of(spec)
    with WorkFile.create(tmp_path / "w", spec, (128, 128)) as work:
        write_all(work, array * 3, range(7))
    with WorkFile.open(tmp_path / "w", spec, (64, 128)) as work:
        chunks = list(chunks_of(spec, work.chunk))
        write_all(work, array, range(16))
    array[:, 256:] = spec.fill
    WorkFile.open(tmp_path / "w", spec, (64, 128)).finish(tmp_path / "out.tif", allow_missing=True)
    assert len(chunks) == 20
    assert_told(tmp_path / "out.tif", array, nodata)


def test_a_stopped_append_leaves_those_of_what_is_committed(tmp_path, monkeypatch):
    """Stop before each write: a committed block's line is always its own."""
    spec = spec_of(128, 128, 1, "float32", blocksize=64, nodata=0)
    old, new = np.full((1, 128, 128), 5, "f4"), np.full((1, 128, 128), 7, "f4")
    write, left = os.pwrite, [0]

    def stop(fd, data, at):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return write(fd, data, at)

    for stop_after in itertools.count():
        work = WorkFile.create(tmp_path / "w", spec, (128, 128))
        write_all(work, old)
        left[0] = stop_after
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", stop)
            try:
                work.append(encode_chunk(spec, new, 0, 0, work.levels))
                stopped = False
            except KeyboardInterrupt:
                stopped = True
        if not work.done().all():
            write_all(work, new)
        work.finish(tmp_path / "out.tif")
        with rasterio.open(tmp_path / "out.tif") as dataset:
            assert_told(tmp_path / "out.tif", dataset.read(), 0)
        if not stopped:
            break
    assert stop_after > 5


def test_the_order_of_chunks_changes_no_digit(tmp_path):
    spec = spec_of(300, 500, 1, "float32", blocksize=64)
    array, files = values_of(spec), []
    for order in (range(12), range(12)[::-1]):
        work = WorkFile.create(tmp_path / "w", spec, (128, 128))
        write_all(work, array, order)
        work.finish(tmp_path / "out.tif")
        files.append((tmp_path / "out.tif").read_bytes())
    assert files[0] == files[1]


def test_numbers_too_large_for_a_mean_are_left_out(tmp_path):
    spec = spec_of(64, 64, 2, "float64", blocksize=64, resampling="nearest")
    array = np.full((2, 64, 64), np.finfo("f8").max)
    array[1] = noise_of(spec)[1]
    work = WorkFile.create(tmp_path / "w", spec, (64, 64))
    write_all(work, array)
    work.finish(tmp_path / "out.tif")
    assert told(tmp_path / "out.tif", 1) is None
    assert told(tmp_path / "out.tif", 2) == pytest.approx(plain(array[1], None), rel=1e-9)


def test_only_floats_have_them_by_default(tmp_path):
    for dtype, expected in (("float32", True), ("float64", True), ("uint8", False)):
        assert spec_of(9, 9, 1, dtype).with_statistics is expected
    assert not spec_of(9, 9, 1, "float32", statistics=False).with_statistics
    with pytest.raises(ValueError, match="statistics 'all'"):
        spec_of(9, 9, statistics="all")


def test_a_work_file_without_them_is_refused(tmp_path):
    without = spec_of(9, 9, 1, "float32", statistics=False)
    WorkFile.create(tmp_path / "w", without, (512, 512)).close()
    with pytest.raises(ValueError, match="made without statistics"):
        WorkFile.open(tmp_path / "w", spec_of(9, 9, 1, "float32"), (512, 512))


# BLAS starts a thread per core for a product of vectors of more than 10 000 numbers, and has them
# wait for the next one at work: with several processes they take the time of each other.
ONE_THREAD = """
import time
import numpy as np
from cogs import spec_of
from daskinfer.cog import encode_chunk

def in_other_threads():
    return time.process_time() - time.thread_time()

before = in_other_threads()
for dtype in ("uint8", "float32"):
    spec = spec_of(2048, 2048, 2, dtype, blocksize=512)
    array = np.random.default_rng(0).integers(0, 9, (2, 2048, 2048)).astype(dtype)
    encode_chunk(spec, array, 0, 0, spec.local_levels((2048, 2048)))
print(in_other_threads() - before)
"""


def test_a_chunk_is_encoded_in_the_thread_that_asks():
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.pop(name, None)
    command = [sys.executable, "-c", ONE_THREAD]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert float(done.stdout) < 0.05
