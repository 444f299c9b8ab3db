"""What another placement of experts would bring: computed where the reader asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from routeprof.dashboards.components import told
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.comparison import placements_by_layer
from routeprof.dashboards.panels.command_line import command_line, sentence
from routeprof.dashboards.panels.spreads import Spread
from routeprof.dashboards.panels.stepwise import is_too_long
from routeprof.dashboards.view import Context, Filled, Panel, has_values
from routeprof.errors import RouteprofError
from routeprof.placements import placed
from routeprof.tables import moe_layers
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.comparison import Comparison, RankBalance, compare

PANEL = Panel(
    "placements",
    "What another placement would bring",
    "Bar chart: slowest rank's load over the mean for every layer as placed today, by EPLB and by "
    "routeprof, with the lower bound",
    leads="layer",
)

COLUMNS = "layer placement_today placement_eplb placement_routeprof placement_bound".split()

UNASKED = (
    "Made where it is asked for: choose “Replicas of experts” in the dashboard, or run routeprof "
    "whatif placement."
)
TOO_LONG = (
    "This selection has more steps than a page can go through: narrow it, or use the command below."
)
_TODAY = {"recorded": "today, as recorded", "contiguous": "today, in order"}


def placements(over: Spread) -> Filled:
    """Slowest ÷ mean rank by layer: today's placement, EPLB's, ours and what none is below."""
    context, slots = over.context, _slots(over)
    nothing = pd.DataFrame(columns=COLUMNS)
    if slots is None:
        return Filled(blank(UNASKED, context.scheme), "", nothing)
    if is_too_long(context.profile):
        return Filled(blank(TOO_LONG, context.scheme), "", nothing)
    found = context.once(("placed", over.ranks, slots), lambda: _compared(context, over, slots))
    if isinstance(found, str):
        return Filled(blank(found, context.scheme), "", nothing)
    balance = found.held_out or found.fitted
    table = pd.DataFrame(
        dict(zip(COLUMNS, (found.layers, *vars(balance).values()), strict=True)),
    )
    series = {
        _TODAY[found.before]: balance.before,
        "EPLB": balance.eplb,
        "routeprof": balance.routeprof,
    }
    figure = placements_by_layer(
        np.array(found.layers),
        {name: values for name, values in series.items() if has_values(values)},
        balance.lower_bound,
        context.absent,
        context.scheme,
    )
    return Filled(figure, _caption(over, slots, found), table)


def commands(over: Spread) -> list[Any]:
    """How to get the placement as files that engines read."""
    slots = _slots(over)
    if slots is None:
        return []
    line = command_line(over.context, "placement", gpus=over.ranks, slots=slots, out="placed")
    text = (
        "The same from the command line, searched for longer, and the placement as files that "
        "engines read; these are fitted on all steps that are selected."
    )
    return [told("To have that placement", text, line)]


def _slots(over: Spread) -> int | None:
    """As many on each rank as its share of the experts takes, and the redundant ones."""
    redundant = over.context.state.redundant
    if redundant is None:
        return None
    return over.ranks * (-(-_experts(over.context) // over.ranks) + redundant)


def _experts(context: Context) -> int:
    """That need a place, of the layer with most."""
    return max((placed(layer) for _, layer in moe_layers(context.profile)), default=0)


def _compared(context: Context, over: Spread, slots: int) -> Comparison | str:
    """The placements, or why there are none."""
    try:
        return compare(context.profile, Cluster.even(over.ranks, slots), effort="low")
    except RouteprofError as error:
        return sentence(error)


@dataclass(frozen=True)
class _Means:
    """Each figure's mean over the layers, as text."""

    balance: RankBalance

    def __str__(self) -> str:
        names = ("today", "EPLB", "routeprof", "lower bound")
        pairs = zip(names, self.balance.means().values(), strict=True)
        return ", ".join(f"{name} {mean:.3f}" for name, mean in pairs if mean == mean)


def _is_worse(balance: RankBalance) -> bool:
    """Whether the new placement is less even than today's, mean over layers."""
    means = balance.means()
    return means["routeprof"] > means["before"]


def _caption(over: Spread, slots: int, found: Comparison) -> str:
    context = over.context
    replicas = slots - _experts(context)
    on = (
        f"Held out: fitted on the first {found.steps[0]:,} steps, shown is how the next "
        f"{found.steps[1]:,} would have been."
        if found.held_out
        else "Fitted: shown is the load that it was made for, and later load differs. Record level "
        "steps to judge placements on steps that they have not seen."
    )
    none = (
        " A layer has fewer experts than ranks: without replicas there is no placement."
        if not has_values((found.held_out or found.fitted).before)
        else ""
    )
    differ = (
        " The halves differ, as where kinds of traffic come one after another: choose a tag, or a "
        "range of time."
        if found.held_out and _is_worse(found.held_out) and not _is_worse(found.fitted)
        else ""
    )
    return (
        f"Load of the slowest of {over.ranks} ranks ÷ mean load, in the sum of the steps; {slots} "
        f"slots a layer, {replicas} of them redundant; {context.selection}. {on} Mean over layers: "
        f"{_Means(found.held_out or found.fitted)}.{differ} The search was short (effort low)."
        f"{none}"
    )
