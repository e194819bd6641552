"""Decide and check everything about a search for objects before it starts."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from daskinfer import display
from daskinfer.device import DeviceChoice, check_device
from daskinfer.forward import OutputFormat
from daskinfer.inference import Inference
from daskinfer.inputs.aoi import AreaOfInterest
from daskinfer.inputs.protocol import served_state
from daskinfer.memory import expected_memory
from daskinfer.model import Model
from daskinfer.source import Source
from daskinfer.tiling import AxisTiling, Tiling, round_up

__all__ = ["MERGES", "Merge", "ObjectPlan", "Search", "tiled_for"]

Merge = Literal["tiles", "core", "nms", "nmm"]
MERGES = ("tiles", "core", "nms", "nmm")

_CHUNK = 2048
_CORE = 512
_TILE_UNIT = 32


@dataclass(frozen=True)
class Search:
    """What is looked for, and how what several tiles found becomes one object.

    Attributes
    ----------
    max_object : int
        Side in pixels of the largest object that one tile shall show whole.
    merge : {"tiles", "core", "nms", "nmm"}
        As for `daskinfer.detect`.
    threshold : float
    metric : {"iou", "ios"}
    per_class : bool
    min_score : float
    """

    max_object: int = 128
    merge: Merge = "tiles"
    threshold: float = 0.5
    metric: Literal["iou", "ios"] = "iou"
    per_class: bool = True
    min_score: float = 0.0

    def __post_init__(self) -> None:
        whole = isinstance(self.max_object, (int, np.integer))
        if not whole or isinstance(self.max_object, bool) or self.max_object < 1:
            raise ValueError(f"max_object must be whole px from 1 up, got {self.max_object!r}")
        for name, value, known in (
            ("merge", self.merge, MERGES),
            ("metric", self.metric, ("iou", "ios")),
            ("per_class", self.per_class, (True, False)),
        ):
            if value not in known:
                words = ", ".join(repr(choice) for choice in known)
                raise ValueError(f"{name} must be one of {words}, got {value!r}")
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be from 0 up to below 1, got {self.threshold!r}")
        if not math.isfinite(self.min_score):
            raise ValueError(f"min_score must be a finite number, got {self.min_score!r}")


@dataclass(frozen=True, eq=False)
class ObjectPlan:
    """Everything that is decided before objects are looked for.

    Attributes
    ----------
    source : Source
        The raster, with the bands that the model takes.
    model : Model
    output : str
        Path of the vector file.
    inference : Inference
        Tiling and batch size.
    search : Search
    on_error : {"raise", "nodata"}
        What becomes of a chunk that fails for good; "nodata" leaves it without objects.
    overwrite : bool
        Whether an existing output or partial output is replaced.
    area : AreaOfInterest or None
        Where the centres of objects lie; None for anywhere.
    """

    source: Source
    model: Model
    output: str
    inference: Inference
    search: Search
    on_error: Literal["raise", "nodata"] = "raise"
    overwrite: bool = False
    area: AreaOfInterest | None = None

    @property
    def tiling(self) -> Tiling:
        """Chunks and tiles."""
        return self.inference.tiling

    @property
    def shape(self) -> tuple[int, int]:
        """``(height, width)`` of the raster in pixels."""
        return self.tiling.shape

    def outside(self) -> tuple[int, ...]:
        """Numbers of the chunks in which nothing is looked for, as no object of the area is there.

        An object that is put together from its parts may reach into the chunk beside.
        """
        if self.area is None:
            return ()
        down, across = self.tiling.grid
        touched = np.pad(self.area.chunks(self.tiling).reshape(down, across), 1)
        near = np.zeros((down, across), np.bool_)
        for i, j in itertools.product(range(3), range(3)):
            near |= touched[i : i + down, j : j + across]
        return tuple(int(number) for number in np.flatnonzero(~near))

    @property
    def memory(self) -> int:
        """Bytes that one worker process takes, without what the model's own layers need."""
        return expected_memory(self.source, self.inference).total

    def settings(self) -> dict[str, Any]:
        """What two runs must share to fill one output: plain JSON values by name."""
        model = {
            name: value for name, value in self.model.__getstate__().items() if name != "source"
        }
        asked = {
            "source": self.source.identity,
            "served": served_state(self.source),
            "bands": self.source.band_names,
            "model": model,
            "tiling": asdict(self.tiling),
            "search": asdict(self.search),
            "area": None if self.area is None else self.area.digest,
        }
        return json.loads(json.dumps(asked))  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return display.text_table("Object plan", self._rows())

    def _repr_html_(self) -> str:
        return display.html_table("Object plan", self._rows())

    def _rows(self) -> list[display.Row]:
        tiling, search = self.tiling, self.search
        chunk = tiling.chunk_at((0, 0)).window.shape
        height, width = (display.count_text(side) for side in tiling.shape)
        return [
            ("source", f"{height} x {width} px, bands {', '.join(self.source.band_names)}"),
            ("model", f"{self.model.name}, objects, {self.model.precision}"),
            ("objects", f"up to {search.max_object} px seen whole, merged by {search.merge}"),
            ("halo", f"{display.sides_text(tiling.halo)} px"),
            ("tile", f"{display.sides_text(tiling.tile)} px"),
            ("overhead", f"{tiling.overhead:.0%} more pixels computed than the raster has"),
            ("chunks", f"{display.count_text(tiling.chunks)} of {display.sides_text(chunk)} px"),
            *self._area_row(),
            (
                "tiles",
                f"{display.count_text(tiling.runs)} in batches of {self.inference.batch_size}",
            ),
            ("memory", f"{display.bytes_text(self.memory)} per worker and the model's activations"),
            ("output", self.output),
        ]

    def _area_row(self) -> list[display.Row]:
        if self.area is None:
            return []
        count = self.tiling.chunks - len(self.outside())
        height, width = self.area.pixels.shape
        return [("area", f"{display.count_text(count)} chunks, around {height} x {width} px")]


def tiled_for(
    source: Source,
    model: Model,
    search: Search,
    *,
    tile: Any = "auto",
    stride: int = 1,
    chunk: Any = "auto",
    batch_size: int | Literal["auto"] = "auto",
    device: DeviceChoice = "auto",
    reproducible: bool = False,
) -> Inference:
    """What to run on every chunk, with a halo that shows objects whole.

    An object of `max_object` px whose centre is in a core ends at most half of that beyond it; the
    other half is context for the model.

    Raises
    ------
    ValueError
        If the halo does not fit the tile.
    """
    check_device(device)
    halo = round_up(search.max_object, stride)
    axes = []
    for i, size in enumerate(source.grid.shape):
        side, least = _side(model, tile, halo, stride, i)
        axes.append(_axis(size, side, halo, stride, least, _pair("chunk", chunk)[i]))
    tiling = Tiling(axes[0], axes[1])
    if batch_size != "auto" and (isinstance(batch_size, bool) or batch_size < 1):
        raise ValueError(f"batch_size must be 'auto' or at least 1, got {batch_size!r}")
    return Inference(
        model,
        tiling,
        # Nothing of a raster comes out.
        OutputFormat(0, "uint8", 0),
        in_bands=len(source.band_names),
        dtype=source.dtype,
        raster_scale=source.scales,
        raster_offset=source.offsets,
        batch_size=min(1 if batch_size == "auto" else batch_size, tiling.runs),
        channels=0,
        scale=Fraction(1),
        device=device,
        fixed=reproducible,
    )


def _side(model: Model, tile: Any, halo: int, stride: int, i: int) -> tuple[int, int]:
    """Side of a tile, and the smallest that the model takes."""
    if model.tile is not None:
        return model.tile[i], model.tile[i]
    asked = _pair("tile", tile)[i]
    unit = math.lcm(_TILE_UNIT, stride)
    side = round_up(_CORE + 2 * halo, unit) if asked == "auto" else round_up(asked, stride)
    return side, stride


def _axis(size: int, side: int, halo: int, stride: int, least: int, chunk: Any) -> AxisTiling:
    if side < size and side < 2 * halo + stride:
        raise ValueError(
            f"tile {side} px cannot show objects of {halo} px whole: pass tile={4 * halo}, or a "
            f"smaller max_object="
        )
    axis = AxisTiling(size, side, halo, stride, size, least)
    wanted = _CHUNK if chunk == "auto" else chunk
    # Whole cores: no tile is run for two chunks.
    whole = axis.step * max(1, wanted // axis.step)
    return AxisTiling(size, side, halo, stride, max(whole, _reaching(axis)), least)


def _reaching(axis: AxisTiling) -> int:
    """Whole cores as far as the tiles at the raster's edges, shifted inward, reach."""
    return round_up(axis.tile - axis.halo, axis.step) if axis.tiles > 1 else axis.step


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    sides = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    for side in sides:
        whole = isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side > 0
        if not whole and side != "auto":
            raise ValueError(f"{name} must be 'auto', whole px or (y, x) of them, got {value!r}")
    if len(sides) != 2:
        raise ValueError(f"{name} must be 'auto', whole px or (y, x) of them, got {value!r}")
    return sides[0], sides[1]
