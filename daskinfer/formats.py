"""Formats in which a network is saved: read them, build them, tell two of them apart."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "Network",
    "call_factory",
    "exported_network",
    "first_in_channels",
    "read_pt2",
    "resolve",
    "signature",
]

METADATA_FILE = "daskinfer.json"
"""Extra file of a ``.pt2`` that holds the fields of a `daskinfer.Model` as JSON."""

Network = Callable[["torch.Tensor"], "torch.Tensor"]


def read_pt2(path: str | Path) -> tuple[torch.export.ExportedProgram, str]:
    """Read an exported program and its embedded metadata ('' where it has none)."""
    import torch

    extra = {METADATA_FILE: ""}
    try:
        program = torch.export.load(path, extra_files=extra)
    except Exception as error:
        raise ValueError(
            f"model {str(path)!r} is not a torch.export archive ({type(error).__name__}: {error}): "
            "write it with torch.export.save(torch.export.export(model.eval(), ...), path)"
        ) from error
    return program, extra[METADATA_FILE]


def exported_network(path: str, device: str) -> Network:
    """Build the network of a ``.pt2`` on a device."""
    from torch.export.passes import move_to_device_pass

    program, _ = read_pt2(path)
    if device != "cpu":
        program = move_to_device_pass(program, device)
    network: Network = program.module()
    batch = _input_shape(program, path)[0]
    if batch is None:
        return network
    from .wrappers import FixedBatch

    fixed: Network = FixedBatch(network, batch)
    return fixed


def signature(
    program: torch.export.ExportedProgram, path: str | Path
) -> tuple[int | None, tuple[int, int] | None]:
    """Input bands, and the tile where height and width are fixed, from the exported graph."""
    _, bands, height, width = _input_shape(program, path)
    return bands, None if height is None or width is None else (height, width)


def _input_shape(
    program: torch.export.ExportedProgram, path: str | Path
) -> tuple[int | None, int | None, int | None, int | None]:
    """Shape of the only input, None for sizes that are free."""
    names = program.graph_signature.user_inputs
    shapes = [
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names
    ]
    if len(shapes) != 1 or len(shapes[0]) != 4:
        found = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(
            f"model {str(path)!r} takes {found or 'no tensor'}; daskinfer runs models of one input "
            "(n, band, y, x)"
        )
    n, bands, height, width = (size if isinstance(size, int) else None for size in shapes[0])
    return n, bands, height, width


def resolve(name: str) -> Callable[[], Any]:
    """Find the factory that ``package.module:factory`` names."""
    module, _, factory = name.partition(":")
    try:
        return getattr(importlib.import_module(module), factory)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        raise ValueError(f"model {name!r}: no module named {error.name!r}") from error
    except AttributeError as error:
        raise ValueError(f"model {name!r}: {module} has no {factory!r}") from error


def call_factory(name: str, weights: str | None = None) -> torch.nn.Module:
    """Call ``package.module:factory`` and load weights into the module that it returns."""
    import torch

    module = resolve(name)()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"model {name!r}: the factory returned {type(module).__name__}, not a torch.nn.Module"
        )
    if weights is not None:
        load_weights(module, weights)
    return module


def load_weights(module: torch.nn.Module, path: str) -> None:
    import torch

    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            state: Mapping[str, Any] = load_file(path)
        else:
            # weights_only: a pickle that names anything but tensors is refused, not run.
            state = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict(state)
    except ModuleNotFoundError as error:
        raise ImportError(
            "reading .safetensors needs: pip install 'daskinfer[safetensors]'"
        ) from error
    except Exception as error:
        raise ValueError(f"weights {path!r} do not fit {type(module).__name__}: {error}") from error


def first_in_channels(module: torch.nn.Module) -> int | None:
    """Input channels of the first convolution: None unless it is surely the first layer."""
    for child in module.modules():
        channels = getattr(child, "in_channels", None)
        if isinstance(channels, int) and hasattr(child, "kernel_size"):
            return channels
    return None
