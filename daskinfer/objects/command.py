"""``daskinfer detect`` and ``daskinfer vectorize``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from daskinfer.arguments import (
    add_part,
    add_recipe,
    add_source,
    model_of,
    numbers,
    size,
    source_of,
    words,
)

__all__ = ["add_parsers"]

_INCOMPLETE = 3
_PART = ("window", "bounds", "bounds_crs")
_DETECT = (
    *_PART, "aoi", "max_object", "tile", "stride", "chunk", "batch_size", "merge", "threshold",
    "metric", "per_class", "min_score", "precision", "device", "on_error", "overwrite",
)  # fmt: skip
_VECTORIZE = (*_PART, "band", "connectivity", "min_area", "values", "class_names", "chunk",
              "overwrite")  # fmt: skip


def add_parsers(commands: Any) -> None:
    """Add both commands to the subparsers of the command line."""
    detect = commands.add_parser("detect", help="find objects in a raster, into a vector file")
    add_source(detect)
    detect.add_argument("model", help="detection model, in any format that run takes")
    detect.add_argument("destination", metavar="output", help=".parquet, .gpkg or .fgb")
    _add_detect_options(detect.add_argument_group("search"))
    add_recipe(detect, pixels=False)
    detect.set_defaults(command=_detect)

    vectorize = commands.add_parser("vectorize", help="turn a class map into polygons")
    vectorize.add_argument("source", help="raster of classes that GDAL opens")
    vectorize.add_argument("destination", metavar="output", help=".parquet, .gpkg or .fgb")
    _add_vectorize_options(vectorize)
    vectorize.set_defaults(command=_vectorize)


def _add_detect_options(search: Any) -> None:
    add_part(search)
    search.add_argument("--aoi", metavar="PATH", help="polygons that objects have their centre in")
    search.add_argument(
        "--max-object", type=int, default=128, metavar="PX", help="side of what a tile shows whole"
    )
    search.add_argument("--tile", type=size, default="auto", metavar="PX")
    search.add_argument("--stride", type=int, default=1, metavar="PX", help="of the tiles' sides")
    search.add_argument("--chunk", type=size, default="auto", metavar="PX")
    search.add_argument("--batch-size", type=size, default="auto", metavar="N")
    search.add_argument("--merge", choices=("tiles", "core", "nms", "nmm"), default="tiles")
    search.add_argument(
        "--threshold", type=float, default=0.5, metavar="X", help="above which boxes are one object"
    )
    search.add_argument("--metric", choices=("iou", "ios"), default="iou")
    search.add_argument(
        "--per-class", action=argparse.BooleanOptionalAction, default=True,
        help="merge boxes of one class only",
    )  # fmt: skip
    search.add_argument("--min-score", type=float, default=0.0, metavar="X")
    search.add_argument("--precision", choices=("float32", "bfloat16", "float16"))
    search.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    search.add_argument("--on-error", choices=("raise", "nodata"), default="raise")
    search.add_argument("--overwrite", action="store_true", help="replace an existing output")
    search.add_argument("--cluster", default="local", help="as for run")
    search.add_argument("--cluster-option", action="append", default=[], metavar="NAME=VALUE")
    search.add_argument("--workers", type=int, metavar="N", help="worker processes")


def _add_vectorize_options(parser: argparse.ArgumentParser) -> None:
    add_part(parser)
    parser.add_argument("--band", type=_band, metavar="NAME|N", help="that holds the classes")
    parser.add_argument("--connectivity", type=int, choices=(4, 8), default=4)
    parser.add_argument(
        "--min-area", type=float, default=0.0, metavar="X", help="in square units of the CRS"
    )
    parser.add_argument("--values", type=numbers(int), metavar="N,N,...", help="only these")
    parser.add_argument("--class-names", type=words, metavar="A,B,...")
    parser.add_argument("--chunk", type=int, default=2048, metavar="PX")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")


def _detect(arguments: argparse.Namespace) -> int:
    from daskinfer.clusters import cluster
    from daskinfer.clusters.options import cluster_options
    from daskinfer.monitor import progress
    from daskinfer.objects.detect import detect, plan_objects

    options = {name: getattr(arguments, name) for name in _DETECT}
    # Its threshold is of what boxes have in common, not of a score.
    model = model_of(arguments, pixels=False)
    plan = plan_objects(source_of(arguments), model, arguments.destination, **options)
    print(plan)
    bar = progress()
    options = cluster_options(arguments.cluster, arguments.workers, arguments.cluster_option)
    try:
        with cluster(arguments.cluster, **options) as client:
            report = detect(plan, client=client, callbacks=[bar])
    finally:
        bar.stop()
    print(report)
    return 0 if report.complete else _INCOMPLETE


def _vectorize(arguments: argparse.Namespace) -> int:
    from daskinfer.objects.polygons import vectorize

    options = {name: getattr(arguments, name) for name in _VECTORIZE}
    print("tracing outlines ...", file=sys.stderr, flush=True)
    print(vectorize(arguments.source, arguments.destination, **options))
    return 0


def _band(text: str) -> str | int:
    return int(text) if text.isdigit() else text
