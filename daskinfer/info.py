"""Tell about an output, finished or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rasterio

from . import display, tiff
from .ledger import read_ledger

__all__ = ["describe_file"]

_PARTIAL = ".partial"


def describe_file(path: str) -> str:
    """A raster's size, grid, classes and overviews; of an unfinished output also how far it is.

    Parameters
    ----------
    path : str
        A raster, or the ``.partial`` file of a run.

    Returns
    -------
    str
        Lines for a terminal.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If GDAL does not open it.
    """
    if not Path(path).exists() and "://" not in path and not path.startswith("/vsi"):
        raise FileNotFoundError(f"{path!r}: no such file")
    try:
        with rasterio.open(path) as dataset:
            rows = _raster_rows(dataset)
    except rasterio.errors.RasterioIOError as error:
        raise ValueError(f"{path!r} is not a raster that GDAL opens: {error}") from error
    if path.endswith(_PARTIAL):
        rows += _progress_rows(Path(path))
    return display.text_table(path, rows)


def _raster_rows(dataset: rasterio.DatasetReader) -> list[display.Row]:
    tags = dataset.tags()
    height, width = dataset.block_shapes[0]
    rows = [
        ("size", f"{dataset.count} x {dataset.height} x {dataset.width} (band, y, x)"),
        ("dtype", f"{dataset.dtypes[0]}, nodata {dataset.nodata}"),
        ("crs", dataset.crs.to_string() if dataset.crs else "none"),
        ("bands", ", ".join(name or str(i + 1) for i, name in enumerate(dataset.descriptions))),
        ("blocks", f"{height} x {width}, {dataset.compression and dataset.compression.value}"),
        ("overviews", ", ".join(str(level) for level in dataset.overviews(1)) or "none"),
        ("layout", dataset.tags(ns="IMAGE_STRUCTURE").get("LAYOUT", "GeoTIFF")),
    ]
    if "CLASS_NAMES" in tags:
        names = enumerate(json.loads(tags["CLASS_NAMES"]))
        rows.append(("classes", ", ".join(f"{i} {name}" for i, name in names)))
    return rows


def _progress_rows(path: Path) -> list[display.Row]:
    with path.open("rb") as file:
        main = tiff.parse(lambda size, at: _read_at(file, at, size), first_only=True)[0]
    counts = main[tiff.TILE_BYTE_COUNTS].ints()
    done = int((counts > 0).sum())
    left = "" if done < counts.size else "; run the same call again to finish the file"
    rows = [("done", f"{done} of {counts.size} blocks ({done / counts.size:.0%}){left}")]
    ledger = path.with_name(f"{path.name}.jsonl")
    if not ledger.exists():
        return rows
    settings, failures = read_ledger(ledger)
    rows += [("ledger", str(ledger)), ("failed", f"{len(failures)} chunks")]
    rows += [(f"chunk {f.chunk}", f"{f.window} on {f.worker}: {f.error}") for f in failures]
    return rows + _settings_rows(settings)


def _settings_rows(settings: dict[str, Any] | None) -> list[display.Row]:
    if settings is None:
        return []
    return [("source", str(settings["source"]).partition("|")[0])]


def _read_at(file: Any, at: int, size: int) -> bytes:
    file.seek(at)
    return bytes(file.read(size))
