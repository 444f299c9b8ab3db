"""Sums over stretches of time: a range of windows without reading all its parts again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from routeprof.dashboards.live.thinning import joined
from routeprof.recording.fold import Totals, fold, merge, merge_exact
from routeprof.recording.reader import Part
from routeprof.recording.schema import RecordingInfo

FEWEST, MOST = 16, 128
"""Stretches that a recording is kept in; the more, the less of a range is read from disk."""

BYTES = 256 << 20
"""What they may take together, as far as FEWEST allows."""


@dataclass(frozen=True)
class Span:
    """Neighbouring parts and their sum.

    Attributes:
        first, last: the lowest and the highest end of their windows, seconds since the epoch.
        totals: their sum, floats in ``exact`` alone; in its timeline they are one window.
    """

    parts: tuple[Part, ...]
    first: float
    last: float
    totals: Totals


class Spans:
    """The sum of a recording by stretches of time, in bounded memory."""

    def __init__(self, info: RecordingInfo) -> None:
        self._info = info
        self._spans: list[Span] = []

    def add(self, parts: Sequence[Part], totals: Totals) -> None:
        """Add neighbouring parts; where there are too many stretches, the shortest two join."""
        ends = totals.windows.end
        if not len(ends):
            return
        totals = replace(totals, windows=joined(totals.windows))
        self._spans.append(Span(tuple(parts), float(ends.min()), float(ends.max()), totals))
        room = BYTES // max(_bytes(totals), 1)
        while len(self._spans) > min(max(room, FEWEST), MOST):
            sizes = np.array([len(span.parts) for span in self._spans])
            self._join(int(np.argmin(sizes[:-1] + sizes[1:])))

    def _join(self, place: int) -> None:
        one, other = self._spans[place : place + 2]
        totals = merge_exact([one.totals, other.totals], self._info)
        self._spans[place : place + 2] = [
            Span(
                one.parts + other.parts,
                min(one.first, other.first),
                max(one.last, other.last),
                replace(totals, windows=joined(totals.windows)),
            )
        ]

    def all(self) -> tuple[Span, ...]:
        """The stretches, the earliest first; those of several ranks lie side by side."""
        return tuple(sorted(self._spans, key=lambda span: span.first))

    def between(self, between: tuple[float, float]) -> Totals:
        """What ``fold`` gives for windows that end in this range of seconds since the epoch.

        But for the timeline, in which the windows of a stretch are one.
        """
        low, high = between
        touched = [span for span in self._spans if span.first <= high and low < span.last]
        inside = [span for span in touched if _within(span, between)]
        edges = [part for span in touched if not _within(span, between) for part in span.parts]
        sums = [span.totals for span in inside]
        return merge([*sums, fold(edges, self._info, between=between)], self._info)


def _within(span: Span, between: tuple[float, float]) -> bool:
    return between[0] < span.first and span.last <= between[1]


def _bytes(totals: Totals) -> int:
    arrays = [*totals.sums.values(), *totals.lists.values()]
    for exact in totals.exact.values():
        arrays += [exact.seen, *exact.digits.values()]
    return sum(array.nbytes for array in arrays)
