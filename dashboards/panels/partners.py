"""With whom is one expert busy? A figure of level tokens."""

from __future__ import annotations

import pandas as pd

from routeprof.affinity_tables import pairs
from routeprof.dashboards.figures.affinity import partner_bars
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.panels.expert_pairs import FEWEST, NO_PAIRS, partner_table, tellable
from routeprof.dashboards.panels.token_rows import NEEDED, has_tokens
from routeprof.dashboards.view import Context, Filled
from routeprof.topology import Layer

MOST_PARTNERS = 20
"""Partners that are drawn, those with the largest lift."""


def partners(context: Context, layer: Layer, expert: int) -> Filled:
    """The experts that serve the same tokens."""
    table = pd.DataFrame()
    if not has_tokens(context.profile):
        return Filled(blank(NEEDED, context.scheme), "", table)
    if layer.choices < 2:
        return Filled(blank(NO_PAIRS, context.scheme), "", table)
    found = pairs(context.profile.tokens(layer.index).ids, layer)
    if not found.tokens:
        text = f"No single tokens of layer {layer.index} were kept in this selection."
        return Filled(blank(text, context.scheme), "", table)
    table = partner_table(found, expert)
    shown = tellable(table).head(MOST_PARTNERS)
    if not len(shown):
        text = f"Expert {expert} has too few tokens to tell its partners from chance."
        return Filled(blank(text, context.scheme), "", table)
    partner, together, lift = (shown[name].to_numpy() for name in ("partner", "together", "lift"))
    figure = partner_bars(partner, lift, together, found.random, context.scheme)
    caption = (
        f"How much more often than by independent choice a token of expert {expert} is also the "
        f"partner's, {context.selection}; random top-{layer.choices} routing gives "
        f"{found.random:.2f}. Partners that independence would bring together at least {FEWEST} "
        "times. Click one to open it."
    )
    return Filled(figure, caption, table)
