"""Broken and hostile files: a clear error, or a lazy array, in little time and memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import rasterio
import rasterio.shutil
from rasterio.errors import RasterioIOError

import daskinfer as di
from conftest import noise, write_raster

SECONDS = 2.0
MB = 450
TYPES = {3: "H", 4: "I"}


def tiff(path, width, height, *, tags=(), data=b""):
    """A TIFF of some bytes that claims to be an image of this size; `tags` by number."""
    entries = {
        256: (4, [width]), 257: (4, [height]), 258: (3, [8]), 259: (3, [1]), 262: (3, [1]),
        277: (3, [1]), 284: (3, [1]),
    } | dict(tags)  # fmt: skip
    place = 8 + 2 + 12 * len(entries) + 4
    head, body = struct.pack("<2sHIH", b"II", 42, 8, len(entries)), b""
    for tag, (kind, values) in sorted(entries.items()):
        packed = struct.pack(f"<{len(values)}{TYPES[kind]}", *values)
        if len(packed) > 4:
            packed, body = struct.pack("<I", place + len(body)), body + packed
        head += struct.pack("<HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    Path(path).write_bytes((head + bytes(4) + body).ljust(4096, b"\0") + data)


def strips(rows, offset=8, size=16):
    return {273: (4, [offset]), 278: (4, [rows]), 279: (4, [size])}


def tiles(side, offset=8, size=16, count=1):
    return {322: (4, [side]), 323: (4, [side]), 324: (4, [offset] * count),
            325: (4, [size] * count)}  # fmt: skip


DEFLATE = {259: (3, [8])}


def claims(folder):
    """Files of a few bytes that claim to be large; what they must not do is take long to open."""
    bomb = zlib.compress(bytes(256 << 20), 9)
    made = {
        "100 000 px in strips": (100_000, 100_000, strips(100_000)),
        "100 000 px in one deflated strip": (100_000, 100_000, DEFLATE | strips(100_000)),
        "100 000 px in one tile": (100_000, 100_000, tiles(99_984)),
        "100 000 px in one deflated tile": (100_000, 100_000, DEFLATE | tiles(99_984)),
        "100 000 px in tiles of 16": (100_000, 100_000, tiles(16)),
        "2 147 483 647 px": (2**31 - 1, 2**31 - 1, tiles(256)),
        "65 535 bands": (16, 16, {277: (3, [65535]), 258: (3, [8] * 65535)} | strips(16)),
        "65 535 bands in planes": (
            16, 16,
            {277: (3, [65535]), 258: (3, [8] * 65535), 284: (3, [2]),
             273: (4, [8] * 65535), 278: (4, [16]), 279: (4, [256] * 65535)},
        ),
        "65 535 bands in tiles of 512": (
            100_000, 100_000, {277: (3, [65535]), 258: (3, [8] * 65535)} | tiles(512),
        ),
        "offsets beyond the end": (512, 512, tiles(256, 10**9, 1000, count=4)),
        "more bytes than there are": (512, 512, tiles(256, 4096, 10**9, count=4)),
        "a tile of 256 MB from 260 kB": (16384, 16384, DEFLATE | tiles(16384, 4096, len(bomb))),
        "a tile that goes on for 256 MB": (256, 256, DEFLATE | tiles(256, 4096, len(bomb))),
    }  # fmt: skip
    for name, (width, height, tags) in made.items():
        data = bomb if "256 MB" in name else b""
        tiff(folder / f"{name}.tif", width, height, tags=tags, data=data)
    return [f"{name}.tif" for name in made]


def virtual(folder):
    """VRTs that are traps."""

    def source(name):
        return (
            f'<VRTRasterBand dataType="UInt16" band="1"><SimpleSource><SourceFilename '
            f'relativeToVRT="1">{name}</SourceFilename><SourceBand>1</SourceBand></SimpleSource>'
            "</VRTRasterBand>"
        )

    bands = "".join(f'<VRTRasterBand dataType="Float64" band="{n + 1}"/>' for n in range(65535))
    blocks = '<VRTRasterBand dataType="Byte" band="1" blockXSize="2000000" blockYSize="2000000"/>'
    made = {
        "of itself.vrt": (20, source("of itself.vrt")),
        "of one another.vrt": (20, source("of the other.vrt")),
        "of the other.vrt": (20, source("of one another.vrt")),
        "of nothing.vrt": (20, source("nothing.tif")),
        "of 65 535 bands.vrt": (20, bands),
        "of 2 000 000 000 px.vrt": (2 * 10**9, '<VRTRasterBand dataType="Byte" band="1"/>'),
        "of one block.vrt": (2_000_000, blocks),
    }
    for name, (side, body) in made.items():
        (folder / name).write_text(
            f'<VRTDataset rasterXSize="{side}" rasterYSize="{side}">{body}</VRTDataset>'
        )
    return list(made)


def cut(folder):
    """Files that end early."""
    raw = noise(1, 300, 400)
    sound = {
        "tiled.tif": {"tiled": True, "blockxsize": 64, "blockysize": 64, "compress": "deflate"},
        "plain.tif": {},
        "big.tif": {"BIGTIFF": "YES", "compress": "zstd"},
    }
    for name, options in sound.items():
        write_raster(folder / name, raw, **options)
    for name, driver in (("cog.tif", "COG"), ("a.png", "PNG"), ("a.jp2", "JP2OpenJPEG")):
        rasterio.shutil.copy(folder / "plain.tif", folder / name, driver=driver)
    made = []
    for name in (*sound, "cog.tif", "a.png", "a.jp2"):
        content = (folder / name).read_bytes()
        for part in (0, 4, 8, 100, len(content) // 2, len(content) - 100):
            made.append(f"{part} bytes of {name}")
            (folder / made[-1]).write_bytes(content[:part])
    return made


def garbled(folder):
    """Headers in which some bytes are others, as a disk or a fuzzer would have them."""
    content = Path(write_raster(folder / "sound.tif", noise(2, 40, 50), nodata=7)).read_bytes()
    start = struct.unpack("<I", content[4:8])[0]
    rng, made = np.random.default_rng(0), []
    for number in range(30):
        broken = bytearray(content)
        for place in rng.integers(0, 200, rng.integers(1, 6)):
            at = place % 8 if place < 8 else min(start + place, len(content) - 1)
            broken[at] = rng.integers(256)
        made.append(f"garbled {number}.tif")
        (folder / made[-1]).write_bytes(broken)
    return made


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the children told of each file, by kind and name."""
    folder = tmp_path_factory.mktemp("hostile")
    kinds = {make.__name__: make(folder) for make in (claims, virtual, cut, garbled)}
    paths = [str(folder / name) for names in kinds.values() for name in names]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("hostile.py")), *paths],
        capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    answers = json.loads(done.stdout.splitlines()[-1])
    return {
        kind: {name: answers[str(folder / name)] for name in names} for kind, names in kinds.items()
    }


@pytest.mark.parametrize("kind", ["claims", "virtual", "cut", "garbled"])
def test_any_file_is_opened_or_refused_at_once_and_in_little_memory(told, kind):
    for name, answer in told[kind].items():
        assert "died" not in answer, name
        text, seconds = answer["open"]
        assert text.partition(":")[0] in ("ok", "ValueError"), (name, text)
        assert seconds < SECONDS, (name, seconds)
        assert answer["mb"] < MB, (name, answer)


@pytest.mark.parametrize("kind", ["claims", "virtual", "cut", "garbled"])
def test_reading_such_a_file_ends_with_an_error_that_names_it(told, kind):
    for name, answer in told[kind].items():
        text, seconds = answer.get("read", ("ok", 0))
        assert text.partition(":")[0] in ("ok", "RasterioIOError", "MemoryError"), (name, text)
        assert seconds < SECONDS, (name, seconds)
        if text.startswith("RasterioIOError"):
            assert name in text
            assert "cannot be read: " in text


def test_blocks_that_no_worker_could_hold_are_refused_with_their_size(told):
    text, _ = told["claims"]["100 000 px in one deflated tile.tif"]["open"]
    assert "blocks of 99984 x 99984 px, 10.0 GB each" in text
    assert "gdal_translate" in text


def test_files_that_end_early_are_never_read_as_if_they_did_not(told):
    for name, answer in told["cut"].items():
        assert answer["open"][0] != "ok" or answer["read"][0] != "ok", name


def test_what_a_virtual_file_lacks_is_named(told):
    assert "nothing.tif" in told["virtual"]["of nothing.vrt"]["read"][0]
    assert "too long for an array" in told["virtual"]["of 2 000 000 000 px.vrt"]["open"][0]


def test_a_broken_block_is_an_error_in_the_middle_of_a_file_too(tmp_path):
    options = {"tiled": True, "blockxsize": 64, "blockysize": 64, "compress": "deflate"}
    path = Path(write_raster(tmp_path / "a.tif", noise(1, 256, 256), **options))
    with rasterio.open(path) as dataset:
        offset = int(dataset.get_tag_item("BLOCK_OFFSET_1_2", "TIFF", bidx=1))
    content = bytearray(path.read_bytes())
    content[offset : offset + 20] = bytes(20)
    path.write_bytes(content)
    scene = di.open_raster(path)
    with pytest.raises(RasterioIOError, match=r"a\.tif: window .* cannot be read: .*X offset 1"):
        scene.compute()
