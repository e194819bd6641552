"""Decide and check everything before work starts.

`plan` lets `daskinfer.settle` choose halo, tile, chunk and batch, adds the output, and returns a
`Plan`, whose repr is the dry run.  Nothing is read but metadata, and the model is run
only to measure its receptive field.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from . import display
from .cog import CogSpec
from .device import DeviceChoice
from .draft import Draft, is_split
from .errors import warn_user
from .inference import Inference
from .inputs.aoi import AreaOfInterest
from .inputs.protocol import served_state
from .memory import expected_memory
from .model import Model, load_model
from .objectstore import check_writable, is_object, local_path
from .origins import check_origins
from .outputspec import cog_spec
from .raster import layout_warning
from .receptive.field import ReceptiveField
from .seam import SeamError, calibrate
from .settle import Choice, Halo, Size, masking_halo, pick_bands, settle
from .source import Source, source_of
from .splitting.choose import block_side, chunk_in_files, chunk_of_files, fits, split_side
from .splitting.pieces import Places, auto_side, check_folder
from .stats import with_statistics
from .tiling import Tiling
from .zarrwork import ZarrDraft, check_store, is_zarr_output

__all__ = [
    "Plan",
    "check_layout",
    "check_output",
    "field_text",
    "plan",
    "replaced",
]

OnError = Literal["raise", "nodata"]

# Of one file: 1 000 000 x 1 000 000 px in blocks of 512 px, which GDAL opened in 15 ms.
_MANY_BLOCKS = 1 << 22


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
    seam : SeamError or None
        What was measured for a calibrated halo.
    on_error : {"raise", "nodata"}
        What becomes of a chunk that fails for good.
    overwrite : bool
        Whether an existing output or partial output is replaced.
    layout : {"strict", "append"}
        Order of the blocks in the output.
    split : int or None
        Side in pixels of the files of an output that is a grid of them.
    """

    source: Source
    model: Model
    output: str
    inference: Inference
    field: ReceptiveField
    cog: CogSpec
    seam: SeamError | None = None
    on_error: OnError = "raise"
    overwrite: bool = False
    layout: Literal["strict", "append"] = "strict"
    split: int | None = None

    @property
    def draft(self) -> Draft | ZarrDraft:
        """The file or files to write."""
        if is_zarr_output(self.output):
            return ZarrDraft(self.cog, self.inference.chunk)
        return Draft(self.cog, self.inference.chunk, self.split, self.layout)

    @property
    def tiling(self) -> Tiling:
        """Chunks and tiles."""
        return self.inference.tiling

    @property
    def shape(self) -> tuple[int, int]:
        """``(height, width)`` of the output in pixels."""
        return self.cog.shapes[0]

    @property
    def memory(self) -> int:
        """Bytes that one worker process takes, without what the model's own layers need."""
        return expected_memory(self.source, self.inference).total

    def settings(self) -> dict[str, Any]:
        """What two runs must share to fill one output: plain JSON values by name."""
        model = {
            name: value for name, value in self.model.__getstate__().items() if name != "source"
        }
        return json.loads(  # type: ignore[no-any-return]
            json.dumps(
                {
                    "source": self.source.identity,
                    "served": served_state(self.source),
                    "bands": self.source.band_names,
                    "model": model,
                    "tiling": asdict(self.tiling),
                    "cog": {name: str(value) for name, value in asdict(self.cog).items()},
                    "split": self.split,
                    "mask_halo": self.inference.mask_halo,
                    "aoi": None if self.inference.area is None else self.inference.area.digest,
                }
            )
        )

    def __repr__(self) -> str:
        return display.text_table("Plan", self._rows())

    def _repr_html_(self) -> str:
        return display.html_table("Plan", self._rows())

    def _rows(self) -> list[display.Row]:
        tiling, form, field = self.tiling, self.inference.form, self.field
        chunk = tiling.chunk_at((0, 0)).window.shape
        height, width = (display.count_text(side) for side in tiling.shape)
        size = form.bands * np.dtype(form.dtype).itemsize * math.prod(self.cog.shapes[0])
        return [
            ("source", f"{height} x {width} px, bands {', '.join(self.source.band_names)}"),
            *self.source.notes,
            ("model", f"{self.model.name}, {self.model.output}, {self.model.precision}"),
            ("receptive field", field_text(field)),
            _context_row(self.inference, self.seam),
            ("tile", f"{display.sides_text(tiling.tile)} px"),
            ("overhead", f"{tiling.overhead:.0%} more pixels computed than the raster has"),
            ("chunks", f"{display.count_text(tiling.chunks)} of {display.sides_text(chunk)} px"),
            *self._area_row(),
            (
                "tiles",
                f"{display.count_text(tiling.runs)} in batches of "
                f"{'up to ' if self.inference.tuned else ''}{self.inference.batch_size}",
            ),
            ("memory", f"{display.bytes_text(self.memory)} per worker and the model's activations"),
            ("output", f"{self.output}, {form.bands} x {form.dtype}, nodata {form.nodata:g}"),
            ("bytes", f"{display.bytes_text(size)} before {self.cog.compress}"),
            *self._files_row(),
        ]

    def outside(self) -> tuple[int, ...]:
        """Numbers of the chunks that have no pixel in the area of interest."""
        area = self.inference.area
        if area is None:
            return ()
        return tuple(int(number) for number in np.flatnonzero(~area.chunks(self.tiling)))

    def _area_row(self) -> list[display.Row]:
        if self.inference.area is None:
            return []
        count = self.tiling.chunks - len(self.outside())
        height, width = self.inference.area.pixels.shape
        text = f"{display.count_text(count)} chunks, within {height} x {width} px"
        return [("area", text)]

    def _files_row(self) -> list[display.Row]:
        pieces = self.draft.pieces
        if pieces is None:
            return []
        rows, cols = pieces.grid
        folder = Places(self.output, pieces.grid).folder.name
        return [("files", f"{rows} x {cols} of {pieces.side} px, in {folder}")]


def plan(
    source: Any,
    model: Any,
    output: str | os.PathLike[str],
    *,
    window: tuple[int, int, int, int] | None = None,
    bounds: Sequence[float] | None = None,
    bounds_crs: Any = None,
    chunk: Size = "auto",
    tile: Size = "auto",
    halo: Halo = "auto",
    tol: float = 1e-3,
    overlap: int | tuple[int, int] | None = None,
    batch_size: int | Literal["auto"] = "auto",
    precision: Literal["float32", "bfloat16", "float16"] | None = None,
    tta: str | Sequence[str] | None = None,
    statistics: Literal["global"] | None = None,
    aoi: Any = None,
    mask_halo: bool = False,
    device: DeviceChoice = "auto",
    compile: bool | None = None,
    reproducible: bool = False,
    on_error: OnError = "raise",
    overwrite: bool = False,
    blocksize: int | Literal["auto"] = "auto",
    compress: str = "auto",
    level: int | None = None,
    predictor: int | Literal["auto"] = "auto",
    max_z_error: float = 0.0,
    interleave: Literal["auto", "pixel", "band"] = "auto",
    sparse: bool = False,
    layout: Literal["strict", "append"] = "strict",
    split: int | Literal["auto"] = "auto",
) -> Plan:
    """Decide and check everything about a run without running it.

    Parameters
    ----------
    source : path, URL, list of paths, mapping or DataArray
        As for `open_raster`.
    model : Model or anything that `load_model` takes
    output : path or URL
        The COG to write; ``<output>.partial`` holds it while it grows, and beside a large one
        ``<output>.partial.ahead`` what is in its final order already.  An object
        (``s3://bucket/name.tif``, extra ``s3``) grows in Dask's ``temporary-directory``, on a file
        system that all workers share, and appears when it is complete.
    window, bounds, bounds_crs : optional
        Part of the source, in pixels or in coordinates, as for `open_raster`: the model sees
        nothing beyond it, as if the raster ended there.  For a part with the pixels of a run over
        all of the raster, as of a map made piece by piece, pass it as `aoi`.
    chunk : int, tuple of int or "auto"
        Side in pixels of the source, or ``(y, x)``, of what one task computes; rounded up to whole
        blocks of the output and, unless that makes it much larger, to whole tiles without their
        halo.
    tile : int, tuple of int or "auto"
        Side in pixels, or ``(y, x)``, of one model input, halo included; rounded up to the stride.
    halo : int, tuple of int, "auto" or "calibrated"
        Context pixels per side; rounded up to the stride.  "auto" is exact where the model allows.
        "calibrated" is the smallest whose measured difference to the exact result, on sample
        windows of this raster, is at most `tol`.
    tol : float, default 1e-3
        For a calibrated halo, in units of the model's scores.
    overlap : int or tuple of int, optional
        Blend tiles that share this many pixels, instead of a halo; the default for models for which
        no halo is exact.
    batch_size : int or "auto"
        Tiles in one forward pass, at most; "auto" lets each worker find, at its start, the size
        beyond which its device gets no faster.
    precision : {"float32", "bfloat16", "float16"}, optional
        Replaces the model's own.  float32 is what it says on CUDA devices too, without TF32;
        "bfloat16" is the fast one there.
    tta : "d4" or sequence of str, optional
        Test-time augmentation; replaces the model's own, see `load_model`.
    aoi : path, GeoJSON, geometry, GeoDataFrame or bounds, optional
        Polygons; output pixels whose centre lies outside are nodata, and what is outside alone is
        neither read nor run.  Pixels inside are those of a run over all of the raster.  A GeoJSON
        file or mapping is in longitude and latitude unless it says otherwise; bounds ``(left,
        bottom, right, top)`` and geometries without a CRS are in the raster's.  Other files than
        GeoJSON need the extra ``vector``.
    statistics : {None, "global"}
        "global": normalise with mean and std of this raster, taken once for the run.
    mask_halo : bool, default False
        Nodata also wherever the model looks at nodata, which it sees filled: within its measured
        radius.  For models with a halo.
    device : str or callable, default "auto"
        "cpu", "cuda", "cuda:1"; "auto" is the first CUDA device of each worker, else its CPU.  Or
        what makes a `daskinfer.device.Device` of an `Inference`, to run the model by other means.
    compile : bool, optional
        Run the network through ``torch.compile``; replaces the model's own.
    reproducible : bool, default False
        Run every batch in full size.  Two runs of the same plan are then equal bit for bit, however
        many workers they had; else sums may differ in the last digits with the batch size.
    on_error : {"raise", "nodata"}
        What becomes of a chunk that fails three times: stop (the output can be resumed), or leave
        it nodata and go on.
    overwrite : bool, default False
        Replace an existing output, or start a partial one again.  The old output stays until the
        new one is complete; of one in several files the VRT goes before the first is replaced.
    blocksize : int or "auto"
        Side of the output's storage blocks, a multiple of 16.
    compress : str, default "auto"
        Codec of the blocks; "auto" is deflate for classes and zstd for floats.
    level, predictor, max_z_error, interleave, sparse
        Of the codec and of the file, as for `daskinfer.cog.CogSpec`; ``interleave="auto"`` is
        "pixel" up to 16 bands.
    layout : {"strict", "append"}
        "strict" copies the blocks into the order of GDAL's own COGs at the end, which needs the
        space of the file twice for a moment; "append" leaves them in the order in which they came.
    split : int or "auto"
        Of an output named ``.vrt``, which becomes a grid of COGs in the folder ``<name>_files`` and
        a VRT that shows them as one raster: side of each file in pixels, a multiple of the chunk
        side or a part of it.  "auto" is about 131 072 px.  An output named ``.tif`` is one file,
        whatever its size; it warns where that has more than 4 194 304 blocks (1 000 000 x
        1 000 000 px), whose index of 64 MB is what some readers load first.

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
        If the source is not a raster, the output would replace a file of it, bands are missing, or
        the numbers contradict each other.
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
    if not isinstance(overwrite, bool):
        raise TypeError(f"overwrite must be True or False, got {overwrite!r}")
    path = check_output(os.fspath(output), source, overwrite)
    if on_error not in ("raise", "nodata"):
        raise ValueError(f"on_error must be 'raise' or 'nodata', got {on_error!r}")
    check_layout(layout)
    recipe = replaced(load_model(model), precision=precision, tta=tta, compile=compile)
    if recipe.output == "objects":
        raise ValueError("a model of objects makes no raster: pass it to detect()")
    raster = pick_bands(
        source_of(source, window=window, bounds=bounds, bounds_crs=bounds_crs), recipe
    )
    check_origins(path, raster)
    recipe = with_statistics(raster, recipe, statistics)
    side = split_side(path, split)
    block = block_side(blocksize, chunk, side)
    asked = Choice(chunk, tile, halo, overlap, batch_size, block, tol, device, reproducible)
    inference, field, seam = _settled(raster, recipe, asked, side)
    inference = masking_halo(inference, field, mask_halo)
    if aoi is not None:
        inference = replace(inference, area=AreaOfInterest.of(aoi, raster.grid))
    note = layout_warning(raster, inference.tiling.chunk_at((0, 0)).read)
    if note:
        warn_user(note)
    cog = cog_spec(
        raster.grid.scaled(inference.scale),
        inference.form,
        recipe,
        blocksize=block,
        compress=compress.lower(),
        level=level,
        predictor=predictor,
        max_z_error=max_z_error,
        interleave=interleave,
        sparse=sparse,
        failures=True,
    )
    if side == "auto":
        side = auto_side(inference.chunk)
    made = Plan(
        raster, recipe, path, inference, field, cog, seam, on_error, overwrite, layout, side
    )
    _check_files(made)
    return made


def _settled(
    raster: Source, recipe: Model, asked: Choice, side: int | Literal["auto"] | None
) -> tuple[Inference, ReceptiveField, SeamError | None]:
    """Settle what is left open, with chunks of which files of so many pixels can be made."""
    choice, seam = calibrate(raster, recipe, asked)
    inference, field = settle(raster, recipe, choice, quiet=seam is not None)
    if isinstance(side, int) and choice.chunk == "auto":
        for fitting in (chunk_in_files, chunk_of_files):
            if not fits(side, inference):
                fitted = replace(choice, chunk=fitting(side, inference, choice.block))
                inference, field = settle(raster, recipe, fitted, quiet=True)
    return inference, field, seam


def replaced(model: Model, **spec: Any) -> Model:
    """The model with those fields of `spec` that are given."""
    return model.patch(**{name: value for name, value in spec.items() if value is not None})


def check_layout(layout: str) -> None:
    """Refuse a layout that there is not."""
    if layout not in ("strict", "append"):
        raise ValueError(f"layout must be 'strict' or 'append', got {layout!r}")


def _check_files(plan: Plan) -> None:
    """Refuse files that cannot be, and warn of one that readers will find large."""
    draft, blocks = plan.draft, math.prod(plan.cog.grid(0))
    if draft.pieces is not None:
        draft.pieces.spec_of((0, 0))
    elif blocks > _MANY_BLOCKS:
        warn_user(
            f"one file of {blocks} blocks has an index of {12 * blocks / 1e6:.0f} MB, which some "
            "readers load first: name the output .vrt to split it, or pass a larger blocksize"
        )


def check_output(path: str, source: Any, overwrite: bool) -> str:
    """The output's path, if it can be written; errors as of `plan`."""
    if is_zarr_output(path):
        if is_object(path):
            raise ValueError(f"output {path!r}: a Zarr store is written to a folder, not an object")
        check_store(path, overwrite)
    elif is_split(path):
        if is_object(path):
            raise ValueError(
                f"output {path!r}: a folder of files cannot be sent to an object store"
            )
        check_folder(path, overwrite)
    elif Path(path).suffix.lower() not in (".tif", ".tiff"):
        raise ValueError(
            f"output {path!r}: daskinfer writes GeoTIFF, name it .tif (or .zarr, for a Zarr store)"
        )
    if is_object(path):
        check_origins(path, source)
        check_writable(path, overwrite)
        # Where it grows; what an earlier run left there is not the output.
        check_output(local_path(path), source, overwrite=True)
        return path
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"output folder {str(folder)!r} does not exist: make it first")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"output folder {str(folder)!r} is not writable")
    check_origins(path, source)
    if os.path.isdir(path) and not is_zarr_output(path):
        raise ValueError(f"output {path!r} is a folder: name a .tif file in it")
    if os.path.exists(path) and not overwrite:
        raise FileExistsError(f"output {path!r} exists: pass overwrite=True to replace it")
    return path


def _context_row(inference: Inference, seam: SeamError | None) -> display.Row:
    if seam is not None:
        size = display.sides_text(seam.halo)
        return "halo", f"{size} px, calibrated: differs by {seam.maximum:.1g} at most"
    if not inference.blended:
        masked = "" if inference.mask_halo is None else ", nodata masked as far as it is seen"
        return "halo", f"{display.sides_text(inference.tiling.halo)} px{masked}"
    overlap = inference.tiling.y.overlap, inference.tiling.x.overlap
    return "overlap", f"{display.sides_text(overlap)} px, blended"


def field_text(field: ReceptiveField) -> str:
    """What was measured, in one line."""
    if not field.exact:
        return f"no halo is exact: {field.reason}"
    radius, stride = display.sides_text(field.radius), display.sides_text(field.stride)
    return f"radius {radius} px, stride {stride} px, measured"
