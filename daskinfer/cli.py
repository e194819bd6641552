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
from .arguments import add_job, add_recipe, as_typed, model_of, size, source_of
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
        print(f"daskinfer: {as_typed(str(error), arguments)}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"daskinfer: {as_typed(str(error), arguments)}", file=sys.stderr)
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
    from .halo import receptive_field
    from .model import load_model
    from .model.formats import is_model_name
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
    from .model.describe import model_json, model_table

    model = model_of(arguments)
    print(model_json(model) if arguments.json else model_table(model))
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from .info import describe_file

    print(describe_file(arguments.path, arguments.map))
    return 0


def _made_plan(arguments: argparse.Namespace) -> Any:
    from .planner import plan

    model = model_of(arguments)
    options = {name: getattr(arguments, name) for name in _PLAN_OPTIONS}
    print("measuring the receptive field ...", file=sys.stderr, flush=True)
    return plan(source_of(arguments), model, arguments.destination, **options)


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
        add_job(command)
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
    halo.add_argument("--tile", type=size, default="auto", metavar="PX")
    halo.set_defaults(command=_halo)

    told = commands.add_parser("model-info", help="tell how a model was read")
    told.add_argument("model", help="as for run")
    told.add_argument("--json", action="store_true", help="for programs")
    told.set_defaults(command=_model_info)
    add_recipe(told)

    add_object_parsers(commands)
    add_bench_parser(commands)

    info = commands.add_parser("info", help="tell about an output, or about an unfinished one")
    info.add_argument("path", help="a raster, or OUTPUT.partial")
    info.add_argument("--map", metavar="PNG", help="also draw the chunks of OUTPUT.partial")
    info.set_defaults(command=_info)
    return parser
