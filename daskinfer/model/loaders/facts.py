"""What a loader tells of a file without a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["CODE", "Facts", "Network"]

Network = Callable[["torch.Tensor"], "torch.Tensor"]

CODE = (
    "a file that runs code can do whatever you can. If you trust where it comes from, pass "
    "trust=True; better, save the network with torch.export.save, or its state_dict()"
)
"""Why what wants to run code is refused, and what to do."""


@dataclass(frozen=True)
class Facts:
    """What a file tells of the network in it.

    Attributes
    ----------
    digest : str
        Hash of its content.
    shape : tuple of (int or None), optional
        Of the only input, four sizes, None for one that is free; None where the file does not say.
    likely_bands : int or None
        Bands of the first weights that look like a convolution's.
    metadata : dict
        Fields of a recipe that are embedded in the file.
    accelerator : {None, "cpu", "cuda"}
        The only kind of device that it runs on.
    """

    digest: str
    shape: tuple[int | None, int | None, int | None, int | None] | None = None
    likely_bands: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    accelerator: str | None = None
