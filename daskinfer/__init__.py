"""Run a trained PyTorch model over rasters of any size, into one seamless COG.

The main path, in nine lines::

    import daskinfer as di
    scene = di.open_raster("s2.tif", bands=["B02", "B03", "B04", "B08"])  # lazy, (band, y, x)
    model = di.load_model("unet.pt2", scale=1e-4, class_names=["water", "soil", "plants"])
    field = di.receptive_field(model)               # measured: radius, stride, exact or not
    pred = di.predict(scene, model)                 # lazy: pred.isel(...).compute() previews
    di.write_cog(pred, "preview.tif")               # block-wise
    plan = di.plan("s2.tif", model, "classes.tif")  # dry run: halo, tiles, memory
    report = di.run(plan)                           # streams any size; run again to resume
    di.seam_error(scene, model)                     # measured difference to the whole-image run

`demo_scene` and `demo_model` give something real to try, `cluster` starts Dask.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .clusters import cluster
    from .demo import demo_model, demo_scene
    from .errors import InferenceError
    from .halo import receptive_field
    from .lazy import predict, write_cog
    from .model import Model, load_model
    from .objects.detect import detect
    from .objects.polygons import vectorize
    from .planner import Plan, plan
    from .receptive.field import ReceptiveField
    from .report import Report
    from .runner import run
    from .seam import SeamError, seam_error
    from .source import open_raster

# Resolved on first use: torch and distributed take seconds to import, and a shell completion, a
# docs build or `daskinfer info` needs neither.
_HOMES = {
    "InferenceError": "errors",
    "Model": "model",
    "Plan": "planner",
    "ReceptiveField": "receptive.field",
    "Report": "report",
    "cluster": "clusters",
    "demo_model": "demo",
    "demo_scene": "demo",
    "detect": "objects.detect",
    "load_model": "model",
    "open_raster": "source",
    "plan": "planner",
    "predict": "lazy",
    "receptive_field": "halo",
    "run": "runner",
    "SeamError": "seam",
    "seam_error": "seam",
    "vectorize": "objects.polygons",
    "write_cog": "lazy",
}

# Modules of which users take callbacks, devices and wrappers of networks.
_MODULES = frozenset({"device", "monitor", "wrappers"})

__all__ = [
    "InferenceError",
    "Model",
    "Plan",
    "ReceptiveField",
    "Report",
    "SeamError",
    "__version__",
    "cluster",
    "demo_model",
    "demo_scene",
    "detect",
    "load_model",
    "open_raster",
    "plan",
    "predict",
    "receptive_field",
    "run",
    "seam_error",
    "vectorize",
    "write_cog",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
