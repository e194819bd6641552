"""What was measured of networks in this process, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .field import ReceptiveField
from .probe import measure_field

if TYPE_CHECKING:
    from ..model import Model

__all__ = ["field_of", "is_remembered", "remembered"]

T = TypeVar("T")

# By content, so that they hold no module alive and serve a model whose class names were changed.
_measured: dict[tuple[Any, ...], Any] = {}


def field_of(model: Model, bands: int) -> ReceptiveField:
    """The receptive field of a model that takes so many bands."""

    def measure() -> ReceptiveField:
        # A file may name its only size; it would have to be found by trying.
        return measure_field(model.network("cpu"), bands, size=model.tile)

    return remembered("field", model, bands, measure)


def remembered(what: str, model: Model, bands: int, measure: Callable[[], T]) -> T:
    """The result of a measurement: an earlier one of the same network, or a new one."""
    key = _key(what, model, bands)
    if key not in _measured:
        _measured[key] = measure()
    result: T = _measured[key]
    return result


def is_remembered(what: str, model: Model, bands: int) -> bool:
    """Whether a network was measured in this process."""
    return _key(what, model, bands) in _measured


def _key(what: str, model: Model, bands: int) -> tuple[Any, ...]:
    return what, model.digest, model.tta, model.axes, model.head, model.tile, bands
