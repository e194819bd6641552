"""Choose how much context a tile is read with.

A tile's output is exact where every output pixel lies at least the receptive-field radius away
from each cut of the input. So the halo is the radius, rounded up to the total stride: tile
origins and sizes then stay on the stride lattice, where pooling windows and strided convolutions
fall on the same pixels as in the whole image. How radius and stride are measured, and where the
rules come from, is told in `daskinfer.receptive.probe`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from .errors import warn_user
from .model import Model, load_model
from .receptive.domain import CLASSES, drawn
from .receptive.field import ReceptiveField
from .receptive.measured import field_of, remembered
from .receptive.netrun import SIZES
from .receptive.probe import measure_field
from .tiling import round_up

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEFAULT_OVERLAP",
    "accepts_bands",
    "check_averaged",
    "check_steady",
    "choose_halo",
    "receptive_field",
    "smallest_input",
]

# By which probabilities may leave 0 to 1.
_ROUNDING = 1e-3

DEFAULT_OVERLAP = 128
"""Context in px per side for nets without an exact halo: tiles are blended over it instead."""


def receptive_field(model: Any, *, bands: int | None = None) -> ReceptiveField:
    """Measure how far a model looks, on which lattice, and whether any halo is exact for it.

    Parameters
    ----------
    model : Model, torch.nn.Module, path, "package.module:factory" or callable
        What `load_model` takes, or any callable from a float32 tensor ``(n, band, y, x)`` to scores
        ``(n, channel, y, x)``.
    bands : int, optional
        Bands of its input; needed only where the model does not tell.

    Returns
    -------
    ReceptiveField

    Raises
    ------
    ValueError
        If the number of bands is not known, or the model cannot be run on such input.

    See Also
    --------
    daskinfer.receptive.probe.measure_field : The method.

    Examples
    --------
    >>> import torch
    >>> convs = [torch.nn.Conv2d(1, 1, 3, padding=1) for _ in range(5)]
    >>> field = receptive_field(torch.nn.Sequential(*convs))
    >>> field.radius, field.stride, field.exact
    ((5, 5), (1, 1), True)
    """
    import torch

    if callable(model) and not isinstance(model, torch.nn.Module):
        return measure_field(model, _known(bands))
    recipe = load_model(model)
    known = _known(bands or recipe.n_bands or recipe.likely_bands)
    return field_of(recipe, known)


def smallest_input(model: Model, field: ReceptiveField, bands: int) -> tuple[int, int]:
    """The smallest ``(y, x)`` input that a model accepts, each axis with the other one large.

    Exported programs refuse sizes that their tracing did not cover, reflection padding needs more
    pixels than it pads: rasters smaller than that have to be padded up to it.

    Raises
    ------
    ValueError
        If it accepts none of the sizes tried, up to 64 strides.
    """
    fixed = model.tile or field.size
    if fixed is not None:
        return fixed
    return remembered("smallest", model, bands, lambda: _smallest(model, field.stride, bands))


def check_steady(model: Model, field: ReceptiveField, bands: int, size: tuple[int, int]) -> None:
    """Refuse a model whose result is a matter of chance, or of what else is in its batch.

    Raises
    ------
    ValueError
        If one input gives two results, or one result alone and another beside other tiles, if no
        number that it gives is finite, if they are more than its input has room for, or if they
        should be probabilities and are not.
    """
    remembered("steady", model, bands, lambda: _refuse_unsteady(model, field, bands, size))
    if model.output == "probabilities" and model.activation is None:
        _check_probabilities(
            *remembered("range", model, bands, lambda: _range(model, field, bands, size))
        )


def _range(
    model: Model, field: ReceptiveField, bands: int, size: tuple[int, int]
) -> tuple[float, float]:
    """Lowest and highest score of a random tile; 0 and 1 where there is none."""
    scores = _scores(model.network("cpu"), _tiles(model, field, bands, size)[1:])
    finite = None if scores is None else scores[scores.isfinite()].float()
    if finite is None or not finite.numel():
        return 0.0, 1.0
    return finite.min().item(), finite.max().item()


def _check_probabilities(low: float, high: float) -> None:
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        raise ValueError(
            f"output='probabilities' of a model whose scores reach from {low:.3g} to {high:.3g}: "
            "pass activation='softmax', or 'sigmoid' where classes do not exclude each other; or "
            "'identity', if they are what you want"
        )


def _refuse_unsteady(
    model: Model, field: ReceptiveField, bands: int, size: tuple[int, int]
) -> None:
    import torch

    network = model.network("cpu")
    x = _tiles(model, field, bands, size)
    alone, again, both = (_scores(network, part) for part in (x[1:], x[1:], x))
    if alone is None or again is None:
        return
    _check_room(field, x.shape[2:], alone.shape[2:])
    if not alone.isfinite().any():
        raise ValueError(
            f"the model gives no finite number for a tile of {field.domain}: are its weights NaN, "
            "from a training that diverged?"
        )
    if not torch.allclose(alone.float(), again.float(), rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ValueError(
            "the model gives two results for one input (dropout that is always on, or exported in "
            "train mode?): export it after model.eval()"
        )
    if both is None:
        return
    beside = both[1:]
    if beside.shape != alone.shape or not torch.allclose(
        beside.float(), alone.float(), rtol=1e-3, atol=1e-5, equal_nan=True
    ):
        raise ValueError(
            "the model's result for a tile depends on the tiles beside it in the batch (BatchNorm "
            "without running statistics, or exported in train mode?): it would change with "
            "batch_size"
        )


def _tiles(model: Model, field: ReceptiveField, bands: int, size: tuple[int, int]) -> torch.Tensor:
    """Two tiles of random numbers."""
    # A few tiles' worth of pixels, so that dropout cannot miss them all.
    height, width = (side * -(-32 // side) if model.tile is None else side for side in size)
    return drawn(field.domain, (2, bands, height, width))


def _check_room(field: ReceptiveField, size: tuple[int, ...], got: tuple[int, ...]) -> None:
    """Refuse an output that is larger than the input, in output pixels."""
    scale = Fraction(field.scale).limit_denominator(64)
    room = tuple(int(side * scale) for side in size)
    if any(more > side for more, side in zip(got, room, strict=True)):
        raise ValueError(
            f"the model returns {_px(got)} for an input of {_px(size)}, where {_px(room)} have "
            "room: crop its output to that inside the network, or lessen its padding"
        )


def check_averaged(model: Model, bands: int, cure: str) -> None:
    """Refuse to average what a model gives where that is ids of classes.

    Parameters
    ----------
    model : Model
        Without test-time augmentation, which gives averages already.
    bands : int
        Of its input.
    cure : str
        What to leave out so that nothing is averaged.

    Raises
    ------
    ValueError
        If its numbers are whole, and more than a mask of 0 and 1 that becomes classes.
    """
    field = receptive_field(model, bands=bands)
    whole = remembered("whole", model, bands, lambda: _whole_numbers(model, field, bands))
    if whole is None:
        return
    if model.output != "values":
        # Averages of a mask of 0 and 1, and of one-hot classes, are votes.
        voted = field.bands > 1 or model.activation in ("softmax", "sigmoid")
        if voted or whole <= 1:
            return
    raise ValueError(
        "the model gives whole numbers, as ids of classes, and their averages would be other "
        f"classes: {cure}, or leave the argmax out of the network, so that it gives scores, and "
        "pass output='classes'"
    )


def _whole_numbers(model: Model, field: ReceptiveField, bands: int) -> float | None:
    """The largest number that a network gives where all are whole; else None."""
    size = smallest_input(model, field, bands)
    scores = _scores(model.network("cpu"), _tiles(model, field, bands, size))
    if scores is None:
        return None
    if scores.is_floating_point():
        # Some networks cast their ids.  Of whole numbers others give whole numbers too.
        varied = bool((scores != scores.flatten()[0]).any())
        if field.domain in CLASSES or not varied or not scores.equal(scores.round()):
            return None
    return scores.max().item()


def _scores(network: Callable[[Any], Any], x: torch.Tensor) -> torch.Tensor | None:
    """What a network makes of an input; None where it refuses the size, which is told elsewhere."""
    import torch

    with torch.inference_mode():
        try:
            # Networks that work in place get a copy.
            scores = network(x.clone())
        except Exception:
            # Such sizes are refused for a reason of their own, which is told where they matter.
            return None
    return scores if isinstance(scores, torch.Tensor) else None


_STRIDES_TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def _smallest(model: Model, stride: tuple[int, int], bands: int) -> tuple[int, int]:
    network = model.network("cpu")
    large = tuple(_STRIDES_TRIED[-1] * side for side in stride)
    y = _first_accepted(network, bands, [(n * stride[0], large[1]) for n in _STRIDES_TRIED])
    x = _first_accepted(network, bands, [(large[0], n * stride[1]) for n in _STRIDES_TRIED])
    return y[0], x[1]


def accepts_bands(model: Model, bands: int) -> bool:
    """Whether a network runs on so many bands, on one of the sizes that it is measured on."""
    shapes = [model.tile] if model.tile else [(side, side) for side in SIZES]
    try:
        _first_accepted(model.network("cpu"), bands, shapes)
    except ValueError:
        return False
    return True


def _first_accepted(
    network: Callable[[Any], Any], bands: int, shapes: list[tuple[int, int]]
) -> tuple[int, int]:
    import torch

    refusal: Exception | None = None
    for shape in shapes:
        try:
            with torch.inference_mode():
                network(torch.zeros((1, bands, *shape)))
        except Exception as error:
            # Whatever it raises, it does not take this size; the last one is told if none fits.
            refusal = error
        else:
            return shape
    raise ValueError(
        f"the model accepts no input of {bands} bands up to {shapes[-1]} px: {refusal}"
    ) from refusal


def _known(bands: int | None) -> int:
    if bands is None:
        raise ValueError("how many bands the model takes is not known: pass bands=")
    return bands


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
        warn_user(
            f"halo {_px(halo)} is below the receptive-field radius {_px(field.radius)}: seams will "
            f'show; pass halo="auto" or halo={field.halo} for an exact result'
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


def _px(pair: tuple[int, ...]) -> str:
    return f"{pair[0]} px" if pair[0] == pair[1] else f"{pair[0]} x {pair[1]} px (y, x)"
