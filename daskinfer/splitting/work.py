"""Write a raster into a grid of files, each as `daskinfer.cog` writes one.

While it grows, every file has a work file beside its place, and ``<output>.vrt.partial`` shows them
all as one raster.  That VRT is written when all work files are there, so that from then on a file
without a work file is a finished one; the output's own VRT comes last.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from affine import Affine
from numpy.typing import NDArray
from rasterio.windows import Window as RasterWindow

from ..cog import WorkFile
from ..cog.encode import encode_chunk
from ..cog.overview import Shape, level_shapes, reduce2x2
from ..cog.spec import CogSpec, no_georeferencing_warning
from ..cog.statistics import FAILED, merged
from ..cog.tileindex import whole_chunks
from ..tiling import Span, Window
from .catalog import write_catalog
from .pieces import EncodedPieces, Index, Pieces, Places, is_finished
from .vrt import VrtSource, mosaic, overview, write_text

__all__ = ["SplitWork"]

# Blocks along a side of what is read at a time to make the smallest overviews.
_BLOCKS = 4
_PARTS = re.compile(r"(.*\.vrt)(\..*)", re.IGNORECASE | re.DOTALL)


class SplitWork:
    """The files that chunks are appended to; made by `create` or `open`.

    As safe for threads and processes as `WorkFile`.  No file stays open.

    Parameters
    ----------
    path : str
        The VRT of the unfinished files: the output's name, which ends in ``.vrt``, and a suffix
        that all work files have too.
    pieces : Pieces
        The raster and its files.
    chunk : (int, int)
        Sides of the chunk grid in pixels.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """

    def __init__(self, path: str, pieces: Pieces, chunk: Shape) -> None:
        self.path = os.path.abspath(path)
        self.pieces, self.chunk = pieces, chunk
        output, self._suffix = _parted(self.path)
        self._places = Places(output, pieces.grid)
        if not os.path.exists(self.path):
            raise FileNotFoundError(2, os.strerror(2), self.path)

    @classmethod
    def create(cls, path: str, pieces: Pieces, chunk: Shape) -> SplitWork:
        """Make all work files, in which every block is missing.

        Parameters
        ----------
        path, pieces, chunk
            As for the class; nothing of that name may exist.

        Returns
        -------
        SplitWork

        Raises
        ------
        FileExistsError
            If `path` exists: open it to go on, or delete it.
        """
        path = os.path.abspath(path)
        if os.path.exists(path):
            raise FileExistsError(f"{path} exists: open it to go on, or delete it")
        cls.discard(path, pieces)
        output, suffix = _parted(path)
        places = Places(output, pieces.grid)
        places.folder.mkdir(exist_ok=True)
        sources = []
        for index in pieces:
            work = f"{places.piece(index)}{suffix}"
            WorkFile.create(work, pieces.spec_of(index), pieces.chunk_in(chunk)).close()
            sources.append(_source(work, pieces, index))
        write_text(path, mosaic(pieces.spec, sources, os.path.dirname(path)))
        return cls(path, pieces, chunk)

    @classmethod
    def open(cls, path: str, pieces: Pieces, chunk: Shape) -> SplitWork:
        """Go on with the files of an earlier run."""
        return cls(path, pieces, chunk)

    @staticmethod
    def discard(path: str, pieces: Pieces) -> None:
        """Remove what is unfinished, if it is there; finished files stay."""
        output, suffix = _parted(os.path.abspath(path))
        Path(path).unlink(missing_ok=True)
        places = Places(output, pieces.grid)
        for found in list(places.ours()):
            if found.name.endswith((suffix, f"{suffix}.tmp")):
                found.unlink()
        with contextlib.suppress(OSError):  # something else is in it, or it is not there
            places.folder.rmdir()

    def __reduce__(self) -> tuple[Any, ...]:
        return SplitWork, (self.path, self.pieces, self.chunk)

    def __enter__(self) -> SplitWork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: no file is open."""

    def append(self, encoded: EncodedPieces) -> None:
        """Write a chunk and commit it, as `WorkFile.append`."""
        for index, part in encoded.parts:
            with self._opened(index) as work:
                work.append(part)

    def done(
        self, rows: Sequence[int] | None = None, cols: Sequence[int] | None = None
    ) -> NDArray[np.bool_]:
        """Tell which chunks are committed, as `WorkFile.done`."""
        spec = self.pieces.spec
        rows = range(0, spec.height, self.chunk[0]) if rows is None else rows
        cols = range(0, spec.width, self.chunk[1]) if cols is None else cols
        blocks = self._all_blocks()
        starts = [[first // spec.blocksize for first in axis] for axis in (rows, cols)]
        return whole_chunks(blocks, *starts)

    def _all_blocks(self) -> NDArray[np.bool_]:
        return self.pieces.joined({index: self._blocks(index) for index in self.pieces})

    def _blocks(self, index: Index) -> NDArray[np.bool_]:
        if self._finished(index):
            return np.ones(self.pieces.spec_of(index).grid(0), bool)
        with self._opened(index) as work:
            return work.done_blocks()

    def finish(
        self,
        output: str | os.PathLike[str],
        layout: str = "strict",
        *,
        allow_missing: bool = False,
        failed: Sequence[tuple[int, int]] = (),
        threads: int = 2,
    ) -> int:
        """Turn all work files into COGs, and show them in the VRT of the output.

        Can be called again after it was killed.  The VRT of an earlier output goes first, so that
        it never shows files of two outputs.

        Parameters
        ----------
        output : path
            The VRT; must be the one that `path` was named after.
        layout, allow_missing, failed, threads
            As for `WorkFile.finish`, of each file.

        Returns
        -------
        int
            Bytes of all files.

        Raises
        ------
        RuntimeError, OSError
            As of `WorkFile.finish`.
        """
        output = os.path.abspath(output)
        if output != self._places.output:
            raise ValueError(f"{self.path} becomes {self._places.output}, not {output}")
        given_up = [(self._piece_of(corner), corner) for corner in failed]
        missing = 0 if allow_missing else np.count_nonzero(~self._all_blocks())
        if missing:
            raise RuntimeError(
                f"{self.path}: {missing} blocks are missing: write them, or pass allow_missing=True"
            )
        # Of an earlier output: it would show files of both until all are replaced.
        Path(output).unlink(missing_ok=True)

        def finish_one(index: Index) -> None:
            if not self._finished(index):
                corners = [corner for piece, corner in given_up if piece == index]
                with self._opened(index) as work:
                    work.finish(
                        self._places.piece(index),
                        layout,
                        allow_missing=allow_missing,
                        failed=corners,
                        threads=1,
                    )

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(finish_one, self.pieces):
                pass
        described = self._show(output, len(failed))
        os.unlink(self.path)
        return self._tidy(output, described)

    def _show(self, output: str, failed: int) -> list[str]:
        """Write the VRT, and before it all that it refers to; returns the STAC files beside."""
        spec, places = self.pieces.spec, self._places
        made = self._write_overviews()
        sources = [_source(places.piece(index), self.pieces, index) for index in self.pieces]
        tags = {FAILED: str(failed)} if failed else {}
        told = self._statistics() if spec.with_statistics else ()
        text = mosaic(
            spec,
            sources,
            os.path.dirname(output),
            overviews=made,
            tags=tags,
            statistics=told,
        )
        described = write_catalog(self.pieces, places)
        write_text(output, text)
        return described

    def _tidy(self, output: str, described: list[str]) -> int:
        """Remove files of an earlier output of this name; returns the bytes of this one's."""
        places = self._places
        current = {*described, places.top, *(places.piece(index) for index in self.pieces)}
        current |= {places.overview(1 << level) for level in range(1, len(self.pieces.spec.shapes))}
        size = os.path.getsize(output)
        for path in list(places.ours()):
            if str(path) in current:
                size += path.stat().st_size
            elif is_finished(path):
                path.unlink()
        return size

    def _write_overviews(self) -> list[str]:
        """Write the overviews of the whole; returns their paths, the largest first."""
        spec, places, folder = self.pieces.spec, self._places, str(self._places.folder)
        shared = _levels_in_files(self.pieces)
        made = []
        for level in range(1, min(shared, len(spec.shapes) - 1) + 1):
            sources = [
                _level_source(places.piece(index), self.pieces, index, level)
                for index in self.pieces
            ]
            made.append(places.overview(1 << level))
            write_text(made[-1], overview(spec, spec.shapes[level], sources, folder))
        rest = range(shared + 1, len(spec.shapes))
        if rest:
            self._write_top(made[-1] if made else None, shared)
        for level in rest:
            shape = spec.shapes[level]
            window = Window(Span(0, shape[0]), Span(0, shape[1]))
            top = VrtSource(places.top, spec.shapes[rest[0]], level - rest[0], shape, window)
            made.append(places.overview(1 << level))
            write_text(made[-1], overview(spec, shape, [top], folder))
        return made

    def _write_top(self, below: str | None, level: int) -> None:
        """Write the COG of the overviews above a level, from the VRT of that level."""
        spec, places = self.pieces.spec, self._places
        if below is None:
            below = f"{places.top}.vrt"
            sources = [_source(places.piece(index), self.pieces, index) for index in self.pieces]
            write_text(below, overview(spec, spec.shapes[0], sources, str(places.folder)))
        top, side = _top_spec(spec, level + 1), _BLOCKS * spec.blocksize
        scratch = f"{places.top}{self._suffix}"
        Path(scratch).unlink(missing_ok=True)
        with (
            no_georeferencing_warning(),
            rasterio.open(below) as dataset,
            WorkFile.create(scratch, top, (side, side)) as work,
        ):
            for row in range(0, top.height, side):
                for col in range(0, top.width, side):
                    window = RasterWindow(2 * col, 2 * row, 2 * side, 2 * side).intersection(
                        RasterWindow(0, 0, dataset.width, dataset.height)
                    )
                    pixels = reduce2x2(dataset.read(window=window), spec.resampling, spec.nodata)
                    work.append(encode_chunk(top, pixels, row, col, work.levels))
            work.finish(places.top)
        Path(f"{places.top}.vrt").unlink(missing_ok=True)

    def _statistics(self) -> list[dict[str, str]]:
        """Statistics of the bands of the whole, from those in the headers of the files."""
        lines = np.zeros((self.pieces.grid[0] * self.pieces.grid[1], self.pieces.spec.count, 5))
        for number, index in enumerate(self.pieces):
            height, width = self.pieces.window(index).shape
            with rasterio.open(self._places.piece(index)) as dataset:
                for band in range(dataset.count):
                    lines[number, band] = _line(dataset.tags(band + 1), height * width)
        return [_tags(line, *self.pieces.spec.shapes[0]) for line in merged(lines)]

    def _piece_of(self, corner: tuple[int, int]) -> Index:
        return corner[0] // self.pieces.side, corner[1] // self.pieces.side

    def _finished(self, index: Index) -> bool:
        piece = self._places.piece(index)
        return not os.path.exists(f"{piece}{self._suffix}") and os.path.exists(piece)

    @contextlib.contextmanager
    def _opened(self, index: Index) -> Iterator[WorkFile]:
        path = f"{self._places.piece(index)}{self._suffix}"
        chunk = self.pieces.chunk_in(self.chunk)
        with WorkFile.open(path, self.pieces.spec_of(index), chunk) as work:
            yield work


def _parted(path: str) -> tuple[str, str]:
    """The output that a work VRT becomes, and the suffix of unfinished files."""
    parts = _PARTS.fullmatch(path)
    if parts is None:
        raise ValueError(f"{path!r} is not the name of a VRT and a suffix")
    return parts[1], parts[2]


def _source(path: str, pieces: Pieces, index: Index) -> VrtSource:
    return _level_source(path, pieces, index, 0)


def _level_source(path: str, pieces: Pieces, index: Index, level: int) -> VrtSource:
    """A file's part of an overview; of its smallest one where it has too few."""
    shapes, window = pieces.spec_of(index).shapes, pieces.window(index)
    there = min(level, len(shapes) - 1)
    spans = (
        Span(span.start >> level, -(-span.stop >> level)) for span in (window.rows, window.cols)
    )
    return VrtSource(path, shapes[0], there, shapes[there], Window(*spans))


def _levels_in_files(pieces: Pieces) -> int:
    """Overview levels that whole files have, and at which they begin at whole pixels."""
    block = min(pieces.spec.blocksize, 512)
    levels = len(level_shapes(pieces.side, pieces.side, block)) - 1
    return min(levels, (pieces.side & -pieces.side).bit_length() - 1)


def _top_spec(spec: CogSpec, level: int) -> CogSpec:
    height, width = spec.shapes[level]
    transform = spec.transform
    if transform is not None:
        transform = tuple(Affine(*transform) @ Affine.scale(2**level))[:6]
    return replace(
        spec,
        height=height,
        width=width,
        transform=transform,
        crs=spec.crs if spec.transform is not None else None,
        gcps=(),
        gcps_crs=None,
        rpcs=(),
        tags=(),
        statistics=False,
        failures=False,
    )


def _line(tags: dict[str, str], pixels: int) -> tuple[float, ...]:
    """Count, mean, sum of squared deviations, smallest and largest, from a band's metadata."""
    if "STATISTICS_MEAN" not in tags:
        return (0.0,) * 5
    low, high, mean, deviation, percent = (
        float(tags[f"STATISTICS_{name}"])
        for name in ("MINIMUM", "MAXIMUM", "MEAN", "STDDEV", "VALID_PERCENT")
    )
    count = round(percent / 100 * pixels)
    return count, mean, deviation**2 * count, low, high


def _tags(line: Any, height: int, width: int) -> dict[str, str]:
    count, mean, square, low, high = line.tolist()
    if not count:
        return {}
    numbers = {
        "MINIMUM": low,
        "MAXIMUM": high,
        "MEAN": mean,
        "STDDEV": (square / count) ** 0.5,
        "VALID_PERCENT": 100 * count / (height * width),
    }
    return {f"STATISTICS_{name}": repr(value).removesuffix(".0") for name, value in numbers.items()}
