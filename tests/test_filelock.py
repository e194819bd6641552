"""The lock of a file that threads and processes share."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from daskinfer.filelock import FileLock

ROOT = Path(__file__).parents[1]

COUNT = """
import sys
from daskinfer.filelock import FileLock
lock = FileLock(sys.argv[1])
for _ in range(200):
    with lock.short():
        with open(sys.argv[1]) as file:
            number = int(file.read())
        with open(sys.argv[1], "w") as file:
            file.write(str(number + 1))
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_text("0")
    return str(tmp_path / "file")


def count(path, lock, times):
    for _ in range(times):
        with lock.short():
            number = int(Path(path).read_text())
            Path(path).write_text(str(number + 1))


def test_processes_exclude_each_other(path):
    job = [sys.executable, "-c", COUNT, path]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen(job, env=environment) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert Path(path).read_text() == "600"


@pytest.mark.parametrize("shared", [True, False])
def test_threads_exclude_each_other(path, shared):
    locks = [FileLock(path)] * 4 if shared else [FileLock(path) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, [path] * 4, locks, [200] * 4))
    assert Path(path).read_text() == "800"


def test_threads_of_the_owner_of_a_long_lock_exclude_each_other(path):
    lock = FileLock(path)
    with lock.long(), ThreadPoolExecutor(4) as pool:
        list(pool.map(count, [path] * 4, [lock] * 4, [200] * 4))
    assert Path(path).read_text() == "800"


def test_a_long_lock_keeps_others_out(path):
    lock, other = FileLock(path), FileLock(path)
    with ThreadPoolExecutor(1) as pool:
        with lock.long():
            waiting = pool.submit(count, path, other, 1)
            count(path, lock, 100)
            assert Path(path).read_text() == "100"
            assert not waiting.done()
        waiting.result()
    assert Path(path).read_text() == "101"


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
def test_a_file_that_went_while_somebody_waited_is_refused(path, monkeypatch, how):
    lock, opened, flock = FileLock(path), threading.Event(), fcntl.flock

    def tell(fd, operation):
        opened.set()
        flock(fd, operation)

    with ThreadPoolExecutor(1) as pool:
        with lock.long():
            monkeypatch.setattr(fcntl, "flock", tell)
            waiting = pool.submit(count, path, FileLock(path), 1)
            assert opened.wait(60)
            if how == "removed":
                os.unlink(path)
            else:
                os.rename(path, f"{path}.new")
            if how == "replaced":
                Path(path).write_text("0")
        with pytest.raises(FileNotFoundError) as caught:
            waiting.result()
    assert caught.value.filename == path
