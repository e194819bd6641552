"""How far a band along one edge is felt, and which shifts of the input shift the output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from ..tiling import round_up
from .domain import CLASSES
from .netrun import Line

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_STRIDE", "Coarse", "Geometry", "find_shift", "grow", "size_lattice"]

MAX_STRIDE = 64
# Longer than the widest dilated branches in use (rate 36 at stride 16).
FIRST_LOOK = 1024
# Every stride up to 64 divides one of these, the usual ones first.
COMMON_SHIFTS = (64, 60, 48, 56, 54, 63, 50)
SHIFTS = (*COMMON_SHIFTS, *(s for s in range(62, 32, -1) if s not in COMMON_SHIFTS))
# Of short inputs, which those would shift out of sight.
SHORT_SHIFTS = (32, 16, 8, 4, *(s for s in range(31, 0, -1) if s not in (16, 8, 4)))


class Geometry(NamedTuple):
    """Where outputs lie: output ``j`` covers input ``margin + [j, j + 1) / scale``."""

    scale: Fraction
    margin: int

    @classmethod
    def of(cls, length: int, out: int, scale: Fraction) -> Geometry:
        """Geometry of a net that makes `out` px of `length`."""
        lost = max(Fraction(0), length - out / scale)
        # A margin is a whole number of output pixels, or the georeference could not say it.
        return cls(scale, int(lost / 2 * scale // 1 / scale))

    def past(self, column: int, edge: int) -> int:
        """Return how far past `edge` this output column ends, px."""
        return max(0, math.ceil(self.margin + (column + 1) / self.scale) - edge)

    def before(self, column: int, edge: int) -> int:
        """Return how far before `edge` this output column begins, px."""
        return max(0, edge - math.floor(self.margin + column / self.scale))


def _changed(line: Line, base: torch.Tensor, other: torch.Tensor) -> list[int]:
    """Return the output columns in which the two runs differ, NaN equal to NaN."""
    differ = ((base - other).abs() > line.noise) | (base.isnan() != other.isnan())
    # A finite change under a NaN band: something in the net turned NaN into a number.
    line.swallows = line.swallows or bool((differ & ~other.isnan() & ~base.isnan()).any())
    return _columns(differ.flatten(0, 1).any(dim=0))


def _columns(mask: torch.Tensor) -> list[int]:
    return [int(c) for c in mask.nonzero().flatten().tolist()]


def _contents(line: Line, band: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Yield contents for the band: NaN, then draws large enough to win any max or comparison."""
    if line.runner.domain in CLASSES:
        # There is no class of any other number.
        yield from (line.draw(band.shape[2], seed + 100 * times) for times in range(1, 3))
        return
    yield band * math.nan
    if line.swallows:
        noise = line.draw(band.shape[2], seed + 100)
        yield from (noise, 100 * noise, noise + 100, noise - 100)


def _reach(line: Line, x: torch.Tensor, base: torch.Tensor, band: int, at: Geometry) -> int | None:
    """Return how far a band of that width is felt from either edge, px; None: everywhere."""
    reach, length, last = 0, x.shape[2], base.shape[2] - 1
    for seed in range(3):
        if seed:
            x = line.draw(length, seed)
            base = line.must(x)
        for near in (True, False):
            part = slice(0, band) if near else slice(length - band, length)
            for content in _contents(line, x[..., part], seed):
                probe = x.clone()
                probe[..., part] = content
                columns = _changed(line, base, line.must(probe))
                if columns and (columns[-1] == last if near else columns[0] == 0):
                    return None
                felt = [at.past(columns[-1], band) if near else at.before(columns[0], length - band)
                        for _ in columns[:1]]  # fmt: skip
                reach = max(reach, *felt, 0)
        if not line.swallows:
            break
    return reach


class Coarse(NamedTuple):
    """What one look along an axis gave: a reach that is right up to a stride."""

    reach: int | None
    looked: int
    length: int
    at: Geometry
    longest: bool = False


def _simple_ratio(value: float) -> Fraction:
    """Return the simplest fraction within 2 %: sizes of strided nets are ragged by a stride."""
    for below in range(1, MAX_STRIDE + 1):
        above = round(value * below)
        if above and abs(above / below - value) <= 0.02 * value:
            return Fraction(above, below)
    return Fraction(value).limit_denominator(4096)


_Look = tuple["torch.Tensor", "torch.Tensor", bool]


def _looks(line: Line, limit: int) -> Iterator[_Look]:
    """Yield inputs to look at with their outputs, ascending, and whether the net takes no more.

    The last, beyond the limit, is only for telling a reach that ended from one that has a gap.
    """
    unit, taken = line.unit, False
    for reach in () if line.fixed else sorted({min(FIRST_LOOK, limit), limit, 2 * limit}):
        x = line.draw(round_up(reach, unit) + unit)
        if (out := line.run(x)) is None:
            break
        taken = True
        yield x, out, False
    times = 1 if line.fixed else max(1, min(FIRST_LOOK, limit) // unit)
    while not taken and times:
        x = line.draw(times * unit)
        if (out := line.run(x)) is not None:
            taken = True
            yield x, out, True
        times //= 2


def grow(line: Line, limit: int) -> Iterator[Coarse]:
    """Yield the reach in longer and longer probes.

    The first is long already: a dilated branch sees only padding until the input is longer than
    its dilation, so a reach that ends early in a short probe proves nothing.
    """
    unit = line.unit
    small = line.out_size(unit) or 1
    for x, base, longest in _looks(line, limit):
        length, out = x.shape[2], base.shape[2]
        ratio = (out - small) / (length - unit) if length > unit else out / length
        if ratio <= 0:
            raise ValueError(
                f"the model returns {out} px along {'yx'[line.axis]} for {length} px and {small} "
                f"for {unit}: it must return (n, channel, y, x), with y and x that grow with the "
                "input's. If it takes and returns (n, y, x, channel), pass axes='nhwc'; if it only "
                "returns that, permute its output"
            )
        at = Geometry.of(length, out, _simple_ratio(ratio))
        band = max(1, min(unit, length // 4)) if longest else unit
        reach = None if line.blind else _reach(line, x, base, band, at)
        yield Coarse(reach, length - band, length, at, longest)


class _Shift(NamedTuple):
    """A shift that holds, and how far the cut itself is felt."""

    stride: int
    at: Geometry
    felt: int


def _primes(number: int) -> list[int]:
    return [p for p in range(2, number + 1) if number % p == 0 and all(p % q for q in range(2, p))]


@dataclass
class _Shifter:
    """Compare the net on a long input with the net on the same input cut at a lattice point."""

    line: Line
    coarse: Coarse
    reach: int
    tolerance: float
    smallest: float = math.inf

    def find(self) -> _Shift | None:
        """Return the smallest shift that holds, or None."""
        for start in (*SHIFTS, *SHORT_SHIFTS) if self.coarse.longest else SHIFTS:
            self._prepare(start)
            if held := self.holds(start):
                return self._divide(held)
        return None

    def _prepare(self, stride: int) -> None:
        # Reach, slack for nets whose padding is felt further than their pixels, 128 px interior.
        length = round_up(self.reach + 3 * MAX_STRIDE + 128, stride)
        if self.coarse.longest:
            length = min(length, self.coarse.length // stride * stride)
        length = self.line.unit if self.line.fixed else length
        self.input = self.line.draw(length + stride)
        self.x = self.input[..., :length]
        self.whole = self.line.run(self.x)

    def _divide(self, held: _Shift) -> _Shift:
        for prime in _primes(held.stride):
            # What holds for a stride holds for its multiples: bisect the exponent.
            whole, low, high = held.stride, 0, 0
            while whole % prime ** (high + 1) == 0:
                high += 1
            rest = whole // prime**high
            while low < high:
                middle = (low + high) // 2
                if less := self.holds(rest * prime**middle):
                    held, high = less, middle
                else:
                    low = middle + 1
        return held

    def holds(self, stride: int) -> _Shift | None:
        """Shift by `stride`; sizes the net does not take are not on its lattice."""
        if self.whole is None or self.whole.shape[2] < 2:
            return None
        length, out = self.x.shape[2], self.whole.shape[2]
        # A net of one size sees the next window of that size, others the same window cut short.
        end = length + stride if self.line.fixed else length
        cut = self.line.run(self.input[..., stride:end])
        if cut is None or cut.shape[:2] != self.whole.shape[:2]:
            return None
        moved = Fraction(out * stride, length) if self.line.fixed else Fraction(out - cut.shape[2])
        if moved <= 0 or moved.denominator > 1:
            return None
        at = Geometry.of(length, out, moved / stride)
        columns = self._differing(self.whole[..., int(moved) :], cut[..., : out - int(moved)])
        inner = out - int(moved)
        if self.line.fixed:
            # The first window's far edge is artificial too: what it is felt by is not asked here.
            inner -= math.ceil(self.reach * at.scale)
            columns = [c for c in columns if c < inner]
        felt = at.past(columns[-1], 0) if columns else 0
        # Some interior must be left to have seen the two agree.
        seen = at.past(inner - 1, 0) > max(felt, self.reach) + stride
        return _Shift(stride, at, felt) if seen and felt <= self.reach + MAX_STRIDE else None

    def _differing(self, whole: torch.Tensor, cut: torch.Tensor) -> list[int]:
        """Return the columns that differ by more than the tolerance, per channel's own spread."""
        if not whole.numel():
            return []
        if self.line.runner.integer:
            # Near-ties may flip in float32: a hundredth of a column's classes.
            error = (whole != cut).double().mean(dim=(0, 1))
            limit = 0.0 if self.tolerance < 1e-6 else 1e-2
        else:
            spread = whole.nan_to_num().std(dim=(1, 2), keepdim=True, correction=0)
            spread = spread.clamp(min=max(1e-6 * spread.max().item(), 1e-30))
            error = ((whole - cut).abs() / spread).nan_to_num(nan=0.0).amax(dim=(0, 1))
            limit = self.tolerance
        self.smallest = min(self.smallest, error[len(error) * 3 // 4 :].max().item())
        return _columns(error > limit)

    def exact_reach(self, shift: _Shift) -> int:
        """Measure with bands and cuts on the lattice; `shift` is what `find` returned."""
        if self.line.fixed or self.whole is None:
            return max(self.reach, shift.felt)
        length = self.x.shape[2]
        band = _reach(self.line, self.x, self.whole, shift.stride, shift.at)
        cut = self.line.run(self.x[..., : length - shift.stride])
        columns = [] if cut is None else self._differing(self.whole[..., : cut.shape[2]], cut)
        far = shift.at.before(columns[0], length - shift.stride) if columns else 0
        return max(self.reach if band is None else band, shift.felt, far)


def find_shift(line: Line, coarse: Coarse, reach: int) -> tuple[_Shift, int] | None:
    """Return the stride and the exact radius.

    The loose tolerance is tried only where some shift almost held.
    """
    smallest = 0.0
    for tolerance in line.tolerances:
        if smallest < tolerance:
            shifter = _Shifter(line, coarse, reach, tolerance)
            if found := shifter.find():
                return found, shifter.exact_reach(found)
            smallest = shifter.smallest
    return None


def size_lattice(line: Line, scale: Fraction) -> int:
    """Return the smallest step of sizes the net takes with outputs of the right size."""
    if line.fixed:
        return 1
    for step in sorted(range(1, MAX_STRIDE + 1), key=lambda s: (s & (s - 1) != 0, s)):
        first = round_up(line.unit, step)
        sizes = [line.out_size(first + times * step) for times in range(3)]
        if all(a and b and b - a == scale * step for a, b in itertools.pairwise(sizes)):
            return step
    return line.unit
