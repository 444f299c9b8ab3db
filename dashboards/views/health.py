"""Health: may I trust these numbers?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd

from routeprof.dashboards import formats
from routeprof.dashboards.components import plain_table
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.layers import bars_by_layer
from routeprof.dashboards.live.activity import is_quiet
from routeprof.dashboards.panels.finding_list import finding_list
from routeprof.dashboards.view import (
    Card,
    Content,
    Context,
    Filled,
    Panel,
    View,
    has_values,
)
from routeprof.diagnose import completeness, gravest_first
from routeprof.recording.reader import RankFiles
from routeprof.tables import column

TABLE = "layer state coverage tokens assignments invalid layer_name".split()
COMPLETE = "Nothing is known to be missing in what is selected."
RANKS = "rank rank_state age problems cost_seconds busy_seconds own_cost".split()


def fill(context: Context) -> Content:
    """The page's content."""
    return Content(
        panels={"coverage": coverage(context)},
        cards=cards(context),
        lead=[trust(context)],
        body=[plain_table("Ranks", ranks(context))],
    )


def trust(context: Context) -> Any:
    """What was not captured, or went wrong while it was."""
    found = gravest_first(completeness(context.profile, context.now))
    return finding_list("Findings on capture", found, context.state, COMPLETE)


def cards(context: Context) -> list[Card]:
    """The key figures."""
    states = Counter(state for state in context.profile.states if state != "dense")
    others = [(state, number) for state, number in states.items() if state != "captured"]
    missing = ", ".join(f"{number} {state}" for state, number in others)
    invalid = column(context.layers, "invalid")
    covered = context.profile.coverage
    return [
        Card(
            "captured_layers",
            f"{states['captured']} of {states.total()}",
            missing,
            "bad" if missing else "",
        ),
        Card(
            "coverage",
            formats.percent(covered),
            "" if formats.known(covered) else "the engine's number is not known",
            "bad" if covered < 1 else "",
        ),
        Card("invalid", formats.count(np.nansum(invalid) if has_values(invalid) else None)),
        Card("own_cost", *own_cost(context)),
        Card("rank_state", context.activity.kind, context.activity.text),
    ]


def own_cost(context: Context) -> tuple[str, str]:
    """Our share of the engine's time over all ranks, and per step."""
    states = [rank.state for rank in _ranks(context) if rank.state is not None]
    busy = sum(state.busy_seconds for state in states)
    cost = sum(state.cost_seconds for state in states)
    if not busy:
        return formats.NOTHING, "not measured yet"
    steps = int(context.whole.totals.sums["steps"].max(1, initial=0).sum())
    each = f", {formats.seconds(cost / steps)} per step" if steps else ""
    return formats.percent(cost / busy), f"{formats.seconds(cost)} of {formats.seconds(busy)}{each}"


def layer_table(context: Context) -> pd.DataFrame:
    """One row a MoE layer: its state, and what was counted; nothing where nothing was."""
    pairs = zip(context.profile.info.layers, context.profile.states, strict=True)
    states = {layer.index: state for layer, state in pairs}
    table = context.layers.assign(state=context.layers["layer"].map(states))
    return table[TABLE]


def coverage(context: Context) -> Filled:
    """Coverage by layer; layers without counts say why."""
    table = layer_table(context)
    seen = table[~table["layer"].isin(list(context.absent))]
    if not has_values(column(seen, "coverage")):
        text = "How many assignments the engine made is not known for this selection."
        return Filled(blank(text, context.scheme), "", table)
    figure = bars_by_layer(
        seen["layer"].to_numpy(),
        {"coverage": column(seen, "coverage")},
        context.absent,
        "coverage",
        context.scheme,
    )
    caption = (
        f"Captured ÷ made assignments, {context.selection}. Below 100 % a layer's numbers are "
        "of a part only; a shaded layer was not captured, which is not zero."
    )
    return Filled(figure, caption, table)


def ranks(context: Context) -> pd.DataFrame:
    """One row a rank: signs of life, problems, own cost."""
    rows = [_rank_row(rank, context.now) for rank in _ranks(context)]
    return pd.DataFrame(rows, columns=RANKS)


def _rank_row(rank: RankFiles, now: float) -> dict[str, object]:
    state = rank.state
    if state is None:
        return {"rank": rank.rank, "rank_state": "unknown", "problems": "rank.json is damaged"}
    problems = ", ".join(
        f"{name.replace('_', ' ')}: {value}" for name, value in state.problems.items()
    )
    age = f"{formats.seconds(round(max(0.0, now - state.updated)))} ago"
    return {
        "rank": rank.rank,
        "rank_state": "quiet" if is_quiet(state, now) else state.state,
        "age": age if state.state != "stopped" else "finished",
        "problems": problems or "none",
        "cost_seconds": state.cost_seconds,
        "busy_seconds": state.busy_seconds,
        "own_cost": state.cost_seconds / state.busy_seconds if state.busy_seconds else np.nan,
    }


def _ranks(context: Context) -> tuple[RankFiles, ...]:
    return context.whole.files.ranks if context.whole.files is not None else ()


VIEW = View(
    path="health",
    title="Health",
    question="May I trust these numbers?",
    reports=("layers", "findings"),
    panels=(
        Panel(
            "coverage",
            "Coverage by layer",
            "Bar chart: captured share of the assignments of every layer",
            height=300,
            leads="layer",
        ),
    ),
    fill=fill,
)
