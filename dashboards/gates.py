"""What the router of one layer put out, beside what its experts got."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.dashboards.expert_figures import mass_scatter
from routeprof.dashboards.figures import blank
from routeprof.dashboards.view import Context, Filled, column, has_values
from routeprof.metrics.gate import mean
from routeprof.topology import Layer

GATE_TABLE = "expert share probability_mass mean_weight".split()
GATE_SUMS = {
    "gate_entropy": "entropy_sum",
    "top1_probability": "top1_sum",
    "margin": "margin_sum",
    "router_z_loss": "z_sum",
}


def gate_mass(context: Context, layer: Layer) -> Filled:
    """Load share of each expert against the probability that the router gives it."""
    table = context.profile.experts()
    table = table.loc[table["layer"] == layer.index, GATE_TABLE].reset_index(drop=True)
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
        f"Layer {layer.index}, {context.selection}: an expert above the line gets more of the "
        "load than of the router's probability. Click one to open it."
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
