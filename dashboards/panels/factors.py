"""The capacity factor that a rate of overflow needs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from routeprof.dashboards.panels.stepwise import LayerSteps
from routeprof.metrics.overflow import RoutedSteps, smallest_common_factor

RATES = (0.0, 0.001, 0.01)
COLUMNS = "accepted_rate factor_needed factor_needed_worst worst_layer".split()


def exact(steps: Mapping[int, LayerSteps], top_k: Mapping[int, int]) -> pd.DataFrame:
    """Factors that each of RATES needs, from every step.

    Args:
        steps: of all layers that have assignments, by the layer's index.
        top_k: experts per token of each layer.
    """
    layers = {
        index: RoutedSteps(own.counts, own.tokens, top_k[index]) for index, own in steps.items()
    }
    rows = []
    for rate in RATES:
        each = {
            index: smallest_common_factor([own], rate)
            for index, own in layers.items()
            if own.counts.any()
        }
        worst = max(each, key=lambda index: each[index])
        together = smallest_common_factor(list(layers.values()), rate)
        rows.append((rate, f"{together:g}", f"{each[worst]:g}", worst))
    return pd.DataFrame(rows, columns=COLUMNS)


def among_recorded(every: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Between which recorded factors those lie that each of RATES needs.

    Args:
        every: rates of all layers and of the worst by factor, in ascending order.
        table: ``Profile.overflow``.
    """
    factors = every["capacity_factor"].to_numpy()
    rows = []
    for rate in RATES:
        together = every["overflow_rate"].to_numpy() <= rate
        worst = every["overflow_worst"].to_numpy() <= rate
        enough = int(np.argmax(worst)) if worst.any() else len(factors)
        # The layer that still overflows most at the last factor that is too small.
        at = table[table["capacity_factor"] == factors[max(enough - 1, 0)]]
        layer = at["layer"].iloc[int(np.nanargmax(at["overflow_rate"].to_numpy()))]
        rows.append((rate, _place(factors, together), _place(factors, worst), layer))
    return pd.DataFrame(rows, columns=COLUMNS)


def _place(factors: np.ndarray, enough: np.ndarray) -> str:
    if not enough.any():
        return f"above {factors[-1]:g}"
    first = int(np.argmax(enough))
    if not first:
        return f"at most {factors[0]:g}"
    return f"between {factors[first - 1]:g} and {factors[first]:g}"
