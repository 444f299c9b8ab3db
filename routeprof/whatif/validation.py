"""Whether a placement will be better than another on loads that are still to come.

Few or noisy steps are fitted easily and mean little. A placement is preferred to the trusted one
only where steps that it was not made for say so, and where it also holds when the loads of all
steps vary as much as they did.
"""

from __future__ import annotations

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.whatif.board import BoolArray
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.judge import rank_times

TOLERANCE = 1e-3
"""How much worse than the trusted one a placement may turn out, relatively."""

BLOCKS = 16
"""Consecutive steps are taken together to so many blocks: steps near each other are alike."""

SCENARIOS = 200
NORMAL = 2.576
"""Of a normal distribution, 99 % lies within ± so many standard deviations."""

_STUDENT = "63.7 9.92 5.84 4.60 4.03 3.71 3.50 3.36 3.25 3.17 3.11 3.05 3.01 2.98 2.95".split()


def student(blocks: int) -> float:
    """What ``NORMAL`` is where the deviation is estimated from so many blocks (Student's t)."""
    return float(_STUDENT[min(blocks - 1, len(_STUDENT)) - 1])


def holds_on_later_steps(
    candidate: IntArray, trusted: IntArray, later: FloatArray, cluster: Cluster
) -> BoolArray:
    """Whether the slowest rank is faster on steps that neither placement was made for.

    The difference of the two, by block of steps, must be significant at 99 % against
    ``TOLERANCE``, and that of the added up loads within it.

    Args:
        candidate, trusted: ``[layers, slots]``.
        later: ``[steps, layers, experts]``, two steps or more.

    Returns:
        ``[layers]``.
    """
    times, old_times = (rank_times(slots, later, cluster) for slots in (candidate, trusted))
    slowest, old = times.max(axis=2), old_times.max(axis=2)
    parts = np.array_split(np.arange(len(later)), min(len(later), BLOCKS))
    difference = np.stack([(slowest[part] - old[part]).mean(axis=0) for part in parts])
    deviation = difference.std(axis=0, ddof=1) / np.sqrt(len(parts))
    # What comes later varies once more.
    margin = student(len(parts)) * np.sqrt(1.5) * deviation
    total, old_total = (time.mean(axis=0).max(axis=1) for time in (times, old_times))
    by_step = difference.mean(axis=0) + margin <= TOLERANCE * old.mean(axis=0)
    return np.asarray(
        by_step & (difference.mean(axis=0) <= 0) & (total <= old_total * (1 + TOLERANCE))
    )


def holds_in_scenarios(
    candidate: IntArray, trusted: IntArray, loads: FloatArray, cluster: Cluster
) -> BoolArray:
    """Whether the slowest rank's added up load stays below the trusted placement's.

    Looked at in scenarios of what the loads might become, see `scenarios`: in 99 % of them by no
    more than ``TOLERANCE`` above, and below in the mean.

    Returns:
        ``[layers]``.
    """
    future = scenarios(loads)
    new, old = (rank_times(slots, future, cluster).max(axis=2) for slots in (candidate, trusted))
    worse = (new > old * (1 + TOLERANCE)).mean(axis=0)
    return np.asarray((worse <= 0.01) & (new.mean(axis=0) <= old.mean(axis=0)))


def scenarios(loads: FloatArray) -> FloatArray:
    """Mean loads as they might be in as many steps to come.

    Each is the mean load, drawn together by as much of the experts' differences as chance explains
    (empirical Bayes), and two kinds of change: chance, from the blocks' deviations with random
    weights (multiplier bootstrap), twice, as the steps at hand vary as well as those to come; and
    drift, the difference of the second half to the first as far as it exceeds chance: in half of
    the scenarios it goes on, for up to twice its size, in the others each expert changes as much in
    either direction.

    Args:
        loads: ``[steps, layers, experts]``, two steps or more.

    Returns:
        ``[SCENARIOS, layers, experts]``.
    """
    random = np.random.default_rng(0)
    parts = np.array_split(loads, min(len(loads), BLOCKS))
    blocks = np.stack([part.mean(axis=0) for part in parts])
    number, layers, experts = blocks.shape
    mean = blocks.mean(axis=0)
    variance = blocks.var(axis=0, ddof=1) / number
    weights = random.standard_normal((SCENARIOS, number))
    scale = np.sqrt(2 / (number * (number - 1))) * student(number) / NORMAL
    chance = np.tensordot(weights * scale, blocks - mean, axes=1)

    drift = _drift(blocks, variance)
    along = random.uniform(0, 2, (SCENARIOS // 2, 1, 1)) * drift
    astray = random.choice([-1.0, 1.0], (SCENARIOS - SCENARIOS // 2, layers, experts)) * drift
    centre = _without_chance(mean, variance)
    return np.asarray(np.maximum(centre + chance + np.concatenate((along, astray)), 0))


def _without_chance(mean: FloatArray, variance: FloatArray) -> FloatArray:
    """Means ``[layers, experts]`` moved to their layer's by the share of chance in their spread."""
    centre = mean.mean(axis=1, keepdims=True)
    spread = ((mean - centre) ** 2).sum(axis=1, keepdims=True)
    chance = variance.sum(axis=1, keepdims=True)
    return np.asarray(centre + (mean - centre) * _beyond(spread, chance))


def _drift(blocks: FloatArray, variance: FloatArray) -> FloatArray:
    """``[layers, experts]``; 0 where it is no more than chance."""
    half = len(blocks) // 2
    difference = blocks[-half:].mean(axis=0) - blocks[:half].mean(axis=0)
    square = (difference**2).sum(axis=1, keepdims=True)
    return np.asarray(difference * _beyond(square, 4 * variance.sum(axis=1, keepdims=True)))


def _beyond(square: FloatArray, chance: FloatArray) -> FloatArray:
    """The share of a sum of squares that chance does not explain, 0…1."""
    explained = np.divide(chance, square, out=np.ones_like(square), where=square > 0)
    return np.asarray(np.maximum(1 - explained, 0))
