"""The VRT that shows a grid of files as one raster, and its overviews.

GDAL writes all of it that is metadata: CRS, nodata, colours, tags.  What is added are the files,
by paths relative to the VRT, and where each lies.

GDAL lists no overviews for a VRT of many files, unless they are rasters of their own.  So each is a
VRT too, of the overviews in the files, and of the few that are too small for that (a file of 8192
px has four) there is a COG.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import numpy as np
import rasterio.shutil
from rasterio.io import MemoryFile

from ..cog.spec import CogSpec, no_georeferencing_warning, template_file
from ..cog.statistics import FAILED
from ..fileio import rename, sync_file
from ..tiling import Window

__all__ = ["VrtSource", "mosaic", "overview", "write_text"]


@dataclass(frozen=True)
class VrtSource:
    """A raster, and where it lies in a VRT.

    Attributes
    ----------
    path : str
    shape : (int, int)
        Height and width of its full resolution in pixels.
    level : int
        Overview of it that is taken; 0 is the full resolution.
    size : (int, int)
        Height and width of that.
    window : Window
        Pixels of the VRT that it fills; where they are not `size`, they are resampled.
    """

    path: str
    shape: tuple[int, int]
    level: int
    size: tuple[int, int]
    window: Window


def mosaic(
    spec: CogSpec,
    sources: Sequence[VrtSource],
    folder: str,
    *,
    overviews: Iterable[str] = (),
    tags: Mapping[str, str] | None = None,
    statistics: Sequence[Mapping[str, str]] = (),
) -> str:
    """Write the VRT of a whole raster.

    Parameters
    ----------
    spec : CogSpec
        The raster.
    sources : sequence of VrtSource
        What it consists of.
    folder : str
        In which the VRT will lie.
    overviews : iterable of str
        Paths of its overviews, the largest first.
    tags : mapping of str to str, optional
        More metadata of the raster.
    statistics : sequence of mapping
        Metadata of each band.

    Returns
    -------
    str
        XML.
    """
    root = _template(spec)
    metadata = _own_metadata(root)
    for name, text in (tags or {}).items():
        SubElement(metadata, "MDI", key=name).text = text
    if not len(metadata):
        root.remove(metadata)
    for band, element in enumerate(root.findall("VRTRasterBand")):
        if statistics and statistics[band]:
            items = _own_metadata(element)
            for name, text in statistics[band].items():
                SubElement(items, "MDI", key=name).text = text
        _add_categories(element, spec)
        _add_sources(element, band + 1, spec, sources, folder)
        for path in overviews:
            shown = SubElement(element, "Overview")
            _add_name(shown, path, folder)
            SubElement(shown, "SourceBand").text = str(band + 1)
    return _text(root)


def overview(
    spec: CogSpec, shape: tuple[int, int], sources: Sequence[VrtSource], folder: str
) -> str:
    """Write the VRT of an overview: pixels, nodata and colours, but no place and no metadata.

    Parameters
    ----------
    spec : CogSpec
        The whole raster.
    shape : (int, int)
        Height and width of the overview.
    sources, folder
        As for `mosaic`.

    Returns
    -------
    str
        XML.
    """
    root = _template(spec)
    root.set("rasterYSize", str(shape[0]))
    root.set("rasterXSize", str(shape[1]))
    for name in ("SRS", "GeoTransform", "GCPList", "Metadata"):
        for element in root.findall(name):
            root.remove(element)
    for band, element in enumerate(root.findall("VRTRasterBand"), 1):
        _add_sources(element, band, spec, sources, folder)
    return _text(root)


def _template(spec: CogSpec) -> Element:
    """What GDAL says of an empty raster, without what that consists of."""
    with (
        no_georeferencing_warning(),
        template_file(spec) as raster,
        MemoryFile(ext=".vrt") as memory,
    ):
        rasterio.shutil.copy(raster.name, memory.name, driver="VRT")
        root = ElementTree.fromstring(bytes(memory.getbuffer()))
    root.set("rasterYSize", str(spec.height))
    root.set("rasterXSize", str(spec.width))
    for structure in root.findall("Metadata[@domain='IMAGE_STRUCTURE']"):
        root.remove(structure)
    _drop_placeholders(root)
    for band in root.findall("VRTRasterBand"):
        _drop_placeholders(band)
        for kind in ("SimpleSource", "ComplexSource"):
            for source in band.findall(kind):
                band.remove(source)
        band.set("blockXSize", str(spec.blocksize))
        band.set("blockYSize", str(spec.blocksize))
        nodata = band.find("NoDataValue")
        if nodata is not None and np.dtype(spec.dtype).kind != "f":
            # GDAL was handed it as a double, which rounds large ones.
            nodata.text = str(int(spec.fill))
    return root


def _drop_placeholders(element: Element) -> None:
    for metadata in element.findall("Metadata"):
        for item in metadata.findall("MDI"):
            name = item.get("key", "")
            if name == FAILED or name.startswith("STATISTICS_"):
                metadata.remove(item)


def _own_metadata(element: Element) -> Element:
    """The element's metadata of no domain, made if need be."""
    for metadata in element.findall("Metadata"):
        if not metadata.get("domain"):
            return metadata
    made = Element("Metadata")
    element.insert(0, made)
    return made


def _add_categories(band: Element, spec: CogSpec) -> None:
    names = json.loads(dict(spec.tags).get("CLASS_NAMES", "[]"))
    if names and band.find("CategoryNames") is None:
        categories = SubElement(band, "CategoryNames")
        for name in names:
            SubElement(categories, "Category").text = str(name)


def _add_sources(
    band: Element, number: int, spec: CogSpec, sources: Sequence[VrtSource], folder: str
) -> None:
    for source in sources:
        scaled = source.size != source.window.shape
        element = SubElement(band, "SimpleSource")
        if scaled:
            how = spec.resampling
            element.set("resampling", how if isinstance(how, str) else how[number - 1])
        _add_name(element, source.path, folder)
        if source.level:
            options = SubElement(element, "OpenOptions")
            SubElement(options, "OOI", key="OVERVIEW_LEVEL").text = str(source.level - 1)
        SubElement(element, "SourceBand").text = str(number)
        # With these GDAL opens no file before it reads from it.
        SubElement(
            element,
            "SourceProperties",
            RasterXSize=str(source.size[1]),
            RasterYSize=str(source.size[0]),
            DataType=str(band.get("dataType")),
            BlockXSize=str(spec.blocksize),
            BlockYSize=str(spec.blocksize),
        )
        SubElement(element, "SrcRect", _rectangle(0, 0, *source.size))
        SubElement(element, "DstRect", _rectangle(*source.window.bounds()))


def _add_name(element: Element, path: str, folder: str) -> None:
    name = SubElement(element, "SourceFilename", relativeToVRT="1")
    name.text = os.path.relpath(path, folder)


def _rectangle(row: int, col: int, height: int, width: int) -> dict[str, Any]:
    return {"xOff": str(col), "yOff": str(row), "xSize": str(width), "ySize": str(height)}


def _text(root: Element) -> str:
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def write_text(path: str, text: str) -> None:
    """Write a file that gets its name when it is whole and on the disk.

    Parameters
    ----------
    path : str
        Replaced if it exists.
    text : str
        What is in it.
    """
    scratch = f"{path}.tmp"
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sync_file(scratch, file.fileno())
    rename(scratch, path)
