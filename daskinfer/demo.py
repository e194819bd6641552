"""The bundled scene and model: something real to run in the first minute.

The scene is a cloudy Sentinel-2 L1C image (contains modified Copernicus Sentinel data 2017); the
model tells clear, cloud and shadow apart.  ``daskinfer/data/README.md`` tells where both come from.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from .model import Model, load_model
from .source import open_raster

if TYPE_CHECKING:
    import xarray as xr

    from .report import Report

__all__ = ["demo_model", "demo_model_path", "demo_path", "demo_scene", "run_demo"]


def demo_path() -> str:
    """Path of the bundled scene: a COG of 6 bands, 384 x 768 px of 20 m, uint16."""
    return str(_data() / "s2_l1c_t33uuu_20m.tif")


def demo_model_path() -> str:
    """Path of the bundled model, a ``.pt2`` with its metadata."""
    return str(_data() / "cloud_unet.pt2")


def demo_scene() -> xr.DataArray:
    """The bundled scene, opened lazily.

    >>> scene = demo_scene()
    >>> scene.shape, str(scene.dtype), scene.band.values.tolist()
    ((6, 384, 768), 'uint16', ['blue', 'green', 'red', 'nir', 'swir16', 'swir22'])
    """
    return open_raster(demo_path())


def demo_model() -> Model:
    """The bundled cloud and shadow model.

    >>> demo_model().class_names
    ('clear', 'cloud', 'shadow')
    """
    return load_model(demo_model_path())


def run_demo(folder: Path) -> tuple[Report, Path]:
    """Run the bundled model over the bundled scene into `folder`.

    Returns
    -------
    Report
    Path
        A picture: the scene in true colour, and the classes.
    """
    from .monitor import progress
    from .quicklook import quicklook
    from .runner import run

    output, picture = folder / "clouds.tif", folder / "clouds.png"
    bar = progress()
    try:
        # Chunks and tiles small enough that the scene has several of both.
        report = run(
            demo_path(),
            demo_model(),
            output,
            chunk=256,
            tile=256,
            overwrite=True,
            callbacks=[bar],
        )
    finally:
        bar.stop()
    quicklook(demo_path(), output, picture, bands=("red", "green", "blue"))
    return report, picture


def _data() -> Path:
    return Path(str(files("daskinfer"))) / "data"
