"""What an actor has done, as numbers that travel from workers to the report."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["ActorMetrics"]


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
