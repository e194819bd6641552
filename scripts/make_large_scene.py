"""Make a large raster out of the bundled scene, by mirroring and tiling it.

    python scripts/make_large_scene.py large.tif --size 20000

Mirrored copies join without an edge, so that the large scene has clouds of real shapes and no lines
that are not in the data.  The result is a COG of 6 bands of uint16, written block by block.
"""

from __future__ import annotations

import argparse

import numpy as np
import rasterio

from daskinfer.cog import CogSpec, WorkFile, encode_chunk
from daskinfer.demo import demo_path

CHUNK = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("--size", type=int, default=20_000, help="rows and columns")
    arguments = parser.parse_args()
    with rasterio.open(demo_path()) as dataset:
        scene = dataset.read()
        spec = CogSpec(
            arguments.size,
            arguments.size,
            dataset.count,
            "uint16",
            transform=tuple(dataset.transform)[:6],
            crs=dataset.crs.to_wkt(),
            nodata=dataset.nodata,
            descriptions=dataset.descriptions,
            compress="zstd",
            level=1,
            resampling="average",
        )
    write_mirrored(arguments.output, spec, scene)


def write_mirrored(output: str, spec: CogSpec, scene: np.ndarray) -> None:
    """Write the scene and its mirror images, side by side, until `spec` is full."""
    rows, cols = (
        mirrored(size, side) for size, side in zip(scene.shape[1:], spec.shapes[0], strict=True)
    )
    with WorkFile.create(f"{output}.partial", spec, (CHUNK, CHUNK)) as work:
        for row in range(0, spec.height, CHUNK):
            for col in range(0, spec.width, CHUNK):
                part = scene[:, rows[row : row + CHUNK]][:, :, cols[col : col + CHUNK]]
                work.append(encode_chunk(spec, part, row, col, work.levels))
        work.finish(output)


def mirrored(size: int, length: int) -> np.ndarray:
    """Pixel of the scene for each pixel of the large one: 0, 1, ..., 1, 0, 0, 1, ..."""
    period = np.concatenate([np.arange(size), np.arange(size)[::-1]])
    return np.resize(period, length)


if __name__ == "__main__":
    main()
