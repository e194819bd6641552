"""Read an MLM item: where its network is, and the recipe that it amounts to.

What an item asks for and daskinfer would not do is refused, never left out: the raster would look
right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from ..digest import file_digest
from .scaling import scaling_of

__all__ = ["PREFIX", "Item", "read_item", "recipe_of"]

PREFIX = "daskinfer:"
"""Before the fields that MLM has no names for."""

_AXES = {
    "batch": "n", "b": "n", "n": "n",
    "bands": "c", "band": "c", "channel": "c", "channels": "c", "c": "c",
    "class": "c", "classes": "c", "score": "c", "confidence": "c", "logits": "c",
    "height": "y", "h": "y", "y": "y", "width": "x", "w": "x", "x": "x",
}  # fmt: skip
_CLASSES = {"segmentation", "semantic-segmentation", "classification"}
_VALUES = {"regression", "super-resolution", "downscaling", "generative", "similarity-search"}
_OBJECTS = {"object-detection", "instance-segmentation"}
# Functions after a network that a recipe has a field for, by the last part of their name.
_KNOWN_POST = {"softmax": "softmax", "sigmoid": "sigmoid", "argmax": None}
# Fit a chip to the network's size without another scale; tiles are cut to that size anyway.
_SAME_SCALE = (None, "crop", "pad")


@dataclass(frozen=True)
class Item:
    """An item as read.

    Attributes
    ----------
    network : str
        Path of the file that holds the network or its weights.
    recipe : dict
        Fields of a recipe.
    factory : str or None
        ``package.module:factory`` of the network that weights belong to.
    """

    network: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    factory: str | None = None


def read_item(path: Path, given: Mapping[str, Any]) -> Item:
    """Read a STAC item with the MLM extension.

    Parameters
    ----------
    path : Path
        The item, JSON.
    given : dict
        Fields that the caller sets: what they replace is not read.

    Raises
    ------
    ValueError
        If it is no such item, or asks for what daskinfer does not do.
    FileNotFoundError
        If its network is not where it says.
    """
    try:
        item = json.loads(path.read_text())
        properties, assets = item["properties"], item["assets"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model {str(path)!r} is not a STAC item: {error!r}") from error
    if "mlm:input" not in properties or "mlm:output" not in properties:
        raise ValueError(
            f"model {str(path)!r} is a STAC item without the mlm extension: properties lack "
            "mlm:input or mlm:output"
        )
    try:
        recipe = recipe_of(properties, given)
        asset = _model_asset(assets)
        network = _local(asset["href"], path)
        _check_content(network, asset.get("file:checksum"))
        return Item(network, recipe, _entrypoint(item, assets, asset))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model {str(path)!r} is not a valid MLM item: {error!r}") from error
    except ValueError as error:
        raise ValueError(f"model {str(path)!r}: {error}") from error


def recipe_of(properties: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe from MLM properties, with or without their ``mlm:``.

    Raises
    ------
    ValueError
        If they ask for what daskinfer does not do.
    """
    ours = {
        name.removeprefix(PREFIX): value
        for name, value in properties.items()
        if name.startswith(PREFIX)
    }
    known = {name.removeprefix("mlm:"): value for name, value in properties.items()}
    into = _only(known["input"], "input")
    out = _output(known["output"], given.get("head"))
    recipe = _input_recipe(into, {**given, **ours}) | _output_recipe(out, known, given)
    if recipe.pop("out_axes", recipe["axes"]) != recipe["axes"]:
        raise ValueError("its input and its output have bands and pixels in different order")
    if known.get("accelerator_constrained") and known.get("accelerator"):
        recipe["accelerator"] = _accelerator(known["accelerator"])
    return recipe | dict(ours.get("recipe", {}))


def _only(entries: Any, what: str) -> Mapping[str, Any]:
    if len(entries) != 1:
        names = ", ".join(str(entry.get("name")) for entry in entries)
        raise ValueError(
            f"it has {len(entries)} {what}s ({names or 'none'}): daskinfer runs models of one "
            f"{what}"
        )
    entry: Mapping[str, Any] = entries[0]
    return entry


def _output(entries: Any, head: Any) -> Mapping[str, Any]:
    """The only output, or the one that `head` names."""
    named = [e for i, e in enumerate(entries) if head is not None and head in (i, e.get("name"))]
    if len(entries) > 1 and not named:
        names = ", ".join(repr(entry.get("name")) for entry in entries)
        raise ValueError(f"it has the outputs {names}: say which to take, as head=")
    return _only(named or entries, "output")


def _input_recipe(entry: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    structure = entry["input"]
    order, sizes = _sizes(structure, "input")
    recipe: dict[str, Any] = {"axes": "nchw" if order == "ncyx" else "nhwc"}
    if not str(structure["data_type"]).startswith("float"):
        _unless_given(given, f"its input is {structure['data_type']}, daskinfer gives float32")
    names = _band_names(entry)
    if names:
        recipe["bands"] = names
    if entry.get("resize_type") not in _SAME_SCALE:
        raise ValueError(
            f"resize_type {entry['resize_type']!r} asks for pixels of another size: resample the "
            "raster to what the network was trained on, and name the network's file itself"
        )
    if entry.get("norm_type"):
        raise ValueError("norm_type is of MLM before 1.3: write value_scaling instead")
    pre = _function(entry.get("pre_processing_function"))
    if pre:
        _unless_given(given, f"its pre_processing_function ({pre}) is not run")
    elif not _scaling_given(given):
        bands = len(names) or (sizes["c"] if sizes["c"] > 0 else None)
        recipe |= scaling_of(entry.get("value_scaling"), bands)
    return recipe


def _scaling_given(given: Mapping[str, Any]) -> bool:
    return any(name in given for name in ("scale", "offset", "mean", "std", "recipe"))


def _unless_given(given: Mapping[str, Any], what: str) -> None:
    if not _scaling_given(given):
        raise ValueError(
            f"{what}: pass scale=, mean= and std= that stand for it (scale=1 for none)"
        )


def _band_names(entry: Mapping[str, Any]) -> list[str]:
    if entry.get("variables"):
        raise ValueError("its input is of variables: daskinfer knows bands")
    names = []
    for band in entry.get("bands") or ():
        if isinstance(band, Mapping) and band.get("expression") is not None:
            raise ValueError(
                f"band {band.get('name')!r} is computed by {band['expression']!r}, which is not "
                "run: put it into the raster, and pass bands="
            )
        names.append(str(band["name"] if isinstance(band, Mapping) else band))
    return names


def _output_recipe(
    entry: Mapping[str, Any], known: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    tasks = set(entry.get("tasks") or known.get("tasks") or ())
    if given.get("output", "objects" if tasks and tasks <= _OBJECTS else None) == "objects":
        # Boxes of any number: their dimensions are not those of a raster.
        return {"output": "objects"} | _names_of_labels(entry, given)
    order, sizes = _sizes(entry["result"], "output")
    recipe: dict[str, Any] = {"out_axes": "nchw" if order == "ncyx" else "nhwc"}
    if tasks & _CLASSES:
        recipe["output"] = "classes"
    elif tasks & _VALUES:
        recipe["output"] = "values"
    elif "output" not in given:
        raise ValueError(
            f"its tasks are {sorted(tasks)}, which give no raster of classes or values: pass "
            "output= if they do"
        )
    post = _function(entry.get("post_processing_function"))
    if post and not {"output", "activation"} & set(given):
        name = post.rpartition(".")[2].rpartition(":")[2]
        if name not in _KNOWN_POST:
            raise ValueError(
                f"its post_processing_function ({post}) is not run: pass output= and activation= "
                "that stand for it"
            )
        if _KNOWN_POST[name]:
            recipe["activation"] = _KNOWN_POST[name]
    classes = _class_entries(entry)
    if classes and "class_names" not in given:
        recipe |= _classes(classes, sizes["c"])
    return recipe


def _class_entries(entry: Mapping[str, Any]) -> Any:
    return entry.get("classification:classes", entry.get("classes"))


def _names_of_labels(entry: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Names by label; labels of detectors need not begin at 0."""
    classes = _class_entries(entry)
    if not classes or "class_names" in given:
        return {}
    if min(int(one["value"]) for one in classes) < 0:
        raise ValueError(f"its classes have negative values: {classes}")
    return _classes(classes, 1 + max(int(one["value"]) for one in classes))


def _classes(classes: Any, channels: int) -> dict[str, Any]:
    """Names and colours in the order of the scores."""
    by_value = {int(entry["value"]): entry for entry in classes}
    count = max(channels, len(by_value), 2 if channels == 1 else 0)
    if min(by_value) < 0 or max(by_value) >= count:
        raise ValueError(
            f"its classes have the values {sorted(by_value)}, the network {count} scores: which "
            "score is which class is not said; pass class_names="
        )
    in_order = [by_value.get(value, {}) for value in range(count)]
    names = [
        str(entry.get("title") or entry.get("name") or entry.get("description") or i)
        for i, entry in enumerate(in_order)
    ]
    recipe: dict[str, Any] = {"class_names": names}
    colors = [entry.get("color_hint") for entry in in_order]
    if all(colors):
        recipe["class_colors"] = [f"#{str(color).lstrip('#').lower()}" for color in colors]
    return recipe


def _sizes(structure: Mapping[str, Any], what: str) -> tuple[str, dict[str, int]]:
    """Order of the dimensions, and the size of each; -1 where it is free."""
    order, shape = _order(structure["dim_order"], what), structure["shape"]
    if len(shape) != len(order) or not all(isinstance(size, int) for size in shape):
        raise ValueError(
            f"its {what} has the shape {shape}, which must be a whole number for each of the "
            f"dimensions {structure['dim_order']}, -1 where any size goes"
        )
    return order, dict(zip(order, shape, strict=True))


def _order(names: Any, what: str) -> str:
    order = "".join(_AXES.get(str(name).lower(), "?") for name in names)
    if order not in ("ncyx", "nyxc"):
        raise ValueError(
            f"its {what} has the dimensions {list(names)}; daskinfer runs (batch, bands, height, "
            "width) and (batch, height, width, bands)"
        )
    return order


def _function(expressions: Any) -> str:
    """What processing expressions name; '' for none."""
    if not expressions:
        return ""
    every = expressions if isinstance(expressions, list) else [expressions]
    named = [e["expression"] if isinstance(e, Mapping) else e for e in every]
    return ", ".join(str(name) for name in named)


def _accelerator(name: str) -> str:
    if name == "cuda":
        return "cuda"
    if name in ("amd64", "cpu"):
        return "cpu"
    raise ValueError(f"it runs on {name} only (mlm:accelerator_constrained)")


def _model_asset(assets: Mapping[str, Any]) -> Mapping[str, Any]:
    held = {
        key: asset for key, asset in assets.items() if "mlm:model" in (asset.get("roles") or ())
    }
    if not held and "model" in assets:
        held = {"model": assets["model"]}
    if len(held) != 1:
        raise ValueError(
            f"it has {len(held)} assets with the role mlm:model ({', '.join(held) or 'none'}), "
            "which must be one"
        )
    asset: Mapping[str, Any] = next(iter(held.values()))
    return asset


def _local(href: str, item: Path) -> str:
    """The network's file, relative to the item."""
    parts = urlparse(href)
    if parts.scheme not in ("", "file"):
        raise ValueError(
            f"its network is at {href}: fetch it, and name the file, relative to the item, as href"
        )
    path = Path(unquote(parts.path) if parts.scheme else href)
    found = path if path.is_absolute() else item.parent / path
    if not found.is_file():
        raise FileNotFoundError(f"model {str(item)!r}: its network {str(found)!r} is no file")
    return str(found)


def _check_content(network: str, checksum: str | None) -> None:
    """Refuse another file than the one that was described, where a SHA-256 multihash tells."""
    if checksum and checksum.startswith("1220") and checksum[4:] != file_digest(Path(network)):
        raise ValueError(f"{network!r} is not the file that it describes: file:checksum differs")


def _entrypoint(
    item: Mapping[str, Any], assets: Mapping[str, Any], model: Mapping[str, Any]
) -> str | None:
    """The function that makes the network, where the item names one."""
    places = (model, *(a for a in assets.values() if "code" in (a.get("roles") or ())), item)
    named = (place.get("mlm:entrypoint") for place in places)
    return next((str(name) for name in named if name), None)
