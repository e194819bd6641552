"""STAC items of models: read, refused, written, and checked by the package of the standard."""

from __future__ import annotations

import copy
import json
import math
import os

import numpy as np
import pystac
import pytest
import rasterio
import torch
from stac_model.input import InputStructure, ModelInput
from stac_model.output import MLMClassification, ModelOutput, ModelResult
from stac_model.schema import MLModelExtension, MLModelProperties

import daskinfer as di
from conftest import N3, noise, seeded, write_raster
from daskinfer.cli import main
from daskinfer.demo import demo_model_path, demo_path
from daskinfer.forward import Forward
from daskinfer.model.mlm.scaling import scaled, scaling_of
from models import export, onnx_file
from oracle import assert_classes, whole

NAMES = ("clear", "cloud", "shadow")


def demo_item(folder):
    """An item of the demo model by the package of the standard, in the numbers that are stored."""
    model = di.demo_model()
    # x = (raw * 1e-4 - mean) / std
    scaling = [
        {"type": "z-score", "mean": mean * 1e4, "stddev": std * 1e4}
        for mean, std in zip(model.mean, model.std, strict=True)
    ]
    properties = MLModelProperties(
        name="Cloud U-Net",
        architecture="U-Net",
        tasks={"semantic-segmentation"},
        framework="PyTorch",
        accelerator=None,
        input=[
            ModelInput(
                name="Sentinel-2 L1C",
                bands=list(model.bands),
                input=InputStructure(
                    shape=[-1, 6, -1, -1],
                    dim_order=["batch", "bands", "height", "width"],
                    data_type="float32",
                ),
                value_scaling=scaling,
                resize_type=None,
                pre_processing_function=None,
            )
        ],
        output=[
            ModelOutput(
                name="classes",
                tasks={"semantic-segmentation"},
                classes=[
                    MLMClassification(value=value, name=name, color_hint=color[1:].upper())
                    for value, (name, color) in enumerate(
                        zip(NAMES, model.class_colors, strict=True)
                    )
                ],
                result=ModelResult(
                    shape=[-1, 3, -1, -1],
                    dim_order=["batch", "class", "height", "width"],
                    data_type="float32",
                ),
                post_processing_function=None,
            )
        ],
    )
    item = pystac.Item(
        id="cloud-unet",
        geometry=None,
        bbox=None,
        datetime=None,
        properties={
            "start_datetime": "2017-01-01T00:00:00Z",
            "end_datetime": "9999-12-31T00:00:00Z",
        },
        assets={
            "model": pystac.Asset(
                href=os.path.relpath(demo_model_path(), folder),
                roles=["mlm:model"],
                extra_fields={"mlm:artifact_type": "torch.export.save"},
            )
        },
    )
    MLModelExtension.ext(item, add_if_missing=True).apply(properties)
    path = folder / "item.json"
    path.write_text(json.dumps(item.to_dict(include_self_link=False)))
    return path


def test_an_item_by_the_standards_package_runs_with_nothing_else(tmp_path, capsys):
    item = demo_item(tmp_path)
    assert main(["run", demo_path(), str(item), str(tmp_path / "out.tif")]) == 0
    di.run(demo_path(), di.demo_model(), tmp_path / "expected.tif")
    with (
        rasterio.open(tmp_path / "out.tif") as actual,
        rasterio.open(tmp_path / "expected.tif") as expected,
    ):
        assert np.mean(actual.read() != expected.read()) < 1e-4  # rounding of the other numbers
        assert actual.colormap(1) == expected.colormap(1)
        assert json.loads(actual.tags()["CLASS_NAMES"]) == list(NAMES)


def test_our_own_item_is_one_by_the_standards_package(tmp_path):
    model = di.demo_model()
    item = model.to_mlm(tmp_path / "item.json")
    assert item == json.loads((tmp_path / "item.json").read_text())

    read = pystac.Item.from_file(str(tmp_path / "item.json"))
    assert MLModelExtension.has_extension(read)
    properties = MLModelProperties(**read.properties)
    assert properties.input[0].bands == list(model.bands)
    assert properties.output[0].tasks == {"semantic-segmentation"}
    assert [c.name for c in properties.output[0].classes] == list(NAMES)
    assert read.properties["bands"] == [{"name": band} for band in model.bands]

    field = di.receptive_field(model)
    ours = {k[10:]: v for k, v in item["properties"].items() if k.startswith("daskinfer:")}
    assert ours["radius"] == list(field.radius)
    assert ours["halo"] == list(field.halo)
    assert ours["stride"] == list(field.stride)
    assert ours["exact"] is True

    again = di.load_model(tmp_path / "item.json")
    assert os.path.samefile(again.source, model.source)
    assert again.recipe() == model.recipe()
    assert again.digest == model.digest


def test_keywords_go_before_what_the_item_says(tmp_path):
    model = di.load_model(demo_item(tmp_path), class_names=["a", "b", "c"], mean=0, std=1)
    assert model.class_names == ("a", "b", "c")
    assert (model.mean, model.std, model.bands) == ((0,), (1,), di.demo_model().bands)


# --- value scaling --------------------------------------------------------------------------------


def normalised(recipe, raw):
    """What the network sees of a raster."""
    net = torch.nn.Identity()
    return Forward(di.load_model(net, output="values", **recipe)).run(raw[None], None)[0]


OPERATIONS = {
    "min-max": ({"minimum": 100, "maximum": 900}, lambda x: (x - 100) / 800),
    "z-score": ({"mean": 300, "stddev": 40}, lambda x: (x - 300) / 40),
    "clip": ({"minimum": 200, "maximum": 600}, lambda x: np.clip(x, 200, 600)),
    "clip-min": ({"minimum": 200}, lambda x: np.maximum(x, 200)),
    "clip-max": ({"maximum": 600}, lambda x: np.minimum(x, 600)),
    "offset": ({"value": 50}, lambda x: x - 50),
    "scale": ({"value": 250}, lambda x: x / 250),
}


@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("each", [False, True])
def test_every_operation_is_done(kind, each):
    raw = np.linspace(0, 1000, 48, dtype=np.float32).reshape(3, 4, 4)
    numbers, expected = OPERATIONS[kind]
    operations = [{"type": kind, **numbers}] * (3 if each else 1)
    actual = normalised(scaling_of(operations, 3), raw)
    assert np.allclose(actual, expected(raw), rtol=1e-6)


def test_every_band_may_have_another_operation():
    raw = np.linspace(0, 1000, 8 * 16, dtype=np.float32).reshape(8, 4, 4)
    operations = [*({"type": kind, **numbers} for kind, (numbers, _) in OPERATIONS.items()), None]
    expected = [done(raw[i]) for i, (_, done) in enumerate(OPERATIONS.values())]
    assert np.allclose(normalised(scaling_of(operations, 8), raw), [*expected, raw[-1]], rtol=1e-6)


def test_a_scale_replaces_the_rasters_own_and_others_come_after_it(tmp_path):
    scene = write_raster(tmp_path / "a.tif", np.full((1, 16, 16), 500, np.uint16))
    with rasterio.open(scene, "r+") as dataset:
        dataset.scales = [0.1]
    for operation, expected in (
        ({"type": "scale", "value": 100}, 5.0),
        ({"type": "z-score", "mean": 40, "stddev": 2}, 5.0),
    ):
        net = di.load_model(torch.nn.Identity(), output="values", **scaling_of([operation], 1))
        pred = di.predict(di.open_raster(scene), net)
        assert np.allclose(pred.compute(scheduler="threads"), expected)


def test_what_is_written_of_scaling_is_read_as_the_same():
    raw = np.linspace(0, 1000, 32, dtype=np.float32).reshape(2, 4, 4)
    recipe = {"scale": (0.1, 0.2), "offset": (1,), "mean": (5, 6), "std": (2,)}
    operations = scaled(2, recipe["scale"], (1,), (5, 6), (2,), (None, None))
    expected = normalised(recipe, raw)
    assert np.allclose(normalised(scaling_of(operations, 2), raw), expected, atol=1e-4)
    clips = (0.0, -math.inf), (9.0, math.inf)
    assert scaled(2, None, None, None, None, clips) == [
        {"type": "clip", "minimum": 0.0, "maximum": 9.0},
        None,
    ]


def test_what_is_clipped_and_scaled_is_written_as_an_expression(tmp_path):
    recipe = {"scale": (0.01, 0.02), "offset": (1.0,), "mean": (5.0, 6.0), "std": (2.0,)}
    clips = {"clip_min": (2.0,), "clip_max": (8.0, math.inf)}
    raw = np.linspace(0, 1000, 32, dtype=np.float32).reshape(2, 4, 4)
    operations = scaled(2, *recipe.values(), tuple(clips.values()))
    for band, operation in enumerate(operations):
        assert (operation["type"], operation["format"]) == ("processing", "gdal-calc")
        computed = eval(operation["expression"], {"clip": np.clip, "A": raw[band]})
        assert np.allclose(computed, normalised(recipe | clips, raw)[band], atol=1e-5)
    saved = di.load_model(seeded(N3), **recipe, **clips).save(tmp_path / "net.pt2")
    saved.to_mlm(tmp_path / "item.json")
    assert di.load_model(tmp_path / "item.json").recipe() == saved.recipe()


# --- refusals -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small item by ourselves, as a dict, and its folder."""
    folder = tmp_path_factory.mktemp("items")
    path = onnx_file(folder / "net.onnx", seeded(N3))
    model = di.load_model(path, bands=["red", "nir"], class_names=["a", "b", "c"])
    item = model.to_mlm(folder / "item.json")
    # As others write them: without fields of ours.
    ours = [name for name in item["properties"] if name.startswith("daskinfer:")]
    for name in ours:
        del item["properties"][name]
    return item, folder


def changed(small, change, **spec):
    item, folder = small
    item = copy.deepcopy(item)
    change(item, item["properties"]["mlm:input"][0], item["properties"]["mlm:output"][0])
    path = folder / "changed.json"
    path.write_text(json.dumps(item))
    return di.load_model(path, **spec)


def test_a_plain_item_is_read(small):
    model = changed(small, lambda item, into, out: None)
    assert (model.kind, model.bands, model.output) == ("onnx", ("red", "nir"), "classes")
    assert model.class_names == ("a", "b", "c")


def expression(item, into, out):
    into["bands"] = ["red", {"name": "ndvi", "format": "rio-calc", "expression": "(a-b)/(a+b)"}]


def update(place, **fields):
    return lambda item, into, out: {"in": into, "out": out}[place].update(fields)


FUNCTION = {"format": "python", "expression": "package.module:normalise"}
OTHER_CONTENT = {"file:checksum": "1220" + 32 * "00"}
STRUCTURE = {"shape": [-1, 3], "dim_order": ["batch", "class"], "data_type": "float32"}
PLANE = {
    "shape": [-1, 2, 8, 8],
    "dim_order": ["batch", "bands", "height", "width"],
    "data_type": "float32",
}
SERIES = {"shape": [-1, 4, 2, 8, 8], "dim_order": ["batch", "time", "bands", "height", "width"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (expression, r"band 'ndvi' is computed by '\(a-b\)/\(a\+b\)', which is not run"),
        (update("in", resize_type="interpolation-linear"), "resize_type 'interpolation-linear'"),
        (update("in", norm_type="z-score"), "norm_type is of MLM before 1.3"),
        (update("in", pre_processing_function=FUNCTION), "package.module:normalise.* is not run"),
        (update("out", post_processing_function=FUNCTION), "post_processing_function .* not run"),
        (update("in", value_scaling=[{"type": "l2"}]), "value_scaling 'l2' is unknown; known: min"),
        (update("in", value_scaling=[None, {"type": "scale"}]), "scale needs value"),
        (update("in", value_scaling=[{"type": "scale", "value": 1}] * 3), "3 entries for 2 bands"),
        (
            update("in", value_scaling=[{"type": "processing", **FUNCTION}]),
            "an expression .* is not run: pass scale=",
        ),
        (update("in", input=SERIES | {"data_type": "float32"}), "its input has the dimensions"),
        (update("in", input={**SERIES, "data_type": "uint8"}), "its input has the dimensions"),
        (update("out", result=STRUCTURE), r"its output has the dimensions \['batch', 'class'\]"),
        (update("out", tasks=["scene-classification"]), r"tasks are \['scene-classification'\]"),
        (
            update("in", input={**PLANE, "shape": [-1, 2, 64]}),
            r"its input has the shape \[-1, 2, 64\], which must be a whole number for each",
        ),
        (update("out", result={**PLANE, "shape": [-1, "c", 8, 8]}), "its output has the shape"),
        (
            lambda item, into, out: out.update(
                {"classification:classes": [{"value": 7, "name": "a"}, {"value": 9, "name": "b"}]}
            ),
            r"values \[7, 9\], the network 3 scores.*pass class_names=",
        ),
        (
            lambda item, into, out: item["properties"]["mlm:input"].append(into),
            "it has 2 inputs",
        ),
        (
            lambda item, into, out: item["properties"]["mlm:output"].append(out | {"name": "b"}),
            "it has the outputs 'classes', 'b': say which to take, as head=",
        ),
        (
            lambda item, into, out: item["assets"]["model"].update(roles=["data"]) or
            item["assets"].update(net=item["assets"].pop("model")),
            "it has 0 assets with the role mlm:model",
        ),
        (
            lambda item, into, out: item["assets"]["model"].update(href="https://a.b/c.onnx"),
            "its network is at https://a.b/c.onnx: fetch it",
        ),
        (
            lambda item, into, out: item["assets"]["model"].update(OTHER_CONTENT),
            "not the file that it describes",
        ),
        (
            lambda item, into, out: item["properties"].update(
                {"mlm:accelerator": "xla", "mlm:accelerator_constrained": True}
            ),
            "it runs on xla only",
        ),
        (
            lambda item, into, out: item["assets"]["model"].update({"mlm:entrypoint": "os:getcwd"}),
            "names code to run, os:getcwd, .*trust=True",
        ),
        (lambda item, into, out: item["properties"].pop("mlm:input"), "without the mlm extension"),
        (lambda item, into, out: into.pop("input"), r"not a valid MLM item: KeyError\('input'\)"),
    ],
)  # fmt: skip
def test_what_would_be_left_out_is_refused(small, change, message):
    with pytest.raises(ValueError, match=rf"changed\.json'.*{message}"):
        changed(small, change)


BOXES = {"shape": [-1, -1, 6], "dim_order": ["batch", "detection", "value"], "data_type": "float32"}


@pytest.mark.parametrize("task", ["object-detection", "instance-segmentation"])
def test_an_item_of_a_detector_is_for_objects(small, task):
    labels = {"classification:classes": [{"value": 1, "name": "tree"}, {"value": 3, "name": "car"}]}
    model = changed(small, update("out", tasks=[task], result=BOXES, **labels))
    assert (model.output, model.class_names) == ("objects", ("0", "tree", "2", "car"))
    with pytest.raises(ValueError, match="pass it to detect"):
        di.plan("s.tif", model, "o.tif")


def test_a_network_that_is_not_there_is_said_to_be_missing(small):
    with pytest.raises(FileNotFoundError, match=r"changed\.json': its network .*gone\.onnx"):
        changed(small, lambda item, into, out: item["assets"]["model"].update(href="gone.onnx"))


def test_what_stands_for_a_function_lets_the_item_be_read(small):
    change = update("in", pre_processing_function=FUNCTION)
    assert changed(small, change, mean=1, std=2).mean == (1,)
    change = update("out", post_processing_function=FUNCTION)
    assert changed(small, change, output="values").output == "values"
    known = {"format": "python", "expression": "torch.nn.functional.softmax"}
    assert changed(small, update("out", post_processing_function=known)).activation == "softmax"


def test_other_tasks_and_accelerators_are_understood(small):
    model = changed(small, update("out", tasks=["regression"], **{"classification:classes": None}))
    assert (model.output, model.class_names) == ("values", None)
    fields = {"mlm:accelerator": "cuda", "mlm:accelerator_constrained": True}
    model = changed(small, lambda item, into, out: item["properties"].update(fields))
    assert model.accelerator == "cuda"
    fields["mlm:accelerator_constrained"] = False
    model = changed(small, lambda item, into, out: item["properties"].update(fields))
    assert model.accelerator is None


def test_a_model_for_cuda_alone_is_refused_where_there_is_none(small, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    fields = {"mlm:accelerator": "cuda", "mlm:accelerator_constrained": True}
    model = changed(small, lambda item, into, out: item["properties"].update(fields))
    scene = write_raster(tmp_path / "a.tif", noise(2, 32, 32), descriptions=("red", "nir"))
    with pytest.raises(di.InferenceError, match="the model runs on cuda only, which torch does"):
        di.run(scene, model, tmp_path / "out.tif")


def test_text_that_is_no_item_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"a\.json' is not a STAC item"):
        di.load_model(tmp_path / "a.json")


def test_a_model_in_memory_has_to_be_saved_first(tmp_path):
    model = di.load_model(seeded(N3), scale=1e-4)
    with pytest.raises(ValueError, match=r"N3 is no file that an item could name: model\.save"):
        model.to_mlm(tmp_path / "item.json")


# --- weights and entry points, embedded items -----------------------------------------------------


def test_an_item_of_weights_names_its_factory_and_has_to_be_trusted(tmp_path, factory):
    net = pytest.importorskip("nets_of_users").make().eval()
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    di.load_model(factory, weights=tmp_path / "weights.pt").to_mlm(tmp_path / "item.json")
    with pytest.raises(ValueError, match=f"names code to run, {factory}"):
        di.load_model(tmp_path / "item.json")
    model = di.load_model(tmp_path / "item.json", trust=True)
    assert (model.kind, model.source) == ("factory", factory)
    x = torch.zeros(1, 2, 8, 8)
    with torch.inference_mode():
        assert torch.equal(model.network()(x), net(x))


def test_an_item_embedded_by_the_standards_package_is_read(tmp_path):
    item = json.loads(demo_item(tmp_path).read_text())
    properties = {name[4:]: v for name, v in item["properties"].items() if name[:4] == "mlm:"}
    properties["input"][0]["bands"] = properties["input"][0]["bands"][:2]
    properties["input"][0]["value_scaling"] = properties["input"][0]["value_scaling"][:2]
    path = tmp_path / "net.pt2"
    program = torch.export.load(export(path, seeded(N3)))
    text = json.dumps({"properties": properties})  # JSON is YAML
    torch.export.save(program, path, extra_files={"mlm-metadata": text})
    model = di.load_model(path)
    assert (model.bands, model.class_names) == (("blue", "green"), NAMES)
    assert np.allclose(model.mean, np.array(di.demo_model().mean[:2]) * 1e4)


def test_classes_of_an_item_are_those_of_its_network(small, tmp_path):
    raw = noise(2, 40, 40)
    scene = write_raster(tmp_path / "a.tif", raw[::-1], descriptions=("nir", "red"))
    model = changed(small, lambda item, into, out: None)
    pred = di.predict(di.open_raster(scene), model).compute(scheduler="threads")
    assert_classes(pred.values[0], whole(seeded(N3), raw))


def test_model_info_tells_how_an_item_was_read(tmp_path, capsys):
    assert main(["model-info", str(demo_item(tmp_path)), "--class-names", "a,b,c"]) == 0
    told = capsys.readouterr().out
    assert "exported program (torch.export)" in told
    assert "x = (raw * the raster's own scale - mean) / std" in told
    assert "0 a #8fa876, 1 b #f4f1ea, 2 c #2b3a67" in told
    assert main(["model-info", str(demo_item(tmp_path)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bands"] == list(di.demo_model().bands)


def test_halo_takes_a_model_alone(tmp_path, capsys):
    path = onnx_file(tmp_path / "net.onnx", seeded(N3))
    assert main(["halo", path]) == 0
    assert "radius 3 px, stride 1 px" in capsys.readouterr().out
