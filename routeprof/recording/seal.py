"""Checksums of a whole part and of each of its row groups, between its pages and its foot.

Parquet has checksums of pages and none of their headers and of the foot: with one bit of these
flipped a file may well be read, with fewer numbers in it. Readers find the foot from the end of
the file and pages from the foot, so that what lies between is nothing to those that do not look.

A part of several row groups has, before the whole one, a checksum of each and of the foot, for who
reads only some: 12 bytes a row group (where it starts, and its CRC-32), and 16 that tell of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum, auto
from itertools import pairwise
from os import SEEK_END
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO
from zlib import crc32

MARK = b"routeprf"
_SEAL = Struct("<8sI")
_GROUP = Struct("<QI")
_GROUPS_MARK = b"routegrp"
_GROUPS = Struct("<8sII")
"""Mark, number of row groups, and CRC-32 of the foot."""
_END = Struct("<I4s")
"""Length of the foot, and Parquet's own mark."""

_PIECE = 1 << 20


class Seal(Enum):
    """What a part's checksum says."""

    INTACT = auto()
    BROKEN = auto()
    ABSENT = auto()


def seal(path: Path) -> None:
    """Put the checksums into a Parquet file that was just written.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("r+b") as file:
        data = file.read()
        place = _foot(data, len(data))
        pages, foot = data[:place] + _of_groups(data, place), data[place:]
        file.seek(place)
        file.write(pages[place:])
        file.write(_SEAL.pack(MARK, crc32(foot, crc32(pages))))
        file.write(foot)


def seal_of(path: Path, groups: Collection[int] | None = None) -> Seal:
    """Whether a part is what it was made of.

    Args:
        groups: numbers of the row groups that are to be read, the only ones that are looked at;
            None for all of the file.

    Raises:
        OSError: it cannot be read.
    """
    # Not mapped into memory: a page that a file server cannot give would end the process.
    with path.open("rb") as file:
        size = file.seek(0, SEEK_END)
        if size < _END.size:
            return Seal.ABSENT
        file.seek(size - _END.size)
        place = _foot(file.read(), size) - _SEAL.size
        if place < 0:
            return Seal.ABSENT
        file.seek(place)
        head, foot = file.read(_SEAL.size), file.read()
        if not head.startswith(MARK):
            return Seal.ABSENT
        if groups is not None and (known := _groups(file, place)):
            return _seal_of_groups(file, known, crc32(foot), groups)
        found = crc32(foot, _crc(file, 0, place))
        return Seal.INTACT if found == _SEAL.unpack(head)[1] else Seal.BROKEN


def _of_groups(data: bytes, place: int) -> bytes:
    """The checksums of row groups and of the foot at ``place``; nothing for a single one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(pa.BufferReader(data))
    if metadata.num_row_groups < 2:
        return b""
    starts = [_start(metadata.row_group(number)) for number in range(metadata.num_row_groups)]
    ranges = pairwise([*starts, place])
    entries = [_GROUP.pack(start, crc32(data[start:end])) for start, end in ranges]
    return b"".join(entries) + _GROUPS.pack(_GROUPS_MARK, len(entries), crc32(data[place:]))


def _start(group: Any) -> int:
    """Where the first page of a row group is."""
    first = group.column(0)
    places = (first.dictionary_page_offset, first.data_page_offset)
    return min(int(place) for place in places if place)


def _groups(file: BinaryIO, place: int) -> tuple[list[tuple[int, int, int]], int] | None:
    """Start, end and checksum of each row group, and the foot's checksum; None without any."""
    if place < _GROUPS.size:
        return None
    file.seek(place - _GROUPS.size)
    mark, count, foot = _GROUPS.unpack(file.read(_GROUPS.size))
    first = place - _GROUPS.size - count * _GROUP.size
    if mark != _GROUPS_MARK or first < 0:
        return None
    file.seek(first)
    entries = list(_GROUP.iter_unpack(file.read(count * _GROUP.size)))
    ends = [*(start for start, _ in entries[1:]), first]
    return [(start, end, crc) for (start, crc), end in zip(entries, ends, strict=True)], foot


def _seal_of_groups(
    file: BinaryIO,
    known: tuple[list[tuple[int, int, int]], int],
    foot: int,
    groups: Collection[int],
) -> Seal:
    entries, due = known
    if foot != due or max(groups, default=-1) >= len(entries):
        return Seal.BROKEN
    wanted = [entries[number] for number in groups]
    placed = all(0 <= start <= end <= entries[-1][1] for start, end, _ in wanted)
    intact = placed and all(_crc(file, start, end) == crc for start, end, crc in wanted)
    return Seal.INTACT if intact else Seal.BROKEN


def _crc(file: BinaryIO, start: int, end: int) -> int:
    """CRC-32 of a range of the file."""
    file.seek(start)
    found = 0
    for size in _pieces(end - start):
        found = crc32(file.read(size), found)
    return found


def _pieces(size: int) -> Iterator[int]:
    for start in range(0, size, _PIECE):
        yield min(_PIECE, size - start)


def _foot(end: bytes, size: int) -> int:
    """Where the foot of a Parquet file begins; negative where it has none.

    Args:
        end: the last bytes of the file.
        size: of the file, in bytes.
    """
    length, _ = _END.unpack(end[-_END.size :])
    return size - _END.size - int(length)
