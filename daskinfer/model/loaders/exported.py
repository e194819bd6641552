"""Programs of ``torch.export``: ``.pt2`` files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..digest import file_digest
from .facts import Facts, Network
from .safety import refuse_code

if TYPE_CHECKING:
    import torch

__all__ = [
    "METADATA_FILE",
    "any_batch",
    "build",
    "embedded",
    "read",
    "read_program",
    "save",
    "shape_of",
]

METADATA_FILE = "daskinfer.json"
"""Extra file of a ``.pt2`` that holds the fields of a `daskinfer.Model` as JSON."""
MLM_FILE = "mlm-metadata"
"""Extra file in which ``stac_model.torch.save`` puts the properties of an MLM item, as YAML."""


def read(path: Path, trust: bool) -> Facts:
    """What an exported program tells: its input, and metadata embedded in it."""
    program, extra = read_program(path, trust)
    shape, _ = _input(program, path)
    return Facts(file_digest(path), shape=shape, metadata=embedded(extra, path))


def read_program(
    path: str | Path, trust: bool = False
) -> tuple[torch.export.ExportedProgram, dict[str, str]]:
    """Read an exported program and its extra files.

    Raises
    ------
    ValueError
        If it is none, or holds pickles of more than tensors and is not trusted.
    """
    import torch

    if not trust:
        refuse_code(path)
    extra = {METADATA_FILE: "", MLM_FILE: ""}
    try:
        program = torch.export.load(path, extra_files=extra)
    except Exception as error:
        raise ValueError(
            f"model {str(path)!r} is not a torch.export archive ({type(error).__name__}: {error}): "
            "write it with torch.export.save(torch.export.export(model.eval(), ...), path)"
        ) from error
    return program, {name: str(text) for name, text in extra.items() if text}


def embedded(extra: dict[str, str], path: str | Path) -> dict[str, Any]:
    """Fields of a recipe from the extra files of an archive."""
    if METADATA_FILE in extra:
        try:
            metadata = json.loads(extra[METADATA_FILE])
        except ValueError as error:
            raise ValueError(f"model {str(path)!r}: {METADATA_FILE} in it: {error}") from error
        if not isinstance(metadata, dict):
            raise ValueError(f"model {str(path)!r}: {METADATA_FILE} in it is not a JSON object")
        return metadata
    if MLM_FILE in extra:
        import yaml

        return {"mlm": yaml.safe_load(extra[MLM_FILE])["properties"]}
    return {}


def build(path: str, device: str, trust: bool = False) -> Network:
    """The network on a device, for batches of any size and float32 input."""
    from torch.export.passes import move_to_device_pass

    from ...wrappers import Cast, FixedBatch

    program, _ = read_program(path, trust)
    shape, dtype = _input(program, path)
    if device != "cpu":
        program = move_to_device_pass(program, device)
    network: Network = program.module()
    if dtype != "float32":
        network = Cast(network, dtype)
    return network if shape[0] is None else FixedBatch(network, shape[0])


def shape_of(
    module: torch.nn.Module,
) -> tuple[int | None, int | None, int | None, int | None] | None:
    """Sizes of the input of an exported module, None for free ones; None for other modules."""
    from torch import fx

    if not isinstance(module, fx.GraphModule):
        return None
    shapes = [
        node.meta["val"].shape
        for node in module.graph.nodes
        if node.op == "placeholder" and hasattr(node.meta.get("val"), "shape")
    ]
    if len(shapes) != 1 or len(shapes[0]) != 4:
        return None
    n, *sizes = (size if isinstance(size, int) else None for size in shapes[0])
    return (n, *sizes)  # type: ignore[return-value]


def any_batch(module: torch.nn.Module) -> torch.nn.Module:
    """The module, for batches of any size, also where it was exported for one."""
    shape = shape_of(module)
    if shape is None or shape[0] is None:
        return module
    from ...wrappers import FixedBatch

    return FixedBatch(module, shape[0])


def save(
    network: torch.nn.Module,
    path: Path,
    bands: int,
    stride: tuple[int, int],
    tile: tuple[int, int] | None,
    metadata: dict[str, Any],
) -> None:
    """Export a network and write it with metadata.

    Batch size and, where `tile` is None, the numbers of strides in height and width are free.
    """
    import torch
    import torch.fx.experimental._config as symbolic

    dim = torch.export.Dim
    shapes: dict[int, Any] = {0: dim("batch", min=1)}
    sides = tile or (8 * stride[0], 8 * stride[1])
    if tile is None:
        shapes |= {2: stride[0] * dim("rows", min=1), 3: stride[1] * dim("columns", min=1)}
    example = torch.zeros(2, bands, *sides)
    with warnings.catch_warnings():
        # torch warns of its own exporter.
        warnings.simplefilter("ignore")
        # Or the exporter takes it that no size is 1, and a raster one stride high is refused.
        known = hasattr(symbolic, "backed_size_oblivious")  # from torch 2.7 on
        with symbolic.patch({"backed_size_oblivious": True} if known else {}):  # type: ignore[attr-defined]
            program = torch.export.export(network, (example,), dynamic_shapes=(shapes,))
        for node in program.graph.nodes:
            # Names folders of the machine that exports.
            node.meta.pop("stack_trace", None)
        torch.export.save(
            program, path, extra_files={METADATA_FILE: json.dumps(metadata, indent=1)}
        )


def _input(
    program: torch.export.ExportedProgram, path: str | Path
) -> tuple[tuple[int | None, int | None, int | None, int | None], str]:
    """Shape of the only input, None for sizes that are free, and its dtype."""
    names = program.graph_signature.user_inputs
    found = [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names
    ]
    tensors = [value for value in found if hasattr(value, "shape")]
    if len(found) != 1 or len(tensors) != 1 or tensors[0].ndim != 4:
        shapes = ", ".join(str(tuple(getattr(value, "shape", ()))) for value in found)
        raise ValueError(
            f"model {str(path)!r} takes {shapes or 'no tensor'}; daskinfer runs models of one "
            "input (n, band, y, x)"
        )
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if not tensors[0].is_floating_point():
        raise ValueError(
            f"model {str(path)!r} takes {dtype}; daskinfer gives it normalised float32: export it "
            "with a first layer that takes that"
        )
    n, *sizes = (size if isinstance(size, int) else None for size in tensors[0].shape)
    return (n, *sizes), dtype  # type: ignore[return-value]
