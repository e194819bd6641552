"""Bands, dtypes, many classes and batch sizes, end to end, with the values of known faults."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import torch
import xarray as xr
from torch import nn

import daskinfer as di
from conftest import N3, noise, seeded, write_raster


def weighted(*weights):
    """The sum of the bands, each with a weight that tells it from all others."""
    net = nn.Conv2d(len(weights), 1, 1, bias=False)
    with torch.no_grad():
        net.weight[:] = torch.tensor(weights, dtype=torch.float32)[None, :, None, None]
    return net


def output_of(scene, model, folder, **options):
    di.run(scene, model, folder / "out.tif", **options)
    with rasterio.open(folder / "out.tif") as dataset:
        return dataset.read(), dataset.dtypes[0], dataset.nodata


@pytest.mark.slow
def test_the_last_of_300_classes_is_not_44(tmp_path, one_worker):
    net = nn.Conv2d(1, 300, 1)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.zero_()
        net.bias[299] = 1
    scene = write_raster(tmp_path / "a.tif", noise(1, 20, 20))
    classes, dtype, nodata = output_of(scene, di.load_model(net), tmp_path, client=one_worker)
    assert (dtype, nodata) == ("uint16", 65535)
    assert (classes == 299).all()


FILE = ("B4", "B8A", "B2", "B3")


@pytest.mark.parametrize(
    ("in_file", "wanted"),
    [
        (FILE, ("B2", "B3", "B4", "B8A")),
        (("band_1", "band_10", "band_2", "B8A"), ("band_1", "band_2", "band_10", "B8A")),
        (FILE, ("B8A", "B4", "B3", "B2")),
    ],
)
def test_bands_come_by_name_in_the_models_order(tmp_path, one_worker, in_file, wanted):
    raw = np.stack([np.full((20, 20), 1 + i, np.uint16) for i in range(4)])
    scene = write_raster(tmp_path / "a.tif", raw, descriptions=in_file)
    model = di.load_model(weighted(1, 10, 100, 1000), bands=wanted, output="values")
    expected = sum(
        weight * (1 + in_file.index(name))
        for weight, name in zip((1, 10, 100, 1000), wanted, strict=True)
    )
    values, _, _ = output_of(scene, model, tmp_path, client=one_worker)
    assert (values == expected).all()


@pytest.mark.parametrize("wanted", [("B2", "B3", "B4", "B99"), ("B2", "b3", "B4", "B8A")])
def test_a_missing_band_is_found_by_the_plan_with_both_lists(tmp_path, wanted):
    scene = write_raster(tmp_path / "a.tif", noise(4, 20, 20), descriptions=FILE)
    model = di.load_model(weighted(1, 10, 100, 1000), bands=wanted, output="values")
    missing = next(name for name in wanted if name not in FILE)
    with pytest.raises(ValueError, match=f"{missing}.*B4.*B8A.*B2.*B3"):
        di.plan(scene, model, tmp_path / "out.tif")
    assert not list(tmp_path.glob("out.tif*"))


def test_a_wrong_number_of_bands_is_found_by_the_plan_with_both_numbers(tmp_path):
    scene = write_raster(tmp_path / "a.tif", noise(5, 20, 20))
    with pytest.raises(ValueError, match="the model takes 4 bands, the source has 5"):
        di.plan(scene, weighted(1, 10, 100, 1000), tmp_path / "out.tif")


DTYPES = ["bool", "uint8", "int16", "uint16", "uint32", ">f4", "f2", "f8"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reversed_rows", [False, True])
def test_every_dtype_gives_what_float32_gives(dtype, reversed_rows):
    raw = (noise(2, 40, 30) % (2 if dtype == "bool" else 200)).astype(dtype)
    model = di.load_model(seeded(N3), output="values", scale=0.01)

    def predicted(data):
        if reversed_rows:
            data = np.ascontiguousarray(data[:, ::-1])[:, ::-1]  # a negative stride
        scene = xr.DataArray(data, dims=("band", "y", "x"))
        return di.predict(scene, model).compute(scheduler="threads").values

    assert np.array_equal(predicted(raw), predicted(raw.astype(np.float32)))


def test_scores_do_not_depend_on_the_batch_size(tmp_path, one_worker):
    scene = write_raster(tmp_path / "a.tif", noise(2, 100, 100))
    model = di.load_model(seeded(N3), output="values", scale=1e-4)
    results = []
    for size in (1, 3, 8):
        folder = tmp_path / str(size)
        folder.mkdir()
        options = {"tile": 32, "chunk": 100, "batch_size": size, "client": one_worker}
        results.append(output_of(scene, model, folder, **options)[0])
    for other in results[1:]:
        assert np.allclose(results[0], other, rtol=0, atol=1e-5)
