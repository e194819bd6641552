"""The lazy way in: an xarray of predictions that computes what is asked of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np
import xarray as xr

from .cog import CogSpec
from .device import DeviceChoice
from .forward import OutputFormat
from .grid import grid_of
from .infer import infer_chunk, using_actor
from .inference import Inference
from .inputs.aoi import AreaOfInterest
from .model import Model, ModelBytes, load_model
from .objectstore import is_object, local_path
from .outputspec import cog_spec
from .pixels import Array, Mask, Pixels
from .planner import check_layout, check_output, replaced
from .seam import calibrate
from .settle import Choice, Halo, Size, masking_halo, pick_bands, settle
from .source import ArraySource
from .splitting.choose import block_side, split_side
from .stats import with_statistics
from .store import Storing, store_cog
from .tiling import Window
from .zarrwork import is_zarr_output

__all__ = ["predict", "write_cog"]

_FILE_OPTIONS = ("level", "predictor", "max_z_error", "interleave", "sparse", "statistics")
# What TIFF, or its readers, do not hold as it is.
_WRITTEN = {"bool": "uint8", "float16": "float32"}


def predict(
    scene: xr.DataArray,
    model: Any,
    *,
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
) -> xr.DataArray:
    """Predict lazily over a raster that fits a task graph; see `run` for anything larger.

    The halo is exchanged by ``dask.array.map_overlap``; each chunk is cut into tiles that go
    through the model actor of the process that computes it.

    Parameters
    ----------
    scene : DataArray
        Dimensions ``(band, y, x)``, from `open_raster` or computed; lazy or in memory.
    model : Model or anything that `load_model` takes
    chunk, tile, halo, tol, overlap, batch_size, precision, tta, statistics, aoi, mask_halo, device
    compile, reproducible
        As for `plan`; chunks are rounded up to whole tile cores.

    Returns
    -------
    DataArray
        Dimensions ``(band, y, x)``, lazy, on the grid of `scene`; equal to what `run` writes.

    Raises
    ------
    ValueError, TypeError
        As of `plan`.

    Examples
    --------
    >>> from daskinfer.demo import demo_model, demo_scene
    >>> clouds = predict(demo_scene(), demo_model())
    >>> clouds.shape, clouds.dtype
    ((1, 384, 768), dtype('uint8'))
    >>> int(clouds.isel(y=slice(0, 64), x=slice(0, 64)).compute().max()) <= 2
    True
    """
    recipe = replaced(load_model(model), precision=precision, tta=tta, compile=compile)
    source = pick_bands(ArraySource(scene), recipe)
    if not isinstance(source, ArraySource):
        raise TypeError(f"expected an ArraySource, got {type(source).__name__}")
    recipe = with_statistics(source, recipe, statistics)
    asked = Choice(
        chunk,
        tile,
        halo,
        overlap,
        batch_size,
        tol=tol,
        device=device,
        reproducible=reproducible,
        whole_tiles=True,
    )
    choice, seam = calibrate(source, recipe, asked)
    inference, field = settle(source, recipe, choice, quiet=seam is not None)
    inference = masking_halo(inference, field, mask_halo)
    if aoi is not None:
        inference = replace(inference, area=AreaOfInterest.of(aoi, source.grid))
    return _as_dataarray(_overlapped(source, inference), source, inference)


def write_cog(
    prediction: xr.DataArray,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    blocksize: int | Literal["auto"] = "auto",
    compress: str = "auto",
    compute: bool = True,
    layout: Literal["strict", "append"] = "strict",
    split: int | Literal["auto"] = "auto",
    **options: Any,
) -> Storing | None:
    """Write a DataArray block by block as a Cloud Optimized GeoTIFF.

    Chunks are computed, encoded and appended by Dask's current scheduler, in any order; the whole
    array is never in memory, and nothing of it passes through the client.

    Parameters
    ----------
    prediction : DataArray
        Dimensions ``(band, y, x)``, from `predict` or any other with a grid.
    path : path or URL
        The file to write, on a file system that all workers share; or a ``.vrt`` of several files;
        or an object (``s3://bucket/name.tif``), which grows in Dask's ``temporary-directory``.
    overwrite : bool, default False
        Replace an existing file or object.
    blocksize, compress
        As for `plan`.
    compute : bool, default True
        False: return a Dask `Delayed` that writes the file when it is computed.
    layout, split
        As for `plan`.
    **options
        ``level``, ``predictor``, ``max_z_error``, ``interleave``, ``sparse`` and ``statistics`` of
        `daskinfer.cog.CogSpec`.

    Returns
    -------
    Storing or None
        With ``compute=False``; its result is the path or URL.

    Raises
    ------
    FileNotFoundError, FileExistsError, PermissionError, ValueError, ModuleNotFoundError
        As of `plan`.
    TypeError
        If an option is unknown.

    Notes
    -----
    Truth values are written as uint8, float16 as float32: TIFF readers know no others.

    Examples
    --------
    >>> import os, tempfile, rasterio
    >>> from daskinfer.demo import demo_model, demo_scene
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "clouds.tif")
    ...     write_cog(predict(demo_scene(), demo_model()), path)
    ...     with rasterio.open(path) as dataset:
    ...         dataset.nodata, dataset.overviews(1)
    (255.0, [2])
    """
    name = os.fspath(path)
    url = name if is_object(name) else None
    check_output(name, prediction, overwrite)
    if is_zarr_output(name):
        raise ValueError(
            f"output {name!r}: write_cog writes GeoTIFF, name it .tif; daskinfer.run writes Zarr "
            "stores, and so does prediction.to_zarr"
        )
    check_layout(layout)
    side = split_side(name, split)
    output = name if url is None else local_path(url)
    source = ArraySource(prediction)
    unknown = sorted(set(options) - set(_FILE_OPTIONS))
    if unknown:
        known = ", ".join(_FILE_OPTIONS)
        raise TypeError(f"unknown option {unknown[0]!r} of a file; known: {known}")
    block = block_side(blocksize, "auto", side)
    spec = _spec_of(prediction, source, blocksize=block, compress=compress, **options)
    data = source.data.astype(spec.dtype)
    storing = store_cog(data, spec, output, url, layout=layout, split=side)
    if not compute:
        return storing
    storing.compute()
    return None


def _overlapped(source: ArraySource, inference: Inference) -> da.Array:
    """The prediction as a dask array ``(band, y, x)``."""
    tiling, form = inference.tiling, inference.form
    axes = (tiling.y, tiling.x)
    chunks = tuple(tuple(axis.chunk_span(k).size for k in range(axis.chunks)) for axis in axes)
    data = source.data.rechunk({0: -1, 1: chunks[0], 2: chunks[1]})
    valid = source.valid
    arrays = [data]
    if valid is not None:
        arrays.append(valid.rechunk({0: chunks[0], 1: chunks[1]})[None])
    depth = {0: 0, 1: tiling.y.reach, 2: tiling.x.reach}
    return da.map_overlap(
        _infer_block,
        *arrays,
        depth=[depth] * len(arrays),
        # Nothing beside the raster's edge: whatever else is put there, the model's own padding in
        # a whole-image run is not that.
        boundary="none",
        trim=False,
        # The chunks are ours: dask would move their borders off the tile lattice.
        allow_rechunk=False,
        align_arrays=False,
        dtype=form.dtype,
        meta=np.empty((0, 0, 0), form.dtype),
        chunks=((form.bands,), *_output_chunks(inference)),
        inference=inference,
        shipped=_shipped(inference.model),
    )


def _shipped(model: Model) -> Any:
    """An in-memory model as one node of the graph, whatever the number of chunks."""
    payload = model.ship()
    return (
        None
        if payload is None
        else dask.delayed(payload, name=f"model-{model.digest}", traverse=False)
    )


def _infer_block(
    data: Array,
    valid: Array | None = None,
    *,
    inference: Inference,
    shipped: ModelBytes | None,
    block_id: tuple[int, int, int],
) -> Array:
    """One chunk with its halo, as `map_overlap` hands it over."""
    if shipped is not None:
        shipped.receive()
    _, i, j = block_id

    def read(window: Window) -> Pixels:
        origin = [
            max(0, axis.chunk_span(k).start - axis.reach[0])
            for axis, k in ((inference.tiling.y, i), (inference.tiling.x, j))
        ]
        rows, cols = window.slices((origin[0], origin[1]))
        mask: Mask | None = None if valid is None else valid[0, rows, cols]
        return Pixels(data[:, rows, cols], None if mask is None or mask.all() else mask)

    with using_actor(inference) as actor:
        return infer_chunk(inference, (i, j), read, actor).data


def _output_chunks(inference: Inference) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows, cols = inference.tiling.grid
    return (
        tuple(inference.window((i, 0)).rows.size for i in range(rows)),
        tuple(inference.window((0, j)).cols.size for j in range(cols)),
    )


def _as_dataarray(data: da.Array, source: ArraySource, inference: Inference) -> xr.DataArray:
    """Predictions on the output's grid with its own attributes, none of the source's."""
    form, model = inference.form, inference.model
    attrs: dict[str, Any] = {"_FillValue": form.nodata, "output": model.output}
    for name in ("class_names", "class_colors"):
        if getattr(model, name) is not None:
            attrs[name] = list(getattr(model, name))
    names: list[Any] = list(model.class_names or range(1, form.bands + 1))
    if form.bands == 1 or model.confidence:
        # As the bands of a file are called.
        first = "class" if model.output == "classes" else model.output
        names = [first, "confidence"][: form.bands]
    coords: dict[str, Any] = {
        "band": ("band", [str(name) for name in names]),
        **source.grid.scaled(inference.scale).coords(),
    }
    if form.scales:
        coords["scale"] = ("band", list(form.scales), {"dtype": form.dtype})
    return xr.DataArray(data, coords, ("band", "y", "x"), model.output, attrs)


def _spec_of(prediction: xr.DataArray, source: ArraySource, **options: Any) -> CogSpec:
    """The output file for an array: what `predict` says of it, or a plain raster of values."""
    # Attributes ride along through arithmetic: the names of classes, and nodata, are not those of
    # what was asked about them.
    attrs: Mapping[Any, Any] = prediction.attrs
    if prediction.dtype == np.bool_:
        attrs = {"output": "classes", "_FillValue": None}
    # rioxarray fails on nodata that the dtype does not hold; `CogSpec` says what is wrong.
    nodata: Any = attrs.get("_FillValue")
    if "_FillValue" not in attrs:
        nodata = prediction.rio.nodata
    _check_nodata(prediction, nodata)
    bands = len(source.band_names)
    # Of a prediction; any other array is written as the numbers that it holds.
    scaled = "output" in attrs and "scale" in prediction.coords
    scales = source.scales if scaled else ()
    form = OutputFormat(bands, _WRITTEN.get(source.dtype, source.dtype), nodata, scales)
    output = attrs.get("output", "values")
    if output == "classes" and scales and 1 not in scales:
        # Their confidence without them.
        output = "probabilities"
    recipe = Model(
        "array",
        "module",
        "",
        output=output,
        class_names=_texts(attrs.get("class_names")),
        class_colors=_texts(attrs.get("class_colors")),
    )
    spec = cog_spec(grid_of(prediction), form, recipe, **options)
    names = source.band_names
    if spec.descriptions or all(name.isdigit() or name in ("class", output) for name in names):
        return spec
    return replace(spec, descriptions=tuple(names))


def _check_nodata(array: xr.DataArray, nodata: Any) -> None:
    """Refuse the nodata of floats for whole numbers that were made of them."""
    floats = nodata is not None and not float(nodata).is_integer()
    if floats and np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"the array holds {array.dtype}, and its nodata {nodata} is that of the numbers it was "
            "made of: say which is nodata now, as array.assign_attrs(_FillValue=255), or that none "
            "is, with array.drop_attrs()"
        )


def _texts(values: Any) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)
