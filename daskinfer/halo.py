"""Choose how much context a tile is read with.

A tile's output is exact where every output pixel lies at least the receptive-field radius away
from each cut of the input. So the halo is the radius, rounded up to the total stride: tile
origins and sizes then stay on the stride lattice, where pooling windows and strided convolutions
fall on the same pixels as in the whole image. How radius and stride are measured, and where the
rules come from, is told in `daskinfer.probe`.
"""

from __future__ import annotations

import operator
import warnings
from typing import Literal

from daskinfer.probe import ReceptiveField, measure_field, round_up

__all__ = ["DEFAULT_OVERLAP", "ReceptiveField", "choose_halo", "measure_field", "round_up"]

DEFAULT_OVERLAP = 128
"""Context in px per side for nets without an exact halo: tiles are blended over it instead."""


def choose_halo(
    field: ReceptiveField, requested: Literal["auto"] | int | tuple[int, int] = "auto"
) -> tuple[int, int]:
    """Return the (y, x) halo in input px, a multiple of the stride.

    Parameters
    ----------
    field : ReceptiveField
        What was measured.
    requested : "auto", int or (int, int)
        ``"auto"`` takes the smallest exact halo; where none is exact (see
        `ReceptiveField.exact`) it takes `DEFAULT_OVERLAP`, over which tiles are blended. A number,
        or a (y, x) pair, is rounded up to the stride.

    Returns
    -------
    (int, int)

    Raises
    ------
    TypeError
        Not "auto", a whole number or a pair of them.
    ValueError
        A negative number, a pair of another length, another word.

    Warns
    -----
    UserWarning
        The rounded halo is below the radius, so tiles will differ from the whole image.

    Examples
    --------
    >>> field = ReceptiveField(radius=(13, 13), stride=(4, 4))
    >>> choose_halo(field), choose_halo(field, (14, 30))
    ((16, 16), (16, 32))
    """
    if requested == "auto":
        wanted = field.halo if field.exact else (DEFAULT_OVERLAP, DEFAULT_OVERLAP)
    else:
        wanted = _pair(requested)
    halo = (round_up(wanted[0], field.stride[0]), round_up(wanted[1], field.stride[1]))
    if field.exact and (halo[0] < field.radius[0] or halo[1] < field.radius[1]):
        warnings.warn(
            f"halo {_px(halo)} is below the receptive-field radius {_px(field.radius)}: seams will "
            f'show; pass halo="auto" or halo={field.halo} for an exact result',
            UserWarning,
            stacklevel=2,
        )
    return halo


def _pair(requested: object) -> tuple[int, int]:
    """Validate a halo that is not "auto"."""
    if isinstance(requested, str):
        raise ValueError(f'halo {requested!r} is unknown: pass "auto", a number of px or (y, x)')
    parts = requested if isinstance(requested, (tuple, list)) else (requested, requested)
    if len(parts) != 2:
        raise ValueError(f"halo {requested!r} has {len(parts)} numbers: pass one or (y, x)")
    y, x = (_whole(part, requested) for part in parts)
    if y < 0 or x < 0:
        raise ValueError(f"halo {requested!r} is negative: pass 0 or more px")
    return y, x


def _whole(part: object, requested: object) -> int:
    """Return a whole number of px; True is a slip, not one pixel."""
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        raise TypeError(f'halo {requested!r} is not whole px: pass "auto", an int or (y, x)')
    return operator.index(part)


def _px(pair: tuple[int, int]) -> str:
    return f"{pair[0]} px" if pair[0] == pair[1] else f"{pair[0]} x {pair[1]} px (y, x)"
