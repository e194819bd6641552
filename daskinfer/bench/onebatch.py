"""One batch size in this process, for ``bench batch``: prints its numbers as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daskinfer.bench.synthetic import mirrored_scene
from daskinfer.device import Device
from daskinfer.forward import OutputFormat
from daskinfer.infer import make_device
from daskinfer.inference import Inference
from daskinfer.model import Model, load_model
from daskinfer.tiling import AxisTiling, Tiling

__all__ = ["main", "measure_batch"]

# Batches that are under way at once: on a GPU one is copied while another is computed.
_AHEAD = 2


def measure_batch(asked: Mapping[str, Any]) -> dict[str, float]:
    """Speed and memory of one batch size; nothing where it does not fit.

    Parameters
    ----------
    asked : dict
        ``model``, ``tile``, ``size``, ``device``, ``precision``, ``seconds``, ``threads``.

    Returns
    -------
    dict
        ``speed`` in Mpx/s, ``seconds`` per batch, ``memory`` and ``added`` in MB.
    """
    import torch
    from dask.system import CPU_COUNT

    torch.set_num_threads(asked["threads"] or CPU_COUNT)
    side, size = asked["tile"], asked["size"]
    device = make_device(_inference(asked))
    tile = mirrored_scene(range(side), range(side))
    before = _memory(torch)
    try:
        batch = device.allocate((size, *tile.shape), tile.dtype)
        batch[:] = tile
        # Kernels are chosen and memory is taken in the first.
        device.run(batch)
        seconds = _seconds(device, batch, asked["seconds"])
    except MemoryError:
        return {}
    peak = _memory(torch)
    return {
        "speed": size * side**2 / 1e6 / seconds,
        "seconds": seconds,
        "memory": peak / 1e6,
        "added": (peak - before) / 1e6,
    }


def _inference(asked: Mapping[str, Any]) -> Inference:
    """An inference of one tile: enough to make a device."""
    model = _model(asked["model"]).patch(precision=asked["precision"])
    axis = AxisTiling(asked["tile"], asked["tile"])
    return Inference(
        model,
        Tiling(axis, axis),
        OutputFormat.of(model.output, len(model.class_names or "ab")),
        in_bands=6,
        dtype="uint16",
        device=asked["device"],
    )


def _model(name: str) -> Model:
    from daskinfer.bench.cpu import bench_model

    return bench_model(name) if name in ("demo", "heavy") else load_model(name)


def _seconds(device: Device, batch: Any, least: float) -> float:
    """Seconds per batch, over so many batches that they take at least this long."""
    running: deque[Any] = deque()
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < least or count < _AHEAD:
        running.append(device.forward(device.copy_in(batch, None)))
        if len(running) == _AHEAD:
            device.copy_out(running.popleft())
        count += 1
    while running:
        device.copy_out(running.popleft())
    elapsed = time.perf_counter() - start
    return elapsed / count


def _memory(torch: Any) -> int:
    """Peak bytes so far: of torch on the GPU, of the whole process without one."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    # Not getrusage: what that tells of a new process begins with the peak of the one it came from.
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) * 1024


def main() -> None:
    """Measure what the first argument asks for, as JSON."""
    print(json.dumps(measure_batch(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
