"""How far each request lies from all of them: a figure of level tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.tags import request_scatter
from routeprof.dashboards.panels.skew import by_chance
from routeprof.dashboards.panels.token_rows import NEEDED, affordable, has_tokens
from routeprof.dashboards.view import Context, Filled, has_values

MOST_REQUESTS = 5000
"""Requests that are drawn, the longest."""


def requests(context: Context) -> Filled:
    """How far each request lies from all of them."""
    profile, table = context.profile, pd.DataFrame()
    if not has_tokens(profile):
        return Filled(blank(NEEDED, context.scheme), "", table)
    if affordable(profile) < len(profile.captured):
        text = "There are too many tokens to draw while you wait; requests.csv has them."
        return Filled(blank(text, context.scheme), "", table)
    table = profile.requests()
    if not len(table):
        return Filled(blank("No requests in this selection.", context.scheme), "", table)
    if not has_values(table["divergence_from_all"].astype(float)):
        text = "Which request a token is of is not known in this recording."
        return Filled(blank(text, context.scheme), "", table)
    drawn = table.sort_values("tokens", ascending=False, kind="stable").head(MOST_REQUESTS)
    tokens = drawn["tokens"].to_numpy(dtype=np.int64)
    figure = request_scatter(
        tokens,
        drawn["divergence_from_all"].to_numpy(dtype=float),
        drawn["request"].tolist(),
        chance_by_length(context, tokens),
        context.scheme,
    )
    caption = (
        "Jensen–Shannon divergence between a request's load and that of all requests, mean over "
        f"layers; {context.selection}. Short requests lie further away by chance alone, about as "
        "the dashed line."
    )
    return Filled(figure, caption, table)


def chance_by_length(
    context: Context, tokens: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lengths between the shortest and the longest request, and what chance alone gives them."""
    lengths = np.geomspace(max(int(tokens.min()), 1), max(int(tokens.max()), 2), 60)
    layers = [context.profile.info.layers[place] for place in context.profile.captured]
    each = [by_chance(layer.experts, lengths * layer.choices) for layer in layers]
    chance = np.mean(each, axis=0)
    close = chance < 0.25  # beyond, the approximation no longer holds
    return lengths[close], chance[close]
