"""The network of the benchmarks: a plain U-Net with additive skips, of any width."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["UNet"]


class UNet(nn.Module):
    """``(n, band, y, x)`` to scores ``(n, class, y, x)``; sides are multiples of ``2 ** levels-1``.

    Parameters
    ----------
    bands, classes : int
    widths : tuple of int
        Channels of each level, from full resolution down.
    convs : tuple of int
        3x3 convolutions of each level on the way down; one on the way up.
    """

    def __init__(
        self, bands: int, classes: int, widths: tuple[int, ...], convs: tuple[int, ...]
    ) -> None:
        super().__init__()
        inputs = (bands, *widths[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(*_convolutions(i, o, n))
            for i, o, n in zip(inputs, widths, convs, strict=True)
        )
        # Narrowed before they are enlarged: a quarter of the arithmetic.
        self.narrow = nn.ModuleList(nn.Conv2d(deep, wide, 1) for wide, deep in pairwise(widths))
        self.up = nn.ModuleList(nn.Sequential(*_convolutions(w, w, 1)) for w in widths[:-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores per class."""
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for level in reversed(range(len(self.up))):
            finer = F.interpolate(self.narrow[level](x), scale_factor=2.0, mode="nearest")
            x = self.up[level](skips[level] + finer)
        scores: torch.Tensor = self.head(x)
        return scores


def _convolutions(inputs: int, outputs: int, count: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for number in range(count):
        layers.append(nn.Conv2d(outputs if number else inputs, outputs, 3, padding=1))
        layers.append(nn.ReLU(inplace=True))
    return layers
