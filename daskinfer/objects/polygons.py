"""`vectorize`: a class map of any size as polygons, one for each connected area."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr
from affine import Affine

from daskinfer import display
from daskinfer.objects.pieces import Area, Assembly
from daskinfer.objects.write import FeatureWriter, check_features, need_vector
from daskinfer.origins import check_origins
from daskinfer.source import Source, source_of
from daskinfer.tiling import Span, Window

__all__ = ["PolygonReport", "vectorize"]

# Features that are written at once.
_BATCH = 1 << 12


@dataclass(frozen=True, repr=False)
class PolygonReport:
    """Result of `vectorize`.

    Attributes
    ----------
    output : str
        Path of the file.
    counts : tuple of (str, int)
        Polygons by class.
    """

    output: str
    counts: tuple[tuple[str, int], ...]

    @property
    def polygons(self) -> int:
        """How many there are."""
        return sum(count for _, count in self.counts)

    def __repr__(self) -> str:
        return display.text_table("Polygons", self._rows())

    def _repr_html_(self) -> str:
        return display.html_table("Polygons", self._rows())

    def _rows(self) -> list[display.Row]:
        rows = [("output", self.output), ("polygons", display.count_text(self.polygons))]
        return rows + [(f"  {name}", display.count_text(count)) for name, count in self.counts]


def vectorize(
    source: str | os.PathLike[str] | xr.DataArray,
    output: str | os.PathLike[str],
    *,
    band: str | int | None = None,
    window: tuple[int, int, int, int] | None = None,
    bounds: Sequence[float] | None = None,
    bounds_crs: Any = None,
    connectivity: Literal[4, 8] = 4,
    min_area: float = 0.0,
    values: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    chunk: int = 2048,
    overwrite: bool = False,
) -> PolygonReport:
    """Write the connected areas of a class map as polygons.

    The map is gone through chunk by chunk; areas that chunk borders cut are put together, so that
    the result is that of the whole map.  In memory are one chunk and the areas that reach the row
    of chunks at work.

    Parameters
    ----------
    source : path, URL or DataArray
        Whole numbers, as `run` and `predict` give them; nodata is no area.
    output : path
        ``.parquet`` (GeoParquet), ``.gpkg`` or ``.fgb``: multipolygons with ``value`` and, where
        names are known, ``class``, in the raster's CRS, or in pixels where it has none.
    band : str or int, optional
        Name of the band, or number from 1; needed only where there are several: the first of a map
        with its confidence beside.
    window, bounds, bounds_crs : optional
        Part of the map, in pixels or in coordinates, as for `open_raster`.
    connectivity : {4, 8}
        Whether pixels that touch at a corner only are one area.
    min_area : float, default 0
        Leave out areas below it, in square units of the CRS.
    values : sequence of int, optional
        Only these.
    class_names : sequence of str, optional
        By value; by default those that the map holds.
    chunk : int, default 2048
        Side in pixels of what is read at once.
    overwrite : bool, default False
        Replace an existing file.

    Returns
    -------
    PolygonReport

    Raises
    ------
    FileNotFoundError, FileExistsError, PermissionError, ValueError
        If source or output are not as they should be, before any work.
    ModuleNotFoundError
        Without the extra ``vector``.

    Examples
    --------
    >>> import tempfile
    >>> from daskinfer.demo import demo_model, demo_scene
    >>> from daskinfer.lazy import predict
    >>> clouds = predict(demo_scene(), demo_model())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "clouds.parquet")
    ...     report = vectorize(clouds, path, min_area=10_000, values=[1, 2])
    >>> [name for name, count in report.counts]
    ['cloud', 'shadow']
    """
    need_vector()
    path = check_features(os.fspath(output), overwrite)
    _check(connectivity, min_area, chunk)
    raster = _band_of(source_of(source, window=window, bounds=bounds, bounds_crs=bounds_crs), band)
    check_origins(path, [source, raster])
    names = _names(source, class_names)
    place = Affine.identity() if raster.grid.transform is None else raster.grid.transform
    wanted = None if values is None else np.asarray(values, np.int64)
    kept = (
        area
        for area in _areas(raster, wanted, connectivity, chunk)
        if area.outline.area * abs(place.determinant) >= min_area
    )
    counts: dict[int, int] = {}
    with FeatureWriter(path, raster.grid.crs, "MultiPolygon", _columns([], names)) as writer:
        for batch in _batches(kept):
            writer.write(_on_map(batch, place), _columns(batch, names))
            for area in batch:
                counts[area.value] = counts.get(area.value, 0) + 1
    told = tuple((_name(value, names), count) for value, count in sorted(counts.items()))
    return PolygonReport(path, told)


def _check(connectivity: Any, min_area: float, chunk: Any) -> None:
    if connectivity not in (4, 8):
        raise ValueError(f"connectivity must be 4 or 8, got {connectivity!r}")
    if not math.isfinite(min_area) or min_area < 0:
        raise ValueError(f"min_area must be a number of at least 0, got {min_area!r}")
    if isinstance(chunk, bool) or not isinstance(chunk, (int, np.integer)) or chunk < 1:
        raise ValueError(f"chunk must be whole px from 1 up, got {chunk!r}")


def _band_of(source: Source, band: str | int | None) -> Source:
    """The one band that holds the classes."""
    if band is not None:
        source = source.select([band])
    elif len(source.band_names) == 2 and source.band_names[1] == "confidence":
        source = source.select([source.band_names[0]])
    if len(source.band_names) > 1:
        raise ValueError(
            f"the source has {len(source.band_names)} bands ({', '.join(source.band_names)}): say "
            "which holds the classes, as band=1"
        )
    if set(source.scales) != {1.0} or set(source.offsets) != {0.0}:
        raise ValueError(
            f"numbers with a scale of {source.scales[0]:g} are no classes: say which band holds "
            "them, as band=1, or run the model with output='classes'"
        )
    if np.dtype(source.dtype).kind not in "uib":
        raise ValueError(
            f"a map of {source.dtype} has no classes: round it to whole numbers, or run the model "
            "with output='classes'"
        )
    if source.grid.gcps or source.grid.rpcs:
        raise ValueError(
            "polygons of a raster with ground control points or RPCs have no place on the map yet: "
            "warp it onto a grid first"
        )
    return source


def _names(source: Any, given: Sequence[str] | None) -> tuple[str, ...] | None:
    """Names of the values: those given, or what the map says."""
    if given is not None:
        if isinstance(given, str):
            raise ValueError(f"class_names must be a list, got {given!r}: pass {[given]}")
        return tuple(given)
    if isinstance(source, xr.DataArray):
        held = source.attrs.get("class_names")
    else:
        import rasterio

        with rasterio.open(source) as dataset:
            held = json.loads(dataset.tags().get("CLASS_NAMES", "null"))
    return None if held is None else tuple(map(str, held))


def _areas(
    source: Source, wanted: npt.NDArray[Any] | None, connectivity: int, chunk: int
) -> Iterator[Area]:
    """All areas of a map, those of each row of chunks with it."""
    height, width = source.grid.shape
    assembly = Assembly((height, width), connectivity)
    for top in range(0, height, chunk):
        rows = Span(top, min(top + chunk, height))
        for left in range(0, width, chunk):
            window = Window(rows, Span(left, min(left + chunk, width)))
            pixels = source.read(window)
            numbers, valid = _in_int32(pixels.data[0]), pixels.valid
            if wanted is not None:
                chosen = np.isin(numbers, wanted)
                valid = chosen if valid is None else valid & chosen
            yield from assembly.add(numbers, valid, window)
        yield from assembly.end_row(last=rows.stop == height)


def _in_int32(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Numbers in a dtype that GDAL makes polygons of."""
    if numbers.dtype.name in ("uint8", "uint16", "int16", "int32"):
        return numbers
    if numbers.dtype == bool:
        return numbers.astype(np.uint8)
    limits = np.iinfo(np.int32)
    low, high = int(numbers.min()), int(numbers.max())
    if low < limits.min or high > limits.max:
        raise ValueError(f"values from {low} to {high}: GDAL makes polygons of int32 at most")
    return numbers.astype(np.int32)


def _batches(areas: Iterator[Area]) -> Iterator[list[Area]]:
    batch: list[Area] = []
    for area in areas:
        batch.append(area)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _on_map(areas: list[Area], place: Affine) -> npt.NDArray[Any]:
    import shapely

    def to_map(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        x, y = place @ (pixels[:, 0], pixels[:, 1])
        return np.stack([x, y], axis=1)

    outlines = shapely.transform([area.outline for area in areas], to_map)
    return np.array(
        [
            one if one.geom_type == "MultiPolygon" else shapely.multipolygons([one])
            for one in outlines
        ],
        object,
    )


def _columns(areas: list[Area], names: tuple[str, ...] | None) -> dict[str, npt.NDArray[Any]]:
    columns: dict[str, npt.NDArray[Any]] = {
        "value": np.array([area.value for area in areas], np.int32)
    }
    if names is not None:
        columns["class"] = np.array([_name(area.value, names) for area in areas], object)
    return columns


def _name(value: int, names: tuple[str, ...] | None) -> str:
    return names[value] if names is not None and 0 <= value < len(names) else str(value)
