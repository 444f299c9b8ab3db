"""Ranks: which expert-parallel rank would wait for which?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from routeprof.dashboards import formats
from routeprof.dashboards.components import plain_table
from routeprof.dashboards.figures.common import blank, expert_bars, small
from routeprof.dashboards.figures.comparison import ratios_by_layer
from routeprof.dashboards.figures.heatmaps import load_heatmap
from routeprof.dashboards.panels.placements import PANEL, commands, placements
from routeprof.dashboards.panels.rank_list import nodes, rank_list
from routeprof.dashboards.panels.spreads import (
    Spread,
    holes,
    honesty,
    nothing,
    ratio,
    spread,
    wording,
)
from routeprof.dashboards.state import PLACEMENTS
from routeprof.dashboards.view import Card, Content, Context, Filled, Panel, View, has_values
from routeprof.dashboards.views.heatmap import row_names
from routeprof.diagnose import HOT_IMBALANCE
from routeprof.metrics import balance

LOADS = "layer ep_rank rank_load rank_load_over_mean".split()
WAITS = "layer placement slowest_rank straggler_factor".split()


def fill(context: Context) -> Content:
    """The page's content."""
    over = spread(context)
    return Content(
        panels={
            "rank_loads": heatmap(over),
            "rank_waits": waits(over),
            "placements": placements(over),
            "layer_ranks": one_layer(over),
        },
        cards=cards(over),
        body=[*commands(over), plain_table("Recorded ranks", rank_list(context))],
    )


def cards(over: Spread) -> list[Card]:
    """The key figures of the chosen placement."""
    chosen, slowest = over.chosen, ratio(over.chosen)
    number = len(over.context.whole.files.ranks) if over.context.whole.files else 0
    machines = formats.plural(nodes(over.context), "node")
    there = f"{formats.plural(number, 'rank')} recorded on {machines}"
    known = chosen[np.isfinite(slowest)]
    if not len(known):
        return [Card("ep_ranks", str(over.ranks), there)]
    worst = int(np.nanargmax(slowest))
    hot = slowest[worst] > HOT_IMBALANCE
    return [
        Card("ep_ranks", str(over.ranks), there),
        Card(
            "slowest_rank",
            formats.ratio(slowest[worst]),
            f"worst: layer {over.layers[worst]} · median {np.nanmedian(slowest):.2f}",
            "bad" if hot else "",
        ),
        Card(
            "vllm_balancedness",
            formats.ratio(float(balance.vllm_balancedness(known))),
            "Σ mean ÷ Σ max over layers",
        ),
        Card(
            "sglang_balancedness",
            formats.ratio(float(balance.sglang_balancedness(known))),
            "mean ÷ max, averaged over layers",
        ),
    ]


def heatmap(over: Spread) -> Filled:
    """Load of each rank ÷ the mean of its layer."""
    context, values = over.context, over.chosen
    relative = values / values.mean(axis=1, keepdims=True)
    ranks = np.broadcast_to(np.arange(over.ranks), values.shape)
    table = pd.DataFrame(
        {
            "layer": np.repeat(over.layers, over.ranks),
            "ep_rank": ranks.ravel(),
            "rank_load": values.ravel(),
            "rank_load_over_mean": relative.ravel(),
        }
    ).dropna(ignore_index=True)
    if not len(table):
        return Filled(blank(nothing(over), context.scheme), "", table)
    figure = load_heatmap(
        relative, row_names(context), ranks, context.scheme, "expert-parallel rank", "rank"
    )
    if over.ranks <= 32:
        figure.update_xaxes(tickvals=small(np.arange(over.ranks)))
    caption = (
        f"Load of each of {over.ranks} ranks ÷ the mean of its layer, {wording(over)}; "
        f"{context.selection}. {honesty(over)}{holes(over)}"
    )
    return Filled(figure, caption, table)


def waits(over: Spread) -> Filled:
    """The slowest rank of every layer in each placement."""
    context = over.context
    table = pd.concat(
        [
            pd.DataFrame(
                {
                    "layer": over.layers,
                    "placement": PLACEMENTS[name].lower(),
                    "slowest_rank": over.slowest[name],
                    "straggler_factor": over.stragglers[name],
                }
            )
            for name in over.loads
        ]
    ).sort_values("layer", kind="stable", ignore_index=True)
    table = table[table["slowest_rank"].notna()]
    if not len(table):
        return Filled(blank(nothing(over), context.scheme), "", table)
    names = {
        name: PLACEMENTS[name].lower()
        for name, values in over.slowest.items()
        if has_values(values)
    }
    known = np.isfinite(np.stack(list(over.slowest.values()))).any(axis=0)
    figure = ratios_by_layer(
        over.layers[known],
        {label: over.slowest[name][known] for name, label in names.items()},
        context.absent,
        "slowest / mean rank",
        context.scheme,
        steps={label: over.stragglers[name][known] for name, label in names.items()},
    )
    stepwise = has_values(table["straggler_factor"])
    sums = (
        "The whisker ends at the straggler factor over steps: ranks that take turns at being slow "
        "look even in the sum, and are waited for in every step."
        if stepwise
        else "This is of sums: ranks that take turns at being slow look even in them, and are "
        "waited for in every step. Record level steps to see that."
    )
    caption = (
        f"Load of the slowest of {over.ranks} ranks ÷ mean load, by placement, "
        f"{context.selection}. {sums}"
    )
    return Filled(figure, caption, table)


def one_layer(over: Spread) -> Filled:
    """Load of each rank of the chosen layer."""
    context, layer = over.context, over.layer
    place = np.flatnonzero(over.layers == (-1 if layer is None else layer.index))
    values = over.chosen[place[0]] if len(place) else np.full(over.ranks, np.nan)
    table = pd.DataFrame(
        {
            "ep_rank": np.arange(over.ranks),
            "rank_load": values,
            "rank_load_over_mean": values / (values.mean() or np.nan),
        }
    )
    if layer is None or not has_values(values):
        state = context.absent.get(layer.index, "") if layer is not None else ""
        text = f"This layer is {state}: it has no counts, which is not zero." if state else ""
        return Filled(blank(text or nothing(over), context.scheme), "", table.head(0))
    loads_over_mean = table["rank_load_over_mean"].to_numpy()
    figure = expert_bars(loads_over_mean, table["ep_rank"].to_numpy(), context.scheme, what="rank")
    caption = (
        f"Layer {layer.index}, {context.selection}: load of each rank ÷ the mean, {wording(over)}."
    )
    return Filled(figure, caption, table)


VIEW = View(
    path="ranks",
    title="Ranks",
    question="Which expert-parallel rank would wait for which?",
    reports=("ranks", "experts"),
    panels=(
        Panel(
            "rank_loads",
            "Load by layer and rank",
            "Heatmap with a row for each layer and a column for each expert-parallel rank",
            height=520,
        ),
        Panel(
            "rank_waits",
            "Slowest rank by layer",
            "Bar chart: slowest rank's load over the mean for every layer and placement",
            leads="layer",
        ),
        PANEL,
        Panel(
            "layer_ranks",
            "Ranks of one layer",
            "Bar chart: load of every expert-parallel rank of the chosen layer",
            height=300,
        ),
    ),
    fill=fill,
    controls=("between", "layer", "ranks", "placement", "redundant"),
)
