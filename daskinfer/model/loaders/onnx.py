"""ONNX files, through ONNX Runtime."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..digest import file_digest
from .facts import Facts, Network

if TYPE_CHECKING:
    import torch

__all__ = ["OnnxNetwork", "build", "read"]

_FLOATS = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"}
# In protobuf: the key of an entry, then the tag of its value and the value's length, a varint.
_LOCATION = re.compile(rb"\n\x08location\x12([\x80-\xff][\x01-\x7f]|[\x01-\x7f])")


def read(path: Path) -> Facts:
    """What an ONNX file tells: its input, and its content as a hash."""
    session = _session(str(path), "cpu")
    given = [item for item in session.get_inputs()]
    if len(given) != 1 or len(given[0].shape) != 4:
        shapes = ", ".join(str(tuple(item.shape)) for item in given)
        raise ValueError(
            f"model {str(path)!r} takes {shapes or 'nothing'}; daskinfer runs models of one input "
            "(n, band, y, x)"
        )
    if given[0].type not in _FLOATS:
        raise ValueError(
            f"model {str(path)!r} takes {given[0].type}; daskinfer gives it normalised float32: "
            "export it with a first layer that takes that"
        )
    n, *sizes = (size if isinstance(size, int) and size > 0 else None for size in given[0].shape)
    return Facts(_digest(path), shape=(n, *sizes))  # type: ignore[arg-type]


def build(path: str, device: str) -> Network:
    """The network on a device, for batches of any size."""
    network = OnnxNetwork(path, device)
    if network.batch is None:
        return network
    from ...wrappers import FixedBatch

    return FixedBatch(network, network.batch)


class OnnxNetwork:
    """An ONNX file as a function of a tensor.

    ONNX Runtime keeps memory and streams of its own, so on a CUDA device tensors go through the
    host: slower than torch, and right on any version of it.

    Parameters
    ----------
    path : str
    device : str
        A torch device.
    """

    def __init__(self, path: str, device: str) -> None:
        self._session = _session(path, device)
        given = self._session.get_inputs()[0]
        self._name, self._dtype = given.name, _FLOATS[given.type]
        size = given.shape[0]
        self.batch: int | None = size if isinstance(size, int) and size > 0 else None

    def __call__(self, x: torch.Tensor) -> Any:
        """Scores of a batch, on the device of the input; of several outputs a dict of them."""
        import torch

        fed = x.detach().contiguous().cpu().numpy().astype(self._dtype, copy=False)
        found = [
            torch.from_numpy(a).to(x.device) for a in self._session.run(None, {self._name: fed})
        ]
        names = [output.name for output in self._session.get_outputs()]
        return found[0] if len(found) == 1 else dict(zip(names, found, strict=True))


def _session(path: str, device: str) -> Any:
    """An ONNX Runtime session with this process's share of the cores."""
    import torch

    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ImportError('running .onnx needs: pip install "daskinfer[onnx]"') from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Idle threads would spin on cores that readers need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    kind, _, number = device.partition(":")
    providers: list[Any] = ["CPUExecutionProvider"]
    unreached = ValueError(
        f"model {path!r}: ONNX Runtime does not reach {device}: pip install onnxruntime-gpu in "
        "place of onnxruntime, or pass device='cpu'"
    )
    if kind == "cuda":
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise unreached
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": int(number or 0)}))
    elif kind != "cpu":
        raise ValueError(f"model {path!r}: ONNX Runtime runs on cpu and cuda here, not on {device}")
    try:
        session = onnxruntime.InferenceSession(path, options, providers=providers)
    except Exception as error:
        # Errors of ONNX Runtime's own, which derive from nothing more special.
        raise ValueError(f"model {path!r} is not ONNX that runs here: {error}") from error
    if kind == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        # Its libraries did not load: it would go on on the CPU without a word.
        raise unreached
    return session


def _digest(path: Path) -> str:
    """Hash of the file, and of the weights that large models keep beside it."""
    content = path.read_bytes()
    digest = hashlib.sha256(content)
    for name in sorted(_files_beside(content)):
        if (path.parent / name).is_file():
            digest.update(bytes.fromhex(file_digest(path.parent / name)))
    return digest.hexdigest()


def _files_beside(content: bytes) -> set[str]:
    r"""Names of the files that hold tensors of an ONNX file.

    They are entries ``location`` of its tensors; in protobuf a key and a value, each with a tag and
    its length before it.  The package onnx, which would tell, is not needed to run one.

    >>> sorted(_files_beside(b"..\n\x08location\x12\x05w.bin\n\x06offset\x12\x010"))
    ['w.bin']
    """
    names = set()
    for found in _LOCATION.finditer(content):
        start, size = found.end(), int(found[1][0]) & 0x7F
        if len(found[1]) == 2:
            size |= found[1][1] << 7
        # What only looks like one is no name of a file.
        with contextlib.suppress(UnicodeDecodeError):
            names.add(content[start : start + size].decode())
    return {name for name in names if name and "\0" not in name}
