"""What the steps of composed batches would be: counts, and figures from them.

A batch starts together and runs in lockstep: in its step t every request of it that has a token t
takes part. A request that has ended leaves its place empty; no other takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray, ratio
from routeprof.metrics.gemm import gemm_bucket, small_gemm_share
from routeprof.metrics.ranks import contiguous, rank_loads, rank_of_slot
from routeprof.placements import placed
from routeprof.whatif.requests.served import LayerTokens, Requests, row_loads


@dataclass(frozen=True)
class Waits:
    """How long slowest experts and ranks take, over all layers and steps.

    The load of a step's hottest expert is the sum of what each request of the batch sends there.
    By request, so that the uncertainty of the sums can be told.

    Attributes:
        expert: [requests], Σ of the request's assignments to the step's hottest expert, each
            divided by the mean load of an expert and times the tokens of the step.
        rank: [requests], Σ of its assignments to experts of the step's hottest rank.
        tokens: Σ tokens of the steps; ``expert.sum() / tokens`` is the mean imbalance.
        mean_rank: Σ mean load of a rank; ``rank.sum() / mean_rank`` is the straggler factor.
        sizes: (expert, step) cells by their number of tokens, from 0.
        steps: steps of all batches.
    """

    expert: FloatArray
    rank: FloatArray
    tokens: float
    mean_rank: float
    sizes: IntArray
    steps: float

    @property
    def imbalance_ratio(self) -> float:
        """Max ÷ mean load of experts, mean over steps and layers by their tokens."""
        return float(ratio(self.expert.sum(), self.tokens))

    @property
    def straggler_factor(self) -> float:
        """Σ largest rank load ÷ Σ mean rank load."""
        return float(ratio(self.rank.sum(), self.mean_rank))

    @property
    def tokens_per_expert(self) -> tuple[float, float]:
        """Mean and median over the cells that have tokens."""
        cells = self.sizes[1:].cumsum()
        if not cells.size or not cells[-1]:
            return float("nan"), float("nan")
        total = float(np.arange(len(self.sizes)) @ self.sizes)
        middle = [(cells[-1] - 1) // 2, cells[-1] // 2]
        median = 1 + np.searchsorted(cells, middle, side="right").mean()
        return total / float(cells[-1]), float(median)

    @property
    def small_gemm_share(self) -> float:
        """Share of the cells with tokens that have fewer than 16."""
        buckets = gemm_bucket(np.arange(len(self.sizes)))
        return float(small_gemm_share(np.bincount(buckets, self.sizes).astype(np.int64)))


def batch_step_counts(requests: Requests, batches: IntArray) -> tuple[IntArray, list[IntArray]]:
    """Counts of every step that the batches would run.

    Args:
        batches: places of requests, ``[batches, size]``, none twice.

    Returns:
        The batch of each step ``[steps]``, batches one after another, and for each layer its counts
        ``[steps, experts]``.
    """
    steps, start = _steps(requests, batches)
    turns = np.diff(np.append(start, steps))
    counts = [_rows(one, batches, start, steps)[1] for one in requests.layers]
    return np.repeat(np.arange(len(batches)), turns), counts


def waits(requests: Requests, batches: IntArray, ranks: int) -> Waits:
    """Figures of composed batches.

    Args:
        batches: places of requests, ``[batches, size]``, none twice.
        ranks: expert-parallel ranks, experts dealt to them in order.

    Raises:
        UsageError: more ranks than experts.
    """
    steps, start = _steps(requests, batches)
    parts = [_layer_waits(one, requests, batches, start, steps, ranks) for one in requests.layers]
    return added(parts, steps)


def added(parts: Sequence[Waits], steps: float) -> Waits:
    """Sums of several layers, parts of the requests, or orders."""
    widest = max(len(one.sizes) for one in parts)
    sizes = sum(np.pad(one.sizes, (0, widest - len(one.sizes))) for one in parts)
    return Waits(
        expert=np.sum([one.expert for one in parts], axis=0),
        rank=np.sum([one.rank for one in parts], axis=0),
        tokens=sum(one.tokens for one in parts),
        mean_rank=sum(one.mean_rank for one in parts),
        sizes=np.asarray(sizes, dtype=np.int64),
        steps=steps,
    )


def _steps(requests: Requests, batches: IntArray) -> tuple[int, IntArray]:
    """Steps of all batches, and the first of each."""
    lengths = requests.turns[batches].max(axis=1)
    ends = lengths.cumsum()
    return int(ends[-1]), ends - lengths


def _rows(
    one: LayerTokens, batches: IntArray, start: IntArray, steps: int
) -> tuple[IntArray, IntArray, IntArray]:
    """The step of each token that is in a batch, counts ``[steps, experts]``, and which tokens."""
    batch = np.full(len(one.prefill), -1)
    batch[batches.ravel()] = np.repeat(np.arange(len(batches)), batches.shape[1])
    own = batch[one.request]
    inside = np.flatnonzero(own >= 0)
    row = start[own[inside]] + one.turn[inside]
    return row, row_loads(row, one.ids[inside], steps, one.layer.experts), inside


def _layer_waits(
    one: LayerTokens,
    requests: Requests,
    batches: IntArray,
    start: IntArray,
    steps: int,
    ranks: int,
) -> Waits:
    row, counts, inside = _rows(one, batches, start, steps)
    ids, request = one.ids[inside], one.request[inside]
    experts = placed(one.layer)
    on_ranks = rank_loads(counts[:, :experts], contiguous(experts, ranks), ranks)
    # Experts that do no work are on no rank, nor is what names no expert.
    homes = np.full(one.layer.experts + 1, -1)
    homes[:experts] = rank_of_slot(experts, ranks)
    tokens = np.bincount(row, minlength=steps).astype(np.float64)
    mean = counts.mean(axis=1)
    weight = np.divide(tokens, mean, out=np.zeros(steps), where=mean > 0)
    to_expert = (ids == counts.argmax(axis=1)[row, np.newaxis]).sum(axis=1)
    to_rank = (homes[ids] == on_ranks.argmax(axis=1)[row, np.newaxis]).sum(axis=1)
    number = len(requests.names)
    return Waits(
        expert=_by_request(request, to_expert * weight[row], number),
        rank=_by_request(request, to_rank, number),
        tokens=float(tokens[mean > 0].sum()),
        mean_rank=float(on_ranks.mean(axis=1).sum()),
        sizes=np.bincount(counts.ravel()),
        steps=steps,
    )


def _by_request(request: IntArray, values: FloatArray | IntArray, number: int) -> FloatArray:
    return np.bincount(request, values, minlength=number).astype(np.float64)
