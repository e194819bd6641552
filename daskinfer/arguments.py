"""Arguments that several commands of the command line take, and how their text is read."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any

__all__ = [
    "add_job",
    "add_part",
    "add_recipe",
    "add_source",
    "as_typed",
    "model_of",
    "numbers",
    "size",
    "source_of",
    "words",
]

_MODEL_OPTIONS = (
    "weights", "bands", "scale", "offset", "mean", "std", "fill", "class_names", "class_colors",
    "clip_min", "clip_max", "axes", "accelerator", "trust",
)  # fmt: skip
_SCORE_OPTIONS = ("output", "activation", "threshold", "head", "dtype", "confidence")
_SOURCE_OPTIONS = ("stack", "like", "crs", "resolution", "resampling")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add what `plan` and `run` take, named as in Python."""
    add_source(parser)
    parser.add_argument(
        "model", help="file (.pt2, .pt, .onnx), STAC MLM item (.json) or package.module:factory"
    )
    parser.add_argument(
        "destination", metavar="output", help="the COG to write (.tif), or a .vrt of several"
    )
    job = parser.add_argument_group("run")
    add_part(job)
    _add_mask(job)
    _add_tiles(job)
    _add_inference(job)
    _add_file(job)
    add_recipe(parser)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the raster that is read, and on which grid."""
    parser.add_argument(
        "source", nargs="+", help="raster that GDAL opens; several are a mosaic, later ones on top"
    )
    grid = parser.add_argument_group("source", "put it on a grid that is not its own")
    grid.add_argument("--stack", choices=("bands",), help="one single-band file per band")
    grid.add_argument("--like", metavar="PATH", help="on the grid of this raster")
    grid.add_argument("--crs", metavar="EPSG:N", help="on a grid of this CRS")
    grid.add_argument("--resolution", type=float, metavar="SIZE", help="with pixels of this size")
    grid.add_argument("--resampling", metavar="NAME", help="nearest (default), bilinear, ...")


def add_part(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add what cuts a part out of the source."""
    parser.add_argument(
        "--window", type=numbers(int), metavar="ROW,COL,HEIGHT,WIDTH", help="part of the source"
    )
    parser.add_argument(
        "--bounds",
        type=numbers(float),
        metavar="LEFT,BOTTOM,RIGHT,TOP",
        help="part of the source in coordinates, beyond which the model sees nothing; write "
        "--bounds=-1,... where the first is negative",
    )
    parser.add_argument("--bounds-crs", metavar="CRS", help="of --bounds, as EPSG:4326")


def _add_mask(job: argparse._ArgumentGroup) -> None:
    job.add_argument(
        "--aoi", metavar="PATH", help="polygons (GeoJSON, GeoPackage, ...); outside is nodata"
    )
    job.add_argument(
        "--mask-halo", action="store_true", help="nodata also wherever the model looks at nodata"
    )


def _add_tiles(job: argparse._ArgumentGroup) -> None:
    for name, text in (
        ("chunk", "side of what one task computes"),
        ("tile", "side of one model input, halo included"),
        ("halo", "context per side"),
    ):
        job.add_argument(
            f"--{name}", type=size, default="auto", metavar="PX", help=f"{text}: N, Y,X or auto"
        )
    job.add_argument("--overlap", type=size, metavar="PX", help="blend tiles instead of a halo")
    job.add_argument("--batch-size", type=size, default="auto", metavar="N", help="tiles per batch")
    job.add_argument("--tol", type=float, default=1e-3, help="for --halo calibrated")


def _add_inference(job: argparse._ArgumentGroup) -> None:
    job.add_argument(
        "--tta", type=_symmetries, metavar="d4|A,B,...", help="average over symmetries"
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


def _add_file(job: argparse._ArgumentGroup) -> None:
    job.add_argument("--on-error", choices=("raise", "nodata"), default="raise")
    job.add_argument("--overwrite", action="store_true", help="replace an existing output")
    job.add_argument("--blocksize", type=size, default="auto", metavar="PX")
    job.add_argument("--compress", default="auto", help="auto, deflate, zstd, lzw, lerc, none ...")
    job.add_argument("--level", type=int, help="effort of the codec")
    job.add_argument("--predictor", type=size, default="auto", metavar="auto|1|2|3")
    job.add_argument("--max-z-error", type=float, default=0.0, help="that lerc may make")
    job.add_argument("--interleave", choices=("auto", "pixel", "band"), default="auto")
    job.add_argument("--sparse", action="store_true", help="leave out blocks that are all nodata")
    job.add_argument("--layout", choices=("strict", "append"), default="strict")
    job.add_argument(
        "--split", type=size, default="auto", metavar="PX", help="side of each file of a .vrt"
    )


def add_recipe(parser: argparse.ArgumentParser, *, pixels: bool = True) -> None:
    """Add the fields of a model's recipe, named as in Python.

    Parameters
    ----------
    parser : ArgumentParser
    pixels : bool
        Also those that say what becomes of the scores of pixels.
    """
    model = parser.add_argument_group("model", "replace what its file or its item says")
    model.add_argument("--weights", metavar="FILE", help="for a factory")
    for name in ("bands", "class-names", "class-colors"):
        model.add_argument(f"--{name}", type=words, metavar="A,B,...")
    for name in ("scale", "offset", "clip-min", "clip-max", "mean", "std"):
        model.add_argument(f"--{name}", type=numbers(float), metavar="X[,X...]")
    model.add_argument("--fill", type=float)
    model.add_argument("--axes", choices=("nchw", "nhwc"), help="order of input and output")
    model.add_argument("--accelerator", choices=("cpu", "cuda"), help="the only kind it runs on")
    model.add_argument(
        "--trust", action="store_const", const=True, help="run code that its file holds"
    )
    if pixels:
        _add_scores(model)


def _add_scores(model: argparse._ArgumentGroup) -> None:
    model.add_argument("--output", choices=("classes", "probabilities", "values"))
    model.add_argument("--activation", choices=("softmax", "sigmoid", "identity"))
    model.add_argument("--head", type=_heads, metavar="NAME|N[,...]", help="of several outputs")
    model.add_argument("--dtype", choices=("float32", "uint8"), help="of probabilities")
    model.add_argument(
        "--confidence", action=argparse.BooleanOptionalAction, help="a second band beside classes"
    )
    model.add_argument("--threshold", type=float, help="of the score of one channel")


def model_of(arguments: argparse.Namespace, *, pixels: bool = True) -> Any:
    """Load the model, with what `add_recipe` took of the same `pixels`."""
    from .model import load_model

    names = (*_MODEL_OPTIONS, *(_SCORE_OPTIONS if pixels else ()))
    return load_model(arguments.model, **given_of(arguments, names))


def source_of(arguments: argparse.Namespace) -> Any:
    """One path, a list of them, or what comes of them on a grid that is asked for."""
    source = arguments.source[0] if len(arguments.source) == 1 else arguments.source
    given = given_of(arguments, _SOURCE_OPTIONS)
    if not given:
        return source
    from .source import open_raster

    return open_raster(source, **given)


def given_of(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of some arguments that the command takes and was given."""
    told = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in told.items() if value is not None}


def as_typed(text: str, arguments: argparse.Namespace) -> str:
    """A message with what is to be typed in Python as it is typed here.

    >>> as_typed("pass halo=8, or overwrite=True", argparse.Namespace(halo=0, overwrite=False))
    'pass --halo 8, or --overwrite'
    """

    def option(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if not hasattr(arguments, name):
            return found[0]
        flag = f"--{name.replace('_', '-')}"
        return flag if value == "True" else f"{flag} {value.strip(chr(39))}".rstrip()

    return re.sub(r"\b([a-z_]+)=('[\w.:/-]+'|[\w.]*\w|)", option, text)


def words(text: str) -> list[str]:
    """Read ``A,B,...``."""
    return [word.strip() for word in text.split(",")]


def _heads(text: str) -> Any:
    heads = [int(word) if word.removeprefix("-").isdigit() else word for word in words(text)]
    return heads[0] if len(heads) == 1 else heads


def _symmetries(text: str) -> Any:
    return text if text == "d4" else words(text)


def numbers(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make what reads ``X,Y,...`` as a tuple of numbers of a kind."""

    def read(text: str) -> tuple[Any, ...]:
        return tuple(kind(word) for word in text.split(","))

    # What argparse says of text that cannot be read.
    read.__name__ = "numbers"
    return read


def size(text: str) -> Any:
    """Read ``auto``, ``calibrated``, a number, or a pair."""
    if text in ("auto", "calibrated"):
        return text
    sides = tuple(int(word) for word in text.split(","))
    return sides[0] if len(sides) == 1 else sides
