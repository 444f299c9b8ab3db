"""How sure a gain is that was seen on some requests: a paired bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray, ratio

RESAMPLES = 2000
LEVEL = 0.95

FEWEST_REQUESTS = 20
"""Of fewer a bootstrap gives intervals that are too narrow."""

_CHUNK = 100
"""Resamples at a time, so that many requests fit."""


@dataclass(frozen=True)
class Gain:
    """Old ÷ new: 1 is no gain, 2 is twice as good.

    Attributes:
        lower, upper: where it lies at ``LEVEL`` for other requests of the same classes; NaN where
            there are fewer than ``FEWEST_REQUESTS``.
    """

    value: float
    lower: float
    upper: float

    @property
    def verdict(self) -> str:
        """``gain``, ``loss``, ``none shown`` where the interval has 1 in it, or ``unknown``."""
        if np.isnan([self.value, self.lower, self.upper]).any():
            return "unknown"
        if self.lower > 1:
            return "gain"
        return "loss" if self.upper < 1 else "none shown"


def gain(
    old: FloatArray, new: FloatArray, classes: Sequence[str], random: np.random.Generator
) -> Gain:
    """Σ old ÷ Σ new, with an interval from a bootstrap over requests, class by class.

    Of each class with n requests, n − 1 are drawn with replacement and weighted n ÷ (n − 1), which
    makes the variance right in small classes (Rao and Wu 1988). A drawn request counts in both
    sums. Requests that are the only one of their class are taken together as one.

    Args:
        old, new: what each request contributes, [requests].
        classes: of each request, [requests].
    """
    value = float(ratio(old.sum(), new.sum()))
    if len(classes) < FEWEST_REQUESTS:
        return Gain(value, float("nan"), float("nan"))
    strata, pairs = _strata(classes), np.stack((old, new), axis=1)
    chunks = [_resampled(pairs, strata, random) for _ in range(RESAMPLES // _CHUNK)]
    resampled = np.concatenate(chunks)
    tail = (1 - LEVEL) / 2
    lower, upper = np.quantile(ratio(resampled[:, 0], resampled[:, 1]), [tail, 1 - tail])
    return Gain(value, float(lower), float(upper))


def _strata(classes: Sequence[str]) -> list[IntArray]:
    """Places of each class's requests, two or more of each."""
    _, inverse, count = np.unique(
        np.array(classes, dtype=str), return_inverse=True, return_counts=True
    )
    strata = [np.flatnonzero(inverse == place) for place in np.flatnonzero(count > 1)]
    alone = np.flatnonzero(count[inverse] == 1)
    if len(alone) == 1:  # nothing tells how it varies: as much as the smallest class with it
        smallest = min(range(len(strata)), key=lambda place: len(strata[place]))
        strata[smallest] = np.append(strata[smallest], alone)
    elif len(alone):
        strata.append(alone)
    return strata


def _resampled(
    values: FloatArray, strata: list[IntArray], random: np.random.Generator
) -> FloatArray:
    """Weighted sums of ``values`` [requests, 2] in so many resamples: ``[_CHUNK, 2]``."""
    total = np.zeros((_CHUNK, values.shape[1]))
    for places in strata:
        number = len(places)
        chance = np.full(number, 1 / number)
        drawn = random.multinomial(number - 1, chance, size=_CHUNK)
        total += np.einsum("rn,nk->rk", drawn, values[places]) * (number / (number - 1))
    return total
