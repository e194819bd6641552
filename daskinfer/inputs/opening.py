"""From what a user calls a source to a `Source` of windows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal

from ..handles import Sign
from ..raster import Raster, describe
from ..selection import Bands, find_bands
from .gather import Named, TargetGrid, bands_of, described, items_of_bands, mosaic_of, steps_of
from .protocol import Source
from .stac import Item, StacBand, is_stac, items_of, stac_bands
from .timestack import TimeStack, day_of

__all__ = ["Reading", "assembled"]

Numbers = float | Mapping[str, float] | None

# More would be a burst on a server.
_OPENING = 8


@dataclass(frozen=True)
class Reading:
    """How the files of a source are to be read.

    Attributes
    ----------
    nodata : float or None
        Replaces that of every file.
    mask : bool
        Honour nodata, NaN, alpha and mask bands.
    sign : callable or None
        Gives the address to open for a path.
    stack : {None, "bands"}
        A list is a mosaic, or one file per band.
    target : TargetGrid
        The grid that is asked for.
    scale, offset : float, mapping of str to float, or None
        Replace those of every file, or of bands by name.
    time : sequence or "all" or None
        Dates: of the sources of a list, or those that are wanted of STAC items and of a mapping.
    """

    nodata: float | None = None
    mask: bool = True
    sign: Sign | None = None
    stack: Literal["bands"] | None = None
    target: TargetGrid = field(default_factory=TargetGrid)
    scale: Numbers = None
    offset: Numbers = None
    time: Any = None

    def __post_init__(self) -> None:
        if self.stack not in (None, "bands"):
            raise ValueError(f"stack must be None (a mosaic) or 'bands', got {self.stack!r}")
        _check_numbers("scale", self.scale)
        _check_numbers("offset", self.offset)

    def file(self, path: Any, bands: Bands = None, name: str | None = None) -> Raster:
        """One file; `name` is what its only band is called, where that is not what it says."""
        raster = describe(path, bands=bands, nodata=self.nodata, mask=self.mask, sign=self.sign)
        return self._scaled(raster, raster.band_names if name is None else (name,))

    def asset(self, band: StacBand) -> Raster:
        """The file of a band of a STAC item, which says more of it than the file."""
        nodata = band.nodata if self.nodata is None else self.nodata
        raster = describe(band.href, nodata=nodata, mask=self.mask, sign=self.sign)
        # By its place: what the file calls its bands may be numbers too.
        names = raster.band_names[band.index - 1 : band.index]
        raster = raster.select(names or [band.index])
        if band.scale is not None or band.offset is not None:
            raster = replace(raster, scales=(band.scale or 1.0,), offsets=(band.offset or 0.0,))
        named = replace(raster, band_names=(band.name,), aliases=(band.aliases,))
        return self._scaled(named, (band.name,))

    def _scaled(self, raster: Raster, names: tuple[str, ...]) -> Raster:
        if self.scale is None and self.offset is None:
            return raster
        if len(names) != len(raster.band_names):
            names = raster.band_names
        return replace(
            raster,
            scales=_numbers(self.scale, names, raster.scales),
            offsets=_numbers(self.offset, names, raster.offsets),
        )

    def files(
        self, paths: Sequence[Any], bands: Bands = None, name: str | None = None
    ) -> list[Named]:
        """Many files, several opened at a time."""
        for path in paths:
            if not isinstance(path, (str, os.PathLike)):
                raise TypeError(f"a list of sources is one of paths, got {type(path).__name__}")
        rasters = _opened(lambda path: self.file(path, name=name), paths)
        # Files without names of bands take those of the others before any are chosen.
        named = described(list(zip(map(os.fspath, paths), rasters, strict=True)))
        return [(path, raster.select(bands)) for path, raster in named]


def assembled(source: Any, reading: Reading, bands: Bands = None) -> Source:
    """The source of windows for a path, a list of paths, paths by band, or STAC items.

    Parameters
    ----------
    source : path, sequence of path, mapping of str to path or sequence of path, or STAC items
    reading : Reading
    bands : sequence of str or int, optional
        Names or numbers from 1, in the order wanted.

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        As of `daskinfer.open_raster`.
    """
    made = _made(source, reading, bands)
    for what, numbers in (("scale", reading.scale), ("offset", reading.offset)):
        # Of bands that were not chosen numbers may be there too.
        unknown = (
            bands is None and isinstance(numbers, Mapping) and set(numbers) - set(made.band_names)
        )
        if unknown:
            raise ValueError(
                f"{what} has numbers for {sorted(unknown)}, the bands are {list(made.band_names)}"
            )
    return made


def _made(source: Any, reading: Reading, bands: Bands) -> Source:
    if reading.time is not None:
        return _dated(source, reading, bands)
    if is_stac(source):
        return _of_items(items_of(source), reading, bands)
    if isinstance(source, Mapping):
        return _by_band(source, reading, bands)
    if isinstance(source, (str, os.PathLike)):
        raster = reading.file(source, bands)
        if not reading.target.given:
            return raster
        return mosaic_of([(os.fspath(source), raster)], reading.target)
    if not isinstance(source, (list, tuple)):
        raise TypeError(
            "source must be a path, a URL, a list of paths, a mapping of band names to paths or a "
            f"DataArray, got {type(source).__name__}"
        )
    if not source:
        raise ValueError("an empty list of files is no raster")
    if reading.stack == "bands":
        return _band_files(source, reading, bands)
    return mosaic_of(reading.files(source, bands), reading.target)


def _dated(source: Any, reading: Reading, bands: Bands) -> TimeStack:
    """Sources in order of time; those of one time are a mosaic."""
    plain = replace(reading, time=None)
    given: dict[str, list[Any]] = {}
    if is_stac(source):
        for item in items_of(source):
            if item.datetime is None:
                raise ValueError(f"{item.name} does not tell when it was taken")
            given.setdefault(day_of(item.datetime), []).append(item)
    elif isinstance(source, Mapping):
        for time, one in source.items():
            several = one if isinstance(one, (list, tuple)) else [one]
            given.setdefault(day_of(time), []).extend(several)
    else:
        times = [] if isinstance(reading.time, str) else list(reading.time)
        if not isinstance(source, (list, tuple)) or len(source) != len(times):
            raise ValueError(
                f"time= has {len(times)} dates, which must be one for each source of a list, or be "
                "given as {date: path}"
            )
        for time, one in zip(times, source, strict=True):
            given.setdefault(day_of(time), []).append(one)
    wanted, matched = _wanted_times(reading.time, given)

    def at(time: str) -> Source | None:
        found = [one for own in matched[time] for one in given[own]]
        if not found:
            return None
        if isinstance(found[0], Item):
            return _of_items(found, plain, bands)
        return _made(found if len(found) > 1 else found[0], plain, bands)

    return steps_of([(time, at(time)) for time in wanted], reading.target)


def _wanted_times(time: Any, given: Mapping[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """Dates in order, and the times of sources that belong to each: to a day all of that day."""
    if isinstance(time, str):
        if time != "all":
            raise ValueError(f"time must be a list of dates or 'all', got {time!r}")
        return sorted(given), {own: [own] for own in given}
    wanted = sorted({day_of(one) for one in time})
    matched = {
        one: [own for own in sorted(given) if own == one or own.partition("T")[0] == one]
        for one in wanted
    }
    return wanted, matched


def _opened(open_one: Callable[[Any], Raster], each: Sequence[Any]) -> list[Raster]:
    """Open files, several at a time: over a network opening is waiting."""
    with ThreadPoolExecutor(min(_OPENING, len(each))) as pool:
        return list(pool.map(open_one, each))


def _of_items(items: Sequence[Item], reading: Reading, bands: Bands) -> Source:
    """STAC items side by side, later ones on top."""
    wanted = [stac_bands(item, bands) for item in items]
    names = [[band.name for band in own] for own in wanted]
    for item, own in zip(items, names, strict=True):
        if own != names[0]:
            raise ValueError(
                f"{item.name} has bands {own}, {items[0].name} has {names[0]}: choose with bands=[]"
            )
    every = [band for own in wanted for band in own]
    opened = iter(_opened(reading.asset, every))
    stacks = [
        (item.name, [(band.name, next(opened)) for band in own])
        for item, own in zip(items, wanted, strict=True)
    ]
    return items_of_bands(stacks, reading.target)


def _by_band(source: Mapping[Any, Any], reading: Reading, bands: Bands) -> Source:
    """A file, or the files of a mosaic, per band."""
    if not source:
        raise ValueError("an empty mapping of bands to files is no raster")
    names = [str(name) for name in source]
    wanted = range(len(names)) if bands is None else _picked(bands, names)
    chosen = [list(source.values())[i] for i in wanted]
    named = []
    for i, value in zip(wanted, chosen, strict=True):
        paths = list(value) if isinstance(value, (list, tuple)) else [value]
        files = reading.files(paths, name=names[i])
        # Those of one band on one grid first; the grid of all comes after.
        several = TargetGrid() if len(paths) > 1 and not reading.target.given else reading.target
        part = files[0][1] if len(paths) == 1 else mosaic_of(files, several)
        if len(part.band_names) != 1:
            raise ValueError(
                f"{paths[0]} has {len(part.band_names)} bands, expected one for band {names[i]!r}"
            )
        named.append((names[i], part))
    return bands_of(named, reading.target)


def _band_files(paths: Sequence[Any], reading: Reading, bands: Bands) -> Source:
    """One file per band, named by its description, else by its file."""
    files = reading.files(paths)
    for path, raster in files:
        if len(raster.band_names) != 1:
            raise ValueError(
                f"{path} has {len(raster.band_names)} bands: stack='bands' takes files of one band"
            )
    names = _own_names(files)
    wanted = range(len(names)) if bands is None else _picked(bands, names)
    return bands_of([(names[i], files[i][1]) for i in wanted], reading.target)


def _own_names(files: Sequence[Named]) -> list[str]:
    """Descriptions where every file has one of its own, else what is their own in file names."""
    described = [raster.band_names[0] for _, raster in files]
    # A band without a description is called by its number, 1.
    if "1" not in described and len(set(described)) == len(described):
        return described
    return _told_apart([PurePath(path).stem for path, _ in files])


def _told_apart(stems: Sequence[str]) -> list[str]:
    """The first word between underscores in which all names differ; else the names.

    >>> _told_apart(["T33UUU_20170216_B02_10m", "T33UUU_20170216_B8A_20m"])
    ['B02', 'B8A']
    """
    words = [stem.split("_") for stem in stems]
    if len(stems) > 1 and len({len(own) for own in words}) == 1:
        for column in zip(*words, strict=True):
            if len(set(column)) == len(stems):
                return list(column)
    return list(stems)


def _check_numbers(what: str, value: Any) -> None:
    each = value.values() if isinstance(value, Mapping) else [value]
    for number in each:
        fine = number is None or (isinstance(number, (int, float)) and math.isfinite(number))
        if not fine or (what == "scale" and number == 0):
            raise ValueError(f"{what} must be a number, or numbers by band, got {value!r}")


def _numbers(value: Numbers, names: Sequence[str], own: Sequence[float]) -> tuple[float, ...]:
    """What is asked for of each band, else its own."""
    if value is None:
        return tuple(own)
    if not isinstance(value, Mapping):
        return (float(value),) * len(own)
    return tuple(float(value.get(name, had)) for name, had in zip(names, own, strict=True))


def _picked(bands: Sequence[str | int], names: Sequence[str]) -> list[int]:
    return find_bands(bands, tuple(names), "the source")
