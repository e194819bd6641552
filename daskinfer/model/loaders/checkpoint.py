"""Weights apart from their network, and whole networks in a pickle.

Nothing but tensors is unpickled unless the caller trusts the file: a pickle names functions to
call, and loading it calls them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .facts import CODE

if TYPE_CHECKING:
    import torch

__all__ = ["load_weights", "read_pickled_module"]

# Under which training loops keep the state dict beside the optimiser's and the epoch.
NESTED = ("state_dict", "model_state_dict", "model_state", "model", "weights", "net", "module")
# What wrappers put before every name: DataParallel and DDP, Lightning and other loops, compile.
PREFIXES = ("module.", "model.", "net.", "network.", "_orig_mod.")
_LISTED = 5
# What torch refuses in a pickle, by name: a function, a class, an instruction.
_CALLED = re.compile(r"(?:GLOBAL|class|instruction) ([\w.]+)")


def load_weights(module: torch.nn.Module, path: str, trust: bool = False) -> None:
    """Load weights into a module: all of them, and no others.

    Parameters
    ----------
    module : torch.nn.Module
    path : str
        ``.safetensors``, or what ``torch.save`` writes: a state dict, or a checkpoint that holds
        one under one of `NESTED`.  `PREFIXES` that wrappers put before every name are taken off.
    trust : bool, default False
        Run what code a pickle names.

    Raises
    ------
    ValueError
        If the file wants code run, or its names or shapes are not the module's.
    """
    state = _state_dict(_read(path, trust), path)
    state = without_prefixes(state, module.state_dict().keys())
    misfit = f"weights {path!r} do not fit {type(module).__name__}"
    try:
        missing, unexpected = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{misfit}: {error}") from error
    # Counts batches of training; checkpoints of before torch 1.0 lack it.
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    if missing or unexpected:
        raise ValueError(
            f"{misfit}: {_listed('missing', missing)}; {_listed('unexpected', unexpected)}"
        )


def without_prefixes(state: Mapping[str, Any], expected: Any) -> dict[str, Any]:
    """The state dict less what wrappers put before the names, as far as these then fit better.

    >>> without_prefixes({"model._orig_mod.0.bias": 1}, ["0.bias"])
    {'0.bias': 1}
    >>> without_prefixes({"model.bias": 1}, ["model.bias"])
    {'model.bias': 1}
    """
    known = set(expected)
    best = current = dict(state)
    fitting = len(known & current.keys())
    for _ in range(len(PREFIXES)):
        prefix = next((p for p in PREFIXES if _most_have(current, p)), None)
        if prefix is None:
            break
        current = {name.removeprefix(prefix): value for name, value in current.items()}
        if (fits := len(known & current.keys())) > fitting:
            best, fitting = current, fits
    return best


def read_pickled_module(path: str, trust: bool) -> torch.nn.Module:
    """A whole network that ``torch.save(module)`` wrote.

    Raises
    ------
    ValueError
        If it is not trusted, or holds weights without a network.
    """
    import torch

    content = _read(path, trust)
    if isinstance(content, Mapping):
        held = (content[name] for name in NESTED if name in content)
        content = next((value for value in held if isinstance(value, torch.nn.Module)), content)
    if isinstance(content, torch.nn.Module):
        return content
    raise ValueError(
        f"model {path!r} holds weights without the network they belong to: pass "
        f"load_model('package.module:factory', weights={Path(path).name!r}), the factory being a "
        "function without arguments that returns the network"
    )


def _read(path: str, trust: bool) -> Any:
    """Content of a file of weights; of nothing but tensors and plain containers if not trusted."""
    import torch

    if path.endswith(".safetensors"):
        return _read_safetensors(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        # Whatever torch makes of bytes that are no pickle: a KeyError, an IndexError.
        if trust:
            return _read_trusted(path)
        if wants := _CALLED.search(str(error)):
            raise ValueError(
                f"{path!r} is a pickle that wants to run code ({wants[1]}), and {CODE}"
            ) from error
        raise ValueError(
            f"{path!r} cannot be read; it is not what torch.save writes, or it is cut short"
        ) from error


def _read_trusted(path: str) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        # Whatever the code in it raises; its classes may be in a package that is not here.
        raise ValueError(f"{path!r} cannot be read: {type(error).__name__}: {error}") from error


def _read_safetensors(path: str) -> Any:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise ImportError(
            'reading .safetensors needs: pip install "daskinfer[safetensors]"'
        ) from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path!r} cannot be read: {error}") from error


def _state_dict(content: Any, path: str) -> Mapping[str, Any]:
    """The state dict in a checkpoint, however deep loops put it."""
    import torch

    for _ in range(3):
        if isinstance(content, torch.nn.Module):
            return content.state_dict()
        if not isinstance(content, Mapping):
            break
        if content and all(isinstance(value, torch.Tensor) for value in content.values()):
            return content
        inner = [
            name for name in NESTED if isinstance(content.get(name), (Mapping, torch.nn.Module))
        ]
        if not inner:
            break
        content = content[inner[0]]
    if isinstance(content, Mapping):
        # With plain numbers among its tensors, as buffers may be.
        return content
    raise ValueError(f"weights {path!r} hold a {type(content).__name__}, not a state dict")


def _most_have(state: Mapping[str, Any], prefix: str) -> bool:
    """Whether a prefix stands before most names: losses and metrics of a loop lie beside it."""
    return 2 * sum(name.startswith(prefix) for name in state) > len(state)


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {what}" + (f" ({', '.join(names[:_LISTED])}{more})" if names else "")
