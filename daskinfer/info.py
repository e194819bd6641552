"""Tell about an output, finished or not."""

from __future__ import annotations

import json
from pathlib import Path

import rasterio

from . import display
from .progress import read_progress, write_map
from .zarrwork import is_zarr_output

__all__ = ["describe_file"]

_PARTIAL = ".partial"
_FORMATS = {"GTiff": "GeoTIFF", "VRT": "files in a VRT"}


def describe_file(path: str, picture: str | None = None) -> str:
    """A raster's size, grid, classes and overviews; of an unfinished output also how far it is.

    Parameters
    ----------
    path : str
        A raster, or the ``.partial`` file of a run.
    picture : str, optional
        PNG to write, a map of the chunks of an unfinished output; see
        `daskinfer.progress.write_map`.

    Returns
    -------
    str
        Lines for a terminal.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If GDAL does not open it, or a map is asked for of what is not an unfinished output.
    """
    if not Path(path).exists() and "://" not in path and not path.startswith("/vsi"):
        raise FileNotFoundError(f"{path!r}: no such file")
    try:
        if is_zarr_output(path):
            rows = _store_rows(path)
        else:
            with rasterio.open(path) as dataset:
                if not dataset.count:
                    raise ValueError(f"{path!r} has no bands of its own")
                rows = _raster_rows(dataset)
    except rasterio.errors.RasterioIOError as error:
        raise ValueError(f"{path!r} is not a raster that GDAL opens: {error}") from error
    if path.endswith(_PARTIAL):
        rows += _progress_rows(Path(path))
    if picture is not None:
        progress = read_progress(path) if path.endswith(_PARTIAL) else None
        if progress is None:
            raise ValueError(f"{path!r} is not the .partial file of a run with its ledger: no map")
        write_map(progress, picture)
    return display.text_table(path, rows)


def _store_rows(path: str) -> list[display.Row]:
    # Imports xarray, which is slow to start and not needed for files.
    from .inputs.zarrstore import open_zarr
    from .source import ArraySource

    array = open_zarr(path)
    source = ArraySource(array)
    chunks = " x ".join(str(side) for side in array.encoding.get("chunks", ())) or "unknown"
    size = len(source.band_names), source.grid.height, source.grid.width
    rows = [
        ("size", " x ".join(map(str, size)) + " (band, y, x)"),
        ("dtype", f"{source.dtype}, nodata {source.nodata[0]}"),
        ("crs", array.rio.crs.to_string() if array.rio.crs else "none"),
        ("bands", ", ".join(source.band_names)),
        ("chunks", chunks),
        ("layout", "Zarr"),
    ]
    if "class_names" in array.attrs:
        names = enumerate(array.attrs["class_names"])
        rows.append(("classes", ", ".join(f"{i} {name}" for i, name in names)))
    return rows


def _raster_rows(dataset: rasterio.DatasetReader) -> list[display.Row]:
    tags, kind = dataset.tags(), dataset.driver
    height, width = dataset.block_shapes[0]
    codec = f", {dataset.compression.value}" if dataset.compression else ""
    rows = [
        ("size", f"{dataset.count} x {dataset.height} x {dataset.width} (band, y, x)"),
        ("dtype", f"{dataset.dtypes[0]}, nodata {dataset.nodata}"),
        ("crs", dataset.crs.to_string() if dataset.crs else "none"),
        ("bands", ", ".join(name or str(i + 1) for i, name in enumerate(dataset.descriptions))),
        ("blocks", f"{height} x {width}{codec}"),
        ("overviews", ", ".join(str(level) for level in dataset.overviews(1)) or "none"),
        ("layout", dataset.tags(ns="IMAGE_STRUCTURE").get("LAYOUT", _FORMATS.get(kind, kind))),
    ]
    if "CLASS_NAMES" in tags:
        names = enumerate(json.loads(tags["CLASS_NAMES"]))
        rows.append(("classes", ", ".join(f"{i} {name}" for i, name in names)))
    return rows


def _progress_rows(path: Path) -> list[display.Row]:
    progress = read_progress(path)
    if progress is None:
        return [("ledger", f"none ({path}.jsonl): no run can go on with this file")]
    total = progress.states.size
    done = progress.count("done") + progress.count("skipped")
    rows = [
        ("done", f"{_chunks_text(done)} of {_chunks_text(total)} chunks ({done / total:.0%})"),
        ("skipped", f"{_chunks_text(progress.count('skipped'))} of these, all nodata"),
        ("failed", f"{len(progress.failures)} chunks"),
        ("missing", f"{_chunks_text(progress.count('missing'))} chunks"),
        ("to go on", "run the same call again"),
        ("ledger", f"{path}.jsonl"),
    ]
    rows += [
        (f"chunk {f.chunk}", f"{f.window} on {f.worker}: {f.error}") for f in progress.failures
    ]
    return [*rows, ("source", str(progress.settings["source"]).partition("|")[0])]


def _chunks_text(count: int) -> str:
    return display.count_text(count)
