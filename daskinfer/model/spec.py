"""The fields of a model's recipe that users write: brought into one form, and checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .recipe import Model, Numbers

__all__ = [
    "EMBEDDABLE",
    "PER_BAND",
    "SPEC",
    "SYMMETRIES",
    "check_recipe",
    "check_spec",
    "json_value",
    "tidy",
]

OUTPUTS = ("classes", "probabilities", "values", "objects")
ACTIVATIONS = (None, "softmax", "sigmoid", "identity")
DTYPES = ("float32", "uint8")
SYMMETRIES = (
    "identity", "rot90", "rot180", "rot270", "hflip", "vflip", "transpose", "antitranspose",
)  # fmt: skip
"""The symmetries of the square, all of which ``tta="d4"`` stands for."""
PRECISIONS = ("float32", "bfloat16", "float16")
AXES = ("nchw", "nhwc")
ACCELERATORS = (None, "cpu", "cuda")

PER_BAND = ("scale", "offset", "mean", "std", "clip_min", "clip_max")
_TEXTS = ("bands", "class_names", "class_colors")
_OTHERS = ("fill", "output", "activation", "threshold", "tile", "tta", "precision", "compile",
           "axes", "accelerator", "trust", "head", "dtype", "confidence")  # fmt: skip
SPEC = (*PER_BAND, *_TEXTS, *_OTHERS)
EMBEDDABLE = tuple(name for name in SPEC if name != "trust")
"""What a file may say of itself: not that it is to be trusted."""


def check_recipe(model: Model) -> None:
    """Refuse a recipe that contradicts itself."""
    _check_choice("output", model.output, OUTPUTS)
    _check_choice("activation", model.activation, ACTIVATIONS)
    _check_choice("precision", model.precision, PRECISIONS)
    _check_choice("compile", model.compile, (True, False))
    _check_choice("axes", model.axes, AXES)
    _check_choice("accelerator", model.accelerator, ACCELERATORS)
    _check_choice("trust", model.trust, (True, False))
    _check_choice("dtype", model.dtype, DTYPES)
    _check_choice("confidence", model.confidence, (True, False))
    _check_head(model.head)
    for name in model.tta:
        _check_choice("tta", name, SYMMETRIES)
    _check_bands(model)
    _check_classes(model)


def check_spec(spec: Mapping[str, Any]) -> None:
    """Refuse names that are no field of a recipe."""
    unknown = sorted(set(spec) - set(SPEC))
    if unknown:
        raise TypeError(f"unknown model option {unknown[0]!r}; known: {', '.join(sorted(SPEC))}")


def tidy(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Spec as the hashable tuples that the frozen dataclass holds."""
    tidy: dict[str, Any] = {}
    for name, value in spec.items():
        if value is None:
            tidy[name] = None
        elif name in PER_BAND:
            tidy[name] = _numbers(name, value)
        elif name == "tta":
            tidy[name] = _symmetries(value)
        elif name == "head":
            tidy[name] = tuple(value) if isinstance(value, list) else value
        elif name in _TEXTS:
            tidy[name] = _texts(name, value)
        elif name == "tile":
            tidy[name] = _tile(value)
        else:
            tidy[name] = value
    return tidy


def _symmetries(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) and value != "d4":
        raise ValueError(
            f"tta must be 'd4' or a list of {', '.join(SYMMETRIES)}, got {value!r}"
            + (f": pass ['identity', {value!r}]" if value in SYMMETRIES else "")
        )
    return SYMMETRIES if value == "d4" else tuple(value)


def _tile(value: Any) -> tuple[int, int]:
    sides = value if isinstance(value, (tuple, list)) else (value, value)
    if len(sides) != 2 or not all(isinstance(n, int) and n > 0 for n in sides):
        raise ValueError(f"tile must be a number of px or (y, x), got {value!r}")
    return sides[0], sides[1]


def _numbers(name: str, value: Any) -> Numbers:
    try:
        numbers = np.asarray(value, float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} {_ONE_OR_EACH}, got {value!r}") from error
    if numbers.ndim > 1:
        raise ValueError(f"{name} {_ONE_OR_EACH}, got an array of shape {numbers.shape}")
    if name in _LIMITS:
        # JSON has no infinity: null is a band without a limit.
        numbers = np.where(np.isnan(numbers), _LIMITS[name], numbers)
    return tuple(numbers.ravel().tolist())


_LIMITS = {"clip_min": -math.inf, "clip_max": math.inf}
_ONE_OR_EACH = "must be a number or one number per band"


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError(f"{name} must be a list, got {value!r}: pass {[value]}")
    return tuple(str(item) for item in value)


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {known}, got {value!r}")


def _check_head(head: Any) -> None:
    names = head if isinstance(head, tuple) else (head,)
    fits = all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in names)
    if head is not None and not (names and fits):
        raise ValueError(f"head must be a name, a number, or a list of them, got {head!r}")


def _check_bands(model: Model) -> None:
    if model.bands is not None:
        doubled = sorted({name for name in model.bands if model.bands.count(name) > 1})
        if doubled:
            raise ValueError(f"bands names {doubled[0]!r} twice: {list(model.bands)}")
    expected = model.n_bands
    counted = {name: getattr(model, name) for name in ("bands", *PER_BAND)}
    for name, values in counted.items():
        if values is not None and len(values) not in (1, expected) and expected is not None:
            raise ValueError(f"{name} has {len(values)} entries for a model of {expected} bands")
    if model.bands and model.in_bands and len(model.bands) != model.in_bands:
        raise ValueError(
            f"the model takes {model.in_bands} bands, bands names {len(model.bands)}: "
            f"{list(model.bands)}"
        )
    for name in PER_BAND:
        values = getattr(model, name) or ()
        if name not in _LIMITS and not all(math.isfinite(value) for value in values):
            raise ValueError(f"{name} must be finite, got {list(values)}")
    if any(value <= 0 for value in model.std or ()):
        raise ValueError(f"std must be positive, got {list(model.std or ())}")
    if any(value == 0 for value in model.scale or ()):
        raise ValueError(f"scale must not be 0, got {list(model.scale or ())}")
    for low, high in _pairs(model.clip_min, model.clip_max):
        if low >= high:
            raise ValueError(f"clip_min must be below clip_max, got {low} and {high}")
    for name in ("fill", "threshold"):
        value = getattr(model, name)
        if value is not None and not (_is_number(value) and math.isfinite(value)):
            raise ValueError(f"{name} must be a finite number, got {value!r}")
    if model.activation and model.threshold is not None and not 0 <= model.threshold <= 1:
        raise ValueError(
            f"threshold after activation={model.activation!r} is a probability, 0 to 1, got "
            f"{model.threshold!r}: drop one of them"
        )


def _pairs(low: Numbers | None, high: Numbers | None) -> Iterator[tuple[float, float]]:
    """Both limits of each band that has two."""
    if low is None or high is None:
        return
    bands = max(len(low), len(high))
    spread = (values * bands if len(values) == 1 else values for values in (low, high))
    yield from zip(*spread, strict=True)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _check_classes(model: Model) -> None:
    names, colors = model.class_names, model.class_colors
    if names is not None and colors is not None and len(names) != len(colors):
        raise ValueError(f"{len(names)} class_names but {len(colors)} class_colors")
    for color in colors or ():
        digits = color.removeprefix("#")
        if len(digits) != 6 or not set(digits.lower()) <= set("0123456789abcdef"):
            raise ValueError(f"class_colors are written '#rrggbb', got {color!r}")


def json_value(value: Any) -> Any:
    """JSON knows no tuples and no infinity."""
    if not isinstance(value, tuple):
        return value
    return [None if isinstance(v, float) and math.isinf(v) else v for v in value]
