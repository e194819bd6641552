"""Range requests that GDAL makes to read our file, against its own COG of the same pixels."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import rasterio
import rasterio.shutil
from rasterio.windows import Window

from cogs import spec_of, write_all
from daskinfer.cog import WorkFile
from httpserver import serve

# What a reader of COGs in the cloud sets, and nothing that hides requests: no header is read
# ahead of its use, and what was read once is not asked for again.
ENV = {
    "GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR",
    "CPL_VSIL_CURL_ALLOWED_EXTENSIONS": ".tif",
    "GDAL_HTTP_MERGE_CONSECUTIVE_RANGES": "YES",
    "GDAL_NUM_THREADS": "1",
}
# Of GDAL's own, as asked.
MOST = 1.15


def patches(spec, side=64):
    """Classes in patches with ragged borders, which compress as class maps do."""
    rng = np.random.default_rng(5)
    rows, cols = (-(-n // side) for n in (spec.height, spec.width))
    array = rng.integers(0, 8, (1, rows, cols)).astype(spec.dtype)
    array = array.repeat(side, 1).repeat(side, 2)[:, : spec.height, : spec.width]
    array[rng.random(array.shape) < 0.05] = 8
    array[:, : spec.height // 3, : spec.width // 4] = spec.fill
    return array


def gdals_own(path, array, spec):
    """The same pixels by GDAL's COG driver."""
    plain = path.with_suffix(".plain.tif")
    with rasterio.open(
        plain, "w", driver="GTiff", height=spec.height, width=spec.width, count=1,
        dtype=spec.dtype, nodata=spec.nodata, crs=spec.crs,
        transform=rasterio.Affine(*spec.transform), tiled=True,
    ) as dataset:  # fmt: skip
        dataset.write(array)
    rasterio.shutil.copy(
        plain, path, driver="COG", compress="DEFLATE", level=6, predictor="STANDARD",
        blocksize=spec.blocksize, overview_resampling="MODE", BIGTIFF="YES",
    )  # fmt: skip
    plain.unlink()


def ways(size):
    """What readers do, by name."""
    window, rng = min(4096, size // 2), np.random.default_rng(1)
    spots = [tuple(map(int, rng.integers(0, size - 256, 2))) for _ in range(10)]

    def thumbnail(url):
        with rasterio.open(url) as dataset:
            dataset.read(out_shape=(1, 1024, 1024))

    def part(at, level=None):
        def read(url):
            options = {} if level is None else {"overview_level": level}
            with rasterio.open(url, **options) as dataset:
                dataset.read(window=Window(at, at + 300, window, window))

        return read

    def strip(url):
        with rasterio.open(url) as dataset:
            dataset.read(window=Window(0, size // 2, size, 512))

    def random(url):
        with rasterio.open(url) as dataset:
            for col, row in spots:
                dataset.read(window=Window(col, row, 256, 256))

    return {
        "thumbnail": thumbnail,
        "full resolution": part(size // 3),
        "overview 1": part(size // 10, 0),
        "overview 2": part(size // 40, 1),
        "strip": strip,
        "ten random": random,
    }


def requests_of(folder, size):
    """GETs and bytes of each way, for both files."""
    counts = {}
    with serve(folder) as served, rasterio.Env(**ENV):
        for number, (name, read) in enumerate(ways(size).items()):
            for file in ("ours.tif", "gdals.tif"):
                # A new name each time, so that GDAL remembers nothing of the last.
                read(f"/vsicurl/{served.url(file, number)}")
                counts[name, file] = served.take()
    return counts


def both(folder, size):
    spec = spec_of(size, size, nodata=255)
    array = patches(spec)
    with contextlib.closing(WorkFile.create(folder / "work", spec, (2048, 2048))) as work:
        # Backwards, as an order that is far from that of the finished file.
        write_all(work, array, range((-(-size // 2048)) ** 2)[::-1])
        work.finish(folder / "ours.tif")
    gdals_own(folder / "gdals.tif", array, spec)
    return requests_of(folder, size)


def assert_no_more_requests(counts):
    for name in dict.fromkeys(name for name, _ in counts):
        ours, gdals = (counts[name, file][0] for file in ("ours.tif", "gdals.tif"))
        assert 0 < ours <= MOST * gdals, (name, ours, gdals)


def test_requests_of_readers(tmp_path):
    assert_no_more_requests(both(tmp_path, 6000))


@pytest.mark.slow
def test_requests_of_readers_of_a_large_file(tmp_path):
    assert_no_more_requests(both(tmp_path, 20_000))


def test_the_counter_counts(tmp_path):
    (tmp_path / "a.tif").write_bytes(b"x" * 100)
    with serve(tmp_path) as served, rasterio.Env(**ENV):
        with pytest.raises(rasterio.errors.RasterioIOError):
            rasterio.open(f"/vsicurl/{served.url('a.tif')}")
        gets, size = served.take()
        assert gets >= 1
        assert size >= 100
        assert served.take() == (0, 0)
