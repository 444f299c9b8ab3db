"""The checksum of a whole part, between its pages and its foot.

Parquet has checksums of pages and none of their headers and of the foot: with one bit of these
flipped a file may well be read, with fewer numbers in it. Readers find the foot from the end of
the file and pages from the foot, so that what lies between is nothing to those that do not look.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from struct import Struct
from zlib import crc32

MARK = b"routeprf"
_SEAL = Struct("<8sI")
_END = Struct("<I4s")
"""Length of the foot, and Parquet's own mark."""


def seal(path: Path) -> None:
    """Put the checksum into a Parquet file that was just written.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("r+b") as file:
        data = file.read()
        place = _foot(data)
        file.seek(place)
        file.write(_SEAL.pack(MARK, crc32(data)))
        file.write(data[place:])


def broken(path: Path) -> bool:
    """Whether a part has a checksum and is not what it was made of.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        foot = _foot(data)
        place = foot - _SEAL.size
        if place < 0:
            return False
        mark, due = _SEAL.unpack_from(data, place)
        if mark != MARK:
            return False
        with memoryview(data) as view, view[:place] as pages, view[foot:] as rest:
            return crc32(rest, crc32(pages)) != int(due)


def _foot(data: bytes | mmap.mmap) -> int:
    """Where a Parquet file's foot begins; negative where it has none."""
    if len(data) < _END.size:
        return -1
    length, _ = _END.unpack_from(data, len(data) - _END.size)
    return len(data) - _END.size - int(length)
