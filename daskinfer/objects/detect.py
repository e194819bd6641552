"""`detect`: objects of a raster of any size, into one vector file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import xarray as xr

from daskinfer.device import DeviceChoice
from daskinfer.inputs.aoi import AreaOfInterest
from daskinfer.model import Model, load_model
from daskinfer.objects.keep import ObjectOutputs
from daskinfer.objects.plan import Merge, ObjectPlan, Search, tiled_for
from daskinfer.objects.report import ObjectReport
from daskinfer.objects.write import check_features, need_vector
from daskinfer.origins import check_origins
from daskinfer.settle import pick_bands
from daskinfer.source import source_of

if TYPE_CHECKING:
    from distributed import Client

    from daskinfer.events import Callback

__all__ = ["detect", "plan_objects"]


def detect(
    source: str | os.PathLike[str] | xr.DataArray | ObjectPlan,
    model: Any = None,
    output: str | os.PathLike[str] | None = None,
    *,
    client: Client | None = None,
    callbacks: Sequence[Callback] = (),
    trace: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ObjectReport:
    """Run a detection model over a raster and write the objects to a vector file.

    Each object is written once, wherever tiles and chunks meet, and the result depends on neither
    chunks nor workers.  Rerunning the same call after it was stopped goes on where it stopped.

    Parameters
    ----------
    source : path, URL, DataArray or ObjectPlan
        As for `open_raster`; or a plan, which says all the rest.
    model : Model or anything that `load_model` takes
        Called with a batch of images, as torchvision's detectors are in eval mode, it returns a
        dict for each: ``boxes`` ``(n, 4)`` as x1, y1, x2, y2 in pixels, and, where it has them,
        ``scores``, ``labels`` and ``masks``.
    output : path
        ``.parquet`` (GeoParquet), ``.gpkg`` or ``.fgb``; in the raster's CRS, or in pixels where it
        has none.  Boxes become polygons, masks multipolygons; with ``score``, ``label`` and, where
        the model has ``class_names``, the ``class`` of that index.
    client, callbacks, trace
        As for `run`.
    **options
        Of `daskinfer.objects.detect.plan_objects`, which tells them: ``window``, ``bounds``,
        ``bounds_crs``, ``aoi``, ``max_object``, ``tile``, ``stride``, ``chunk``, ``batch_size``,
        ``merge``, ``threshold``, ``metric``, ``per_class``, ``min_score``, ``precision``,
        ``device``, ``reproducible``, ``on_error``, ``overwrite``.

    Returns
    -------
    ObjectReport

    Raises
    ------
    ModuleNotFoundError
        Without the extra ``vector``.
    InferenceError
        As of `run`.
    FileNotFoundError, FileExistsError, PermissionError, ValueError, TypeError
        As of `plan_objects`, before any work.

    Examples
    --------
    A network that sees one object in every image, its brightest pixel:

    >>> import os, tempfile, torch
    >>> from daskinfer.demo import demo_path
    >>> class Brightest(torch.nn.Module):
    ...     def forward(self, images):
    ...         found = []
    ...         for image in images:
    ...             row, col = divmod(int(image[0].argmax()), image.shape[2])
    ...             box = [col, row, col + 1, row + 1]
    ...             found.append({"boxes": torch.tensor([box])})
    ...         return found
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "brightest.parquet")
    ...     report = detect(demo_path(), Brightest(), path, tile=1024, max_object=1)
    >>> report.objects, report.complete
    (1, True)
    """
    if isinstance(source, ObjectPlan):
        if model is not None or output is not None or options:
            raise TypeError("detect(plan) takes its settings from the plan")
        plan = source
    elif model is None or output is None:
        raise TypeError("detect needs an ObjectPlan, or a source, a model and an output")
    else:
        plan = plan_objects(source, model, output, **options)
    check_features(plan.output, plan.overwrite)
    from daskinfer.runner import execute

    report = execute(plan, ObjectOutputs.prepare, client=client, callbacks=callbacks, trace=trace)
    assert isinstance(report, ObjectReport)
    return report


def plan_objects(
    source: str | os.PathLike[str] | xr.DataArray,
    model: Any,
    output: str | os.PathLike[str],
    *,
    window: tuple[int, int, int, int] | None = None,
    bounds: Sequence[float] | None = None,
    bounds_crs: Any = None,
    aoi: Any = None,
    max_object: int = 128,
    tile: int | tuple[int, int] | Literal["auto"] = "auto",
    stride: int = 1,
    chunk: int | tuple[int, int] | Literal["auto"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
    merge: Merge = "tiles",
    threshold: float = 0.5,
    metric: Literal["iou", "ios"] = "iou",
    per_class: bool = True,
    min_score: float = 0.0,
    precision: Literal["float32", "bfloat16", "float16"] | None = None,
    device: DeviceChoice = "auto",
    reproducible: bool = False,
    on_error: Literal["raise", "nodata"] = "raise",
    overwrite: bool = False,
) -> ObjectPlan:
    """Decide and check everything about `detect` without running it.

    Parameters
    ----------
    source, model, output
        As for `detect`.
    window, bounds, bounds_crs : optional
        Part of the source, in pixels or in coordinates, as for `open_raster`; objects end at its
        edges.  With `aoi` none is cut.
    aoi : path, GeoJSON, geometry, GeoDataFrame or bounds, optional
        Polygons, as for `plan`: kept are objects whose centre is in a pixel inside.  They are those
        of a search over all of the raster; chunks far from them are neither read nor run.
    max_object : int, default 128
        Side in pixels of the largest object that a tile shall show whole: the halo of the tiles.
        Larger ones are put together from what several tiles see of them.
    tile : int, tuple of int or "auto"
        Side in pixels, or ``(y, x)``, of one image, halo included.
    stride : int, default 1
        Sides of the tiles are multiples of it, as some detectors want.
    chunk : int, tuple of int or "auto"
        Side in pixels of what one task computes; whole tile cores.
    batch_size : int or "auto"
        Images in one forward pass, at most; "auto" is one.
    merge : {"tiles", "core", "nms", "nmm"}
        How the same object in several tiles becomes one.  "tiles": boxes of different tiles that
        agree in the pixels that both saw are one object, of which the whole one is taken, or the
        pieces put together; boxes of one tile are never merged.  "core": a box counts if its centre
        is in the core of its tile; without any merging, which wants boxes that are exact.  "nms":
        of boxes that overlap by more than `threshold` the one with the highest score.  "nmm": the
        same, grown to all of them.
    threshold : float, default 0.5
        What boxes must have in common, as `metric` measures it; for "tiles", intersection over
        union in the shared pixels.
    metric : {"iou", "ios"}
        Intersection over union, or over the smaller box; for "nms" and "nmm".
    per_class : bool, default True
        Merge boxes of equal label only.
    min_score : float, default 0
        Objects below it are left out.
    precision, device, reproducible, on_error, overwrite
        As for `plan`; a chunk that is left out with ``on_error="nodata"`` has no objects.

    Returns
    -------
    ObjectPlan

    Raises
    ------
    FileNotFoundError, FileExistsError, PermissionError, ValueError, TypeError
        As of `plan`.
    ModuleNotFoundError
        Without the extra ``vector``.
    """
    need_vector()
    if not isinstance(overwrite, bool):
        raise TypeError(f"overwrite must be True or False, got {overwrite!r}")
    if on_error not in ("raise", "nodata"):
        raise ValueError(f"on_error must be 'raise' or 'nodata', got {on_error!r}")
    if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
        raise ValueError(f"stride must be whole px from 1 up, got {stride!r}")
    path = check_features(os.fspath(output), overwrite)
    search = Search(max_object, merge, threshold, metric, per_class, min_score)
    recipe = _recipe(model, precision)
    part = source_of(source, window=window, bounds=bounds, bounds_crs=bounds_crs)
    raster = pick_bands(part, recipe)
    check_origins(path, [source, raster, aoi if isinstance(aoi, (str, os.PathLike)) else None])
    if raster.grid.gcps or raster.grid.rpcs:
        raise ValueError(
            "objects of a raster with ground control points or RPCs have no place on the map yet: "
            "warp it onto a grid first"
        )
    inference = tiled_for(
        raster,
        recipe,
        search,
        tile=tile,
        stride=stride,
        chunk=chunk,
        batch_size=batch_size,
        device=device,
        reproducible=reproducible,
    )
    area = None if aoi is None else AreaOfInterest.of(aoi, raster.grid)
    return ObjectPlan(raster, recipe, path, inference, search, on_error, overwrite, area)


def _recipe(model: Any, precision: Any) -> Model:
    recipe = load_model(model)
    if recipe.tta:
        raise ValueError("test-time augmentation averages scores of pixels, not objects: drop tta")
    given = {} if precision is None else {"precision": precision}
    # No activation and no threshold apply to boxes.
    return recipe.patch(output="objects", activation=None, threshold=None, **given)
