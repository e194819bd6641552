"""The recipe of a model: where its weights are, what goes in, what comes out.

A `Model` is a small frozen value.  It travels in plans and task graphs, so it never holds weights
when pickled: a file or factory is named, and an in-memory module is replaced by its digest (the
runner ships its bytes once per worker, see `Model.ship`).  `Model.network` builds the network where
it is needed.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..paths import absolute_name
from .digest import module_digest
from .formats import FILES, FileKind, build_file, kind_of, read_file
from .loaders import exported
from .loaders.factory import call_factory, first_in_channels, is_factory, resolve
from .loaders.facts import CODE, Facts, Network
from .loaders.torchscript import convolved_bands
from .mlm.read import read_item, recipe_of
from .shipping import ModelBytes, copy_module, find_module, is_script, keep_module, pack_module
from .spec import EMBEDDABLE, PER_BAND, check_recipe, check_spec, json_value, tidy

if TYPE_CHECKING:
    import torch

__all__ = ["Model", "ModelBytes", "load_model"]

Output = Literal["classes", "probabilities", "values", "objects"]
Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Model:
    """What is needed to run a trained network over a raster.  Made by `load_model`.

    The network sees ``x = (clip(raw * scale + offset) - mean) / std`` as float32
    ``(n, band, y, x)``, with `fill` in the pixels that are nodata, and its scores
    ``(n, channel, y, x)`` become the raster that `output` names.

    Attributes
    ----------
    source : str
        Where the network comes from, for people.
    kind : {"module", "factory", "pt2", "aoti", "torchscript", "pickle", "onnx"}
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
    clip_min, clip_max : tuple of float or None
        Per band or one for all: limits of the physical values; None means none.
    fill : float or None
        Raw number put into nodata pixels before the network; None means the mean, that is 0 after
        normalisation.
    output : {"classes", "probabilities", "values", "objects"}
        ``"classes"``: index of the highest score (of one channel: score >= `threshold`).
        ``"probabilities"``: scores after `activation`.  ``"values"``: scores as they are.
        ``"objects"``: boxes, for `daskinfer.detect`.
    activation : {None, "softmax", "sigmoid", "identity"}
        Applied to the scores; "identity" says that they are probabilities already.
    threshold : float or None
        For classes from one channel, after `activation`: without one on the score as it is.  None
        means 0.5 after a sigmoid.
    class_names, class_colors : tuple of str or None
        One per class; colours as ``"#rrggbb"``.
    tile : tuple of int or None
        The only ``(height, width)`` that the network accepts, in pixels.
    tta : tuple of str
        Symmetries over which scores are averaged (test-time augmentation), of
        `daskinfer.model.spec.SYMMETRIES`.
    precision : {"float32", "bfloat16", "float16"}
        Arithmetic of the network (autocast); normalisation and post-processing stay in float32.
    compile : bool
        Run the network through ``torch.compile``; workers need a C++ compiler.
    head : str, int, tuple of them or None
        Which of several tensors that the network returns to take, by name in a dict or by number
        in a tuple; of several the channels become bands, one after another.
    dtype : {"float32", "uint8"}
        Of probabilities in the output: "uint8" has steps of 0.004 (250 is 1), told by a scale tag,
        and nodata 255, also for what is no probability.
    confidence : bool
        Beside classes a second band: the probability of the class, in the same steps.
    axes : {"nchw", "nhwc"}
        Order of the network's input and output; "nhwc" is ``(n, y, x, band)``.
    accelerator : {None, "cpu", "cuda"}
        The only kind of device that the network runs on.
    trust : bool
        Whether code that the file holds is run.
    weights : str or None
        File of weights for a factory.
    """

    source: str
    kind: Literal["module", "factory"] | FileKind
    digest: str
    in_bands: int | None = None
    bands: tuple[str, ...] | None = None
    scale: Numbers | None = None
    offset: Numbers | None = None
    mean: Numbers | None = None
    std: Numbers | None = None
    clip_min: Numbers | None = None
    clip_max: Numbers | None = None
    fill: float | None = None
    output: Output = "classes"
    activation: Literal["softmax", "sigmoid", "identity"] | None = None
    threshold: float | None = None
    class_names: tuple[str, ...] | None = None
    class_colors: tuple[str, ...] | None = None
    tile: tuple[int, int] | None = None
    tta: tuple[str, ...] = ()
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    compile: bool = False
    head: str | int | tuple[str | int, ...] | None = None
    dtype: Literal["float32", "uint8"] = "float32"
    confidence: bool = False
    axes: Literal["nchw", "nhwc"] = "nchw"
    accelerator: Literal["cpu", "cuda"] | None = None
    trust: bool = False
    weights: str | None = None
    likely_bands: int | None = field(default=None, compare=False)
    # The user's module: not part of the value (the digest is), never pickled.
    module: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_recipe(self)

    def __getstate__(self) -> dict[str, Any]:
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "module"}
        if self.kind != "module":
            # Where it is unpickled the working folder may be another.
            state["source"] = absolute_name(self.source)
            state["weights"] = self.weights and absolute_name(self.weights)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "module", None)

    def __dask_tokenize__(self) -> object:
        return type(self).__qualname__, tuple(sorted(self.__getstate__().items()))

    @property
    def n_bands(self) -> int | None:
        """Bands the network takes, as far as the recipe tells."""
        clips = (self.clip_min, self.clip_max)
        per_band = (self.bands, self.mean, self.std, self.scale, self.offset, *clips)
        known = {len(values) for values in per_band if values is not None and len(values) > 1}
        if self.bands is not None:
            return len(self.bands)
        return self.in_bands or (known.pop() if known else None)

    @property
    def name(self) -> str:
        """What the network is called: its file without folder, its factory, or its class."""
        return Path(self.source).name if self.kind in FILES else self.source

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
        ValueError
            If it does not run on `device`.
        """
        network = self._network(device)
        if self.head is not None:
            from ..wrappers import Headed

            network = Headed(network, self.head)
        if self.axes == "nhwc":
            from ..wrappers import ChannelsLast

            network = ChannelsLast(network)
        if self.tta:
            from ..wrappers import Augmented

            network = Augmented(network, self.tta)
        return network

    def _network(self, device: str) -> Network:
        if self.kind == "factory":
            module = call_factory(self.source, self.weights, self.trust)
        elif self.kind == "module":
            module = copy_module(_find(self))
        else:
            return build_file(self.source, self.kind, device, self.trust)
        # Networks saved in half or double precision run in float32, as `precision` says.
        return exported.any_batch(_evaluating(module.to(device).float()))

    def ship(self) -> ModelBytes | None:
        """Bytes of an in-memory module for other processes; None for models they can load."""
        return pack_module(self.digest, _find(self)) if self.kind == "module" else None

    def recipe(self) -> dict[str, Any]:
        """The fields that a user may set, as far as they differ from the defaults, as JSON values.

        >>> import torch
        >>> load_model(torch.nn.Conv2d(3, 2, 1), scale=1e-4).recipe()
        {'scale': [0.0001]}
        """
        defaults = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        held = {name: getattr(self, name) for name in EMBEDDABLE}
        told = {name: value for name, value in held.items() if value != defaults[name]}
        return {name: json_value(value) for name, value in told.items()}

    def save(self, path: str | Path, *, bands: int | None = None) -> Model:
        """Export the network to a ``.pt2`` that holds the recipe too.

        The batch size is free, and so are height and width in steps of the network's stride, which
        is measured; a network of one size keeps it.

        Parameters
        ----------
        path : path
            Ends in ``.pt2``.
        bands : int, optional
            Bands of the input; needed only where the model does not tell.

        Returns
        -------
        Model
            Of the file.

        Raises
        ------
        ValueError
            If the network cannot be exported, or the number of bands is not known.

        Examples
        --------
        >>> import os, tempfile, torch
        >>> model = load_model(torch.nn.Conv2d(3, 2, 3, padding=1), scale=1e-4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = model.save(os.path.join(folder, "net.pt2"))
        >>> saved.in_bands, saved.scale
        (3, (0.0001,))
        """
        from .saving import save_model

        save_model(self, Path(path), bands)
        return load_model(path)

    def to_mlm(self, path: str | Path | None = None, *, bands: int | None = None) -> dict[str, Any]:
        """A STAC item of the model (extension ``mlm``), with what is measured of it.

        Receptive-field radius, stride and halo, which MLM has no fields for, and the recipe, exact,
        are under ``daskinfer:``.

        Parameters
        ----------
        path : path, optional
            Where to write it, JSON; the network's address is then relative to it.
        bands : int, optional
            Bands of the input; needed only where the model does not tell.

        Returns
        -------
        dict

        Raises
        ------
        ValueError
            If the model is in memory only: `save` it first.

        Examples
        --------
        >>> from daskinfer.demo import demo_model
        >>> item = demo_model().to_mlm()
        >>> item["properties"]["daskinfer:halo"], item["properties"]["mlm:tasks"]
        ([48, 48], ['semantic-segmentation'])
        """
        from .saving import mlm_item

        return mlm_item(self, None if path is None else Path(path), bands)


def load_model(source: Any, *, weights: str | Path | None = None, **spec: Any) -> Model:
    """Describe a trained model and how its input and output are to be read.

    Nothing is run, and files are not kept open; the network is built by each worker.

    Parameters
    ----------
    source : torch.nn.Module, path or str
        A module, or an exported program; a file of ``torch.export`` (``.pt2``), TorchScript
        (``.pt``), ONNX (``.onnx``, extra ``onnx``) or AOTInductor (``.pt2``, with `trust`); a STAC
        MLM item (``.json``), which needs no other argument; or ``"package.module:factory"``, a
        callable without arguments that returns a module.  A `Model` is returned with `spec` applied
        to it.
    weights : path, optional
        For a factory: ``.safetensors``, a state dict or a checkpoint that holds one, also of
        Lightning.  Only tensors are read from a pickle, unless ``trust=True``.
    **spec
        Fields of `Model`: ``bands``, ``scale``, ``offset``, ``clip_min``, ``clip_max``, ``mean``,
        ``std``, ``fill``, ``output``, ``activation``, ``threshold``, ``class_names``,
        ``class_colors``, ``tile``, ``precision``, ``compile``, ``axes``, ``accelerator``,
        ``trust``, and ``tta``: "d4" or a list of `daskinfer.model.spec.SYMMETRIES`.
        What a ``.pt2`` (extra file ``daskinfer.json``) or an MLM item say are the defaults.

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
        If the file is not a model, wants to run code and is not trusted, or the spec contradicts
        itself.
    ImportError
        If a package that the format needs is not installed.

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
    if isinstance(source, (str, Path)) and is_factory(str(source)):
        return _from_factory(str(source), weights, spec)
    if weights is not None:
        raise ValueError(
            "weights= belongs to a 'package.module:factory'; load them into the module"
        )
    if isinstance(source, Model):
        return _refreshed(source).patch(**spec)
    if isinstance(source, (str, Path)):
        return _from_path(Path(source), spec)
    return _from_module(source, spec)


def _refreshed(model: Model) -> Model:
    """The model with the digest of its module as it is now: its weights may have been changed."""
    if model.module is None:
        return model
    digest = module_digest(model.module)
    keep_module(digest, model.module)
    return replace(model, digest=digest)


def _from_path(path: Path, spec: dict[str, Any]) -> Model:
    if not path.is_file():
        raise FileNotFoundError(
            f"model {str(path)!r}: no such file, and not a 'package.module:factory'"
        )
    if path.suffix.lower() == ".json":
        return _from_item(path, spec)
    return _from_file(path, {}, spec)


def _from_file(path: Path, defaults: dict[str, Any], spec: dict[str, Any]) -> Model:
    """Of a file with a network in it; what it says of itself comes after `defaults`."""
    trust = bool(spec.get("trust", False))
    kind = kind_of(path)
    facts = read_file(path, kind, trust)
    told = dict(facts.metadata)
    if "mlm" in told:
        told = recipe_of(told["mlm"], spec)
    if set(PER_BAND) & defaults.keys():
        # Half of one normalisation and half of another would be neither.
        told = {name: value for name, value in told.items() if name not in PER_BAND}
    told = {"accelerator": facts.accelerator} | told | defaults
    merged = {name: value for name, value in told.items() if name in EMBEDDABLE} | spec
    in_bands, tile = _input_of(facts, merged.get("axes", "nchw"))
    return Model(
        str(path),
        kind,
        facts.digest,
        in_bands=in_bands,
        likely_bands=facts.likely_bands,
        **tidy({"tile": tile} | merged),
    )


def _input_of(facts: Facts, axes: str) -> tuple[int | None, tuple[int, int] | None]:
    """Bands, and the tile where height and width are fixed."""
    if facts.shape is None:
        return None, None
    _, *sizes = facts.shape
    bands, height, width = sizes if axes == "nchw" else (sizes[2], *sizes[:2])
    return bands, None if height is None or width is None else (height, width)


def _from_item(path: Path, spec: dict[str, Any]) -> Model:
    item = read_item(path, spec)
    recipe = {name: value for name, value in item.recipe.items() if name in EMBEDDABLE}
    if item.factory is None:
        return _from_file(Path(item.network), recipe, spec)
    if not spec.get("trust"):
        raise ValueError(f"model {str(path)!r} names code to run, {item.factory}, and {CODE}")
    return _from_factory(item.factory, item.network, recipe | spec)


def _from_module(module: Any, spec: dict[str, Any]) -> Model:
    import torch

    if isinstance(module, torch.export.ExportedProgram):
        module = module.module()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"not a model: got {type(module).__name__}, expected a torch.nn.Module, the path of a "
            "model or of its MLM item, or 'package.module:factory'"
        )
    digest = module_digest(module)
    keep_module(digest, module)
    in_bands, tile = _input_of(Facts(digest, exported.shape_of(module)), spec.get("axes", "nchw"))
    return Model(
        type(module).__name__,
        "module",
        digest,
        in_bands=in_bands,
        likely_bands=convolved_bands(module) if is_script(module) else first_in_channels(module),
        module=module,
        **tidy({"tile": tile} | spec),
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
    module = call_factory(name, recipe.weights, recipe.trust)
    return replace(recipe, digest=module_digest(module), likely_bands=first_in_channels(module))


def _evaluating(module: torch.nn.Module) -> torch.nn.Module:
    """The module in eval mode; exported ones stay in the mode they were exported in."""
    try:
        return module.eval()
    except NotImplementedError:
        return module


def _find(model: Model) -> torch.nn.Module:
    module = model.module or find_module(model.digest)
    if module is None:
        raise RuntimeError(
            f"model {model.source!r} was given as an object and is not in this process: save it "
            "with torch.export.save, or name its factory as 'package.module:factory'"
        )
    return module
