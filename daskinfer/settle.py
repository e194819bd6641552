"""Choose halo or overlap, tile, chunk and batch for a source and a model."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from .blockcache import cache_limit
from .device import DeviceChoice, best_device, check_device
from .errors import warn_user
from .forward import OutputFormat
from .halo import (
    DEFAULT_OVERLAP,
    accepts_bands,
    check_averaged,
    check_steady,
    choose_halo,
    receptive_field,
    smallest_input,
)
from .inference import Inference
from .model import Model
from .receptive.field import ReceptiveField
from .source import Source
from .tiling import AxisTiling, Tiling, round_up

__all__ = ["Choice", "Halo", "Size", "auto_tile", "masking_halo", "pick_bands", "settle"]

Size = int | tuple[int, int] | Literal["auto"]
Halo = Size | Literal["calibrated"]

_CHUNK = 2048
_CORE = 512
# Beyond this, a chunk that divides into whole cores and whole blocks costs more memory than running
# the tiles on its border twice costs time.
_LARGEST_CHUNK = 4096
# Of an output pixel: chunks of more are smaller, so that their results take no more memory.
_PIXEL_BYTES = 16
# Most input pixels of one batch; workers may find that less is as fast.  A GPU needs many to be
# busy.  A CPU is busy with one tile, and activations over 32 MB are mapped and zeroed by the kernel
# anew for every layer: a batch of three 608 px tiles through the demo U-Net ran at 0.93 Mpx per CPU
# second, single tiles at 1.58.
_BATCH_PIXELS = {"cuda": 32 * 640 * 640, "cpu": 640 * 640}
_LARGEST_BATCH = 32
_LARGEST_TILE = 2048


@dataclass(frozen=True)
class Choice:
    """What the user asked for; "auto" and None leave it to `settle`.

    Attributes
    ----------
    chunk, tile, halo : int, tuple of int or "auto"
        Input pixels, one number or ``(y, x)``.
    overlap : int, tuple of int or None
        Input pixels that neighbouring tiles share to be blended.
    batch_size : int or "auto"
        Tiles in one forward pass.
    block : int
        Chunks are whole blocks of this many output pixels.
    tol : float
        Seam error, in units of the scores, that ``halo="calibrated"`` may leave.
    device : str or callable
        What runs the model; see `daskinfer.device.DeviceChoice`.
    reproducible : bool
        Every batch has the same number of tiles, so that results do not depend on which tiles met.
    whole_tiles : bool
        Chunks are whole tile cores, and so large that a chunk needs nothing of its neighbours but
        `AxisTiling.reach`, whatever that costs.
    """

    chunk: Size = "auto"
    tile: Size = "auto"
    halo: Halo = "auto"
    overlap: int | tuple[int, int] | None = None
    batch_size: int | Literal["auto"] = "auto"
    block: int = 1
    tol: float = 1e-3
    device: DeviceChoice = "auto"
    reproducible: bool = False
    whole_tiles: bool = False

    def __post_init__(self) -> None:
        _check_size("chunk", self.chunk, 1, ("auto",))
        _check_size("tile", self.tile, 1, ("auto",))
        _check_size("halo", self.halo, 0, ("auto", "calibrated"))
        _check_size("overlap", self.overlap, 0, (None,))
        if self.batch_size != "auto" and not (_is_whole(self.batch_size) and self.batch_size > 0):
            raise ValueError(f"batch_size must be 'auto' or at least 1, got {self.batch_size!r}")
        if isinstance(self.tol, bool) or not isinstance(self.tol, (int, float)) or self.tol < 0:
            raise ValueError(f"tol must be a number of at least 0, got {self.tol!r}")
        check_device(self.device)
        if not isinstance(self.reproducible, bool):
            raise TypeError(f"reproducible must be True or False, got {self.reproducible!r}")


def _check_size(name: str, value: Any, least: int, words: tuple[str | None, ...]) -> None:
    """A word, a number of px, or a ``(y, x)`` pair of them."""
    if value is None or isinstance(value, str):
        fits = value in words
    else:
        sides = value if isinstance(value, (tuple, list)) else (value, value)
        fits = len(sides) == 2 and all(_is_whole(side) and side >= least for side in sides)
    if not fits:
        known = " or ".join(repr(word) for word in words)
        raise ValueError(
            f"{name} must be {known}, whole px from {least} up, or (y, x) of them, got {value!r}"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def pick_bands(source: Source, model: Model) -> Source:
    """The source with the bands that the model takes, checked against what it needs."""
    source = source.select(model.bands)
    have, need = len(source.band_names), model.n_bands
    if model.likely_bands not in (None, have) and not accepts_bands(model, have):
        need = model.likely_bands
    if need is not None and have != need:
        if have < need:
            remedy = (
                "pass one that has them; bands in files of their own are put together by "
                "open_raster(files, stack='bands'), or by {band: file} as the source"
            )
        else:
            remedy = "name the ones to use with load_model(..., bands=[...])"
        raise ValueError(
            f"the model takes {need} bands, the source has {have} "
            f"({', '.join(source.band_names)}): {remedy}{getattr(source, 'alpha_hint', '')}"
        )
    _check_scaling(source, model)
    return source


def _check_scaling(source: Source, model: Model) -> None:
    """The model's own scale takes the place of the raster's, which not every raster has a use for.

    Raises
    ------
    ValueError
        Where it would be applied on top of it.
    """
    if model.scale is None or set(model.scale) == {1.0}:
        return
    if getattr(source, "physical", False):
        raise ValueError(
            "the raster comes in physical values, as its files are scaled differently; the model's "
            f"scale {model.scale} would come on top: leave scale= and offset= out of load_model"
        )
    if any(source.offsets) and model.offset is None:
        warn_user(
            f"the model's scale {model.scale} replaces the raster's scale {source.scales} and "
            f"offset {source.offsets}, so that no offset is applied: leave scale= out of "
            "load_model, or pass offset= too"
        )


def settle(
    source: Source, model: Model, choice: Choice, *, quiet: bool = False
) -> tuple[Inference, ReceptiveField]:
    """Choose everything that is left open, and check it.

    Parameters
    ----------
    source : Source
        With the model's bands.
    model : Model
    choice : Choice
        Its halo is "auto" or a number; see `daskinfer.seam.calibrate`.
    quiet : bool, default False
        Leave out the warnings: the caller measures what they are about.

    Raises
    ------
    ValueError
        If the numbers contradict each other or the model.

    Warns
    -----
    UserWarning
        If the result will not be exact: a halo below the radius, or a model without an exact one.
    """
    bands = len(source.band_names)
    if model.tta and not quiet:
        # First, as means of ids take long to measure.
        check_averaged(model.patch(tta=()), bands, "leave tta= out")
    field = receptive_field(model, bands=bands)
    _check_classes(model, field)
    scale = Fraction(field.scale).limit_denominator(64)
    if any((margin * scale).denominator != 1 for margin in field.margin):
        raise ValueError(
            f"the model leaves out {field.margin} px and has output scale {scale}: its pixels lie "
            "off the input's grid"
        )
    fixed = model.tile or field.size
    least = smallest_input(model, field, bands)
    check_steady(model, field, bands, least)
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore", UserWarning)
        halo, overlap = _context(field, choice, fixed)
    if any(overlap) and not (quiet or model.tta):
        cut = "pass halo= to cut tiles" if choice.overlap is None else "leave overlap= out"
        check_averaged(model, bands, cut)
    axes = [
        _lattice(size, field.stride[i], halo[i], overlap[i], _pair(choice.tile)[i], least[i], fixed)
        for i, size in enumerate(source.grid.shape)
    ]
    form = OutputFormat.for_model(model, field.bands)
    share = _affordable_share(form)
    tiling = _chunked(axes, choice.chunk, choice, scale, share)
    if _pair(choice.chunk)[0] == "auto" and _strips_too_many(source, tiling):
        # Of fewer rows: the strips of one row of chunks are shared by all of its chunks then.
        chunk = axes[0].step, _pair(choice.chunk)[1]
        tiling = _chunked(axes, chunk, choice, scale, share)
    inference = Inference(
        model,
        tiling,
        form,
        in_bands=bands,
        dtype=source.dtype,
        raster_scale=source.scales,
        raster_offset=source.offsets,
        batch_size=_batch(choice, tiling, model.accelerator),
        channels=field.bands,
        scale=scale,
        margin=field.margin,
        domain=field.domain,
        device=choice.device,
        # A size that is found by timing differs from run to run.
        tuned=choice.batch_size == "auto" and not choice.reproducible,
        fixed=choice.reproducible,
    )
    return inference, field


def masking_halo(inference: Inference, field: ReceptiveField, wanted: bool) -> Inference:
    """The inference, if wanted with everything masked that nodata has an influence on.

    Raises
    ------
    TypeError
        If `wanted` is not a bool.
    ValueError
        If that has no end, or the halo is too small to see it.
    """
    if not isinstance(wanted, bool):
        raise TypeError(f"mask_halo must be True or False, got {wanted!r}")
    if not wanted:
        return inference
    if not field.exact or inference.blended:
        reason = field.reason or "its tiles are blended"
        raise ValueError(
            f"mask_halo=True needs a model whose receptive field has an end and a halo: {reason}"
        )
    for axis, radius in zip((inference.tiling.y, inference.tiling.x), field.radius, strict=True):
        if axis.tiles > 1 and axis.halo < radius:
            raise ValueError(
                f"mask_halo=True needs a halo of at least the radius, {radius} px, got "
                f"{axis.halo}: leave halo= out"
            )
    return replace(inference, mask_halo=field.radius)


def _context(
    field: ReceptiveField, choice: Choice, fixed: tuple[int, int] | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Halo and overlap ``(y, x)``, of which one is 0."""
    none = (0, 0)
    if choice.overlap is not None:
        if choice.halo != "auto":
            raise ValueError("pass halo= (exact, cut) or overlap= (blended), not both")
        y, x = _pair(choice.overlap)
        return none, (round_up(y, field.stride[0]), round_up(x, field.stride[1]))
    if field.exact or choice.halo != "auto":
        if choice.halo == "calibrated":
            raise TypeError("a calibrated halo is measured first, by daskinfer.seam.calibrate")
        halo = choose_halo(field, choice.halo)
        if not field.exact:
            warn_user(f"no halo is exact for this model ({field.reason}): leave halo= out to blend")
        return halo, none
    room = fixed or (2 * DEFAULT_OVERLAP, 2 * DEFAULT_OVERLAP)
    y, x = (
        round_up(min(DEFAULT_OVERLAP, side // 2), stride)
        for side, stride in zip(room, field.stride, strict=True)
    )
    warn_user(
        f"no halo is exact for this model ({field.reason}): tiles are blended over "
        f"{max(y, x)} px instead; measure the seams with seam_error()"
    )
    return none, (y, x)


def _lattice(
    size: int,
    stride: int,
    halo: int,
    overlap: int,
    tile: Any,
    least: int,
    fixed: tuple[int, int] | None,
) -> AxisTiling:
    """The tiles of one axis; its chunks come after."""
    if fixed is not None:
        side = least
    elif tile != "auto":
        side = max(least, round_up(tile, stride))
    else:
        side = max(least, auto_tile(2 * halo + overlap, stride))
    return AxisTiling(size, side, halo, stride, least=least, overlap=overlap)


def auto_tile(shared: int, stride: int) -> int:
    """Side of a tile that shares so many pixels with its neighbours, both sides together.

    The core grows with the context, so that at most 2.25 pixels are computed for each one, as long
    as the tile stays at a size that devices hold.
    """
    growing = _CORE * max(1, math.ceil(2 * shared / _CORE))
    core = min(growing, max(_CORE, _LARGEST_TILE - shared))
    return round_up(core, stride) + shared


def _affordable_share(form: OutputFormat) -> float:
    """Side of chunks as a part of what it is else: embeddings have many bytes to a pixel."""
    return min(1.0, math.sqrt(_PIXEL_BYTES / (form.bands * np.dtype(form.dtype).itemsize)))


def _chunked(
    axes: list[AxisTiling], chunk: Any, choice: Choice, scale: Fraction, share: float
) -> Tiling:
    """The tiling with its chunks."""
    y, x = (
        replace(axis, chunk=_chunk(side, axis, choice, scale, share))
        for side, axis in zip(_pair(chunk), axes, strict=True)
    )
    return Tiling(y, x)


def _strips_too_many(source: Source, tiling: Tiling) -> bool:
    """Whether a file is stored in strips of which the cache cannot hold those of a chunk."""
    if not source.striped:
        return False
    return source.cache_bytes(tiling.chunk_at((0, 0)).read) > cache_limit()


def _chunk(chunk: Any, axis: AxisTiling, choice: Choice, scale: Fraction, share: float) -> int:
    """Chunk side: whole blocks, and whole cores too where that stays affordable."""
    wanted = int(share * _CHUNK / max(scale, Fraction(1))) if chunk == "auto" else chunk
    # The smallest number of input pixels that are whole blocks of output pixels.
    block = (Fraction(choice.block) / scale).numerator
    both = math.lcm(axis.step, block)
    affordable = share * _LARGEST_CHUNK if chunk == "auto" else 2 * wanted
    unit = both if choice.whole_tiles or both <= affordable else block
    near = unit * max(1, wanted // unit) if chunk == "auto" else round_up(wanted, unit)
    if axis.tiles == 1:
        return near
    # The tiles at the raster's edge, shifted inward, reach this far into their chunk.
    return max(near, round_up(axis.tile - axis.halo, unit))


def _batch(choice: Choice, tiling: Tiling, only: str | None) -> int:
    if choice.batch_size == "auto":
        kind = only or best_device(choice.device).partition(":")[0]
        pixels = _BATCH_PIXELS.get(kind, _BATCH_PIXELS["cuda"])
        fitting = max(1, min(pixels // math.prod(tiling.tile), _LARGEST_BATCH, tiling.runs))
        # Of so many batches, no larger than they have to be: 21 tiles are 2 x 11, not 20 and 1.
        return -(-tiling.runs // -(-tiling.runs // fitting))
    # More slots than there are tiles would only take memory.
    return int(min(choice.batch_size, tiling.runs))


def _pair(size: Any) -> tuple[Any, Any]:
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)


def _check_classes(model: Model, field: ReceptiveField) -> None:
    if field.bands == 1 and model.activation == "softmax":
        raise ValueError(
            "the model gives one score per pixel, of which softmax makes 1 everywhere: pass "
            "activation='sigmoid'"
        )
    if model.output != "classes":
        _check_names(model, field.bands)
        return
    if field.bands > 1 and model.threshold is not None:
        raise ValueError(
            f"threshold is for one score per pixel, the model gives {field.bands}, of which the "
            "highest is the class: drop threshold, or pass output='probabilities'"
        )
    if field.bands == 1 and model.activation is None and model.threshold is None:
        raise ValueError(
            "the model gives one score per pixel, which are not classes yet: pass "
            "activation='sigmoid' (classes from logits), threshold= (from the scores as they are), "
            "or output='values' or 'probabilities'"
        )
    classes = max(field.bands, 2)
    for name in ("class_names", "class_colors"):
        values = getattr(model, name)
        if values is not None and len(values) != classes:
            raise ValueError(f"{name} has {len(values)} entries, the model has {classes} classes")


def _check_names(model: Model, channels: int) -> None:
    """Names of channels; one channel may have both names of what it tells apart."""
    names = model.class_names
    if names is not None and len(names) != channels and (channels, len(names)) != (1, 2):
        raise ValueError(f"class_names has {len(names)} entries, the model gives {channels} bands")
