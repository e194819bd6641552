"""Paths that mean the same in another process, whatever folder that works in."""

from __future__ import annotations

import os

__all__ = ["absolute_name", "absolute_path"]


def absolute_path(path: str) -> str:
    """A path on a file system, from its root; a URL, or a name of GDAL's, as it is.

    >>> absolute_path("s3://bucket/clouds.tif"), absolute_path("/vsimem/clouds.tif")
    ('s3://bucket/clouds.tif', '/vsimem/clouds.tif')
    """
    if "://" in path or path.startswith("/vsi"):
        return path
    return os.path.abspath(path)


def absolute_name(name: str) -> str:
    """The absolute path of a file that is there; what names none, as it is.

    For what may be the path of a file or not: ``package.module:factory``, GDAL's
    ``NETCDF:scene.nc:red``.
    """
    return absolute_path(name) if os.path.exists(name) else name
