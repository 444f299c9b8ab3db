"""Overflow: what would a capacity limit drop, and what would it waste?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from routeprof.dashboards import formats
from routeprof.dashboards.components import plain_table
from routeprof.dashboards.figures.common import blank, lines
from routeprof.dashboards.figures.layers import bars_by_layer
from routeprof.dashboards.panels.advice import advice, every_factor
from routeprof.dashboards.panels.factors import among_recorded, exact
from routeprof.dashboards.view import Card, Content, Context, Filled, Panel, View, has_values
from routeprof.tables import moe_layers

TABLE = "layer overflow_rate padding_rate overflow_assignments steps_with_overflow steps".split()


def fill(context: Context) -> Content:
    """The page's content."""
    table = context.profile.overflow()
    if not len(table) or context.factor is None:
        empty = blank("No steps in this selection.", context.scheme)
        nothing = Filled(empty, "", pd.DataFrame(columns=TABLE))
        return Content(panels={"factors": nothing, "layers": nothing})
    at = table[table["capacity_factor"] == context.factor]
    return Content(
        panels={
            "factors": by_factor(context, table, context.factor),
            "layers": by_layer(context, at, context.factor),
        },
        cards=cards(context, table, at),
        lead=[plain_table(*factors_needed(context, table)), advice(context)],
    )


def verb(table: pd.DataFrame) -> str:
    """``overflowed`` where the model really drops; ``would overflow`` where it doesn't."""
    happened = table["happened"].astype(bool)
    if happened.all():
        return "overflowed"
    return "would overflow" if not happened.any() else "overflowed or would overflow"


def over_factors(context: Context, table: pd.DataFrame) -> pd.DataFrame:
    """Overflow and padding of all layers together, and of the worst, for each factor."""
    totals = context.profile.totals.lists
    over, slots, routed = (
        totals[name].sum((0, 1)) for name in ("overflow", "capacity_slots", "counts")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        padding = (slots - routed.sum() + over) / slots
        rate = over / np.float64(routed.sum())
    worst = table.groupby("capacity_factor")["overflow_rate"].max()
    every = pd.DataFrame(
        {
            "capacity_factor": context.profile.info.capacity_factors,
            "overflow_rate": rate,
            "padding_rate": padding,
        }
    )
    every.insert(2, "overflow_worst", every["capacity_factor"].map(worst))
    return every.sort_values("capacity_factor", ignore_index=True)


def cards(context: Context, table: pd.DataFrame, at: pd.DataFrame) -> list[Card]:
    """What happens at the chosen factor."""
    every = over_factors(context, table)
    row = every[every["capacity_factor"] == context.factor].iloc[0]
    rates = at["overflow_rate"].to_numpy()
    worst = at["layer"].iloc[int(np.nanargmax(rates))] if np.isfinite(rates).any() else None
    note = f"{verb(table)}, all layers"
    steps = at["steps_with_overflow"].sum() / max(at["steps"].sum(), 1)
    return [
        Card("capacity_factor", f"{context.factor:g}", "rule: rounded up"),
        Card("overflow_rate", formats.percent(row["overflow_rate"]), note),
        Card(
            "overflow_worst",
            formats.percent(row["overflow_worst"]),
            f"layer {worst}" if worst is not None else "",
        ),
        Card("padding_rate", formats.percent(row["padding_rate"]), "empty slots, all layers"),
        Card("overflow_steps", formats.percent(steps), "of all layers' steps"),
    ]


def factors_needed(context: Context, table: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Title and rows: the capacity factor that some rates of overflow need."""
    steps = context.steps
    top_k = {layer.index: layer.choices for _, layer in moe_layers(context.profile)}
    if set(steps) == set(context.profile.layer_indices):
        routed = {index: own for index, own in steps.items() if own.counts.any()}
        if routed:
            return "Capacity factor needed, exact by step", exact(routed, top_k)
    every = over_factors(context, table)
    if not has_values(every["overflow_worst"]):
        return "Capacity factor needed", pd.DataFrame()
    return "Capacity factor needed, among those recorded", among_recorded(every, table)


def by_factor(context: Context, table: pd.DataFrame, factor: float) -> Filled:
    """Overflow against padding over the factors."""
    recorded = over_factors(context, table)
    fine = every_factor(context, recorded)
    every = recorded if fine is None else fine
    names = {
        f"{verb(table)}, all layers": "overflow_rate",
        f"{verb(table)}, worst layer": "overflow_worst",
        "padding, all layers": "padding_rate",
    }
    figure = lines(
        every["capacity_factor"].to_numpy(),
        {name: every[column].to_numpy() for name, column in names.items()},
        context.scheme,
        x_title="capacity factor",
        y_title="rate",
        percent=True,
        markers=fine is None,
        at=factor,
    )
    caption = (
        f"Share of assignments above capacity and of slots left empty, {context.selection}. A "
        f"larger factor drops less and wastes more. {_drawn(fine is not None)} {_engine(table)}"
    )
    return Filled(figure, caption, every)


def by_layer(context: Context, at: pd.DataFrame, factor: float) -> Filled:
    """Overflow and padding of every layer at one factor."""
    figure = bars_by_layer(
        at["layer"].to_numpy(),
        {
            verb(at): at["overflow_rate"].to_numpy(),
            "padding": at["padding_rate"].to_numpy(),
        },
        context.absent,
        "rate",
        context.scheme,
    )
    caption = f"Each layer at capacity factor {factor:g}, {context.selection}."
    return Filled(figure, caption, at[TABLE])


def _drawn(fine: bool) -> str:
    if fine:
        return "Exact from every step, between the recorded factors too."
    return "Exact at the recorded factors; between them lines only join these."


def _engine(table: pd.DataFrame) -> str:
    if verb(table) == "would overflow":
        return "This engine drops nothing: the figures say what would overflow if it did."
    return "This model has a capacity limit and drops what is above it."


VIEW = View(
    path="overflow",
    title="Overflow",
    question="What would a capacity limit drop, and what would it waste?",
    reports=("overflow",),
    panels=(
        Panel(
            "factors",
            "Overflow and padding by capacity factor",
            "Line chart: overflow rate and padding rate against the capacity factor",
            height=320,
        ),
        Panel(
            "layers",
            "Overflow by layer",
            "Bar chart: overflow rate and padding rate of every layer at the chosen factor",
            height=300,
            leads="layer",
        ),
    ),
    fill=fill,
    controls=("between", "factor"),
)
