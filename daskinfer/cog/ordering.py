"""Put the tiles of a work file, whose order is that of their arrival, in the order of a COG."""

from __future__ import annotations

import numpy as np

from daskinfer.cog import tiff
from daskinfer.cog.ahead import Ahead, Chosen
from daskinfer.cog.header import FRAME, is_large, planned, strict_start, whole_pages
from daskinfer.cog.spec import CogSpec
from daskinfer.cog.tilecopy import compact, copy_tiles
from daskinfer.cog.tileindex import IndexedFile, new_file

__all__ = ["order_in_place", "write_strict"]


def write_strict(
    file: IndexedFile, spec: CogSpec, chosen: Chosen, main: tiff.Ifd, output: str, ahead: Ahead
) -> None:
    """Write a file in the order of GDAL's COG driver.

    Parameters
    ----------
    file : IndexedFile
        The work file.
    spec : CogSpec
        Of both.
    chosen : callable
        Tells by their offsets which tiles go there.
    main : mapping
        Tags of the full resolution.
    output : str
        Replaced if it exists.
    ahead : Ahead
        What has been copied already.
    """
    upper, frames = {}, 0
    for level in reversed(range(1, len(spec.shapes))):
        upper[level] = chosen(file.offsets(level).ravel())
        frames += int((file.counts(level).ravel() + 2 * FRAME)[upper[level]].sum())
    room = whole_pages(frames) if is_large(spec) else frames
    first = strict_start(main, spec)
    lowest = chosen(file.offsets(0).ravel())
    done = ahead.hand_over(f"{output}.tmp", first, room, lowest)
    with new_file(output, planned(main, spec, tiff.STRICT_GHOST), keep=bool(done)) as new:
        if upper:
            copy_tiles(file, new, upper, first + room - frames, FRAME)
        copy_tiles(file, new, {0: lowest}, first + room, FRAME, done)


def order_in_place(file: IndexedFile, shared: int) -> None:
    """Put overviews in order behind the rest, and the first tile of full resolution last.

    Validators want the first tile of each level behind that of the next smaller one.  Tiles
    move up to where these were.

    Parameters
    ----------
    file : IndexedFile
        The work file.
    shared : int
        Offset of the tile of nodata that many index entries share; it stays.
    """
    left, chosen = [], {}
    for level in reversed(range(len(file.layout.grids))):
        spans = np.stack([file.offsets(level).ravel(), file.counts(level).ravel()])
        chosen[level] = (spans[0] != shared) & (level > 0)
        chosen[level][0] = True
        left.append(spans[:, chosen[level] & (spans[0] != shared)])
    copy_tiles(file, file, chosen, file.grow(0), frame=0)
    # On the disk, as what they were copied from is about to be overwritten.
    file.sync()
    compact(file, shared, np.concatenate(left, axis=1))
