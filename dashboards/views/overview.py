"""Overview: is there a problem, and where?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from routeprof.dashboards import formats
from routeprof.dashboards.components import linked_table
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.layers import imbalance_by_layer
from routeprof.dashboards.panels.finding_list import finding_list, more_at
from routeprof.dashboards.view import (
    Card,
    Content,
    Context,
    Filled,
    Panel,
    View,
    has_values,
)
from routeprof.diagnose import HOT_IMBALANCE
from routeprof.tables import column

WORST_ROWS = 8
MOST_FINDINGS = 3
WORST_COLUMNS = (
    "layer imbalance_ratio step_imbalance_p95 hottest_expert top2_share dead_experts "
    "effective_experts coverage"
).split()
_TABLE = "layer imbalance_ratio step_imbalance_p50 step_imbalance_p95 step_imbalance_max".split()


def fill(context: Context) -> Content:
    """The page's content."""
    return Content(
        panels={"imbalance": imbalance(context)},
        cards=cards(context),
        lead=gravest(context),
        body=[linked_table("Worst layers", worst_layers(context), context.state)],
    )


def gravest(context: Context) -> list[Any]:
    """The first findings, on capture and on routing, and where the others are."""
    found, state = context.profile.findings(context.now), context.state
    nothing = "Nothing stands out in what is selected."
    more = more_at("All findings on the routing, their gains and remedies", "findings", state)
    return [finding_list("The gravest findings", found[:MOST_FINDINGS], state, nothing, more)]


def cards(context: Context) -> list[Card]:
    """The key figures."""
    table, profile = context.layers, context.profile
    states = [state for state in profile.states if state != "dense"]
    captured = states.count("captured")
    coverage = profile.coverage
    return [
        Card("tokens", formats.large(_most(table, "tokens")), f"in {_steps(table)}"),
        Card(
            "captured_layers",
            f"{captured} of {len(states)}",
            "" if captured == len(states) else "the others are not shown as zeros",
            "" if captured == len(states) else "bad",
        ),
        Card(
            "coverage",
            formats.percent(coverage),
            "" if formats.known(coverage) else "the engine's number is not known",
            "bad" if coverage < 1 else "",
        ),
        worst_card(table, "imbalance_ratio"),
        worst_card(table, "step_imbalance_p95"),
        _dead(table),
    ]


def worst_card(table: pd.DataFrame, name: str) -> Card:
    """The layer in which a ratio is largest, with the median for comparison."""
    values = column(table, name)
    if not has_values(values):
        return Card(name, formats.NOTHING, "nothing routed yet")
    worst = int(np.nanargmax(values))
    note = f"worst: layer {table['layer'].iloc[worst]} · median {np.nanmedian(values):.2f}"
    tone = "bad" if values[worst] > HOT_IMBALANCE else ""
    return Card(name, formats.ratio(values[worst]), note, tone)


def _dead(table: pd.DataFrame) -> Card:
    dead = column(table, "dead_experts")
    if not has_values(dead):
        return Card("dead_experts", formats.NOTHING)
    of = column(table, "experts")[np.isfinite(dead)].sum()
    return Card("dead_experts", formats.count(np.nansum(dead)), f"of {formats.count(of)}")


def _most(table: pd.DataFrame, name: str) -> Any:
    values = column(table, name)
    return np.nanmax(values) if has_values(values) else None


def _steps(table: pd.DataFrame) -> str:
    steps = _most(table, "steps")
    return "no steps" if steps is None else formats.plural(int(steps), "step")


def worst_layers(context: Context) -> pd.DataFrame:
    """The layers with the largest imbalance, worst first."""
    known = context.layers[context.layers["imbalance_ratio"].notna()]
    worst = known.sort_values("imbalance_ratio", ascending=False, kind="stable")
    return worst[WORST_COLUMNS].head(WORST_ROWS)


def imbalance(context: Context) -> Filled:
    """Imbalance of every layer, overall and per step."""
    table = context.layers[context.layers["imbalance_ratio"].notna()]
    if not len(table):
        empty = blank(f"No routed tokens ({context.state.phase or 'all phases'}).", context.scheme)
        return Filled(empty, "", table[_TABLE])
    names = ("imbalance_ratio", "step_imbalance_p50", "step_imbalance_p95")
    overall, p50, p95 = (column(table, name) for name in names)
    layers = table["layer"].to_numpy()
    figure = imbalance_by_layer(layers, overall, p50, p95, context.absent, context.scheme)
    caption = (
        f"Load of the hottest expert ÷ mean load, {context.selection}. Dots: all steps summed; "
        "bars: the middle (p50) to the bad (p95) steps. Steps are what the engine waits in."
    )
    return Filled(figure, caption, table[_TABLE])


VIEW = View(
    path="overview",
    title="Overview",
    question="Is there a problem, and where?",
    reports=("findings", "layers"),
    panels=(
        Panel(
            "imbalance",
            "Imbalance by layer",
            "Dot and range chart: ratio of largest to mean expert load for every layer",
            leads="layer",
        ),
    ),
    fill=fill,
)
