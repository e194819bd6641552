"""The part of TIFF that a block-wise writer needs: read tags, plan a header.

Only little-endian BigTIFF with square tiles is handled, which is what the writer itself asks GDAL
for.  Sections named below are those of *TIFF 6.0*, of the *BigTIFF design* that extends it with
64-bit offsets, and of *OGC 21-026*, the Cloud Optimized GeoTIFF standard.

A header is planned before any pixel is known: the number of tiles of each level follows from the
size alone, so ``TileOffsets`` and ``TileByteCounts`` (TIFF 6.0 section 15) get a fixed place in
front of the data (OGC 21-026, 7.3: IFDs before image data) and start as zeros.  A tile whose
byte count is zero is missing and reads as nodata, so the file is valid from its first moment.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int]

# Tags (TIFF 6.0 appendix A).
NEW_SUBFILE_TYPE = 254
IMAGE_WIDTH = 256
IMAGE_LENGTH = 257
BITS_PER_SAMPLE = 258
COMPRESSION = 259
PHOTOMETRIC = 262
SAMPLES_PER_PIXEL = 277
PLANAR_CONFIGURATION = 284
PREDICTOR = 317
TILE_WIDTH = 322
TILE_OFFSETS = 324
TILE_BYTE_COUNTS = 325
SAMPLE_FORMAT = 339
JPEG_TABLES = 347
GDAL_METADATA = 42112
GDAL_NODATA = 42113
LERC_PARAMETERS = 50674

# Georeferencing, RPCs and GDAL's metadata: full resolution only (OGC 21-026, 7.4).
_MAIN_ONLY = frozenset({33550, 33922, 34264, 34735, 34736, 34737, GDAL_METADATA, 50844})

# TIFF 6.0 section 2 "Types"; 13 is IFD; BigTIFF adds 16 LONG8, 17 SLONG8, 18 IFD8.
_LONG, _LONG8 = 4, 16
_TYPE_SIZE = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_TYPE_SIZE |= {16: 8, 17: 8, 18: 8}
_UNSIGNED = {1: "u1", 3: "<u2", 4: "<u4", 16: "<u8"}

# BigTIFF: 16 bytes of file header; an IFD is a count, 20 bytes per entry, the next IFD's offset;
# a value of up to 8 bytes lives in its entry.
_FILE_HEADER, _ENTRY, _INLINE = 16, 20, 8


def _ghost_area(lines: str) -> bytes:
    """GDAL's structural metadata; the last blank leaves room for "YES" where "NO" stands."""
    lines += "KNOWN_INCOMPATIBLE_EDITION=NO\n "
    return f"GDAL_STRUCTURAL_METADATA_SIZE={len(lines):06d} bytes\n{lines}".encode()


# All that is true of a file whose tiles are in the order of their arrival.
WORK_GHOST = _ghost_area("LAYOUT=IFDS_BEFORE_DATA\n")
# Taken together these are what GDAL calls LAYOUT=COG.
STRICT_GHOST = _ghost_area(
    "LAYOUT=IFDS_BEFORE_DATA\nBLOCK_ORDER=ROW_MAJOR\nBLOCK_LEADER=SIZE_AS_UINT4\n"
    "BLOCK_TRAILER=LAST_4_BYTES_REPEATED\n"
)


@dataclass(frozen=True)
class Entry:
    """One tag of an IFD.

    Parameters
    ----------
    type : int
        TIFF type number.
    count : int
        Number of values.
    value : bytes or None
        The values, little-endian.  None reserves room for them.
    """

    type: int
    count: int
    value: bytes | None

    @property
    def size(self) -> int:
        """Bytes that the values take."""
        return self.count * _TYPE_SIZE[self.type]

    def ints(self) -> NDArray[Any]:
        """Values of an unsigned integer type.

        Returns
        -------
        ndarray of unsigned int, shape (count,)
            Read-only.
        """
        return np.frombuffer(self.value or b"", _UNSIGNED[self.type])


Ifd = Mapping[int, Entry]


def parse(read: Callable[[int, int], bytes], *, first_only: bool = False) -> list[dict[int, Entry]]:
    """Read the IFDs of a file.

    Parameters
    ----------
    read : callable
        ``read(size, position)`` gives the bytes there.
    first_only : bool
        Stop after the full resolution.

    Returns
    -------
    list of dict
        Tag number to `Entry`, one dict per IFD.

    Raises
    ------
    ValueError
        If the file is not a little-endian BigTIFF.
    """
    magic, version, _, _, at = struct.unpack("<2sHHHQ", read(_FILE_HEADER, 0))
    if (magic, version) != (b"II", 43):
        raise ValueError(f"not a little-endian BigTIFF: starts with {magic!r}, version {version}")
    ifds: list[dict[int, Entry]] = []
    while at and not (first_only and ifds):
        (count,) = struct.unpack("<Q", read(8, at))
        raw = read(_ENTRY * count + 8, at + 8)
        ifds.append(dict(_entry(read, raw[_ENTRY * i :]) for i in range(count)))
        (at,) = struct.unpack("<Q", raw[-8:])
    return ifds


def shape_of(ifd: Ifd) -> tuple[int, int]:
    """Give height and width of an IFD's image in pixels."""
    return int(ifd[IMAGE_LENGTH].ints()[0]), int(ifd[IMAGE_WIDTH].ints()[0])


def planes_of(ifd: Ifd) -> int:
    """Count the tiles at one place.

    Parameters
    ----------
    ifd : mapping
        Tags.

    Returns
    -------
    int
        The number of bands where each has its own (TIFF 6.0, PlanarConfiguration 2), else 1.
    """
    planar = ifd.get(PLANAR_CONFIGURATION)
    own = planar is not None and planar.ints()[0] == 2
    return int(ifd[SAMPLES_PER_PIXEL].ints()[0]) if own else 1


def parse_bytes(data: bytes | memoryview) -> dict[int, Entry]:
    """Read the first IFD of a file in memory.

    Parameters
    ----------
    data : bytes or memoryview
        The whole file.

    Returns
    -------
    dict
        Tag number to `Entry`.
    """
    return parse(lambda size, at: bytes(data[at : at + size]), first_only=True)[0]


def _entry(read: Callable[[int, int], bytes], raw: bytes) -> tuple[int, Entry]:
    tag, kind, count = struct.unpack_from("<HHQ", raw)
    size = count * _TYPE_SIZE[kind]
    if size <= _INLINE:
        return tag, Entry(kind, count, raw[12 : 12 + size])
    (at,) = struct.unpack_from("<Q", raw, 12)
    # The index of a large raster is tens of MB, and is read by position when it is needed.
    reserved = tag in (TILE_OFFSETS, TILE_BYTE_COUNTS) and size > 1 << 20
    return tag, Entry(kind, count, None if reserved else read(size, at))


@dataclass(frozen=True)
class Layout:
    """Where everything in front of the data is.

    Parameters
    ----------
    grids : tuple of (int, int)
        Tile rows and columns of each level, full resolution first; where bands have tiles of their
        own, the rows of all bands, one band below the other.
    header : tuple of (int, bytes)
        What to write where; the index is left out, and is zeros.
    offsets_at, counts_at : tuple of int
        Position of the first tile offset (8 bytes each) and byte count (4 bytes each) of each
        level.
    data_start : int
        First byte after all of it.
    """

    grids: tuple[Grid, ...]
    header: tuple[tuple[int, bytes], ...]
    offsets_at: tuple[int, ...]
    counts_at: tuple[int, ...]
    data_start: int


class _Cursor:
    """Hands out places in a file, front to back."""

    def __init__(self, at: int) -> None:
        self.at = at

    def take(self, size: int, align: int = 8) -> int:
        start = self.at + -self.at % align
        self.at = start + size
        return start


def plan_layout(
    main: Ifd, shapes: Sequence[tuple[int, int]], blocksize: int, ghost: bytes
) -> Layout:
    """Plan a header for a raster with overviews.

    Parameters
    ----------
    main : mapping
        Tags of the full resolution; size and index tags are replaced.
    shapes : sequence of (int, int)
        Height and width of each level, full resolution first.
    blocksize : int
        Side of a tile in pixels.
    ghost : bytes
        GDAL's structural metadata, placed right behind the file header.

    Returns
    -------
    Layout
        The same for the same arguments, always.
    """
    planes = planes_of(main)
    grids = tuple((planes * -(-h // blocksize), -(-w // blocksize)) for h, w in shapes)
    ifds = [_level_ifd(main, shapes[i], grids[i], i > 0) for i in range(len(grids))]
    cursor = _Cursor(_FILE_HEADER + len(ghost))
    # Validators expect the first IFD right behind the ghost area, rounded up to a word only.
    ifd_at = [cursor.take(16 + _ENTRY * len(d), 8 if i else 2) for i, d in enumerate(ifds)]
    shared = _place_values(ifds, cursor)
    index = [_place_index(d, at, cursor) for d, at in zip(ifds, ifd_at, strict=True)]
    pieces = [(0, struct.pack("<2sHHHQ", b"II", 43, 8, 0, ifd_at[0]) + ghost)]
    pieces += [(at, value) for value, at in shared.items()]
    for i, ifd in enumerate(ifds):
        following = ifd_at[i + 1] if i + 1 < len(ifds) else 0
        pieces.append((ifd_at[i], _pack_ifd(ifd, shared, index[i], following)))
    return Layout(
        grids,
        tuple(pieces),
        tuple(at[TILE_OFFSETS] for at in index),
        tuple(at[TILE_BYTE_COUNTS] for at in index),
        cursor.take(0, 16),
    )


def _level_ifd(main: Ifd, shape: tuple[int, int], grid: Grid, overview: bool) -> dict[int, Entry]:
    ifd = {tag: e for tag, e in main.items() if not (overview and tag in _MAIN_ONLY)}
    ifd[IMAGE_LENGTH], ifd[IMAGE_WIDTH] = (_long(n) for n in shape)
    if overview:
        ifd[NEW_SUBFILE_TYPE] = _long(1)  # bit 0: a reduced-resolution version
    tiles = grid[0] * grid[1]
    ifd[TILE_OFFSETS] = Entry(_LONG8, tiles, None)
    ifd[TILE_BYTE_COUNTS] = Entry(_LONG, tiles, None)
    return dict(sorted(ifd.items()))  # TIFF 6.0 section 2: entries ascend by tag


def _long(value: int) -> Entry:
    return Entry(_LONG, 1, struct.pack("<I", value))


def _place_values(ifds: list[dict[int, Entry]], cursor: _Cursor) -> dict[bytes, int]:
    """Place each long value once: a 16-bit colour table is 393 kB, and every level has it."""
    placed: dict[bytes, int] = {}
    for entry in (e for ifd in ifds for e in ifd.values()):
        if entry.value is not None and entry.size > _INLINE and entry.value not in placed:
            placed[entry.value] = cursor.take(entry.size)
    return placed


def _place_index(ifd: dict[int, Entry], ifd_at: int, cursor: _Cursor) -> dict[int, int]:
    """Place the two index arrays; short ones live in the entry itself."""
    at = {}
    for i, (tag, entry) in enumerate(ifd.items()):
        if entry.value is None:
            inline = ifd_at + 8 + _ENTRY * i + 12
            at[tag] = inline if entry.size <= _INLINE else cursor.take(entry.size)
    return at


def _pack_ifd(
    ifd: dict[int, Entry], shared: dict[bytes, int], index: dict[int, int], following: int
) -> bytes:
    packed = [struct.pack("<Q", len(ifd))]
    for tag, entry in ifd.items():
        if entry.size <= _INLINE:
            value = (entry.value or b"").ljust(_INLINE, b"\0")
        else:
            at = index[tag] if entry.value is None else shared[entry.value]
            value = struct.pack("<Q", at)
        packed.append(struct.pack("<HHQ", tag, entry.type, entry.count) + value)
    return b"".join([*packed, struct.pack("<Q", following)])
