"""fold: the sum of additive parts, in any order, by any executor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeprof.recording.fold_part import exact_part, fold_part
from routeprof.recording.reader import Part
from routeprof.recording.schema import RecordingInfo
from routeprof.recording.spread import BATCH, batches, found_anywhere, spread
from routeprof.recording.totals import (
    LISTS,
    SUMS,
    Key,
    Totals,
    Windows,
    key_order,
    merge,
    merge_exact,
    narrowed,
)

__all__ = [
    "LISTS",
    "SUMS",
    "Key",
    "Totals",
    "Windows",
    "exact_part",
    "fold",
    "fold_part",
    "key_order",
    "merge",
    "merge_exact",
    "repeated",
]

Progress = Callable[[int, int], None]
"""Told how many parts are done, and of how many."""


def fold(
    parts: Sequence[Part],
    info: RecordingInfo,
    *,
    executor: Executor | None = None,
    between: tuple[float, float] | None = None,
    columns: Collection[str] | None = None,
    progress: Progress | None = None,
) -> Totals:
    """Add up window parts.

    The result does not depend on the order in which they are given, on the executor, nor on how
    they are split up and merged, to the last bit: float sums are the true ones, rounded once. A
    part with windows that another part of its rank holds too adds nothing but a message.

    Parts are read a few at a time; what is in memory does not grow with their number, but for
    the timeline.

    Args:
        executor: any ``concurrent.futures`` executor; where its processes break, the rest is
            folded in this one.
        between: seconds since the epoch; only windows that end after the first and not
            after the second are added.
        columns: the columns to read, for speed; sums of all others are as if nobody knew them.
        progress: called after each batch.

    Raises:
        OverflowingError: whole numbers add up to 2^63 or more.
    """
    parts = sorted(
        found_anywhere(parts, executor), key=lambda part: (str(part.path.parent), part.number)
    )
    one = partial(_fold_batch, info=info, between=between, columns=columns)
    found = _fold_all(parts, info, one, None, executor, progress)
    copies = _copies(parts, found.held)
    if found.skipped != copies.keys():
        found = _fold_all(parts, info, one, frozenset(copies), executor, progress)
    return merge([found.totals], info, tuple(copies.values()))


def repeated(part: Part, totals: Totals, seen: dict[tuple[int, int], Part]) -> str:
    """One line if another part holds windows of this one; else they are added to ``seen``.

    Args:
        seen: the part that holds each window, by rank and number of the window.
    """
    windows = [(part.rank, int(number)) for number in np.unique(totals.windows.window)]
    twice = [seen[window] for window in windows if window in seen]
    if twice:
        return _copy_of(part, twice[0])
    seen.update(dict.fromkeys(windows, part))
    return ""


def _copy_of(part: Part, other: Part) -> str:
    return f"{part.label} holds windows that {other.label} holds too: one is a copy"


# -- batches


@dataclass(frozen=True)
class _Batch:
    """What was folded of some of the parts.

    Attributes:
        held: int64 [runs, 4]: position of a part, its rank, and the first and last window of a
            run that it holds; of all parts, also of those that were left out.
        skipped: positions of the parts left out as copies.
    """

    totals: Totals
    held: NDArray[np.int64]
    skipped: frozenset[int]


def _fold_batch(
    numbered: Sequence[tuple[int, Part]],
    skip: frozenset[int] | None,
    *,
    info: RecordingInfo,
    between: tuple[float, float] | None,
    columns: Collection[str] | None,
) -> _Batch:
    """Fold some parts.

    Args:
        skip: positions of the parts to leave out; None to leave out copies among these alone.
    """
    read = [(place, part, exact_part(part, info, between, columns)) for place, part in numbered]
    runs = [_runs(place, part.rank, totals) for place, part, totals in read]
    held = np.concatenate([np.zeros((0, 4), dtype=np.int64), *runs])
    if skip is None:
        skip = frozenset(_copies(dict(numbered), held))
    kept = [totals for place, _, totals in read if place not in skip]
    return _Batch(merge_exact(kept, info), held, skip & {place for place, _ in numbered})


def _runs(place: int, rank: int, totals: Totals) -> NDArray[np.int64]:
    windows = np.unique(totals.windows.window)
    first = np.flatnonzero(np.concatenate([[True], np.diff(windows) > 1])[: len(windows)])
    last = np.append(first[1:] - 1, len(windows) - 1)[: len(first)]
    runs = np.empty((len(first), 4), dtype=np.int64)
    runs[:, 0], runs[:, 1] = place, rank
    runs[:, 2], runs[:, 3] = windows[first], windows[last]
    return runs


def _fold_all(
    parts: Sequence[Part],
    info: RecordingInfo,
    one: Callable[..., _Batch],
    skip: frozenset[int] | None,
    executor: Executor | None,
    progress: Progress | None,
) -> _Batch:
    numbered = list(enumerate(parts))
    tree, done = _Tree(info), 0
    for batch_parts, batch in spread(
        batches(numbered, executor), partial(one, skip=skip), executor
    ):
        tree.add(batch_parts[0][0], batch)
        done += len(batch_parts)
        if progress is not None:
            progress(done, len(parts))
    return tree.sum()


class _Tree:
    """Sums of batches, merged when there are ``BATCH`` of one size: each is merged few times.

    Their timelines wait, in narrow types, and are put together once.
    """

    def __init__(self, info: RecordingInfo) -> None:
        self._info = info
        self._levels: list[list[_Batch]] = [[]]
        self._timelines: list[tuple[int, tuple[Key, ...], dict[str, NDArray[Any]]]] = []

    def add(self, place: int, batch: _Batch) -> None:
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
            self._levels[level + 1].append(self._merged(self._levels[level]))
            self._levels[level] = []
            level += 1

    def sum(self) -> _Batch:
        """All that were added."""
        found = self._merged([batch for level in self._levels for batch in level])
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

    def _merged(self, some: Sequence[_Batch]) -> _Batch:
        held = np.concatenate([np.zeros((0, 4), dtype=np.int64), *(one.held for one in some)])
        skipped = frozenset[int]().union(*(one.skipped for one in some))
        return _Batch(merge_exact([one.totals for one in some], self._info), held, skipped)


# -- copies


def _copies(parts: Sequence[Part] | dict[int, Part], held: NDArray[np.int64]) -> dict[int, str]:
    """Positions of parts with windows that a part before them holds too, and what to say."""
    copies: dict[int, str] = {}
    for rank in np.unique(held[:, 1]):
        runs = held[held[:, 1] == rank]
        order = np.argsort(runs[:, 2])
        if (runs[order[1:], 2] > runs[order[:-1], 3]).all():
            continue
        seen: dict[int, int] = {}
        for place in np.unique(runs[:, 0]).tolist():
            windows = _numbers(runs[runs[:, 0] == place])
            twice = [seen[window] for window in windows if window in seen]
            if twice:
                copies[place] = _copy_of(parts[place], parts[twice[0]])
            else:
                seen.update(dict.fromkeys(windows, place))
    return copies


def _numbers(runs: NDArray[np.int64]) -> list[int]:
    spans: Iterable[range] = (range(first, last + 1) for first, last in runs[:, 2:].tolist())
    return [number for span in spans for number in span]
