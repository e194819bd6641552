"""What GDAL's validator of Cloud Optimized GeoTIFFs asks, which is not in rasterio's wheel.

The rules of `validate_cloud_optimized_geotiff` with its full check, on what tifffile finds in the
file; test_cog asks GDAL's own script too where that is installed.
"""

from __future__ import annotations

import itertools
import os
import re

import tifffile


def broken_rules(path):
    """List the rules that a file breaks, warnings included."""
    with tifffile.TiffFile(path) as file, open(path, "rb") as raw:
        pages = list(file.pages)
        ghost, first_ifd = ghost_area(raw)
        return [
            *broken_order(path, pages, first_ifd),
            *broken_data_order(pages),
            *([] if "KNOWN_INCOMPATIBLE_EDITION=YES" not in ghost else ["edited since"]),
            *itertools.chain.from_iterable(broken_tiles(raw, page, ghost) for page in pages),
        ]


def ghost_area(raw):
    """Text behind the file header, and where the first IFD has to be."""
    raw.seek(0)
    head = raw.read(4)
    start = 16 if head in (b"II\x2b\0", b"MM\0\x2b") else 8
    raw.seek(start)
    match = re.fullmatch(rb"GDAL_STRUCTURAL_METADATA_SIZE=(\d{6}) bytes\n", raw.read(43))
    if match is None:
        return "", start
    end = start + 43 + int(match[1])
    return raw.read(int(match[1])).decode("latin-1"), end + end % 2


def broken_order(path, pages, first_ifd):
    """Of the directories."""
    if os.path.exists(f"{path}.ovr"):
        yield "overviews are in a file of their own"
    width, height = pages[0].imagewidth, pages[0].imagelength
    # GDAL's own driver makes none for a raster one pixel wide either.
    if max(width, height) > 512 and width > 1 and len(pages) == 1:
        yield "larger than 512 px without overviews"
    if not all(page.is_tiled for page in pages):
        yield "not tiled"
    if pages[0].offset != first_ifd:
        yield f"first IFD at {pages[0].offset}, not {first_ifd}"
    for before, page in itertools.pairwise(pages):
        if page.imagewidth > before.imagewidth or page.imagelength > before.imagelength:
            yield "an overview is larger than the one before"
        if page.offset < before.offset:
            yield "IFDs are not in order"


def broken_data_order(pages):
    """Of the first tile of each level."""
    firsts = [next((at for at in page.dataoffsets if at), 0) for page in pages]
    if firsts[-1] and firsts[-1] < pages[-1].offset:
        yield "data in front of the last IFD"
    for larger, smaller in itertools.pairwise(firsts):
        if larger and larger < smaller:
            yield "data of a level in front of that of a smaller one"


def broken_tiles(raw, page, ghost):
    """Of what the ghost area promises about every tile."""
    last = 0
    for at, size in zip(page.dataoffsets, page.databytecounts, strict=True):
        if not at:
            continue
        if "BLOCK_ORDER=ROW_MAJOR" in ghost and at < last:
            yield f"tile at {at} behind the one at {last}"
        last = at
        raw.seek(at - 4)
        leader, data, trailer = raw.read(4), raw.read(size), raw.read(4)
        if "BLOCK_LEADER=SIZE_AS_UINT4" in ghost and int.from_bytes(leader, "little") != size:
            yield f"tile at {at} has another size than its leader says"
        if "BLOCK_TRAILER=LAST_4_BYTES_REPEATED" in ghost and trailer != data[-4:]:
            yield f"tile at {at} does not end with its last bytes"
