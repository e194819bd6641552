"""AOTInductor packages: machine code for one kind of device, in a ``.pt2``."""

from __future__ import annotations

import json
import os
import re
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
# What compiled code says of the first size of its input.
_TOO_SMALL = re.compile(r"dim value is too small at 0, expected it to be >= (\d+)")
_OTHER = re.compile(r"unmatched dim value at 0, expected: (\d+)")


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

    return Package(runner)


class Package:
    """A loaded package as a function of a batch of any size.

    Which sizes it was compiled for is not written in it, but told when another one is tried.

    Parameters
    ----------
    runner : callable
        What torch loads.
    """

    def __init__(self, runner: Callable[[torch.Tensor], Any]) -> None:
        self._runner = runner
        self._fixed: Network | None = None
        self._least = 1

    def __call__(self, x: torch.Tensor) -> Any:
        """Scores of a batch."""
        try:
            return self._run(x)
        except RuntimeError as error:
            if not self._learned(str(error)):
                raise
        return self._run(x)

    def _run(self, x: torch.Tensor) -> Any:
        if self._fixed is not None:
            return self._fixed(x)
        if len(x) < self._least:
            from ...wrappers import FixedBatch

            return FixedBatch(self._compiled, self._least)(x)
        return self._compiled(x)

    def _compiled(self, x: torch.Tensor) -> Any:
        # Compiled for the plain layout: channels last would be read as if it were that.
        return self._runner(x.contiguous())

    def _learned(self, refusal: str) -> bool:
        """Note what a refusal says of the batch size; False if it says nothing new."""
        from ...wrappers import FixedBatch

        if (small := _TOO_SMALL.search(refusal)) and int(small[1]) > self._least:
            self._least = int(small[1])
            return True
        if (other := _OTHER.search(refusal)) and self._fixed is None:
            self._fixed = FixedBatch(self._compiled, int(other[1]))
            return True
        return False


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
