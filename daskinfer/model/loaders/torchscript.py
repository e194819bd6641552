"""TorchScript files."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..digest import file_digest
from .facts import Facts, Network

if TYPE_CHECKING:
    import torch

__all__ = ["build", "convolved_bands", "load_script", "read"]


def read(path: Path) -> Facts:
    """What a TorchScript file tells."""
    try:
        module = load_script(str(path))
    except RuntimeError as error:
        raise ValueError(f"model {str(path)!r} is not TorchScript: {error}") from error
    return Facts(file_digest(path), likely_bands=convolved_bands(module))


def build(path: str, device: str) -> Network:
    """The network on a device, as eval as it can be: what was traced in train mode stays so."""
    return load_script(path, device).float().eval()


def load_script(file: str | io.BytesIO, device: str = "cpu") -> torch.nn.Module:
    """``torch.jit.load``, which warns of its own end from torch 2.9 on."""
    import torch

    load: Any = torch.jit.load
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module: torch.nn.Module = load(file, map_location=device)
    return module


def convolved_bands(module: torch.nn.Module) -> int | None:
    """Second size of the first 4-D weights: the bands of an ungrouped convolution."""
    for parameter in module.parameters():
        if parameter.ndim == 4:
            return int(parameter.shape[1])
    return None
