"""Rule: choices that nearly went the other way."""

from __future__ import annotations

import numpy as np

from routeprof.diagnose.finding import Finding, layer_count
from routeprof.diagnose.question import Question
from routeprof.metrics import gate
from routeprof.tables import moe_layers


def low_margin(question: Question) -> list[Finding] | str:
    """Layers whose last choice is hardly more probable than the first that was left out."""
    sums, limit = question.profile.totals.sums, question.limits.margin
    found: dict[int, tuple[float, float]] = {}
    known = False
    for position, layer in moe_layers(question.profile):
        margins, rows = sums["margin_sum"][:, position], sums["gate_rows"][:, position]
        seen = ~np.isnan(margins) & (rows > 0)
        if not seen.any():
            continue
        known = True
        margin = float(gate.margin(margins[seen].sum(), rows[seen].sum()))
        if margin * layer.experts < limit:
            found[layer.index] = margin * layer.experts, margin
    if not known:
        return "needs the router's outputs, which this recording has not"
    if not found:
        return []
    worst = min(found, key=lambda one: found[one])
    relative, margin = found[worst]
    return [
        Finding(
            "low-margin",
            "info",
            f"choices nearly flip: in layer {worst} the last chosen expert is {margin:.2g} more "
            f"probable than the next, in the mean, {relative:.3f} of an even share (1 ÷ experts); "
            f"below {limit:g} in {layer_count(len(found))}",
            "keep the router, and what feeds it, in high precision; compare the choices of the "
            "quantised model before you serve it",
            tuple(sorted(found)),
            figures={"layer": worst, "margin": margin, "margin_of_even_share": relative},
        )
    ]
