"""Files that hold a network: which format a file is in, what it tells, and the network itself."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Literal

from .digest import module_digest
from .loaders import aoti, checkpoint, exported, onnx, torchscript
from .loaders.factory import first_in_channels, is_factory
from .loaders.facts import Facts, Network

__all__ = ["FILES", "FileKind", "build_file", "is_model_name", "kind_of", "read_file"]

FileKind = Literal["pt2", "aoti", "torchscript", "pickle", "onnx"]
FILES = ("pt2", "aoti", "torchscript", "pickle", "onnx")
"""Kinds of models that are files."""

_PICKLED = (
    ".pt",
    ".pth",
    ".ckpt",
    ".bin",
    ".tar",
    ".pkl",
    ".pickle",
    ".ts",
    ".jit",
    ".torchscript",
)
_KNOWN = (
    "pass an nn.Module, a file of torch.export (.pt2), TorchScript (.pt) or ONNX (.onnx), a STAC "
    "MLM item (.json) or 'package.module:factory'"
)


def kind_of(path: Path) -> FileKind:
    """The format of a file, by its content: one suffix serves several.

    Raises
    ------
    ValueError
        If it is none that daskinfer reads.
    """
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        return "onnx"
    if suffix == ".safetensors":
        checkpoint.read_pickled_module(str(path), trust=False)
    names = _entries(path)
    if any(aoti.FOLDER in f"/{name}" for name in names):
        return "aoti"
    if any(
        name.endswith(("models/model.json", "serialized_exported_program.json")) for name in names
    ):
        return "pt2"
    if any(name.endswith("/constants.pkl") for name in names):
        return "torchscript"
    if any(name.endswith("/data.pkl") for name in names):
        return "pickle"
    if suffix == ".pt2":
        # Whatever it is, it is read as what it says to be, and refused with the reason.
        return "pt2"
    if suffix in _PICKLED:
        return "pickle"
    raise ValueError(
        f"model {str(path)!r}: {suffix or 'a file without suffix'} is not a format daskinfer "
        f"reads: {_KNOWN}"
    )


def is_model_name(name: str) -> bool:
    """Whether a text names a model and not a raster, by its form.

    >>> is_model_name("unet.pt2"), is_model_name("nets:unet"), is_model_name("scene.tif")
    (True, True, False)
    """
    known = (".onnx", ".pt2", ".json", ".safetensors", *_PICKLED)
    return is_factory(name) or Path(name).suffix.lower() in known


def read_file(path: Path, kind: FileKind, trust: bool) -> Facts:
    """What a file tells of its network.

    Raises
    ------
    ValueError
        If it holds none, or wants to run code and is not trusted.
    """
    if kind == "pt2":
        return exported.read(path, trust)
    if kind == "aoti":
        return aoti.read(path, trust)
    if kind == "torchscript":
        return torchscript.read(path)
    if kind == "onnx":
        return onnx.read(path)
    module = checkpoint.read_pickled_module(str(path), trust)
    return Facts(module_digest(module), likely_bands=first_in_channels(module))


def build_file(path: str, kind: FileKind, device: str, trust: bool) -> Network:
    """The network of a file, in eval mode on a device, for float32 batches of any size."""
    if kind == "pt2":
        return exported.build(path, device, trust)
    if kind == "aoti":
        return aoti.build(path, device)
    if kind == "torchscript":
        return torchscript.build(path, device)
    if kind == "onnx":
        return onnx.build(path, device)
    return checkpoint.read_pickled_module(path, trust).to(device).float().eval()


def _entries(path: Path) -> list[str]:
    if not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()
