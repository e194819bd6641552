"""Write an MLM item that says all of a recipe, and what was measured of its network."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._version import __version__
from ..digest import file_digest
from .read import PREFIX
from .scaling import scaled

if TYPE_CHECKING:
    from ...receptive.field import ReceptiveField
    from ..recipe import Model

__all__ = ["item_of"]

MLM = "https://stac-extensions.github.io/mlm/v1.5.0/schema.json"
FILE = "https://stac-extensions.github.io/file/v2.1.0/schema.json"
CLASSIFICATION = "https://stac-extensions.github.io/classification/v2.0.0/schema.json"
_ARTIFACTS = {
    "pt2": ("torch.export.save", "pytorch"),
    "aoti": ("torch._inductor.aoti_compile_and_package", "pytorch"),
    "torchscript": ("torch.jit.save", "pytorch"),
    "pickle": ("torch.save", "pytorch"),
    "factory": ("torch.save", "pytorch"),
    "onnx": ("onnx", "onnx"),
}
_TASKS = {
    "classes": "semantic-segmentation",
    "probabilities": "semantic-segmentation",
    "values": "regression",
}


def item_of(
    model: Model, recipe: Mapping[str, Any], bands: int, field: ReceptiveField, folder: Path | None
) -> dict[str, Any]:
    """A STAC item with the MLM extension.

    Parameters
    ----------
    model : Model
        A file, or a factory with weights.
    recipe : dict
        Its fields that differ from the defaults, as JSON values.
    bands : int
        Of its input.
    field : ReceptiveField
        Measured of it.
    folder : Path or None
        Where the item will lie; the network's address is relative to it.

    Returns
    -------
    dict
        JSON values.
    """
    network = Path(model.source if model.kind != "factory" else str(model.weights)).absolute()
    name = re.sub(r"[^\w.\-]+", "-", network.stem).strip("-_.") or "model"
    names = list(model.bands or ())
    artifact, framework = _ARTIFACTS[model.kind]
    properties = {
        "datetime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "description": f"Model {model.name}, described by daskinfer {__version__}",
        "bands": [{"name": band} for band in names] or None,
        "mlm:name": name if len(name) > 2 and name[0].isalpha() else f"model-{name}",
        "mlm:architecture": model.source if model.kind == "factory" else "unnamed",
        "mlm:framework": "ONNX" if framework == "onnx" else "PyTorch",
        "mlm:tasks": [_TASKS[model.output]],
        "mlm:accelerator": {"cpu": "amd64", "cuda": "cuda"}.get(str(model.accelerator)),
        "mlm:accelerator_constrained": model.accelerator is not None,
        "mlm:input": [_input(model, names, bands)],
        "mlm:output": [_output(model, field.bands)],
        f"{PREFIX}recipe": dict(recipe),
        f"{PREFIX}radius": list(field.radius),
        f"{PREFIX}stride": list(field.stride),
        f"{PREFIX}halo": list(field.halo),
        f"{PREFIX}scale": field.scale,
        f"{PREFIX}exact": field.exact,
        f"{PREFIX}reason": field.reason or None,
    }
    asset = {
        "href": str(network) if folder is None else os.path.relpath(network, folder.absolute()),
        "type": f"application/octet-stream; framework={framework}",
        "roles": ["mlm:model", "mlm:weights"] if model.kind == "factory" else ["mlm:model"],
        "mlm:artifact_type": artifact,
        "file:size": network.stat().st_size,
        # A multihash: 0x12 is SHA-256, 0x20 its length.
        "file:checksum": f"1220{file_digest(network)}",
    }
    assets = {"model": asset}
    if model.kind == "factory":
        assets["source_code"] = {
            "href": model.source,
            "type": "text/x-python",
            "roles": ["code", "mlm:source_code"],
            "mlm:entrypoint": model.source,
        }
    extensions = [MLM, FILE, *([CLASSIFICATION] if model.class_names else [])]
    return {
        "type": "Feature",
        "stac_version": "1.1.0",
        "stac_extensions": extensions,
        "id": name,
        "geometry": None,
        # MLM tells null from left out for the accelerator.
        "properties": {
            key: value
            for key, value in properties.items()
            if value is not None or key == "mlm:accelerator"
        },
        "links": [],
        "assets": assets,
    }


def _input(model: Model, names: list[str], bands: int) -> dict[str, Any]:
    clip = model.clip_min, model.clip_max
    numbers = (model.scale, model.offset, model.mean, model.std)
    scaling = scaled(bands, *numbers, clip)
    height, width = model.tile or (-1, -1)
    return {
        "name": "raster",
        "bands": names,
        "input": _structure(model, "bands", bands, height, width),
        # Not every version of the schema lets a band go without.
        "value_scaling": scaling and [one or {"type": "offset", "value": 0} for one in scaling],
        "resize_type": None,
        "pre_processing_function": None,
    }


def _output(model: Model, channels: int) -> dict[str, Any]:
    output: dict[str, Any] = {
        "name": model.output,
        "tasks": [_TASKS[model.output]],
        "result": _structure(model, "class", channels, -1, -1),
        "post_processing_function": None,
    }
    if model.class_names:
        colors = model.class_colors or [None] * len(model.class_names)
        output["classification:classes"] = [
            _class(value, name, color)
            for value, (name, color) in enumerate(zip(model.class_names, colors, strict=True))
        ]
    return output


def _class(value: int, name: str, color: str | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "value": value,
        # Of letters, digits and dashes only; the name itself describes it.
        "name": re.sub(r"[^0-9A-Za-z-_]+", "-", name) or str(value),
        "description": name,
    }
    return entry if color is None else entry | {"color_hint": color.lstrip("#").upper()}


def _structure(model: Model, channel: str, count: int, height: int, width: int) -> dict[str, Any]:
    order, shape = ["batch", channel, "height", "width"], [-1, count, height, width]
    if model.axes == "nhwc":
        order, shape = [order[i] for i in (0, 2, 3, 1)], [shape[i] for i in (0, 2, 3, 1)]
    return {"shape": shape, "dim_order": order, "data_type": "float32"}
