"""What a model's scores become: heads, probabilities as bytes, confidence, many bands."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
import pytest
import rasterio
import torch
import xarray as xr
from torch import nn

import daskinfer as di
from conftest import N3, Pixel, noise, seeded, write_raster
from daskinfer.cog.overview import reduce2x2
from daskinfer.forward import Forward, OutputFormat, to_pixels
from daskinfer.infer import infer_chunk, release_actor, using_actor
from daskinfer.settle import Choice, settle
from daskinfer.source import ArraySource
from oracle import whole


def computed(net, raw, choice=None, **spec):
    """Output pixels of `raw` through the engine in this thread, and what they are."""
    source = ArraySource(xr.DataArray(raw, dims=("band", "y", "x")))
    model = di.load_model(net, **spec)
    inference, _ = settle(source, model, Choice(**(choice or {"tile": 48, "chunk": 64})))
    result = np.empty((inference.form.bands, *source.grid.shape), inference.form.dtype)
    with using_actor(inference) as actor:
        for number in range(inference.tiling.chunks):
            index = inference.tiling.index_of(number)
            rows, cols = inference.window(index).slices()
            result[:, rows, cols] = infer_chunk(inference, index, source.read, actor).data
    release_actor(inference)
    return result, inference.form


def softmax(scores):
    e = np.exp(scores - scores.max(axis=0))
    return e / e.sum(axis=0)


RAW = noise(2, 70, 90, dtype="float32") / 1e4


# --- heads ----------------------------------------------------------------------------------------


class Named(NamedTuple):
    """Two tensors with names."""

    classes: torch.Tensor
    height: torch.Tensor


class Heads(nn.Module):
    """Two outputs of one body."""

    def __init__(self, kind=dict):
        super().__init__()
        self.body, self.kind = N3(), kind
        self.height = nn.Conv2d(3, 1, 1)

    def forward(self, x):
        scores = self.body(x)
        if self.kind is dict:
            return {"classes": scores, "height": self.height(scores)}
        if self.kind is Named:
            return Named(scores, self.height(scores))
        return scores, self.height(scores)


@pytest.mark.parametrize(
    ("kind", "head", "take"),
    [
        (dict, "height", ["height"]),
        (dict, "classes", ["classes"]),
        (tuple, 1, [1]),
        (dict, ["height", "classes"], ["height", "classes"]),
        (tuple, [0, 1], [0, 1]),
        (tuple, -1, [1]),
        (Named, "height", [1]),
        (Named, [1, "classes"], [1, 0]),
    ],
)
def test_heads_are_chosen_by_name_or_number(kind, head, take):
    net = seeded(Heads, kind)

    def plain(x):
        found = net(x)
        return torch.cat([found[name] for name in take], dim=1)

    pixels, form = computed(net, RAW, output="values", head=head)
    expected = whole(plain, RAW)
    assert form.bands == len(expected)
    assert np.abs(pixels - expected).max() < 1e-5


def test_classes_of_one_head_through_a_run(tmp_path, one_worker):
    net = seeded(Heads)
    path = write_raster(tmp_path / "s.tif", RAW)
    model = di.load_model(net, head="classes")
    di.run(path, model, tmp_path / "o.tif", client=one_worker, tile=48, chunk=64)
    with rasterio.open(tmp_path / "o.tif") as dataset:
        classes = dataset.read(1)
    assert (classes == whole(net.body, RAW).argmax(axis=0)).mean() > 0.999


def test_a_model_of_several_outputs_names_them():
    with pytest.raises(ValueError, match=r"got dict with 'classes', 'height': .* head='classes'"):
        computed(seeded(Heads), RAW, output="values")
    with pytest.raises(ValueError, match=r"got tuple with 0, 1: .* head=0"):
        computed(seeded(Heads, tuple), RAW, output="values")
    with pytest.raises(ValueError, match=r"got Named with 'classes', 'height': .* head='classes'"):
        computed(seeded(Heads, Named), RAW, output="values")


@pytest.mark.parametrize("kind", [dict, Named])
@pytest.mark.parametrize("head", ["depth", 7, -3])
def test_a_head_that_is_not_there(kind, head):
    with pytest.raises(ValueError, match=r"^the model has no head .* with 'classes', 'height'$"):
        computed(seeded(Heads, kind), RAW, output="values", head=head)


def test_named_heads_of_a_network_of_one_batch_size():
    from daskinfer.wrappers import FixedBatch, Headed

    net = seeded(Heads, Named)
    with torch.inference_mode():
        x = torch.rand(5, 2, 8, 8)
        height = Headed(FixedBatch(net, 2), "height")(x)
        assert torch.allclose(height, net(x).height, atol=1e-6)


@pytest.mark.parametrize(
    ("channels", "spec", "message"),
    [
        (3, {"threshold": 0.3}, "one score per pixel, the model gives 3"),
        (1, {"output": "probabilities", "activation": "softmax"}, "softmax makes 1 everywhere"),
        (1, {"activation": "softmax", "threshold": 0.5}, "softmax makes 1 everywhere"),
        (3, {"output": "probabilities", "class_names": ["a", "b"]}, "2 entries, .* gives 3 bands"),
        (3, {"output": "values", "class_names": ["a"]}, "1 entries, the model gives 3 bands"),
    ],
)
def test_what_does_not_go_with_the_scores_is_refused(channels, spec, message):
    with pytest.raises(ValueError, match=message):
        computed(seeded(nn.Conv2d, 2, channels, 1), RAW, **spec)


@pytest.mark.parametrize("threshold", [-0.1, 2])
def test_a_threshold_that_no_probability_reaches_is_refused(threshold):
    with pytest.raises(ValueError, match="is a probability, 0 to 1, got"):
        di.load_model(Pixel(), activation="sigmoid", threshold=threshold)


def test_a_symmetry_alone_is_not_a_list_of_letters():
    with pytest.raises(ValueError, match=r"'hflip': pass \['identity', 'hflip'\]"):
        di.load_model(Pixel(), tta="hflip")
    with pytest.raises(ValueError, match=r"tta must be 'd4' or a list of identity, .* got 'd5'$"):
        di.load_model(Pixel(), tta="d5")


def test_complex_scores_are_refused():
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.complex(x, x)

    with pytest.raises(ValueError, match="returns complex numbers"):
        computed(Spectrum(), RAW, output="values")


@pytest.mark.parametrize("head", [True, [], 1.5])
def test_a_head_that_is_no_name(head):
    with pytest.raises(ValueError, match="head must be a name"):
        di.load_model(Pixel(), head=head)


# --- probabilities as bytes -----------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [None, 16])
def test_probabilities_in_steps(overlap):
    net = seeded(N3)
    choice = {"tile": 48, "chunk": 64, "overlap": overlap}
    spec = {"output": "probabilities", "activation": "softmax"}
    plain, _ = computed(net, RAW, choice, **spec)
    steps, form = computed(net, RAW, choice, dtype="uint8", **spec)
    assert form == OutputFormat(3, "uint8", 255, (0.004,) * 3)
    assert steps.dtype == np.uint8
    assert np.abs(steps * 0.004 - plain).max() <= 0.002 + 1e-6


def test_ends_and_middle_are_exact_and_what_is_no_probability_is_nodata():
    model = di.load_model(Pixel(), output="probabilities", activation="identity", dtype="uint8")
    values = torch.tensor([0, 1, 0.5, -1e-5, 1.0001, -0.1, 3, float("nan")]).reshape(1, 1, 1, 8)
    assert to_pixels(values, model).flatten().tolist() == [0, 250, 125, 0, 250, 255, 255, 255]


def test_readers_get_probabilities(tmp_path, one_worker):
    net = seeded(N3)
    path = write_raster(tmp_path / "s.tif", RAW)
    names = ["water", "soil", "plants"]
    model = di.load_model(
        net, output="probabilities", activation="softmax", dtype="uint8", class_names=names
    )
    expected = softmax(whole(net, RAW))
    options = {"tile": 48, "chunk": 64, "blocksize": 64}
    di.run(path, model, tmp_path / "o.tif", client=one_worker, **options)
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert dataset.scales == (0.004,) * 3
        assert dataset.offsets == (0.0,) * 3
        assert dataset.dtypes == ("uint8",) * 3
        assert dataset.nodatavals == (255,) * 3
        assert dataset.descriptions == tuple(names)
        steps = dataset.read()
        coarse = dataset.read(out_shape=(3, 35, 45))
    assert np.abs(steps * 0.004 - expected).max() <= 0.002 + 1e-5
    assert np.array_equal(coarse, reduce2x2(steps, "average", 255))
    # What was written is read back as probabilities.
    again = di.open_raster(tmp_path / "o.tif")
    assert again.scale.values.tolist() == [0.004] * 3
    lazy = di.predict(di.open_raster(path), model, tile=48, chunk=64)
    assert lazy.scale.values.tolist() == [0.004] * 3
    di.write_cog(lazy, tmp_path / "p.tif")
    with rasterio.open(tmp_path / "p.tif") as dataset:
        assert dataset.scales == (0.004,) * 3
        assert np.array_equal(dataset.read(), steps)


def test_scores_that_are_no_probabilities_are_refused(tmp_path):
    path = write_raster(tmp_path / "s.tif", noise(2, 64, 64))
    for options in ({}, {"dtype": "uint8"}):
        model = di.load_model(seeded(N3), output="probabilities", **options)
        with pytest.raises(ValueError, match=r"scores reach from -.*activation='softmax'"):
            di.plan(path, model, tmp_path / "o.tif")
        with pytest.raises(ValueError, match="activation='softmax'"):
            di.predict(di.open_raster(path), model)
    # A network that has its own activation needs none.
    ready = torch.nn.Sequential(seeded(N3), torch.nn.Softmax(1))
    di.plan(path, di.load_model(ready, output="probabilities"), tmp_path / "o.tif")


@pytest.mark.parametrize("output", ["classes", "values"])
def test_bytes_are_for_probabilities(output):
    with pytest.raises(ValueError, match=f"dtype='uint8' is for .* not '{output}'"):
        computed(seeded(N3), RAW, output=output, dtype="uint8")


# --- confidence -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [None, 16])
def test_confidence_is_the_probability_of_the_class(overlap):
    net = seeded(N3)
    choice = {"tile": 48, "chunk": 64, "overlap": overlap}
    spec = {"output": "probabilities", "activation": "softmax"}
    expected, _ = computed(net, RAW, choice, **spec)
    (classes, sure), form = computed(net, RAW, choice, confidence=True)
    assert form == OutputFormat(2, "uint8", 255, (1.0, 0.004))
    top = np.sort(expected, axis=0)
    certain = top[-1] - top[-2] > 1e-5
    assert np.array_equal(classes[certain], expected.argmax(axis=0)[certain])
    assert np.abs(sure * 0.004 - expected.max(axis=0)).max() <= 0.002 + 1e-5


def test_confidence_of_two_classes_from_one_score():
    model = di.load_model(Pixel(), activation="sigmoid", threshold=0.7, confidence=True)
    values = torch.tensor([0.9, 0.6, 0.1, float("nan")]).reshape(1, 1, 1, 4)
    classes, sure = to_pixels(values, model)[0].flatten(1).tolist()
    assert classes == [1, 0, 0, 255]
    assert sure == [225, 100, 225, 255]


def test_scores_that_are_probabilities_already():
    net = nn.Sequential(seeded(N3), nn.Softmax(dim=1))
    logits, _ = computed(seeded(N3), RAW, confidence=True)
    done, _ = computed(net, RAW, confidence=True, activation="identity")
    assert np.abs(logits.astype(int) - done.astype(int)).max() <= 1


def test_confidence_of_three_hundred_classes():
    model = di.load_model(Pixel(), confidence=True)
    scores = torch.zeros(1, 300, 1, 2)
    scores[0, 299, 0, 0] = 100
    scores[0, 7, 0, 1] = float("inf")
    device = Forward(model)
    pixels = device.copy_out(device.postprocess(scores))
    assert pixels.dtype == np.uint16
    assert pixels[0, :, 0].tolist() == [[299, 65535], [250, 65535]]


def test_confidence_beside_classes_in_a_file(tmp_path, one_worker):
    net = seeded(N3)
    path = write_raster(tmp_path / "s.tif", RAW)
    names, colors = ["a", "b", "c"], ["#ff0000", "#00ff00", "#0000ff"]
    model = di.load_model(net, confidence=True, class_names=names, class_colors=colors)
    options = {"tile": 48, "chunk": 64, "blocksize": 64}
    di.run(path, model, tmp_path / "o.tif", client=one_worker, **options)
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert dataset.descriptions == ("class", "confidence")
        assert dataset.scales == (1.0, 0.004)
        assert dataset.nodatavals == (255, 255)
        assert json.loads(dataset.tags()["CLASS_NAMES"]) == names
        assert json.loads(dataset.tags()["CLASS_COLORS"]) == colors
        pixels = dataset.read()
        coarse = dataset.read(out_shape=(2, 35, 45))
    assert np.array_equal(coarse[:1], reduce2x2(pixels[:1], "mode", 255))
    assert np.array_equal(coarse[1:], reduce2x2(pixels[1:], "average", 255))
    lazy = di.predict(di.open_raster(path), model, tile=48, chunk=64)
    assert lazy.band.values.tolist() == ["class", "confidence"]
    di.write_cog(lazy, tmp_path / "p.tif", blocksize=64)
    with rasterio.open(tmp_path / "p.tif") as dataset:
        assert dataset.scales == (1.0, 0.004)
        assert np.array_equal(dataset.read(), pixels)
        assert np.array_equal(dataset.read(out_shape=(2, 35, 45)), coarse)
    for number, picked in enumerate((lazy.sel(band=["confidence"]), lazy.isel(band=1))):
        di.write_cog(picked, tmp_path / f"c{number}.tif")
        with rasterio.open(tmp_path / f"c{number}.tif") as dataset:
            assert np.array_equal(dataset.read(), pixels[1:])
            assert (dataset.descriptions, dataset.scales) == (("confidence",), (0.004,))
            assert "CLASS_NAMES" not in dataset.tags()
            with pytest.raises(ValueError, match="NULL color table"):
                dataset.colormap(1)
    where = lazy.sel(band="class") == 1
    di.write_cog(where, tmp_path / "w.tif")
    with rasterio.open(tmp_path / "w.tif") as dataset:
        assert np.array_equal(dataset.read(1), pixels[0] == 1)
    both = xr.concat([lazy, lazy], "band")
    di.write_cog(both, tmp_path / "b.tif", blocksize=64)
    with rasterio.open(tmp_path / "b.tif") as dataset:
        assert np.array_equal(dataset.read(out_shape=(4, 35, 45)), np.concatenate([coarse, coarse]))
    alone = lazy.sel(band=["class"])
    di.write_cog(alone, tmp_path / "q.tif")
    with rasterio.open(tmp_path / "q.tif") as dataset:
        assert np.array_equal(dataset.read(), pixels[:1])
        assert dataset.colormap(1)[1][:3] == (0, 255, 0)


@pytest.mark.parametrize(
    ("net", "spec", "message"),
    [
        (N3, {"output": "values"}, "confidence is told beside classes, not 'values'"),
        (Pixel, {"threshold": 0.5, "bands": ["1"]}, "pass activation='sigmoid'"),
    ],
)
def test_confidence_of_what_is_no_probability(net, spec, message):
    bands = len(spec.get("bands", "12"))
    raw = xr.DataArray(RAW[:bands], dims=("band", "y", "x"), coords={"band": ["1", "2"][:bands]})
    with pytest.raises(ValueError, match=message):
        settle(ArraySource(raw), di.load_model(seeded(net), confidence=True, **spec), Choice())


def test_seams_are_measured_on_the_scores_whatever_the_output():
    scene = xr.DataArray(RAW, dims=("band", "y", "x"))
    net = seeded(N3)
    plain = di.seam_error(scene, di.load_model(net), halo=0, tile=32)
    sure = di.seam_error(scene, di.load_model(net, confidence=True), halo=0, tile=32)
    assert sure.maximum == plain.maximum > 0


# --- many bands -----------------------------------------------------------------------------------


def test_embeddings_of_many_bands(tmp_path, one_worker):
    net = seeded(nn.Conv2d, 2, 70, 3)
    path = write_raster(tmp_path / "s.tif", RAW)
    model = di.load_model(net, output="values")
    options = {"tile": 48, "chunk": 64, "blocksize": 64}
    di.run(path, model, tmp_path / "o.tif", client=one_worker, **options)
    with torch.inference_mode():
        expected = net(torch.from_numpy(RAW)[None])[0].numpy()
    with rasterio.open(tmp_path / "o.tif") as dataset:
        assert dataset.profile["interleave"] == "band"
        inner = dataset.read()[:, 1:-1, 1:-1]
    assert np.abs(inner - expected).max() < 1e-5


def test_chunks_of_many_bands_are_small(tmp_path):
    with rasterio.open(
        tmp_path / "s.tif", "w", driver="GTiff", count=2, height=20_000, width=20_000,
        dtype="uint8", sparse_ok=True, tiled=True, crs="EPSG:32632",
        transform=rasterio.Affine(10, 0, 500_000, 0, -10, 5_600_000),
    ):  # fmt: skip
        pass
    plans = {
        bands: di.plan(
            tmp_path / "s.tif",
            di.load_model(nn.Conv2d(2, bands, 1), output="values"),
            tmp_path / "o.tif",
        )
        for bands in (1, 64)
    }
    few, many = plans[1], plans[64]
    assert few.tiling.chunk == (2048, 2048)
    assert many.tiling.chunk == (512, 512)
    # 64 times as many bytes to a pixel, not 64 times as many in memory.
    assert many.memory < 4 * few.memory
