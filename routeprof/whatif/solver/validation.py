"""Whether a placement will be better than another on loads that are still to come.

Few or noisy steps are fitted easily and mean little. A placement is preferred to the trusted one
only where steps that it was not made for say so, and where it also holds when the loads of all
steps vary as much as they did.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray, ratio
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.judge import rank_times
from routeprof.whatif.solver.board import BoolArray

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


@dataclass(frozen=True)
class Outlook:
    """How candidates compare with the trusted placement, ``[candidates, layers]`` each.

    Attributes:
        time: of the slowest rank, in the unit of loads by speed.
        expected: the same over the trusted placement's, in the mean.
        risk: what that may come to in 1 % of the cases.
    """

    time: FloatArray
    expected: FloatArray
    risk: FloatArray

    @property
    def sure(self) -> BoolArray:
        """Where nothing speaks against it, ``[candidates, layers]``."""
        return np.asarray((self.risk <= 1 + TOLERANCE) & (self.expected <= 1))

    def of(self, layers: BoolArray) -> Outlook:
        """The same for some of the layers."""
        return Outlook(self.time[:, layers], self.expected[:, layers], self.risk[:, layers])

    def and_also(self, other: Outlook) -> Outlook:
        """The worse of two, with the time of the first."""
        expected = np.maximum(self.expected, other.expected)
        return Outlook(self.time, expected, np.maximum(self.risk, other.risk))


def on_later_steps(
    candidates: IntArray, trusted: IntArray, later: FloatArray, cluster: Cluster
) -> Outlook:
    """How candidates compare with the trusted placement on steps that none was made for.

    By step, with a margin of 99 % from the deviation between blocks, or for the loads added up; the
    worse of the two.

    Args:
        candidates: ``[candidates, layers, slots]``.
        trusted: ``[layers, slots]``.
        later: ``[steps, layers, experts]``, two steps or more.
    """
    times = np.stack([rank_times(slots, later, cluster) for slots in (trusted, *candidates)])
    slowest = times.max(axis=3)
    parts = np.array_split(slowest - slowest[0], min(len(later), BLOCKS), axis=1)
    difference = np.stack([part.mean(axis=1) for part in parts])
    deviation = difference.std(axis=0, ddof=1) / np.sqrt(len(parts))
    # What comes later varies once more.
    margin = student(len(parts)) * np.sqrt(1.5) * deviation
    time, total = slowest.mean(axis=1), times.mean(axis=1).max(axis=2)
    summed = over(total, total[0])
    expected = np.maximum(over(time, time[0]), summed)
    risk = np.maximum(over(time + margin, time[0]), summed)
    return Outlook(time[1:], expected[1:], risk[1:])


def in_scenarios(
    candidates: IntArray, trusted: IntArray, loads: FloatArray, cluster: Cluster
) -> Outlook:
    """How candidates compare for added up loads that change, see `scenarios`; arguments as above.

    Of one step alone nothing is known but itself.
    """
    future = scenarios(loads) if len(loads) > 1 else loads
    slowest = np.stack(
        [rank_times(slots, future, cluster).max(axis=2) for slots in (trusted, *candidates)]
    )
    time = slowest.mean(axis=1)
    risk = np.quantile(over(slowest, slowest[0]), 0.99, axis=1)
    return Outlook(time[1:], over(time, time[0])[1:], risk[1:])


def over(new: FloatArray, old: FloatArray) -> FloatArray:
    """Quotient; 1 where both are 0, as in a layer without load."""
    return np.where(old > 0, ratio(new, old), 1.0)


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
