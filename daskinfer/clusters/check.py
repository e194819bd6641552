"""Whether the workers that there are can do a run: asked of each of them, before any work."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

from distributed import Client

from .._version import __version__
from ..handles import identity_of, open_dataset
from ..raster import Raster
from ..remote import environment, is_remote
from .workers import cuda_count

__all__ = ["check_versions", "check_workers"]

_NAMED = 5  # workers in a message


def check_workers(client: Client, source: object, device: object, *, bytecode: bool) -> None:
    """Refuse a run that no worker, or not every worker, can do.

    Workers that join later are not waited for: they are told of what they lack chunk by chunk.

    Parameters
    ----------
    client : distributed.Client
    source : Source
        Its files must be what they are here.
    device : str or callable
        Of a plan.
    bytecode : bool
        Whether functions of this Python go to the workers as they are, as with a model in memory.

    Raises
    ------
    ValueError
        If workers have other versions, do not see the source's files, or none has the device;
        names workers and what they offer.
    """
    check_versions(client, bytecode=bytecode)
    _check_device(client, device)
    files = list(_rasters(source))
    if files:
        told = _asked(client, _missing_file, _looked_at(files))
        _refuse({address: _failed(answer) or answer for address, answer in told.items()})


def check_versions(client: Client, *, bytecode: bool = False) -> None:
    """Refuse workers that have no daskinfer, or another one than this process."""
    told = _asked(client, _versions())
    here = __version__, sys.version_info[:2]
    wrong = {}
    for address, there in told.items():
        if (failed := _failed(there)) is not None:
            wrong[address] = failed
        elif there[0] is None:
            wrong[address] = f"has no daskinfer ({there[2]}): install {here[0]} there"
        elif there[0] != here[0]:
            wrong[address] = f"has daskinfer {there[0]} and this process {here[0]}"
        elif bytecode and tuple(there[1]) != here[1]:
            versions = [".".join(map(str, version)) for version in (there[1], here[1])]
            wrong[address] = (
                f"has Python {versions[0]} and this process {versions[1]}: a model in memory does "
                "not travel between them, save it as .pt2"
            )
    _refuse(wrong)


def _versions() -> Any:
    """A function that goes to workers as bytecode: they may have nothing of ours."""

    def versions() -> tuple[str | None, tuple[int, ...], str]:
        import sys

        try:
            from daskinfer import _version
        except ImportError:
            return None, sys.version_info[:2], sys.executable
        return _version.__version__, sys.version_info[:2], sys.executable

    return versions


def _check_device(client: Client, device: object) -> None:
    """Refuse a device by name that no worker has."""
    if not isinstance(device, str) or not device.startswith("cuda"):
        return
    told = _asked(client, _offer)
    need = int(device.partition(":")[2] or 0)
    if not told or any(_failed(answer) is None and answer[0] > need for answer in told.values()):
        return
    offers = _listed({at: _failed(answer) or answer[1] for at, answer in told.items()})
    raise ValueError(f"device {device!r}: no worker has it. They offer\n{offers}")


async def _offer(dask_worker: Any) -> tuple[int, str]:
    """CUDA devices of a worker, and all that it offers, in words."""
    import torch

    count = await asyncio.to_thread(cuda_count)
    state = dask_worker.state
    resources = ", ".join(f"{k}={v:g}" for k, v in state.total_resources.items()) or "none"
    return count, (
        f"{state.nthreads} threads, resources {resources}, torch {torch.__version__} sees "
        f"{count or 'no'} CUDA device{'' if count == 1 else 's'}"
    )


def _rasters(value: object) -> Iterator[Raster]:
    """All files of a source, however they are put together."""
    if isinstance(value, Raster):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _rasters(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _rasters(getattr(value, part.name, None))


def _looked_at(rasters: list[Raster]) -> list[Raster]:
    """Files that can be looked at for nothing, and one of those that cannot."""
    local = [raster for raster in rasters if "|" in identity_of(raster.path)]
    return local + [raster for raster in rasters if "|" not in identity_of(raster.path)][:1]


async def _missing_file(rasters: list[Raster]) -> str | None:
    """What a worker lacks of a source; None if nothing."""
    return await asyncio.to_thread(_missing, rasters)


def _missing(rasters: list[Raster]) -> str | None:
    for raster in rasters:
        # The size follows the name of a file; of anything else a window may.
        path, told = raster.path, raster.identity.split("|")
        local = len(told) > 1 and told[1].isdigit()
        if local and not os.path.exists(path):
            return f"has no file {path} (it works in {os.getcwd()})"
        if local and raster.changed():
            return (
                f"has another file {path}: of other size, or changed at another time; copy it with "
                "cp -p or rsync -t"
            )
        if local:
            continue
        try:
            # Beside a file that is alone GDAL would look for others, some 45 requests a worker.
            alone = environment(path, alone=raster.alone) if is_remote(path) else nullcontext()
            with alone:
                open_dataset(path, raster.sign).close()
        except Exception as error:
            return f"cannot open {path}: {error}"
    return None


def _asked(client: Client, function: Any, *arguments: Any) -> dict[str, Any]:
    """What each worker answers, or raises; without those that are lost meanwhile."""
    told = client.run(function, *arguments, on_error="return")
    return {at: answer for at, answer in told.items() if not isinstance(answer, OSError)}


def _failed(answer: Any) -> str | None:
    """Why there is no answer; None if there is one."""
    if not isinstance(answer, BaseException):
        return None
    return f"cannot tell what it has ({type(answer).__name__}: {answer})"


def _refuse(told: Mapping[str, str | None]) -> None:
    """Raise what workers lack, if any lacks something."""
    wrong = {address: text for address, text in told.items() if text is not None}
    if wrong:
        lines = [f"worker {address} {text}" for address, text in wrong.items()]
        more = f"\n... and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
        raise ValueError("\n".join(lines[:_NAMED]) + more)


def _listed(told: Mapping[str, str]) -> str:
    lines = [f"  {address}: {text}" for address, text in told.items()]
    more = [f"  ... and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    return "\n".join(lines[:_NAMED] + more)
