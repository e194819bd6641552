"""AOTInductor packages: machine code for one kind of device, in a ``.pt2``."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..digest import file_digest
from .exported import METADATA_FILE, MLM_FILE, embedded
from .facts import CODE, Facts, Network

if TYPE_CHECKING:
    import torch

__all__ = ["build", "read"]

FOLDER = "/data/aotinductor/"


def read(path: Path, trust: bool) -> Facts:
    """What a package tells without being loaded: metadata, and the device it was compiled for."""
    if not trust:
        raise ValueError(
            f"model {str(path)!r} is an AOTInductor package, a shared library, and {CODE}"
        )
    extra, device = {}, None
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith((f"/extra/{METADATA_FILE}", f"/extra/{MLM_FILE}")):
                extra[Path(name).name] = archive.read(name).decode()
            elif name.endswith("_metadata.json") and FOLDER in name:
                device = json.loads(archive.read(name)).get("AOTI_DEVICE_KEY", device)
    return Facts(file_digest(path), metadata=embedded(extra, path), accelerator=device)


def build(path: str, device: str) -> Network:
    """The network of a package on a device.

    Raises
    ------
    ValueError
        If it was compiled for another machine or device.
    """
    import torch

    compiled_for = _target(path)
    kind, _, number = device.partition(":")
    if compiled_for.get("AOTI_DEVICE_KEY", kind) != kind:
        raise ValueError(f"model {path!r} does not run on {device}: {_in_words(compiled_for)}")
    # Without it, compiled code reads past the end of an input of another size.
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    load: Callable[..., Any] = torch._inductor.aoti_load_package
    try:
        runner = load(path, device_index=int(number or -1))
    except Exception as error:
        raise ValueError(
            f"model {path!r} does not load here: {_in_words(compiled_for)} ({error}): compile it "
            "on this machine, or give the exported program (torch.export.save)"
        ) from error

    def network(x: torch.Tensor) -> torch.Tensor:
        # Compiled for the plain layout; channels last would be read as it.
        scores: torch.Tensor = runner(x.contiguous())
        return scores

    return network


def _target(path: str) -> dict[str, str]:
    """For which platform, machine, instruction set and device a package was compiled."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith("wrapper_metadata.json") and FOLDER in name:
                told = json.loads(archive.read(name))
                return {key: str(value) for key, value in told.items()}
    return {}


def _in_words(target: dict[str, str]) -> str:
    keys = ("PLATFORM", "MACHINE", "CPU_ISA", "DEVICE_KEY", "COMPUTE_CAPABILITY")
    named = [target[f"AOTI_{key}"] for key in keys if target.get(f"AOTI_{key}")]
    return f"it was compiled for {', '.join(named) or 'an unnamed device'}"
