"""Decide and check everything before work starts.

`settle` chooses halo, tile, chunk and batch for a source and a model; `plan` adds the output and
returns a `Plan`, whose repr is the dry run.  Nothing is read but metadata, and the model is run
only to measure its receptive field.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr

from . import display
from ._version import __version__
from .cog import CogSpec
from .forward import OutputFormat
from .grid import Grid
from .halo import choose_halo, receptive_field, smallest_input
from .infer import Inference
from .model import Model, load_model
from .probe import ReceptiveField
from .source import Source, source_of
from .tiling import AxisTiling, Tiling, round_up

__all__ = ["Plan", "plan", "settle"]

Size = int | tuple[int, int] | Literal["auto"]
OnError = Literal["raise", "nodata"]

_CHUNK = 2048
_BLOCK = 512
_CORE = 512
# Beyond this, a chunk that divides into whole cores and whole blocks costs more memory than running
# the tiles on its border twice costs time.
_LARGEST_CHUNK = 4096
# Input pixels of one batch: four tiles of 576 px keep a small U-Net under 1 GB on a CPU.
_BATCH_PIXELS = 4 * 576 * 576
_LARGEST_BATCH = 32


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that is decided before a run.  Made by `plan`, executed by `run`.

    Attributes
    ----------
    source : Source
        The raster, with the bands that the model takes.
    model : Model
    output : str
        Path of the COG.
    inference : Inference
        Tiling, batch size and output format.
    field : ReceptiveField
        Measured receptive field of the model.
    cog : CogSpec
        Everything about the output file but its pixels.
    on_error : {"raise", "nodata"}
        What becomes of a chunk that fails for good.
    overwrite : bool
        Whether an existing output or partial output is replaced.
    """

    source: Source
    model: Model
    output: str
    inference: Inference
    field: ReceptiveField
    cog: CogSpec
    on_error: OnError = "raise"
    overwrite: bool = False

    @property
    def tiling(self) -> Tiling:
        """Chunks and tiles."""
        return self.inference.tiling

    @property
    def memory(self) -> int:
        """Bytes that pixels and batches of one worker take, without the model's own activations."""
        threads = 4
        rows, cols = (
            side + 2 * halo for side, halo in zip(self.tiling.chunk, self.tiling.halo, strict=True)
        )
        pixel = self.inference.in_bands * np.dtype(self.inference.dtype).itemsize + 1
        result = self.inference.form.bands * np.dtype(self.inference.form.dtype).itemsize
        tile = math.prod(self.tiling.tile)
        batch = self.inference.batch_size * tile * (3 * pixel + 4 * self.inference.in_bands)
        return threads * rows * cols * (pixel + 3 * result) + batch

    def settings(self) -> dict[str, Any]:
        """What two runs must share to fill one output: plain JSON values by name."""
        model = {
            name: value for name, value in self.model.__getstate__().items() if name != "source"
        }
        return json.loads(  # type: ignore[no-any-return]
            json.dumps(
                {
                    "source": self.source.identity,
                    "bands": self.source.band_names,
                    "model": model,
                    "tiling": asdict(self.tiling),
                    "cog": {name: str(value) for name, value in asdict(self.cog).items()},
                }
            )
        )

    def __repr__(self) -> str:
        return display.text_table("Plan", self._rows())

    def _repr_html_(self) -> str:
        return display.html_table("Plan", self._rows())

    def _rows(self) -> list[display.Row]:
        tiling, form, field = self.tiling, self.inference.form, self.field
        height, width = (display.count_text(side) for side in tiling.shape)
        pixels = math.prod(tiling.shape)
        size = form.bands * np.dtype(form.dtype).itemsize * pixels
        return [
            ("source", f"{height} x {width} px, bands {', '.join(self.source.band_names)}"),
            ("model", f"{self.model.source}, {self.model.output}, {self.model.precision}"),
            ("receptive field", _field_text(field)),
            ("halo", f"{_sides(tiling.halo)} px"),
            (
                "tile",
                f"{_sides(tiling.tile)} px ({tiling.overhead:.0%} of the pixels computed twice)",
            ),
            ("chunks", f"{display.count_text(tiling.chunks)} of {_sides(tiling.chunk)} px"),
            (
                "tiles",
                f"{display.count_text(tiling.runs)} in batches of {self.inference.batch_size}",
            ),
            ("memory", f"{display.bytes_text(self.memory)} per worker and the model's activations"),
            ("output", f"{self.output}, {form.bands} x {form.dtype}, nodata {form.nodata:g}"),
            ("bytes", f"{display.bytes_text(size)} before {self.cog.compress}"),
        ]


def plan(
    source: str | os.PathLike[str] | xr.DataArray,
    model: Any,
    output: str | os.PathLike[str],
    *,
    window: tuple[int, int, int, int] | None = None,
    chunk: Size = "auto",
    tile: Size = "auto",
    halo: Size = "auto",
    batch_size: int | Literal["auto"] = "auto",
    precision: Literal["float32", "bfloat16", "float16"] | None = None,
    on_error: OnError = "raise",
    overwrite: bool = False,
    blocksize: int | Literal["auto"] = "auto",
    compress: str = "deflate",
    level: int | None = None,
) -> Plan:
    """Decide and check everything about a run without running it.

    Parameters
    ----------
    source : path, URL or DataArray
        As for `open_raster`.
    model : Model or anything that `load_model` takes
    output : path
        The COG to write; ``<output>.partial`` holds it while it grows.
    window : tuple of int, optional
        ``(row, col, height, width)`` of the source in pixels.
    chunk : int, tuple of int or "auto"
        Side in pixels, or ``(y, x)``, of what one task computes; rounded up to whole blocks.
    tile : int, tuple of int or "auto"
        Side in pixels, or ``(y, x)``, of one model input, halo included; rounded up to the stride.
    halo : int, tuple of int or "auto"
        Context pixels per side; rounded up to the stride.  "auto" is exact.
    batch_size : int or "auto"
        Tiles in one forward pass.
    precision : {"float32", "bfloat16", "float16"}, optional
        Replaces the model's own.
    on_error : {"raise", "nodata"}
        What becomes of a chunk that fails three times: stop (the output can be resumed), or leave
        it nodata and go on.
    overwrite : bool, default False
        Replace an existing output, or start a partial one again.
    blocksize : int or "auto"
        Side of the output's storage blocks, a multiple of 16.
    compress : str, default "deflate"
        Codec of the blocks.
    level : int, optional
        Effort of the codec.

    Returns
    -------
    Plan

    Raises
    ------
    FileNotFoundError
        If source, model or the output's folder does not exist.
    FileExistsError
        If the output exists and `overwrite` is not set.
    PermissionError
        If the output's folder cannot be written to.
    ValueError
        If the source is not a raster, bands are missing, or the numbers contradict each other.
    TypeError
        If `model` is not a model.

    Examples
    --------
    >>> import os, tempfile
    >>> from daskinfer.demo import demo_model, demo_path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     p = plan(demo_path(), demo_model(), os.path.join(folder, "clouds.tif"))
    >>> p.tiling.shape, p.tiling.chunks
    ((384, 768), 1)
    """
    path = check_output(os.fspath(output), source, overwrite)
    if on_error not in ("raise", "nodata"):
        raise ValueError(f"on_error must be 'raise' or 'nodata', got {on_error!r}")
    recipe = load_model(model)
    if precision is not None:
        recipe = recipe.patch(precision=precision)
    raster = pick_bands(source_of(source, window=window), recipe)
    block = _block(blocksize, chunk)
    inference, field = settle(
        raster, recipe, chunk=chunk, tile=tile, halo=halo, batch_size=batch_size, block=block
    )
    cog = cog_spec(
        raster.grid, inference.form, recipe, blocksize=block, compress=compress, level=level
    )
    return Plan(raster, recipe, path, inference, field, cog, on_error, overwrite)


def pick_bands(source: Source, model: Model) -> Source:
    """The source with the bands that the model takes, checked against what it needs."""
    source = source.select(model.bands)
    have, need = len(source.band_names), model.n_bands
    if need is not None and have != need:
        raise ValueError(
            f"the model takes {need} bands, the source has {have} ({', '.join(source.band_names)}"
            "): name the ones to use with load_model(..., bands=[...])"
        )
    return source


def settle(
    source: Source,
    model: Model,
    *,
    chunk: Size = "auto",
    tile: Size = "auto",
    halo: Size = "auto",
    batch_size: int | Literal["auto"] = "auto",
    block: int = 1,
    whole_tiles: bool = False,
) -> tuple[Inference, ReceptiveField]:
    """Choose halo, tile, chunk and batch, as of `plan`.

    Parameters
    ----------
    block : int, default 1
        Chunk sides are multiples of this.
    whole_tiles : bool, default False
        Chunk sides are multiples of the tile's core, and so large that a chunk needs nothing of its
        neighbours but the halo, whatever they cost.
    """
    field = receptive_field(model, bands=len(source.band_names))
    halos = choose_halo(field, halo)
    _check_class_names(model, field)
    fixed = model.tile or field.size
    least = smallest_input(model, field, len(source.band_names))
    axes = [
        _lattice(size, field.stride[i], halos[i], _pair(tile)[i], least[i], fixed and fixed[i])
        for i, size in enumerate(source.grid.shape)
    ]
    y, x = (
        replace(axis, chunk=_chunk(_pair(chunk)[i], axis, block, whole_tiles))
        for i, axis in enumerate(axes)
    )
    tiling = Tiling(y, x)
    inference = Inference(
        model,
        tiling,
        OutputFormat.of(model.output, field.bands),
        in_bands=len(source.band_names),
        dtype=source.dtype,
        raster_scale=source.scales,
        raster_offset=source.offsets,
        batch_size=_batch(batch_size, tiling),
    )
    return inference, field


def cog_spec(grid: Grid, form: OutputFormat, model: Model, **options: Any) -> CogSpec:
    """The output file for a grid: nothing of the source's tags, everything of the output's."""
    classes = model.output == "classes"
    names = model.class_names
    tags = [("TIFFTAG_SOFTWARE", f"daskinfer {__version__}")]
    if names and classes:
        tags.append(("CLASS_NAMES", json.dumps(names)))
    return CogSpec(
        height=grid.height,
        width=grid.width,
        count=form.bands,
        dtype=form.dtype,
        transform=None if grid.transform is None else tuple(grid.transform)[:6],
        crs=grid.crs,
        gcps=grid.gcps,
        gcps_crs=grid.gcps_crs,
        rpcs=grid.rpcs,
        nodata=form.nodata,
        descriptions=_descriptions(form, model),
        colors=tuple(_rgba(color) for color in model.class_colors or ()) if classes else (),
        tags=tuple(tags),
        resampling="mode" if classes else "average",
        **options,
    )


def _lattice(
    size: int, stride: int, halo: int, tile: Any, least: int, fixed: int | None
) -> AxisTiling:
    """The tiles of one axis; its chunks come after."""
    if fixed is not None:
        return AxisTiling(size, fixed, halo, stride, least=fixed)
    if tile == "auto":
        # The core grows with the halo, so that no more than 2.25 pixels are computed for each one.
        core = _CORE * max(1, math.ceil(4 * halo / _CORE))
        return AxisTiling(size, round_up(core, stride) + 2 * halo, halo, stride, least=least)
    return AxisTiling(size, max(least, round_up(tile, stride)), halo, stride, least=least)


def _chunk(chunk: Any, axis: AxisTiling, block: int, whole_tiles: bool) -> int:
    """Chunk side: whole blocks, and whole cores too where that stays affordable."""
    wanted = _CHUNK if chunk == "auto" else chunk
    if wanted < 1:
        raise ValueError(f"chunk must be at least 1 px, got {wanted}")
    both = math.lcm(axis.step, block)
    affordable = _LARGEST_CHUNK if chunk == "auto" else 2 * wanted
    unit = both if whole_tiles or both <= affordable else block
    near = unit * max(1, wanted // unit) if chunk == "auto" else round_up(wanted, unit)
    if axis.tiles == 1:
        return near
    # The tiles at the raster's edge, shifted inward, reach this far into their chunk.
    return max(near, round_up(axis.tile - axis.halo, unit))


def _block(blocksize: int | str, chunk: Size) -> int:
    if isinstance(blocksize, int):
        return blocksize
    smallest = min((side for side in _pair(chunk) if side != "auto"), default=_BLOCK)
    return min(_BLOCK, round_up(smallest, 16))


def _batch(batch_size: int | str, tiling: Tiling) -> int:
    if batch_size == "auto":
        fitting = _BATCH_PIXELS // math.prod(tiling.tile)
        return max(1, min(fitting, _LARGEST_BATCH, tiling.runs))
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be 'auto' or at least 1, got {batch_size!r}")
    return batch_size


def _pair(size: Any) -> tuple[Any, Any]:
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)


def check_output(path: str, source: Any, overwrite: bool) -> str:
    if Path(path).suffix.lower() not in (".tif", ".tiff"):
        raise ValueError(f"output {path!r}: daskinfer writes GeoTIFF, name it .tif")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"output folder {str(folder)!r} does not exist: make it first")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"output folder {str(folder)!r} is not writable")
    if _same_file(source, path):
        raise ValueError(f"output {path!r} is the source itself: choose another name")
    if os.path.isdir(path):
        raise ValueError(f"output {path!r} is a folder: name a .tif file in it")
    if os.path.exists(path) and not overwrite:
        raise FileExistsError(f"output {path!r} exists: pass overwrite=True to replace it")
    return path


def _same_file(source: Any, path: str) -> bool:
    named = isinstance(source, (str, os.PathLike))
    return (
        named and os.path.exists(source) and os.path.exists(path) and os.path.samefile(source, path)
    )


def _check_class_names(model: Model, field: ReceptiveField) -> None:
    if model.output != "classes":
        return
    classes = max(field.bands, 2)
    for name in ("class_names", "class_colors"):
        values = getattr(model, name)
        if values is not None and len(values) != classes:
            raise ValueError(f"{name} has {len(values)} entries, the model has {classes} classes")


def _descriptions(form: OutputFormat, model: Model) -> tuple[str, ...]:
    if model.output == "classes":
        return ("class",)
    names = model.class_names or ()
    return names if len(names) == form.bands else ()


def _rgba(color: str) -> tuple[int, int, int, int]:
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue, 255


def _sides(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} x {pair[1]}"


def _field_text(field: ReceptiveField) -> str:
    if not field.finite or not field.equivariant:
        return f"no halo is exact: {field.reason}"
    return f"radius {_sides(field.radius)} px, stride {_sides(field.stride)} px, measured"
