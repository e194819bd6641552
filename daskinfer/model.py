"""The recipe of a model: where its weights are, what goes in, what comes out.

A `Model` is a small frozen value.  It travels in plans and task graphs, so it never holds weights
when pickled: a file or factory is named, and an in-memory module is replaced by its digest (the
runner ships its bytes once per worker, see `Model.ship`).  `Model.network` builds the network where
it is needed.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import threading
import weakref
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import cloudpickle

from .digest import module_digest
from .formats import (
    Network,
    call_factory,
    exported_network,
    first_in_channels,
    read_pt2,
    resolve,
    signature,
)
from .spec import SPEC, check_recipe, check_spec, tidy

if TYPE_CHECKING:
    import torch

__all__ = ["Model", "ModelBytes", "load_model"]

Output = Literal["classes", "probabilities", "values", "objects"]
Numbers = tuple[float, ...]

# Modules given by users of this process, found again by digest when a pickled Model comes back to
# the same process (Dask pickles tasks even for in-process workers).  Weak: the user owns them.
_local: weakref.WeakValueDictionary[str, torch.nn.Module] = weakref.WeakValueDictionary()
# Modules that were shipped to this process; strong, until the run that shipped them is over.
_shipped: dict[str, torch.nn.Module] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class ModelBytes:
    """An in-memory module on its way to a worker process."""

    digest: str
    payload: bytes
    script: bool = False

    def receive(self) -> None:
        """Make the module available to models with this digest in this process."""
        with _lock:
            if self.digest not in _local and self.digest not in _shipped:
                _shipped[self.digest] = self._module()

    def _module(self) -> torch.nn.Module:
        if not self.script:
            return cloudpickle.loads(self.payload)  # type: ignore[no-any-return]
        import torch

        return torch.jit.load(io.BytesIO(self.payload))  # type: ignore[no-any-return,no-untyped-call]

    def release(self) -> None:
        """Forget the module."""
        with _lock:
            _shipped.pop(self.digest, None)


@dataclass(frozen=True)
class Model:
    """What is needed to run a trained network over a raster.  Made by `load_model`.

    The network sees ``x = ((raw * scale + offset) - mean) / std`` as float32 ``(n, band, y, x)``,
    with `fill` in the pixels that are nodata, and its scores ``(n, channel, y, x)`` become the
    raster that `output` names.

    Attributes
    ----------
    source : str
        Where the network comes from, for people.
    kind : {"module", "factory", "pt2"}
        How it is built.
    digest : str
        Hash of the network's content; two models with equal digests compute the same.
    in_bands : int or None
        Bands the network takes, where its file says so.
    likely_bands : int or None
        Bands of the first convolution that a module holds, which need not be the first it runs.
    bands : tuple of str or None
        Names of the raster's bands in the order in which the network takes them.
    scale, offset : tuple of float or None
        Per band or one for all; None means the raster's own scale and offset.
    mean, std : tuple of float or None
        Per band or one for all; None means 0 and 1.
    fill : float or None
        Raw number put into nodata pixels before the network; None means the mean, that is 0 after
        normalisation.
    output : {"classes", "probabilities", "values", "objects"}
        ``"classes"``: index of the highest score (of one channel: score >= `threshold`).
        ``"probabilities"``: scores after `activation`.  ``"values"``: scores as they are.
        ``"objects"``: boxes, for `daskinfer.detect`.
    activation : {None, "softmax", "sigmoid"}
        Applied to the scores.
    threshold : float or None
        For classes from one channel, after `activation`: without one on the score as it is.  None
        means 0.5 after a sigmoid.
    class_names, class_colors : tuple of str or None
        One per class; colours as ``"#rrggbb"``.
    tile : tuple of int or None
        The only ``(height, width)`` that the network accepts, in pixels.
    tta : tuple of str
        Symmetries over which scores are averaged (test-time augmentation); see `daskinfer.spec.SYMMETRIES`.
    precision : {"float32", "bfloat16", "float16"}
        Arithmetic of the network (autocast); normalisation and post-processing stay in float32.
    compile : bool
        Run the network through ``torch.compile``; workers need a C++ compiler.
    weights : str or None
        File of weights for a factory.
    """

    source: str
    kind: Literal["module", "factory", "pt2"]
    digest: str
    in_bands: int | None = None
    bands: tuple[str, ...] | None = None
    scale: Numbers | None = None
    offset: Numbers | None = None
    mean: Numbers | None = None
    std: Numbers | None = None
    fill: float | None = None
    output: Output = "classes"
    activation: Literal["softmax", "sigmoid"] | None = None
    threshold: float | None = None
    class_names: tuple[str, ...] | None = None
    class_colors: tuple[str, ...] | None = None
    tile: tuple[int, int] | None = None
    tta: tuple[str, ...] = ()
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool = False
    weights: str | None = None
    likely_bands: int | None = field(default=None, compare=False)
    # The user's module: not part of the value (the digest is), never pickled.
    module: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_recipe(self)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "module"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "module", None)

    def __dask_tokenize__(self) -> object:
        return type(self).__qualname__, tuple(sorted(self.__getstate__().items()))

    @property
    def n_bands(self) -> int | None:
        """Bands the network takes, as far as the recipe tells."""
        per_band = (self.bands, self.mean, self.std, self.scale, self.offset)
        known = {len(values) for values in per_band if values is not None and len(values) > 1}
        if self.bands is not None:
            return len(self.bands)
        return self.in_bands or (known.pop() if known else None)

    @property
    def name(self) -> str:
        """What the network is called: its file without folder, its factory, or its class."""
        return Path(self.source).name if self.kind == "pt2" else self.source

    def scaling(self, scale: Numbers, offset: Numbers) -> tuple[Numbers, Numbers]:
        """Scale and offset from raw numbers to physical values, given the raster's own pair.

        A scale of the model's replaces the raster's pair, not half of it.
        """
        if self.scale is not None:
            return self.scale, self.offset or (0.0,)
        return scale, offset if self.offset is None else self.offset

    def patch(self, **spec: Any) -> Model:
        """Copy of the recipe with some fields changed.

        >>> import torch
        >>> model = load_model(torch.nn.Conv2d(3, 2, 1))
        >>> model.patch(class_names=("land", "water")).class_names
        ('land', 'water')
        """
        return replace(self, **tidy(spec))

    def network(self, device: str = "cpu") -> Network:
        """Build the network in this process, in eval mode on `device`.

        The caller owns the result: a module given to `load_model` is copied, never changed.

        Returns
        -------
        callable
            float32 tensor ``(n, band, y, x)`` to scores ``(n, channel, y, x)``.

        Raises
        ------
        RuntimeError
            If an in-memory module was not shipped to this process.
        """
        network = self._network(device)
        if not self.tta:
            return network
        from .wrappers import Augmented

        averaged: Network = Augmented(network, self.tta)
        return averaged

    def _network(self, device: str) -> Network:
        if self.kind == "pt2":
            return exported_network(self.source, device)
        if self.kind == "factory":
            module = call_factory(self.source, self.weights)
        else:
            module = copy.deepcopy(_find(self))
        # Networks saved in half or double precision run in float32, as `precision` says.
        return module.to(device).float().eval()

    def ship(self) -> ModelBytes | None:
        """Bytes of an in-memory module for other processes; None for models they can load."""
        if self.kind != "module":
            return None
        module = _find(self)
        if _is_script(module):
            saved: Any = module
            return ModelBytes(self.digest, bytes(saved.save_to_buffer()), script=True)
        return ModelBytes(self.digest, cloudpickle.dumps(module))


def load_model(source: Any, *, weights: str | Path | None = None, **spec: Any) -> Model:
    """Describe a trained model and how its input and output are to be read.

    Nothing is run, and files are not kept open; the network is built by each worker.

    Parameters
    ----------
    source : torch.nn.Module, path or str
        A module; a ``.pt2`` file written by ``torch.export.save``; or ``"package.module:factory"``,
        a callable without arguments that returns a module.  A `Model` is returned with `spec`
        applied to it.
    weights : path, optional
        State dict for a factory: ``.safetensors``, or a file that ``torch.load`` reads with
        ``weights_only=True``.
    **spec
        Fields of `Model`: ``bands``, ``scale``, ``offset``, ``mean``, ``std``, ``fill``,
        ``output``, ``activation``, ``threshold``, ``class_names``, ``class_colors``, ``tile``,
        ``precision``, ``compile``, and ``tta``: "d4" or a list of `daskinfer.spec.SYMMETRIES`.
        Metadata embedded in a ``.pt2`` (extra file ``daskinfer.json``) are the defaults.

    Returns
    -------
    Model

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    TypeError
        If `source` is not a model, or a keyword is unknown.
    ValueError
        If the file is not a model, or the spec contradicts itself.

    Examples
    --------
    >>> import torch
    >>> net = torch.nn.Conv2d(4, 3, kernel_size=3, padding=1)
    >>> model = load_model(net, bands=["B02", "B03", "B04", "B08"], scale=1e-4,
    ...                    class_names=["water", "soil", "plants"])
    >>> model.n_bands, model.output
    (4, 'classes')
    """
    check_spec(spec)
    if isinstance(source, Model):
        return _refreshed(source).patch(**spec)
    if isinstance(source, (str, Path)):
        return _from_name(str(source), weights, spec)
    if weights is not None:
        raise ValueError(
            "weights= belongs to a 'package.module:factory'; load them into the module"
        )
    return _from_module(source, spec)


def _refreshed(model: Model) -> Model:
    """The model with the digest of its module as it is now: its weights may have been changed."""
    if model.module is None:
        return model
    digest = module_digest(model.module)
    _local[digest] = model.module
    return replace(model, digest=digest)


def _from_name(name: str, weights: str | Path | None, spec: dict[str, Any]) -> Model:
    path = Path(name)
    if path.suffix.lower() == ".pt2":
        return _from_pt2(path, spec)
    module, colon, factory = name.partition(":")
    if colon and module.replace(".", "").isidentifier() and factory.isidentifier():
        return _from_factory(name, weights, spec)
    if not path.exists():
        raise FileNotFoundError(f"model {name!r}: no such file, and not a 'package.module:factory'")
    raise ValueError(
        f"model {name!r}: {path.suffix or 'a file without suffix'} is not a format daskinfer "
        "reads: pass an nn.Module, a .pt2 file (torch.export.save) or 'package.module:factory'"
    )


def _from_module(module: Any, spec: dict[str, Any]) -> Model:
    import torch

    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"not a model: got {type(module).__name__}, expected a torch.nn.Module, a .pt2 path or "
            "'package.module:factory'"
        )
    digest = module_digest(module)
    _local[digest] = module
    name = type(module).__name__
    return Model(
        name, "module", digest, likely_bands=first_in_channels(module), module=module, **tidy(spec)
    )


def _from_factory(name: str, weights: str | Path | None, spec: dict[str, Any]) -> Model:
    if weights is not None and not Path(weights).is_file():
        raise FileNotFoundError(f"weights {str(weights)!r}: no such file")
    resolve(name)
    recipe = Model(
        name, "factory", "", weights=None if weights is None else str(weights), **tidy(spec)
    )
    # Built once here: an import error, a factory that returns no module and weights that do not
    # fit are all to be found before a worker starts.
    module = call_factory(name, recipe.weights)
    return replace(recipe, digest=module_digest(module), likely_bands=first_in_channels(module))


def _from_pt2(path: Path, spec: dict[str, Any]) -> Model:
    if not path.is_file():
        raise FileNotFoundError(f"model {str(path)!r}: no such file")
    program, metadata = read_pt2(path)
    in_bands, tile = signature(program, path)
    embedded = {"tile": tile} | json.loads(metadata or "{}")
    merged = {name: value for name, value in embedded.items() if name in SPEC} | spec
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Model(str(path), "pt2", digest, in_bands=in_bands, **tidy(merged))


def _is_script(module: Any) -> bool:
    import torch

    return isinstance(module, torch.jit.ScriptModule)


def _find(model: Model) -> torch.nn.Module:
    module = model.module or _local.get(model.digest) or _shipped.get(model.digest)
    if module is None:
        raise RuntimeError(
            f"model {model.source!r} was given as an object and is not in this process: save it "
            "with torch.export.save, or name its factory as 'package.module:factory'"
        )
    return module
