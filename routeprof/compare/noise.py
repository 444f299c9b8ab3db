"""Which differences between two loads are more than chance: permutation of stretches of time.

Both sides are cut into stretches. If nothing changed, any stretch could as well lie on the other
side: the stretches of both are dealt out anew many times, and what differences such deals reach is
noise. The largest of each deal, over all that is compared, bounds all together (Westfall and
Young, Resampling-Based Multiple Testing, 1993): that even one exceeds it has the chance of the
level. Differences are divided by their standard errors first, which keeps the level where one side
is noisier (Chung and Romano, Annals of Statistics 41, 2013).

Neighbouring stretches may be alike, which dealing out does not see: they are put together, and
what is left makes standard errors larger (`routeprof.compare.dependence`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, comb
from typing import TypeVar

import numpy as np

from routeprof.compare.deals import Deals, dealt, standard
from routeprof.compare.dependence import dependence, inflation, regrouped
from routeprof.errors import UsageError
from routeprof.metrics._arrays import FloatArray

LOWEST_LEVEL = 0.001
DEALS = 1000
TAIL = 20
"""Deals to be expected above a bound, at the least."""

Name = TypeVar("Name")
Pair = tuple[FloatArray, FloatArray]
"""Loads of A and of B, each ``[stretches, layers, experts]``, in the order of time."""


@dataclass(frozen=True)
class Judged:
    """Differences of the layers of one group, and their noise.

    Attributes:
        stretches: number of them, of A and of B.
        alike: correlation of neighbouring stretches that was left; `error` and bounds allow for it.
        change: share of B minus share of A, [layers, experts].
        error: its standard error.
        bound: what noise stays below: a larger change, up or down, is significant.
        p: chance of one as large anywhere among all that is compared, at most 1.
        divergence, divergence_bound, divergence_p: the same of layers, [layers].
    """

    stretches: tuple[int, int]
    alike: float
    change: FloatArray
    error: FloatArray
    bound: FloatArray
    p: FloatArray
    divergence: FloatArray
    divergence_bound: FloatArray
    divergence_p: FloatArray


def judge(pairs: Mapping[Name, Pair], alpha: float = 0.05, seed: int = 0) -> dict[Name, Judged]:
    """Differences of all groups, and what noise stays below at a level that they share.

    Half of the level is for experts, half for the divergence of layers.

    Args:
        pairs: enough stretches each (`enough`), and assignments on both sides in each layer.
        alpha: chance that anything is called significant where nothing changed.

    Raises:
        UsageError: a level that cannot be.
    """
    require_level(alpha)
    if not pairs:
        return {}
    deals = max(DEALS, ceil(2 * TAIL / alpha)) - 1
    generator = np.random.default_rng(seed)
    groups = {name: regrouped(*pair) for name, pair in pairs.items()}
    found = {name: dealt(*pair, deals, generator) for name, pair in groups.items()}
    experts = _Noise(np.max([one.largest for one in found.values()], axis=0), alpha / 2)
    layers = _Noise(
        np.max([_far(one, one.distances).max(axis=1) for one in found.values()], axis=0),
        alpha / 2,
    )
    return {
        name: _judged(one, groups[name], experts=experts, layers=layers)
        for name, one in found.items()
    }


def require_level(alpha: float) -> None:
    """Check a level.

    Raises:
        UsageError: a level that cannot be.
    """
    if not LOWEST_LEVEL <= alpha <= 0.5:
        raise UsageError(f"alpha is {alpha:g}: pass a level from {LOWEST_LEVEL:g} to 0.5")


def enough(one: int, other: int, alpha: float) -> bool:
    """Whether so many stretches can be dealt in enough ways to tell anything at the level."""
    return min(one, other) > 1 and 2 / comb(one + other, one) <= alpha / 4


@dataclass(frozen=True)
class _Noise:
    """The largest difference of each deal, and the share of deals that may exceed the bound."""

    drawn: FloatArray
    level: float

    @property
    def bound(self) -> float:
        above = int((len(self.drawn) + 1) * self.level)
        return float(np.sort(self.drawn)[-above])

    def p(self, values: FloatArray) -> FloatArray:
        """Share of deals that reach these, the recorded one counted among them; of both halves."""
        reached = len(self.drawn) - np.searchsorted(np.sort(self.drawn), values, side="left")
        return np.minimum(2 * (1 + reached) / (len(self.drawn) + 1), 1.0)


def _far(one: Deals, distances: FloatArray) -> FloatArray:
    """Distances in units of how those of the layer's deals spread around their mean."""
    centre, spread = one.distances.mean(axis=0), one.distances.std(axis=0)
    return standard(distances - centre, np.broadcast_to(spread, distances.shape))


def _judged(one: Deals, pair: Pair, *, experts: _Noise, layers: _Noise) -> Judged:
    alike = dependence(*pair)
    wider = inflation(alike)
    error = one.error * np.sqrt(wider)
    expected = one.expected * wider
    reach = one.distances.mean(axis=0) + layers.bound * one.distances.std(axis=0)
    return Judged(
        (len(pair[0]), len(pair[1])),
        alike,
        one.change,
        error,
        experts.bound * error,
        experts.p(np.abs(standard(one.change, error))),
        one.divergence,
        reach * expected,
        layers.p(_far(one, standard(one.divergence, expected))),
    )
