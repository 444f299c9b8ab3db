"""Stretches of two sides dealt out anew: what the differences between random sides are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from routeprof.metrics._arrays import FloatArray, ratio
from routeprof.metrics.drift import jensen_shannon

CELLS = 2**20
"""Numbers of one array that is computed at a time."""

OWN = 0.5
"""Weight of an expert's own variance, beside what the layer's experts have in common.

Of few stretches the own one alone is wild. Any weight keeps the level; this one finds more.
"""


@dataclass(frozen=True)
class Deals:
    """What was recorded, and deals of it.

    Attributes:
        change: share of B minus share of A as recorded, [layers, experts].
        error: its standard error, were stretches independent.
        largest: largest change ÷ error of each deal, [deals]; the recorded one is not among them.
        divergence: between the shares as recorded, [layers].
        expected: what such errors make it on average, [layers].
        distances: divergence ÷ expected of each deal, [deals, layers].
    """

    change: FloatArray
    error: FloatArray
    largest: FloatArray
    divergence: FloatArray
    expected: FloatArray
    distances: FloatArray


def dealt(one: FloatArray, other: FloatArray, deals: int, generator: np.random.Generator) -> Deals:
    """Deal out the stretches of both sides, all layers of a stretch together.

    Args:
        one, other: loads of A and of B, ``[stretches, layers, experts]``.
    """
    both = np.concatenate((one, other))
    number, layers, experts = both.shape
    sums = _Sums.of(both)
    as_recorded = np.zeros((1, number))
    as_recorded[0, : len(one)] = 1
    change, error, divergence, expected = sums.difference(as_recorded)
    order = np.argsort(generator.random((deals, number)), axis=1)
    chosen = np.zeros((deals, number))
    np.put_along_axis(chosen, order[:, : len(one)], 1.0, axis=1)
    rows = max(1, CELLS // (layers * experts))
    largest, distances = np.zeros(deals), np.zeros((deals, layers))
    for first in range(0, deals, rows):
        now = slice(first, first + rows)
        differences, errors, far, usual = sums.difference(chosen[now])
        distances[now] = standard(far, usual)
        largest[now] = np.abs(standard(differences, errors)).max(axis=(1, 2))
    return Deals(change[0], error[0], largest, divergence[0], expected[0], distances)


def standard(differences: FloatArray, errors: FloatArray) -> FloatArray:
    """Differences in units of their standard error: 0 for none, infinite for one without error."""
    seen = np.where(np.abs(differences) < 1e-12, 0.0, differences)
    return np.where(seen == 0, 0.0, ratio(seen, np.where(errors < 1e-12, 0.0, errors)))


@dataclass(frozen=True)
class _Sums:
    """What shares and their variances are sums of, each [stretches, …]."""

    loads: FloatArray
    squares: FloatArray
    products: FloatArray
    tokens: FloatArray
    experts: int

    @classmethod
    def of(cls, loads: FloatArray) -> _Sums:
        loads = loads / max(loads.sum() / len(loads), 1.0)  # near 1: squares stay exact enough
        tokens = loads.sum(axis=2)
        squares, products = loads**2, loads * tokens[:, :, None]
        one, two, three = (each.reshape(len(loads), -1) for each in (loads, squares, products))
        return cls(one, two, three, tokens, loads.shape[2])

    def difference(
        self, chosen: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Change of shares, its standard error, divergence, and how much that is on average.

        A divergence is close to Σ change² ÷ mean share, ÷ 8 ln 2 for bits, while it is small.

        Args:
            chosen: 1 for the stretches of A, 0 for those of B, ``[deals, stretches]``.

        Returns:
            ``[deals, layers, experts]`` twice, and ``[deals, layers]`` twice; 0 where a side has
            no assignments of a layer.
        """
        (p, one), (q, other) = self._shares(chosen), self._shares(1 - chosen)
        variance, mean = one + other, np.maximum((p + q) / 2, 1e-30)
        expected = (variance / mean).sum(axis=2) / (8 * np.log(2))
        return q - p, np.sqrt(variance), np.nan_to_num(jensen_shannon(p, q)), expected

    def _shares(self, chosen: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Shares and their variances: of a ratio of sums over stretches that vary in size."""
        shape = (len(chosen), -1, self.experts)
        total = np.maximum((chosen @ self.tokens)[:, :, None], 1e-30)
        share = (chosen @ self.loads).reshape(shape) / total
        residuals = (
            (chosen @ self.squares).reshape(shape)
            - 2 * share * (chosen @ self.products).reshape(shape)
            + share**2 * (chosen @ self.tokens**2)[:, :, None]
        )
        number = chosen.sum(axis=1)[:, None, None]
        variance = np.maximum(residuals, 0) / total**2 * number / (number - 1)
        even = share * (1 - share)  # what independent tokens would have, but for a factor
        factor = variance.sum(axis=2, keepdims=True) / np.maximum(
            even.sum(axis=2, keepdims=True), 1e-30
        )
        return share, OWN * variance + (1 - OWN) * factor * even
