"""What limited a run, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .spans import StageTimes

__all__ = ["Load", "diagnose"]

# Beyond this the device is what a run waits for, whatever else could be faster.
_BUSY = 0.9
_PART_FILLED = 0.75


@dataclass(frozen=True)
class Load:
    """Numbers that a diagnosis goes by.

    Attributes
    ----------
    busy : float
        Share of the time between the first and the last batch in which the device ran a batch.
    busy_whole : float
        The same of the whole run.
    fill : float
        Tiles per slot of the batches.
    batches : int
        Batches run.
    batch_size : int
        Tiles in a full batch.
    shrunk : bool
        Whether the device was too short of memory for the batch that was asked for.
    stages : dict of str to StageTimes
        Times by stage.
    device : str
        Name of the device.
    precision : str
        Of the model.
    source_note : str or None
        What is slow to read about the source.
    """

    busy: float
    busy_whole: float
    fill: float
    batches: int
    batch_size: int
    shrunk: bool
    stages: Mapping[str, StageTimes]
    device: str
    precision: str
    source_note: str | None = None


def diagnose(load: Load) -> tuple[str, ...]:
    """Say what limited a run and what could help, most important first.

    Parameters
    ----------
    load : Load

    Returns
    -------
    tuple of str
        Sentences; none for a run without batches.

    Examples
    --------
    >>> load = Load(0.99, 0.97, 1.0, 50, 8, False, {}, "cuda:0", "float32")
    >>> diagnose(load)
    ("the device is the limit (99% busy): try precision='bfloat16'",)
    """
    if not load.batches:
        return ()
    notes = [_limit(load)]
    if load.busy >= _BUSY and load.busy_whole < 0.8 * load.busy:
        notes.append(
            f"start and finish took {1 - load.busy_whole / load.busy:.0%} of the run: with more "
            "chunks their share is smaller"
        )
    if load.fill < _PART_FILLED and load.batches > 4:
        notes.append(
            f"batches left {load.fill:.0%} full: tiles come too slowly for batches of "
            f"{load.batch_size}"
        )
    if load.shrunk:
        notes.append(
            f"the device was short of memory: batches were cut to {load.batch_size} tiles; pass "
            f"batch_size={load.batch_size} to start there"
        )
    return tuple(notes)


def _limit(load: Load) -> str:
    if load.busy >= _BUSY:
        return f"the device is the limit ({load.busy:.0%} busy): {_faster(load)}"
    idle = f"the device was idle for {1 - load.busy:.0%} of the time"
    spent = {name: _share(load, stages) for name, stages in _WAYS.items()}
    slowest = max(spent, key=lambda name: spent[name])
    share = f"{spent[slowest]:.0%} of the chunks' time"
    if slowest == "read":
        note = load.source_note or "use more threads per worker, or a source with a faster codec"
        return f"readers are behind ({idle}, reading took {share}): {note}"
    if slowest == "write":
        return f"writing is behind ({idle}, it took {share}): try a lower level= or more threads"
    return f"too few chunks at once ({idle}): use more threads per worker or a smaller chunk="


_WAYS = {
    "read": ("read",),
    "write": ("stitch", "encode", "append"),
    "wait": ("room", "results"),
}


def _share(load: Load, stages: tuple[str, ...]) -> float:
    """Share of the chunk threads' time that went into some stages."""
    every = [stage for group in _WAYS.values() for stage in group]
    total = sum(load.stages[stage].total for stage in every if stage in load.stages)
    own = sum(load.stages[stage].total for stage in stages if stage in load.stages)
    return own / total if total else 0.0


def _faster(load: Load) -> str:
    if load.device.startswith("cpu"):
        return "a GPU, or more cores, would make it faster"
    if load.device.startswith("cuda"):
        half = load.precision != "float32"
        return "try compile=True, or more devices" if half else "try precision='bfloat16'"
    return "more devices would make it faster"
