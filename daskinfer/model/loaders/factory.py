"""Networks that a function of the user's makes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .checkpoint import load_weights

if TYPE_CHECKING:
    import torch

__all__ = ["call_factory", "first_in_channels", "is_factory", "resolve"]


def is_factory(name: str) -> bool:
    """Whether a text looks like ``package.module:factory``.

    >>> is_factory("nets.unet:make"), is_factory("C:unet.pt2"), is_factory("unet.pt2")
    (True, False, False)
    """
    module, colon, factory = name.partition(":")
    return bool(colon) and module.replace(".", "").isidentifier() and factory.isidentifier()


def resolve(name: str) -> Callable[[], Any]:
    """Find the factory that ``package.module:factory`` names."""
    module, _, factory = name.partition(":")
    try:
        return getattr(importlib.import_module(module), factory)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        raise ValueError(
            f"model {name!r}: no module named {error.name!r}: install it, or add its folder to "
            "PYTHONPATH, on the workers too"
        ) from error
    except AttributeError as error:
        raise ValueError(f"model {name!r}: {module} has no {factory!r}") from error


def call_factory(name: str, weights: str | None = None, trust: bool = False) -> torch.nn.Module:
    """Call ``package.module:factory`` and load weights into the module that it returns."""
    import torch

    module = resolve(name)()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"model {name!r}: the factory returned {type(module).__name__}, not a torch.nn.Module"
        )
    if weights is not None:
        load_weights(module, weights, trust)
    return module


def first_in_channels(module: torch.nn.Module) -> int | None:
    """Input channels of the first convolution that a module holds, which need not be its first."""
    for child in module.modules():
        channels = getattr(child, "in_channels", None)
        if isinstance(channels, int) and hasattr(child, "kernel_size"):
            return channels
    return None
