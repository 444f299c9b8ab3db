"""Pairs of experts that serve the same tokens: tables of what `metrics.affinity` counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.metrics import affinity
from routeprof.topology import Layer

FEWEST = 5
"""Pairs that independence would bring together less often say nothing about affinity."""

NO_PAIRS = "Each token goes to one expert of this layer: there are no pairs."


@dataclass(frozen=True)
class Pairs:
    """How often every two experts of a layer serve the same token.

    Attributes:
        tokens: number of tokens.
        together: int64 [experts, experts]; the diagonal holds each expert's own tokens.
        lifts: float64 [experts, experts], NaN on the diagonal and without tokens.
        random: the lift where every set of top-k experts is equally likely.
    """

    tokens: int
    together: NDArray[np.int64]
    lifts: NDArray[np.float64]
    random: float

    @property
    def expected(self) -> NDArray[np.float64]:
        """How often independent choices would bring two experts together."""
        alone = np.diagonal(self.together).astype(np.float64)
        return np.asarray(np.outer(alone, alone) / max(self.tokens, 1))


def pairs(ids: NDArray[np.int64], layer: Layer) -> Pairs:
    """The pairs in a layer's ids, ``[tokens, k]`` with k of at least 2."""
    tokens = int((ids >= 0).any(axis=1).sum())
    together = affinity.coactivation(ids, layer.experts)
    random = layer.experts * (layer.top_k - 1) / (layer.top_k * (layer.experts - 1))
    return Pairs(tokens, together, affinity.lift(together, tokens), random)


def partner_table(found: Pairs, expert: int) -> pd.DataFrame:
    """One expert's partners, the largest lift first and what has none last."""
    lifts = found.lifts[expert]
    order = np.argsort(np.where(np.isnan(lifts), np.inf, -lifts), kind="stable")
    order = order[order != expert]
    return pd.DataFrame(
        {
            "partner": order,
            "together": found.together[expert, order],
            "together_expected": found.expected[expert, order],
            "lift": lifts[order],
        }
    )


def pair_table(found: Pairs) -> pd.DataFrame:
    """Every pair once, the largest lift first; those that have none are left out."""
    one, other = np.triu_indices(len(found.together), 1)
    lifts = found.lifts[one, other]
    order = np.argsort(-lifts, kind="stable")[: int(np.isfinite(lifts).sum())]
    one, other = one[order], other[order]
    return pd.DataFrame(
        {
            "expert": one,
            "partner": other,
            "together": found.together[one, other],
            "together_expected": found.expected[one, other],
            "lift": found.lifts[one, other],
        }
    )


def tellable(table: pd.DataFrame) -> pd.DataFrame:
    """The pairs with enough tokens to tell them from chance."""
    return table[table["together_expected"] >= FEWEST]
