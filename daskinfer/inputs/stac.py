"""STAC items: which of their assets hold the bands, and what their numbers mean.

Read here, not by odc-stac: the files go through the same code as any other, so that masks, block
cache, signing, retries and resampling are the same, and pixels are those of the files.  Items are
plain JSON; pystac is not needed to read them, its objects are welcome.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

__all__ = ["Item", "StacBand", "is_stac", "items_of", "stac_bands"]

_SECONDS = 30
_NOT_DATA = {"thumbnail", "overview", "visual", "metadata"}
_RASTERS = re.compile(r"image/(tiff|jp2|vnd\.stac\.geotiff)|application/x-(hdf|netcdf)", re.I)
_REFLECTANCE = re.compile(r"B(\d{2}|8A)$")
# From this processing baseline on, Sentinel-2 numbers are reflectance x 10 000 + 1000.
_SHIFTED_BASELINE = 4.0
_SCALE, _SHIFT = 1e-4, -0.1


@dataclass(frozen=True)
class StacBand:
    """Where a band of an item is, and what its numbers mean.

    Attributes
    ----------
    name : str
        As it was asked for.
    href : str
    index : int
        Number of the band in its file, from 1.
    scale, offset : float or None
        None where the file itself has the word.
    nodata : float or None
    aliases : tuple of str
        What else the item calls it.
    """

    name: str
    href: str
    index: int
    scale: float | None
    offset: float | None
    nodata: float | None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """A STAC item as JSON, and where it lies.

    Attributes
    ----------
    told : dict
    base : str
        Path or URL of the item, which relative addresses of assets start from; "" if not known.
    """

    told: Mapping[str, Any]
    base: str = ""

    @property
    def name(self) -> str:
        """What to call it in errors."""
        return f"item {self.told.get('id', '?')}"

    @property
    def datetime(self) -> str | None:
        """When it was taken."""
        properties = self.told.get("properties", {})
        time = properties.get("datetime") or properties.get("start_datetime")
        return None if time is None else str(time)

    def href(self, asset: Mapping[str, Any]) -> str:
        """Address of an asset."""
        href = str(asset["href"])
        if "://" in href or href.startswith("/"):
            return href
        if not self.base:
            raise ValueError(
                f"{self.name} has the relative address {href!r} and does not tell where it lies "
                "itself: pass its path or URL, or make the addresses absolute"
            )
        if "://" in self.base:
            return urljoin(self.base, href)
        return os.path.normpath(os.path.join(os.path.dirname(self.base), href))


def is_stac(source: Any) -> bool:
    """Whether a source is an item, a collection of items, the address of one, or a list of them."""
    if isinstance(source, Mapping):
        return _is_item(source) or _is_collection(source)
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source).lower().partition("?")[0].endswith((".json", ".geojson"))
    if isinstance(source, (list, tuple)):
        return bool(source) and all(is_stac(one) for one in source)
    return hasattr(source, "to_dict") and hasattr(source, "assets" if _single(source) else "items")


def _single(source: Any) -> bool:
    return hasattr(source, "assets")


def _is_item(told: Mapping[Any, Any]) -> bool:
    return told.get("type") == "Feature" and "assets" in told


def _is_collection(told: Mapping[Any, Any]) -> bool:
    return told.get("type") == "FeatureCollection"


def items_of(source: Any) -> list[Item]:
    """All items of a source for which `is_stac` holds, in order.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it holds no item.
    """
    items = list(_items(source, ""))
    if not items:
        raise ValueError("no STAC item in what was given")
    return items


def _items(source: Any, base: str) -> Iterable[Item]:
    if isinstance(source, (list, tuple)):
        for one in source:
            yield from _items(one, base)
    elif isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        yield from _items(_loaded(path), path if "://" in path else os.path.abspath(path))
    elif not isinstance(source, Mapping):
        told = source.to_dict(transform_hrefs=False) if _single(source) else source.to_dict()
        own = source.get_self_href() if hasattr(source, "get_self_href") else None
        yield from _items(told, own or base)
    elif _is_collection(source):
        for feature in source.get("features", ()):
            yield from _items(feature, base)
    elif _is_item(source):
        selves = [link["href"] for link in source.get("links", ()) if link.get("rel") == "self"]
        absolute = [href for href in selves if "://" in href or href.startswith("/")]
        # Where it was read from, before where it says that it is: copies move.
        yield Item(source, base or (absolute[0] if absolute else ""))
    else:
        raise ValueError(f"expected a STAC item, got JSON of type {source.get('type')!r}")


def _loaded(path: str) -> Any:
    try:
        if path.startswith(("http://", "https://")):
            with urllib.request.urlopen(path, timeout=_SECONDS) as answer:
                return json.load(answer)
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"source {path!r}: no such file") from error
    except urllib.error.URLError as error:
        raise OSError(f"source {path!r} could not be read: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"source {path!r} is not JSON: {error}") from error


def stac_bands(item: Item, bands: Sequence[str | int] | None) -> list[StacBand]:
    """Where the bands of an item are.

    Parameters
    ----------
    item : Item
    bands : sequence of str, optional
        Keys of assets, or names or common names of bands; by default all assets of data, in order.

    Raises
    ------
    ValueError
        If a band is unknown, doubled, or the name of several.
    """
    places = _places(item)
    if bands is None:
        picked = [place for place in places if _is_data(place.asset)]
        if not picked:
            raise ValueError(f"{item.name} has no assets of data: {_known(places)}")
        names = [place.key if place.alone else place.name for place in picked]
    else:
        names = [str(band) for band in bands]
        picked = [_found(item, places, name) for name in names]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"band {doubled[0]!r} is asked for twice: {names}")
    return [place.band(item, name) for place, name in zip(picked, names, strict=True)]


@dataclass(frozen=True)
class _Place:
    """A band of an asset."""

    key: str
    asset: Mapping[str, Any]
    number: int
    alone: bool
    eo: Mapping[str, Any]
    raster: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.eo.get("name") or self.key)

    @property
    def common(self) -> str | None:
        return self.eo.get("common_name") or self.eo.get("eo:common_name")

    def told(self, what: str) -> Any:
        """A number of the raster extension, in the words of STAC 1.0 or 1.1."""
        for place, key in (
            (self.raster, what),
            (self.eo, f"raster:{what}"),
            (self.eo, what),
            (self.asset, f"raster:{what}"),
            (self.asset, what),
        ):
            if key in place:
                return place[key]
        return None

    def band(self, item: Item, name: str) -> StacBand:
        scale, offset = _scaling(item, self)
        nodata = self.told("nodata")
        number = None if nodata is None else float(nodata)
        called = (self.key if self.alone else None, self.name, self.common)
        aliases = tuple(other for other in called if other not in (None, name))
        href = item.href(self.asset)
        return StacBand(name, href, self.number, scale, offset, number, aliases)


def _places(item: Item) -> list[_Place]:
    places = []
    for key, asset in item.told["assets"].items():
        eo = asset.get("bands") or asset.get("eo:bands") or []
        raster = asset.get("raster:bands") or []
        count = max(1, len(eo), len(raster))
        for i in range(count):
            places.append(
                _Place(
                    key,
                    asset,
                    i + 1,
                    count == 1,
                    eo[i] if i < len(eo) else {},
                    raster[i] if i < len(raster) else {},
                )
            )
    return places


def _is_data(asset: Mapping[str, Any]) -> bool:
    roles = set(asset.get("roles") or ())
    raster = bool(_RASTERS.match(asset.get("type") or "image/tiff"))
    return (
        raster
        and not roles & _NOT_DATA
        and ("data" in roles or "reflectance" in roles or not roles)
    )


def _found(item: Item, places: Sequence[_Place], name: str) -> _Place:
    """The band of a name: key of an asset first, then name, then common name."""
    for matches in (
        [place for place in places if place.key == name and place.alone],
        [place for place in places if place.name == name],
        [place for place in places if place.common == name],
    ):
        # The same band may be there in another format too; then its key has to say which.
        if len(matches) == 1:
            return matches[0]
        if matches:
            keys = [place.key for place in matches]
            raise ValueError(f"{item.name} has band {name!r} in several assets, {keys}: name one")
    raise ValueError(f"{item.name} has no band {name!r}: there are {_known(places)}")


def _known(places: Sequence[_Place]) -> list[str]:
    return [
        place.key if place.common in (None, place.key) else f"{place.key} ({place.common})"
        for place in places
    ]


def _scaling(item: Item, place: _Place) -> tuple[float | None, float | None]:
    """Scale and offset of a band; None where nothing but the file tells."""
    scale, offset = place.told("scale"), place.told("offset")
    properties = item.told.get("properties", {})
    if not _is_reflectance(properties, place):
        if scale is None and offset is None:
            return None, None
        return 1.0 if scale is None else float(scale), float(offset or 0.0)
    if _applied(properties):
        return _SCALE if scale is None else float(scale), 0.0
    if offset is None:
        offset = _SHIFT if _baseline(properties) >= _SHIFTED_BASELINE else 0.0
    return _SCALE if scale is None else float(scale), float(offset)


def _is_reflectance(properties: Mapping[str, Any], place: _Place) -> bool:
    """Whether a band is one of reflectance of Sentinel-2, not a classification or an angle."""
    platform = str(properties.get("platform") or properties.get("constellation") or "").lower()
    known = platform.startswith("sentinel-2") or "s2:processing_baseline" in properties
    if set(place.asset.get("roles") or ()) & _NOT_DATA:
        return False
    names = (place.key, place.name)
    return known and (any(_REFLECTANCE.match(name) for name in names) or place.common is not None)


def _applied(properties: Mapping[str, Any]) -> bool:
    """Whether the shift was taken off the numbers already."""
    return bool(
        properties.get("earthsearch:boa_offset_applied")
        or properties.get("sentinel2-to-stac:boa_offset_applied")
    )


def _baseline(properties: Mapping[str, Any]) -> float:
    told = properties.get("s2:processing_baseline") or properties.get("processing:version") or 0
    try:
        return float(told)
    except ValueError:
        return 0.0
