"""The model on a CUDA device: copies and forward passes overlap, on streams of their own.

Batches are collected in pinned memory, from which a copy to the device runs beside the kernels.
Nothing waits for the device but `copy_out`; the ring of the actor bounds what runs ahead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .forward import Forward, memory_errors, native
from .pixels import Array, Mask

if TYPE_CHECKING:
    import torch

__all__ = ["CudaForward"]


@dataclass
class _Loaded:
    raw: torch.Tensor
    mask: torch.Tensor | None
    # Host memory that the copies read from, kept until they are over.
    held: tuple[Any, ...]
    arrived: Any


@dataclass
class _Running:
    output: torch.Tensor
    loaded: _Loaded
    started: Any
    ended: Any


class CudaForward(Forward):
    """The model on one CUDA device; parameters as of `Forward`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        import torch

        super().__init__(*arguments, **options)
        if self.model.precision == "float32":
            # By default torch convolves with 10 bits of mantissa (TF32) on a CUDA device: seams
            # would differ from the whole image in the third digit.
            torch.backends.cudnn.allow_tf32 = False
            torch.backends.cuda.matmul.allow_tf32 = False
        if isinstance(self._network, torch.nn.Module):
            # Once here, or each convolution would reorder its weights in every batch.
            self._network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.name = f"{self.device}, {torch.cuda.get_device_name(self.device)}"
        with torch.cuda.device(self.device):
            self._in, self._compute, self._out = (_stream() for _ in range(3))
            self._origin = _event()
            self._origin.record(self._compute)
            self._origin.synchronize()
        self._origin_time = time.perf_counter()

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Pinned host memory."""
        import torch

        # As bytes: rasters hold dtypes that torch lacks.
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return np.asarray(pinned.view(dtype).reshape(shape))

    def copy_in(self, batch: Array, valid: Mask | None) -> _Loaded:
        """Start the copy of a batch to the device."""
        import torch

        raw = torch.from_numpy(native(batch))
        mask = None if valid is None else torch.from_numpy(np.require(valid, bool, ["C", "W"]))
        with memory_errors(), torch.cuda.stream(self._in):
            there = raw.to(self.device, non_blocking=True)
            marks = None if mask is None else mask.to(self.device, non_blocking=True)
            arrived = _event()
            arrived.record(self._in)
        return _Loaded(there, marks, (raw, mask), arrived)

    def forward(self, loaded: _Loaded) -> _Running:
        """Start the forward pass of a batch that is on its way."""
        import torch

        with torch.cuda.stream(self._compute):
            self._compute.wait_event(loaded.arrived)
            for part in (loaded.raw, loaded.mask):
                if part is not None:
                    # Allocated on another stream, whose next batch may not take its memory yet.
                    part.record_stream(self._compute)
            started, ended = (_event() for _ in range(2))
            started.record(self._compute)
            output = super().forward((loaded.raw, loaded.mask))
            ended.record(self._compute)
        return _Running(output, loaded, started, ended)

    def copy_out(self, result: _Running) -> Array:
        """Wait for a batch and fetch its output."""
        import torch

        with torch.cuda.stream(self._out):
            self._out.wait_event(result.ended)
            result.output.record_stream(self._out)
            host = torch.empty(result.output.shape, dtype=result.output.dtype, pin_memory=True)
            host.copy_(result.output, non_blocking=True)
        self._out.synchronize()
        # Pinned memory is scarce, and callers keep their results until their chunk is complete.
        return np.array(host.numpy())

    def interval(self, result: _Running) -> tuple[float, float]:
        """When the kernels of a batch ran."""
        start, stop = (
            self._origin_time + self._origin.elapsed_time(event) / 1000
            for event in (result.started, result.ended)
        )
        return start, stop


def _stream() -> Any:
    import torch

    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
