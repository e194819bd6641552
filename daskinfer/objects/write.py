"""Vector files, written batch by batch: GeoParquet, GeoPackage, FlatGeobuf.

A file grows under another name and takes its own when it is complete, so that a stopped write
never looks like a result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SUFFIXES", "FeatureWriter", "check_features", "need_vector"]

SUFFIXES = (".parquet", ".geoparquet", ".gpkg", ".fgb")
_DRIVERS = {".gpkg": "GPKG", ".fgb": "FlatGeobuf"}
_GEOPARQUET = "1.1.0"

Columns = Mapping[str, npt.NDArray[Any]]


def need_vector() -> None:
    """Import what vector files need, or say how to install it."""
    try:
        import pyarrow
        import pyogrio
        import shapely
    except ImportError as error:
        raise ModuleNotFoundError(
            f'objects and polygons need {error.name}: pip install "daskinfer[vector]"',
            name=error.name,
        ) from error
    del pyarrow, pyogrio, shapely


def check_features(path: str, overwrite: bool) -> str:
    """The path of a vector file, if it can be written.

    Raises
    ------
    ValueError
        If its suffix is none of `SUFFIXES`, or it is a folder.
    FileNotFoundError, PermissionError
        If its folder does not exist, or cannot be written to.
    FileExistsError
        If it exists and `overwrite` is not set.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"output {path!r}: name it {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if "://" in path:
        raise ValueError(f"output {path!r}: vector files are written to a folder, not to a URL")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"output folder {str(folder)!r} does not exist: make it first")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"output folder {str(folder)!r} is not writable")
    if os.path.isdir(path):
        raise ValueError(f"output {path!r} is a folder: name a file in it")
    if os.path.exists(path) and not overwrite:
        raise FileExistsError(f"output {path!r} exists: pass overwrite=True to replace it")
    return path


class FeatureWriter:
    """Writes features to one layer of a vector file; a context manager.

    Parameters
    ----------
    path : str
        Its suffix, one of `SUFFIXES`, names the format.
    crs : str or None
        WKT.
    geometry_type : str
        What every batch holds: ``"Polygon"``, or ``"MultiPolygon"``.
    columns : dict of str to ndarray
        Empty arrays that tell names and dtypes, for a file without a feature.
    """

    def __init__(self, path: str, crs: str | None, geometry_type: str, columns: Columns) -> None:
        need_vector()
        self.path = path
        self._crs = crs
        self._kind = geometry_type
        self._columns = dict(columns)
        suffix = Path(path).suffix
        self._driver = _DRIVERS.get(suffix.lower())
        # GDAL tells formats by the suffix.
        self._growing = f"{path.removesuffix(suffix)}.writing{suffix}"
        self._parquet: Any = None
        self._written = 0
        self._bounds = np.array([np.inf, np.inf, -np.inf, -np.inf])

    def __enter__(self) -> FeatureWriter:
        Path(self._growing).unlink(missing_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                if not self._written:
                    self._write(np.empty(0, object), self._columns)
                self._close()
                os.replace(self._growing, self.path)
        finally:
            if self._parquet is not None:
                self._parquet.close()
                self._parquet = None
            Path(self._growing).unlink(missing_ok=True)

    def write(self, geometries: npt.NDArray[Any], columns: Columns) -> None:
        """Append features.

        Parameters
        ----------
        geometries : ndarray of shapely geometries, shape (n,)
        columns : dict of str to ndarray, shape (n,)
            As the writer was made for.
        """
        if len(geometries):
            self._write(geometries, columns)

    def _write(self, geometries: npt.NDArray[Any], columns: Columns) -> None:
        if self._driver is None:
            self._write_parquet(geometries, columns)
        else:
            self._write_gdal(geometries, columns)
        self._written += len(geometries)

    def _write_gdal(self, geometries: npt.NDArray[Any], columns: Columns) -> None:
        import pyogrio.raw
        import shapely

        pyogrio.raw.write(
            self._growing,
            geometry=np.asarray(shapely.to_wkb(geometries), object),
            field_data=[np.asarray(values) for values in columns.values()],
            fields=np.array(list(columns), object),
            geometry_type=self._kind,
            crs=self._crs,
            driver=self._driver,
            layer=Path(self.path).stem,
            append=bool(self._written),
        )

    def _write_parquet(self, geometries: npt.NDArray[Any], columns: Columns) -> None:
        import pyarrow as pa
        import pyarrow.parquet
        import shapely

        wkb = np.asarray(shapely.to_wkb(geometries), object)
        table = pa.table(
            {name: pa.array(values) for name, values in columns.items()}
            | {"geometry": pa.array(wkb, pa.binary())}
        )
        if self._parquet is None:
            # What an empty batch does not tell, the columns given at the start do.
            self._parquet = pyarrow.parquet.ParquetWriter(
                self._growing, table.schema, compression="zstd"
            )
        self._parquet.write_table(table)
        if len(geometries):
            low, high = self._bounds[:2], self._bounds[2:]
            bounds = shapely.total_bounds(geometries)
            self._bounds = np.concatenate(
                [np.minimum(low, bounds[:2]), np.maximum(high, bounds[2:])]
            )

    def _close(self) -> None:
        if self._parquet is None:
            return
        column: dict[str, Any] = {
            "encoding": "WKB",
            "geometry_types": [self._kind],
            "crs": _projjson(self._crs),
        }
        if self._written:
            column["bbox"] = self._bounds.tolist()
        geo = {
            "version": _GEOPARQUET,
            "primary_column": "geometry",
            "columns": {"geometry": column},
        }
        self._parquet.add_key_value_metadata({"geo": json.dumps(geo)})


def _projjson(crs: str | None) -> Any:
    """A CRS as GeoParquet holds it; null says that it is unknown."""
    if crs is None:
        return None
    from pyproj import CRS

    return CRS.from_wkt(crs).to_json_dict()
