"""Models as files that say all of themselves: exported programs, and their MLM items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..receptive.measured import field_of
from .loaders import exported
from .mlm.write import item_of

if TYPE_CHECKING:
    from .recipe import Model

__all__ = ["mlm_item", "save_model"]


def save_model(model: Model, path: Path, bands: int | None = None) -> None:
    """Export a model; see `Model.save`."""
    import torch

    if path.suffix.lower() != ".pt2":
        raise ValueError(f"path {str(path)!r}: exported programs are named .pt2")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"folder {str(path.absolute().parent)!r} does not exist")
    if model.kind in ("onnx", "aoti"):
        raise ValueError(f"model {model.name} is {model.kind}: torch cannot export it")
    # What wraps the network is in the recipe, and would be put around it once more.
    network = model.patch(tta=(), axes="nchw", head=None).network("cpu")
    if isinstance(network, torch.jit.ScriptModule):
        raise ValueError(f"model {model.name} is TorchScript: torch cannot export it")
    known = _bands(model, bands)
    field = field_of(model, known)
    tile = model.tile or field.size
    if model.axes == "nhwc":
        raise ValueError("a network of (n, y, x, band) is not exported: wrap it in torch")
    try:
        exported.save(network, path, known, field.stride, tile, model.recipe())  # type: ignore[arg-type]
    except Exception as error:
        # The exporter raises errors of many kinds for networks it cannot trace.
        raise ValueError(f"model {model.name} cannot be exported: {error}") from error


def mlm_item(model: Model, path: Path | None, bands: int | None = None) -> dict[str, Any]:
    """The MLM item of a model; see `Model.to_mlm`."""
    if model.kind == "module" or (model.kind == "factory" and model.weights is None):
        raise ValueError(
            f"model {model.name} is no file that an item could name: model.save('net.pt2') first"
        )
    if model.output == "objects":
        raise ValueError("an item says what raster a model makes: one of objects makes none")
    known = _bands(model, bands)
    folder = None if path is None else path.parent
    item = item_of(model, model.recipe(), known, field_of(model, known), folder)
    if path is not None:
        path.write_text(json.dumps(item, indent=1) + "\n")
    return item


def _bands(model: Model, bands: int | None) -> int:
    known = bands or model.n_bands or model.likely_bands
    if known is None:
        raise ValueError("how many bands the model takes is not known: pass bands=")
    return known
