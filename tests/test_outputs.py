"""The work file and the ledger of a run together."""

from __future__ import annotations

import os

from models import in_new_process

HUGE = """
import resource, sys
import rasterio, torch, distributed
import daskinfer as di
from daskinfer.outputs import Outputs

side, folder = 1_000_000, sys.argv[1]
with rasterio.open(
    f"{folder}/huge.tif", "w", driver="GTiff", width=side, height=side, count=6, dtype="uint16",
    tiled=True, blockxsize=512, blockysize=512, compress="deflate", sparse_ok=True, bigtiff="YES",
    crs="EPSG:32632", transform=rasterio.Affine(10, 0, 500_000, 0, -10, 5_600_000),
):
    pass
model = di.load_model(torch.nn.Conv2d(6, 3, 3, padding=1))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3

before = peak()
plan = di.plan(f"{folder}/huge.tif", model, f"{folder}/o.tif", tile=512)
repr(plan)
with Outputs.prepare(plan) as outputs:
    todo, count = outputs.todo()
    first = next(todo)
with open(f"{folder}/o.tif.partial", "rb") as file:
    print(plan.tiling.chunks, count, first, peak() - before, file.read(4)[2])
"""


def test_a_raster_of_a_million_by_a_million_px_is_planned_in_little_memory(tmp_path):
    chunks, count, first, grown, version = in_new_process(HUGE, tmp_path).split()
    assert int(chunks) == int(count) > 200_000
    assert int(first) == 0
    assert float(grown) < 300  # MB
    assert int(version) == 43  # BigTIFF
    # Nothing of the raster's size is on the disk.
    assert os.stat(tmp_path / "o.tif.partial").st_blocks * 512 < 1e6
