"""`ReceptiveField`: what was measured of a network, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from ..tiling import round_up
from .domain import NOISE

__all__ = ["ReceptiveField"]


@dataclass(frozen=True)
class ReceptiveField:
    """What a net looks at, per axis and in input pixels.

    Parameters
    ----------
    radius : (int, int)
        (y, x) distance from a stride-aligned cut at which the output no longer feels it. For an
        axis without an end: how far the probe looked.
    stride : (int, int)
        (y, x) total stride: sizes and origins of tiles are multiples of it. For a net that is not
        equivariant only the lattice of the sizes it takes.
    scale : float
        Output pixels per input pixel: 2.0 for super-resolution x2, 0.25 for one class per 4 px.
    finite : bool
        The reach ended within what was looked at.
    equivariant : bool
        Shifting the input by the stride shifts the output.
    bands : int
        Output channels.
    looked : int
        How far from the band the probe could have seen an influence, px.
    margin : (int, int)
        Input px at the near side (top, left) that an unpadded net does not output: output pixel
        ``j`` lies at input ``margin + j / scale``. The far side lacks as much, or up to one output
        px more where the total is odd. 0 for padded nets.
    reason : str
        In words: why infinite or not equivariant, what could not be looked at.
    size : (int, int), optional
        The only (y, x) input size the net takes, for nets with a fixed one.
    domain : str
        The numbers that it was measured on, of `daskinfer.receptive.domain`.

    Examples
    --------
    >>> field = ReceptiveField(radius=(13, 13), stride=(4, 4))
    >>> field.exact, field.halo
    (True, (16, 16))
    """

    radius: tuple[int, int]
    stride: tuple[int, int]
    scale: float = 1.0
    finite: bool = True
    equivariant: bool = True
    bands: int = 1
    looked: int = 0
    margin: tuple[int, int] = (0, 0)
    reason: str = ""
    size: tuple[int, int] | None = None
    domain: str = NOISE

    def __post_init__(self) -> None:
        if min(self.radius) < 0 or min(self.margin) < 0:
            raise ValueError(f"radius {self.radius} and margin {self.margin} must not be negative")
        if min(self.stride) < 1 or self.scale <= 0:
            raise ValueError(f"stride {self.stride} must be >= 1 and scale {self.scale} > 0")

    @property
    def exact(self) -> bool:
        """Whether a halo exists that makes tiles equal the whole image."""
        return self.finite and self.equivariant

    @property
    def halo(self) -> tuple[int, int]:
        """Radius rounded up to the stride: the smallest exact halo, if `exact`."""
        need = (max(r, m) for r, m in zip(self.radius, self.margin, strict=True))
        y, x = (round_up(n, s) for n, s in zip(need, self.stride, strict=True))
        return y, x
