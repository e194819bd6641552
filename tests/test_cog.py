"""The COG writer against rasterio, tifffile, rio-cogeo and plain numpy."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import rasterio
import tifffile
from affine import Affine
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rasterio.windows import Window

from cogs import (
    NORTH_UP,
    assert_valid,
    check,
    chunks_of,
    class_map,
    levels_of,
    noise_of,
    pyramid,
    spec_of,
    write_all,
    write_file,
)
from daskinfer.cog import CogSpec, WorkFile, encode_chunk, tileindex
from daskinfer.cog.spec import CODECS, DTYPES, gdal_profile

ROOT = Path(__file__).parents[1]


# ---- any raster -------------------------------------------------------------------------------


LOSSLESS = [c for c in CODECS if c not in ("jpeg", "webp")]


def fits(compress, dtype, count, interleave):
    if compress == "webp_lossless":
        return dtype == "uint8" and count in (3, 4) and interleave == "pixel"
    return "lerc" not in compress or "64" not in dtype


@st.composite
def rasters(draw):
    block = 16 * draw(st.integers(4, 32))
    dtype, count = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 5))
    interleave = draw(st.sampled_from(["pixel", "band"]))
    compress = draw(st.sampled_from([c for c in LOSSLESS if fits(c, dtype, count, interleave)]))
    predicted = [1, 2] + [3] * (dtype[0] == "f") if compress in ("deflate", "zstd", "lzw") else []
    spec = spec_of(
        draw(st.integers(1, 700)),
        draw(st.integers(1, 700)),
        count,
        dtype,
        blocksize=block,
        compress=compress,
        interleave=interleave,
        nodata=draw(st.sampled_from([None, 3] + [np.nan] * (dtype[0] == "f"))),
        resampling=draw(st.sampled_from(["mode", "average", "nearest"])),
        predictor=draw(st.sampled_from(["auto", *predicted])),
        sparse=draw(st.booleans()),
    )
    chunk = tuple(block * draw(st.integers(1, 4)) for _ in range(2))
    layout = draw(st.sampled_from(["strict", "append"]))
    written = draw(st.sampled_from([1.0, 1.0, 0.3, 0.0]))
    return spec, chunk, layout, written, draw(st.integers(0, 2**31))


def write_and_check(folder, spec, chunk, layout, written, seed):
    """A share of the chunks, in any order; the others are left to `finish`."""
    array = class_map(spec, seed)
    chunks = list(chunks_of(spec, chunk))
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(chunks))[: round(written * len(chunks))]
    path = write_file(folder, spec, array, chunk, layout, order)
    for i in set(range(len(chunks))) - set(order):
        array[chunks[i][2]] = spec.fill
    check(path, array, spec)


ANY = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=60, **ANY)
@given(rasters())
@example((spec_of(1, 1), (512, 512), "strict", 1.0, 0))
@example((spec_of(1, 700, blocksize=64), (64, 64), "append", 1.0, 0))
@example((spec_of(700, 1, blocksize=64, nodata=3), (128, 64), "strict", 1.0, 0))
# Counts inline, offsets not; and the other way round with a tile for each band.
@example((spec_of(65, 64, blocksize=64), (64, 64), "strict", 1.0, 0))
@example((spec_of(64, 64, 2, blocksize=64, interleave="band"), (64, 64), "strict", 1.0, 0))
@example((spec_of(64, 64, 1, blocksize=64, interleave="band"), (64, 64), "append", 1.0, 0))
def test_any_raster(tmp_path_factory, case):
    write_and_check(tmp_path_factory.mktemp("any"), *case)


@pytest.mark.slow
@settings(max_examples=1000, **ANY)
@given(rasters())
def test_any_raster_at_length(tmp_path_factory, case):
    write_and_check(tmp_path_factory.mktemp("any"), *case)


@pytest.mark.parametrize(
    ("compress", "dtype", "interleave"),
    [
        (compress, dtype, interleave)
        for compress, dtype, interleave in itertools.product(LOSSLESS, DTYPES, ("pixel", "band"))
        if fits(compress, dtype, 3, interleave)
    ],
)
def test_noise_survives_every_codec(tmp_path, compress, dtype, interleave):
    spec = spec_of(
        200, 300, 3, dtype, compress=compress, blocksize=128, resampling="nearest",
        interleave=interleave,
    )  # fmt: skip
    array = noise_of(spec)
    check(write_file(tmp_path, spec, array, (128, 128)), array, spec)


def test_lerc_keeps_its_error(tmp_path):
    spec = spec_of(200, 300, 2, "float32", compress="lerc_zstd", max_z_error=0.01, blocksize=128)
    array = np.random.default_rng(0).random((2, 200, 300), "f4")
    with rasterio.open(write_file(tmp_path, spec, array, (128, 128))) as dataset:
        error = np.abs(dataset.read() - array).max()
    assert 0 < error <= 0.01 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (1, {"compress": "jpeg"}),
        (3, {"compress": "jpeg", "level": 90}),
        (4, {"compress": "jpeg", "interleave": "band"}),
        (3, {"compress": "webp", "level": 60}),
        (4, {"compress": "webp"}),
    ],
)
def test_pictures_are_what_gdal_makes_of_them(tmp_path, count, options):
    """Lossy tiles cannot equal what went in, but must equal those of GDAL's own file."""
    spec = spec_of(256, 384, count, blocksize=128, resampling="average", **options)
    y, x = np.mgrid[:256, :384]
    waves = [128 + 60 * np.sin(x / (39 + b)) + 60 * np.cos(y / (54 + b)) for b in range(count)]
    array = np.stack(waves).astype("u1")
    path = write_file(tmp_path, spec, array, (128, 128))
    assert_valid(path, spec)
    profile = gdal_profile(spec, 256, 384) | {"transform": Affine(*NORTH_UP)}
    with rasterio.open(tmp_path / "gdal.tif", "w", **profile) as dataset:
        dataset.write(array)
    with rasterio.open(path) as ours, rasterio.open(tmp_path / "gdal.tif") as theirs:
        np.testing.assert_array_equal(ours.read(), theirs.read())
        assert ours.photometric == theirs.photometric
        assert ours.colorinterp == theirs.colorinterp
        assert 0 < np.abs(ours.read().astype(int) - array).mean() < 4
    expected = pyramid(array, spec)
    for level, wanted in zip(levels_of(path), expected, strict=True):
        assert np.abs(level.astype(int) - wanted).mean() < 4
    with tifffile.TiffFile(path) as file:
        assert file.pages[0].asarray().shape == file.pages[0].shape


def test_tiles_of_other_pictures_are_refused(tmp_path):
    spec = partial(spec_of, 300, 300, 3, compress="jpeg")
    WorkFile.create(tmp_path / "w", spec(), (512, 512)).close()
    with pytest.raises(ValueError, match="another jpeg quality"):
        WorkFile.open(tmp_path / "w", spec(level=90), (512, 512))
    with pytest.raises(ValueError, match="another interleave"):
        WorkFile.open(tmp_path / "w", spec(interleave="band"), (512, 512))


def test_strict_is_gdals_layout(tmp_path):
    spec = spec_of(700, 500, blocksize=64)
    path = write_file(tmp_path, spec, class_map(spec), (128, 128))
    with rasterio.open(path) as dataset:
        assert dataset.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
    with tifffile.TiffFile(path) as file:
        ends = [(list(p.dataoffsets), list(p.databytecounts)) for p in file.pages]
    raw = path.read_bytes()
    at = ends[-1][0][0] - 4
    for offsets, counts in reversed(ends):  # smallest first, row by row, framed, without gaps
        for offset, count in zip(offsets, counts, strict=True):
            assert offset == at + 4
            assert int.from_bytes(raw[at:offset], "little") == count
            assert raw[offset + count : offset + count + 4] == raw[offset + count - 4 :][:4]
            at = offset + count + 4
    assert at == len(raw)


def test_gdal_validator_agrees(tmp_path):
    samples = "osgeo_utils.samples.validate_cloud_optimized_geotiff"
    module = pytest.importorskip(samples, reason="comes with GDAL's own Python package")
    spec = spec_of(700, 500, blocksize=64)
    for layout in ("strict", "append"):
        folder = tmp_path / layout
        folder.mkdir()
        path = write_file(folder, spec, class_map(spec), (128, 128), layout)
        warnings, errors, _ = module.validate(str(path), full_check=True)
        assert not warnings
        assert not errors


def test_chunks_of_a_merged_remainder(tmp_path):
    spec = spec_of(300, 290, blocksize=64, nodata=0)
    array = class_map(spec)
    work = WorkFile.create(tmp_path / "w", spec, (128, 128))
    starts = (0, 128)  # 300 and 290 are 128 + the rest
    for row, col in itertools.product(starts, starts):
        part = array[:, row : 128 if row == 0 else None, col : 128 if col == 0 else None]
        assert not work.done(starts, starts)[row // 128, col // 128]
        work.append(encode_chunk(spec, part, row, col, work.levels))
        assert work.done(starts, starts)[row // 128, col // 128]
    work.finish(tmp_path / "out.tif")
    check(tmp_path / "out.tif", array, spec)


def test_overviews_of_classes_are_classes(tmp_path):
    spec = spec_of(1200, 1200, blocksize=256, resampling="mode")
    array = np.zeros((1, 1200, 1200), "u1")
    array[:, ::2] = 10
    path = write_file(tmp_path, spec, array, (512, 512))
    for level in range(2):
        with rasterio.open(path, overview_level=level) as dataset:
            assert set(np.unique(dataset.read())) <= {0, 10}


def test_large_sparse_raster_is_bigtiff_and_small(tmp_path):
    spec = spec_of(70000, 70000, nodata=255)
    with WorkFile.create(tmp_path / "w", spec, (2048, 2048)) as work:
        assert (tmp_path / "w").read_bytes()[2] == 43
        assert os.stat(work.path).st_blocks * 512 < 1 << 20
        last = 69632, 69632
        array = np.full((1, 368, 368), 7, "u1")
        work.append(encode_chunk(spec, array, *last, work.levels))
        assert work.done()[-1, -1]
        assert work.done().sum() == 1
        with rasterio.open(work.path) as dataset:
            corner = dataset.read(1, window=Window(69630, 69630, 4, 4))
    np.testing.assert_array_equal(corner, [[255] * 4] * 2 + [[255, 255, 7, 7]] * 2)


# ---- the work file at any moment --------------------------------------------------------------


def test_work_file_is_a_raster_at_any_moment(tmp_path):
    spec = spec_of(300, 500, 2, "int16", blocksize=64, nodata=-7)
    array = class_map(spec)
    expected = np.full_like(array, -7)
    work = WorkFile.create(tmp_path / "w", spec, (64, 128))
    for row, col, part in list(chunks_of(spec, work.chunk))[::-1]:
        with rasterio.open(work.path) as dataset:
            np.testing.assert_array_equal(dataset.read(), expected)
        work.append(encode_chunk(spec, array[part], row, col, work.levels))
        expected[part] = array[part]
    np.testing.assert_array_equal(tifffile.imread(work.path), np.moveaxis(array, 0, -1))
    work.close()


def test_every_step_of_a_commit_reads_as_before_or_after(tmp_path, monkeypatch):
    """Stop before each write of an append, also of one that replaces a chunk."""
    spec = spec_of(200, 200, blocksize=64, nodata=0)
    old, new = class_map(spec, 1), np.random.default_rng(2).integers(1, 9, (1, 200, 200), "u1")
    write, left = os.pwrite, [0]

    def stop(fd, data, at):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return write(fd, data, at)

    steps = 0
    for first in (None, old):
        for stop_after in itertools.count():
            (tmp_path / "w").unlink(missing_ok=True)
            work = WorkFile.create(tmp_path / "w", spec, (128, 128))
            if first is not None:
                write_all(work, first)
            left[0] = stop_after
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", stop)
                try:
                    work.append(encode_chunk(spec, new[:, :128, :128], 0, 0, work.levels))
                    finished = True
                except KeyboardInterrupt:
                    finished = False
            for i, j in itertools.product(range(2), range(2)):
                window = Window(64 * j, 64 * i, 64, 64)
                with rasterio.open(work.path) as dataset:
                    read = dataset.read(window=window)
                part = np.s_[:, 64 * i : 64 * i + 64, 64 * j : 64 * j + 64]
                states = [new[part], 0 * new[part]] + ([old[part]] if first is not None else [])
                assert any(np.array_equal(read, state) for state in states)
                if work.done()[0, 0] and first is None:
                    np.testing.assert_array_equal(read, new[part])
            work.close()
            steps += 1
            if finished:
                break
    assert steps > 10


def test_rerun_of_a_partly_committed_chunk(tmp_path):
    spec = spec_of(300, 300, blocksize=64, nodata=0)
    array = class_map(spec)
    with WorkFile.create(tmp_path / "w", spec, (128, 128)) as work:
        write_all(work, array[..., ::-1, :])
    work = pickle.loads(pickle.dumps(work))
    write_all(work, array)
    work.finish(tmp_path / "out.tif")
    check(tmp_path / "out.tif", array, spec)


def test_missing_blocks_are_refused_or_made_nodata(tmp_path):
    spec = spec_of(300, 500, blocksize=64, nodata=9)
    array = class_map(spec)
    work = WorkFile.create(tmp_path / "w", spec, (128, 128))
    order = [0, 1, 2, 4, 6, 7, 8, 9, 11]
    write_all(work, array, order)
    with pytest.raises(
        RuntimeError, match="of 40 blocks are missing, the first at row 0, column 384"
    ):
        work.finish(tmp_path / "out.tif")
    for i, (_, _, part) in enumerate(chunks_of(spec, work.chunk)):
        if i not in order:
            array[part] = 9
    work.finish(tmp_path / "out.tif", allow_missing=True)
    check(tmp_path / "out.tif", array, spec)


def test_missing_blocks_without_nodata_are_zero(tmp_path):
    spec = spec_of(513, 300, blocksize=128)
    work = WorkFile.create(tmp_path / "w", spec, (513, 300))
    work.finish(tmp_path / "out.tif", allow_missing=True)
    check(tmp_path / "out.tif", np.zeros((1, 513, 300), "u1"), spec)


def test_empty_blocks_cost_a_pointer(tmp_path):
    spec = spec_of(1024, 1024, 2, "float32", blocksize=64, nodata=np.nan)
    with WorkFile.create(tmp_path / "w", spec, (512, 512)) as work:
        before = os.path.getsize(work.path)
        write_all(work, np.full((2, 1024, 1024), np.nan, "f4"))
        assert work.done().all()
        assert os.path.getsize(work.path) == before


@pytest.mark.parametrize("layout", ["strict", "append"])
def test_missing_tiles_cost_nothing_in_a_sparse_file(tmp_path, layout):
    spec = spec_of(2048, 2048, 3, "float32", blocksize=64, nodata=np.nan, sparse=True)
    array = np.full((3, 2048, 2048), np.nan, "f4")
    array[:, 1024:1088, 64:128] = noise_of(spec_of(64, 64, 3, "float32"))
    work = WorkFile.create(tmp_path / "w", spec, (512, 512))
    header = os.path.getsize(work.path)
    write_all(work, array)
    work.finish(tmp_path / "out.tif", layout)
    check(tmp_path / "out.tif", array, spec)
    # The noise itself and what overviews make of it.
    assert os.path.getsize(tmp_path / "out.tif") < header + 2 * 3 * 64 * 64 * 4


def test_finish_can_be_repeated(tmp_path, monkeypatch):
    """A finish that dies at the last moment leaves the work file as good as before."""
    spec = spec_of(500, 500, blocksize=64)
    array = class_map(spec)
    for layout in ("strict", "append"):
        work = WorkFile.create(tmp_path / "w", spec, (64, 64))
        write_all(work, array)
        with monkeypatch.context() as patch:
            # In this thread and at once; one sent to the process may come a moment later.
            patch.setattr(os, "replace", lambda *_: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                work.finish(tmp_path / "out.tif", layout)
        assert not (tmp_path / "out.tif").exists()
        WorkFile.open(tmp_path / "w", spec, (64, 64)).finish(tmp_path / "out.tif", layout)
        check(tmp_path / "out.tif", array, spec)
        (tmp_path / "out.tif").unlink()


def test_append_keeps_no_bytes_that_nothing_points_at(tmp_path):
    spec = spec_of(1500, 1500, 2, "int16", blocksize=64)
    array = noise_of(spec)
    work = WorkFile.create(tmp_path / "w", spec, (256, 256))
    empty = os.path.getsize(work.path)
    write_all(work, array)
    before = os.path.getsize(work.path)
    work.finish(tmp_path / "out.tif", "append")
    check(tmp_path / "out.tif", array, spec)
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        sizes = [size for page in file.pages for size in page.databytecounts]
    spare = os.path.getsize(tmp_path / "out.tif") - empty - sum(sizes)
    assert 0 <= spare < 16 * max(sizes)
    assert before > os.path.getsize(tmp_path / "out.tif") - 16 * max(sizes)


@pytest.mark.parametrize("interleave", ["pixel", "band"])
def test_closing_gaps_can_stop_before_any_write(tmp_path, monkeypatch, interleave):
    spec = spec_of(300, 300, 2, blocksize=64, nodata=0, interleave=interleave)
    array = noise_of(spec)
    array[:, 64:128] = 0
    write, left = os.pwrite, [0]

    def stop(fd, data, at):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return write(fd, data, at)

    for stop_after in itertools.count(step=3):
        work = WorkFile.create(tmp_path / "w", spec, (128, 128))
        write_all(work, array, range(4))
        write_all(work, array)
        left[0] = stop_after
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", stop)
            try:
                work.finish(tmp_path / "out.tif", "append")
                break
            except KeyboardInterrupt:
                pass
        with rasterio.open(work.path) as dataset:
            np.testing.assert_array_equal(dataset.read(), array)
        WorkFile.open(work.path, spec, (128, 128)).finish(tmp_path / "out.tif", "append")
        check(tmp_path / "out.tif", array, spec)
    assert stop_after > 10


def test_a_chunk_side_may_change_between_runs(tmp_path):
    spec = spec_of(500, 500, blocksize=64)
    array = class_map(spec)
    with WorkFile.create(tmp_path / "w", spec, (64, 64)) as work:
        write_all(work, array, range(9))
    with WorkFile.open(tmp_path / "w", spec, (256, 256)) as work:
        write_all(work, array)
        work.finish(tmp_path / "out.tif")
    check(tmp_path / "out.tif", array, spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 301}, "other sizes"),
        ({"nodata": 1}, "another nodata"),
        ({"compress": "zstd"}, "another compression"),
        ({"count": 2}, "another bits per sample|another band count"),
        ({"dtype": "int8"}, "another sample format"),
    ],
)
def test_other_specs_are_refused(tmp_path, change, message):
    same = {"height": 300, "width": 300, "count": 1, "dtype": "uint8", "nodata": 0}
    WorkFile.create(tmp_path / "w", CogSpec(**same), (512, 512)).close()
    WorkFile.open(tmp_path / "w", CogSpec(**same), (512, 512)).close()
    with pytest.raises(ValueError, match=message):
        WorkFile.open(tmp_path / "w", CogSpec(**(same | change)), (512, 512))


def test_create_keeps_what_is_there(tmp_path):
    WorkFile.create(tmp_path / "w", spec_of(9, 9), (512, 512)).close()
    with pytest.raises(FileExistsError, match="open it"):
        WorkFile.create(tmp_path / "w", spec_of(9, 9), (512, 512))


# ---- several writers, kills, failing disks ----------------------------------------------------


def test_threads_lose_nothing(tmp_path):
    spec = spec_of(512, 512, blocksize=64, nodata=0)
    array = np.arange(1, 65, dtype="u1").reshape(1, 8, 8).repeat(64, 1).repeat(64, 2)
    for _ in range(3):
        work = WorkFile.create(tmp_path / "w", spec, (64, 64))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(partial(write_all, work, array), np.arange(64).reshape(64, 1)))
        work.finish(tmp_path / "out.tif")
        check(tmp_path / "out.tif", array, spec)


WRITER = textwrap.dedent(
    """
    import sys, numpy as np
    from daskinfer.cog import CogSpec, WorkFile, encode_chunk
    path, first, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    place = (1.0, 0.0, 5.0, 0.0, -1.0, 5.0)
    spec = CogSpec(1024, 1024, 1, "uint8", place, blocksize=64, nodata=0)
    work = WorkFile.open(path, spec, (128, 128))
    sys.stdin.read(1)
    for n in range(first, 64, step):
        i, j = divmod(n, 8)
        array = np.full((1, 128, 128), n + 1, "u1")
        array[0, ::3, ::2] = 100
        work.append(encode_chunk(spec, array, 128 * i, 128 * j, work.levels))
        print(n, flush=True)
    """
)


def writer(path, first, step):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, path, str(first), str(step)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )


def written_array():
    array = np.arange(1, 65, dtype="u1").reshape(1, 8, 8).repeat(128, 1).repeat(128, 2)
    for row, col in itertools.product(range(0, 1024, 128), repeat=2):
        array[0, row : row + 128 : 3, col : col + 128 : 2] = 100
    return array


WRITER_SPEC = CogSpec(1024, 1024, 1, "uint8", (1, 0, 5, 0, -1, 5), blocksize=64, nodata=0)


def test_processes_lose_nothing(tmp_path):
    work = WorkFile.create(tmp_path / "w", WRITER_SPEC, (128, 128))
    writers = [writer(work.path, first, 2) for first in range(2)]
    for process in writers:  # both have imported: now together
        process.stdin.write("x")
        process.stdin.flush()
    for process in writers:
        process.communicate()
        assert process.returncode == 0
    assert work.done().all()
    work.close()
    with rasterio.open(work.path) as dataset:
        np.testing.assert_array_equal(dataset.read(), written_array())


def test_kill_leaves_committed_chunks_exact(tmp_path):
    work = WorkFile.create(tmp_path / "w", WRITER_SPEC, (128, 128))
    array = written_array()
    for kill_at, first in ((3, 0), (17, 0)):
        process = writer(work.path, first, 1)
        process.stdin.write("x")
        process.stdin.flush()
        for _ in range(kill_at):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        done = work.done()
        assert done.sum() >= kill_at
        blocks = work.done_blocks().repeat(64, 0).repeat(64, 1)
        with rasterio.open(work.path) as dataset:
            np.testing.assert_array_equal(dataset.read(1), np.where(blocks, array[0], 0))
    for n in np.flatnonzero(~work.done()):
        write_all(work, array, [n])
    work.finish(tmp_path / "out.tif")
    check(tmp_path / "out.tif", array, WRITER_SPEC)


@pytest.mark.parametrize("when", range(3))
def test_full_disk_leaves_the_chunk_out(tmp_path, monkeypatch, when):
    spec = spec_of(128, 128, blocksize=64, nodata=0)
    array = class_map(spec) + np.uint8(1)
    work = WorkFile.create(tmp_path / "w", spec, (64, 64))
    write, calls = os.pwrite, itertools.count()

    def full(fd, data, at):
        if next(calls) >= when:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(tileindex.os, "pwrite", full)
        with pytest.raises(OSError, match="No space left") as caught:
            write_all(work, array, [0])
    assert caught.value.filename == work.path
    assert caught.value.errno == errno.ENOSPC
    assert not work.done().any()
    with rasterio.open(work.path) as dataset:
        assert not dataset.read().any()
    write_all(work, array)
    work.finish(tmp_path / "out.tif")
    check(tmp_path / "out.tif", array, spec)


# ---- metadata ---------------------------------------------------------------------------------


def finished(folder, spec):
    work = WorkFile.create(folder / "w", spec, (512, 512))
    work.finish(folder / "out.tif", allow_missing=True)
    assert_valid(folder / "out.tif", spec)
    return rasterio.open(folder / "out.tif")


def test_metadata_of_a_class_map(tmp_path):
    spec = spec_of(
        700,
        600,
        nodata=255,
        descriptions=("land cover",),
        colors=((1, 2, 3, 255), (9, 8, 7, 255)),
        tags=(("MODEL", "unet <1> & é"), ("AREA_OR_POINT", "Point")),
        band_tags=((("CLASS_NAMES", "water,forest"),),),
    )
    with finished(tmp_path, spec) as dataset:
        assert tuple(dataset.transform)[:6] == NORTH_UP
        assert dataset.crs == rasterio.CRS.from_epsg(32633)
        assert dataset.nodata == 255
        assert dataset.descriptions == ("land cover",)
        assert dataset.tags()["MODEL"] == "unet <1> & é"
        assert dataset.tags()["AREA_OR_POINT"] == "Point"
        assert dataset.tags(1)["CLASS_NAMES"] == "water,forest"
        table = dataset.colormap(1)
        assert (table[0], table[1]) == ((1, 2, 3, 255), (9, 8, 7, 255))
        assert dataset.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
    with rasterio.open(tmp_path / "out.tif", overview_level=0) as overview:
        assert overview.colormap(1)[1] == (9, 8, 7, 255)
        assert overview.nodata == 255
    assert sorted(os.listdir(tmp_path)) == ["out.tif"]  # no .aux.xml


@pytest.mark.parametrize(
    "transform",
    [
        (0.1, 0.0, 1 / 3, 0.0, -0.1, 2 / 3),
        (0.1, 0.0, 1 / 3, 0.0, 0.1, 2 / 3),
        (7.1, -2.3, 5e5 + 0.1, 2.3, 7.1, 6e6),
    ],
)
def test_transforms_are_exact(tmp_path, transform):
    with finished(tmp_path, spec_of(20, 30, transform=transform)) as dataset:
        assert tuple(dataset.transform)[:6] == transform


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")  # GCPs only
def test_control_points_and_rpcs(tmp_path):
    gcps = tuple((r, c, 10.5 + c / 7, 50.25 - r / 7, 3.5) for r in (0, 700) for c in (0, 600))
    lines = [("HEIGHT_OFF", "100"), ("HEIGHT_SCALE", "500"), ("ERR_BIAS", "0"), ("ERR_RAND", "0")]
    for axis in ("LINE", "SAMP", "LAT", "LONG"):
        lines += [(f"{axis}_OFF", "10"), (f"{axis}_SCALE", "20")]
    for name in ("LINE_NUM", "LINE_DEN", "SAMP_NUM", "SAMP_DEN"):
        lines.append((f"{name}_COEFF", " ".join(["0.5"] * 20)))
    spec = CogSpec(700, 600, 1, "uint8", gcps=gcps, gcps_crs="EPSG:4326", rpcs=tuple(lines))
    with finished(tmp_path, spec) as dataset:
        points, crs = dataset.gcps
        assert crs == rasterio.CRS.from_epsg(4326)
        assert tuple((p.row, p.col, p.x, p.y, p.z) for p in points) == gcps
        assert dataset.rpcs.height_scale == 500
        assert dataset.rpcs.line_num_coeff == [0.5] * 20
    assert sorted(os.listdir(tmp_path)) == ["out.tif"]


@pytest.mark.parametrize(
    ("dtype", "nodata", "held"),
    [
        ("uint8", 255.0, 255),
        ("int8", -128, -128),
        ("int64", -(2**63), -(2**63)),
        ("uint64", 2**64 - 1, 2**64 - 1),
        ("float32", -3.4e38, float(np.float32(-3.4e38))),
        ("float64", -1.7976931348623157e308, -1.7976931348623157e308),
        ("float32", np.inf, np.inf),
    ],
)
def test_nodata_is_kept(tmp_path, dtype, nodata, held):
    spec = spec_of(100, 100, dtype=dtype, nodata=nodata, blocksize=64)
    assert spec.nodata == held
    with finished(tmp_path, spec) as dataset:
        assert (dataset.read() == np.dtype(dtype).type(held)).all()
        if dtype != "uint64":  # rasterio has no way to tell this one
            assert dataset.nodata == held
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert all(page.nodata == held for page in file.pages)


def test_specs_are_values():
    one, two = (spec_of(9, 9, dtype="float32", nodata=n) for n in (float("nan"), np.nan))
    assert one == two == pickle.loads(pickle.dumps(one))
    assert len({one, two}) == 1
    assert one != spec_of(9, 9, dtype="float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodata": -1}, "nodata -1 .* 0 to 255"),
        ({"nodata": 0.5}, "nodata 0.5"),
        ({"nodata": np.nan}, "nodata nan"),
        ({"dtype": "float32", "nodata": 1e40}, r"nodata 1e\+40"),
        ({"dtype": "bool"}, "dtype 'bool'"),
        ({"dtype": "complex64"}, "dtype 'complex64'"),
        ({"height": 0}, "no pixels"),
        ({"blocksize": 100}, "100 is not a multiple of 16"),
        ({"compress": "jpeg2000"}, "compress 'jpeg2000'"),
        ({"level": 10}, "level 10 .* 1 to 9"),
        ({"compress": "lzw", "level": 1}, "which has none"),
        ({"predictor": 3}, "predictor 3 is for floats"),
        ({"predictor": "2"}, "predictor '2'"),
        ({"predictor": 2, "compress": "lerc"}, "predictor 2 with lerc, which has none"),
        ({"interleave": "line"}, "interleave 'line'"),
        ({"compress": "jpeg", "dtype": "uint16"}, "jpeg cannot hold uint16"),
        ({"compress": "jpeg", "count": 4}, "jpeg takes 1 or 3 bands .* not 4: pass interleave"),
        ({"compress": "jpeg", "level": 101}, "level 101 for jpeg, which has 1 to 100"),
        ({"compress": "jpeg", "nodata": 255}, "jpeg changes pixels .* nodata"),
        ({"compress": "jpeg", "colors": ((0, 0, 0, 255),)}, "jpeg changes pixels .* colour table"),
        ({"compress": "webp", "count": 2}, "webp takes 3 or 4 bands in a tile, not 2"),
        ({"compress": "webp", "count": 3, "interleave": "band"}, "webp takes 3 or 4 .* not 1"),
        ({"compress": "webp", "count": 3, "nodata": 0}, "webp changes pixels"),
        ({"dtype": "int64", "compress": "lerc"}, "lerc cannot hold int64"),
        ({"max_z_error": 0.1}, "only lerc"),
        ({"max_z_error": 1, "compress": "lerc", "nodata": 255}, "lerc changes .* drop max_z_error"),
        ({"resampling": "cubic"}, "cubic"),
        ({"colors": ((0, 0, 0, 255),), "dtype": "float32"}, "colors need"),
        ({"colors": ((0, 0, 0, 255),), "count": 2}, "colors need"),
        ({"colors": ((0, 0, 0, 255),) * 257}, "257 colors: uint8 has 256"),
        ({"colors": ((0, 0, 0, 256),)}, "0 to 255"),
        ({"descriptions": ("a", "b")}, "2 descriptions for 1 bands"),
        ({"band_tags": ((), ())}, "2 band_tags for 1 bands"),
        ({"transform": (1, 2, 3)}, "3 numbers"),
        ({"gcps": ((0, 0, 0, 0, 0),)}, "go together"),
        ({"gcps_crs": "EPSG:4326"}, "go together"),
    ],
)
def test_bad_specs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        spec_of(**({"height": 9, "width": 9} | options))


@pytest.mark.parametrize(
    ("shape", "dtype", "row", "message"),
    [
        ((1, 64, 64), "u2", 0, "uint16 for a file of uint8"),
        ((2, 64, 64), "u1", 0, "1 bands"),
        ((64, 64), "u1", 0, "1 bands"),
        ((1, 64, 128), "u1", 0, "multiples of 128"),
        ((1, 128, 128), "u1", 64, "multiples of 128"),
        ((1, 128, 128), "u1", 256, "from 256 to 384 of 300"),
        ((1, 128, 128), "u1", -128, "from -128 to 0 of 300"),
    ],
)
def test_bad_chunks_are_refused(shape, dtype, row, message):
    spec = spec_of(300, 300, blocksize=64)
    with pytest.raises(ValueError, match=message):
        encode_chunk(spec, np.zeros(shape, dtype), row, 0, 1)


@pytest.mark.parametrize(
    ("dtype", "resampling", "compress", "predictor"),
    [
        ("uint8", "mode", "deflate", 1),
        ("int16", "average", "deflate", 2),
        ("float32", "average", "zstd", 3),
        ("float64", "mode", "zstd", 3),
    ],
)
def test_codec_and_predictor_follow_the_pixels(dtype, resampling, compress, predictor):
    spec = spec_of(9, 9, 1, dtype, resampling=resampling)
    assert (spec.compress, spec.tiff_predictor) == (compress, predictor)
    assert spec_of(9, 9, 1, dtype, resampling=resampling, predictor=1).tiff_predictor == 1
    assert spec == spec_of(9, 9, 1, dtype, resampling=resampling, compress=compress)


def test_local_levels_and_chunk_step():
    spec = spec_of(5000, 3000)
    assert [spec.local_levels((side, side)) for side in (512, 1024, 1536, 2048, 4096)] == [
        0,
        1,
        0,
        2,
        3,
    ]
    assert spec.local_levels((9999, 9999)) == len(spec.shapes) - 1  # one chunk makes all
    assert spec.local_levels((1024, 3000)) == 1
    assert spec.chunk_step(2) == 2048
    with pytest.raises(ValueError, match=r"chunk side 1000 .* 512"):
        spec.local_levels((1000, 512))
