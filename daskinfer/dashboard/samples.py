"""What there is to see of a run in a worker process: small enough for every heartbeat."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from ..actor import InferenceActor

__all__ = ["METRIC", "Sample", "take_sample"]

METRIC = "daskinfer"
"""Name under which Dask's heartbeats carry the samples of a worker."""


class Sample(TypedDict):
    """A run in a process, as plain values.

    `busy` are seconds in which the device ran batches, `running` those of the one that runs now and
    is not counted yet; `time`, and `start` of the first batch, are in seconds since the epoch;
    `mailbox` are tiles.
    """

    run: str
    process: list[str | int]
    time: float
    start: float
    chunks: list[int]
    device: str
    tiles: int
    batches: int
    slots: int
    busy: float
    running: float
    mailbox: int


def take_sample(run: str, chunks: Sequence[int], actor: InferenceActor | None) -> Sample:
    """Look at a run in this process.

    Parameters
    ----------
    run : str
        Its name.
    chunks : sequence of int
        Those at work here.
    actor : InferenceActor or None
        None before the first chunk has come.
    """
    sample: Sample = {
        "run": run,
        "process": [socket.gethostname(), os.getpid()],
        "time": time.time(),
        "start": 0.0,
        "chunks": list(chunks),
        "device": "",
        "tiles": 0,
        "batches": 0,
        "slots": 0,
        "busy": 0.0,
        "running": 0.0,
        "mailbox": 0,
    }
    if actor is not None:
        metrics = actor.metrics
        sample["device"] = metrics.device
        sample["tiles"], sample["batches"] = metrics.tiles, metrics.batches
        sample["slots"], sample["busy"] = metrics.slots, metrics.busy
        sample["start"] = metrics.start
        sample["running"], sample["mailbox"] = actor.running, actor.waiting
    return sample
