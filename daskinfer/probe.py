"""Measure how far a net sees: radius, total stride, output scale.

The definition everything here serves. Let ``f`` be the net, ``s`` its total stride, ``k`` output
pixels per input pixel. Cut the input on the stride lattice (at a multiple of ``s``) and run ``f``
on the piece. Near the cut the output differs from the output of the whole image, because the
net met its own padding where it should have met pixels. The *radius* is the smallest ``r`` such
that every output pixel at least ``r`` input px away from the cut, for every lattice-aligned cut,
equals the whole-image result. A tile read with a halo of ``r`` rounded up to ``s`` is then exact.

Where the rules come from (Araujo, Norris and Sim 2019, "Computing Receptive Fields of
Convolutional Neural Networks", https://distill.pub/2019/computing-receptive-fields):

radius
    Layer ``l`` with kernel ``k_l``, dilation ``d_l`` and the product ``S_l`` of all strides before
    it widens the field by ``d_l (k_l - 1) S_l`` px, so a stack of stride-1 3x3 convolutions has one
    px of radius per layer. Branches take the maximum. Here nothing is computed from layers: a band
    of NaN is laid along one edge and every output it reaches depends on it. Fields are periodic
    in ``s``, so the band nearest the cut, ``s`` wide, reaches as far as everything behind it.
stride
    ``f`` is equivariant to shifts by ``s`` only: ``f(shift(x, s)) = shift(f(x), s k)`` away from
    the cut. The shifts that hold are closed under gcd, so all are multiples of one smallest, the
    total stride: find any that holds, then divide it by primes as long as it goes on holding.
scale
    ``k = (size(f(x)) - size(f(x without s columns))) / s``.

Each axis is measured alone on an input that is long in that axis and thin in the other, so the
cost grows with the radius and not with its square.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from .tiling import round_up

if TYPE_CHECKING:
    import torch

__all__ = ["ReceptiveField", "measure_field"]

MAX_STRIDE = 64
# Longer than the widest dilated branches in use (rate 36 at stride 16).
FIRST_LOOK = 1024
# Every stride up to 64 divides one of these, the usual ones first.
COMMON_SHIFTS = (64, 60, 48, 56, 54, 63, 50)
SHIFTS = (*COMMON_SHIFTS, *(s for s in range(62, 32, -1) if s not in COMMON_SHIFTS))
# A size the net takes is looked for here: multiples of all common strides, then of any, then the
# fixed sizes of common chip classifiers.
UNITS = (64, 96, 80, 112, 72, 120, 100, 108)
SIZES = (*UNITS, *(n for n in range(65, 129) if n not in UNITS),
         192, 256, 384, 512, 768, 1024, 224, 240, 299, 448, 32, 16, 8)  # fmt: skip
GLOBAL_LAYERS = ("GroupNorm", "InstanceNorm", "LayerNorm", "GlobalResponseNorm", "AdaptiveAvgPool",
                 "AdaptiveMaxPool", "MultiheadAttention", "Attention", "SqueezeExcit")  # fmt: skip


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


def measure_field(
    net: Callable[[torch.Tensor], torch.Tensor],
    in_bands: int,
    *,
    limit: int = 2048,
    size: tuple[int, int] | None = None,
) -> ReceptiveField:
    """Measure the receptive field of a net by running it.

    Parameters
    ----------
    net : callable
        Maps float32 ``(1, in_bands, y, x)`` to ``(1, channel, y, x)``, on the CPU, in eval mode.
        An `nn.Module` (TorchScript and ``torch.export`` modules too) is probed in float64 as well,
        on a copy; any other callable in float32 only, with looser tolerances.
    in_bands : int
        Input channels.
    limit : int
        How far to look, px per side. A field that has not ended there counts as infinite. (Twice
        as far where an end was seen, yet no shift holds: the reach may have a gap there.)
    size : (int, int), optional
        The only (y, x) size the net takes, if it has a fixed one and does not show it.

    Returns
    -------
    ReceptiveField

    Raises
    ------
    ValueError
        The net refuses every size tried (its own error is chained), the two axes differ in output
        scale, or the output is not 4-D.

    Notes
    -----
    Taps whose weight is zero count, for a NaN passes them: the radius is that of the architecture.
    Where something in the net swallows NaN (``nan_to_num``, argmax, comparisons), the difference
    between inputs that differ only in the band takes over, over several large random draws.
    """
    import torch

    if in_bands < 1 or limit < 1:
        raise ValueError(f"in_bands {in_bands} and limit {limit} must be at least 1")
    with torch.no_grad(), _plain_kernels():
        runner = _Runner(net, in_bands, torch.float32)
        start = size or _exported_size(net) or _start_size(runner)
        fixed = start if _takes_only(runner, start) else None
        noise = _noise(runner, start)
        if noise is None:
            return _nondeterministic(runner, start)
        double = _in_double(net, in_bands, start) or runner
        axes = []
        for axis in (0, 1):
            line, twin = (_Line(r, axis, start, noise, bool(fixed)) for r in (runner, double))
            axes.append(_measure_axis(line, twin, limit))
    return _join(axes, runner, fixed)


# --- running the net ---------------------------------------------------------------------------


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Use kernels in which an output touches its own inputs only: Winograd and FFT spread NaN."""
    import torch
    from torch.backends import cudnn, mkldnn, nnpack

    stack = contextlib.ExitStack()
    with _quiet():
        for backend in (mkldnn, nnpack, cudnn):
            stack.enter_context(backend.flags(enabled=False))
    # The strips are thin: on several threads they take longer, on busy cores ten times as long.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        with _quiet():
            stack.close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch warns about its own internals where backends are set and modules copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class _Runner:
    """The net at one precision; keeps the last refusal to explain itself."""

    net: Callable[[torch.Tensor], torch.Tensor]
    bands: int
    dtype: torch.dtype
    refusal: Exception | None = None
    channels: int = 1
    integer: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """Run on (band, y, x) -> (channel, y, x) in double; None where the net refuses the size."""
        try:
            out = self.net(x[None].contiguous())
        except Exception as error:  # nets refuse sizes with exceptions of any type
            self.refusal = error
            return None
        if getattr(out, "ndim", None) != 4:
            shape = getattr(out, "shape", type(out).__name__)
            raise ValueError(f"the net must return one tensor (n, channel, y, x), got {shape}")
        self.channels, self.integer = out.shape[1], not out.is_floating_point()
        return out[0].double() if min(out.shape[2:]) else None

    def draw(self, shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
        """Random (band, y, x); a generator of its own leaves the caller's random state alone."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        x = torch.randn((self.bands, *shape), generator=generator, dtype=torch.float64)
        return x.to(self.dtype)


@dataclass
class _Line:
    """The net along one axis: tensors are (band, thin, long) whatever the axis is."""

    runner: _Runner
    axis: int
    start: tuple[int, int]
    noise: float
    fixed: bool
    swallows: bool = False

    @property
    def unit(self) -> int:
        return self.start[self.axis]

    @property
    def tolerances(self) -> tuple[float, ...]:
        """Relative differences that count as none; parts of a net may be float32 inside."""
        import torch

        return (1e-9, 1e-4) if self.runner.dtype == torch.float64 else (1e-4,)

    def draw(self, length: int, seed: int = 0) -> torch.Tensor:
        return self.runner.draw((self.start[1 - self.axis], length), seed)

    def run(self, x: torch.Tensor) -> torch.Tensor | None:
        out = self.runner(x if self.axis else x.transpose(1, 2))
        return out if out is None or self.axis else out.transpose(1, 2)

    def must(self, x: torch.Tensor) -> torch.Tensor:
        out = self.run(x)
        if out is None:
            raise ValueError(f"the net took {x.shape[2]} px once, then refused them") from (
                self.runner.refusal)  # fmt: skip
        return out

    def out_size(self, length: int) -> int | None:
        out = self.run(self.draw(length))
        return None if out is None else out.shape[2]


def _exported_size(net: object) -> tuple[int, int] | None:
    """Return the static (y, x) of a torch.export module, None where they are dynamic."""
    from torch import fx

    if not isinstance(net, fx.GraphModule):
        return None
    shapes = [node.meta["val"].shape for node in net.graph.nodes
              if node.op == "placeholder" and hasattr(node.meta.get("val"), "shape")]  # fmt: skip
    if len(shapes) != 1 or len(shapes[0]) != 4:
        return None
    y, x = shapes[0][2:]
    return (y, x) if type(y) is int and type(x) is int else None


def _start_size(runner: _Runner) -> tuple[int, int]:
    """Find the first (y, x) the net takes."""
    first: Exception | None = None
    squares = [(n, n) for n in SIZES]
    for shape in itertools.chain(squares, itertools.permutations(UNITS, 2)):
        if runner(runner.draw(shape)) is not None:
            return shape
        first = first or runner.refusal
    raise ValueError(
        f"the net refused {_in_words(runner.bands)} of every size tried, 8 to {max(SIZES)} px; the "
        f"first time with: {first!r}. If it takes one size only, pass size=(y, x)"
    ) from first


def _takes_only(runner: _Runner, start: tuple[int, int]) -> bool:
    """Whether the net refuses every longer input."""
    y, x = start
    longer = ((y + more[0], x + more[1]) for more in ((y, x), (32, 32), (0, x), (y, 0), (64, 64)))
    return all(runner(runner.draw(shape)) is None for shape in longer)


def _in_words(bands: int) -> str:
    """Say what was fed to the net."""
    return f"float32 inputs with {bands} band{'s' * (bands != 1)}"


def _noise(runner: _Runner, shape: tuple[int, int]) -> float | None:
    """Return the largest difference between runs on one input; None where the net is random."""
    import torch

    x = runner.draw(shape)
    # TorchScript recompiles itself in its first calls, with other roundings.
    for _ in range(2):
        runner(x)
    first, second = runner(x), runner(x)
    if first is None or second is None:
        error = runner.refusal
        raise ValueError(f"the net refused {tuple(x.shape)}: {error!r}") from error
    difference = torch.nan_to_num(first - second).abs().max().item()
    spread = torch.nan_to_num(first).std().item()
    return None if difference > 1e-3 * spread else 4 * difference


def _in_double(net: object, bands: int, shape: tuple[int, int]) -> _Runner | None:
    """Return a float64 copy of the net, None where it cannot be one."""
    import torch

    if not isinstance(net, torch.nn.Module):
        return None
    try:
        with _quiet():
            twin = copy.deepcopy(net).requires_grad_(False).double()
    except Exception:  # any module that cannot be copied is probed in float32 only
        return None
    runner = _Runner(twin, bands, torch.float64)
    x = runner.draw(shape)
    return runner if runner(x) is not None else None


# --- reach: how far a band along one edge is felt ------------------------------------------------


class _Geometry(NamedTuple):
    """Where outputs lie: output ``j`` covers input ``margin + [j, j + 1) / scale``."""

    scale: Fraction
    margin: int

    @classmethod
    def of(cls, length: int, out: int, scale: Fraction) -> _Geometry:
        lost = max(Fraction(0), length - out / scale)
        # A margin is a whole number of output pixels, or the georeference could not say it.
        return cls(scale, int(lost / 2 * scale // 1 / scale))

    def past(self, column: int, edge: int) -> int:
        """Return how far past `edge` this output column ends, px."""
        return max(0, math.ceil(self.margin + (column + 1) / self.scale) - edge)

    def before(self, column: int, edge: int) -> int:
        """Return how far before `edge` this output column begins, px."""
        return max(0, edge - math.floor(self.margin + column / self.scale))


def _changed(line: _Line, base: torch.Tensor, other: torch.Tensor) -> list[int]:
    """Return the output columns in which the two runs differ, NaN equal to NaN."""
    differ = ((base - other).abs() > line.noise) | (base.isnan() != other.isnan())
    # A finite change under a NaN band: something in the net turned NaN into a number.
    line.swallows = line.swallows or bool((differ & ~other.isnan() & ~base.isnan()).any())
    return _columns(differ.flatten(0, 1).any(dim=0))


def _columns(mask: torch.Tensor) -> list[int]:
    return [int(c) for c in mask.nonzero().flatten().tolist()]


def _contents(line: _Line, band: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Yield contents for the band: NaN, then draws large enough to win any max or comparison."""
    yield band * math.nan
    if line.swallows:
        noise = line.draw(band.shape[2], seed + 100)
        yield from (noise, 100 * noise, noise + 100, noise - 100)


def _reach(
    line: _Line, x: torch.Tensor, base: torch.Tensor, band: int, at: _Geometry
) -> int | None:
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


class _Coarse(NamedTuple):
    reach: int | None
    looked: int
    length: int
    at: _Geometry
    longest: bool = False


def _simple_ratio(value: float) -> Fraction:
    """Return the simplest fraction within 2 %: sizes of strided nets are ragged by a stride."""
    for below in range(1, MAX_STRIDE + 1):
        above = round(value * below)
        if above and abs(above / below - value) <= 0.02 * value:
            return Fraction(above, below)
    return Fraction(value).limit_denominator(4096)


_Look = tuple["torch.Tensor", "torch.Tensor", bool]


def _looks(line: _Line, limit: int) -> Iterator[_Look]:
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


def _grow(line: _Line, limit: int) -> Iterator[_Coarse]:
    """Yield the reach in longer and longer probes.

    The first is long already: a dilated branch sees only padding until the input is longer than
    its dilation, so a reach that ends early in a short probe proves nothing.
    """
    unit = line.unit
    small = line.out_size(unit) or 1
    for x, base, longest in _looks(line, limit):
        length, out = x.shape[2], base.shape[2]
        ratio = (out - small) / (length - unit) if length > unit else out / length
        at = _Geometry.of(length, out, _simple_ratio(ratio))
        band = max(1, min(unit, length // 4)) if longest else unit
        yield _Coarse(_reach(line, x, base, band, at), length - band, length, at, longest)


# --- stride: which shifts of the input shift the output -----------------------------------------


class _Shift(NamedTuple):
    """A shift that holds, and how far the cut itself is felt."""

    stride: int
    at: _Geometry
    felt: int


def _primes(number: int) -> list[int]:
    return [p for p in range(2, number + 1) if number % p == 0 and all(p % q for q in range(2, p))]


@dataclass
class _Shifter:
    """Compare the net on a long input with the net on the same input cut at a lattice point."""

    line: _Line
    coarse: _Coarse
    reach: int
    tolerance: float
    smallest: float = math.inf

    def find(self) -> _Shift | None:
        """Return the smallest shift that holds, or None."""
        for start in SHIFTS:
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
        at = _Geometry.of(length, out, moved / stride)
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


def _find_shift(line: _Line, coarse: _Coarse, reach: int) -> tuple[_Shift, int] | None:
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


def _size_lattice(line: _Line, scale: Fraction) -> int:
    """Return the smallest step of sizes the net takes with outputs of the right size."""
    if line.fixed:
        return 1
    for step in sorted(range(1, MAX_STRIDE + 1), key=lambda s: (s & (s - 1) != 0, s)):
        first = round_up(line.unit, step)
        sizes = [line.out_size(first + times * step) for times in range(3)]
        if all(a and b and b - a == scale * step for a, b in itertools.pairwise(sizes)):
            return step
    return line.unit


# --- one axis, then both -------------------------------------------------------------------------


class _AxisField(NamedTuple):
    radius: int
    stride: int
    at: _Geometry
    finite: bool
    equivariant: bool
    looked: int
    note: str


def _measure_axis(line: _Line, double: _Line, limit: int) -> _AxisField:
    before: int | None = None
    for coarse in _grow(line, limit):
        double.swallows = line.swallows
        if coarse.reach is None:
            note = f"the reach did not end within the {coarse.looked} px looked at"
            if coarse.looked >= limit:
                break
        elif before is not None and coarse.reach <= before + MAX_STRIDE:
            grew = False
            break
        elif found := _find_shift(double, coarse, coarse.reach):
            shift, radius = found
            return _AxisField(radius, shift.stride, shift.at, True, True, coarse.looked, "")
        else:
            note = f"the reach still grew at the {coarse.looked} px looked at"
        grew, before = before is not None, coarse.reach
    looked, at = coarse.looked, coarse.at
    lattice = _size_lattice(line, at.scale)
    if coarse.reach is None or grew:
        if coarse.longest:
            note += f" (the net takes no input much longer than {coarse.length} px)"
        return _AxisField(looked, lattice, at, False, True, looked, note)
    note = (f"no shift of the input up to {MAX_STRIDE} px shifts the output "
            "(align_corners=True, positional encoding, resizing to a fixed size?)")  # fmt: skip
    if coarse.longest:
        note += f", as far as inputs of {coarse.length} px can tell"
    reach = max(coarse.reach, before or 0)
    return _AxisField(reach, lattice, at, True, False, looked, note)


def _join(axes: list[_AxisField], runner: _Runner, fixed: tuple[int, int] | None) -> ReceptiveField:
    y, x = axes
    if y.at.scale != x.at.scale:
        raise ValueError(f"the output scale differs per axis (y {y.at.scale}, "
                         f"x {x.at.scale}): resample inside the net to one scale")  # fmt: skip
    notes = [f"along {name}: {a.note}" for name, a in zip("yx", axes, strict=True) if a.note]
    if y.note == x.note:
        notes = [y.note] if y.note else []
    if notes and (names := _suspects(runner.net, finite=y.finite and x.finite)):
        notes.append(f"the net contains {names}")
    return ReceptiveField(
        radius=(y.radius, x.radius),
        stride=(y.stride, x.stride),
        scale=float(y.at.scale),
        finite=y.finite and x.finite,
        equivariant=y.equivariant and x.equivariant,
        bands=runner.channels,
        looked=min(y.looked, x.looked),
        margin=(y.at.margin, x.at.margin),
        reason="; ".join(notes),
        size=fixed,
    )


def _suspects(net: object, *, finite: bool) -> str:
    """Name the layers of a module that are known for this."""
    names: set[str] = set()
    for module in getattr(net, "modules", list)():
        name = type(module).__name__
        if finite and getattr(module, "align_corners", None):
            names.add(f"{name}(align_corners=True)")
        elif not finite and name.startswith(GLOBAL_LAYERS):
            names.add(name)
        elif not finite and name.startswith("BatchNorm") and module.training:
            names.add(f"{name} in training mode: call eval()")
    return ", ".join(sorted(names))


def _nondeterministic(runner: _Runner, shape: tuple[int, int]) -> ReceptiveField:
    reason = "two runs on one input differ: call eval() on the net, or switch its dropout off"
    return ReceptiveField(shape, (1, 1), finite=False, equivariant=False, bands=runner.channels,
                          reason=reason)  # fmt: skip
