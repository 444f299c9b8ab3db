"""The checksum of a whole part, between its pages and its foot.

Parquet has checksums of pages and none of their headers and of the foot: with one bit of these
flipped a file may well be read, with fewer numbers in it. Readers find the foot from the end of
the file and pages from the foot, so that what lies between is nothing to those that do not look.
"""

from __future__ import annotations

from os import SEEK_END
from pathlib import Path
from struct import Struct
from zlib import crc32

MARK = b"routeprf"
_SEAL = Struct("<8sI")
_END = Struct("<I4s")
"""Length of the foot, and Parquet's own mark."""

_PIECE = 1 << 20


def seal(path: Path) -> None:
    """Put the checksum into a Parquet file that was just written.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("r+b") as file:
        data = file.read()
        place = _foot(data, len(data))
        file.seek(place)
        file.write(_SEAL.pack(MARK, crc32(data)))
        file.write(data[place:])


def broken(path: Path) -> bool:
    """Whether a part has a checksum and is not what it was made of.

    Raises:
        OSError: it cannot be read.
    """
    # Not mapped into memory: a page that a file server cannot give would end the process.
    with path.open("rb") as file:
        size = file.seek(0, SEEK_END)
        if size < _END.size:
            return False
        file.seek(size - _END.size)
        place = _foot(file.read(), size) - _SEAL.size
        if place < 0:
            return False
        file.seek(place)
        head, rest = file.read(_SEAL.size), file.read()
        if not head.startswith(MARK):
            return False
        file.seek(0)
        found = 0
        for start in range(0, place, _PIECE):
            found = crc32(file.read(min(_PIECE, place - start)), found)
        return crc32(rest, found).to_bytes(4, "little") != head[len(MARK) :]


def _foot(end: bytes, size: int) -> int:
    """Where the foot of a Parquet file begins; negative where it has none.

    Args:
        end: the last bytes of the file.
        size: of the file, in bytes.
    """
    length, _ = _END.unpack(end[-_END.size :])
    return size - _END.size - int(length)
