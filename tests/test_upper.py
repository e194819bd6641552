"""Overview levels that no chunk makes alone: made on the way, and right whatever came again."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cogs import check, chunks_of, class_map, noise_of, spec_of, write_all
from daskinfer.cog import WorkFile, encode_chunk, upper
from daskinfer.cog.encode import EncodedPart
from daskinfer.cog.upper import Region, made_from, regions

CHUNK = (64, 64)


def append(work, array, number):
    row, col, part = list(chunks_of(work.spec, work.chunk))[number]
    work.append(encode_chunk(work.spec, array[part], row, col, work.levels))


@pytest.fixture
def made(monkeypatch):
    """Regions in the order in which they were read."""
    encode, found = Region.encode, []

    def noted(self, path, spec):
        found.append(self)
        return encode(self, path, spec)

    monkeypatch.setattr(Region, "encode", noted)
    return found


@settings(max_examples=100)
@given(st.integers(1, 900), st.integers(2, 900), st.sampled_from([16, 64]), st.integers(1, 3))
def test_regions_have_every_tile_once(height, width, blocksize, count):
    spec = spec_of(height, width, count, blocksize=blocksize)
    for level in range(len(spec.shapes)):
        seen = np.zeros(spec.grid(level), int)
        for region in regions(spec, level):
            row, col, (rows, cols) = region.tiles(spec)
            seen[row : row + rows, col : col + cols] += 1
            for i, j in itertools.product(range(row, row + rows), range(col, col + cols)):
                part = EncodedPart(level, i, j, np.ones((1, 1), int))
                assert list(made_from(spec, part)) == [region]
        assert (seen == (level < len(spec.shapes) - 1)).all()


@pytest.mark.parametrize("interleave", ["pixel", "band"])
def test_nothing_is_left_for_the_finish(tmp_path, made, interleave):
    spec = spec_of(700, 500, 2, nodata=0, blocksize=32, interleave=interleave)
    array = class_map(spec)
    with WorkFile.create(tmp_path / "w", spec, CHUNK) as work:
        order = np.random.default_rng(0).permutation(11 * 8)
        write_all(work, array, order)
        assert len(made) == len(set(made)) > 10
        before = len(made)
        work.finish(tmp_path / "out.tif")
        assert len(made) == before
    check(tmp_path / "out.tif", array, spec)


@pytest.mark.parametrize("number", [0, 17, 87])
def test_a_chunk_that_comes_again_is_in_all_overviews(tmp_path, number):
    spec = spec_of(700, 500, 1, "uint16", nodata=0, blocksize=32, resampling="average")
    first, second = noise_of(spec, 0), noise_of(spec, 1)
    with WorkFile.create(tmp_path / "w", spec, CHUNK) as work:
        write_all(work, first)
        append(work, second, number)
        work.finish(tmp_path / "out.tif")
    part = list(chunks_of(spec, CHUNK))[number][2]
    first[part] = second[part]
    check(tmp_path / "out.tif", first, spec)


def test_a_chunk_that_comes_again_while_its_region_is_read(tmp_path, monkeypatch):
    spec = spec_of(300, 300, 1, "uint16", nodata=0, blocksize=32, resampling="average")
    first, second = noise_of(spec, 0), noise_of(spec, 1)
    encode, came = Region.encode, []

    def late(self, path, spec):
        encoded = encode(self, path, spec)
        if not came:
            came.append(True)
            with WorkFile.open(path, spec, CHUNK) as other:
                append(other, second, 0)
        return encoded

    with WorkFile.create(tmp_path / "w", spec, CHUNK) as work:
        monkeypatch.setattr(Region, "encode", late)
        write_all(work, first)
        work.finish(tmp_path / "out.tif")
    first[:, :64, :64] = second[:, :64, :64]
    check(tmp_path / "out.tif", first, spec)


def test_what_a_kill_left_is_made_at_the_end(tmp_path, monkeypatch):
    """The chunk is committed, what is made of its region is not; and it replaced another."""
    spec = spec_of(300, 300, 1, "uint16", nodata=0, blocksize=32, resampling="average")
    first, second = noise_of(spec, 0), noise_of(spec, 1)

    def killed(self, path, spec):
        raise KeyboardInterrupt

    with WorkFile.create(tmp_path / "w", spec, CHUNK) as work:
        write_all(work, first)
        with monkeypatch.context() as patched:
            patched.setattr(Region, "encode", killed)
            with pytest.raises(KeyboardInterrupt):
                append(work, second, 0)
    with WorkFile.open(tmp_path / "w", spec, CHUNK) as work:
        assert work.done().all()
        work.finish(tmp_path / "out.tif")
    first[:, :64, :64] = second[:, :64, :64]
    check(tmp_path / "out.tif", first, spec)


def test_regions_are_small_and_not_too_few(monkeypatch):
    spec = spec_of(20_000, 20_000, blocksize=512)
    assert len(list(regions(spec, 2))) >= 8
    floats = spec_of(10_000, 10_000, 3, "float32", blocksize=512)
    for region in regions(floats, 2):
        rows, cols = region.tiles(floats)[2]
        assert rows * cols * 512**2 * 12 <= upper._REGION_BYTES
