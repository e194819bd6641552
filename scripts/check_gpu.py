"""Check on a GPU what a CPU cannot show, and write the table into BENCHMARKS.md.

    python scripts/check_gpu.py

Is the result of a GPU that of a CPU, how busy is it in a run, what do pinned memory and half
precision bring, how much memory do batches take, and does a run get through with a batch that does
not fit?  Exit code 1 if a check failed.  Without a GPU the CPU's column is filled, and the other
one says "not measured".
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import torch

import daskinfer as di
from daskinfer.bench import batch
from daskinfer.bench.command import run_bench
from daskinfer.bench.cpu import bench_model
from daskinfer.bench.harness import machine, markdown, say, write_section
from daskinfer.bench.synthetic import mirrored_scene, scene_raster

ROOT = Path(__file__).parent.parent
SECTION = "check_gpu"
NOT_MEASURED = "not measured"
# Scores in float32, absolute: another device takes sums in another order.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-3}
PRECISIONS = ("float32", "bfloat16")
SIZES = {"cpu": (1, 2, 4), "cuda": (1, 2, 4, 8, 16, 32)}


@dataclass(frozen=True)
class Check:
    """One row: what a device gave, and whether that is as it must be."""

    text: str
    passed: bool = True


@dataclass(frozen=True)
class Context:
    """What all checks share."""

    device: str
    folder: Path
    options: Namespace

    @property
    def side(self) -> int:
        return self.options.cpu_size if self.device == "cpu" else self.options.gpu_size

    def run(self, model: Any, name: str, side: int, **options: Any) -> tuple[Any, Any]:
        """Report and pixels of a run."""
        output = self.folder / f"{self.device}-{name}.tif"
        source = scene_raster(self.folder, side, side)
        report = di.run(source, model, output, device=self.device, overwrite=True, **options)
        with rasterio.open(output) as dataset:
            pixels = dataset.read()
        return report, pixels


# The checks ---------------------------------------------------------------------------------------


def scores_equal(context: Context) -> Check:
    """Scores of a run against the network run once over the whole raster, on the CPU."""
    side = context.options.check_size
    expected = whole_image(side)
    model = di.demo_model().patch(output="values", class_names=None, class_colors=None)
    _, got = context.run(model, "scores", side, tile=256)
    largest = float(np.abs(got - expected).max())
    allowed = TOLERANCE[context.device]
    return Check(f"{largest:.1e} (at most {allowed:g})", largest <= allowed)


def classes_equal(context: Context) -> Check:
    """Classes where the two highest scores differ by more than both may be off."""
    side = context.options.check_size
    scores = whole_image(side)
    _, got = context.run(di.demo_model(), "classes", side, tile=256)
    best = np.sort(scores, axis=0)
    clear = best[-1] - best[-2] > 2 * TOLERANCE[context.device]
    wrong = int((got[0] != scores.argmax(0))[clear].sum())
    return Check(f"{wrong} of {clear.sum()} px", wrong == 0)


def whole_image(side: int) -> Any:
    """Scores ``(class, y, x)`` of the demo model on the whole raster, by torch alone."""
    model = di.demo_model()
    numbers = {
        name: np.array(getattr(model, name) or (neutral,), np.float32)[:, None, None]
        for name, neutral in (("scale", 1), ("offset", 0), ("mean", 0), ("std", 1))
    }
    raw = mirrored_scene(range(side), range(side)).astype(np.float32)
    x = (raw * numbers["scale"] + numbers["offset"] - numbers["mean"]) / numbers["std"]
    with torch.inference_mode():
        return model.network("cpu")(torch.from_numpy(x[None])).numpy()[0]


def busy(name: str) -> Callable[[Context], Check]:
    """How busy the device is in a run of a model."""

    def check(context: Context) -> Check:
        report, _ = context.run(bench_model(name), f"busy-{name}", context.side)
        for line in report.diagnosis:
            say(f"  {line}")
        return Check(
            f"{report.device_busy:.1%} steady, {report.busy_whole:.1%} of the whole run; "
            f"{report.speed:.3g} Mpx/s, batches of {report.load.batch_size}"
        )

    return check


def copies(context: Context) -> Check:
    """Copies of a batch to the device: from pinned and from pageable memory."""
    if context.device == "cpu":
        return Check("none needed")
    host = torch.zeros((8, 6, 640, 640), dtype=torch.int16)
    speeds = []
    for memory in (host.pin_memory(), host):
        memory.to(context.device)
        torch.cuda.synchronize()
        start, repeats = time.perf_counter(), 50
        for _ in range(repeats):
            memory.to(context.device, non_blocking=True)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / repeats
        speeds.append(host.numel() * 2 / 1e9 / seconds)
    pinned, pageable = speeds
    return Check(f"{pinned:.1f} against {pageable:.1f} GB/s, {pinned / pageable:.1f} times")


def batches(name: str) -> Callable[[Context], Check]:
    """Speed and memory at the knee in both precisions, and what half precision brings."""

    def check(context: Context) -> Check:
        settings = {
            precision: Namespace(
                model=name,
                sizes=SIZES[context.device],
                tile=context.options.tile,
                device=context.device,
                precision=precision,
                threads=None,
                seconds=context.options.seconds,
            )
            for precision in PRECISIONS
        }
        result = run_bench(batch.BENCH, settings, 1)
        told, best = [], []
        for precision in PRECISIONS:
            speeds = {
                int(case): result.spread(case, "speed", precision).median
                for case in result.cases(precision)
                if result.runs(case, "speed", precision)
            }
            size = batch.knee(speeds)
            memory = result.spread(str(size), "memory", precision).median
            best.append(speeds[size])
            told.append(f"{precision} {speeds[size]:.3g} Mpx/s at {size} tiles, {memory:.0f} MB")
        return Check(f"{'; '.join(told)}; {best[1] / best[0]:.2f} times")

    return check


def out_of_memory(context: Context) -> Check:
    """A run that asks for batches that cannot fit gets through, with the same pixels."""
    if context.device == "cpu":
        return Check("not tried: the system would end the process")
    # Tiles large enough that what they take counts beside the kernels' own workspace.
    side, tiles = 4096, {"tile": 608, "chunk": 2048}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _, expected = context.run(di.demo_model(), "roomy", side, batch_size=1, **tiles)
    room = 1.5 * torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        report, got = context.run(di.demo_model(), "tight", side, batch_size=32, **tiles)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    ran, changed = report.load.batch_size, int((got != expected).sum())
    return Check(
        f"asked for 32 tiles in {room / 1e6:.0f} MB, ran {ran}; {changed} px changed",
        # Another batch size may turn over ties.
        ran < 32 and report.complete and changed <= got.size // 10_000,
    )


CHECKS: dict[str, Callable[[Context], Check]] = {
    "largest difference of scores to the whole image (float32, on the CPU)": scores_equal,
    "classes that differ where the two highest scores do not tie": classes_equal,
    "device busy through `run`, demo model": busy("demo"),
    "device busy through `run`, heavy model": busy("heavy"),
    "copies of a batch (39 MB), pinned against pageable": copies,
    "demo model by precision, at the knee": batches("demo"),
    "heavy model by precision, at the knee": batches("heavy"),
    "out of memory": out_of_memory,
}


# The table ----------------------------------------------------------------------------------------


def column(device: str, folder: Path, options: Namespace) -> list[Check]:
    """All checks on one device."""
    found = []
    for name, check in CHECKS.items():
        say(f"{device}: {name}")
        found.append(check(Context(device, folder, options)))
        say(f"  {found[-1].text}{'' if found[-1].passed else '  FAILED'}")
    return found


def section(cpu: Sequence[Check] | None, gpu: Sequence[Check] | None) -> str:
    """The part of BENCHMARKS.md."""
    about = machine()
    rows = [
        [name, *(cell(column[number]) if column else NOT_MEASURED for column in (cpu, gpu))]
        for number, name in enumerate(CHECKS)
    ]
    heads = [f"CPU, {about['cores']} cores", f"GPU: {about['gpu']}" if gpu else "GPU"]
    where = (
        f"torch {about['torch']}, Python {platform.python_version()}, {about['cores']} cores of "
        f"{about['processor']}, {about['memory_gb']} GB."
    )
    return f"{markdown(['check', *heads], rows, 3)}\n\n{where}"


def cell(check: Check) -> str:
    return check.text if check.passed else f"**FAILED** {check.text}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", default=ROOT / "BENCHMARKS.md", type=Path, metavar="PATH")
    parser.add_argument("--check-size", default=1024, type=int, metavar="PX", help="of equality")
    parser.add_argument("--cpu-size", default=1024, type=int, metavar="PX", help="of busy")
    parser.add_argument("--gpu-size", default=16384, type=int, metavar="PX", help="of busy")
    parser.add_argument("--no-cpu", action="store_true", help="the GPU alone")
    parser.add_argument("--tile", default=608, type=int, metavar="PX", help="of batches")
    parser.add_argument("--seconds", default=3.0, type=float, help="for each batch size")
    options = parser.parse_args(argv)
    found: dict[str, list[Check]] = {}
    with tempfile.TemporaryDirectory(prefix="daskinfer-gpu-") as folder:
        if torch.cuda.is_available():
            found["cuda"] = column("cuda", Path(folder), options)
        if not options.no_cpu:
            found["cpu"] = column("cpu", Path(folder), options)
    text = section(found.get("cpu"), found.get("cuda"))
    write_section(options.markdown, SECTION, text)
    print(text)
    return 0 if all(check.passed for checks in found.values() for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
