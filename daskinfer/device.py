"""What an actor runs batches on: three stages that overlap, and which device they run on.

An actor knows a `Device` by its methods only: torch on a CPU or CUDA device, a function, or one of
your own, given to `plan` as a callable that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from .pixels import Array, Mask

if TYPE_CHECKING:
    from .inference import Inference

__all__ = [
    "BatchFunction",
    "Device",
    "DeviceChoice",
    "FunctionDevice",
    "best_device",
    "check_device",
]

_NAMES = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d+)?")


class BatchFunction(Protocol):
    """One batch of raw tiles to one batch of output tiles."""

    def __call__(self, batch: Array, valid: Mask | None) -> Array:
        """Map ``(n, band, y, x)`` raw and ``(n, y, x)`` valid to ``(n, band, y, x)`` output."""
        ...


class Device:
    """Runs batches in three stages, each called from a thread of its own.

    While one batch is in `forward`, the next may be in `copy_in` and the one before in `copy_out`;
    no stage is called twice at once.  A device that is short of memory raises `MemoryError`: the
    actor then goes on with smaller batches.

    Attributes
    ----------
    name : str
        For reports.
    """

    name: str = "a device of its own"

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Host memory in which batches are collected."""
        return np.empty(shape, dtype)

    def copy_in(self, batch: Array, valid: Mask | None) -> Any:
        """Bring a batch to the device.

        Parameters
        ----------
        batch : ndarray, shape (n, band, y, x)
            Raw numbers as the raster stores them, in memory from `allocate`; it is not changed
            before `copy_out` of this batch has returned.
        valid : ndarray of bool, shape (n, y, x), or None
            False where a pixel is nodata; None where all are valid.
        """
        return batch, valid

    def forward(self, loaded: Any) -> Any:
        """Run the model on what `copy_in` returned; may return before the device is done."""
        raise NotImplementedError

    def copy_out(self, result: Any) -> Array:
        """Output ``(n, band, y, x)`` of what `forward` returned, in memory of its own."""
        return np.array(result)

    def interval(self, result: Any) -> tuple[float, float] | None:
        """When the device worked on a result that was copied out, as `time.perf_counter` tells.

        None where that was while `forward` ran.
        """
        return None

    def run(self, batch: Array, valid: Mask | None = None) -> Array:
        """All stages of one batch."""
        return self.copy_out(self.forward(self.copy_in(batch, valid)))


class FunctionDevice(Device):
    """Runs a function of a whole batch.

    Parameters
    ----------
    function : BatchFunction
    """

    def __init__(self, function: BatchFunction) -> None:
        self._function = function

    def forward(self, loaded: Any) -> Array:
        """Call the function."""
        return self._function(*loaded)


DeviceChoice = str | Callable[["Inference"], Device]


def check_device(choice: DeviceChoice) -> DeviceChoice:
    """The choice, if it names a device or makes one.

    Raises
    ------
    ValueError
        If the name is unknown.
    TypeError
        If it is neither a name nor a callable that can be hashed.
    """
    if isinstance(choice, str):
        if not _NAMES.fullmatch(choice):
            raise ValueError(f"device {choice!r}: pass 'auto', 'cpu', 'cuda' or 'cuda:1'")
        return choice
    if not callable(choice):
        raise TypeError(f"device must be a name or a function that makes a Device, got {choice!r}")
    hash(choice)
    return choice


def best_device(choice: DeviceChoice = "auto", only: str | None = None) -> str:
    """Name of the torch device that a choice means in this process.

    "auto" is the first CUDA device, else the CPU; a device of one's own counts as the CPU.

    Parameters
    ----------
    choice : str or callable
    only : {None, "cpu", "cuda"}
        The only kind of device that a model runs on.

    Raises
    ------
    ValueError
        If the choice is of another kind, or there is none of that kind here.
    """
    if isinstance(choice, str) and choice != "auto":
        name = choice
    elif choice == "auto" and only != "cpu":
        import torch

        name = "cuda" if torch.cuda.is_available() else "cpu"
    else:
        name = "cpu"
    if only is not None and name.partition(":")[0] != only:
        missing = ", which torch does not find here" if choice == "auto" else f", not on {name}"
        raise ValueError(f"the model runs on {only} only{missing}: see its accelerator")
    return name
