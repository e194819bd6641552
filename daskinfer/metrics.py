"""What an actor has done, as numbers that travel from workers to the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .diagnosis import Load
from .spans import StageTimes

__all__ = ["ActorMetrics", "Meters"]


@dataclass(frozen=True)
class ActorMetrics:
    """What an actor has done so far.

    Attributes
    ----------
    tiles, batches : int
        Tiles and batches run.
    slots : int
        Tiles that would have fitted into those batches.
    busy : float
        Seconds in which the device ran a batch.
    start, stop : float
        Start of the first batch and end of the last, in seconds since the epoch.
    queued : int
        Tiles that waited in the mailbox when a batch started, summed over the batches.
    batch_size : int
        Tiles in a full batch; less than was asked for where the device was short of memory.
    shrunk : bool
        Whether it was.
    note : str
        How the batch size was found.
    device : str
        What ran the batches.
    """

    tiles: int = 0
    batches: int = 0
    slots: int = 0
    busy: float = 0.0
    start: float = 0.0
    stop: float = 0.0
    queued: int = 0
    batch_size: int = 0
    shrunk: bool = False
    note: str = ""
    device: str = ""

    @property
    def elapsed(self) -> float:
        """Seconds from the start of the first batch to the end of the last."""
        return self.stop - self.start

    @property
    def fill(self) -> float:
        """Tiles per slot, 1.0 when every batch was full."""
        return self.tiles / self.slots if self.slots else 0.0

    def after(self, start: float, stop: float, tiles: int, slots: int, queued: int) -> ActorMetrics:
        """These and one more batch."""
        return replace(
            self,
            tiles=self.tiles + tiles,
            batches=self.batches + 1,
            slots=self.slots + slots,
            busy=self.busy + (stop - start),
            start=self.start or start,
            stop=stop,
            queued=self.queued + queued,
        )


@dataclass
class Meters:
    """What all processes of a run have done so far, each as it said last.

    Examples
    --------
    >>> meters = Meters()
    >>> one = ActorMetrics(batch_size=4).after(start=1, stop=4, tiles=4, slots=4, queued=2)
    >>> meters.take(("host", 1), one, {})
    >>> meters.take(("host", 1), one.after(start=6, stop=11, tiles=2, slots=4, queued=0), {})
    >>> meters.take(("host", 1), one, {})  # came late
    >>> load = meters.load(seconds=20)
    >>> load.busy, load.busy_whole, load.fill, meters.queue_depth
    (0.8, 0.4, 0.75, 1.0)
    """

    latest: dict[tuple[str, int], tuple[ActorMetrics, Mapping[str, StageTimes]]] = field(
        default_factory=dict
    )

    def take(
        self, process: tuple[str, int], metrics: ActorMetrics, times: Mapping[str, StageTimes]
    ) -> None:
        """Take what a process said; answers of several threads may overtake each other."""
        known = self.latest.get(process)
        if known is None or known[0].batches <= metrics.batches:
            self.latest[process] = metrics, times

    @property
    def metrics(self) -> list[ActorMetrics]:
        """One for each process."""
        return [metrics for metrics, _ in self.latest.values()]

    @property
    def queue_depth(self) -> float:
        """Tiles in the mailbox when a batch started, on average."""
        batches = sum(m.batches for m in self.metrics)
        return sum(m.queued for m in self.metrics) / batches if batches else 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """How the batch sizes were found."""
        return tuple(sorted({m.note for m in self.metrics if m.note}))

    def load(self, seconds: float, precision: str = "", source_note: str | None = None) -> Load:
        """How busy the devices were and how full the batches.

        Parameters
        ----------
        seconds : float
            Since the start of the run.
        precision, source_note : str
            As for `Load`.
        """
        metrics = self.metrics
        elapsed = sum(m.elapsed for m in metrics)
        busy = sum(m.busy for m in metrics)
        slots = sum(m.slots for m in metrics)
        return Load(
            busy=busy / elapsed if elapsed else 0.0,
            busy_whole=busy / (seconds * len(metrics)) if metrics and seconds else 0.0,
            fill=sum(m.tiles for m in metrics) / slots if slots else 0.0,
            batches=sum(m.batches for m in metrics),
            batch_size=min((m.batch_size for m in metrics), default=0),
            shrunk=any(m.shrunk for m in metrics),
            stages=StageTimes.merged(times for _, times in self.latest.values()),
            device=", ".join(sorted({m.device for m in metrics})),
            precision=precision,
            source_note=source_note,
        )
