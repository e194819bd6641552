"""STAC items of the files of an output, and the collection that they are in.

Written where pystac is installed and the raster has a CRS: an item beside each file, named as it
is.  When a scene was taken is not known here; items are dated by when they were written.
"""

from __future__ import annotations

import importlib.util
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rasterio
from affine import Affine
from rasterio.warp import transform_geom

from ..cog.spec import CogSpec
from .pieces import Index, Pieces, Places

if TYPE_CHECKING:
    import pystac

__all__ = ["item_path", "write_catalog"]

# Points on an edge of a footprint: straight lines of one CRS are none of another.
_POINTS = 20


def item_path(piece: str) -> str:
    """Path of the item of a COG."""
    return str(Path(piece).with_suffix(".json"))


def write_catalog(pieces: Pieces, places: Places) -> list[str]:
    """Write an item per file, and the collection.

    Parameters
    ----------
    pieces : Pieces
    places : Places
        Where its finished files are.

    Returns
    -------
    list of str
        Paths of what was written; none without pystac, or without a place on the ground.
    """
    spec = pieces.spec
    if spec.crs is None or spec.transform is None or importlib.util.find_spec("pystac") is None:
        return []
    import pystac

    now = datetime.now(UTC)
    items = [_item(pieces, places, index, now) for index in pieces]
    boxes = [item.bbox for item in items if item.bbox is not None]
    west, south = (min(box[axis] for box in boxes) for axis in (0, 1))
    east, north = (max(box[axis] for box in boxes) for axis in (2, 3))
    stem = Path(places.output).stem
    collection = pystac.Collection(
        id=stem,
        description=f"The files of {Path(places.output).name}, written by daskinfer",
        extent=pystac.Extent(
            pystac.SpatialExtent([[west, south, east, north]]),
            pystac.TemporalExtent([[now, now]]),
        ),
        href=places.collection,
        catalog_type=pystac.CatalogType.SELF_CONTAINED,
        license="other",
    )
    for index, item in zip(pieces, items, strict=True):
        collection.add_item(item)
        item.set_self_href(item_path(places.piece(index)))
        item.make_asset_hrefs_relative()
    for item in items:
        item.save_object(include_self_link=False)
    collection.save_object(include_self_link=False)
    return [places.collection, *(item_path(places.piece(index)) for index in pieces)]


def _item(pieces: Pieces, places: Places, index: Index, now: datetime) -> pystac.Item:
    import pystac
    from pystac.extensions.projection import ProjectionExtension

    path, spec = places.piece(index), pieces.spec_of(index)
    footprint, bounds = _footprint(spec)
    item = pystac.Item(
        id=Path(path).stem,
        geometry=footprint,
        bbox=_box(footprint),
        datetime=now,
        properties={"created": now.isoformat().replace("+00:00", "Z")},
    )
    crs = rasterio.CRS.from_user_input(spec.crs)
    code = crs.to_epsg()
    ProjectionExtension.ext(item, add_if_missing=True).apply(
        epsg=code,
        wkt2=None if code else crs.to_wkt(version="WKT2_2019"),
        bbox=bounds,
        shape=[spec.height, spec.width],
        transform=[*(spec.transform or ()), 0.0, 0.0, 1.0],
    )
    item.add_asset("data", _asset(path, spec))
    return _with_details(item, spec)


def _asset(path: str, spec: CogSpec) -> pystac.Asset:
    import pystac

    names = spec.descriptions or tuple(str(band + 1) for band in range(spec.count))
    extra: dict[str, Any] = {"bands": [{"name": name} for name in names]}
    return pystac.Asset(path, media_type=pystac.MediaType.COG, roles=["data"], extra_fields=extra)


def _with_details(item: pystac.Item, spec: CogSpec) -> pystac.Item:
    """What pixels are: their type and nodata, and the classes that they stand for."""
    from pystac.extensions.classification import Classification, ClassificationExtension
    from pystac.extensions.raster import DataType, NoDataStrings, RasterBand, RasterExtension

    asset = item.assets["data"]
    nodata: Any = spec.nodata
    if nodata is not None and nodata != nodata:
        nodata = NoDataStrings.NAN
    band = RasterBand.create(nodata=nodata, data_type=DataType(spec.dtype))
    RasterExtension.ext(asset, add_if_missing=True).apply(bands=[band] * spec.count)
    names = json.loads(dict(spec.tags).get("CLASS_NAMES", "[]"))
    if names:
        classes = [
            Classification.create(value, name=str(name), color_hint=_hint(spec, value))
            for value, name in enumerate(names)
        ]
        ClassificationExtension.ext(asset, add_if_missing=True).apply(classes=classes)
    return item


def _hint(spec: CogSpec, value: int) -> str | None:
    if value >= len(spec.colors):
        return None
    return "".join(f"{part:02X}" for part in spec.colors[value][:3])


def _footprint(spec: CogSpec) -> tuple[dict[str, Any], list[float]]:
    """Outline of a file in longitude and latitude, and its bounds in its own CRS."""
    to_map = Affine(*(spec.transform or ()))
    height, width = spec.height, spec.width
    steps = [n / _POINTS for n in range(_POINTS)]
    pixels = (
        [(width * t, 0.0) for t in steps]
        + [(float(width), height * t) for t in steps]
        + [(width * (1 - t), float(height)) for t in steps]
        + [(0.0, height * (1 - t)) for t in steps]
    )
    ring = [to_map @ pixel for pixel in (*pixels, pixels[0])]
    xs, ys = zip(*ring, strict=True)
    geometry = {"type": "Polygon", "coordinates": [ring]}
    placed: dict[str, Any] = transform_geom(spec.crs, "EPSG:4326", geometry)
    return placed, [min(xs), min(ys), max(xs), max(ys)]


def _box(geometry: dict[str, Any]) -> list[float]:
    parts = geometry["coordinates"]
    if geometry["type"] == "MultiPolygon":
        parts = [ring for polygon in parts for ring in polygon]
    points = [point for ring in parts for point in ring]
    xs, ys = ([point[axis] for point in points] for axis in (0, 1))
    return [min(xs), min(ys), max(xs), max(ys)]
