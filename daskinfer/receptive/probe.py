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

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .field import ReceptiveField
from .netrun import (
    Line,
    Runner,
    choose_domain,
    exported_size,
    in_double,
    noise_of,
    plain_kernels,
    start_size,
    takes_only,
)
from .reach import MAX_STRIDE, Geometry, find_shift, grow, size_lattice

if TYPE_CHECKING:
    import torch

__all__ = ["measure_field"]

GLOBAL_LAYERS = ("GroupNorm", "InstanceNorm", "LayerNorm", "GlobalResponseNorm", "AdaptiveAvgPool",
                 "AdaptiveMaxPool", "MultiheadAttention", "Attention", "SqueezeExcit")  # fmt: skip


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
    A net that gives no finite numbers for noise, or always the same ones, is measured on others
    (`daskinfer.receptive.domain`); where none shows what it depends on, no halo counts as exact.
    Where something in the net swallows NaN (``nan_to_num``, argmax, comparisons), the difference
    between inputs that differ only in the band takes over, over several large random draws.
    """
    import torch

    if in_bands < 1 or limit < 1:
        raise ValueError(f"in_bands {in_bands} and limit {limit} must be at least 1")
    with torch.no_grad(), plain_kernels():
        runner = Runner(net, in_bands, torch.float32)
        start = start_size(runner, size or exported_size(net))
        unseen = choose_domain(runner, start)
        fixed = start if takes_only(runner, start) else None
        noise = noise_of(runner, start)
        if noise is None:
            return _nondeterministic(runner, start)
        double = in_double(runner, start) or runner
        axes = []
        for axis in (0, 1):
            line, twin = (
                Line(r, axis, start, noise, bool(fixed), bool(unseen)) for r in (runner, double)
            )
            axes.append(_measure_axis(line, twin, limit))
    return _join(axes, runner, fixed, unseen)


class _AxisField(NamedTuple):
    radius: int
    stride: int
    at: Geometry
    finite: bool
    equivariant: bool
    looked: int
    note: str


def _measure_axis(line: Line, double: Line, limit: int) -> _AxisField:
    before: int | None = None
    for coarse in grow(line, limit):
        double.swallows = line.swallows
        if coarse.reach is None:
            note = f"the reach did not end within the {coarse.looked} px looked at"
            if coarse.looked >= limit:
                break
        elif before is not None and coarse.reach <= before + MAX_STRIDE:
            grew = False
            break
        elif found := find_shift(double, coarse, coarse.reach):
            shift, radius = found
            return _AxisField(radius, shift.stride, shift.at, True, True, coarse.looked, "")
        else:
            note = f"the reach still grew at the {coarse.looked} px looked at"
        grew, before = before is not None, coarse.reach
    looked, at = coarse.looked, coarse.at
    lattice = size_lattice(line, at.scale)
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


def _join(
    axes: list[_AxisField], runner: Runner, fixed: tuple[int, int] | None, unseen: str
) -> ReceptiveField:
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
        reason=unseen or "; ".join(notes),
        size=fixed,
        domain=runner.domain,
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


def _nondeterministic(runner: Runner, shape: tuple[int, int]) -> ReceptiveField:
    reason = "two runs on one input differ: call eval() on the net, or switch its dropout off"
    return ReceptiveField(shape, (1, 1), finite=False, equivariant=False, bands=runner.channels,
                          reason=reason, domain=runner.domain)  # fmt: skip
