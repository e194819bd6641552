"""The numbers that networks are measured on: noise, or what those take that noise does not suit.

A logarithm of noise is NaN in every other pixel, and after a convolution everywhere: a network that
begins with one shows nothing.  A table of classes has no row for a number below zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["CLASSES", "NOISE", "REAL", "drawn"]

NOISE = "noise"
REAL = (NOISE, "fractions", "large numbers")
"""Normal, between 0 and 1, from 1000 up."""
CLASSES = ("256 classes", "100 classes", "10 classes", "2 classes")
"""Whole numbers from 0: of more classes first, as a network may divide them into few."""


def drawn(
    domain: str, shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Random numbers of a domain; the caller's random state is left alone.

    >>> drawn("2 classes", (1, 1, 2, 3)).unique().tolist()
    [0.0, 1.0]
    """
    import torch

    # float64 for every dtype, so that all see the same numbers.
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if domain == "fractions":
        x = x.sigmoid()
    elif domain == "large numbers":
        x = 1000 * (1 + x.abs())
    elif domain in CLASSES:
        count = int(domain.split()[0])
        uniform = (1 + torch.erf(x / math.sqrt(2))) / 2
        x = (count * uniform).floor().clamp(max=count - 1)
    return x.to(dtype or torch.float32)
