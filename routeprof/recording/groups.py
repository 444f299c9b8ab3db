"""Groups of a rank's parts, and what tells whether their files are still the same.

Parts whose numbers lie between two multiples of 16 are a group of level 1; eight neighbouring
groups are one of the next level. The identity of a group is made of its files' names, sizes,
times and inodes, from one listing of the directory.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

from routeprof import __version__
from routeprof.recording.reader import Part
from routeprof.recording.schema import RANK_FILE, RecordingInfo

FOLDER = "pyramid"
SIZE = 16
"""Parts of a group of level 1; so many are read at most at a recording's end."""

FANOUT = 8
"""Groups of a group of the next level."""

FEWEST = 64
"""A rank with no more parts than these has no groups: it is read quickly."""

_FORMAT = 1
_PART = re.compile(r"^(?:part|coarse)-(\d+)")


@dataclass(frozen=True)
class Group:
    """Neighbouring parts of a rank.

    Attributes:
        places: their positions among all parts.
        number: of the group among those of its level.
        rank: its number among all that were opened.
        path: where its sums are kept.
        identity: another one when one of its files, or how it is read, is another.
        settled: whether any change after the listing would show in the times of the files.
        below: the groups that it is made of; none at level 1.
    """

    places: range
    number: int
    rank: int
    path: Path
    identity: str
    settled: bool
    below: tuple[Group, ...] = ()


def directory_of(part: Part) -> str:
    """Where a part is; of a hundred thousand parts ``path.parent`` would take a second."""
    return str(part.path).rpartition("/")[0]


def groups_of(
    parts: Sequence[Part], start: int, info: RecordingInfo
) -> tuple[list[Group], set[str]]:
    """The largest groups of a rank's parts, and the names of all files that may be of use.

    A group has all files of its range of numbers; the last one, which may get more, is none.

    Args:
        parts: of one directory, in the order of their numbers.
        start: position of the first one.
    """
    numbers = [part.number for part in parts]
    if len(parts) <= FEWEST:
        return [], set()
    directory = parts[0].path.parent
    folder = directory.parent / FOLDER / directory.name
    try:
        listed = _listed(directory, folder, parts)
    except OSError:
        return [], set()
    level, width = 1, SIZE
    groups = list(_first_level(folder, parts, numbers, start, listed, info))
    found = list[Group]()
    while groups:
        level, width = level + 1, width * FANOUT
        strange = {number * SIZE // width for number in listed.strange}
        larger = list[Group]()
        for number, some in groupby(groups, key=lambda group: group.number // FANOUT):
            own = tuple(some)
            inside = range(
                start + bisect_left(numbers, number * width),
                start + bisect_left(numbers, (number + 1) * width),
            )
            covered = sum(len(group.places) for group in own) == len(inside)
            if covered and number < numbers[-1] // width and number not in strange:
                larger.append(_larger(own, inside, number, _name(level, number)))
            else:
                found += own
        groups = larger
    names = set(_names({number // SIZE for number in numbers} | listed.strange))
    return sorted(found, key=lambda group: group.places.start), names


def _larger(own: tuple[Group, ...], places: range, number: int, name: str) -> Group:
    settled = all(group.settled for group in own)
    identity = _digest([group.identity for group in own])
    return Group(places, number, own[0].rank, own[0].path.with_name(name), identity, settled, own)


def _first_level(
    folder: Path,
    parts: Sequence[Part],
    numbers: Sequence[int],
    start: int,
    listed: _Listed,
    info: RecordingInfo,
) -> Iterator[Group]:
    context = _context(parts[0], info)
    stop = 0
    while stop < len(parts):
        first, number = stop, numbers[stop] // SIZE
        stop = bisect_left(numbers, (number + 1) * SIZE, first)
        changed = listed.changed[first:stop]
        if number < numbers[-1] // SIZE and number not in listed.strange and min(changed):
            yield Group(
                range(start + first, start + stop),
                number,
                parts[0].rank,
                folder / _name(1, number),
                _digest([context, *listed.stamps[first:stop]]),
                max(changed) < listed.now,
            )


@dataclass(frozen=True)
class _Listed:
    """What is in a rank's directory.

    Attributes:
        now: a time at which the file system's clock was before it was listed. What is changed
            after that has no earlier time.
        stamps: for each part, what is another when its file is.
        changed: for each part, when it was changed, in ns since the epoch; 0 if it is not there.
        strange: numbers of groups with files that are none of the parts.
    """

    now: int
    stamps: list[str]
    changed: list[int]
    strange: set[int]


def _listed(directory: Path, folder: Path, parts: Sequence[Part]) -> _Listed:
    places = {str(part.path).rpartition("/")[2]: place for place, part in enumerate(parts)}
    stamps, changed, strange = [""] * len(parts), [0] * len(parts), set[int]()
    now = max(map(_changed, (directory, folder, directory / RANK_FILE, parts[-1].path)))
    with os.scandir(directory) as entries:
        for entry in entries:
            name = entry.name
            place = places.get(name)
            if place is not None:
                own = entry.stat()
                changed[place] = time = own.st_ctime_ns
                stamps[place] = f"{name}/{own.st_size}/{own.st_mtime_ns}/{time}/{own.st_ino}"
            elif match := _PART.match(name):
                strange.add(int(match.group(1)) // SIZE)
    return _Listed(now, stamps, changed, strange)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_ctime_ns
    except OSError:
        return 0


def _context(part: Part, info: RecordingInfo) -> str:
    """What decides on a part's sums besides its bytes."""
    layers = [(layer.index, layer.kind, layer.experts, layer.top_k) for layer in info.layers]
    return repr((_FORMAT, __version__, layers, info.capacity_factors, part.factors))


def _names(numbers: set[int]) -> Iterator[str]:
    """Names of all files that may be kept.

    Args:
        numbers: of the groups of level 1 that have any files.
    """
    level = 1
    while numbers:
        yield from (_name(level, number) for number in numbers)
        level, numbers = level + 1, {number // FANOUT for number in numbers if max(numbers)}


def _name(level: int, number: int) -> str:
    return f"{level}-{number:06d}"


def _digest(texts: Sequence[str]) -> str:
    return blake2b("\n".join(texts).encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
