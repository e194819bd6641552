"""Zarr stores as sources and as outputs."""

from __future__ import annotations

import pickle
import shutil

import numpy as np
import pytest
import rasterio
import xarray as xr
import zarr
from affine import Affine

import daskinfer as di
from conftest import N3, TRANSFORM, Pixel, noise, seeded, write_raster
from daskinfer.cli import main
from daskinfer.cog.spec import CogSpec
from daskinfer.inputs.lattice import same_crs
from daskinfer.source import source_of
from daskinfer.zarrwork import EncodedZarr, ZarrDraft
from oracle import whole
from sources import everything, of_rioxarray, valid_of

pytestmark = [
    of_rioxarray,
    pytest.mark.filterwarnings("ignore:Consolidated metadata"),
    pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning"),
    pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning"),
]

TIF = {"tile": 32, "chunk": 32}


def axes(height=40, width=50, transform=TRANSFORM):
    x = transform.c + (np.arange(width) + 0.5) * transform.a
    y = transform.f + (np.arange(height) + 0.5) * transform.e
    return {"y": y, "x": x}


def stored(path, data, *, mapping="spatial_ref", encoding=None, transform=TRANSFORM, **attrs):
    """A store with one variable ``(band, y, x)`` and a CF grid mapping of some name."""
    coords = {"band": [f"b{i}" for i in range(len(data))]}
    coords |= axes(*data.shape[1:], transform=transform)
    array = xr.DataArray(data, coords, ("band", "y", "x"), "scene", attrs)
    if mapping:
        array = array.rio.write_crs("EPSG:32632", grid_mapping_name=mapping)
        array.encoding["grid_mapping"] = mapping
    dataset = array.to_dataset()
    dataset.to_zarr(path, consolidated=False, encoding={"scene": encoding or {}})
    return str(path)


@pytest.mark.parametrize("mapping", ["spatial_ref", "crs"])
@pytest.mark.parametrize("up", [False, True])
def test_a_store_is_a_raster(tmp_path, mapping, up):
    data = noise(2, 40, 50)
    data[0, 3, 4] = 0
    transform = Affine(10, 0, 5e5, 0, 10, 5.6e6) if up else TRANSFORM
    path = stored(
        tmp_path / "scene.zarr", data, mapping=mapping, transform=transform,
        encoding={"_FillValue": 0, "chunks": (1, 16, 16)},
    )  # fmt: skip
    scene = di.open_raster(path)
    assert np.array_equal(scene.values, data)
    assert scene.dtype == np.uint16
    source = source_of(path)
    assert source.band_names == ("b0", "b1")
    assert source.grid.transform == transform
    assert rasterio.CRS.from_wkt(source.grid.crs) == "EPSG:32632"
    expected = (data != 0).all(axis=0)
    assert np.array_equal(valid_of(source), expected)
    assert not expected.all()
    assert np.array_equal(di.open_raster(path, bands=["b1"]).values, data[1:])
    assert np.array_equal(di.open_raster(path, window=(5, 6, 7, 8)).values, data[:, 5:12, 6:14])


def test_scale_and_offset_of_a_store_are_applied_once(tmp_path):
    data = noise(1, 10, 10)
    path = stored(
        tmp_path / "s.zarr", data, encoding={"_FillValue": 0}, scale_factor=1e-4, add_offset=-0.1
    )
    source = source_of(path)
    assert (source.dtype, source.scales, source.offsets) == ("uint16", (1e-4,), (-0.1,))
    lazy = di.predict(di.open_raster(path), di.load_model(Pixel(), output="values"))
    expected = np.where(data != 0, data * np.float32(1e-4) + np.float32(-0.1), np.nan)
    np.testing.assert_allclose(lazy.values, expected, rtol=1e-6)


def test_variables_are_bands_and_axes_may_be_latitude_and_longitude(tmp_path):
    lat, lon = 50 - 0.01 * np.arange(20), 8 + 0.01 * np.arange(30)
    data = noise(2, 20, 30)
    dataset = xr.Dataset(
        {
            name: (("lat", "lon"), data[i], {"scale_factor": 0.5 + i, "grid_mapping": "crs"})
            for i, name in enumerate(("red", "nir"))
        },
        {"lat": lat, "lon": lon},
    )
    dataset["crs"] = xr.DataArray(0).rio.write_crs("EPSG:4326").spatial_ref
    dataset = dataset.set_coords("crs")
    dataset.to_zarr(tmp_path / "geo.zarr", consolidated=False)
    scene = di.open_raster(tmp_path / "geo.zarr", bands=["nir", "red"])
    assert scene.dims == ("band", "y", "x")
    assert np.array_equal(scene.values, data[::-1])
    source = source_of(scene)
    assert source.scales == (1.5, 0.5)
    assert rasterio.CRS.from_wkt(source.grid.crs) == "EPSG:4326"
    assert np.allclose(source.grid.transform[:6], (0.01, 0, 7.995, 0, -0.01, 50.005))


def test_attributes_of_geozarr_say_where_a_store_lies(tmp_path):
    data = noise(1, 8, 9)
    group = zarr.create_group(tmp_path / "g.zarr")
    array = group.create_array(
        "scene", shape=data.shape, dtype="uint16", dimension_names=["band", "y", "x"]
    )
    array[:] = data
    group.attrs.update({"proj:code": "EPSG:32633", "spatial:transform": [10, 0, 5e5, 0, -10, 5e6]})
    source = source_of(tmp_path / "g.zarr")
    assert rasterio.CRS.from_wkt(source.grid.crs) == "EPSG:32633"
    assert source.grid.transform == Affine(10, 0, 5e5, 0, -10, 5e6)
    assert np.array_equal(everything(source).data, data)


def test_what_is_no_raster_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        di.open_raster(tmp_path / "nowhere.zarr")
    xr.Dataset({"a": ("t", [1, 2])}).to_zarr(tmp_path / "t.zarr", consolidated=False)
    with pytest.raises(ValueError, match="no variable with two axes of space"):
        di.open_raster(tmp_path / "t.zarr")
    four = xr.Dataset({"a": (("time", "level", "y", "x"), np.zeros((2, 2, 3, 3)))})
    four.to_zarr(tmp_path / "f.zarr", consolidated=False)
    with pytest.raises(ValueError, match=r"choose of \['time', 'level'\] down to one"):
        di.open_raster(tmp_path / "f.zarr")
    zarr.create_array(tmp_path / "bare.zarr", shape=(1, 4, 5), chunks=(1, 4, 4), dtype="u1")
    with pytest.raises(ValueError, match="is no Zarr group"):
        di.open_raster(tmp_path / "bare.zarr")
    two = xr.Dataset(
        {"a": (("y", "x"), np.zeros((2, 2))), "b": (("y", "x"), np.zeros((2, 2), "u1"))}
    )
    two.to_zarr(tmp_path / "two.zarr", consolidated=False)
    with pytest.raises(ValueError, match="not bands of one raster"):
        di.open_raster(tmp_path / "two.zarr")


def test_a_run_over_a_store_equals_the_whole_and_goes_on(tmp_path, one_worker):
    data = noise(2, 70, 90)
    path = stored(tmp_path / "scene.zarr", data, encoding={"chunks": (2, 32, 32)})
    model = di.load_model(seeded(N3), output="values", scale=1e-4)
    assert source_of(path).identity == source_of(path).identity
    report = di.run(path, model, tmp_path / "out.tif", client=one_worker, **TIF)
    assert report.complete
    with rasterio.open(tmp_path / "out.tif") as dataset:
        np.testing.assert_allclose(dataset.read(), whole(seeded(N3), data, scale=1e-4), atol=1e-5)


@pytest.mark.filterwarnings("error::zarr.errors.UnstableSpecificationWarning")
def test_a_store_as_output_equals_the_file(tmp_path, one_worker):
    data = noise(2, 70, 90) + 1
    data[:, 10:30, 40:60] = 0
    path = write_raster(tmp_path / "scene.tif", data, nodata=0)
    names, colors = ["clear sky", "cloud", "shadow"], ["#00ff00", "#ffffff", "#000000"]
    for output in ("classes", "values"):
        options = {"class_names": names, "class_colors": colors} if output == "classes" else {}
        model = di.load_model(seeded(N3), output=output, scale=1e-4, **options)
        for name in ("out.tif", "out.zarr"):
            report = di.run(path, model, tmp_path / name, client=one_worker, overwrite=True, **TIF)
            assert report.complete
        assert report.file_bytes > 0
        with rasterio.open(tmp_path / "out.tif") as dataset:
            expected, nodata = dataset.read(), dataset.nodata
        dataset = xr.open_zarr(
            tmp_path / "out.zarr", mask_and_scale=False, decode_coords="all", consolidated=False
        )
        array = dataset["prediction"]
        assert np.array_equal(array.values, expected, equal_nan=True)
        assert array.dtype == expected.dtype
        assert np.array_equal(array.attrs["_FillValue"], nodata, equal_nan=output == "values")
        assert array.rio.crs == "EPSG:32632"
        assert array.rio.transform() == TRANSFORM
        if output == "classes":
            assert array.attrs["flag_values"] == [0, 1, 2]
            assert array.attrs["flag_meanings"] == "clear_sky cloud shadow"
        again = di.open_raster(tmp_path / "out.zarr")
        assert np.array_equal(again.values, expected, equal_nan=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out.tif", "out.zarr", "scene.tif"]


@pytest.mark.parametrize(
    "spec", [{"output": "probabilities", "dtype": "uint8"}, {"confidence": True}]
)
def test_a_store_tells_the_scale_of_its_numbers(tmp_path, one_worker, spec):
    path = write_raster(tmp_path / "scene.tif", noise(2, 40, 50))
    model = di.load_model(seeded(N3), scale=1e-4, activation="softmax", **spec)
    for name in ("out.tif", "out.zarr"):
        di.run(path, model, tmp_path / name, client=one_worker, **TIF)
    file, store = (source_of(str(tmp_path / name)) for name in ("out.tif", "out.zarr"))
    assert store.scales == file.scales
    assert 0.004 in store.scales
    assert store.dtype == file.dtype == "uint8"
    assert np.array_equal(everything(store).data, everything(file).data)
    if "confidence" not in spec:
        with xr.open_zarr(tmp_path / "out.zarr", consolidated=False) as dataset:
            scaled = everything(file).data * 0.004
            np.testing.assert_allclose(dataset["prediction"].values, scaled, atol=1e-6)


def test_a_store_lies_where_control_points_and_rpcs_put_it(tmp_path):
    points = tuple(
        (row, col, 9 + col / 1e3, 50 - row / 1e3, 5) for row in (0, 30) for col in (0, 40)
    )
    crs = rasterio.crs.CRS.from_epsg(4326).to_wkt()
    rpcs = (("LINE_OFF", "12.5"), ("SAMP_OFF", "3"))
    for placed in (
        {"gcps": points, "gcps_crs": crs},
        {"rpcs": rpcs},
        {"crs": crs, "transform": tuple(TRANSFORM)[:6], "tags": (("AREA_OR_POINT", "Point"),)},
    ):
        spec = CogSpec(30, 40, 1, "uint8", blocksize=16, nodata=255, **placed)
        ZarrDraft(spec, (16, 16)).create(str(tmp_path / "out.zarr"))
        grid = source_of(str(tmp_path / "out.zarr")).grid
        assert grid.gcps == placed.get("gcps", ())
        assert same_crs(grid.gcps_crs, placed.get("gcps_crs"))
        assert grid.rpcs == placed.get("rpcs", ())
        assert grid.point == ("tags" in placed)
        shutil.rmtree(tmp_path / "out.zarr")


def test_a_store_of_dates_is_an_array_of_dates(tmp_path):
    raw = noise(6, 20, 30).reshape(3, 2, 20, 30)
    axes = {"time": np.array(["2020-01-01", "2020-02-01", "2020-03-01"], "datetime64[ns]")}
    array = xr.DataArray(raw, axes | {"band": ["a", "b"]}, ("time", "band", "y", "x"), "scene")
    array.transpose("band", "y", "x", "time").to_dataset().to_zarr(
        tmp_path / "a.zarr", consolidated=False
    )
    source = source_of(str(tmp_path / "a.zarr"))
    assert np.array_equal(everything(source).data, raw.reshape(6, 20, 30))
    assert source.band_names[1] == "2020-01-01/b"
    assert np.array_equal(everything(source.select(["b"])).data, raw[:, 1])


def test_chunks_of_a_run_share_no_chunk_of_the_store(tmp_path):
    for chunk, height in (((2048, 2048), 5000), ((48, 96), 200), ((4096, 16), 300)):
        spec = CogSpec(height, 700, 1, "uint8", blocksize=16, nodata=255)
        path = str(tmp_path / f"{chunk[0]}.zarr.partial")
        work = ZarrDraft(spec, chunk).create(path)
        sides = work._array.chunks[1:]
        assert all(side % own == 0 or own == size for side, own, size in
                   zip(chunk, sides, (height, 700), strict=True))  # fmt: skip
        assert max(sides) <= 1024


def test_a_store_appears_whole_and_tells_what_is_done(tmp_path):
    spec = CogSpec(50, 40, 2, "int16", blocksize=16, nodata=-1)
    draft = ZarrDraft(spec, (16, 32))
    path = str(tmp_path / "out.zarr.partial")
    work = pickle.loads(pickle.dumps(draft.create(path)))
    data = noise(2, 50, 40, dtype="int16")
    # The last chunk of the rows takes the 2 that remain.
    rows, cols = [0, 16, 32], [0, 32]
    assert not work.done(rows, cols).any()
    for row, end in ((0, 16), (16, 32), (32, 50)):
        for col in cols:
            part = data[:, row:end, col : col + 32]
            work.append(draft.encode(part, row, col))
            assert work.done(rows, cols)[rows.index(row), cols.index(col)]
            if (row, col) != (32, 32):
                with pytest.raises(RuntimeError, match="chunks are missing"):
                    work.finish(str(tmp_path / "out.zarr"))
    with pytest.raises(FileExistsError):
        draft.create(path)
    assert work.finish(str(tmp_path / "out.zarr"), failed=[(0, 0)]) > 0
    group = zarr.open_group(tmp_path / "out.zarr", mode="r")
    assert group.attrs["FAILED_CHUNKS"] == 1
    assert np.array_equal(group["prediction"][:], data)
    with pytest.raises(FileNotFoundError, match="finished"):
        work.append(EncodedZarr(data[:, :16, :32], 0, 0))


def test_a_stopped_store_is_gone_on_with(tmp_path, one_worker):
    data = noise(2, 70, 90)
    path = write_raster(tmp_path / "scene.tif", data)
    model = di.load_model(seeded(N3), output="values", scale=1e-4)
    output = tmp_path / "out.zarr"

    def stop(event):
        if type(event).__name__ == "ChunkDone":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        di.run(path, model, output, client=one_worker, callbacks=[stop], **TIF)
    assert not output.exists()
    report = di.run(path, model, output, client=one_worker, **TIF)
    assert report.resumed >= 1
    values = zarr.open_group(output, mode="r")["prediction"][:]
    np.testing.assert_allclose(values, whole(seeded(N3), data, scale=1e-4), atol=1e-5)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        di.plan(path, model, output)
    (tmp_path / "mine.zarr").mkdir()
    (tmp_path / "mine.zarr" / "thesis.txt").write_text("")
    with pytest.raises(FileExistsError, match="not a Zarr store"):
        di.plan(path, model, tmp_path / "mine.zarr", overwrite=True)


def test_the_command_line_writes_a_store_and_tells_of_it(tmp_path, factory, capsys):
    path = write_raster(tmp_path / "scene.tif", noise(2, 20, 30))
    output = tmp_path / "out.zarr"
    assert main(["run", path, factory, str(output), "--output", "values"]) == 0
    assert zarr.open_group(output, mode="r")["prediction"].shape == (3, 20, 30)
    capsys.readouterr()
    assert main(["info", str(output)]) == 0
    told = capsys.readouterr().out
    assert "3 x 20 x 30 (band, y, x)" in told
    assert "float32, nodata nan" in told
    assert "EPSG:32632" in told
