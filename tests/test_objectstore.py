"""Files that go to an object store, against a real S3 server (moto's) on the loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from urllib.request import Request, urlopen

import dask
import numpy as np
import pytest
import rasterio
import rioxarray  # noqa: F401

import daskinfer as di
from cogs import assert_valid, spec_of
from conftest import N3, noise, seeded, write_raster
from daskinfer import objectstore
from daskinfer.inputs.protocol import served_state
from daskinfer.objectstore import check_writable, is_object, local_path, state_of, upload
from daskinfer.raster import describe
from test_store import numbered, scene

pytest.importorskip("obstore", reason="needs: pip install 'daskinfer[s3]'")
moto = pytest.importorskip("moto.server", reason="needs: pip install 'daskinfer[test]'")
serving = pytest.importorskip("werkzeug.serving")

ROOT = Path(__file__).parents[1]
PART = 5 << 20


class Store:
    """A server, what it was asked for, and ways to make it fail."""

    def __init__(self):
        self.asked, self.keys = [], set()
        self.refuse = lambda method, query: None  # status to answer with, or None
        self.held = threading.Event()  # set when a request was held back
        self.let_go = threading.Event()
        self.hold = lambda method, query: False
        app = moto.DomainDispatcherApplication(moto.create_backend_app)

        def watched(environ, start_response):
            method, query = environ["REQUEST_METHOD"], environ["QUERY_STRING"]
            self.asked.append((method, environ["PATH_INFO"], query))
            signed = re.search(r"Credential=(\w+)/", environ.get("HTTP_AUTHORIZATION", ""))
            self.keys.add(signed and signed[1])
            if self.hold(method, query):
                self.held.set()
                self.let_go.wait(60)
            status = self.refuse(method, query)
            if status:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response(status, [("Content-Length", "0")])
                return [b""]
            return app(environ, start_response)

        self.server = serving.make_server(
            "127.0.0.1", 0, watched, threaded=True, request_handler=moto.MotoRequestHandler
        )
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self):
        self.let_go.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def ask(self, method, path):
        key = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request"
        request = Request(self.address + path, method=method, headers={"Authorization": key})
        with urlopen(request) as answer:
            return answer.read()

    def names(self, path="/maps", tag="Key"):
        root = ElementTree.fromstring(self.ask("GET", path))
        return [node.text for node in root.iter() if node.tag.rpartition("}")[2] == tag]

    def unfinished(self):
        return self.names("/maps?uploads", "UploadId")

    def count(self, method, part):
        return sum(asked[0] == method and part in asked[2] for asked in self.asked)


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    store.ask("POST", "/moto-api/reset")  # all servers of a process share moto's memory
    store.ask("PUT", "/maps")
    yield store
    store.close()


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(objectstore, "_PART_BYTES", PART)


@pytest.fixture
def big(tmp_path):
    """A file of five parts."""
    path = tmp_path / "big.tif"
    path.write_bytes(np.random.default_rng(0).bytes(4 * PART + 12345))
    return path


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["s3://b/k.tif", "gs://b/k.tif", "az://b/k.tif"])
def test_what_is_an_object(name):
    assert is_object(name)


@pytest.mark.parametrize("name", ["k.tif", "/s3/k.tif", "s3:/b/k.tif", "http://b/k.tif", "s3"])
def test_what_is_not(name):
    assert not is_object(name)


@pytest.mark.parametrize("url", ["s3://", "s3://maps", "s3://maps/", "s3://maps/a/"])
def test_a_name_without_an_object_is_refused(url):
    with pytest.raises(ValueError, match=r"names no object: expected s3://bucket/name\.tif"):
        check_writable(url)


def test_the_local_file_is_the_same_each_time_and_differs_by_url(tmp_path):
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        paths = [local_path(f"s3://{name}") for name in ("a/x.tif", "b/x.tif", "a/x.tif")]
    assert paths[0] == paths[2] != paths[1]
    assert {os.path.dirname(path) for path in paths} == {str(tmp_path)}


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'daskinfer\[s3\]'"):
        check_writable("s3://maps/a.tif")


# ---- checks before work --------------------------------------------------------------------------


def test_checking_leaves_nothing(store):
    check_writable("s3://maps/a/b.tif")
    assert store.names() == []
    assert store.unfinished() == []
    assert store.count("POST", "uploads") == 1


def test_an_existing_object_is_refused_unless_overwritten(store, tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    upload(str(tmp_path / "a"), "s3://maps/a.tif")
    with pytest.raises(FileExistsError, match=r"'s3://maps/a.tif' exists: pass overwrite=True"):
        check_writable("s3://maps/a.tif")
    check_writable("s3://maps/a.tif", overwrite=True)
    assert store.ask("GET", "/maps/a.tif") == b"old"


def test_a_missing_bucket_is_named(store):
    with pytest.raises(FileNotFoundError, match=r"s3://none/a.tif: no such bucket"):
        check_writable("s3://none/a.tif")


def test_a_store_that_refuses_is_refused_before_work(store):
    store.refuse = lambda method, query: "403 Forbidden" if method == "POST" else None
    with pytest.raises(PermissionError, match=r"s3://maps/a.tif: the store refuses"):
        check_writable("s3://maps/a.tif")


def test_keys_from_the_file_of_amazons_tools(store, tmp_path, monkeypatch):
    pytest.importorskip("boto3")
    (tmp_path / "keys").write_text(
        "[maps]\naws_access_key_id = OFTHEFILE\naws_secret_access_key = y\n"
    )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "maps")
    store.keys.clear()
    check_writable("s3://maps/a.tif")
    assert store.keys == {"OFTHEFILE"}


# ---- the state of what is read -------------------------------------------------------------------


def put(store, path, content):
    path.write_bytes(content)
    upload(str(path), "s3://maps/a.tif")


def test_an_object_with_other_bytes_is_in_another_state(store, tmp_path):
    put(store, tmp_path / "a", b"old")
    source = replace(
        describe(write_raster(tmp_path / "b.tif", noise(1, 8, 8))), path="s3://maps/a.tif"
    )
    before, told = served_state(source), state_of("s3://maps/a.tif")
    assert told
    assert served_state(source) == before
    assert served_state(replace(source, path="/vsis3/maps/a.tif")) == before
    put(store, tmp_path / "a", b"new")
    assert served_state(source) != before
    assert state_of("s3://maps/a.tif") not in ("", told)


def test_the_state_is_asked_where_gdal_reads(store, tmp_path, monkeypatch):
    put(store, tmp_path / "a", b"old")
    told = state_of("s3://maps/a.tif")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_S3_ENDPOINT", store.address.removeprefix("http://"))
    monkeypatch.setenv("AWS_HTTPS", "NO")
    assert state_of("s3://maps/a.tif") == told != ""
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "YES")
    store.keys.clear()
    state_of("s3://maps/a.tif")
    assert store.keys == {None}


def test_what_a_store_does_not_tell_is_no_state(store, tmp_path, monkeypatch):
    assert state_of("s3://maps/missing.tif") == ""
    assert state_of("s3://none/a.tif") == ""
    put(store, tmp_path / "a", b"old")
    store.refuse = lambda method, query: "403 Forbidden"
    assert state_of("s3://maps/a.tif") == ""
    store.refuse = lambda method, query: None
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    assert state_of("s3://maps/a.tif") == ""


# ---- sending -------------------------------------------------------------------------------------


def test_an_upload_has_all_bytes(store, big, small_parts):
    told = []
    upload(str(big), "s3://maps/deep/er/big.tif", told.append)
    assert store.ask("GET", "/maps/deep/er/big.tif") == big.read_bytes()
    assert store.count("PUT", "partNumber") == 5
    assert told == [PART, 2 * PART, 3 * PART, 4 * PART, 4 * PART + 12345]
    assert store.unfinished() == []


def test_parts_grow_with_the_file(store, big, monkeypatch):
    monkeypatch.setattr(objectstore, "_PART_BYTES", PART)
    monkeypatch.setattr(objectstore, "_MOST_PARTS", 2)
    upload(str(big), "s3://maps/big.tif")
    assert store.count("PUT", "partNumber") == 2
    assert store.ask("GET", "/maps/big.tif") == big.read_bytes()


def test_a_passing_fault_is_tried_again(store, big, small_parts):
    left = [2]

    def sometimes(method, query):
        if "partNumber=2" in query and left[0]:
            left[0] -= 1
            return "503 Service Unavailable"
        return None

    store.refuse = sometimes
    upload(str(big), "s3://maps/big.tif")
    assert left == [0]
    assert store.ask("GET", "/maps/big.tif") == big.read_bytes()


def test_a_store_that_fails_for_good_shows_nothing(store, big, small_parts):
    store.refuse = lambda _, query: "403 Forbidden" if "partNumber=3" in query else None
    with pytest.raises(PermissionError, match=r"s3://maps/big.tif: the store refuses"):
        upload(str(big), "s3://maps/big.tif")
    assert store.names() == []
    assert store.unfinished() == []


def test_an_interrupted_upload_is_taken_back_and_the_old_object_stays(store, big, small_parts):
    first = big.with_name("first")
    first.write_bytes(b"first")
    upload(str(first), "s3://maps/big.tif")

    def interrupt(sent):
        if sent >= 2 * PART:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(str(big), "s3://maps/big.tif", interrupt)
    assert store.unfinished() == []
    assert store.ask("GET", "/maps/big.tif") == b"first"


def test_a_killed_upload_shows_nothing_and_another_starts_afresh(store, big, small_parts):
    code = (
        "import sys; from daskinfer import objectstore as o; o._PART_BYTES = 5 << 20;"
        "o.upload(sys.argv[1], 's3://maps/big.tif')"
    )
    store.hold = lambda _, query: "partNumber=4" in query
    child = subprocess.Popen([sys.executable, "-c", code, str(big)], cwd=ROOT)
    assert store.held.wait(60)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert store.names() == []
    store.hold = lambda method, query: False
    store.let_go.set()
    upload(str(big), "s3://maps/big.tif")
    assert store.names() == ["big.tif"]
    assert store.ask("GET", "/maps/big.tif") == big.read_bytes()


# ---- whole rasters -------------------------------------------------------------------------------


def test_write_cog_to_an_object(store, tmp_path):
    pixels = numbered(1024, 128)
    with dask.config.set({"temporary-directory": str(tmp_path), "scheduler": "threads"}):
        di.write_cog(scene(pixels), "s3://maps/numbers.tif", blocksize=64)
    assert os.listdir(tmp_path) == []
    copy = tmp_path / "copy.tif"
    copy.write_bytes(store.ask("GET", "/maps/numbers.tif"))
    assert_valid(copy, spec_of(1024, 1024, blocksize=64))
    before = len(store.asked)
    with (
        rasterio.Env(GDAL_DISABLE_READDIR_ON_OPEN="EMPTY_DIR"),
        rasterio.open(f"/vsicurl/{store.address}/maps/numbers.tif") as dataset,
    ):
        assert dataset.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        np.testing.assert_array_equal(dataset.read(), pixels.compute(scheduler="sync"))
    assert all(method in ("GET", "HEAD") for method, _, _ in store.asked[before:])


def test_write_cog_asks_before_anything_is_computed(store, tmp_path):
    def never(block):
        raise AssertionError("computed")

    data = numbered(256, 128).map_blocks(never, dtype="u1")
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        di.write_cog(scene(data), "s3://none/numbers.tif", blocksize=64)


def test_write_cog_keeps_nothing_when_the_upload_fails(store, tmp_path):
    store.refuse = lambda _, query: "403 Forbidden" if "partNumber" in query else None
    with (
        dask.config.set({"temporary-directory": str(tmp_path), "scheduler": "threads"}),
        pytest.raises(PermissionError, match=r"s3://maps/numbers.tif: the store refuses"),
    ):
        di.write_cog(scene(numbered(256, 128)), "s3://maps/numbers.tif", blocksize=64)
    assert os.listdir(tmp_path) == []
    assert store.names() == []
    assert store.unfinished() == []


# ---- runs ------------------------------------------------------------------------------------


def job(tmp_path):
    source = write_raster(tmp_path / "scene.tif", noise(2, 150, 130))
    return source, seeded(N3)


def downloaded(store, tmp_path, name="o.tif"):
    path = tmp_path / "downloaded.tif"
    path.write_bytes(store.ask("GET", f"/maps/{name}"))
    with rasterio.open(path) as dataset:
        return dataset.read()


def test_a_run_to_an_object_is_the_run_to_a_file(store, tmp_path, one_worker):
    source, net = job(tmp_path)
    di.run(source, net, tmp_path / "local.tif", client=one_worker, tile=32, chunk=64)
    folder = tmp_path / "temporary"
    folder.mkdir()
    with dask.config.set({"temporary-directory": str(folder)}):
        report = di.run(source, net, "s3://maps/o.tif", client=one_worker, tile=32, chunk=64)
    assert report.output == "s3://maps/o.tif"
    assert report.file_bytes == len(store.ask("GET", "/maps/o.tif"))
    with rasterio.open(tmp_path / "local.tif") as dataset:
        assert np.array_equal(downloaded(store, tmp_path), dataset.read())
    assert list(folder.iterdir()) == []


def test_a_run_whose_upload_failed_only_sends_when_it_is_run_again(store, tmp_path, one_worker):
    source, net = job(tmp_path)
    folder = tmp_path / "temporary"
    folder.mkdir()
    options = {"client": one_worker, "tile": 32, "chunk": 64}
    with dask.config.set({"temporary-directory": str(folder)}):
        plan = di.plan(source, net, "s3://maps/o.tif", tile=32, chunk=64)
        # 403 is not tried again.
        store.refuse = lambda method, query: (
            "403 Forbidden" if method == "PUT" and "partNumber" in query else None
        )
        with pytest.raises(PermissionError, match=r"s3://maps/o\.tif"):
            di.run(plan, client=one_worker)
        assert store.names() == []
        store.refuse = lambda method, query: None
        report = di.run(source, net, "s3://maps/o.tif", **options)
    assert (report.tiles, report.resumed) == (0, report.chunks)
    assert downloaded(store, tmp_path).shape == (1, 150, 130)
    assert list(folder.iterdir()) == []


def test_a_plan_for_an_object_in_no_bucket_is_refused(store, tmp_path):
    source, net = job(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        di.plan(source, net, "s3://nowhere/o.tif")
