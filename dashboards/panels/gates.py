"""One layer's experts: what the router put out, and what they got."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.experts import mass_scatter
from routeprof.dashboards.view import Context, Filled, has_values
from routeprof.metrics.gate import mean
from routeprof.profile import Profile
from routeprof.tables import column
from routeprof.topology import Layer

GATE_TABLE = "expert share probability_mass mean_weight".split()
GATE_SUMS = {
    "gate_entropy": "entropy_sum",
    "top1_probability": "top1_sum",
    "margin": "margin_sum",
    "router_z_loss": "z_sum",
}


def expert_rows(profile: Profile, layer: Layer) -> pd.DataFrame:
    """The layer's rows of ``Profile.experts``, without those of all the others."""
    position, totals = profile.info.layers.index(layer), profile.totals
    counts = totals.lists["counts"][:, position, : layer.experts].sum(0)
    rows = totals.sums["gate_rows"][:, position].sum()
    mass, weights = (
        _known_sums(totals.lists[name][:, position], layer.experts)
        for name in ("probability_mass", "weight_sum")
    )
    return pd.DataFrame(
        {
            "expert": np.arange(layer.experts),
            "tokens": counts,
            "share": ratio(counts, counts.sum()),
            "load_over_mean": ratio(counts, counts.mean()),
            "probability_mass": ratio(mass, rows or np.nan),
            "mean_weight": ratio(weights, np.where(counts > 0, counts, np.nan)),
        }
    )


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> NDArray[np.float64]:
    """Quotient, NaN for 0/0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.true_divide(numerator, denominator))


def _known_sums(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Sum over keys [keys, …] of what is known, exactly ``width`` values; NaN where nothing is."""
    summed = np.full(width, np.nan)
    own = values[:, :width]
    known = np.isfinite(own)
    summed[: own.shape[1]] = np.where(known.any(0), np.where(known, own, 0).sum(0), np.nan)
    return summed


def gate_mass(context: Context, layer: Layer) -> Filled:
    """Load share of each expert against the probability that the router gives it."""
    table = expert_rows(context.profile, layer)[GATE_TABLE]
    mass, share = (column(table, name) for name in ("probability_mass", "share"))
    if not has_values(mass) or not has_values(share):
        text = (
            "No probabilities of this layer's router were recorded."
            if context.profile.info.gate
            else "This recording was made without the router's outputs (gate=False)."
        )
        return Filled(blank(text, context.scheme), "", table)
    figure = mass_scatter(mass, share, table["expert"].to_numpy(), context.scheme)
    caption = (
        f"An expert of layer {layer.index} above the line gets more of the load than of the "
        f"router's probability; {context.selection}. Click one to open it."
    )
    return Filled(figure, caption, table)


def gate_outputs(context: Context, layer: Layer) -> pd.DataFrame:
    """Means of the router's outputs over tokens, one row; none where nothing was recorded."""
    position, totals = context.profile.info.layers.index(layer), context.profile.totals
    rows = int(totals.sums["gate_rows"][:, position].sum())
    weights = totals.lists["weight_sum"][:, position]
    values = {
        name: float(mean(known_sum(totals.sums[source][:, position]), rows))
        for name, source in GATE_SUMS.items()
    }
    chosen = int(totals.lists["counts"][:, position].sum())
    values["mean_weight"] = float(mean(known_sum(weights.ravel()), chosen))
    return pd.DataFrame([values]) if has_values(list(values.values())) else pd.DataFrame()


def known_sum(values: NDArray[np.float64]) -> float:
    """Sum of what is known; NaN where nothing is."""
    return float(np.nansum(values)) if has_values(values) else float("nan")
