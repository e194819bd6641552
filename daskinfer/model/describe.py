"""Tell how a model was read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .. import display

if TYPE_CHECKING:
    from .recipe import Model

__all__ = ["model_json", "model_table"]

_KINDS = {
    "module": "a module in memory",
    "factory": "made by a function",
    "pt2": "exported program (torch.export)",
    "aoti": "AOTInductor package",
    "torchscript": "TorchScript",
    "pickle": "pickled module",
    "onnx": "ONNX",
}


def model_table(model: Model) -> str:
    """What was understood of a model, as lines for a terminal.

    >>> from daskinfer.demo import demo_model
    >>> for line in model_table(demo_model()).splitlines()[1:4]:
    ...     print(line)
      format     exported program (torch.export)
      bands      blue, green, red, nir, swir16, swir22
      input      x = (raw * 0.0001 - mean) / std
    """
    rows = [
        ("format", _KINDS[model.kind]),
        ("weights", model.weights or ""),
        ("bands", ", ".join(model.bands or ()) or _count(model)),
        ("input", f"x = {_formula(model)}"),
        ("clip", _limits(model)),
        ("mean", _list(model.mean)),
        ("std", _list(model.std)),
        ("fill", "" if model.fill is None else f"{model.fill:g} in nodata pixels"),
        ("tile", "" if model.tile is None else f"{display.sides_text(model.tile)} px only"),
        ("axes", "" if model.axes == "nchw" else "(n, y, x, band)"),
        ("output", _output(model)),
        ("classes", _classes(model)),
        ("runs on", "any device" if model.accelerator is None else f"{model.accelerator} only"),
        ("precision", model.precision),
        ("averaged", f"over {', '.join(model.tta)}" if model.tta else ""),
        ("trusted", "runs the code in its file" if model.trust else ""),
        ("digest", model.digest[:16]),
    ]
    return display.text_table(model.source, [row for row in rows if row[1]])


def model_json(model: Model) -> str:
    """The same for programs: source, kind, digest and every field that is set."""
    told: dict[str, Any] = {
        "source": model.source,
        "kind": model.kind,
        "digest": model.digest,
        "in_bands": model.n_bands or model.likely_bands,
        "weights": model.weights,
        "trust": model.trust,
    }
    return json.dumps(told | model.recipe(), indent=1)


def _count(model: Model) -> str:
    if model.n_bands:
        return f"{model.n_bands}, without names: those of the raster, in its order"
    likely = f"probably {model.likely_bands}: " if model.likely_bands else ""
    return f"{likely}as many as the raster has"


def _formula(model: Model) -> str:
    """What the network sees, as arithmetic of what is stored."""
    if model.scale is None:
        text = "raw * the raster's own scale"
    else:
        text = "raw" if model.scale == (1.0,) else f"raw * {_list(model.scale)}"
    if model.offset not in (None, (0.0,)):
        text += f" + {_list(model.offset)}"
    if model.clip_min or model.clip_max:
        text = f"clip({text})"
    if model.mean:
        text = f"({text} - mean)"
    return f"{text} / std" if model.std else text


def _limits(model: Model) -> str:
    if not (model.clip_min or model.clip_max):
        return ""
    return f"from {_list(model.clip_min) or '-inf'} to {_list(model.clip_max) or 'inf'}"


def _list(numbers: tuple[float, ...] | None) -> str:
    return ", ".join(f"{number:g}" for number in numbers or ())


def _output(model: Model) -> str:
    text: str = model.output
    if model.activation:
        text += f" after {model.activation}"
    if model.threshold is not None:
        text += f", from {model.threshold:g} up"
    if model.head is not None:
        text += f", of head {model.head}"
    return text


def _classes(model: Model) -> str:
    names = model.class_names or ()
    colors = model.class_colors or ("",) * len(names)
    return ", ".join(
        f"{value} {name} {color}".rstrip()
        for value, (name, color) in enumerate(zip(names, colors, strict=True))
    )
