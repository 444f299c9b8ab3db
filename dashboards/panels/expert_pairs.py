"""Pairs of experts that serve the same tokens: tables of what `metrics.affinity` counts."""

from __future__ import annotations

import numpy as np
import pandas as pd

from routeprof.affinity_tables import Pairs

FEWEST = 5
"""Pairs that independence would bring together less often say nothing about affinity."""

NO_PAIRS = "Each token goes to one expert of this layer: there are no pairs."


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
