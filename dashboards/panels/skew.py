"""Is the skew the data's or the model's? Counts by tag in, numbers and a verdict out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from routeprof.metrics import drift

Verdict = Literal["data", "model", "even", "unknown"]

LITTLE = 0.5
"""Mean skew (max ÷ mean − 1) under the tags below which there is nothing to explain."""

FEWEST = 25
"""Assignments per expert below which a tag's largest load is mostly chance."""


@dataclass(frozen=True)
class Skew:
    """How skewed the tags are, each alone and all of them mixed.

    Attributes:
        alone: max ÷ mean load, float64 [tags, layers], NaN where a tag had no tokens.
        together: the same of all tags as they were recorded, [layers].
        mixed: the same of tags in equal parts, [layers], those with few tokens left out.
        counted: number of tags that have enough tokens.
        left: share of the tags' skew that is left when they are mixed, 0…1.
        verdict: whose skew it is.
    """

    alone: NDArray[np.float64]
    together: NDArray[np.float64]
    mixed: NDArray[np.float64]
    counted: int
    left: float
    verdict: Verdict


def skew_of(counts: NDArray[np.int64], experts: NDArray[np.int64]) -> Skew:
    """Compare the skew under each tag with that of their mixture.

    Skew is max ÷ mean − 1. Of tags that load the same experts all of it is left when they are
    mixed in equal parts; of tags that have no hot expert in common less than 1/tags. What is left
    is the model's doing and the rest the data's: the verdict names the larger part.

    Args:
        counts: [tags, layers, widest], 0 beyond a layer's own experts.
        experts: experts of each layer.
    """
    alone = max_over_mean(counts, experts)
    enough = np.median(counts.sum(2) / experts, axis=1) >= FEWEST
    number = int(enough.sum())
    mixed = _mixed(counts[enough], experts)
    within = np.full(len(experts), np.nan)
    if number:
        within = _mean(alone[enough] - 1)
    known = np.isfinite(within) & np.isfinite(mixed)
    skew = float(within[known].mean()) if known.any() else 0.0
    left = float((mixed[known] - 1).sum() / within[known].sum()) if skew > 0 else float("nan")
    verdict: Verdict = "data" if left < 0.5 else "model"
    if number < 2:
        verdict = "unknown"
    elif skew < LITTLE:
        verdict = "even"
    return Skew(alone, max_over_mean(counts.sum(0), experts), mixed, number, left, verdict)


def max_over_mean(counts: NDArray[np.int64], experts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Largest ÷ mean load of counts [..., layers, widest]; NaN without tokens."""
    routed = counts.sum(-1)
    largest = counts.max(-1, initial=0) * experts
    return np.asarray(largest / np.where(routed > 0, routed, np.nan))


def _mixed(counts: NDArray[np.int64], experts: NDArray[np.int64]) -> NDArray[np.float64]:
    routed = counts.sum(2, keepdims=True)
    shares = _mean(counts / np.where(routed > 0, routed, np.nan))
    return np.asarray(shares.max(-1, initial=0) * experts)


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over the first axis of what is known; NaN where nothing is."""
    known = np.isfinite(values)
    number = known.sum(0)
    return np.asarray(np.where(known, values, 0).sum(0) / np.where(number > 0, number, np.nan))


def mean_divergence(
    counts: NDArray[np.int64], experts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Jensen–Shannon divergence between every two tags, mean over layers, and that of chance.

    Chance: what two samples of one pool, as large as the two tags, have between them; to second
    order (experts − 1) ÷ (8 ln 2) · (1/n + 1/n') for n and n' independent assignments.

    Returns:
        Two arrays [tags, tags], NaN where two tags have no layer in common.
    """
    layers = range(len(experts))
    found = [drift.divergence_matrix(counts[:, n, : experts[n]]) for n in layers]
    routed = counts.sum(2).astype(float)
    each = 1 / np.where(routed > 0, routed, np.nan)
    chance = by_chance(experts[:, None, None], 1 / (each.T[:, :, None] + each.T[:, None, :]))
    return _mean(np.stack(found)), _mean(np.asarray(chance))


def by_chance(experts: ArrayLike, assignments: ArrayLike) -> NDArray[np.float64]:
    """The divergence that so many assignments have from their pool by chance, about."""
    spread = (np.asarray(experts) - 1) / (8 * np.log(2) * np.asarray(assignments, dtype=float))
    return np.asarray(np.minimum(spread, 1.0))
