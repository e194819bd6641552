"""One small raster per feature of GDAL's formats: pixels, mask and place are those of rasterio.

The oracle is rasterio's own read of the same file.  A model that gives its input back must give the
file back, through chunks and tiles that do not fit its blocks.
"""

from __future__ import annotations

import gzip
import itertools
import zipfile
from pathlib import Path

import numpy as np
import pytest
import rasterio
import rasterio.shutil
from affine import Affine
from rasterio.enums import ColorInterp

import daskinfer as di
from conftest import TRANSFORM, Pixel, write_raster
from daskinfer.grid import grid_of
from daskinfer.raster import describe
from engine import inferred
from sources import everything

pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")

MODEL = di.load_model(Pixel(), output="values")
SHAPE = (45, 61)
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32",
          "float64")  # fmt: skip
LAYOUTS = {
    "strips": {},
    "one row": {"blockysize": 1},
    "one strip": {"blockysize": 45},
    "tiles": {"tiled": True, "blockxsize": 16, "blockysize": 16},
    "oblong tiles": {"tiled": True, "blockxsize": 32, "blockysize": 16},
    "one tile": {"tiled": True, "blockxsize": 64, "blockysize": 64},
}
CODECS = ("none", "deflate", "lzw", "zstd", "packbits", "lzma")
MASKS = ("none", "number", "nan", "inside", "beside", "alpha", "number and beside")
PLACES = {
    "north-up": TRANSFORM,
    "south-up": Affine(10, 0, 500_000, 0, 10, 5_600_000),
    "rotated": Affine(10, 2, 500_000, 3, -10, 5_600_000),
    "rectangular": Affine(0.7 / 3600, 0, 10.1, 0, -0.9 / 3600, 50.3),
    "nowhere": None,
}


def pixels(dtype, bands=2):
    """Numbers up to 2**24, which float32 holds, at both ends of what the dtype has of them."""
    low, high = (0, 0)
    if np.dtype(dtype).kind == "f":
        low, high = -(2**24), 2**24
    else:
        limits = np.iinfo(dtype)
        low, high = max(limits.min, -(2**24)), min(limits.max, 2**24)
    raw = np.random.default_rng(0).integers(low, high, (bands, *SHAPE), endpoint=True).astype(dtype)
    raw[0, 0, :2] = low, high
    return raw


def holes():
    mask = np.ones(SHAPE, bool)
    mask[3:9, 7:20] = mask[44, 60] = mask[0, 0] = False
    return mask


def file_of(path, dtype, *, mask="none", place="north-up", **options):
    """Write a raster with a mask of some kind; returns its path."""
    if mask == "nan" and np.dtype(dtype).kind != "f":
        mask = "number"
    raw, there = pixels(dtype, 3 if mask == "alpha" else 2), holes()
    if "number" in mask or mask == "nan":
        options["nodata"] = 7 if "number" in mask else np.nan
        raw[raw == 7] = 8
        raw[0, ~there] = options["nodata"]
    if mask == "alpha":
        raw[-1] = np.where(there, 255, 0)
    crs = None if PLACES[place] is None else "EPSG:32632"
    path = write_raster(path, raw, transform=PLACES[place], crs=crs, **options)
    if mask == "alpha":
        with rasterio.open(path, "r+") as dataset:
            dataset.colorinterp = [ColorInterp.gray, ColorInterp.undefined, ColorInterp.alpha]
    if "side" in mask:
        inside = rasterio.Env(GDAL_TIFF_INTERNAL_MASK=mask == "inside")
        with inside, rasterio.open(path, "r+") as dataset:
            dataset.write_mask(np.roll(there, 5, axis=1))
    return path


def check(path, *, exact=True):
    """What is opened, and what an identity makes of it, is what rasterio reads."""
    with rasterio.open(path) as dataset:
        numbers = [
            n for n, color in zip(dataset.indexes, dataset.colorinterp, strict=True)
            if color != ColorInterp.alpha
        ]  # fmt: skip
        raw, masks = dataset.read(numbers), dataset.read_masks(numbers)
        if ColorInterp.alpha in dataset.colorinterp:
            masks = dataset.read([dataset.colorinterp.index(ColorInterp.alpha) + 1])
        if any(value is not None for value in dataset.nodatavals):
            # GDAL lets a mask hide nodata; here both count.
            nodata = np.array([dataset.nodatavals[n - 1] for n in numbers], float)
            masks = masks * (raw != nodata[:, None, None])
        transform, crs = dataset.transform, dataset.crs
    valid = (masks > 0).all(axis=0) & ~np.isnan(raw.astype(float)).any(axis=0)

    raster = describe(path)
    read = everything(raster)
    assert read.data.dtype == raw.dtype
    assert np.array_equal(read.data, raw, equal_nan=True)
    assert np.array_equal(valid, np.ones_like(valid) if read.valid is None else read.valid)
    assert raster.grid.transform == (None if transform.is_identity else transform)
    assert (crs is None) == (raster.grid.crs is None)
    assert crs is None or rasterio.CRS.from_wkt(raster.grid.crs) == crs

    scene = di.open_raster(path, chunks=(17, 29))
    assert np.array_equal(scene.values, raw, equal_nan=True)
    assert grid_of(scene) == raster.grid
    if "mask" in scene.coords:
        assert np.array_equal(scene.mask.values, valid)
    else:
        assert valid.all()

    for source in (path, scene):
        result, _ = inferred(source, MODEL, tile=16, chunk=32)
        if exact:
            scales = np.array(raster.scales, np.float32)[:, None, None]
            offsets = np.array(raster.offsets, np.float32)[:, None, None]
            expected = np.where(valid, raw.astype(np.float32) * scales + offsets, np.nan)
            assert np.array_equal(result, expected.astype(np.float32), equal_nan=True)


def features():
    """Every dtype in every layout and order; codecs, masks and places go round beside them."""
    rest = zip(
        itertools.cycle(CODECS), itertools.cycle(MASKS), itertools.cycle(PLACES),
        itertools.cycle(["LITTLE", "BIG", "LITTLE"]), strict=False,
    )  # fmt: skip
    every = itertools.product(LAYOUTS, DTYPES, ("pixel", "band"))
    for (layout, dtype, order), (codec, mask, place, endian) in zip(every, rest, strict=False):
        if mask == "alpha" and np.dtype(dtype).kind != "u":
            mask = "inside"
        yield pytest.param(
            dtype, layout, order, codec, mask, place, endian,
            id=f"{dtype}-{layout}-{order}-{codec}-{mask}-{place}-{endian}",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "layout", "order", "codec", "mask", "place", "endian"), list(features())
)
def test_a_geotiff_is_read_as_rasterio_reads_it(
    tmp_path, dtype, layout, order, codec, mask, place, endian
):
    options = {"interleave": order, "compress": codec, "ENDIANNESS": endian, **LAYOUTS[layout]}
    check(file_of(tmp_path / "a.tif", dtype, mask=mask, place=place, **options))


# Codecs with conditions, and what else a GeoTIFF can be.
KINDS = {
    "predictor 2": ("uint16", {"compress": "deflate", "predictor": 2}),
    "predictor 2 of 64 bits": ("int64", {"compress": "zstd", "predictor": 2}),
    "predictor 3": ("float32", {"compress": "lzw", "predictor": 3}),
    "predictor 3 of doubles": ("float64", {"compress": "deflate", "predictor": 3}),
    "lerc": ("float32", {"compress": "lerc"}),
    "lerc, lossy": ("float32", {"compress": "lerc", "MAX_Z_ERROR": 10}),
    "lerc_deflate": ("uint16", {"compress": "lerc_deflate"}),
    "lerc_zstd": ("int32", {"compress": "lerc_zstd"}),
    "bigtiff": ("uint16", {"BIGTIFF": "YES"}),
    "big endian tiles": ("float64", {"ENDIANNESS": "BIG", "tiled": True, "blockxsize": 16,
                                     "blockysize": 16}),
    "1 bit": ("uint8", {"NBITS": 1}),
    "4 bits": ("uint8", {"NBITS": 4}),
    "7 bits": ("uint8", {"NBITS": 7}),
    "12 bits": ("uint16", {"NBITS": 12}),
    "24 bits": ("uint32", {"NBITS": 24}),
    "half floats": ("float32", {"NBITS": 16}),
    "sparse": ("uint16", {"SPARSE_OK": True, "nodata": 3}),
    "scaled": ("int16", {"scales": (0.1, 0.5), "offsets": (0, -1), "nodata": 0}),
    "min is white": ("uint8", {"photometric": "MINISWHITE"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_geotiff_are_read_as_rasterio_reads_them(tmp_path, kind):
    dtype, options = KINDS[kind]
    options = dict(options)
    scales = {name: options.pop(name) for name in ("scales", "offsets") if name in options}
    raw = pixels(dtype)
    if "NBITS" in options:
        raw = (raw % 2 ** min(options["NBITS"], 8)).astype(dtype)
    path = write_raster(tmp_path / "a.tif", raw * (kind != "sparse"), **options)
    with rasterio.open(path, "r+") as dataset:
        for name, values in scales.items():
            setattr(dataset, name, values)
    check(path)


@pytest.mark.parametrize(
    ("codec", "bands", "options"),
    [("jpeg", 1, {}), ("jpeg", 3, {"photometric": "YCBCR"}), ("jpeg", 3, {"interleave": "band"}),
     ("webp", 3, {"WEBP_LOSSLESS": "YES"}), ("webp", 4, {}), ("ccittfax4", 1, {"NBITS": 1}),
     ("ccittrle", 1, {"NBITS": 1})],
)  # fmt: skip
def test_codecs_of_pictures_are_read_as_rasterio_reads_them(tmp_path, codec, bands, options):
    raw = pixels("uint8", bands)
    if "NBITS" in options:
        raw %= 2
    check(
        write_raster(
            tmp_path / "a.tif", raw, **{"interleave": "pixel", "compress": codec} | options
        )
    )


@pytest.mark.parametrize("palette", [True, False])
def test_a_palette_is_read_as_its_indices(tmp_path, palette):
    path = write_raster(tmp_path / "a.tif", pixels("uint8", 1) % 4)
    if palette:
        with rasterio.open(path, "r+") as dataset:
            dataset.write_colormap(1, {n: (n, 0, 0, 255) for n in range(4)})
    check(path)


# By driver: the ending of the name, the dtype, and options of the driver.
FORMATS = {
    "COG": ("tif", "uint16", {}),
    "VRT": ("vrt", "uint16", {}),
    "PNG": ("png", "uint16", {"WORLDFILE": "YES"}),
    "JPEG": ("jpg", "uint8", {}),
    "ENVI": ("img", "float64", {}),
    "HFA": ("img", "int16", {}),
    "netCDF": ("nc", "float32", {}),
    "GPKG": ("gpkg", "uint8", {}),
    "MBTiles": ("mbtiles", "uint8", {}),
    "JP2OpenJPEG": ("jp2", "uint16", {"QUALITY": "100", "REVERSIBLE": "YES"}),
    "AAIGrid": ("asc", "int32", {}),
    "EHdr": ("bil", "uint16", {}),
    "ERS": ("ers", "float32", {}),
    "SAGA": ("sdat", "float32", {}),
    "PCIDSK": ("pix", "uint16", {}),
    "MRF": ("mrf", "uint16", {}),
    "Zarr": ("zarr", "int16", {}),
    "BMP": ("bmp", "uint8", {}),
    "GIF": ("gif", "uint8", {}),
    "NITF": ("ntf", "uint16", {}),
    "ISIS3": ("lbl", "uint8", {}),
    "PDS4": ("xml", "uint8", {}),
    "VICAR": ("vic", "uint8", {}),
    "RRASTER": ("grd", "int32", {}),
    "GRIB": ("grb", "float64", {}),
    "PCRaster": ("map", "float32", {}),
    "ISCE": ("slc", "float32", {}),
    "HF2": ("hf2", "float32", {}),
    "GS7BG": ("grd", "float64", {}),
    "XYZ": ("xyz", "int16", {}),
    "ILWIS": ("mpr", "uint8", {}),
    "KRO": ("kro", "uint16", {}),
    "BT": ("bt", "int16", {}),
    "GTX": ("gtx", "float32", {}),
}


@pytest.mark.parametrize("driver", FORMATS)
def test_other_formats_are_read_as_rasterio_reads_them(tmp_path, driver):
    with rasterio.Env() as env:
        if driver not in env.drivers():
            pytest.skip(f"this build of GDAL has no {driver}")
    ending, dtype, options = FORMATS[driver]
    raw = np.abs(pixels(dtype, 1) % 200).astype(dtype)
    file = write_raster(tmp_path / "source.tif", raw)
    path = str(tmp_path / f"a.{ending}")
    rasterio.shutil.copy(file, path, driver=driver, **options)
    check(path)


@pytest.mark.parametrize(
    "wrapped", ["/vsizip/{0}.zip/a.tif", "/vsigzip/{0}.gz", "zip://{0}.zip!a.tif"]
)
def test_files_in_archives_are_read_as_rasterio_reads_them(tmp_path, wrapped):
    path = Path(file_of(tmp_path / "a.tif", "uint16", mask="number"))
    (tmp_path / "a.tif.gz").write_bytes(gzip.compress(path.read_bytes()))
    with zipfile.ZipFile(tmp_path / "a.tif.zip", "w") as archive:
        archive.write(path, "a.tif")
    check(wrapped.format(path))
