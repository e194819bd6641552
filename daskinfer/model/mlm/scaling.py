"""Value scaling of MLM, as the numbers of a recipe.

MLM scales each band by one operation, on the values that the network's author read from rasters of
the kind.  A recipe does ``x = (clip(raw * scale + offset) - mean) / std``; every operation of MLM
is part of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["scaled", "scaling_of"]

_NEUTRAL = {"mean": 0.0, "std": 1.0, "clip_min": -math.inf, "clip_max": math.inf}
_FIELDS = {
    "min-max": ("minimum", "maximum"),
    "z-score": ("mean", "stddev"),
    "clip": ("minimum", "maximum"),
    "clip-min": ("minimum",),
    "clip-max": ("maximum",),
    "offset": ("value",),
    "scale": ("value",),
}


def scaling_of(operations: Any, bands: int | None) -> dict[str, Any]:
    """Fields of a recipe for the ``value_scaling`` of an input.

    Parameters
    ----------
    operations : list of (dict or None) or None
        One for all bands, or one per band.
    bands : int or None
        Bands of the input.

    Raises
    ------
    ValueError
        If an operation is unknown, lacks its numbers, or there are too few or too many.

    Examples
    --------
    >>> scaling_of([{"type": "min-max", "minimum": 0, "maximum": 4000}], 3)
    {'std': (4000.0,)}
    >>> scaling_of([{"type": "scale", "value": 10000}], 3)
    {'scale': (0.0001,)}
    """
    if isinstance(operations, Mapping):
        operations = [operations]
    if not operations or all(operation is None for operation in operations):
        return {}
    if bands is not None and len(operations) not in (1, bands):
        raise ValueError(
            f"value_scaling has {len(operations)} entries for {bands} bands: one, or one per band"
        )
    if all(operation and operation.get("type") == "scale" for operation in operations):
        # Raw numbers to physical values, in place of the raster's own scale.
        return {"scale": tuple(1 / _numbers(operation)[0] for operation in operations)}
    per_band = [_NEUTRAL | _effect(operation) for operation in operations]
    fields = {name: tuple(band[name] for band in per_band) for name in _NEUTRAL}
    return {name: values for name, values in fields.items() if set(values) != {_NEUTRAL[name]}}


def _effect(operation: Mapping[str, Any] | None) -> dict[str, float]:
    """What one operation sets of a recipe."""
    if operation is None:
        return {}
    numbers = _numbers(operation)
    match operation["type"]:
        case "min-max":
            if numbers[1] <= numbers[0]:
                raise ValueError(f"value_scaling min-max needs minimum < maximum, got {operation}")
            return {"mean": numbers[0], "std": numbers[1] - numbers[0]}
        case "z-score":
            return {"mean": numbers[0], "std": numbers[1]}
        case "clip":
            return {"clip_min": numbers[0], "clip_max": numbers[1]}
        case "clip-min":
            return {"clip_min": numbers[0]}
        case "clip-max":
            return {"clip_max": numbers[0]}
        case "offset":
            return {"mean": numbers[0]}
        case _:
            return {"std": numbers[0]}


def _numbers(operation: Mapping[str, Any]) -> list[float]:
    kind = operation.get("type")
    if kind == "processing":
        raise ValueError(
            f"value_scaling by an expression ({operation.get('expression')!r}) is not run: pass "
            "scale=, mean= and std= that stand for it"
        )
    if kind not in _FIELDS:
        raise ValueError(f"value_scaling {kind!r} is unknown; known: {', '.join(_FIELDS)}")
    numbers = [operation.get(name) for name in _FIELDS[kind]]
    if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
        raise ValueError(f"value_scaling {kind} needs {' and '.join(_FIELDS[kind])}: {operation}")
    if kind in ("scale", "z-score") and not numbers[-1]:
        raise ValueError(f"value_scaling {kind} divides by 0: {operation}")
    return [float(n) for n in numbers if n is not None]


def scaled(
    bands: int,
    scale: Sequence[float] | None,
    offset: Sequence[float] | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    clip: tuple[Sequence[float] | None, Sequence[float] | None],
) -> list[dict[str, Any] | None] | None:
    """The ``value_scaling`` of a recipe's numbers, for raw ones; None where there is none.

    A band that is clipped and scaled too, which MLM has no operation for, gets an expression of
    numpy, as ``gdal_calc`` computes them, of the raw numbers A.

    Examples
    --------
    >>> scaled(1, (0.5,), None, (3.0,), (2.0,), (None, None))
    [{'type': 'z-score', 'mean': 6.0, 'stddev': 4.0}]
    """
    if not any((scale, offset, mean, std, *clip)):
        return None
    columns = [
        _spread(v, n, bands) for v, n in ((scale, 1.0), (offset, 0.0), (mean, 0.0), (std, 1.0))
    ]
    low, high = _spread(clip[0], -math.inf, bands), _spread(clip[1], math.inf, bands)
    return [
        _operation((numbers[0], numbers[1], numbers[2], numbers[3]), limits)
        for numbers, limits in zip(
            zip(*columns, strict=True), zip(low, high, strict=True), strict=True
        )
    ]


def _operation(
    numbers: tuple[float, float, float, float], limits: tuple[float, float]
) -> dict[str, Any] | None:
    scale, offset, mean, std = numbers
    moved = numbers != (1, 0, 0, 1)
    clipped = dict(zip(("minimum", "maximum"), limits, strict=True))
    clipped = {name: value for name, value in clipped.items() if math.isfinite(value)}
    if moved and clipped:
        bounds = ", ".join(
            repr(float(limit)) if math.isfinite(limit) else "None" for limit in limits
        )
        expression = f"(clip(A * {scale!r} + {offset!r}, {bounds}) - {mean!r}) / {std!r}"
        return {"type": "processing", "format": "gdal-calc", "expression": expression}
    if moved:
        # ((raw * scale + offset) - mean) / std, in one operation of MLM.
        return {"type": "z-score", "mean": (mean - offset) / scale, "stddev": std / scale}
    if len(clipped) == 2:
        return {"type": "clip", **clipped}
    return {"type": f"clip-{next(iter(clipped))[:3]}", **clipped} if clipped else None


def _spread(values: Sequence[float] | None, neutral: float, bands: int) -> Sequence[float]:
    if values is None:
        return [neutral] * bands
    return list(values) * bands if len(values) == 1 else values
