"""fold: the sum of additive parts, in any order, by any executor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from routeprof.recording.batch import Batch, Tree, copies, copy_of, fold_batch, merged
from routeprof.recording.fold_part import exact_part, fold_part
from routeprof.recording.groups import Group, directory_of
from routeprof.recording.pyramid import Pyramid
from routeprof.recording.reader import Part
from routeprof.recording.schema import RecordingInfo
from routeprof.recording.spread import batches, found_anywhere, spread
from routeprof.recording.totals import (
    LISTS,
    SUMS,
    Key,
    Totals,
    Windows,
    key_order,
    merge,
    merge_exact,
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
    pyramid: bool = True,
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
        pyramid: take what is kept of groups of parts beside them, and keep what is not.

    Raises:
        OverflowingError: whole numbers add up to 2^63 or more.
    """
    parts = sorted(
        found_anywhere(parts, executor), key=lambda part: (directory_of(part), part.number)
    )
    kept = Pyramid(parts if pyramid and columns is None else (), info)
    one = partial(fold_batch, info=info, between=between, columns=columns)
    job = _Job(parts, info, one, kept, between, executor, progress)
    found = job.run(None)
    copied = copies(parts, found.held)
    if found.skipped != copied.keys():
        found = job.run(frozenset(copied))
    if between is None:
        kept.build()
    return merge([found.totals], info, tuple(copied.values()))


def repeated(part: Part, totals: Totals, seen: dict[tuple[int, int], Part]) -> str:
    """One line if another part holds windows of this one; else they are added to ``seen``.

    Args:
        seen: the part that holds each window, by rank and number of the window.
    """
    windows = [(part.rank, int(number)) for number in np.unique(totals.windows.window)]
    twice = [seen[window] for window in windows if window in seen]
    if twice:
        return copy_of(part, twice[0])
    seen.update(dict.fromkeys(windows, part))
    return ""


# -- batches

Task = Sequence[tuple[int, Part]]


@dataclass(frozen=True)
class _Job:
    """What is to be folded, and how; see ``fold``."""

    parts: Sequence[Part]
    info: RecordingInfo
    one: Callable[..., Batch]
    pyramid: Pyramid
    between: tuple[float, float] | None
    executor: Executor | None
    progress: Progress | None

    def run(self, skip: frozenset[int] | None) -> Batch:
        """Fold all of it.

        Args:
            skip: as in ``fold_batch``.
        """
        tree, left = Tree(self.info), np.ones(len(self.parts), dtype=bool)
        for group, batch in self.pyramid.known(skip or frozenset(), self.between):
            left[group.places] = False
            if batch is not None:
                tree.add(group.places.start, batch)
        groups = [] if self.between else self.pyramid.lowest()
        unknown = [group for group in groups if left[group.places].all()]
        tasks = self._tasks(left, unknown)
        whole = _Whole(unknown, self)
        for task, batch in spread(tasks, partial(self.one, skip=skip), self.executor):
            left[[place for place, _ in task]] = False
            if self.progress is not None:
                self.progress(int((~left).sum()), len(self.parts))
            for place, ready in whole.with_task(task, batch):
                tree.add(place, ready)
        return tree.sum()

    def _tasks(self, left: NDArray[np.bool_], groups: Sequence[Group]) -> list[Task]:
        """Batches of the parts that are left; none is of a group and of other parts too."""
        alone = left.copy()
        for group in groups:
            alone[group.places] = False
        pieces = [*(group.places for group in groups), np.flatnonzero(alone).tolist()]
        numbered = ([(place, self.parts[place]) for place in places] for places in pieces)
        return [task for piece in numbered for task in batches(piece, self.executor)]


class _Whole:
    """Puts batches together that are of one group, and keeps the group's sums."""

    def __init__(self, groups: Sequence[Group], job: _Job) -> None:
        self._job = job
        self._group = {place: group for group in groups for place in group.places}
        self._batches: dict[int, list[Batch]] = {group.places.start: [] for group in groups}
        self._missing = {group.places.start: len(group.places) for group in groups}

    def with_task(self, task: Task, batch: Batch) -> Iterator[tuple[int, Batch]]:
        """A batch with its place, when it is of no group or when it was the group's last."""
        group = self._group.get(task[0][0])
        if group is None:
            yield task[0][0], batch
            return
        place = group.places.start
        self._batches[place].append(batch)
        self._missing[place] -= len(task)
        if not self._missing[place]:
            whole = merged(self._batches.pop(place), self._job.info)
            if not copies(self._job.parts, whole.held):
                self._job.pyramid.keep(group, whole)
            yield place, whole
