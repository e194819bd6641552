"""Detection: every object once, where it is, whatever the tiles, chunks and workers."""

from __future__ import annotations

import sys
import warnings

import geopandas
import numpy as np
import pytest
import rasterio
import rasterio.features
import shapely
import torch
from affine import Affine
from hypothesis import given, settings
from hypothesis import strategies as st

import daskinfer as di
from conftest import TRANSFORM, write_raster
from daskinfer.cli import main
from daskinfer.infer import release_actor, using_actor
from daskinfer.monitor import ChunkDone
from daskinfer.objects.chunk import find_chunk
from daskinfer.objects.forward import ObjectForward
from daskinfer.objects.keep import merged
from daskinfer.objects.plan import Search, tiled_for
from daskinfer.objects.table import concatenated
from daskinfer.source import source_of
from detectors import Patches, planted, scattered

# Larger than any core and any overlap of the tests.
BIG = (60, 50, 230, 190)


def scene():
    """Some two hundred objects, many of them touching, around a large one."""
    x1, y1, x2, y2 = BIG
    clear = [
        box for box in scattered(300, 420, 260, 24)
        if box[2] <= x1 or box[0] >= x2 or box[3] <= y1 or box[1] >= y2
    ]  # fmt: skip
    return [BIG, *clear]


def search(path, model, options=None, **choice):
    """Objects of a raster, through the engine in this thread."""
    asked = Search(**(options or {}))
    source = source_of(path)
    recipe = di.load_model(model).patch(output="objects")
    inference = tiled_for(source, recipe, asked, **choice)
    parts = []
    with using_actor(inference) as actor:
        for number in range(inference.tiling.chunks):
            index = inference.tiling.index_of(number)
            parts.append(find_chunk(inference, index, source.read, actor).found)
    release_actor(inference)
    return merged(concatenated(parts), inference.tiling, asked)


def boxes_of(found):
    return sorted(tuple(box) for box in found.rows["box"].tolist())


def on_map(box, transform=TRANSFORM):
    """Bounds on the map of a box in pixels."""
    x1, y1, x2, y2 = box
    corners = [transform @ corner for corner in ((x1, y1), (x2, y1), (x2, y2), (x1, y2))]
    xs, ys = zip(*corners, strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def bounds_of(path):
    """Bounds of the features of a file."""
    read = geopandas.read_file if str(path).endswith(("gpkg", "fgb")) else geopandas.read_parquet
    return sorted(tuple(row) for row in read(path).geometry.bounds.values.tolist())


@pytest.fixture(scope="module")
def raster(tmp_path_factory):
    boxes = scene()
    path = tmp_path_factory.mktemp("objects") / "scene.tif"
    return write_raster(path, planted(300, 420, boxes)), boxes


@pytest.mark.parametrize(
    ("tile", "chunk"), [(96, 48), (96, 150), (128, 80), ((70, 140), 100), (300, 300), (512, 512)]
)
def test_every_object_is_found_once_and_where_it_is(raster, tile, chunk):
    path, boxes = raster
    found = search(path, Patches(), {"max_object": 24}, tile=tile, chunk=chunk, batch_size=4)
    assert boxes_of(found) == sorted(boxes)


@settings(max_examples=12)
@given(
    st.integers(1, 90), st.integers(1, 120), st.integers(1, 40), st.integers(2, 16),
    st.integers(8, 24), st.integers(0, 10**6),
)  # fmt: skip
def test_random_objects_in_random_tiles(height, width, largest, max_object, extra, seed):
    largest = min(largest, height, width)
    rng = np.random.default_rng(seed)
    boxes, taken = [], np.zeros((height, width), bool)
    for _ in range(40):
        w, h = (int(n) for n in rng.integers(1, largest + 1, 2))
        x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        if not taken[y : y + h, x : x + w].any():
            taken[y : y + h, x : x + w] = True
            boxes.append((x, y, x + w, y + h))
    with rasterio.MemoryFile() as memory:
        data = planted(height, width, boxes)
        profile = {"count": 1, "height": height, "width": width, "dtype": "uint16"}
        with memory.open(driver="GTiff", transform=TRANSFORM, **profile) as dataset:
            dataset.write(data)
        tile = 2 * max_object + extra
        found = search(memory.name, Patches(), {"max_object": max_object}, tile=tile, chunk=32)
    assert boxes_of(found) == sorted(boxes)


def test_ownership_alone_finds_what_fits_the_halo(tmp_path):
    boxes = scattered(200, 220, 120, 20)
    path = write_raster(tmp_path / "s.tif", planted(200, 220, boxes))
    found = search(path, Patches(), {"max_object": 20, "merge": "core"}, tile=80, chunk=40)
    assert boxes_of(found) == sorted(boxes)


def test_merging_by_overlap_joins_what_was_cut(tmp_path):
    boxes = [(10, 10, 40, 30), (60, 60, 90, 75)]
    path = write_raster(tmp_path / "s.tif", planted(120, 120, boxes))
    asked = {"max_object": 32, "merge": "nmm", "metric": "ios"}
    assert boxes_of(search(path, Patches(), asked, tile=80)) == sorted(boxes)
    asked = {"max_object": 32, "merge": "nms"}
    assert boxes_of(search(path, Patches(), asked, tile=80)) == sorted(boxes)


def test_outlines_are_put_together_too(tmp_path):
    rows, cols = np.mgrid[:200, :260]
    data = np.zeros((1, 200, 260), np.uint16)
    # Two discs across tiles, and one larger than any tile.
    for number, (y, x, radius) in enumerate([(40, 48, 11), (150, 30, 9), (110, 150, 70)], 1):
        data[0, (rows - y) ** 2 + (cols - x) ** 2 <= radius**2] = number
    path = write_raster(tmp_path / "s.tif", data)
    model = di.load_model(Patches(masks=True))
    report = di.detect(path, model, tmp_path / "o.parquet", tile=96, max_object=30, chunk=64)
    assert report.objects == 3
    frame = geopandas.read_parquet(tmp_path / "o.parquet")
    burnt = rasterio.features.rasterize(
        frame.geometry, out_shape=data.shape[1:], transform=TRANSFORM
    )
    assert np.array_equal(burnt > 0, data[0] > 0)
    assert sorted(frame.area) == sorted(100.0 * np.bincount(data.ravel())[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_masks_that_are_empty_and_numbers_of_other_precision(tmp_path, dtype):
    def found(count):
        masks = torch.zeros(2, 1, 40, 40, dtype=dtype)
        masks[1, 0, 20:30, 10:16] = 1
        boxes = torch.tensor([[2, 3, 9, 8], [10, 20, 16, 30]], dtype=dtype)
        scores = torch.tensor([0.5, 0.75], dtype=dtype, requires_grad=True)
        labels = torch.tensor([1, 2], dtype=torch.int16)
        return [{"boxes": boxes, "scores": scores, "labels": labels, "masks": masks}] * count

    path = write_raster(tmp_path / "s.tif", planted(40, 40, []))
    objects = search(path, Fixed(found), {"max_object": 16})
    assert objects.rows["score"].tolist() == [0.5, 0.75]
    assert objects.rows["label"].tolist() == [1, 2]
    outlines = shapely.from_wkb(list(objects.shapes))
    assert [shape.bounds for shape in outlines] == [(2, 3, 9, 8), (10, 20, 16, 30)]


# --- through Dask ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def detected(raster, two_workers, tmp_path_factory):
    """A run on two processes: its report and its file."""
    output = tmp_path_factory.mktemp("detected") / "o.parquet"
    model = di.load_model(Patches(), class_names=["tree", "car", "roof"])
    options = {"tile": 96, "chunk": 100, "max_object": 24}
    return di.detect(raster[0], model, output, client=two_workers, **options), output


def test_the_file_holds_each_object_on_the_map(raster, detected):
    report, output = detected
    frame = geopandas.read_parquet(output)
    assert bounds_of(output) == sorted(on_map(box) for box in raster[1])
    assert frame.crs == "EPSG:32632"
    assert set(frame["score"]) == {0.75}
    expected = {on_map(box): number % 3 for number, box in enumerate(raster[1], 1)}
    labels = {tuple(b): n for b, n in zip(frame.bounds.values.tolist(), frame.label, strict=True)}
    assert labels == expected
    assert (frame["class"] == np.array(["tree", "car", "roof"])[frame.label]).all()
    assert report.objects == len(raster[1])
    assert report.complete
    assert dict(report.counts) == frame["class"].value_counts().to_dict()
    assert str(report.objects) in repr(report)


def test_the_result_does_not_depend_on_workers_chunks_or_format(raster, detected, one_worker):
    path, _ = raster
    folder = detected[1].parent
    for name, chunk in (("o.gpkg", 48), ("o.fgb", 400)):
        options = {"tile": 96, "chunk": chunk, "max_object": 24}
        di.detect(path, Patches(), folder / name, client=one_worker, **options)
        assert bounds_of(folder / name) == bounds_of(detected[1])
    assert geopandas.read_file(folder / "o.gpkg").crs == "EPSG:32632"


CALLS = []


class Counted(Patches):
    def forward(self, images):
        # Not the empty one by which a worker tries the model.
        CALLS.append(sum(bool(image.any()) for image in images))
        return super().forward(images)


def test_a_stopped_run_goes_on(raster, tmp_path, one_worker):
    path, boxes = raster
    CALLS.clear()

    def stop(event):
        if isinstance(event, ChunkDone):
            raise KeyboardInterrupt

    model = di.load_model(Counted())
    options = {"tile": 96, "chunk": 100, "max_object": 24, "client": one_worker}
    output = tmp_path / "o.gpkg"
    with pytest.raises(KeyboardInterrupt):
        di.detect(path, model, output, callbacks=[stop], **options)
    assert not output.exists()
    begun = sum(CALLS)
    # A kill may leave half a line.
    with (tmp_path / "o.gpkg.partial").open("ab") as file:
        file.write(b"\x93NUMPY\x01\x00half")
    report = di.detect(path, model, output, **options)
    assert 0 < report.resumed < report.chunks
    assert sum(CALLS) == begun + report.tiles
    assert bounds_of(output) == sorted(on_map(box) for box in boxes)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["o.gpkg"]
    with pytest.raises(FileExistsError, match="overwrite=True"):
        di.detect(path, model, output, **options)


def test_an_area_keeps_the_objects_centred_in_it(raster, detected, tmp_path, one_worker):
    area = shapely.Polygon([TRANSFORM @ corner for corner in ((250, 40), (415, 30), (330, 180))])
    options = {"tile": 96, "chunk": 100, "max_object": 24, "aoi": area}
    output = tmp_path / "o.parquet"
    report = di.detect(raster[0], Patches(), output, client=one_worker, **options)
    inside = rasterio.features.geometry_mask([area], (300, 420), TRANSFORM, invert=True)
    expected = [
        on_map(box) for box in raster[1]
        if inside[(box[1] + box[3]) // 2, (box[0] + box[2]) // 2]
    ]  # fmt: skip
    assert 0 < len(expected) < len(raster[1])
    assert bounds_of(output) == sorted(expected)
    assert report.outside > 0
    assert report.complete
    assert report.tiles < detected[0].tiles
    with pytest.raises(ValueError, match="no pixel of the raster"):
        di.detect(raster[0], Patches(), tmp_path / "p.parquet", aoi=(0, 0, 1, 1))


def test_other_settings_do_not_go_on(raster, tmp_path, one_worker):
    def stop(event):
        if isinstance(event, ChunkDone):
            raise KeyboardInterrupt

    model = di.load_model(Patches())
    options = {"tile": 96, "chunk": 100, "client": one_worker}
    output = tmp_path / "o.gpkg"
    with pytest.raises(KeyboardInterrupt):
        di.detect(raster[0], model, output, callbacks=[stop], max_object=24, **options)
    with pytest.raises(ValueError, match=r"search\.max_object: 24 then, 30 now"):
        di.detect(raster[0], model, output, max_object=30, **options)


class Choking(Patches):
    """Fails on images with object 1."""

    def forward(self, images):
        if any((image == 1).any() for image in images):
            raise RuntimeError("cannot digest object 1")
        return super().forward(images)


def test_a_chunk_that_fails_is_named_or_left_out(tmp_path, one_worker):
    boxes = [(5, 5, 15, 15), (150, 150, 160, 160)]
    path = write_raster(tmp_path / "s.tif", planted(200, 200, boxes))
    options = {"tile": 64, "chunk": 48, "max_object": 12, "client": one_worker}
    model = di.load_model(Choking())
    with pytest.raises(di.InferenceError, match="cannot digest object 1") as failed:
        di.detect(path, model, tmp_path / "o.gpkg", **options)
    assert failed.value.window[:2] == (0, 0)
    report = di.detect(path, model, tmp_path / "p.gpkg", on_error="nodata", **options)
    assert not report.complete
    assert bounds_of(tmp_path / "p.gpkg") == [on_map(boxes[1])]
    assert (tmp_path / "p.gpkg.failed.jsonl").exists()


@pytest.mark.parametrize("name", ["o.gpkg", "o.parquet", "o.fgb"])
def test_no_object_is_a_file_without_features(tmp_path, one_worker, name):
    path = write_raster(tmp_path / "s.tif", planted(60, 60, []))
    report = di.detect(path, Patches(), tmp_path / name, client=one_worker)
    assert report.objects == 0
    assert bounds_of(tmp_path / name) == []
    read = geopandas.read_parquet if name.endswith("parquet") else geopandas.read_file
    frame = read(tmp_path / name)
    assert list(frame.columns) == ["score", "label", "geometry"]
    assert frame.crs == "EPSG:32632"


def test_objects_on_nothing_but_nodata_are_not_there(tmp_path):
    data = planted(80, 80, [(2, 2, 12, 12), (40, 40, 50, 50), (60, 8, 70, 18)])
    # Filled, it looks like an object to the model.
    data[0, 40:50, 40:50] = 999
    path = write_raster(tmp_path / "s.tif", data, nodata=999)
    model = di.load_model(Patches(), fill=7)
    found = search(path, model, {"max_object": 16}, tile=64)
    assert boxes_of(found) == [(2, 2, 12, 12), (60, 8, 70, 18)]


def test_rotated_rasters_and_windows(tmp_path, one_worker):
    turned = TRANSFORM @ Affine.rotation(30)
    boxes = [(10, 5, 30, 12), (40, 44, 47, 60)]
    path = write_raster(tmp_path / "s.tif", planted(80, 90, boxes), transform=turned)
    options = {"client": one_worker, "window": (4, 8, 70, 80)}
    di.detect(path, Patches(), tmp_path / "o.parquet", **options)
    corners = geopandas.read_parquet(tmp_path / "o.parquet").geometry
    expected = [
        shapely.Polygon([turned @ c for c in ((x1, y1), (x2, y1), (x2, y2), (x1, y2))])
        for x1, y1, x2, y2 in boxes
    ]
    assert all(one.equals_exact(other, 1e-6) for one, other in zip(corners, expected, strict=True))


# --- the models -----------------------------------------------------------------------------------


class Fixed(torch.nn.Module):
    """Gives the same for every image."""

    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, images):
        return self.result(len(images))


def test_boxes_without_a_place_are_dropped_and_counted(tmp_path, one_worker):
    boxes = torch.tensor([[1, 1, 5, 5], [float("nan"), 1, 5, 5], [9, 9, 3, 3], [-4, -4, 2, 60.0]])
    path = write_raster(tmp_path / "s.tif", planted(40, 40, []))
    model = Fixed(lambda n: [{"boxes": boxes}] * n)
    report = di.detect(path, model, tmp_path / "o.parquet", client=one_worker)
    assert report.nonfinite == 2
    # What reaches out of the raster ends there.
    assert bounds_of(tmp_path / "o.parquet") == sorted(
        [on_map((1, 1, 5, 5)), on_map((0, 0, 2, 40))]
    )


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda n: torch.zeros(n, 3, 8, 8), "list of dicts .* got Tensor"),
        (lambda n: [{"logits": torch.zeros(1, 4)}] * n, r"got list of dict with \['logits'\]"),
        (lambda n: [], "0 results for 1 tiles"),
        (lambda n: [{"boxes": torch.zeros(3, 5)}] * n, r"\(n, 4\), x1 y1 x2 y2, got \(3, 5\)"),
        (lambda n: [{"boxes": torch.zeros(3, 4), "scores": torch.zeros(2)}] * n, "3 boxes .* scor"),
        (lambda n: [{"boxes": torch.zeros(3, 4), "masks": torch.zeros(2, 8, 8)}] * n, "masks of"),
    ],
)
def test_models_that_give_something_else(tmp_path, one_worker, result, message):
    path = write_raster(tmp_path / "s.tif", planted(40, 40, []))
    with pytest.raises(di.InferenceError, match=rf"(?s)cannot do its part.*{message}.*No chunk"):
        di.detect(path, Fixed(result), tmp_path / "o.gpkg", client=one_worker)


class Listing(torch.nn.Module):
    def forward(
        self, images: list[torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        found: list[dict[str, torch.Tensor]] = []
        for image in images:
            found.append({"boxes": torch.ones(1, 4) * image.max()})
        return {"loss": torch.zeros(1)}, found


def test_a_scripted_detector_is_given_a_list():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.jit.script(Listing())
    device = ObjectForward(di.load_model(net, output="objects"))
    batch = np.stack([np.full((1, 8, 8), n, np.float32) for n in (3, 5)])
    results = device.run(batch)
    assert [result.boxes.tolist() for result in results] == [[[3] * 4], [[5] * 4]]
    assert results[0].scores.tolist() == [1]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"output": "o.shp"}, ValueError, r"name it \.parquet"),
        ({"output": "no/o.gpkg"}, FileNotFoundError, "make it first"),
        ({"max_object": 0}, ValueError, "max_object must be whole px"),
        ({"tile": 30, "max_object": 20}, ValueError, "tile 30 px cannot show objects of 20 px"),
        ({"merge": "wbf"}, ValueError, "merge must be one of 'tiles'"),
        ({"threshold": 1.5}, ValueError, "threshold must be from 0"),
        ({"chunk": -4}, ValueError, "chunk must be"),
        ({"batch_size": 0}, ValueError, "batch_size must be"),
        ({"on_error": "skip"}, ValueError, "on_error must be"),
        ({"window": (0, 0, 500, 500)}, ValueError, "window"),
    ],
)
def test_refused_before_work(raster, tmp_path, options, error, message):
    output = tmp_path / options.pop("output", "o.gpkg")
    with pytest.raises(error, match=message):
        di.detect(raster[0], Patches(), output, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_detector_is_told_from_a_network_of_several_outputs(raster, tmp_path):
    with pytest.raises(ValueError, match=r"finds objects: pass it to detect\(\)"):
        di.plan(raster[0], Patches(), tmp_path / "o.tif")


def test_a_raster_is_not_what_a_model_of_objects_makes(raster, tmp_path):
    model = di.load_model(Patches(), output="objects")
    with pytest.raises(ValueError, match=r"detect\(\)"):
        di.plan(raster[0], model, tmp_path / "o.tif")


def test_without_the_extra_it_says_what_to_install(raster, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyogrio", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "daskinfer\[vector\]"'):
        di.detect(raster[0], Patches(), tmp_path / "o.gpkg")


def test_labels_without_a_name_are_told(raster, tmp_path, one_worker):
    options = {"tile": 512, "max_object": 24, "client": one_worker}
    # Labels are 0, 1 and 2.
    model = di.load_model(Patches(), class_names=["tree", "car"])
    with pytest.warns(UserWarning, match=r"labels \[2\], and class_names has 2 names.*background"):
        report = di.detect(raster[0], model, tmp_path / "o.gpkg", **options)
    assert report.complete


def test_the_command_line_takes_what_has_a_meaning_for_objects(raster, tmp_path, capsys):
    command = ["detect", raster[0], "detectors:Patches", str(tmp_path / "o.gpkg")]
    for option in (["--output", "values"], ["--confidence"], ["--dtype", "uint8"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, *option])
        assert ended.value.code == 2
    options = ["--tile", "96", "--max-object", "24", "--threshold", "2", "--no-per-class"]
    assert main([*command, *options]) == 2
    assert "threshold must be from 0" in capsys.readouterr().err
    assert main([*command, "--tile", "30", "--max-object", "20"]) == 2
    assert "pass --tile 80, or a smaller --max-object" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_line(raster, tmp_path, capsys):
    output = tmp_path / "o.parquet"
    command = ["detect", raster[0], "detectors:Patches", str(output), "--tile", "96"]
    options = ["--max-object", "24", "--class-names", "tree,car,roof", "--min-score", "0.5"]
    assert main([*command, *options]) == 0
    shown = capsys.readouterr().out
    assert "up to 24 px seen whole" in shown
    assert f"{len(raster[1])} (tree" in shown
    assert bounds_of(output) == sorted(on_map(box) for box in raster[1])
    assert main([*command, *options]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, *options, "--overwrite", "--min-score", "0.9"]) == 0
    assert bounds_of(output) == []
