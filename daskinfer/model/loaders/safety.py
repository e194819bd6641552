"""Refuse archives whose loading would run code that their author chose.

``torch.export.load`` unpickles without restraint what it finds in a ``.pt2``: the sample inputs
when they are no plain tensors, weights of unusual layouts, objects among the constants.  It also
evaluates the expressions of symbolic sizes.  So these are looked at before it is called, through
torch's own reader of such archives, that both may see the same entries.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .facts import CODE

__all__ = ["refuse_code"]

# Functions of symbolic sizes are classes of sympy's; symbols are letters and a number.
_NAME = re.compile(r"[A-Za-z_]\w*")
_HARMLESS = re.compile(r"[A-Z][A-Za-z]*|[a-z]+_?\d+|floor|ceiling|oo|int_oo|zoo|log|sqrt|abs|pow")
_SYMBOL = re.compile(r"Symbol\('\w+'")
_ASSUMED = re.compile(r"\b[a-z_]+=(True|False)\b")
_SIGNS = re.compile(r"[\w\s()+\-*/%,.<>=!&|~^]*")


def refuse_code(path: str | Path) -> None:
    """Raise ValueError for an exported program that holds more than tensors and a graph."""
    import torch

    for name, content in _entries(Path(path)):
        if name.endswith(".json"):
            _refuse_expressions(path, json.loads(content))
            continue
        if not content:
            continue
        try:
            if "_obj_" in name:
                raise ValueError("an object")
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            # Whatever the restricted unpickler raises: it is no plain tensors.
            raise ValueError(
                f"model {str(path)!r}: {name} in it is a pickle of more than tensors, and {CODE}"
            ) from error


def _entries(path: Path) -> Iterator[tuple[str, bytes]]:
    """Pickles that ``torch.export.load`` would load, and graphs with expressions."""
    import torch

    try:
        reader: Any = torch._C.PyTorchFileReader(str(path))
    except RuntimeError:
        # Not of torch 2.8 or newer: the format before, or no such archive at all.
        yield from _older_entries(path)
        return
    names = reader.get_all_records()
    if not any(name.startswith("models/") for name in names):
        yield from _older_entries(path)
        return
    for name in names:
        folder = name.rpartition("/")[0]
        if (
            folder == "models"
            or folder == "data/sample_inputs"
            or (folder in ("data/weights", "data/constants") and name.endswith(".pt"))
        ):
            yield name, reader.get_record(name)
        elif name.endswith("_config.json") and folder in ("data/weights", "data/constants"):
            for entry in json.loads(reader.get_record(name))["config"].values():
                if entry["use_pickle"] or "_obj_" in entry["path_name"]:
                    record = f"{folder}/{entry['path_name']}"
                    yield record, reader.get_record(record)


def _older_entries(path: Path) -> Iterator[tuple[str, bytes]]:
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.startswith("serialized_") and name.endswith((".pt", "program.json")):
                yield name, archive.read(name)


def _refuse_expressions(path: str | Path, value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _refuse_expressions(path, item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name == "expr_str" and not _is_arithmetic(str(item)):
                raise ValueError(
                    f"model {str(path)!r}: a size in it is the expression {str(item)[:80]!r}, and "
                    f"{CODE}"
                )
            _refuse_expressions(path, item)


def _is_arithmetic(text: str) -> bool:
    """Whether an expression is one of sizes, as sympy writes them.

    >>> _is_arithmetic("Mul(Integer(8), Symbol('s1', integer=True))"), _is_arithmetic("exec(s1)")
    (True, False)
    """
    text = _SYMBOL.sub("Symbol(0", text)
    text = _ASSUMED.sub("0", text)
    names = _NAME.findall(text)
    dotted = re.search(r"\.\s*[A-Za-z_]", text)
    return bool(_SIGNS.fullmatch(text)) and not dotted and all(map(_HARMLESS.fullmatch, names))
