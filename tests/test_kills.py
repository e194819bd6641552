"""An output whose run is killed at any moment of beginning and of finishing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import rasterio

import daskinfer as di
from conftest import Pixel, noise, write_raster
from daskinfer import zarrwork
from daskinfer.cog import WorkFile
from daskinfer.outputs import Outputs
from daskinfer.planner import check_output
from sources import of_rioxarray

pytestmark = [
    of_rioxarray,
    pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning"),
]

# What a process does to a disk by name, in the order in which it does it.
CALLS = ("rename", "replace", "unlink", "mkdir", "rmdir", "ftruncate", "fsync")
# Threads of Zarr's do not stop with the one that waits for them.
OURS = ("MainThread", "ThreadPoolExecutor")
OPTIONS = {"tile": 32, "chunk": 32, "blocksize": 32}


class KilledError(Exception):
    """A process that is gone: not even what tidies up behind errors does anything any more."""


@contextlib.contextmanager
def killed_at(number):
    """Let this many calls through, of those that change a disk."""
    left = [number]

    def until_then(call):
        def called(*args, **kwargs):
            if threading.current_thread().name.startswith(OURS):
                if not left[0]:
                    raise KilledError
                left[0] -= 1
            return call(*args, **kwargs)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, until_then(getattr(os, name)))
        yield


class Run:
    """A run without workers, whose chunks are one number."""

    def __init__(self, folder, suffix):
        source = write_raster(folder / "scene.tif", noise(1, 64, 32), crs=None, transform=None)
        model = di.load_model(Pixel(), output="values")
        split = {"split": 32} if suffix == ".vrt" else {}
        self.folder = folder / "out"
        self.folder.mkdir()
        self.output = str(self.folder / f"o{suffix}")
        self.plan = di.plan(source, model, self.output, **OPTIONS, **split)
        self.appended = 0

    def go(self, value, overwrite):
        check_output(self.output, None, overwrite)
        plan = dataclasses.replace(self.plan, overwrite=overwrite)
        with Outputs.prepare(plan) as outputs:
            for number in outputs.todo()[0]:
                window = plan.inference.window(plan.tiling.index_of(number))
                pixels = np.full((1, *window.shape), value, np.float32)
                outputs.work.append(plan.draft.encode(pixels, *window.origin))
                self.appended += 1
            outputs.finish(())

    def values(self):
        """All numbers in the output; none where there is no output."""
        if not os.path.exists(self.output):
            return set()
        if self.output.endswith(".zarr"):
            return set(np.unique(di.open_raster(self.output).values))
        with rasterio.open(self.output) as dataset:
            return set(np.unique(dataset.read()))


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("suffix", [".tif", ".vrt", ".zarr"])
def test_the_same_call_goes_on_or_starts_again(tmp_path, suffix, overwrite, step):
    run = Run(tmp_path, suffix)
    run.go(1, overwrite=False)
    old = tmp_path / "old"
    run.folder.rename(old)
    alone = sorted(os.listdir(old))
    for moment in range(0, 1000, step):
        if overwrite:
            shutil.copytree(old, run.folder)
        else:
            run.folder.mkdir()
        run.appended = 0
        try:
            with killed_at(moment):
                run.go(2, overwrite)
        except KilledError:
            before = run.appended
            # Whole, and of one run.
            assert run.values() in ({1.0}, {2.0}, set()) if overwrite else ({2.0}, set())
            if overwrite or not os.path.exists(run.output):
                run.go(2, overwrite)
                assert overwrite or run.appended <= 2 + (before == 0)
                assert sorted(os.listdir(run.folder)) == alone
            assert run.values() == {2.0}
        else:
            break
        shutil.rmtree(run.folder)
    assert moment >= 10
    assert run.values() == {2.0}


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
def test_a_split_output_is_not_shown_while_its_files_are_replaced(tmp_path, monkeypatch):
    run = Run(tmp_path, ".vrt")
    run.go(1, overwrite=False)
    finish, files = WorkFile.finish, []

    def full(self, *args, **kwargs):
        files.append(self.path)
        if len(files) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        return finish(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(WorkFile, "finish", full)
        again = "o.vrt.partial: run the same call without overwrite=True to go on"
        with pytest.raises(di.InferenceError, match=f"No space left.*{again}"):
            run.go(2, overwrite=True)
    assert run.values() == set()
    run.appended = 0
    run.go(2, overwrite=False)
    assert (run.appended, run.values()) == (0, {2.0})


@pytest.mark.parametrize("suffix", [".tif", ".zarr"])
def test_a_full_disk_at_the_end_keeps_the_old_output_and_tells_how_to_go_on(
    tmp_path, monkeypatch, suffix
):
    run = Run(tmp_path, suffix)
    run.go(1, overwrite=False)

    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    with monkeypatch.context() as patch:
        patch.setattr(type(run.plan.draft.create(str(tmp_path / "any"))), "finish", full)
        with pytest.raises(di.InferenceError, match=f"remove .*o{suffix} and run the same call"):
            run.go(2, overwrite=True)
    assert run.values() == {1.0}
    (shutil.rmtree if suffix == ".zarr" else os.unlink)(run.output)
    run.appended = 0
    run.go(2, overwrite=False)
    assert (run.appended, run.values()) == (0, {2.0})


def test_a_store_that_was_killed_while_it_was_made_is_made_again(tmp_path, monkeypatch):
    run = Run(tmp_path, ".zarr")
    whole = zarrwork._write_template

    def half(path, *args):
        whole(path, *args)
        os.unlink(os.path.join(path, "prediction", "zarr.json"))
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(zarrwork, "_write_template", half)
        with pytest.raises(KilledError):
            run.go(1, overwrite=False)
    run.go(1, overwrite=False)
    assert run.values() == {1.0}
    assert os.listdir(run.folder) == ["o.zarr"]


def test_a_store_that_was_half_replaced_is_no_hindrance_and_others_are_not_touched(tmp_path):
    run = Run(tmp_path, ".zarr")
    run.go(1, overwrite=False)
    for name in ("o.zarr.partial.old", "o.zarr.old"):
        (run.folder / name).mkdir()
        (run.folder / name / "left").write_text("of a store")
    run.go(2, overwrite=True)
    assert run.values() == {2.0}
    assert sorted(os.listdir(run.folder)) == ["o.zarr", "o.zarr.old"]
    assert (run.folder / "o.zarr.old" / "left").exists()


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def test_a_store_is_never_removed_in_part(tmp_path):
    """Numbers that are gone would be taken for nodata when the run goes on."""
    run = Run(tmp_path, ".zarr")
    run.go(1, overwrite=False)
    partial = f"{run.output}.partial"
    for moment in range(4):
        shutil.copytree(run.output, partial)
        with killed_at(moment), contextlib.suppress(KilledError):
            run.plan.draft.discard(partial)
        assert not os.path.exists(partial) or names_in(partial) == names_in(run.output)
        run.plan.draft.discard(partial)
    assert os.listdir(run.folder) == ["o.zarr"]
