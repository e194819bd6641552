"""What a run did."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import display
from .ledger import Failure

__all__ = ["Report"]


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
    device_busy : float
        Share of the time between the first and the last batch in which the devices ran a batch.
    batch_fill : float
        Tiles per slot of the batches, 1.0 when all were full.
    retries : int
        Attempts that failed and were made again.
    nonfinite : int
        Valid pixels that became nodata because the model's scores were not finite there.
    failures : tuple of Failure
        Chunks that failed for good and are nodata in the output.
    file_bytes : int
        Size of the output.
    """

    output: str
    shape: tuple[int, int]
    chunks: int
    resumed: int
    tiles: int
    seconds: float
    device_busy: float
    batch_fill: float
    retries: int
    nonfinite: int
    failures: tuple[Failure, ...]
    file_bytes: int

    @property
    def complete(self) -> bool:
        """Whether every chunk was computed."""
        return not self.failures

    @property
    def speed(self) -> float:
        """Megapixels per second of this run."""
        computed = math.prod(self.shape) * (1 - self.resumed / self.chunks)
        return computed / 1e6 / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        return display.text_table(self._title, self._rows())

    def _repr_html_(self) -> str:
        return display.html_table(self._title, self._rows())

    @property
    def _title(self) -> str:
        return "Report" if self.complete else "Report: INCOMPLETE"

    def _rows(self) -> list[display.Row]:
        height, width = (display.count_text(side) for side in self.shape)
        rows = [
            ("output", f"{self.output}, {display.bytes_text(self.file_bytes)}"),
            ("pixels", f"{height} x {width}"),
            ("time", f"{self.seconds:.1f} s, {self.speed:.2f} Mpx/s"),
            ("chunks", f"{display.count_text(self.chunks)}, {self.resumed} from an earlier run"),
            ("tiles", display.count_text(self.tiles)),
            ("device busy", f"{self.device_busy:.0%}"),
            ("batch fill", f"{self.batch_fill:.0%}"),
            ("retries", str(self.retries)),
            ("non-finite", f"{display.count_text(self.nonfinite)} px became nodata"),
            ("failed", f"{len(self.failures)} chunks"),
        ]
        rows += [
            (f"chunk {f.chunk}", f"{f.window} on {f.worker}: {f.error}") for f in self.failures
        ]
        return rows
