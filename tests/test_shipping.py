"""Workers that do not reach the output's folder send what they encode to the process that does."""

from __future__ import annotations

import contextlib
import os
import subprocess

import numpy as np
import pytest
import rasterio

import daskinfer as di
from conftest import N3, noise, seeded, write_raster
from daskinfer import outputs, station
from daskinfer.errors import InferenceError
from daskinfer.filelock import FileLock
from daskinfer.ledger import Ledger, announced
from daskinfer.runner import _Driver
from handmade import Handmade
from test_store import fails_at, numbered
from test_store import scene as scene_of

JOB = {"tile": 32, "chunk": 32}


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """A raster, and the classes of all of it."""
    folder = tmp_path_factory.mktemp("source")
    path = write_raster(folder / "scene.tif", noise(2, 70, 90))
    di.run(path, seeded(N3), folder / "expected.tif", **JOB)
    with rasterio.open(folder / "expected.tif") as dataset:
        return path, dataset.read()


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Two workers, one of which sees nothing in the folder ``out``."""
    folder = tmp_path_factory.mktemp("apart")
    out = folder / "out"
    out.mkdir()
    wrap = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {out} && exec "$@"', "sh"]
    if subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mount namespaces")
    with contextlib.closing(Handmade(folder)) as made:
        made.worker("far", wrap=wrap)
        made.worker("near")
        with made.client() as client:
            yield client, out


@pytest.mark.parametrize("name", ["one.tif", "many.vrt"])
def test_the_output_is_the_same(apart, scene, name):
    client, out = apart
    source, expected = scene
    split = {"split": 64} if name.endswith(".vrt") else {}
    with pytest.warns(UserWarning, match=f"do not share the folder {out} with this process"):
        report = di.run(source, seeded(N3), out / name, client=client, **JOB, **split)
    assert report.complete
    with rasterio.open(out / name) as dataset:
        np.testing.assert_array_equal(dataset.read(), expected)
        assert dataset.overviews(1) == [2, 4]


def test_write_cog_is_refused_before_any_work(apart):
    client, out = apart
    data = numbered(128, 64).map_blocks(fails_at(0), dtype="u1")
    storing = di.write_cog(scene_of(data), out / "o.tif", blocksize=32, compute=False)
    with client.as_current(), pytest.raises(FileNotFoundError, match=f"1 of 2 .* '{out}' with"):
        storing.compute()
    assert not [name for name in os.listdir(out) if name.startswith("o.tif")]


def refused(*_):
    raise OSError(37, "No locks available")


@pytest.fixture
def no_locks(monkeypatch):
    """A file system on which workers cannot lock, as they find out; this process can."""
    reaches = outputs.reaches

    def without(plan, run):
        with monkeypatch.context() as patched:
            patched.setattr(FileLock, "short", refused)
            return reaches(plan, run)

    monkeypatch.setattr(station, "reaches", without)


@pytest.mark.filterwarnings("ignore:workers do not share")
def test_where_locks_do_not_work(tmp_path, scene, one_worker, no_locks):
    source, expected = scene
    assert di.run(source, seeded(N3), tmp_path / "o.tif", client=one_worker, **JOB).complete
    with rasterio.open(tmp_path / "o.tif") as dataset:
        np.testing.assert_array_equal(dataset.read(), expected)


@pytest.mark.filterwarnings("ignore:workers do not share")
def test_few_bytes_are_on_their_way(tmp_path, scene, one_worker, no_locks, monkeypatch):
    """A task that has enough to send leaves the rest of its chunks to others."""
    monkeypatch.setattr(station, "_MOST_SENT", 1)
    sizes, done = [], _Driver._done

    def counted(self, result):
        sizes.append((len(result.done), len(result.left)))
        done(self, result)

    monkeypatch.setattr(_Driver, "_done", counted)
    monkeypatch.setattr("daskinfer.dispatch.Pace.size", lambda self, left, lanes: min(3, left))
    source, expected = scene
    di.run(source, seeded(N3), tmp_path / "o.tif", client=one_worker, **JOB)
    assert max(left for _, left in sizes) == 2
    assert all(done == 1 for done, _ in sizes)
    with rasterio.open(tmp_path / "o.tif") as dataset:
        np.testing.assert_array_equal(dataset.read(), expected)


@pytest.mark.filterwarnings("ignore:workers do not share")
def test_a_disk_that_is_full_here_ends_the_run_and_it_goes_on(
    tmp_path, scene, one_worker, no_locks, monkeypatch
):
    source, expected = scene
    path = tmp_path / "o.tif"
    take, left = outputs.Outputs.take, [3]

    def full(self, result):
        def append(encoded):
            raise OSError(28, "No space left on device", self.work.path)

        left[0] -= 1
        if left[0] < 0:
            monkeypatch.setattr(self.work, "append", append)
        take(self, result)

    with monkeypatch.context() as patched:
        patched.setattr(outputs.Outputs, "take", full)
        with pytest.raises(InferenceError, match=r"No space left on device: .*o\.tif\.partial"):
            di.run(source, seeded(N3), path, client=one_worker, **JOB)
    report = di.run(source, seeded(N3), path, client=one_worker, **JOB)
    assert report.resumed >= 3
    with rasterio.open(path) as dataset:
        np.testing.assert_array_equal(dataset.read(), expected)


def test_a_file_of_that_name_may_be_of_another_run(tmp_path):
    path = tmp_path / "o.tif.partial.jsonl"
    assert not announced(path, "run-1")
    with Ledger(path) as ledger:
        ledger.begin({"a": 1})
        ledger.announce("run-1")
    assert announced(path, "run-1")
    assert not announced(path, "run-2")


def test_nothing_is_sent_where_the_folder_is_shared(tmp_path, scene, two_workers):
    source, expected = scene
    # A warning would be an error.
    di.run(source, seeded(N3), tmp_path / "o.tif", client=two_workers, **JOB)
    with rasterio.open(tmp_path / "o.tif") as dataset:
        np.testing.assert_array_equal(dataset.read(), expected)
    assert os.listdir(tmp_path) == ["o.tif"]
