"""Expert: when, where and with whom is one expert busy?"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.dashboards import formats
from routeprof.dashboards.figures.common import blank, line_at, lines
from routeprof.dashboards.figures.tags import group_bars
from routeprof.dashboards.formats import clock
from routeprof.dashboards.panels import key_groups
from routeprof.dashboards.panels.gates import expert_rows
from routeprof.dashboards.panels.partners import partners
from routeprof.dashboards.panels.stretches import stretches
from routeprof.dashboards.state import duration
from routeprof.dashboards.view import (
    Card,
    Content,
    Context,
    Filled,
    Panel,
    View,
    has_values,
)
from routeprof.dashboards.views.layer import absent
from routeprof.dashboards.views.timeline import with_range
from routeprof.tables import column
from routeprof.topology import Layer

MOST_GROUPS = 24
"""Phases or tags that are drawn, those with the most tokens."""

TIME = ["time", "expert_tokens", "load_over_mean"]


def fill(context: Context) -> Content:
    """The page's content."""
    layer = context.layer
    if layer is None or layer.index in context.absent:
        return absent(context, layer, PANELS)
    expert = chosen(context, layer)
    if expert >= layer.experts:
        text = f"Layer {layer.index} has experts 0 to {layer.experts - 1}; choose one of them."
        empty = Filled(blank(text, context.scheme), "", pd.DataFrame())
        return Content(panels={panel.name: empty for panel in PANELS})
    return Content(
        panels={
            "load_time": over_time(context, layer, expert),
            "phases": by_phase(context, layer, expert),
            "tags": by_tag(context, layer, expert),
            "partners": partners(context, layer, expert),
        },
        cards=cards(context, layer, expert),
    )


def chosen(context: Context, layer: Layer) -> int:
    """The expert to look at: the chosen one, else the layer's hottest."""
    if context.state.expert is not None:
        return context.state.expert
    place = context.profile.info.layers.index(layer)
    return int(context.profile.totals.lists["counts"][:, place].sum(0).argmax())


def cards(context: Context, layer: Layer, expert: int) -> list[Card]:
    """The expert's key figures."""
    table = expert_rows(context.profile, layer)
    row, routed = table.iloc[expert], int(table["tokens"].sum())
    place = 1 + int((table["tokens"] > row["tokens"]).sum())
    even = f"even: {formats.percent(1 / layer.experts)}"
    gate = "" if formats.known(row["probability_mass"]) else "not recorded for this router"
    return [
        Card("expert", str(expert), f"of layer {layer.index}, {layer.experts} experts"),
        Card("expert_tokens", formats.large(row["tokens"]), f"of {formats.large(routed)}"),
        Card("share", formats.percent(row["share"]), even),
        Card("load_over_mean", formats.ratio(row["load_over_mean"]), "1 is the mean"),
        Card("load_rank", f"{place} of {layer.experts}" if routed else formats.NOTHING),
        Card("probability_mass", formats.percent(row["probability_mass"]), gate or even),
        Card("mean_weight", formats.number(row["mean_weight"]), "where it was chosen"),
    ]


# -- when


def over_time(context: Context, layer: Layer, expert: int) -> Filled:
    """The expert's load over all of the time, for the selected phase and tag."""
    place = context.whole.info.layers.index(layer)
    seen = stretches(context.spans, key_groups.is_selected(context), place, layer.experts)
    load = key_groups.load_over_mean(seen.counts)[:, expert]
    time = seen.middles - context.whole.totals.windows.start.min(initial=np.inf)
    columns = [time, seen.counts[:, expert], load]
    table = pd.DataFrame(dict(zip(TIME, columns, strict=True)))[np.isfinite(load)]
    if not len(table):
        return Filled(blank("No windows in this selection yet.", context.scheme), "", table)
    scale, unit = clock(duration(context.whole))
    figure = lines(
        time / scale,
        {f"expert {expert}": load},
        context.scheme,
        x_title=f"time since start, {unit}",
        y_title="load / mean",
        markers=True,
    )
    line_at(figure, 1.0, "mean", context.scheme)
    state = context.state
    kind = f"{state.phase or 'all phases'}, {f'tag {state.tag}' if state.tag else 'all tags'}"
    caption = (
        f"Tokens of expert {expert} ÷ the mean of layer {layer.index}'s experts, {kind}; a dot is "
        "a stretch of time. Drag over a range of it to see that on all views."
    )
    return Filled(with_range(figure, context, scale), caption, table)


# -- where


def by_phase(context: Context, layer: Layer, expert: int) -> Filled:
    """The expert's load in every phase, whichever is selected."""
    table = groups("phase", key_groups.by_phase(context), context, layer, expert)
    return _bars(context, table, f"Load ÷ mean by phase, {key_groups.tag_and_time(context)}.")


def by_tag(context: Context, layer: Layer, expert: int) -> Filled:
    """The expert's load under every tag, whichever is selected."""
    table = groups("tag", key_groups.by_tag(context), context, layer, expert)
    if table["tag"].tolist() in ([], ["untagged"]):
        return Filled(blank(key_groups.NO_TAGS, context.scheme), "", table)
    return _bars(context, table, f"Load ÷ mean by tag, {key_groups.phase_and_time(context)}.")


def groups(
    name: str,
    grouped: tuple[list[str], NDArray[np.int64]],
    context: Context,
    layer: Layer,
    expert: int,
) -> pd.DataFrame:
    """The expert's tokens and load by group; ``name`` is the column of the groups."""
    names, counts = grouped
    own = counts[:, context.whole.info.layers.index(layer), : layer.experts]
    loads = key_groups.load_over_mean(own)[:, expert]
    return pd.DataFrame({name: names, "expert_tokens": own[:, expert], "load_over_mean": loads})


def _bars(context: Context, table: pd.DataFrame, caption: str) -> Filled:
    if not has_values(table["load_over_mean"]):
        return Filled(blank("No routed tokens in this selection.", context.scheme), "", table)
    most = table["expert_tokens"].sort_values(ascending=False, kind="stable").index[:MOST_GROUPS]
    drawn = table.loc[most.sort_values()]
    some = "" if len(drawn) == len(table) else f" The {len(drawn)} with the most tokens."
    names, loads = drawn.iloc[:, 0].tolist(), column(drawn, "load_over_mean")
    return Filled(group_bars(names, loads, context.scheme), f"{caption}{some}", table)


PANELS = (
    Panel(
        "load_time",
        "Load over time",
        "Line chart: load of the expert over time, as a multiple of its layer's mean",
        height=280,
        drags=True,
    ),
    Panel(
        "phases",
        "Load by phase",
        "Bar chart: load of the expert in every phase, as a multiple of its layer's mean",
        height=280,
        wide=False,
    ),
    Panel(
        "tags",
        "Load by tag",
        "Bar chart: load of the expert under every tag, as a multiple of its layer's mean",
        height=280,
        wide=False,
    ),
    Panel(
        "partners",
        "Partners",
        "Bar chart: how much more often than by chance other experts serve the same tokens",
        height=280,
        leads="expert",
    ),
)

VIEW = View(
    path="expert",
    title="Expert",
    question="When, where and with whom is one expert busy?",
    reports=("experts",),
    panels=PANELS,
    fill=fill,
    controls=("between", "layer", "expert"),
)
