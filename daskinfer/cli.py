"""The command line ``daskinfer``: a mirror of the Python API."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ._version import __version__
from .bench.command import add_parser as add_bench_parser
from .display import sides_text
from .objects.command import add_parsers as add_object_parsers

__all__ = ["main"]

_INCOMPLETE = 3
_TERMINATED = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code, 0 only for a complete result.

    2 stands for arguments or input that were refused, 1 for a run that failed, 3 for one that ended
    with chunks left nodata, 130 for Ctrl-C, 143 for SIGTERM.
    """
    arguments = _parser().parse_args(argv)
    if os.getcwd() not in sys.path:
        # As with `python -m daskinfer`: a factory may be in a file that lies here.
        sys.path.append(os.getcwd())
    command: Callable[[argparse.Namespace], int] = arguments.command
    warnings.showwarning = _show_warning
    try:
        return command(arguments)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except SystemExit as ending:
        if ending.code != _TERMINATED:
            raise
        print("terminated; the same command goes on from here", file=sys.stderr)
        return _TERMINATED
    except (OSError, ValueError, TypeError, ImportError) as error:
        # The messages say what to type in Python.
        text = str(error).replace("overwrite=True", "--overwrite")
        print(f"daskinfer: {text}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"daskinfer: {error}", file=sys.stderr)
        return 1


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"daskinfer: warning: {message}", file=sys.stderr)


def _demo(arguments: argparse.Namespace) -> int:
    from .demo import run_demo

    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    report, picture = run_demo(folder)
    print(report)
    print(f"  picture      {picture}")
    return 0 if report.complete else _INCOMPLETE


def _plan(arguments: argparse.Namespace) -> int:
    print(_made_plan(arguments))
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from .clusters import cluster
    from .clusters.options import cluster_options
    from .monitor import progress
    from .report import check_html
    from .runner import run

    check_html(arguments.report, "report")
    plan = _made_plan(arguments)
    print(plan)
    bar = progress()
    options = cluster_options(arguments.cluster, arguments.workers, arguments.cluster_option)
    try:
        with cluster(arguments.cluster, **options) as client:
            report = run(
                plan,
                client=client,
                callbacks=[bar],
                trace=arguments.trace,
                dashboard=not arguments.no_dashboard,
                performance_report=arguments.performance_report,
            )
    finally:
        bar.stop()
    if arguments.report is not None:
        report.save(arguments.report)
    print(report)
    return 0 if report.complete else _INCOMPLETE


def _submit(arguments: argparse.Namespace) -> int:
    from .submit import batch_job, log_of, submit

    options = [word for word in arguments.options if word != "--dry-run"]
    source, model, output = arguments.source, arguments.model, arguments.destination
    job = _parser().parse_args(["run", source, model, output, *options])
    script = batch_job(arguments.spec, source, model, output, options)
    if arguments.dry_run or len(options) < len(arguments.options):
        print(script, end="")
        return 0
    # What cannot run is not to be found out after hours in the queue.
    print(_made_plan(job))
    number = submit(script)
    print(f"job {number}, which writes {log_of(script, number)}")
    return 0


def _halo(arguments: argparse.Namespace) -> int:
    from .demo import demo_model_path, demo_path
    from .formats import is_model_name
    from .halo import receptive_field
    from .model import load_model
    from .planner import field_text
    from .seam import halo_table

    source, name = arguments.source, arguments.model
    if source is not None and name is None and is_model_name(source):
        source, name = None, source
    model = load_model(name or demo_model_path(), trust=arguments.trust)
    print("measuring ...", file=sys.stderr, flush=True)
    field = receptive_field(model, bands=arguments.in_bands)
    print(f"receptive field {field_text(field)}")
    if name is not None and source is None:
        # The bundled scene is no input of another model.
        print("halo", sides_text(field.halo) if field.exact else "none, tiles are blended")
        return 0
    print()
    print("| halo, px | largest difference | mean difference | classes changed | more computed |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for row in halo_table(source or demo_path(), model, tile=arguments.tile):
        print(
            f"| {sides_text(row.halo)} | {row.maximum:.1e} | {row.mean:.1e} | {row.changed:.3%} "
            f"| {row.overhead:.0%} |"
        )
    return 0


def _model_info(arguments: argparse.Namespace) -> int:
    from .modelinfo import model_json, model_table

    model = _model(arguments)
    print(model_json(model) if arguments.json else model_table(model))
    return 0


def _model(arguments: argparse.Namespace) -> Any:
    from .model import load_model

    spec = {name: getattr(arguments, name) for name in _MODEL_OPTIONS}
    given = {name: value for name, value in spec.items() if value is not None}
    return load_model(arguments.model, weights=arguments.weights, **given)


def _info(arguments: argparse.Namespace) -> int:
    from .info import describe_file

    print(describe_file(arguments.path, arguments.map))
    return 0


def _made_plan(arguments: argparse.Namespace) -> Any:
    from .planner import plan

    model = _model(arguments)
    options = {name: getattr(arguments, name) for name in _PLAN_OPTIONS}
    print("measuring the receptive field ...", file=sys.stderr, flush=True)
    return plan(_source(arguments), model, arguments.destination, **options)


def _source(arguments: argparse.Namespace) -> Any:
    """One path, a list of them, or what comes of them on a grid that is asked for."""
    source = arguments.source[0] if len(arguments.source) == 1 else arguments.source
    asked = {name: getattr(arguments, name) for name in _SOURCE_OPTIONS}
    given = {name: value for name, value in asked.items() if value is not None}
    if not given:
        return source
    from .source import open_raster

    return open_raster(source, **given)


_MODEL_OPTIONS = (
    "bands", "scale", "offset", "mean", "std", "fill", "output", "activation", "threshold",
    "class_names", "class_colors", "clip_min", "clip_max", "axes", "accelerator", "trust",
    "head", "dtype", "confidence",
)  # fmt: skip
_SOURCE_OPTIONS = ("stack", "like", "crs", "resolution", "resampling")
_PLAN_OPTIONS = (
    "window", "chunk", "tile", "halo", "overlap", "batch_size", "precision", "on_error",
    "overwrite", "blocksize", "compress", "level", "tol", "tta", "statistics", "device", "compile",
    "aoi", "bounds", "bounds_crs", "mask_halo",
    "reproducible", "predictor", "max_z_error", "interleave", "sparse", "layout", "split",
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="daskinfer",
        description="Run a trained PyTorch model over rasters of any size, into one seamless COG.",
    )
    parser.add_argument("--version", action="version", version=f"daskinfer {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="map clouds in the bundled Sentinel-2 scene")
    demo.add_argument("folder", nargs="?", default="demo-output", help="where to write (made)")
    demo.set_defaults(command=_demo)

    plan = commands.add_parser("plan", help="show what a run would do, and check it")
    run = commands.add_parser("run", help="run a model over a raster; run again to go on")
    for command, function in ((plan, _plan), (run, _run)):
        _add_job(command)
        command.set_defaults(command=function)
    run.add_argument(
        "--cluster",
        default="local",
        metavar="KIND",
        help="local (default), processes, cuda, slurm, a scheduler's address, or a .yaml file",
    )
    run.add_argument(
        "--cluster-option", action="append", default=[], metavar="NAME=VALUE", help="of the kind"
    )
    run.add_argument("--workers", type=int, metavar="N", help="worker processes, GPUs or jobs")
    run.add_argument("--trace", metavar="PATH", help="write a timeline for ui.perfetto.dev")
    run.add_argument("--report", metavar="PATH", help="also write the report as HTML")
    run.add_argument("--performance-report", metavar="PATH", help="write Dask's own report as HTML")
    run.add_argument("--no-dashboard", action="store_true", help="no page on Dask's dashboard")

    submit = commands.add_parser(
        "submit", help="run as a batch job of SLURM, which goes on by itself"
    )
    submit.add_argument("spec", help=".yaml file that names the cluster, and the job under submit")
    submit.add_argument("source", help="as for run")
    submit.add_argument("model", help="as for run")
    submit.add_argument("destination", metavar="output", help="as for run")
    submit.add_argument("options", nargs=argparse.REMAINDER, help="all options of run")
    submit.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    submit.set_defaults(command=_submit)

    halo = commands.add_parser("halo", help="measure the receptive field, and halos on a raster")
    halo.add_argument(
        "source", nargs="?", help="raster; may be left out; the bundled scene if none"
    )
    halo.add_argument("model", nargs="?", help="as for run; the bundled one if none")
    halo.add_argument("--in-bands", type=int, metavar="N", help="where the model does not tell")
    halo.add_argument("--trust", action="store_true", help="run code that the model's file holds")
    halo.add_argument("--tile", type=_size, default="auto", metavar="PX")
    halo.set_defaults(command=_halo)

    told = commands.add_parser("model-info", help="tell how a model was read")
    told.add_argument("model", help="as for run")
    told.add_argument("--json", action="store_true", help="for programs")
    told.set_defaults(command=_model_info)
    _add_recipe(told)

    add_object_parsers(commands, _add_recipe, _model)
    add_bench_parser(commands)

    info = commands.add_parser("info", help="tell about an output, or about an unfinished one")
    info.add_argument("path", help="a raster, or OUTPUT.partial")
    info.add_argument("--map", metavar="PNG", help="also draw the chunks of OUTPUT.partial")
    info.set_defaults(command=_info)
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Arguments of `plan` and `run`, named as in Python."""
    parser.add_argument(
        "source", nargs="+", help="raster that GDAL opens; several are a mosaic, later ones on top"
    )
    parser.add_argument(
        "model", help="file (.pt2, .pt, .onnx), STAC MLM item (.json) or package.module:factory"
    )
    parser.add_argument(
        "destination", metavar="output", help="the COG to write (.tif), or a .vrt of several"
    )
    grid = parser.add_argument_group("source", "put it on a grid that is not its own")
    grid.add_argument("--stack", choices=("bands",), help="one single-band file per band")
    grid.add_argument("--like", metavar="PATH", help="on the grid of this raster")
    grid.add_argument("--crs", metavar="EPSG:N", help="on a grid of this CRS")
    grid.add_argument("--resolution", type=float, metavar="SIZE", help="with pixels of this size")
    grid.add_argument("--resampling", metavar="NAME", help="nearest (default), bilinear, ...")
    job = parser.add_argument_group("run")
    job.add_argument(
        "--window", type=_numbers(int), metavar="ROW,COL,HEIGHT,WIDTH", help="part of the source"
    )
    job.add_argument(
        "--bounds",
        type=_numbers(float),
        metavar="LEFT,BOTTOM,RIGHT,TOP",
        help="part of the source in coordinates; write --bounds=-1,... where the first is negative",
    )
    job.add_argument("--bounds-crs", metavar="CRS", help="of --bounds, as EPSG:4326")
    for name, text in (
        ("chunk", "side of what one task computes"),
        ("tile", "side of one model input, halo included"),
        ("halo", "context per side"),
    ):
        job.add_argument(
            f"--{name}", type=_size, default="auto", metavar="PX", help=f"{text}: N, Y,X or auto"
        )
    job.add_argument("--overlap", type=_size, metavar="PX", help="blend tiles instead of a halo")
    job.add_argument(
        "--batch-size", type=_size, default="auto", metavar="N", help="tiles per batch"
    )
    job.add_argument("--tol", type=float, default=1e-3, help="for --halo calibrated")
    job.add_argument(
        "--tta", type=_symmetries, metavar="d4|A,B,...", help="average over symmetries"
    )
    job.add_argument(
        "--aoi", metavar="PATH", help="polygons (GeoJSON, GeoPackage, ...); outside is nodata"
    )
    job.add_argument(
        "--mask-halo", action="store_true", help="nodata also wherever the model looks at nodata"
    )
    job.add_argument("--statistics", choices=("global",), help="normalise with the raster's own")
    job.add_argument("--precision", choices=("float32", "bfloat16", "float16"))
    job.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    job.add_argument(
        "--compile", action="store_const", const=True, help="run through torch.compile"
    )
    job.add_argument(
        "--reproducible", action="store_true", help="equal bit for bit, however many workers"
    )
    job.add_argument("--on-error", choices=("raise", "nodata"), default="raise")
    job.add_argument("--overwrite", action="store_true", help="replace an existing output")
    job.add_argument("--blocksize", type=_size, default="auto", metavar="PX")
    job.add_argument("--compress", default="auto", help="auto, deflate, zstd, lzw, lerc, none ...")
    job.add_argument("--level", type=int, help="effort of the codec")
    job.add_argument("--predictor", type=_size, default="auto", metavar="auto|1|2|3")
    job.add_argument("--max-z-error", type=float, default=0.0, help="that lerc may make")
    job.add_argument("--interleave", choices=("auto", "pixel", "band"), default="auto")
    job.add_argument("--sparse", action="store_true", help="leave out blocks that are all nodata")
    job.add_argument("--layout", choices=("strict", "append"), default="strict")
    job.add_argument(
        "--split", type=_size, default="auto", metavar="PX", help="side of each file of a .vrt"
    )
    _add_recipe(parser)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    """Fields of a model's recipe, named as in Python."""
    model = parser.add_argument_group("model", "replace what its file or its item says")
    model.add_argument("--weights", metavar="FILE", help="for a factory")
    for name in ("bands", "class-names", "class-colors"):
        model.add_argument(f"--{name}", type=_words, metavar="A,B,...")
    for name in ("scale", "offset", "clip-min", "clip-max", "mean", "std"):
        model.add_argument(f"--{name}", type=_numbers(float), metavar="X[,X...]")
    model.add_argument("--fill", type=float)
    model.add_argument("--output", choices=("classes", "probabilities", "values"))
    model.add_argument("--activation", choices=("softmax", "sigmoid", "identity"))
    model.add_argument("--head", type=_heads, metavar="NAME|N[,...]", help="of several outputs")
    model.add_argument("--dtype", choices=("float32", "uint8"), help="of probabilities")
    model.add_argument(
        "--confidence", action="store_const", const=True, help="a second band beside classes"
    )
    model.add_argument("--threshold", type=float)
    model.add_argument("--axes", choices=("nchw", "nhwc"), help="order of input and output")
    model.add_argument("--accelerator", choices=("cpu", "cuda"), help="the only kind it runs on")
    model.add_argument(
        "--trust", action="store_const", const=True, help="run code that its file holds"
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _heads(text: str) -> Any:
    heads = [int(word) if word.removeprefix("-").isdigit() else word for word in _words(text)]
    return heads[0] if len(heads) == 1 else heads


def _symmetries(text: str) -> Any:
    return text if text == "d4" else _words(text)


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def numbers(text: str) -> tuple[Any, ...]:
        return tuple(kind(word) for word in text.split(","))

    return numbers


def _size(text: str) -> Any:
    """``auto``, ``calibrated``, a number, or a pair."""
    if text in ("auto", "calibrated"):
        return text
    sides = tuple(int(word) for word in text.split(","))
    return sides[0] if len(sides) == 1 else sides
