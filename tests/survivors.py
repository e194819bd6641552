"""A run that writes down what it computes, and what kills parts of it while it is on.

Every chunk of its raster is one number, and its model gives back what it gets: the output must
equal the source, and the log names each chunk that went through the model.  As a script it makes
one run: ``python survivors.py '{"folder": ..., "kill_after": 20}'``.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import rasterio
import torch

import daskinfer as di
from conftest import write_raster
from daskinfer.monitor import ChunkDone, RunStarted

SIDE = 32
FIRST = 1000


class Logged(torch.nn.Module):
    """Gives its input back and appends a line per tile to a file.

    `seconds` is what a batch takes, for the run to last until it is killed.
    """

    def __init__(self, log, seconds=0.01):
        super().__init__()
        self.log, self.seconds = str(log), seconds

    def forward(self, x):
        numbers = [int(tile.max()) - FIRST for tile in x if tile.min() == tile.max()]
        # What measures the model looks at it with other tiles than these.
        lines = "".join(f"{number}\n" for number in numbers if number >= 0)
        if lines:
            time.sleep(self.seconds)
            with open(self.log, "a") as file:
                file.write(lines)
        return x


class Job:
    """A raster of `chunks` x `chunks` chunks in a folder, its run and its output."""

    def __init__(self, folder, chunks=16, seconds=0.01):
        self.folder, self.chunks, self.seconds = Path(folder), chunks, seconds
        self.source, self.output = str(self.folder / "scene.tif"), str(self.folder / "o.tif")
        self.log = self.folder / "log"

    @property
    def expected(self):
        numbers = np.arange(self.chunks**2).reshape(1, self.chunks, self.chunks) + FIRST
        return numbers.repeat(SIDE, axis=1).repeat(SIDE, axis=2).astype(np.float32)

    def prepare(self):
        tiled = {"tiled": True, "blockxsize": SIDE, "blockysize": SIDE}
        write_raster(self.source, self.expected.astype(np.uint16), **tiled)
        return self

    def run(self, **options):
        model = di.load_model(Logged(self.log, self.seconds), output="values")
        job = {"tile": SIDE, "chunk": SIDE, "batch_size": 1}
        return di.run(self.source, model, self.output, **job | options)

    def computed(self):
        """How often each chunk went through the model."""
        return Counter(map(int, self.log.read_text().split()))

    def written(self):
        """Chunks in the unfinished output, which is checked: what is not nodata must be right."""
        with rasterio.open(f"{self.output}.partial") as dataset:
            partial = dataset.read()
        there = ~np.isnan(partial)
        assert np.array_equal(partial[there], self.expected[there])
        corners = there[0, ::SIDE, ::SIDE]
        # Whole chunks only.
        assert np.array_equal(there[0], corners.repeat(SIDE, axis=0).repeat(SIDE, axis=1))
        return set(np.flatnonzero(corners).tolist())

    def assert_finished(self):
        with rasterio.open(self.output) as dataset:
            assert np.array_equal(dataset.read(), self.expected)
        assert sorted(path.name for path in self.folder.glob("o.tif*")) == ["o.tif"]


class After:
    """Callback that does something when so many chunks are done."""

    def __init__(self, chunks, action):
        self.left, self.action = chunks, action

    def __call__(self, event):
        if isinstance(event, ChunkDone):
            self.left -= 1
            if self.left == 0:
                self.action(event)


def limit(event, job, room):
    """Callback that leaves so many bytes of room in the output."""
    if isinstance(event, RunStarted):
        size = os.path.getsize(f"{job.output}.partial") + room
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def main():
    told = json.loads(sys.argv[1])
    job = Job(told["folder"])
    # 0 stands for this process and all that it has started, as Ctrl-C in a terminal does.
    whom = (lambda: 0) if told.get("group") else os.getpid
    callbacks = [After(n, lambda _: os.kill(whom(), told["signal"])) for n in told["after"]]
    if "room" in told:
        callbacks.append(lambda event: limit(event, job, told["room"]))
    where = told.get("cluster", "local")
    options = {} if "://" in where else {"dashboard_address": ":0"}
    with di.cluster(where, **options) as client:
        print("started", flush=True)
        job.run(client=client, callbacks=callbacks, on_error=told.get("on_error", "raise"))


if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Shells start what they put into the background with SIGINT ignored, and so all below it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
