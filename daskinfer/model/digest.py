"""Content hash of an in-memory model, equal in every process for equal models.

Two models that compute different things must never share a digest: results would be taken for each
other's, and one output filled by both.  So everything that pickling would carry is hashed (weights,
attributes, closures, hooks, code), less what differs from process to process though nothing else
does: addresses of storages, file names and lines of code, the order of sets.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import sys
import uuid
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["file_digest", "module_digest"]

# Kept by the loop over modules itself, or a mode that is set before every run.
_APART = ("training", "_modules", "_parameters", "_buffers")
_OF_CLASSES = ("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__")


def module_digest(module: torch.nn.Module) -> str:
    """Hash of weights, buffers, attributes, hooks and code.

    A module that cannot be hashed gets a digest of its own: it is equal to no other, and a run of
    it is not resumed in another process.
    """
    import torch

    digest = hashlib.sha256()
    if isinstance(module, torch.jit.ScriptModule):
        digest.update(module.save_to_buffer())
        return digest.hexdigest()
    try:
        for name, child in module.named_modules():
            own = {key: value for key, value in vars(child).items() if key not in _APART}
            digest.update(f"{name}|{_class_key(type(child), ())}|{_hashed(own, ())}".encode())
    except Exception:
        # Locks, open files, whatever pickling refuses.
        return uuid.uuid4().hex
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        digest.update(f"{name}|{_tensor_key(tensor)}".encode())
    return digest.hexdigest()


class _Hasher(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles with names in place of what differs between processes."""

    def __init__(self, file: io.BytesIO, inside: tuple[type, ...]) -> None:
        super().__init__(file, protocol=5)
        self._inside = inside
        self._script = getattr(sys.modules["__main__"], "__file__", None)

    def persistent_id(self, value: Any) -> Any:
        """A stable name; None has the value pickled as usual."""
        import torch

        if isinstance(value, str) and value == self._script:
            return "script"  # noted by cloudpickle for every function of __main__
        if isinstance(value, torch.Tensor):
            return _tensor_key(value)
        if isinstance(value, CodeType):
            return _code_key(value, self._inside)
        if isinstance(value, (set, frozenset)):
            return "set", sorted(_hashed(item, self._inside) for item in value)
        if isinstance(value, type):
            return _class_key(value, self._inside)
        if isinstance(value, FunctionType) and _importable(value):
            return "function", value.__module__, value.__qualname__, _source(value)
        return None


def _hashed(value: Any, inside: tuple[type, ...]) -> str:
    file = io.BytesIO()
    _Hasher(file, inside).dump(value)
    return hashlib.sha256(file.getbuffer()).hexdigest()


def _class_key(kind: type, inside: tuple[type, ...]) -> Any:
    """Name and code of a class; of one that cannot be imported, of all that it holds."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in inside:
        return "class", name  # refers to itself
    if _importable(kind):
        bases = [base for base in kind.__mro__[1:] if base is not object]
        return "class", name, _source(kind), [(b.__qualname__, _source(b)) for b in bases]
    members = {key: value for key, value in vars(kind).items() if key not in _OF_CLASSES}
    deeper = (*inside, kind)
    bases = [_class_key(base, deeper) for base in kind.__bases__ if base is not object]
    plain = {key: value for key, value in members.items() if not _is_slot(value)}
    return "class", name, _hashed(plain, deeper), bases


def _is_slot(value: Any) -> bool:
    """Descriptors that the interpreter makes; they cannot be pickled and say nothing."""
    return inspect.isgetsetdescriptor(value) or inspect.ismemberdescriptor(value)


def _importable(value: Any) -> bool:
    """Whether another process finds the same object under its name."""
    if value.__module__ in (None, "__main__"):
        return False
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _source(value: type | FunctionType) -> str:
    """Code of the user's own classes and functions; a library's is told by its version."""
    package = value.__module__.partition(".")[0]
    if package in ("torch", "builtins", "collections", "numpy"):
        return str(getattr(sys.modules.get(package), "__version__", ""))
    try:
        return hashlib.sha256(inspect.getsource(value).encode()).hexdigest()
    except (OSError, TypeError):
        return ""


def _code_key(code: CodeType, inside: tuple[type, ...]) -> Any:
    constants = [
        _code_key(item, inside) if isinstance(item, CodeType) else _hashed(item, inside)
        for item in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return "code", code.co_code, names, constants


def _tensor_key(tensor: torch.Tensor) -> Any:
    import torch

    numbers = tensor.detach().cpu().contiguous()
    content: Any = numbers.flatten().view(torch.uint8) if numbers.numel() else torch.zeros(0)
    digest = hashlib.sha256(np.asarray(content.numpy()).tobytes()).hexdigest()
    return "tensor", str(numbers.dtype), tuple(numbers.shape), digest


def file_digest(path: Path) -> str:
    """Hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
