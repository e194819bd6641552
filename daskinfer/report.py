"""What a run did."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import display
from .area import ClassArea, area_rows
from .dashboard.states import ChunkMap
from .diagnosis import Load, diagnose
from .ledger import Failure
from .spans import StageTimes

__all__ = ["Report", "check_html"]


@dataclass(frozen=True)
class Report:
    """Result of a run.  Returned by `run`.

    Attributes
    ----------
    output : str
        Path of the COG.
    shape : tuple of int
        ``(height, width)`` in pixels.
    chunks : int
        Chunks of the output.
    resumed : int
        Chunks that an earlier run had written.
    tiles : int
        Tiles that went through the model.
    seconds : float
        Wall time of this run, the finishing of the file included.
    load : Load
        How busy the device was, how full the batches, how long each stage took.
    queue_depth : float
        Tiles in the mailbox when a batch started, on average.
    batch_notes : tuple of str
        How the batch size was found, where it was.
    retries : int
        Attempts that failed and were made again.
    nonfinite : int
        Valid pixels that became nodata because the model's scores were not finite there.
    failures : tuple of Failure
        Chunks that failed for good and are nodata in the output.
    file_bytes : int
        Size of the output.
    chunk_map : ChunkMap or None
        What became of each chunk.
    outside : int
        Chunks without a pixel in the area of interest, which are nodata.
    areas : tuple of ClassArea
        How much ground each class covers; empty where the output is no classes.
    """

    output: str
    shape: tuple[int, int]
    chunks: int
    resumed: int
    tiles: int
    seconds: float
    load: Load
    queue_depth: float
    batch_notes: tuple[str, ...]
    retries: int
    nonfinite: int
    failures: tuple[Failure, ...]
    file_bytes: int
    chunk_map: ChunkMap | None = None
    outside: int = 0
    areas: tuple[ClassArea, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every chunk was computed."""
        return not self.failures

    @property
    def speed(self) -> float:
        """Megapixels per second of this run."""
        computed = math.prod(self.shape) * (1 - (self.resumed + self.outside) / self.chunks)
        return computed / 1e6 / self.seconds if self.seconds else 0.0

    @property
    def device_busy(self) -> float:
        """Share of the time between the first and the last batch in which the devices were busy."""
        return self.load.busy

    @property
    def busy_whole(self) -> float:
        """Share of the whole run, start and finish included, in which the devices were busy."""
        return self.load.busy_whole

    @property
    def batch_fill(self) -> float:
        """Tiles per slot of the batches, 1.0 when all were full."""
        return self.load.fill

    @property
    def stages(self) -> Mapping[str, StageTimes]:
        """Times of each stage; see `daskinfer.spans.STAGES`."""
        return self.load.stages

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """What limited the run and what could help."""
        return diagnose(self.load)

    def __repr__(self) -> str:
        return display.text_table(self._title, self._rows())

    def _repr_html_(self) -> str:
        return display.html_table(self._title, self._rows())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report with the map of its chunks as one HTML file that needs nothing else.

        Parameters
        ----------
        path : path
            Named ``.html``; replaced if it exists.

        Raises
        ------
        ValueError
            If it has another name.
        FileNotFoundError
            If its folder does not exist.

        Examples
        --------
        >>> import os, tempfile
        >>> import daskinfer as di, numpy as np, torch, xarray as xr
        >>> scene = xr.DataArray(np.ones((1, 64, 64), "float32"), dims=("band", "y", "x"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     output, page = (os.path.join(folder, name) for name in ("o.tif", "report.html"))
        ...     di.run(scene, torch.nn.Conv2d(1, 2, 1), output).save(page)
        ...     os.path.getsize(page) > 2000
        True
        """
        from .dashboard.reportpage import report_page

        check_html(path, "path")
        Path(path).write_text(report_page(self), encoding="utf-8")

    @property
    def _wall(self) -> float:
        return max(self.seconds, 1e-9)

    @property
    def _chunks_text(self) -> str:
        text = f"{display.count_text(self.chunks)}, {self.resumed} from an earlier run"
        return f"{text}, {self.outside} outside the area" if self.outside else text

    @property
    def _title(self) -> str:
        return "Report" if self.complete else "Report: INCOMPLETE"

    def _rows(self) -> list[display.Row]:
        height, width = (display.count_text(side) for side in self.shape)
        rows = [
            ("output", f"{self.output}, {display.bytes_text(self.file_bytes)}"),
            ("pixels", f"{height} x {width}"),
            ("time", f"{self.seconds:.1f} s, {self.speed:.2f} Mpx/s"),
            ("chunks", self._chunks_text),
            (
                "tiles",
                f"{display.count_text(self.tiles)}, {self.tiles / self._wall:.1f} per second",
            ),
            ("device", self.load.device),
            ("device busy", f"{self.device_busy:.1%}, of the whole run {self.busy_whole:.1%}"),
            ("batches", f"of {self.load.batch_size}, {self.batch_fill:.0%} full"),
            *(("batch size", note) for note in self.batch_notes),
            ("queue", f"{self.queue_depth:.1f} tiles waiting at the start of a batch"),
            ("retries", str(self.retries)),
            ("non-finite", f"{display.count_text(self.nonfinite)} px became nodata"),
            ("failed", f"{len(self.failures)} chunks"),
        ]
        rows += area_rows(self.areas)
        rows += [("diagnosis", note) for note in self.diagnosis]
        rows += [
            (f"chunk {f.chunk}", f"{f.window} on {f.worker}: {f.error}") for f in self.failures
        ]
        if self.stages:
            rows.append(("stages", "median, p95, p99, number"))
        rows += [(f"  {stage}", _times_text(times)) for stage, times in self.stages.items()]
        return rows


def _times_text(times: StageTimes) -> str:
    quantiles = (display.seconds_text(times.quantile(share)) for share in (0.5, 0.95, 0.99))
    return f"{', '.join(quantiles)}, {display.count_text(times.count)}"


def check_html(path: str | os.PathLike[str] | None, name: str) -> None:
    """Refuse, before any work, what an HTML file could not be written to.

    >>> check_html("report.pdf", "report")
    Traceback (most recent call last):
        ...
    ValueError: report is written as HTML: name it .html, got 'report.pdf'
    """
    if path is None:
        return
    file = Path(path)
    if file.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{name} is written as HTML: name it .html, got {os.fspath(path)!r}")
    folder = file.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{name}: folder {str(folder)!r} does not exist: make it first")
