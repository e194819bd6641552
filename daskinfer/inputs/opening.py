"""From what a user calls a source to a `Source` of windows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from ..handles import Sign
from ..raster import Raster, describe
from ..selection import Bands, find_bands
from .gather import Named, TargetGrid, bands_of, mosaic_of
from .protocol import Source

__all__ = ["Reading", "assembled"]

# Of a remote file opening is waiting; more would be a burst on the server.
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
    """

    nodata: float | None = None
    mask: bool = True
    sign: Sign | None = None
    stack: Literal["bands"] | None = None
    target: TargetGrid = field(default_factory=TargetGrid)

    def __post_init__(self) -> None:
        if self.stack not in (None, "bands"):
            raise ValueError(f"stack must be None (a mosaic) or 'bands', got {self.stack!r}")

    def file(self, path: Any, bands: Bands = None) -> Raster:
        """One file."""
        return describe(path, bands=bands, nodata=self.nodata, mask=self.mask, sign=self.sign)

    def files(self, paths: Sequence[Any], bands: Bands = None) -> list[Named]:
        """Many files, several opened at a time."""
        for path in paths:
            if not isinstance(path, (str, os.PathLike)):
                raise TypeError(f"a list of sources is one of paths, got {type(path).__name__}")
        with ThreadPoolExecutor(min(_OPENING, len(paths))) as pool:
            rasters = list(pool.map(lambda path: self.file(path, bands), paths))
        return [(os.fspath(path), raster) for path, raster in zip(paths, rasters, strict=True)]


def assembled(source: Any, reading: Reading, bands: Bands = None) -> Source:
    """The source of windows for a path, a list of paths, or paths by band.

    Parameters
    ----------
    source : path, sequence of path, or mapping of str to path or sequence of path
    reading : Reading
    bands : sequence of str or int, optional
        Names or numbers from 1, in the order wanted.

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        As of `daskinfer.open_raster`.
    """
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
        files = reading.files(paths)
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


def _picked(bands: Sequence[str | int], names: Sequence[str]) -> list[int]:
    return find_bands(bands, tuple(names), "the source")
