"""The pyramid: sums of many parts, kept beside them, so that they need not be read again.

It is a cache: without it, all is as it was, only slower. Whatever is wrong with a file of it, and
wherever none can be written, parts are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from shutil import disk_usage
from time import time

from routeprof.recording.batch import Batch, Tree
from routeprof.recording.groups import Group, directory_of, groups_of
from routeprof.recording.places import is_remote
from routeprof.recording.pyramid_file import Kept, read, touched, write
from routeprof.recording.reader import Part
from routeprof.recording.schema import RecordingInfo

ROOM = 256 << 20
"""Bytes to leave free on the disk, for whoever records."""

_STALE_SECONDS = 600.0
_FILE = re.compile(r"^\d+-\d+$")


class Pyramid:
    """The groups of some parts that have all their files among them, and will get no more.

    Attributes:
        groups: the largest of them, in the order of the parts.
    """

    def __init__(self, parts: Sequence[Part], info: RecordingInfo) -> None:
        """Of parts in the order of their directory and number."""
        self._info = info
        self._good: set[Path] = set()
        self._names: dict[Path, set[str]] = {}
        self.groups: list[Group] = []
        start = 0
        for _, some in groupby(parts, key=directory_of):
            own = list(some)
            if not is_remote(own[0].path):
                found, names = groups_of(own, start, info)
                self.groups += found
                if found:
                    self._names[found[0].path.parent] = names
            start += len(own)

    def known(
        self,
        skip: frozenset[int] = frozenset(),
        between: tuple[float, float] | None = None,
        most: int | None = None,
    ) -> Iterator[tuple[Group, Batch | None]]:
        """Groups whose sums are kept, the largest first, with the sums; None where all of their
        windows are outside of the range.

        Args:
            skip: positions of parts that must not be in them.
            between: seconds since the epoch; groups of which some windows end in it and others
                do not are left out.
            most: parts of a group; larger ones are left out.
        """
        waiting = self.groups[::-1]
        while waiting:
            group = waiting.pop()
            small = most is None or len(group.places) <= most
            kept = self._kept(group) if small and skip.isdisjoint(group.places) else None
            if kept is not None and between is not None and kept.ends.outside(between):
                yield group, None
            elif (
                kept is not None
                and (between is None or kept.ends.within(between))
                and (batch := _unpacked(kept, group)) is not None
            ):
                yield group, batch
            else:
                waiting += reversed(group.below)

    def lowest(self) -> list[Group]:
        """The smallest groups: those that parts are folded in."""
        found, waiting = [], self.groups[::-1]
        while waiting:
            group = waiting.pop()
            waiting += reversed(group.below)
            if not group.below:
                found.append(group)
        return found

    def keep(self, group: Group, batch: Batch) -> None:
        """Write the sums of a group that were not kept, where there is room for them.

        Groups with parts that could not be read, or that are copies, are not kept: there is
        something to say of them. Nor are those whose files may change without a trace: the next
        to look will know that time went on.
        """
        if batch.totals.unread or batch.skipped:
            return
        with suppress(OSError):
            if not group.settled:
                touched(group.path.parent)
            elif disk_usage(group.path.parents[2]).free >= ROOM:
                write(group.path, group.identity, batch, group.places.start)
                self._good.add(group.path)

    def build(self) -> None:
        """Write the sums of groups of groups that are not kept, and remove what is of no use."""
        for group in self.groups:
            self._build(group)
        for folder, names in self._names.items():
            with suppress(OSError):
                _tidy(folder, names)

    def _build(self, group: Group) -> bool:
        """Whether the group's sums are kept now."""
        if group.path in self._good:
            return True
        built = [self._build(child) for child in group.below]
        if not built or not all(built):
            return False
        tree = Tree(self._info)
        for child in group.below:
            kept = self._kept(child)
            batch = _unpacked(kept, child) if kept is not None else None
            if batch is None:
                return False
            tree.add(child.places.start, batch)
        self.keep(group, tree.sum())
        return group.path in self._good

    def _kept(self, group: Group) -> Kept | None:
        kept = read(group.path, group.identity)
        (self._good.discard if kept is None else self._good.add)(group.path)
        return kept


def _unpacked(kept: Kept, group: Group) -> Batch | None:
    try:
        return kept.batch(group.rank, group.places.start)
    except (ValueError, KeyError, TypeError, OSError):  # pyarrow's own are among them
        return None


def _tidy(folder: Path, names: set[str]) -> None:
    """Remove files of groups that no longer have parts, and what was never finished."""
    for path in folder.iterdir():
        gone = _FILE.match(path.name) is not None and path.name not in names
        if gone or (path.suffix == ".tmp" and path.stat().st_mtime < time() - _STALE_SECONDS):
            path.unlink(missing_ok=True)
