"""The steps of every layer, with their tokens where these were recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routeprof.metrics._arrays import IntArray
from routeprof.placements import placed
from routeprof.tables import moe_layers
from routeprof.token_parts import of_rank
from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

MOST_WORK = 50_000_000
"""Tokens times layers times questions; of more, only some of the steps are looked at."""


@dataclass(frozen=True)
class LayerRun:
    """What a layer did in the steps that it ran in, in the order of time.

    Attributes:
        experts: that need a place.
        counts: assignments ``[steps, experts]``.
        tokens: ``[steps]``.
        step: number of the step of each token, ``[tokens]``; None where tokens were not recorded.
        ids: expert ids ``[tokens, k]``, or None.
        request: of each token, numbered from 0 in the order of arrival, -1 where unknown, or None.
    """

    layer: Layer
    counts: IntArray
    tokens: IntArray
    step: IntArray | None = None
    ids: IntArray | None = None
    request: IntArray | None = None

    @property
    def experts(self) -> int:
        return placed(self.layer)

    @property
    def steps(self) -> int:
        return len(self.tokens)

    def halves(self) -> tuple[LayerRun, LayerRun]:
        """The first half of the steps, and the second, numbered from 0 again."""
        half = -(-self.steps // 2)
        return self._part(0, half), self._part(half, self.steps)

    def _part(self, start: int, end: int) -> LayerRun:
        counts, tokens = self.counts[start:end], self.tokens[start:end]
        if self.step is None or self.ids is None or self.request is None:
            return LayerRun(self.layer, counts, tokens)
        own = (self.step >= start) & (self.step < end)
        step = self.step[own] - start
        return LayerRun(self.layer, counts, tokens, step, self.ids[own], self.request[own])


def layer_runs(
    profile: Profile, questions: int = 1, most: int | None = None
) -> tuple[list[LayerRun], int]:
    """Every layer with assignments, and one in how many steps it is that they hold.

    Passes of several ranks come in the order of time, each as a step of its own.

    Args:
        questions: that will be asked of each token.
        most: tokens times layers times questions; MOST_WORK if None.

    Raises:
        LevelRequiredError: the recording has sums alone.
    """
    profile.need_batches()
    table = profile.step_counts()
    every = max(1, -(-int(table.tokens.sum()) * questions // (most or MOST_WORK)))
    layers = [layer for _, layer in moe_layers(profile) if placed(layer)]
    runs = [_run(profile, layer, every) for layer in layers]
    return [run for run in runs if run.counts.any()], every


def _run(profile: Profile, layer: Layer, every: int) -> LayerRun:
    table = profile.step_counts()
    mine = np.flatnonzero(table.layer == layer.index)
    mine = mine[np.argsort(table.time[mine], kind="stable")]
    mine = mine[_one_in(every, table.tokens[mine])]
    counts, tokens = table.counts[mine, : placed(layer)], table.tokens[mine]
    if not profile.has("tokens"):
        return LayerRun(layer, counts, tokens)
    ran = of_rank(table.rank[mine], table.step[mine])
    known = profile.tokens(layer.index)
    theirs = of_rank(known.rank, known.step)
    order = np.argsort(ran)
    place = np.minimum(np.searchsorted(ran, theirs, sorter=order), max(len(ran) - 1, 0))
    own = ran[order[place]] == theirs if len(ran) else np.zeros(len(theirs), dtype=bool)
    step = order[place[own]]
    if not np.array_equal(np.bincount(step, minlength=len(mine)), tokens):
        return LayerRun(layer, counts, tokens)  # tokens of some steps could not be read
    return LayerRun(
        layer,
        counts,
        tokens,
        step,
        known.ids[own],
        _numbered(known.rank[own], known.request[own]),
    )


def _one_in(every: int, tokens: IntArray) -> IntArray:
    """Which steps stand for all: ascending, one in so many of every size.

    Not each so-manieth in time: where answers are as long, that is every prefill or none.
    """
    number = -(-len(tokens) // every)
    places = (np.arange(number) + 0.5) * (len(tokens) / max(number, 1))
    return np.sort(np.argsort(tokens, kind="stable")[places.astype(np.int64)])


def _numbered(rank: IntArray, request: IntArray) -> IntArray:
    """Requests as numbers from 0, by rank and then in the order of arrival; -1 stays."""
    numbers = np.unique(of_rank(rank, request)[request >= 0], return_inverse=True)[1]
    numbered = np.full(len(request), -1, dtype=np.int64)
    numbered[request >= 0] = numbers.reshape(-1)
    return numbered
