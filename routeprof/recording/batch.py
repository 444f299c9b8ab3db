"""Batches: the sums of a few parts, with what it takes to tell copies among all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.recording.fold_part import Ends, ends_of, table_totals
from routeprof.recording.reader import Part, read_part
from routeprof.recording.schema import RecordingInfo
from routeprof.recording.spread import BATCH
from routeprof.recording.totals import Key, Totals, Windows, merge_exact, narrowed


@dataclass(frozen=True)
class Batch:
    """What was folded of some of the parts.

    Attributes:
        totals: floats in ``exact`` alone.
        held: int64 [runs, 4]: position of a part, its rank, and the first and last window of a
            run that it holds; of all parts, also of those that were left out.
        skipped: positions of the parts left out as copies.
        ends: of all rows of these parts, also of those that are on no timeline.
    """

    totals: Totals
    held: NDArray[np.int64]
    skipped: frozenset[int] = frozenset()
    ends: Ends = field(default_factory=Ends)


def fold_batch(
    numbered: Sequence[tuple[int, Part]],
    skip: frozenset[int] | None,
    *,
    info: RecordingInfo,
    between: tuple[float, float] | None,
    columns: Collection[str] | None,
) -> Batch:
    """Fold some parts.

    Args:
        skip: positions of the parts to leave out; None to leave out copies among these alone.
    """
    places = [place for place, _ in numbered]
    read = [fold_one(place, part, info, between, columns) for place, part in numbered]
    held = joined([one.held for one in read])
    if skip is None:
        skip = frozenset(copies(dict(numbered), held))
    kept = [one for place, one in zip(places, read, strict=True) if place not in skip]
    return replace(merged(kept, info), held=held, skipped=skip.intersection(places))


def fold_one(
    place: int,
    part: Part,
    info: RecordingInfo,
    between: tuple[float, float] | None = None,
    columns: Collection[str] | None = None,
) -> Batch:
    """A batch of one part."""
    table = read_part(part, info, columns)
    totals = table_totals(table, part, info, between)
    return Batch(totals, runs(place, part.rank, totals), ends=ends_of(table))


def merged(some: Sequence[Batch], info: RecordingInfo) -> Batch:
    """Several batches as one."""
    ends = Ends()
    for one in some:
        ends = ends.with_these(one.ends)
    skipped = frozenset[int]().union(*(one.skipped for one in some))
    totals = merge_exact([one.totals for one in some], info)
    return Batch(totals, joined([one.held for one in some]), skipped, ends)


def runs(place: int, rank: int, totals: Totals) -> NDArray[np.int64]:
    """``Batch.held`` of one part."""
    windows = np.unique(totals.windows.window)
    first = np.flatnonzero(np.concatenate([[True], np.diff(windows) > 1])[: len(windows)])
    last = np.append(first[1:] - 1, len(windows) - 1)[: len(first)]
    found = np.empty((len(first), 4), dtype=np.int64)
    found[:, 0], found[:, 1] = place, rank
    found[:, 2], found[:, 3] = windows[first], windows[last]
    return found


def joined(held: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """``Batch.held`` of several."""
    return np.concatenate([np.zeros((0, 4), dtype=np.int64), *held])


def numbers(held: NDArray[np.int64]) -> list[int]:
    """The windows of some runs, one by one."""
    spans: Iterable[range] = (range(first, last + 1) for first, last in held[:, 2:].tolist())
    return [number for span in spans for number in span]


def copies(parts: Sequence[Part] | Mapping[int, Part], held: NDArray[np.int64]) -> dict[int, str]:
    """Positions of parts with windows that a part before them holds too, and what to say."""
    found: dict[int, str] = {}
    for rank in np.unique(held[:, 1]):
        own = held[held[:, 1] == rank]
        order = np.argsort(own[:, 2])
        if (own[order[1:], 2] > own[order[:-1], 3]).all():
            continue
        seen: dict[int, int] = {}
        for place in np.unique(own[:, 0]).tolist():
            windows = numbers(own[own[:, 0] == place])
            twice = [seen[window] for window in windows if window in seen]
            if twice:
                found[place] = copy_of(parts[place], parts[twice[0]])
            else:
                seen.update(dict.fromkeys(windows, place))
    return found


def copy_of(part: Part, other: Part) -> str:
    """What to say of a part whose windows another one holds too."""
    return f"{part.label} holds windows that {other.label} holds too: one is a copy"


class Tree:
    """Sums of batches, merged when there are ``BATCH`` of one size: each is merged few times.

    Their timelines wait, in narrow types, and are put together once.
    """

    def __init__(self, info: RecordingInfo) -> None:
        self._info = info
        self._levels: list[list[Batch]] = [[]]
        self._timelines: list[tuple[int, tuple[Key, ...], dict[str, NDArray[Any]]]] = []

    def add(self, place: int, batch: Batch) -> None:
        """Take one more.

        Args:
            place: any number by which timelines are roughly in order.
        """
        totals, level = batch.totals, 0
        self._timelines.append((place, totals.keys, totals.windows.__getstate__()))
        none = Windows.empty(len(self._info.capacity_factors))
        self._levels[0].append(replace(batch, totals=replace(totals, windows=none)))
        while len(self._levels[level]) == BATCH:
            if level + 1 == len(self._levels):
                self._levels.append([])
            self._levels[level + 1].append(merged(self._levels[level], self._info))
            self._levels[level] = []
            level += 1

    def sum(self) -> Batch:
        """All that were added."""
        found = merged([batch for level in self._levels for batch in level], self._info)
        windows = self._timeline(found.totals.keys)
        return replace(found, totals=replace(found.totals, windows=windows))

    def _timeline(self, keys: tuple[Key, ...]) -> Windows:
        numbers = {key: number for number, key in enumerate(keys)}
        tables = sorted(self._timelines, key=itemgetter(0))
        for _, own, columns in tables:
            place = np.array([numbers[key] for key in own], dtype=np.int64)
            columns["key"] = narrowed(place[columns["key"]])
        empty = Windows.empty(len(self._info.capacity_factors))
        return Windows(
            **{
                name: np.concatenate([none, *(columns[name] for *_, columns in tables)])
                for name, none in empty.__dict__.items()
            }
        )
