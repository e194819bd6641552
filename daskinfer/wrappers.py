"""Networks around networks: test-time augmentation, and inputs of other forms than ours.

Imports torch: imported where a network is built, not where one is described.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = [
    "Augmented",
    "Cast",
    "ChannelsLast",
    "FixedBatch",
    "HeadError",
    "Headed",
    "TimeSteps",
    "not_scores",
    "outputs_text",
]


class Augmented(nn.Module):
    """Mean of a network's scores over symmetries of the square.

    ``mean over g of g^-1(net(g(x)))``: each symmetry is undone on the scores, so that they lie
    where the input does.  Tiles and the padded raster are whole strides on both axes, and a
    symmetry takes their stride lattice to itself: an exact halo stays exact.

    Parameters
    ----------
    network : callable
        ``(n, band, y, x)`` to ``(n, channel, y, x)``.
    names : sequence of str
        Of ``daskinfer.model.spec.SYMMETRIES``.
    """

    def __init__(
        self, network: Callable[[torch.Tensor], torch.Tensor], names: Sequence[str]
    ) -> None:
        super().__init__()
        self.network = network
        self.names = tuple(names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of a batch."""
        total = undo(self.network(apply(x, self.names[0])), self.names[0])
        for name in self.names[1:]:
            total = total + undo(self.network(apply(x, name)), name)
        return total / len(self.names)


class TimeSteps(nn.Module):
    """A network of several dates, as one that takes the bands of all dates on one axis.

    Parameters
    ----------
    network : callable
        ``(n, time, band, y, x)`` to ``(n, channel, y, x)``.
    steps : int
        Dates.
    band_first : bool, default False
        The network takes ``(n, band, time, y, x)``, as 3-D convolutions do.

    Raises
    ------
    ValueError
        If an input cannot be divided into so many dates.

    Examples
    --------
    >>> class Latest(nn.Module):
    ...     def forward(self, x):
    ...         return x[:, -1]
    >>> TimeSteps(Latest(), steps=3)(torch.arange(6.0).reshape(1, 6, 1, 1)).flatten().tolist()
    [4.0, 5.0]
    """

    def __init__(
        self,
        network: Callable[[torch.Tensor], torch.Tensor],
        steps: int,
        *,
        band_first: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.steps = steps
        self.band_first = band_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of a batch ``(n, time * band, y, x)``."""
        if x.shape[1] % self.steps:
            raise ValueError(f"{x.shape[1]} bands cannot be those of {self.steps} dates")
        dated = x.reshape(len(x), self.steps, -1, *x.shape[2:])
        return self.network(dated.transpose(1, 2) if self.band_first else dated)


class FixedBatch(nn.Module):
    """A network that takes one batch size only, as one that takes any.

    Parameters
    ----------
    network : callable
        ``(size, band, y, x)`` to ``(size, channel, y, x)``.
    size : int
        Its batch size.
    """

    def __init__(self, network: Callable[[torch.Tensor], torch.Tensor], size: int) -> None:
        super().__init__()
        self.network = network
        self.size = size

    def forward(self, x: torch.Tensor) -> Any:
        """Scores of a batch: in full batches, the last one filled up with its last tile."""
        missing = -len(x) % self.size
        filled = torch.cat([x, x[-1:].expand(missing, -1, -1, -1)]) if missing else x
        parts = [self.network(part) for part in torch.split(filled, self.size)]
        return _joined(parts, len(x))


def _joined(parts: list[Any], count: int) -> Any:
    """The first `count` results of several batches, for every tensor that the network returns."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts], count) for name in first}
    if isinstance(first, (tuple, list)):
        joined = [_joined([part[i] for part in parts], count) for i in range(len(first))]
        return type(first)(*joined) if _fields(first) else tuple(joined)
    return torch.cat(parts)[:count]


def _fields(found: Any) -> tuple[str, ...]:
    """Names of a named tuple; none of anything else."""
    return tuple(getattr(found, "_fields", ())) if isinstance(found, tuple) else ()


class HeadError(ValueError):
    """A network does not return what is to be taken of it: no other input would help."""


class Headed(nn.Module):
    """A network of several outputs, as one that returns a single tensor.

    Parameters
    ----------
    network : callable
        Returns a dict or a tuple, named or not, of tensors ``(n, channel, y, x)``.
    head : str, int or tuple of them
        Which to take, from the end where negative; the channels of several come one after another.

    Raises
    ------
    HeadError
        When it is called, if there is none of that name or number.
    """

    def __init__(
        self, network: Callable[[torch.Tensor], Any], head: str | int | tuple[str | int, ...]
    ) -> None:
        super().__init__()
        self.network = network
        self.heads = head if isinstance(head, tuple) else (head,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the heads."""
        found = self.network(x)
        picked = [self._pick(found, name) for name in self.heads]
        return picked[0] if len(picked) == 1 else torch.cat(picked, dim=1)

    def _pick(self, found: Any, name: str | int) -> torch.Tensor:
        fields = _fields(found)
        known: Sequence[Any] = ()
        if isinstance(found, Mapping):
            known = list(found)
        elif isinstance(found, (tuple, list)):
            known = [*range(-len(found), len(found)), *fields]
        if name not in known:
            raise HeadError(f"the model has no head {name!r}: it returns {outputs_text(found)}")
        tensor: torch.Tensor = found[fields.index(name) if name in fields else name]
        return tensor


def outputs_text(found: Any) -> str:
    """What a network returned, in words.

    >>> outputs_text({"out": torch.zeros(1, 3, 8, 8), "aux": torch.zeros(1, 3, 8, 8)})
    "dict with 'out', 'aux'"
    """
    if isinstance(found, torch.Tensor):
        return str(tuple(found.shape))
    name = type(found).__name__
    if isinstance(found, Mapping) or _fields(found):
        names = list(found) if isinstance(found, Mapping) else _fields(found)
        return f"{name} with {', '.join(map(repr, names))}"
    if isinstance(found, (tuple, list)):
        return f"{name} with {', '.join(str(i) for i in range(len(found)))}"
    return name


def _has_boxes(one: Any) -> bool:
    return isinstance(one, Mapping) and "boxes" in one


def not_scores(found: Any) -> str:
    """What to say of a network that did not return one tensor ``(n, channel, y, x)``."""
    if isinstance(found, (list, tuple)) and any(_has_boxes(one) for one in found):
        return "the model finds objects: pass it to detect()"
    text = f"the model must return one tensor (n, channel, y, x), got {outputs_text(found)}"
    if isinstance(found, (Mapping, tuple, list)) and len(found):
        name = next(iter(found)) if isinstance(found, Mapping) else (*_fields(found), 0)[0]
        text += f": say which to take, as head={name!r}"
    return text


class Cast(nn.Module):
    """A network that takes another floating dtype, as one that takes float32.

    Parameters
    ----------
    network : callable
        ``(n, band, y, x)`` to ``(n, channel, y, x)``.
    dtype : str
        Of its input.
    """

    def __init__(self, network: Callable[[torch.Tensor], torch.Tensor], dtype: str) -> None:
        super().__init__()
        self.network = network
        self.dtype: torch.dtype = getattr(torch, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of a batch, in the network's own dtype."""
        return self.network(x.to(self.dtype))


class ChannelsLast(nn.Module):
    """A network of ``(n, y, x, band)`` to ``(n, y, x, channel)``, as one of ``(n, band, y, x)``.

    Parameters
    ----------
    network : callable
    """

    def __init__(self, network: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of a batch."""
        return self.network(x.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)


def apply(x: torch.Tensor, name: str) -> torch.Tensor:
    """Apply a symmetry: a flip along x, where it has one, then quarter turns."""
    turns, flip = _parts(name)
    return torch.rot90(x.flip(-1) if flip else x, turns, (-2, -1))


def undo(x: torch.Tensor, name: str) -> torch.Tensor:
    """Undo a symmetry."""
    turns, flip = _parts(name)
    turned = torch.rot90(x, -turns, (-2, -1))
    return turned.flip(-1) if flip else turned


def _parts(name: str) -> tuple[int, bool]:
    return {
        "identity": (0, False),
        "rot90": (1, False),
        "rot180": (2, False),
        "rot270": (3, False),
        "hflip": (0, True),
        "transpose": (1, True),
        "vflip": (2, True),
        "antitranspose": (3, True),
    }[name]
