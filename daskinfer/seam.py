"""Measure seams on the user's own raster: what a halo, or blending, leaves of them.

The reference is the whole-image run of a sample window: the window as one tile.  The window cut
into tiles with a smaller halo differs from it where the halo fell short, and nowhere else, so that
the difference is the seam error of that halo.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from . import display
from .forward import to_classes, to_values
from .halo import receptive_field
from .infer import infer_chunk, using_actor
from .inference import Inference
from .model import Model, load_model
from .pixels import Array
from .receptive.field import ReceptiveField
from .settle import Choice, Size, auto_tile, pick_bands, settle
from .source import Source, source_of
from .tiling import AxisTiling, Span, Window, round_up

__all__ = ["SeamError", "calibrate", "halo_table", "seam_error"]

_SAMPLES = 3
# Side of a sample window in px, unless the tile or the receptive field needs more.
_SAMPLE = 512
# Core of the tiles that halos are measured with: a seam does not depend on the size of the tiles
# beside it, and small ones make more of them.
_CORE = 128
_BESIDE = 16


@dataclass(frozen=True)
class SeamError:
    """Measured difference between a tiled and a whole-image result.

    Attributes
    ----------
    halo, overlap, tile : tuple of int
        ``(y, x)`` in input pixels; the tile that was measured with.
    maximum, mean : float
        Of the absolute difference of the scores.
    changed : float
        Share of the pixels whose class differs; nan for models that give no classes.
    across_lines, ordinary : float
        Share of neighbouring pixels of different class across tile lines, and across the ordinary
        lines within 16 px of those.
    overhead : float
        Pixels that a tile computes for each that it delivers, less 1, with the tile of a large run.
    pixels : int
        Pixels compared.
    """

    halo: tuple[int, int]
    overlap: tuple[int, int]
    tile: tuple[int, int]
    maximum: float
    mean: float
    changed: float
    across_lines: float
    ordinary: float
    overhead: float
    pixels: int

    @property
    def line_ratio(self) -> float:
        """Class changes across tile lines relative to ordinary ones; 1 where no seam shows."""
        return self.across_lines / self.ordinary if self.ordinary else math.nan

    def __repr__(self) -> str:
        return display.text_table("Seam error", self._rows())

    def _repr_html_(self) -> str:
        return display.html_table("Seam error", self._rows())

    def _rows(self) -> list[display.Row]:
        context = ("overlap", self.overlap) if any(self.overlap) else ("halo", self.halo)
        pixels = display.count_text(self.pixels)
        classes = [("classes", f"{self.changed:.4%} of {pixels} px changed")]
        return [
            (context[0], f"{display.sides_text(context[1])} px"),
            ("tile", f"{display.sides_text(self.tile)} px"),
            ("difference", f"{self.maximum:.2g} at most, {self.mean:.2g} on average"),
            *([("pixels", pixels)] if math.isnan(self.changed) else classes),
            (
                "lines",
                f"{self.across_lines:.2%} change across tile lines, {self.ordinary:.2%} beside",
            ),
            ("overhead", f"{self.overhead:.0%} more pixels computed than delivered"),
        ]


def seam_error(
    scene: str | os.PathLike[str] | xr.DataArray,
    model: Any,
    *,
    halo: Size = "auto",
    tile: Size = "auto",
    overlap: int | tuple[int, int] | None = None,
    samples: int = _SAMPLES,
) -> SeamError:
    """Measure the seams that a halo or an overlap leaves, on windows of the user's raster.

    Parameters
    ----------
    scene : path, URL or DataArray
        As for `open_raster`.
    model : Model or anything that `load_model` takes
    halo, tile, overlap
        As for `plan`.
    samples : int, default 3
        Windows to compare, spread over the raster.

    Returns
    -------
    SeamError
        The difference to the whole-image run of the windows.  For a model without an exact halo
        that is no more than a reference (a larger window would give another one): look at
        `SeamError.line_ratio` there.

    Raises
    ------
    ValueError, TypeError
        As of `plan`.

    Examples
    --------
    >>> import torch
    >>> from daskinfer.demo import demo_scene
    >>> convs = [torch.nn.Conv2d(6, 6, 3, padding=1) for _ in range(3)]
    >>> error = seam_error(demo_scene(), torch.nn.Sequential(*convs), halo=3, tile=64)
    >>> error.maximum < 1e-2 and error.changed == 0
    True
    """
    recipe = load_model(model)
    source = pick_bands(source_of(scene), recipe)
    return _measure(source, recipe, Choice(tile=tile, halo=halo, overlap=overlap), samples)


def calibrate(source: Source, model: Model, choice: Choice) -> tuple[Choice, SeamError | None]:
    """Replace ``halo="calibrated"`` by the smallest halo whose seam error is at most ``tol``.

    Returns
    -------
    Choice
        With a number for a halo; unchanged where calibration was not asked for.
    SeamError or None
        What was measured for it.

    Raises
    ------
    ValueError
        If no halo is exact for the model, so that there is nothing to calibrate against.
    """
    if choice.halo != "calibrated":
        return choice, None
    field = receptive_field(model, bands=len(source.band_names))
    if not field.exact:
        raise ValueError(
            f"halo='calibrated' needs a model with an exact halo, and this has none "
            f"({field.reason}): leave halo= out to blend"
        )
    largest = max(h // s for h, s in zip(field.halo, field.stride, strict=True))

    def measured(steps: int) -> SeamError:
        wanted = replace(choice, halo=_halo_of(field, steps))
        return _measure(source, model, wanted, _SAMPLES)

    # Context only ever helps, so that the smallest sufficient halo is found by bisection; the
    # largest is exact whatever is measured.
    low, high, best = 0, largest, None
    while low < high:
        middle = (low + high) // 2
        error = measured(middle)
        if error.maximum <= choice.tol:
            high, best = middle, error
        else:
            low = middle + 1
    best = best or measured(high)
    return replace(choice, halo=best.halo), best


def halo_table(
    scene: str | os.PathLike[str] | xr.DataArray, model: Any, *, tile: Size = "auto", rows: int = 8
) -> list[SeamError]:
    """Seam error and cost of halos from none to the exact one, with one tile size.

    Parameters
    ----------
    scene, model, tile
        As for `seam_error`.
    rows : int, default 8
        At most this many halos, evenly spaced multiples of the stride.

    Returns
    -------
    list of SeamError
    """
    recipe = load_model(model)
    source = pick_bands(source_of(scene), recipe)
    field = receptive_field(recipe, bands=len(source.band_names))
    if not field.exact:
        raise ValueError(f"no halo is exact for this model: {field.reason}")
    steps = max(h // s for h, s in zip(field.halo, field.stride, strict=True))
    counts = sorted({round(steps * i / max(rows - 1, 1)) for i in range(rows)})
    choices = [Choice(tile=tile, halo=_halo_of(field, n)) for n in counts]
    return [_measure(source, recipe, choice, _SAMPLES) for choice in choices]


def _halo_of(field: ReceptiveField, steps: int) -> tuple[int, int]:
    """So many strides, and no more than the exact halo."""
    y, x = (min(steps * s, h) for s, h in zip(field.stride, field.halo, strict=True))
    return y, x


def _measure(source: Source, model: Model, choice: Choice, samples: int) -> SeamError:
    # Differences are those of the scores, whatever is made of them.
    plain = model.patch(dtype="float32", confidence=False)
    scores = plain.patch(output="values") if model.output == "classes" else plain
    field = receptive_field(scores, bands=len(source.band_names))
    planned, _ = settle(source, scores, choice, quiet=True)
    asked = choice.tile
    if choice.tile == "auto" and not planned.blended:
        y, x = (_CORE + 2 * halo for halo in planned.tiling.halo)
        choice = replace(choice, tile=(y, x))
    inference, _ = settle(source, scores, choice, quiet=True)
    reach = field.halo if field.exact else inference.tiling.tile
    parts = [
        _compare(source.crop(window), scores, choice, inference)
        for window in _windows(inference, reach, samples)
    ]
    differences = np.concatenate([np.abs(tiled - whole).ravel() for tiled, whole, _ in parts])
    differences = differences[np.isfinite(differences)]
    lines = [_line_changes(_classes(tiled, model), at) for tiled, _, at in parts]
    across, ordinary = (np.concatenate(kind) for kind in zip(*lines, strict=True))
    changed = [(_classes(t, model) != _classes(w, model)).ravel() for t, w, _ in parts]
    axes = (inference.tiling.y, inference.tiling.x)
    return SeamError(
        halo=inference.tiling.halo,
        overlap=(axes[0].overlap, axes[1].overlap),
        tile=inference.tiling.tile,
        maximum=float(differences.max(initial=0)),
        mean=float(differences.mean()) if differences.size else 0.0,
        changed=_share(np.concatenate(changed)) if model.output == "classes" else math.nan,
        across_lines=_share(across),
        ordinary=_share(ordinary),
        overhead=_overhead(planned, asked),
        pixels=sum(tiled[0].size for tiled, _, _ in parts),
    )


def _overhead(inference: Inference, tile: Size) -> float:
    """Pixels that tiles compute for each one they deliver, less 1, on a raster of many tiles."""
    ratio = 1.0
    for axis in (inference.tiling.y, inference.tiling.x):
        shared = 2 * axis.halo + axis.overlap
        side = auto_tile(shared, axis.stride) if tile == "auto" else axis.tile
        ratio *= side / max(side - shared, axis.stride)
    return ratio - 1


def _windows(inference: Inference, reach: tuple[int, int], samples: int) -> Iterator[Window]:
    """Windows spread along the diagonal, large enough to hold a tile line and all it can affect."""
    sides = []
    for axis, far in zip((inference.tiling.y, inference.tiling.x), reach, strict=True):
        wanted = max(_SAMPLE, axis.tile + axis.step, axis.tile + 2 * far)
        sides.append(min(axis.size, round_up(wanted, axis.stride)))
    room = [size - side for size, side in zip(inference.tiling.shape, sides, strict=True)]
    count = samples if any(room) else 1
    for i in range(count):
        share = (i + 0.5) / count
        rows, cols = (
            Span(start, start + side)
            for start, side in zip((int(r * share) for r in room), sides, strict=True)
        )
        yield Window(rows, cols)


Lines = tuple[list[int], list[int]]


def _compare(
    source: Source, model: Model, choice: Choice, planned: Inference
) -> tuple[Array, Array, Lines]:
    """Scores of a window, tiled and whole, and where its tile lines are."""
    tile = planned.tiling.tile
    tiled, _ = settle(source, model, replace(choice, tile=tile, chunk=1 << 30), quiet=True)
    height, width = (tiled.tiling.y.padded, tiled.tiling.x.padded)
    whole_choice = Choice(halo=0, tile=(height, width), chunk=1 << 30, batch_size=1)
    whole, _ = settle(source, model, whole_choice, quiet=True)
    lines = _lines(tiled.tiling.y, tiled.scale), _lines(tiled.tiling.x, tiled.scale)
    return _run(source, tiled), _run(source, whole), lines


def _run(source: Source, inference: Inference) -> Array:
    """All of a small source, in this thread."""
    with using_actor(inference) as actor:
        read = source.reader(inference.tiling.chunk_at((0, 0)).read)
        return infer_chunk(inference, (0, 0), read, actor).data


def _lines(axis: AxisTiling, scale: Any) -> list[int]:
    """First output pixels after a line at which a tile, or its core, begins or ends."""
    spans = [axis.core(i) for i in range(axis.tiles)]
    ends = {end for span in spans for end in span} - {0, axis.size}
    return sorted(math.floor(end * scale) for end in ends)


def _classes(scores: Array, model: Model) -> Array:
    """Classes of scores ``(channel, y, x)``; the rounded values of models that give none."""
    if model.output != "classes":
        return np.asarray(np.round(scores[0], 2))
    import torch

    batch = torch.from_numpy(scores)[None]
    values = to_values(batch, model) if len(scores) == 1 else batch
    classes: Array = to_classes(values, model)[0, 0].numpy()
    return classes


def _line_changes(classes: Array, lines: Lines) -> tuple[Array, Array]:
    """Whether neighbours differ, across tile lines and across the lines beside those.

    Beside them, not everywhere: what lies under a tile line, a river or a town, lies near it too,
    and would otherwise pass for a seam.
    """
    across, ordinary = [], []
    for axis, at in enumerate(lines):
        changes = np.diff(np.moveaxis(classes, axis, 0).astype(np.float64), axis=0) != 0
        on_line = np.zeros(len(changes), np.bool_)
        near = np.zeros(len(changes), np.bool_)
        for line in (n - 1 for n in at if 0 < n <= len(changes)):
            on_line[line] = True
            near[max(0, line - _BESIDE) : line + _BESIDE + 1] = True
        across.append(changes[on_line].ravel())
        ordinary.append(changes[near & ~on_line].ravel())
    return np.concatenate(across), np.concatenate(ordinary)


def _share(flags: Array) -> float:
    return float(flags.mean()) if flags.size else 0.0
