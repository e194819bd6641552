"""The TIFF part against GDAL and tifffile."""

from __future__ import annotations

import errno
import io
import os
import struct

import numpy as np
import pytest
import rasterio
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from rasterio.io import MemoryFile

from daskinfer.cog import tiff, tileindex
from daskinfer.cog.spec import CogSpec, template


@pytest.fixture(scope="module")
def main():
    spec = CogSpec(
        64, 64, 1, "uint8", blocksize=64, crs="EPSG:32633", transform=(1, 0, 5, 0, -1, 5)
    )
    return template(spec)


def header_of(layout):
    data = bytearray(layout.data_start)
    for at, piece in layout.header:
        assert not any(data[at : at + len(piece)]), "pieces overlap"
        data[at : at + len(piece)] = piece
    return data


def test_parse_agrees_with_tifffile():
    profile = {"driver": "GTiff", "width": 300, "height": 200, "count": 3, "dtype": "uint16"}
    tiles = {"tiled": True, "blockxsize": 64, "blockysize": 32, "compress": "deflate"}
    place = {"crs": "EPSG:32633", "transform": rasterio.Affine(10, 0, 5, 0, -10, 7)}
    with MemoryFile() as memory:
        with memory.open(**profile, **tiles, **place, BIGTIFF="YES") as dataset:
            dataset.write(np.ones((3, 200, 300), "u2"))
        data = bytes(memory.getbuffer())
    ours = tiff.parse_bytes(data)
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        theirs = file.pages[0]
        assert set(ours) == {tag.code for tag in theirs.tags}
        np.testing.assert_array_equal(ours[tiff.TILE_OFFSETS].ints(), theirs.dataoffsets)
        np.testing.assert_array_equal(ours[tiff.TILE_BYTE_COUNTS].ints(), theirs.databytecounts)
    assert tiff.shape_of(ours) == (200, 300)


@pytest.mark.parametrize(
    "start", [b"II\x2a\0\x08\0\0\0", b"MM\0\x2b\0\x08\0\0", b"\x89PNG\r\n\x1a\n"]
)
def test_other_files_are_refused(start):
    with pytest.raises(ValueError, match="BigTIFF"):
        tiff.parse_bytes(start + bytes(20))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([16, 64, 512]), st.booleans())
def test_planned_header_is_read_back(main, height, width, block, strict):
    shapes = [(height, width)]
    while max(shapes[-1]) > block:
        shapes.append(tuple(-(-n // 2) for n in shapes[-1]))
    ghost = tiff.STRICT_GHOST if strict else tiff.WORK_GHOST
    layout = tiff.plan_layout(main, shapes, block, ghost)
    data = header_of(layout)
    # Fill the index, then let another reader find it.
    expected = []
    for level, (rows, cols) in enumerate(layout.grids):
        offsets = np.arange(rows * cols, dtype="<u8") + 10_000 * level + 1
        counts = np.arange(rows * cols, dtype="<u4") + 7
        expected.append((offsets.tolist(), counts.tolist()))
        for at, array in ((layout.offsets_at, offsets), (layout.counts_at, counts)):
            assert not any(data[at[level] : at[level] + array.nbytes])
            data[at[level] : at[level] + array.nbytes] = array.tobytes()
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        found = [(list(p.dataoffsets), list(p.databytecounts)) for p in file.pages]
        sizes = [(p.imagelength, p.imagewidth) for p in file.pages]
        assert [p.is_reduced for p in file.pages] == [False] + [True] * (len(shapes) - 1)
        geo = [33550 in p.tags for p in file.pages]
    assert found == expected
    assert sizes == shapes
    assert geo == [True] + [False] * (len(shapes) - 1)
    assert [
        tiff.shape_of(ifd) for ifd in tiff.parse(lambda n, at: bytes(data[at : at + n]))
    ] == shapes


def test_first_ifd_follows_the_ghost_area(main):
    layout = tiff.plan_layout(main, [(64, 64)], 64, tiff.STRICT_GHOST)
    (first,) = struct.unpack_from("<Q", header_of(layout), 8)
    assert 0 <= first - 16 - len(tiff.STRICT_GHOST) <= 1


def test_long_values_are_stored_once():
    colors = tuple((i % 256, 0, 0, 255) for i in range(65536))
    spec = CogSpec(5000, 5000, 1, "uint16", colors=colors, transform=(1, 0, 5, 0, -1, 5))
    layout = tiff.plan_layout(template(spec), spec.shapes, 512, tiff.WORK_GHOST)
    assert len(layout.grids) == 5
    assert layout.data_start < 500_000


def indexed(path, main, shapes=((200, 300),)):
    layout = tiff.plan_layout(main, shapes, 64, tiff.WORK_GHOST)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    return tileindex.IndexedFile(str(path), fd, layout)


def test_rectangles_of_the_index(tmp_path, main):
    file = indexed(tmp_path / "a.tif", main)
    file.write_header()
    file.grow(10_000)
    expected = np.zeros((4, 5), np.int64)
    expected[1:3, 2:5] = np.arange(6).reshape(2, 3) + 1
    file.patch_counts(0, 1, 2, expected[1:3, 2:5])
    file.patch_offsets(0, 1, 2, expected[1:3, 2:5] << 40)
    np.testing.assert_array_equal(file.counts(0), expected)
    np.testing.assert_array_equal(file.offsets(0), expected << 40)
    np.testing.assert_array_equal(file.counts_of(0, 0, 1, (3, 3)), expected[:3, 1:4])
    os.close(file.fd)


def test_short_writes_go_on(tmp_path, main, monkeypatch):
    file = indexed(tmp_path / "a.tif", main)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:3], at))
    file.write(b"0123456789", 5)
    assert file.read(10, 5) == b"0123456789"
    os.close(file.fd)


@pytest.mark.parametrize("failure", [0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_failed_writes_name_the_file(tmp_path, main, monkeypatch, failure):
    file = indexed(tmp_path / "a.tif", main)

    def fail(fd, data, at):
        if isinstance(failure, OSError):
            raise failure
        return failure

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="at byte 5") as caught:
        file.write(b"0123456789", 5)
    assert caught.value.filename == str(tmp_path / "a.tif")
    os.close(file.fd)


def test_a_failed_sync_names_the_file(tmp_path, main, monkeypatch):
    file = indexed(tmp_path / "a.tif", main)

    def fail(fd):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="quota exceeded when it was synced") as caught:
        file.sync()
    assert (caught.value.errno, caught.value.filename) == (errno.EDQUOT, file.path)
    os.close(file.fd)


def test_reading_past_the_end_names_the_file(tmp_path, main):
    file = indexed(tmp_path / "a.tif", main)
    with pytest.raises(OSError, match="ends before byte 10") as caught:
        file.read(10, 0)
    assert caught.value.filename == file.path
    os.close(file.fd)


def test_new_file_appears_whole_or_not_at_all(tmp_path, main):
    path = tmp_path / "a.tif"
    layout = tiff.plan_layout(main, [(64, 64)], 64, tiff.WORK_GHOST)

    def fail():
        with tileindex.new_file(str(path), layout) as file:
            file.write(b"x", 0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not os.listdir(tmp_path)
    with tileindex.new_file(str(path), layout):
        assert not path.exists()
    assert os.listdir(tmp_path) == ["a.tif"]
