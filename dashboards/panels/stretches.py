"""Load over time from sums of stretches of time, which may overlap where ranks run side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routeprof.dashboards.live.spans import Span
from routeprof.recording.fold import Key

_SHORTEST = 1e-3


@dataclass(frozen=True)
class Stretches:
    """A layer's assignments by stretches of time that follow one another.

    Attributes:
        edges: float64 [stretches + 1], seconds since the epoch.
        counts: float64 [stretches, experts].
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.float64]

    @property
    def middles(self) -> NDArray[np.float64]:
        """The middle of each stretch."""
        return np.asarray((self.edges[:-1] + self.edges[1:]) / 2)


def stretches(
    spans: Sequence[Span], wanted: Callable[[Key], bool], position: int, experts: int
) -> Stretches:
    """One layer's counts over time.

    Every start and every end of a span begins a new stretch. A span that lies in several of them
    is spread evenly over its time, so that the sum stays what it was; spans of one rank follow
    one another and stay whole.

    Args:
        wanted: which phases and tags are counted.
        position: the layer's place in ``RecordingInfo.layers``.
    """
    if not spans:
        return Stretches(np.zeros(1), np.zeros((0, experts)))
    starts = np.array([span.totals.windows.start.min() for span in spans])
    ends = np.maximum([span.last for span in spans], starts + _SHORTEST)
    counts = np.stack([_counts(span, wanted, position, experts) for span in spans])
    edges = _edges(starts, ends)
    overlap = np.minimum(ends[:, None], edges[1:]) - np.maximum(starts[:, None], edges[:-1])
    weights = np.maximum(overlap, 0) / (ends - starts)[:, None]
    return Stretches(edges, weights.T @ counts)


def _counts(
    span: Span, wanted: Callable[[Key], bool], position: int, experts: int
) -> NDArray[np.float64]:
    numbers = [number for number, key in enumerate(span.totals.keys) if wanted(key)]
    summed = span.totals.lists["counts"][numbers, position, :experts].sum(0)
    counts = np.zeros(experts)
    counts[: len(summed)] = summed
    return counts


def _edges(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> NDArray[np.float64]:
    """Starts and ends in order, those that nearly fall together as one."""
    edges = np.unique(np.concatenate([starts, ends]))
    apart = (ends - starts).min() / 2
    kept = [edges[0]]
    for edge in edges[1:-1]:
        if edge - kept[-1] > apart and edges[-1] - edge > apart:
            kept.append(edge)
    return np.array([*kept, edges[-1]])
