"""Headers: of the work file, as it is found, and of the finished file, as it will be."""

from __future__ import annotations

from functools import partial

import numpy as np

from daskinfer.cog import tiff
from daskinfer.cog.spec import CogSpec, template
from daskinfer.cog.tileindex import IndexedFile
from daskinfer.fileio import read_at

__all__ = [
    "FRAME",
    "PAGE",
    "indexed",
    "is_large",
    "planned",
    "strict_start",
    "whole_pages",
]

FRAME = 4
"""Bytes before and behind each tile of a finished file."""

PAGE = 4096
"""What file systems deal in."""

# Bytes of pixels from which on it matters how long finishing takes.
_LARGE = 256 << 20

# What must agree before tiles of a spec may go into a file.
_STRUCTURE = {
    tiff.BITS_PER_SAMPLE: "bits per sample",
    tiff.COMPRESSION: "compression",
    tiff.SAMPLES_PER_PIXEL: "band count",
    tiff.PREDICTOR: "predictor",
    tiff.TILE_WIDTH: "block size",
    tiff.SAMPLE_FORMAT: "sample format",
    tiff.GDAL_NODATA: "nodata",
    tiff.PLANAR_CONFIGURATION: "interleave",
    tiff.PHOTOMETRIC: "colour space",
    tiff.JPEG_TABLES: "jpeg quality",
    tiff.LERC_PARAMETERS: "lerc codec",
}


def whole_pages(size: int) -> int:
    """Round bytes up to pages.

    >>> whole_pages(4096), whole_pages(4097)
    (4096, 8192)
    """
    return -(-size // PAGE) * PAGE


def planned(main: tiff.Ifd, spec: CogSpec, ghost: bytes) -> tiff.Layout:
    """The header of a file with these tags."""
    return tiff.plan_layout(main, spec.shapes, spec.blocksize, ghost)


def strict_start(main: tiff.Ifd, spec: CogSpec) -> int:
    """Where in a finished file the full resolution would begin if there were no overviews.

    Of a large file that is at a page: whole pages can be inserted there.
    """
    start = planned(main, spec, tiff.STRICT_GHOST).data_start
    return whole_pages(start) if is_large(spec) else start


def is_large(spec: CogSpec) -> bool:
    """Whether copying the file takes a time that matters."""
    return spec.height * spec.width * spec.count * np.dtype(spec.dtype).itemsize >= _LARGE


def indexed(path: str, fd: int, spec: CogSpec) -> tuple[tiff.Ifd, IndexedFile]:
    """Find the index of a work file, and check that the file is what `spec` says."""
    ifds = tiff.parse(partial(read_at, path, fd))
    shapes = tuple(tiff.shape_of(ifd) for ifd in ifds)
    if shapes != spec.shapes:
        raise ValueError(f"{path} was made for other sizes: {shapes}, not {spec.shapes}")
    wanted = template(spec)
    for tag, name in _STRUCTURE.items():
        if ifds[0].get(tag) != wanted.get(tag):
            raise ValueError(f"{path} was made with another {name}: delete it to start again")
    layout = planned(ifds[0], spec, tiff.WORK_GHOST)
    return ifds[0], IndexedFile(path, fd, layout)
