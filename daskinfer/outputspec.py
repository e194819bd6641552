"""What an output file says of itself: the form of its pixels, and what they mean."""

from __future__ import annotations

import json
import re
from typing import Any

from ._version import __version__
from .cog.spec import CogSpec
from .forward import OutputFormat
from .grid import Grid
from .model import Model

__all__ = ["cog_spec"]

_FEW_BANDS = 16


def cog_spec(grid: Grid, form: OutputFormat, model: Model, **options: Any) -> CogSpec:
    """The output file for a grid: nothing of the source's tags, everything of the output's."""
    classes = model.output == "classes"
    names, colors = model.class_names, model.class_colors or ()
    tags = [("TIFFTAG_SOFTWARE", f"daskinfer {__version__}")]
    if names and classes:
        tags.append(("CLASS_NAMES", json.dumps(names)))
    if grid.point:
        # Where the pixels lie, as the transform: GDAL writes GeoKeys by it.
        tags.append(("AREA_OR_POINT", "Point"))
    # TIFF has colour tables for one band only.
    if colors and classes and form.bands > 1:
        tags.append(("CLASS_COLORS", json.dumps(colors)))
    if isinstance(options.get("compress"), str):
        # GDAL and rasterio write codecs in capitals.
        options["compress"] = options["compress"].lower()
    if options.get("interleave", "auto") == "auto":
        # A reader of one pixel or one band would have to decode all bands of its block.
        options["interleave"] = "pixel" if form.bands <= _FEW_BANDS else "band"
    resampling: str | tuple[str, ...] = "mode" if classes else "average"
    if classes and form.scales:
        resampling = tuple("mode" if scale == 1 else "average" for scale in form.scales)
    return CogSpec(
        height=grid.height,
        width=grid.width,
        count=form.bands,
        dtype=form.dtype,
        transform=None if grid.transform is None else tuple(grid.transform)[:6],
        crs=_by_code(grid.crs),
        gcps=grid.gcps,
        gcps_crs=grid.gcps_crs,
        rpcs=grid.rpcs,
        nodata=form.nodata,
        descriptions=_descriptions(form, model),
        scales=form.scales,
        colors=tuple(map(_rgba, colors)) if classes and form.bands == 1 else (),
        tags=tuple(tags),
        resampling=resampling,
        **options,
    )


def _by_code(crs: str | None) -> str | None:
    """A CRS with heights by its code, if its definition ends with one.

    GDAL finds the GeoKeys of such a one by its code alone, and others without a word.
    """
    code = re.search(r'ID\["(\w+)",(\d+)\]\]$', crs or "")
    if crs is None or code is None or not crs.startswith("COMPOUNDCRS"):
        return crs
    return f"{code[1]}:{code[2]}"


def _descriptions(form: OutputFormat, model: Model) -> tuple[str, ...]:
    if model.output == "classes":
        if form.bands == 2 and form.scales:
            return "class", "confidence"
        return ("class",) if form.bands == 1 else ()
    names = model.class_names or ()
    return names if len(names) == form.bands else ()


def _rgba(color: str) -> tuple[int, int, int, int]:
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue, 255
