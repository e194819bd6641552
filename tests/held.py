"""A run that stands still in the middle for as long as a test wants to look at it."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import torch

import daskinfer as di
from conftest import write_raster

HELD, BAD = 7, 13
CHUNK = 5
SHAPE = (96, 128)  # 3 x 4 chunks
JOB = {"tile": 32, "chunk": 32, "batch_size": 1}
PATIENCE = 60  # seconds; a bound for when something is broken

entered = threading.Event()
released = threading.Event()


class Gate(torch.nn.Module):
    """Stands still where it sees 7, and raises where it sees 13; in this process only."""

    def forward(self, x):
        if (x == HELD).any():
            entered.set()
            assert released.wait(PATIENCE)
        if (x == BAD).any():
            raise ArithmeticError("thirteen <at> once")
        return torch.cat([x, x + 1], dim=1)


def numbers(**chunks):
    """A band of nodata, but for chunks that are filled with a number, as ``c5=7``."""
    raw = np.zeros((1, *SHAPE), np.uint8)
    for name, number in chunks.items():
        row, col = divmod(int(name[1:]), 4)
        raw[0, row * 32 : row * 32 + 32, col * 32 : col * 32 + 32] = number
    return raw


def gated_plan(tmp_path, name="o.tif", *, raw=None, **options):
    """A plan for `Gate`: all chunks are nodata but the one at which it stands still."""
    entered.clear()
    released.clear()
    raw = numbers(**{f"c{CHUNK}": HELD}) if raw is None else raw
    source = write_raster(tmp_path / f"{name}.scene.tif", raw, nodata=0)
    return di.plan(source, Gate(), tmp_path / name, **JOB, **options)


@contextmanager
def held(plan, client, callbacks=()):
    """The run in a thread of its own, while it stands still; gives a list that gets its report."""
    reports = []

    def work():
        reports.append(di.run(plan, client=client, callbacks=list(callbacks)))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert entered.wait(PATIENCE)
        yield reports
    finally:
        released.set()
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert reports
