"""Remote files whose server fails now and then, or always, or wants addresses that expire."""

from __future__ import annotations

import time
from urllib.request import Request, urlopen

import numpy as np
import pytest
import rasterio

import daskinfer as di
from conftest import Pixel, noise, write_raster
from daskinfer import remote
from daskinfer.monitor import RunStarted
from daskinfer.raster import describe
from daskinfer.remote import UnreachableError, environment, is_remote
from faultserver import faulty, sign
from models import in_new_process
from sources import everything, window

RAW = noise(2, 600, 600)
JOB = {"tile": 128, "chunk": 128, "blocksize": 128}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Failures that follow each other without the pauses of real ones, and caches that are new."""
    monkeypatch.setenv("GDAL_HTTP_RETRY_DELAY", "0.01")
    monkeypatch.setattr(remote, "_DELAY", 0.01)
    remote._lost.clear()


@pytest.fixture
def folder(tmp_path):
    tiled = {"tiled": True, "blockxsize": 128, "blockysize": 128, "compress": "deflate"}
    write_raster(tmp_path / "scene.tif", RAW, **tiled)
    return tmp_path


def faults(folder):
    file = folder / "faults"
    return int(file.read_text()) if file.exists() else 0


def fail(folder):
    """Have the server fail from now on."""
    (folder / "broken").touch()


def result(path):
    with rasterio.open(path) as dataset:
        return dataset.read()


@pytest.mark.parametrize("code", ["503", "reset"])
def test_every_third_request_may_fail(folder, one_worker, code):
    model = di.load_model(Pixel(), output="values")
    fail(folder)
    with faulty(folder, code=code, every=3) as url:
        report = di.run(f"{url}/scene.tif", model, folder / "o.tif", client=one_worker, **JOB)
    assert faults(folder) > 3
    assert report.complete
    assert np.array_equal(result(folder / "o.tif"), RAW.astype(np.float32))


def test_a_failure_that_outlasts_gdals_own_patience_is_tried_with_a_new_handle(folder):
    with faulty(folder, code="503", most=6) as url:
        raster = describe(f"{url}/scene.tif")
        fail(folder)
        pixels = raster.read(window(0, 0, 256, 256))
    assert faults(folder) == 6  # more than the 4 requests of one handle
    assert np.array_equal(pixels.data, RAW[:, :256, :256])


def test_a_file_that_could_not_be_opened_is_not_remembered_as_missing(folder, monkeypatch):
    monkeypatch.setenv("GDAL_HTTP_MAX_RETRY", "0")
    fail(folder)
    with faulty(folder, code="503") as url:
        for _ in range(2):
            with pytest.raises(ValueError, match="503"):
                describe(f"{url}/scene.tif")
        (folder / "broken").unlink()
        assert np.array_equal(everything(describe(f"{url}/scene.tif")).data, RAW)


@pytest.mark.parametrize("code", ["503", "reset"])
def test_a_server_that_always_fails_is_an_error_with_address_and_window(folder, one_worker, code):
    model = di.load_model(Pixel(), output="values")

    def tell(event):
        if isinstance(event, RunStarted):
            fail(folder)

    with faulty(folder, code=code) as url:
        with pytest.raises(di.InferenceError) as caught:
            di.run(
                f"{url}/scene.tif", model, folder / "o.tif", client=one_worker,
                callbacks=[tell], **JOB,
            )  # fmt: skip
        assert f"{url}/scene.tif: window (row, col, height, width) = (" in str(caught.value)
    assert isinstance(caught.value.__cause__, UnreachableError)
    assert not (folder / "o.tif").exists()
    # No silent nodata: what is in the file is right.
    partial = result(folder / "o.tif.partial")
    there = ~np.isnan(partial)
    assert np.array_equal(partial[there], RAW[there])


def test_a_file_that_was_given_up_is_not_waited_for_again(folder):
    with faulty(folder, code="503") as url:
        raster = describe(f"{url}/scene.tif")
        fail(folder)
        with pytest.raises(UnreachableError, match="in 4 tries"):
            raster.read(window(0, 0, 128, 128))
        before = faults(folder)
        with pytest.raises(UnreachableError, match="in 1 tries"):
            raster.read(window(0, 0, 128, 128))
        assert faults(folder) <= before + 2


@pytest.mark.slow
def test_addresses_are_signed_where_and_when_they_are_read(folder, two_workers, monkeypatch):
    log = folder / "signed"
    monkeypatch.setenv("SIGNED_LOG", str(log))

    def tell(path, tests):
        import os
        import sys

        os.environ["SIGNED_LOG"] = path
        sys.path.insert(0, tests)

    two_workers.run(tell, str(log), __file__.rpartition("/")[0])
    model = di.load_model(Slow(), output="values")
    with faulty(folder, signed=True) as url:
        scene = di.open_raster(f"{url}/scene.tif", sign=sign)
        start = time.monotonic()
        report = di.run(scene, model, folder / "o.tif", client=two_workers, batch_size=1, **JOB)
        # Several times as long as an address is good for.
        assert time.monotonic() - start > 2
    assert report.complete
    signers = log.read_text().split()
    assert len(signers) > 3
    assert {str(pid) for pid in two_workers.run(_pid).values()} <= set(signers)
    assert np.array_equal(result(folder / "o.tif"), RAW.astype(np.float32))


def _pid():
    import os

    return os.getpid()


class Slow(Pixel):
    """Takes its time, so that addresses expire during the run."""

    def forward(self, x):
        time.sleep(0.25)
        return x


def requests(folder):
    """What was asked for since the last time."""
    file = folder / "requests"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def test_few_requests_open_a_file(folder):
    with faulty(folder) as url:
        raster = describe(f"{url}/scene.tif")
        asked = requests(folder)
        assert len(asked) <= 6
        assert {line.split()[1] for line in asked} == {"/scene.tif", "/scene.tif.msk"}
        raster.read(window(0, 0, 128, 128))
        asked = requests(folder)
        # Once more for the handle of this thread; the rest are blocks.
        assert asked.count("HEAD /scene.tif") <= 2
        assert {line.split()[1] for line in asked} == {"/scene.tif"}
        raster.read(window(256, 256, 128, 128))
        assert {line.split()[0] for line in requests(folder)} <= {"GET"}


def test_a_run_asks_for_no_files_beside_one_that_is_alone(folder, one_worker):
    model = di.load_model(Pixel(), output="values")
    with faulty(folder) as url:
        di.run(f"{url}/scene.tif", model, folder / "o.tif", client=one_worker, **JOB)
        asked = {line.split()[1] for line in requests(folder)}
    assert asked == {"/scene.tif", "/scene.tif.msk"}


def test_a_mask_beside_a_remote_file_is_used(folder, one_worker):
    mask = np.ones((600, 600), bool)
    mask[100:200, 300:] = False
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False),
        rasterio.open(folder / "scene.tif", "r+") as dataset,
    ):
        dataset.write_mask(mask)
    model = di.load_model(Pixel(), output="values")
    with faulty(folder, beside=True) as url:
        pixels = everything(describe(f"{url}/scene.tif"))
        assert np.array_equal(pixels.valid, mask)
        di.run(f"{url}/scene.tif", model, folder / "o.tif", client=one_worker, **JOB)
    assert np.array_equal(~np.isnan(result(folder / "o.tif")[0]), mask)


def test_a_place_written_beside_a_remote_file_is_used(tmp_path):
    with pytest.warns(rasterio.errors.NotGeoreferencedWarning):
        write_raster(tmp_path / "scene.tif", noise(1, 20, 30), transform=None, crs=None)
    (tmp_path / "scene.tfw").write_text("10\n0\n0\n-10\n500005\n5599995\n")
    with faulty(tmp_path, beside=True) as url:
        grid = describe(f"{url}/scene.tif").grid
    assert grid.transform == rasterio.Affine(10, 0, 500_000, 0, -10, 5_600_000)


def test_a_server_that_cannot_tell_of_a_mask_is_not_taken_for_one_without(folder):
    fail(folder)
    with faulty(folder, code="503", beside=True) as url:
        (folder / "scene.tif.msk").touch()
        with pytest.raises(ValueError, match="503"):
            describe(f"{url}/scene.tif")


def test_the_users_word_on_files_beside_comes_first(monkeypatch):
    with environment("https://host/a.tif", alone=True):
        assert rasterio.env.getenv()["GDAL_DISABLE_READDIR_ON_OPEN"] == "EMPTY_DIR"
    monkeypatch.setenv("GDAL_DISABLE_READDIR_ON_OPEN", "FALSE")
    with environment("https://host/a.tif", alone=True):
        assert "GDAL_DISABLE_READDIR_ON_OPEN" not in rasterio.env.getenv()


def test_which_paths_are_remote(tmp_path):
    local, mosaic = tmp_path / "a.vrt", tmp_path / "b.vrt"
    local.write_text("<SourceFilename>/data/a.tif</SourceFilename>")
    mosaic.write_text("<SourceFilename>/vsicurl/http://host/a.tif</SourceFilename>")
    remote_ones = ["https://h/a.tif", "s3://b/a.tif", "/vsicurl/http://h/a.tif", str(mosaic)]
    assert [is_remote(path) for path in remote_ones] == [True] * 4
    assert [is_remote(p) for p in ["a.tif", "file:///a.tif", str(local), "/vsizip/a.zip"]] == [
        False
    ] * 4


def test_the_users_own_settings_come_first(monkeypatch):
    monkeypatch.delenv("GDAL_HTTP_RETRY_DELAY")
    monkeypatch.setenv("GDAL_HTTP_MAX_RETRY", "7")
    with rasterio.Env(GDAL_HTTP_RETRY_DELAY=9), environment("https://host:80/a.tif"):
        options = rasterio.env.getenv()
    assert options["GDAL_HTTP_RETRY_DELAY"] == 9
    assert "GDAL_HTTP_MAX_RETRY" not in options
    assert options["CPL_VSIL_CURL_NON_CACHED"] == "/vsicurl/https://host"


def test_objects_of_a_store_are_read_with_the_keys_of_the_environment(folder, monkeypatch):
    pytest.importorskip("moto.server", reason="needs: pip install 'daskinfer[test]'")
    from test_objectstore import Store

    signed = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request",
        "Content-Type": "image/tiff",
    }
    keys = {
        "AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
        "AWS_HTTPS": "NO", "AWS_VIRTUAL_HOSTING": "FALSE",
    }  # fmt: skip
    store = Store()
    try:
        host = store.address.removeprefix("http://")
        for name, value in (keys | {"AWS_S3_ENDPOINT": host}).items():
            monkeypatch.setenv(name, value)
        store.ask("PUT", "/scenes")
        content = (folder / "scene.tif").read_bytes()
        with urlopen(Request(f"{store.address}/scenes/a/scene.tif", content, signed, method="PUT")):
            store.asked.clear()
        # The server answers from this process, so that reading is up to another.
        told = in_new_process(
            """
            from daskinfer.raster import describe
            from daskinfer.tiling import Span, Window
            raster = describe("s3://scenes/a/scene.tif")
            pixels = raster.read(Window(Span(100, 300), Span(200, 500)))
            print(raster.grid.shape, int(pixels.data.astype("int64").sum()))
            """
        )
    finally:
        store.close()
    assert told == f"(600, 600) {RAW[:, 100:300, 200:500].astype('int64').sum()}"
    assert "reader" in store.keys
    # Whether there is a mask is asked once, and listed once.
    paths = [path for _, path, _ in store.asked]
    assert set(paths) == {"/scenes/", "/scenes/a/scene.tif", "/scenes/a/scene.tif.msk"}
    assert paths.count("/scenes/") == 1
    assert paths.count("/scenes/a/scene.tif.msk") <= 2
