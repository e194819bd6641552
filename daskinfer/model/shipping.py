"""In-memory modules by their digest: found again in this process, shipped to others."""

from __future__ import annotations

import copy
import io
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from ..receptive.netrun import quiet
from .loaders.torchscript import load_script

if TYPE_CHECKING:
    import torch

__all__ = ["ModelBytes", "copy_module", "find_module", "is_script", "keep_module", "pack_module"]

# Modules given by users of this process, found again by digest when a pickled Model comes back to
# the same process (Dask pickles tasks even for in-process workers).  Weak: the user owns them.
_local: weakref.WeakValueDictionary[str, torch.nn.Module] = weakref.WeakValueDictionary()
# Modules that were shipped to this process; strong, until the run that shipped them is over.
_shipped: dict[str, torch.nn.Module] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class ModelBytes:
    """An in-memory module on its way to a worker process.

    `refusal` says why there is no payload: such a module runs in the user's own process only.
    """

    digest: str
    payload: bytes
    script: bool = False
    refusal: str = ""

    def receive(self) -> None:
        """Make the module available to models with this digest in this process."""
        with _lock:
            if self.digest not in _local and self.digest not in _shipped:
                _shipped[self.digest] = self._module()

    def _module(self) -> torch.nn.Module:
        if self.refusal:
            raise RuntimeError(
                f"the model cannot be sent to another process ({self.refusal}): save it with "
                "torch.export.save and pass the file, or name its factory 'package.module:factory'"
            )
        if self.script:
            return load_script(io.BytesIO(self.payload))
        return cloudpickle.loads(self.payload)  # type: ignore[no-any-return]

    def release(self) -> None:
        """Forget the module."""
        with _lock:
            _shipped.pop(self.digest, None)


def keep_module(digest: str, module: torch.nn.Module) -> None:
    """Have a module of the user's found by its digest, as long as the user holds it."""
    _local[digest] = module


def find_module(digest: str) -> torch.nn.Module | None:
    """The module with this digest, if it is in this process."""
    return _local.get(digest) or _shipped.get(digest)


def pack_module(digest: str, module: torch.nn.Module) -> ModelBytes:
    """A module as bytes."""
    if is_script(module):
        saved: Any = module
        return ModelBytes(digest, bytes(saved.save_to_buffer()), script=True)
    try:
        return ModelBytes(digest, cloudpickle.dumps(module))
    except Exception as error:
        # Exported modules, and those that hold locks or open files.
        return ModelBytes(digest, b"", refusal=f"{type(error).__name__}: {error}")


def copy_module(module: torch.nn.Module) -> torch.nn.Module:
    """A copy that shares nothing with the module."""
    if is_script(module):
        saved: Any = module
        # A deep copy of TorchScript has parameters that are results of an operation.
        return load_script(io.BytesIO(saved.save_to_buffer()))
    with quiet():
        return copy.deepcopy(module)


def is_script(module: Any) -> bool:
    """Whether a module is TorchScript, which is pickled in a way of its own."""
    import torch

    return isinstance(module, torch.jit.ScriptModule)
