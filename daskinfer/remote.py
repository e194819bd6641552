"""Reading over a network: settings of GDAL, and what is done when a read fails.

GDAL repeats a request that failed in passing.  Where that was not enough, the read is made again
with a new handle, which reads the header anew and, where URLs are signed, signs anew.  What fails
then is an error that names file and window: never nodata.
"""

from __future__ import annotations

import functools
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, TypeVar

import rasterio
import rasterio.env
from rasterio.errors import RasterioIOError

from daskinfer.objectstore import is_object, state_of

__all__ = ["UnreachableError", "environment", "is_alone", "is_remote", "patiently", "served"]

T = TypeVar("T")

_SETTINGS: dict[str, Any] = {
    # Repeats 429, 5xx, resets and timeouts, and doubles the delay each time; by default it does not
    # repeat anything.
    "GDAL_HTTP_MAX_RETRY": 3,
    "GDAL_HTTP_RETRY_DELAY": 0.5,
    # A server that is silent would hold a thread for ever: there is no limit by default.
    "GDAL_HTTP_CONNECTTIMEOUT": 20,
    "GDAL_HTTP_LOW_SPEED_TIME": 60,
    "GDAL_HTTP_LOW_SPEED_LIMIT": 1,
    # Servers of files have no lists of them, or long ones.
    "GDAL_DISABLE_READDIR_ON_OPEN": "TRUE",
}
# For files that need none beside them: GDAL asks for 45 that there could be, one by one, otherwise.
_ALONE = {"GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR"}
# Tries with a new handle, after the first.
_MORE = 3
_DELAY = 0.5
# Seconds for which a file that could not be reached is given no second try.
_GIVEN_UP = 15.0
# Of the request for the state of a file, tries and seconds.
_TRIES, _SECONDS = 2, 20
_SCHEMES = {"s3": "vsis3", "gs": "vsigs", "az": "vsiaz", "oss": "vsioss"}
_NETWORK = re.compile(r"/vsi(curl|s3|gs|az|adls|oss|swift|webhdfs|hdfs)|https?://")

_lost: dict[str, float] = {}


class UnreachableError(RasterioIOError):  # type: ignore[misc]
    """A remote file could not be read, however often it was tried."""


def is_remote(path: str) -> bool:
    """Whether reading a path goes over a network; also of a VRT on this machine.

    >>> is_remote("https://host/scene.tif"), is_remote("/vsis3/bucket/scene.tif")
    (True, True)
    >>> is_remote("/data/scene.tif")
    False
    """
    if "://" in path or _NETWORK.search(path):
        return not path.startswith("file://")
    return path.lower().endswith(".vrt") and _vrt_is_remote(path)


@functools.lru_cache(64)
def _vrt_is_remote(path: str) -> bool:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return any(_NETWORK.search(line) for line in file if "<Source" in line)
    except OSError:
        return False


def is_alone(path: str, sign: Callable[[str], str] | None = None) -> bool:
    """Whether a remote file is one that keeps all in itself: a TIFF with no mask beside it.

    Other formats may have their place in a file beside them.  An address with a query has none
    beside it that GDAL could find.
    """
    address = path if sign is None else sign(path)
    name, _, query = address.partition("?")
    if not name.lower().endswith((".tif", ".tiff")):
        return False
    if query:
        return True
    try:
        # Its own mask would be asked for in turn.
        with environment(path, alone=True), rasterio.open(f"{address}.msk", driver="GTiff"):
            return False
    except RasterioIOError as error:
        if _missing(error):
            return True
        raise


def _missing(error: RasterioIOError) -> bool:
    """Whether a server says that there is no such file; what else it says is no answer."""
    text = f"{error} {error.__cause__}"
    return any(sign in text for sign in ("404", "403", "does not exist", "not recognized"))


def environment(path: str, *, hopeless: bool = False, alone: bool = False) -> rasterio.Env:
    """What GDAL is to be told around reads of a path; the user's own settings come first."""
    settings = _SETTINGS | _ALONE if alone else dict(_SETTINGS)
    if hopeless:
        settings["GDAL_HTTP_MAX_RETRY"] = 0
    if place := _place(path):
        # It would remember for good that a file could not be opened.  What is set here it forgets
        # when a handle is closed.
        settings["CPL_VSIL_CURL_NON_CACHED"] = place
    given = rasterio.env.getenv() if rasterio.env.hasenv() else {}
    return rasterio.Env(
        **{name: value for name, value in settings.items()
           if name not in os.environ and (name not in given or hopeless)}
    )  # fmt: skip


def patiently(
    read: Callable[[], T],
    path: str,
    about: str,
    forget: Callable[[], None],
    *,
    alone: bool = False,
) -> T:
    """Read from a remote file; where that fails, again with a new handle.

    Parameters
    ----------
    read : callable
    path : str
    about : str
        What is read, for the error.
    forget : callable
        Closes the handle.
    alone : bool, default False
        Whether the file is opened without looking for others beside it.

    Raises
    ------
    UnreachableError
        If the last try failed too, from which it is chained.
    """
    hopeless = time.monotonic() - _lost.get(path, -_GIVEN_UP) < _GIVEN_UP
    more = 0 if hopeless else _MORE
    for number in range(more + 1):
        try:
            with environment(path, hopeless=hopeless, alone=alone):
                result = read()
        except (RasterioIOError, ValueError) as error:
            with environment(path):
                forget()
            if number == more:
                _lost[path] = time.monotonic()
                raise UnreachableError(
                    f"{path}: {about} could not be read in {more + 1} tries"
                ) from error
        else:
            _lost.pop(path, None)
            return result
        # At random: many threads fail at one time and would come back at one time.
        time.sleep(_DELAY * 2**number * random.uniform(0.5, 1.0))
    raise AssertionError("not reached")


def served(path: str, sign: Callable[[str], str] | None = None) -> str:
    """What a server or a store tells of the state of a file: its tag, else size and time.

    Nothing where it tells of none.
    """
    address = _url(path if sign is None else sign(path))
    if is_object(address):
        return state_of(address)
    if not address.startswith(("http://", "https://")):
        return ""
    # Not HEAD: an address may be signed for GET alone.
    request = urllib.request.Request(address, headers={"Range": "bytes=0-0"})
    for number in range(_TRIES):
        if number:
            time.sleep(_DELAY)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                told = answer.headers
        except urllib.error.HTTPError as error:
            if error.code != 429 and error.code < 500:
                break
        except (OSError, HTTPException):
            continue
        else:
            size = told.get("Content-Range", "").rpartition("/")[2] or told.get("Content-Length")
            return str(told.get("ETag") or f"{size}, {told.get('Last-Modified')}")
    return ""


def _url(path: str) -> str:
    """A path in GDAL's way as a URL; any other as it is."""
    for scheme, folder in _SCHEMES.items():
        if path.startswith(f"/{folder}/"):
            return f"{scheme}://{path.removeprefix(f'/{folder}/')}"
    return path.removeprefix("/vsicurl/")


def _place(path: str) -> str | None:
    """GDAL's name for the host or bucket of a path; without its port, which a ":" would cut off."""
    scheme, _, rest = path.partition("://")
    if scheme in ("http", "https"):
        return f"/vsicurl/{scheme}://{re.split('[/:]', rest)[0]}"
    if scheme in _SCHEMES:
        return f"/{_SCHEMES[scheme]}/{rest.partition('/')[0]}"
    return None
