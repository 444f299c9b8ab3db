"""The pyramid of a recording that is followed: what is kept of it, and keeping what is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from routeprof.recording.batch import Batch, merged
from routeprof.recording.groups import SIZE, Group
from routeprof.recording.pyramid import Pyramid
from routeprof.recording.reader import Part
from routeprof.recording.schema import RecordingInfo

STRETCHES = 16
"""Of so many groups a recording is at least; one that is too short for it is read part by part."""

_TOGETHER = 16


class Kept:
    """Groups of the parts that were there when the recording was first seen.

    Parts that come later are followed one by one; whoever opens the recording next groups them.
    """

    def __init__(self, parts: Sequence[Part], info: RecordingInfo) -> None:
        self._parts = parts
        self._info = info
        most = len(parts) // STRETCHES
        self._pyramid = Pyramid(parts if most >= SIZE else (), info)
        self._known = self._pyramid.known(most=most)
        self._group: dict[Path, tuple[int, Group]] | None = None
        self._waiting: dict[Path, list[Batch]] = {}
        self._missing: dict[Path, int] = {}

    def known(self) -> Iterator[tuple[Sequence[Part], Batch]]:
        """Parts and their sums, each once; it may be left and asked again.

        Positions count from the first of these parts.
        """
        for group, batch in self._known:
            if batch is not None:
                totals = replace(batch.totals, windows=batch.totals.windows.widened())
                start = group.places.start
                held = batch.held - np.array([start, 0, 0, 0])
                own = self._parts[start : group.places.stop]
                yield own, replace(batch, totals=totals, held=held)

    def add(self, part: Part, batch: Batch) -> None:
        """Take the sums of a part that was read, and keep those of its group when it is whole.

        Args:
            batch: of this part alone, at position 0.
        """
        if self._group is None:
            self._group = {
                self._parts[place].path: (place, group)
                for group in self._pyramid.lowest()
                for place in group.places
            }
        if part.path not in self._group:
            return
        place, group = self._group[part.path]
        held = batch.held.copy()
        held[:, 0] = place
        own = self._waiting.setdefault(group.path, [])
        own.append(replace(batch, held=held))
        missing = self._missing.get(group.path, len(group.places)) - 1
        self._missing[group.path] = missing
        if len(own) == _TOGETHER or not missing:
            own[:] = [merged(own, self._info)]
        if not missing:
            self._pyramid.keep(group, own[0])
            del self._waiting[group.path]

    def finish(self) -> None:
        """All parts were read: put groups together, where something was added."""
        if self._group is not None:
            self._pyramid.build()
            self._waiting.clear()
