"""Write a Cloud Optimized GeoTIFF chunk by chunk, in any order, from any number of processes.

The work file is a valid sparse BigTIFF from its first moment: its header is planned from tags
that GDAL wrote, with zeros for the index.  A chunk is encoded where it was computed, together
with the overview levels that it can make alone; appended in one write; and committed by setting
first its offsets, then its byte counts, those of the full resolution last.  So a kill loses only
chunks in flight, and the file itself says what is done.

Byte counts commit, not offsets: GDAL, libtiff and tifffile all call a tile missing when its byte
count is zero, and GDAL fails on a tile that has a count and no offset.

Levels that no chunk could make alone are made as soon as what they are made of is there.  Finishing
makes the last of them, and copies encoded tiles into the order of GDAL's own COG driver.  No tile
is encoded twice.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskinfer.cog import statistics as cogstats
from daskinfer.cog import tiff
from daskinfer.cog.ahead import Ahead
from daskinfer.cog.encode import (
    EncodedChunk,
    EncodedPart,
    encode_nothing,
    encode_tile,
)
from daskinfer.cog.header import indexed, is_large, planned, strict_start
from daskinfer.cog.ordering import order_in_place, write_strict
from daskinfer.cog.overview import Shape
from daskinfer.cog.spec import CogSpec, no_georeferencing_warning, template
from daskinfer.cog.statistics import StatisticsTable
from daskinfer.cog.tileindex import new_file, whole_chunks
from daskinfer.cog.upper import Region, made_from, regions
from daskinfer.fileio import rename
from daskinfer.filelock import FileLock

__all__ = ["WorkFile"]

# Sizes of the shared tile of nodata and of the table of statistics, in front of both.
_SHARED = struct.Struct("<IQ")


class WorkFile:
    """The file that chunks are appended to; made by `create` or `open`.

    Safe to use from several threads, and from several processes of one host, each of which has
    its own: pickling sends the path, and unpickling opens it again.

    Parameters
    ----------
    path : str
        Where it is.
    spec : CogSpec
        The file.
    chunk : (int, int)
        Side of the chunk grid in pixels.

    Attributes
    ----------
    levels : int
        Overview levels that each chunk makes alone, to be passed to `encode_chunk`.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it was made with another spec.
    """

    def __init__(self, path: str | os.PathLike[str], spec: CogSpec, chunk: Shape) -> None:
        self.path = os.path.abspath(path)
        self.spec, self.chunk = spec, chunk
        self.levels = spec.local_levels(chunk)
        self._lock = FileLock(self.path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._main, self._file = indexed(self.path, self._fd, spec)
            self._fill_at, self._fill_size = self._shared_tile()
            self._statistics = self._table()
            self._ahead = Ahead(_ahead_path(self.path), self._file, self._is_written)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], spec: CogSpec, chunk: Shape, *, ahead: bool = False
    ) -> WorkFile:
        """Make a work file in which every block is missing.

        Parameters
        ----------
        path : path
            Must not exist yet.
        spec : CogSpec
            The file.
        chunk : (int, int)
            Side of the chunk grid in pixels.
        ahead : bool
            Copy the full resolution of a large file into the ``strict`` order while chunks still
            come, to ``<path>.ahead``: little is left for the end, but the space is taken earlier.
            Only on file systems that can insert pages into a file, as ext4 and XFS.

        Returns
        -------
        WorkFile
            Open.

        Raises
        ------
        FileExistsError
            If `path` exists: open it to go on, or delete it.
        ValueError
            If `chunk` does not fit the blocks.
        """
        path = os.path.abspath(path)
        spec.local_levels(chunk)
        if os.path.exists(path):
            raise FileExistsError(f"{path} exists: open it to go on, or delete it")
        main = dict(template(spec))
        if tiff.GDAL_METADATA in main:
            main[tiff.GDAL_METADATA] = cogstats.blanked(main[tiff.GDAL_METADATA])
        layout = planned(main, spec, tiff.WORK_GHOST)
        bands = spec.count // spec.planes
        tile = encode_tile(np.full((bands, 1, 1), spec.fill, spec.dtype), spec)
        with new_file(path, layout) as file:
            table = _table_size(spec)
            file.write(_SHARED.pack(len(tile), table) + tile, layout.data_start)
            file.grow(-file.grow(0) % 8 + table)  # as `_data_start`
        Path(_ahead_path(path)).unlink(missing_ok=True)
        work = cls(path, spec, chunk)
        if ahead and is_large(spec):
            work._ahead.begin(strict_start(work._main, spec))
        return work

    @staticmethod
    def discard(path: str | os.PathLike[str]) -> None:
        """Remove a work file, if it is there."""
        for name in (path, _ahead_path(path)):
            Path(name).unlink(missing_ok=True)

    @classmethod
    def open(cls, path: str | os.PathLike[str], spec: CogSpec, chunk: Shape) -> WorkFile:
        """Open a work file to go on with it.

        Parameters
        ----------
        path, spec, chunk
            As they were for `create`.

        Returns
        -------
        WorkFile
            Open.
        """
        return cls(path, spec, chunk)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkFile, (self.path, self.spec, self.chunk)

    def __enter__(self) -> WorkFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _shared_tile(self) -> tuple[int, int]:
        """Where the one tile of nodata is, and its size: behind the header, after its size."""
        at = self._file.layout.data_start
        size, table = _SHARED.unpack(self._file.read(_SHARED.size, at))
        if table != _table_size(self.spec):
            kept = "with" if table else "without"
            raise ValueError(f"{self.path} was made {kept} statistics: delete it to start again")
        return at + _SHARED.size, size

    def _table(self) -> StatisticsTable | None:
        """What is known of the pixels of each block, behind the shared tile."""
        if not self.spec.with_statistics:
            return None
        at = self._data_start() - _table_size(self.spec)
        return StatisticsTable(self._file, at, self.spec.grid(0), self.spec.count)

    def append(self, encoded: EncodedChunk, *, sync: bool = False) -> None:
        """Write a chunk and commit it.

        A chunk that is there already is replaced; the bytes of the first stay behind unused.

        Parameters
        ----------
        encoded : EncodedChunk
            From `encode_chunk`.
        sync : bool
            Have the pixels on the disk before they are committed, against loss of power.  The
            death of a process needs no such care.

        Raises
        ------
        OSError
            If the disk is full or fails; names the file.  The chunk is then not committed, or all
            of it is: an overview tile that is made of several chunks comes after the last of them.
        FileNotFoundError
            If the file was finished meanwhile.
        """
        todo = self._append(encoded, sync)
        while todo:
            todo += self._raise(todo.pop())

    def _append(self, encoded: EncodedChunk, sync: bool = False) -> list[Region]:
        """Write and commit; returns the regions of upper levels that are then complete."""
        at = self._place(encoded)
        if sync:
            self._file.sync()
        # Locked again: a chunk that was given to a second worker may arrive twice at once, and
        # the offset of one with the byte count of the other would be no tile.
        with self._lock.short():
            self._commit(encoded, at)
            done = self._completed(encoded)
        if encoded.parts[0].level == 0:
            for part in encoded.parts[: self.spec.planes]:
                self._ahead.advance(part.row, part.sizes.shape[0])
        return done

    def _place(self, encoded: EncodedChunk) -> int:
        """Write tiles that nothing points at yet; returns where they are."""
        with self._lock.short():
            at = self._file.grow(len(encoded.data))
        try:
            self._file.write(encoded.data, at)
        except OSError as error:
            # What was copied ahead takes the place of what cannot be done without.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._ahead.drop():
                raise
            self._file.write(encoded.data, at)
        return at

    def _commit(self, encoded: EncodedChunk, at: int) -> None:
        """Point the index at tiles that start at `at`.

        A tile that is committed already is taken out first, or else a kill half-way could leave
        a new offset with an old count; and so are those that were made from it.
        """
        parts = encoded.parts
        for part in parts:
            if self._file.counts_of(part.level, part.row, part.col, part.sizes.shape).any():
                self._ahead.drop()
                self._file.patch_counts(part.level, part.row, part.col, 0 * part.sizes)
                if part.level == parts[-1].level:
                    self._take_out_above(part)
        for part in parts:
            ends = at + np.cumsum(part.sizes).reshape(part.sizes.shape)
            at += int(part.sizes.sum())
            offsets = np.where(part.sizes, ends - part.sizes, self._fill_at)
            self._file.patch_offsets(part.level, part.row, part.col, offsets)
        if self._statistics is not None and encoded.statistics is not None:
            self._statistics.patch(parts[0].row, parts[0].col, encoded.statistics)
        for part in reversed(parts):
            counts = np.where(part.sizes, part.sizes, self._fill_size)
            self._file.patch_counts(part.level, part.row, part.col, counts)

    def _is_written(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tiles go into the finished file."""
        return np.asarray((offsets != self._fill_at) | (not self.spec.sparse))

    def done_blocks(self) -> NDArray[np.bool_]:
        """Tell which blocks are committed, with all overviews that their chunk makes.

        Returns
        -------
        ndarray of bool, shape (block rows, block columns)
            Of the full resolution.
        """
        counts = self._file.counts(0).reshape(self.spec.planes, *self.spec.grid(0))
        return np.asarray((counts > 0).all(axis=0))

    def done(
        self, rows: Sequence[int] | None = None, cols: Sequence[int] | None = None
    ) -> NDArray[np.bool_]:
        """Tell which chunks are committed.

        Parameters
        ----------
        rows, cols : sequence of int, optional
            First pixel of each chunk on each axis, from 0 up; by default every ``chunk`` pixels.

        Returns
        -------
        ndarray of bool, shape (chunk rows, chunk columns)
            True where all blocks of the chunk are committed.
        """
        side = self.spec.blocksize
        rows = range(0, self.spec.height, self.chunk[0]) if rows is None else rows
        cols = range(0, self.spec.width, self.chunk[1]) if cols is None else cols
        starts = [[first // side for first in axis] for axis in (rows, cols)]
        return whole_chunks(self.done_blocks(), *starts)

    def finish(
        self,
        output: str | os.PathLike[str],
        layout: str = "strict",
        *,
        allow_missing: bool = False,
        failed: Sequence[tuple[int, int]] = (),
        threads: int = 2,
    ) -> int:
        """Turn the work file into the finished file, and remove it.

        Can be called again after it was killed.

        Parameters
        ----------
        output : path
            Appears whole or not at all; replaced if it exists.
        layout : {"strict", "append"}
            ``strict`` copies all tiles into the order of GDAL's COG driver, and needs the space
            twice.  ``append`` puts the overviews at the end of the work file, closes the gaps and
            renames it: valid too, and no larger, but readers make more requests, and `output`
            must be on the same file system.
        allow_missing : bool
            Make chunks that are not committed nodata.  From then on they count as committed,
            also if the finish is killed.
        failed : sequence of (int, int)
            First row and column of the chunks that were given up and are nodata; how many they
            are becomes the tag FAILED_CHUNKS of a spec with ``failures=True``.
        threads : int
            That make the last overview levels.

        Returns
        -------
        int
            Bytes of `output`.

        Raises
        ------
        RuntimeError
            If blocks are missing and may not be.
        OSError
            If the disk is full or fails; names the file.
        """
        if layout not in ("strict", "append"):
            raise ValueError(f"layout {layout!r} is not 'strict' or 'append'")
        output = os.path.abspath(output)
        # A worker that was given up for lost may still be at work on a chunk, and must find the
        # file either as it left it or gone.
        with self._lock.long():
            self._settle(allow_missing)
            self._raise_levels(threads)
            main = self._described(len(failed))
            if layout == "strict":
                write_strict(self._file, self.spec, self._is_written, main, output, self._ahead)
                os.unlink(self.path)
            else:
                self._ahead.drop()
                order_in_place(self._file, self._fill_at)
                self._describe_in_place(main)
                self._file.sync()
                rename(self.path, output)
        self.close()
        return os.path.getsize(output)

    def _settle(self, allow_missing: bool) -> None:
        blocks = self.done_blocks()
        if blocks.all():
            return
        if not allow_missing:
            row, col = (int(i) * self.spec.blocksize for i in np.argwhere(~blocks)[0])
            raise RuntimeError(
                f"{self.path}: {np.count_nonzero(~blocks)} of {blocks.size} blocks are missing,"
                f" the first at row {row}, column {col}: write them, or pass allow_missing=True"
            )
        for row, col in np.argwhere(~self.done()):
            self._append(encode_nothing(self.spec, self.chunk, int(row), int(col)))

    def _raise_levels(self, threads: int) -> None:
        """Make what is missing of the levels above those of chunks."""
        level = 0
        while level < self.levels and self._file.counts(level + 1).all():
            level += 1
        with no_georeferencing_warning(), ThreadPoolExecutor(threads) as pool:
            while todo := list(regions(self.spec, level)):
                ups = range(1, todo[0].step + 1)
                missing = [r for r in todo if not all(self._is_there(r, up) for up in ups)]
                for _ in pool.map(self._raise, missing):
                    pass
                level += todo[0].step

    def _raise(self, region: Region) -> list[Region]:
        """Make what is made of a region; returns the regions that are then complete."""
        seen = self._looked_at(region)
        encoded = region.encode(self.path, self.spec)
        at = self._place(encoded)
        with self._lock.short():
            # A tile that was replaced meanwhile is read by whoever replaced it.
            if not np.array_equal(self._looked_at(region), seen):
                return []
            self._commit(encoded, at)
            return self._completed(encoded)

    def _looked_at(self, region: Region) -> NDArray[np.int64]:
        """Where the tiles of a region are, by which it is known whether they changed."""
        row, col, grid = region.tiles(self.spec)
        rows = self.spec.grid(region.level)[0]
        planes = range(self.spec.planes)
        spans = [self._file.offsets_of(region.level, row + p * rows, col, grid) for p in planes]
        return np.stack(spans)

    def _is_there(self, region: Region, up: int = 0) -> bool:
        """Whether all tiles of a region are, or those that it makes so many levels up."""
        row, col, grid = region.tiles(self.spec, up)
        level, planes = region.level + up, range(self.spec.planes)
        rows = self.spec.grid(level)[0]
        return all(self._file.counts_of(level, row + p * rows, col, grid).all() for p in planes)

    def _completed(self, encoded: EncodedChunk) -> list[Region]:
        """Regions of which all tiles are there, now that these are."""
        if self.spec.transform is None:
            # rasterio warns of such a file, and hiding that is not safe in threads: `finish` does.
            return []
        part = next(part for part in encoded.parts if part.level == encoded.parts[-1].level)
        return [region for region in made_from(self.spec, part) if self._is_there(region)]

    def _take_out_above(self, part: EncodedPart) -> None:
        """Take out the tiles of upper levels that were made from others."""
        plane = part.row // self.spec.grid(part.level)[0]
        row, col = part.row - plane * self.spec.grid(part.level)[0], part.col
        last = row + part.sizes.shape[0] - 1, col + part.sizes.shape[1] - 1
        for level in range(part.level + 1, len(self.spec.shapes)):
            up = level - part.level
            grid = (last[0] >> up) - (row >> up) + 1, (last[1] >> up) - (col >> up) + 1
            first = (row >> up) + plane * self.spec.grid(level)[0]
            self._file.patch_counts(level, first, col >> up, np.zeros(grid, np.int64))

    def _described(self, failed: int) -> tiff.Ifd:
        """Tags of the full resolution, with those among them that are known at the end only."""
        blank = template(self.spec).get(tiff.GDAL_METADATA)
        if blank is None:
            return self._main
        height, width = self.spec.shapes[0]
        statistics = None if self._statistics is None else self._statistics.merged()
        told = cogstats.filled(blank, statistics, height * width, failed)
        return {**self._main, tiff.GDAL_METADATA: told}

    def _describe_in_place(self, main: tiff.Ifd) -> None:
        old, new = (ifd.get(tiff.GDAL_METADATA) for ifd in (self._main, main))
        if old is not None and new is not None and new != old:
            at = next(at for at, value in self._file.layout.header if value == old.value)
            self._file.write(new.value or b"", at)

    def _data_start(self) -> int:
        """First byte that belongs to chunks."""
        end = self._fill_at + self._fill_size
        return end + -end % 8 + _table_size(self.spec)


def _ahead_path(path: str | os.PathLike[str]) -> str:
    return f"{os.path.abspath(path)}.ahead"


def _table_size(spec: CogSpec) -> int:
    return StatisticsTable.size(spec.grid(0), spec.count) if spec.with_statistics else 0
