"""STAC items: which files, what their numbers mean, where they come to lie."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import rasterio
from affine import Affine

import daskinfer as di
from conftest import TRANSFORM, Pixel, noise, write_raster
from daskinfer.inputs.mosaic import Mosaic
from daskinfer.inputs.stac import Item, items_of, stac_bands
from daskinfer.source import source_of
from faultserver import faulty
from httpserver import serve
from sources import everything, of_rioxarray

pytestmark = of_rioxarray


def item(folder, name="a", *, col=0, baseline="02.04", seed=0, crs="EPSG:32632", **properties):
    """A Sentinel-2 item: two bands of 10 m, one of 20 m and a class map; and its numbers."""
    numbers = {
        "blue": noise(1, 40, 40, seed=seed) + 1,
        "red": noise(1, 40, 40, seed=seed + 1) + 1,
        "swir16": noise(1, 20, 20, seed=seed + 2) + 1,
        "scl": noise(1, 20, 20, seed=seed + 3) % 12,
    }
    numbers["blue"][0, 3, 5] = 0
    sides = {"blue": 10, "red": 10, "swir16": 20, "scl": 20}
    for band, data in numbers.items():
        grid = TRANSFORM @ Affine.translation(col, 0) @ Affine.scale(sides[band] / 10)
        write_raster(folder / f"{name}_{band}.tif", data, transform=grid, crs=crs)
    eo = {"blue": ("B02", "blue"), "red": ("B04", "red"), "swir16": ("B11", "swir16")}
    assets = {
        band: {
            "href": f"./{name}_{band}.tif",
            "type": "image/tiff; application=geotiff; profile=cloud-optimized",
            "roles": ["data"],
            "raster:bands": [{"nodata": 0, "data_type": "uint16"}],
        }
        for band in numbers
    }
    for band, (own, common) in eo.items():
        assets[band]["eo:bands"] = [{"name": own, "common_name": common}]
    assets["thumbnail"] = {"href": "./t.png", "type": "image/png", "roles": ["thumbnail"]}
    told = {
        "type": "Feature",
        "stac_version": "1.0.0",
        "stac_extensions": [],
        "id": name,
        "geometry": None,
        "properties": {
            "datetime": "2022-06-01T10:00:00Z",
            "platform": "sentinel-2a",
            "s2:processing_baseline": baseline,
            **properties,
        },
        "links": [],
        "assets": assets,
    }
    (folder / f"{name}.json").write_text(json.dumps(told))
    return told, numbers


BANDS = ["B04", "blue", "swir16"]


def test_bands_are_found_by_key_name_and_common_name(tmp_path):
    _, numbers = item(tmp_path)
    scene = di.open_raster(tmp_path / "a.json", bands=BANDS)
    assert scene.band.values.tolist() == BANDS
    fine = numbers["swir16"][0].repeat(2, 0).repeat(2, 1)
    expected = np.stack([numbers["red"][0], numbers["blue"][0], fine])
    assert np.array_equal(scene.values, expected)
    mask = np.ones((40, 40), bool)
    mask[3, 5] = False
    assert np.array_equal(scene.mask.values, mask)
    every = di.open_raster(str(tmp_path / "a.json"))
    assert every.band.values.tolist() == ["blue", "red", "swir16", "scl"]


@pytest.mark.parametrize(
    ("baseline", "more", "offset"),
    [
        ("02.04", {}, 0.0),
        ("03.01", {}, 0.0),
        ("04.00", {}, -0.1),
        ("05.09", {}, -0.1),
        ("05.09", {"earthsearch:boa_offset_applied": True}, 0.0),
        ("05.09", {"earthsearch:boa_offset_applied": False}, -0.1),
        ("", {}, 0.0),
    ],
)
def test_the_shift_of_sentinel_2(tmp_path, baseline, more, offset):
    told, _ = item(tmp_path, baseline=baseline, **more)
    scene = di.open_raster(told | {"links": [self_link(tmp_path)]}, bands=["B02", "swir16", "scl"])
    expected = [offset, offset, 0.0]
    scales, offsets = source_of(scene).scales, source_of(scene).offsets
    assert list(offsets) == expected
    assert list(scales) == [1e-4, 1e-4, 1.0]


def self_link(folder):
    return {"rel": "self", "href": str(folder / "a.json")}


def test_what_an_item_says_of_its_numbers_counts(tmp_path):
    told, _ = item(tmp_path, baseline="05.00")
    told["assets"]["blue"]["raster:bands"] = [{"scale": 0.0002, "offset": -0.05, "nodata": 7}]
    told["assets"]["red"].pop("raster:bands")
    told["assets"]["red"].pop("eo:bands")
    # STAC 1.1 has it in other words.
    told["assets"]["red"]["bands"] = [
        {"name": "B04", "raster:scale": 0.5, "raster:offset": 3, "nodata": 9}
    ]
    del told["properties"]["platform"], told["properties"]["s2:processing_baseline"]
    bands = stac_bands(Item(told, str(tmp_path / "a.json")), ["blue", "B04", "swir16"])
    assert [(b.scale, b.offset, b.nodata) for b in bands] == [
        (0.0002, -0.05, 7), (0.5, 3, 9), (None, None, 0),
    ]  # fmt: skip
    told["properties"]["s2:processing_baseline"] = "05.00"
    told["properties"]["earthsearch:boa_offset_applied"] = True
    (blue,) = stac_bands(Item(told, str(tmp_path / "a.json")), ["blue"])
    assert (blue.scale, blue.offset) == (0.0002, 0.0)


def test_a_model_finds_its_bands_in_an_item(tmp_path):
    _, numbers = item(tmp_path)
    model = di.load_model(Pixel(), output="values", bands=["B04", "blue"])
    plan = di.plan(tmp_path / "a.json", model, tmp_path / "out.tif")
    assert plan.source.band_names == ("red", "blue")
    expected = np.stack([numbers["red"][0], numbers["blue"][0]])
    assert np.array_equal(everything(plan.source).data, expected)
    for options in ({"crs": "EPSG:32632", "resolution": 10}, {"time": "all"}):
        source = source_of(di.open_raster(tmp_path / "a.json", **options))
        values = everything(source.select(["B04", "blue"])).data
        assert np.array_equal(values[:, 10:], expected[:, 10:])


def test_scale_and_offset_can_be_said(tmp_path):
    item(tmp_path, baseline="05.00")
    path = tmp_path / "a.json"
    scene = di.open_raster(path, bands=BANDS, scale=0.5, offset={"blue": 2})
    assert source_of(scene).scales == (0.5, 0.5, 0.5)
    assert source_of(scene).offsets == (-0.1, 2.0, -0.1)
    with pytest.raises(ValueError, match=r"offset has numbers for \['nir'\]"):
        di.open_raster(path, offset={"nir": 1})
    with pytest.raises(ValueError, match="scale must be a number"):
        di.open_raster(path, scale=0)


def test_items_of_two_baselines_are_one_scene_of_reflectances(tmp_path, one_worker):
    _, old = item(tmp_path, "old", baseline="03.00")
    _, new = item(tmp_path, "new", baseline="04.00", col=40, seed=10)
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    scene = di.open_raster(paths, bands=["B04"])
    assert scene.dtype == np.float32
    raw = np.concatenate([old["red"][0] * 1e-4, new["red"][0] * 1e-4 - 0.1], axis=1)
    np.testing.assert_allclose(scene.values[0], raw, rtol=1e-6, atol=1e-7)
    report = di.run(scene, di.load_model(Pixel(), output="values"), tmp_path / "o.tif", tile=16,
                    client=one_worker)  # fmt: skip
    assert report.complete
    with rasterio.open(tmp_path / "o.tif") as dataset:
        np.testing.assert_allclose(dataset.read(1), raw, rtol=1e-6, atol=1e-7)
    scaled = di.load_model(Pixel(), output="values", scale=1e-4)
    with pytest.raises(ValueError, match="physical values"):
        di.plan(scene, scaled, tmp_path / "p.tif")
    with pytest.raises(ValueError, match="physical values"):
        di.predict(scene, scaled)
    with pytest.warns(UserWarning, match="no offset is applied"):
        di.plan(di.open_raster(paths[1], bands=["B04"]), scaled, tmp_path / "q.tif")


def test_items_come_in_every_form(tmp_path):
    import pystac

    first, _ = item(tmp_path, "a")
    second, _ = item(tmp_path, "b", col=30, seed=5)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    expected = di.open_raster(paths, bands=BANDS).values
    collection = {"type": "FeatureCollection", "features": [first, second]}
    (tmp_path / "both.json").write_text(json.dumps(collection))
    absolute = json.loads(json.dumps([first, second]).replace('"./', f'"{tmp_path}/'))
    objects = [pystac.Item.from_file(str(path)) for path in paths]
    forms = [
        [str(path) for path in paths],
        tmp_path / "both.json",
        absolute,
        {"type": "FeatureCollection", "features": absolute},
        objects,
        pystac.ItemCollection([pystac.Item.from_dict(told) for told in absolute]),
    ]
    for form in forms:
        assert np.array_equal(di.open_raster(form, bands=BANDS).values, expected)


def test_the_later_item_lies_on_top_and_a_pixel_is_of_one_item(tmp_path):
    _, below = item(tmp_path, "a")
    _, above = item(tmp_path, "b", seed=5)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    scene = di.open_raster(paths, bands=["blue", "red"])
    expected = np.stack([above["blue"][0], above["red"][0]])
    # Where one band of the upper one is nodata, all bands are of the lower one: nodata too here.
    assert np.array_equal(scene.mask.values, (above["blue"][0] != 0) | (below["blue"][0] != 0))
    valid = scene.mask.values
    assert np.array_equal(scene.values[:, valid], expected[:, valid])
    assert dict(source_of(scene).notes)["mosaic"] == "2 items, later ones on top"


def test_two_zones_need_a_grid(tmp_path):
    item(tmp_path, "a")
    item(tmp_path, "b", crs="EPSG:32633")
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    with pytest.raises(ValueError, match=r"item b is in EPSG:32633, item a in EPSG:32632.*crs="):
        di.open_raster(paths, bands=BANDS)
    one = di.open_raster(paths[:1], bands=BANDS, crs="EPSG:32632", resolution=10)
    plain = di.open_raster(paths[0], bands=BANDS)
    assert np.array_equal(one.mask.values, plain.mask.values)
    valid = plain.mask.values
    assert np.array_equal(one.values[:, valid], plain.values[:, valid])
    scene = di.open_raster(paths, bands=BANDS, crs="EPSG:32632", resolution=100)
    source = source_of(scene)
    assert isinstance(source, Mosaic)
    assert len(source.parts) == 2
    assert all(part.source.grid.width < 10 for part in source.parts)
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(everything(copy).data, scene.values)


def test_items_are_read_over_the_network(tmp_path):
    told, _ = item(tmp_path)
    with serve(tmp_path) as files:
        (found,) = items_of(files.url("a.json"))
        assert found.told == told
        assert found.href(told["assets"]["red"]) == files.url("a_red.tif")
        with pytest.raises(OSError, match="could not be read"):
            items_of(files.url("b.json"))
    with faulty(tmp_path) as server:
        absolute = json.loads(json.dumps(told).replace('"./', f'"{server}/'))
        scene = di.open_raster(absolute, bands=BANDS, sign=signed)
        assert np.array_equal(scene.values, di.open_raster(tmp_path / "a.json", bands=BANDS).values)


def signed(url):
    return url


def test_what_is_no_item_or_band_is_refused(tmp_path):
    told, _ = item(tmp_path)
    path = tmp_path / "a.json"
    cases = [
        (path, {"bands": ["nir"]}, r"no band 'nir': there are \['blue', 'red', 'swir16', 'scl'"),
        (path, {"bands": ["red", "red"]}, "asked for twice"),
        (told, {"bands": ["red"]}, "relative address"),
        ({"type": "FeatureCollection", "features": []}, {}, "no STAC item"),
    ]
    for source, options, message in cases:
        with pytest.raises(ValueError, match=message):
            di.open_raster(source, **options)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        di.open_raster(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text('{"type": "Catalog"}')
    with pytest.raises(ValueError, match="got JSON of type 'Catalog'"):
        di.open_raster(tmp_path / "list.json")
    with pytest.raises(FileNotFoundError, match="no such file"):
        di.open_raster(tmp_path / "nowhere.json")
    told["assets"]["red-jp2"] = {**told["assets"]["red"], "href": "./a_red.tif"}
    (found,) = stac_bands(Item(told, str(path)), ["red"])
    assert found.href.endswith("a_red.tif")
    with pytest.raises(ValueError, match=r"several assets, \['red', 'red-jp2'\]"):
        stac_bands(Item(told, str(path)), ["B04"])


def test_an_asset_of_several_bands_gives_them_by_name(tmp_path):
    data = noise(3, 20, 20)
    write_raster(tmp_path / "all.tif", data)
    names = ["red", "green", "blue"]
    told = {
        "type": "Feature", "stac_version": "1.1.0", "id": "x", "geometry": None, "links": [],
        "properties": {"datetime": None, "start_datetime": "2020-01-01T00:00:00Z"},
        "assets": {"image": {
            "href": str(tmp_path / "all.tif"), "roles": ["data"],
            "bands": [{"name": name, "eo:common_name": name} for name in names],
        }},
    }  # fmt: skip
    assert np.array_equal(di.open_raster(told, bands=["blue", "red"]).values, data[[2, 0]])
    assert di.open_raster(told).band.values.tolist() == names
    (one,) = items_of(told)
    assert one.datetime == "2020-01-01T00:00:00Z"
