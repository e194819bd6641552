"""Put a finished file into an object store: whole, or not at all.

A COG needs its header first and knows it last, and objects cannot be written twice in place.  So
the file is finished on a local disk and then sent in parts, several at a time.  The store shows it
when the last part is there.  What fails or is interrupted on the way is taken back; a process that
is killed leaves parts that nobody sees, which the store drops by its own rule for incomplete
uploads (S3: ``AbortIncompleteMultipartUpload``).  Sending again starts from the beginning.

Keys, region and endpoint come from the environment of the process that sends (``AWS_*``), and for
S3 also from the files of Amazon's own tools where boto3 is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["check_writable", "is_object", "local_path", "state_of", "upload"]

_SCHEMES = ("s3", "gs", "az")
# S3 takes parts of at least 5 MiB, and 10 000 of them.
_PART_BYTES, _MOST_PARTS = 16 << 20, 10_000
# Parts on their way at a time, and so what an upload holds in memory.
_AT_ONCE = 4
# Whoever waits for a plan should not wait through all the patience that an upload has.
_BRIEF: dict[str, Any] = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}


def is_object(path: str) -> bool:
    """Tell whether a path is the URL of an object.

    Examples
    --------
    >>> is_object("s3://bucket/classes.tif"), is_object("classes.tif")
    (True, False)
    """
    return path.partition("://")[0] in _SCHEMES and "://" in path


def local_path(url: str) -> str:
    """Where the file for an object grows, the same each time.

    Parameters
    ----------
    url : str
        Of the object.

    Returns
    -------
    str
        In Dask's ``temporary-directory``, else in that of the system.

    Examples
    --------
    >>> os.path.basename(local_path("s3://bucket/maps/classes.tif"))
    'classes-564479ee.tif'
    """
    import dask

    folder = dask.config.get("temporary-directory") or tempfile.gettempdir()
    stem, extension = os.path.splitext(url.rpartition("/")[2])
    return os.path.join(folder, f"{stem}-{hashlib.sha256(url.encode()).hexdigest()[:8]}{extension}")


def check_writable(url: str, overwrite: bool = False) -> None:
    """Check that an object can be written, by starting an upload and taking it back.

    Parameters
    ----------
    url : str
        Of the object.
    overwrite : bool
        Whether it may exist.

    Raises
    ------
    ModuleNotFoundError
        If the package that talks to object stores is missing.
    ValueError
        If the URL names no bucket or no object.
    FileExistsError
        If the object exists and may not.
    FileNotFoundError
        If there is no such bucket.
    PermissionError
        If the store refuses.
    OSError
        If it cannot be reached.
    """
    store, key = _store_of(url, _BRIEF)
    if not overwrite and _exists(store, key, url):
        raise FileExistsError(f"output {url!r} exists: pass overwrite=True to replace it")
    try:
        _put(store, key, url, map(_no_part, (1,)), _PART_BYTES)
    except _CheckedError:
        return


def state_of(url: str) -> str:
    """What a store tells of the state of an object that GDAL reads: its tag, else size and time.

    Nothing where it tells of none, refuses, or cannot be asked without the package for it.
    """
    try:
        store, key = _store_of(url, _BRIEF, _of_gdal() if url.startswith("s3://") else {})
    except (ModuleNotFoundError, ValueError):
        return ""
    import obstore
    from obstore.exceptions import BaseError

    try:
        told = obstore.head(store, key)
    except (BaseError, FileNotFoundError):
        return ""
    return told["e_tag"] or f"{told['size']}, {told['last_modified']}"


def upload(path: str, url: str, sent: Callable[[int], None] = lambda size: None) -> None:
    """Copy a file to an object, which appears when it is complete.

    Parameters
    ----------
    path : str
        Of the file, which stays.
    url : str
        Of the object; replaced if it exists.
    sent : callable
        Told the bytes handed over so far, after each part.

    Raises
    ------
    ModuleNotFoundError
        If the package that talks to object stores is missing.
    FileNotFoundError, PermissionError, OSError
        If the file cannot be read, or the store refuses or fails for good; names the URL.
    """
    store, key = _store_of(url)
    size = os.path.getsize(path)
    part = max(_PART_BYTES, -(-size // _MOST_PARTS))
    _put(store, key, url, _parts(path, part, sent), part)


class _CheckedError(Exception):
    """Ends an upload that was only a question."""


def _no_part(number: int) -> bytes:
    raise _CheckedError


def _parts(path: str, size: int, sent: Callable[[int], None]) -> Iterator[bytes]:
    """The file piece by piece, read as the upload asks for more; Ctrl-C is noticed here."""
    done = 0
    with open(path, "rb") as file:
        while data := file.read(size):
            yield data
            done += len(data)
            sent(done)


def _store_of(
    url: str, retry: dict[str, Any] | None = None, more: dict[str, Any] | None = None
) -> tuple[ObjectStore, str]:
    """The bucket, and the name in it."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme not in _SCHEMES or not bucket or not key or key.endswith("/"):
        raise ValueError(
            f"{url!r} names no object: expected s3://bucket/name.tif (or gs://, az://)"
        )
    try:
        from obstore.store import from_url
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"writing to {scheme}:// needs: pip install 'daskinfer[s3]'"
        ) from error
    options: dict[str, Any] = {} if retry is None else {"retry_config": retry}
    if scheme == "s3":
        options |= _of_amazon()
    options |= more or {}
    return from_url(f"{scheme}://{bucket}", **options), key


def _of_amazon() -> dict[str, Any]:
    """What obstore does not find out itself."""
    options: dict[str, Any] = {}
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next((os.environ[name] for name in names if os.environ.get(name)), "")
    if endpoint.startswith("http://"):
        # A store of one's own; without this it would have to be https.
        options["client_options"] = {"allow_http": True}
    if "AWS_ACCESS_KEY_ID" not in os.environ:
        with contextlib.suppress(ModuleNotFoundError):
            import boto3
            from obstore.auth.boto3 import Boto3CredentialProvider

            session = boto3.Session()
            if session.get_credentials() is not None:
                options["credential_provider"] = Boto3CredentialProvider(session)
    return options


def _of_gdal() -> dict[str, Any]:
    """What only GDAL reads by, which need not be where and how one writes."""
    options: dict[str, Any] = {}
    if host := os.environ.get("AWS_S3_ENDPOINT"):
        secure = _is_on("AWS_HTTPS", "YES")
        options["endpoint"] = host if "://" in host else f"http{'s' * secure}://{host}"
        options["client_options"] = {"allow_http": True}
    if _is_on("AWS_NO_SIGN_REQUEST", "NO"):
        options["skip_signature"] = True
    return options


def _is_on(name: str, default: str) -> bool:
    """A setting of the environment, as GDAL reads it."""
    return os.environ.get(name, default).upper() in ("YES", "TRUE", "ON", "1")


def _exists(store: ObjectStore, key: str, url: str) -> bool:
    import obstore
    from obstore.exceptions import BaseError

    try:
        obstore.head(store, key)
    except FileNotFoundError:
        return False
    except BaseError as error:
        raise _told(error, url) from error
    return True


def _put(store: ObjectStore, key: str, url: str, parts: Iterator[bytes], size: int) -> None:
    """Send parts; whatever ends this early also ends the upload on the store's side."""
    import obstore
    from obstore.exceptions import BaseError

    try:
        obstore.put(
            store,
            key,
            parts,
            attributes={"Content-Type": "image/tiff; application=geotiff; profile=cloud-optimized"},
            use_multipart=True,
            chunk_size=size,
            max_concurrency=_AT_ONCE,
        )
    except (BaseError, FileNotFoundError) as error:
        raise _told(error, url) from error


def _told(error: Exception, url: str) -> OSError:
    """The store's error as one of Python's, with the URL."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    first = str(error).partition("\n")[0]
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{url}: no such bucket: {first}")
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return PermissionError(f"{url}: the store refuses: {first}")
    return OSError(f"{url}: {first}")
