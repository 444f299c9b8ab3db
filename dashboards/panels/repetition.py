"""Do tokens keep their experts from one to the next? A figure of level tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd

from routeprof.affinity_tables import REPETITION_COLUMNS, repetition_row
from routeprof.dashboards import formats
from routeprof.dashboards.figures.affinity import repetition_by_layer
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.panels.token_rows import affordable
from routeprof.dashboards.view import Card, Context, Filled, has_values
from routeprof.topology import Layer


def repetition_table(context: Context, layer: Layer) -> pd.DataFrame:
    """How often a request's next token keeps an expert, one row a layer that has tokens.

    Where looking at every layer would take too long, layers at even distances and the chosen one.
    """
    layers = captured(context)
    most = affordable(context.profile)
    if len(layers) > most:
        places = np.linspace(0, len(layers) - 1, most).round().astype(int)
        kept = {layers[place].index for place in places} | {layer.index}
        layers = [other for other in layers if other.index in kept]
    tables = ((other, context.profile.tokens(other.index)) for other in layers)
    rows = [repetition_row(other, table) for other, table in tables if len(table.ids)]
    return pd.DataFrame(rows, columns=REPETITION_COLUMNS)


def repetition(context: Context, table: pd.DataFrame) -> Filled:
    """Repetition of every layer against random routing."""
    if not has_values(table["repetition_first"]):
        text = "No two consecutive tokens of one request are known in this selection."
        return Filled(blank(text, context.scheme), "", table)
    columns = {name: table[name].to_numpy(dtype=float) for name in REPETITION_COLUMNS[1:]}
    figure = repetition_by_layer(
        table["layer"].to_numpy(),
        {"first choice": columns["repetition_first"], "any choice": columns["repetition_any"]},
        {
            "first choice": columns["repetition_first_random"],
            "any choice": columns["repetition_any_random"],
        },
        context.absent,
        context.scheme,
    )
    every = len(captured(context))
    some = "" if len(table) == every else f" {len(table)} of {every} layers."
    caption = (
        f"Share of a request's tokens whose next token has the same first choice, or any choice "
        f"in common, {context.selection}. Above the dotted line of random routing, neighbouring "
        f"tokens keep their experts.{some}"
    )
    return Filled(figure, caption, table)


def repetition_cards(table: pd.DataFrame, layer: Layer) -> list[Card]:
    """The layer's key figures."""
    row = table[table["layer"] == layer.index].iloc[0]
    return [
        Card(
            name,
            formats.percent(row[name]),
            f"random: {formats.percent(row[f'{name}_random'])}",
        )
        for name in ("repetition_first", "repetition_any")
    ]


def captured(context: Context) -> list[Layer]:
    """The layers that were captured."""
    return [context.profile.info.layers[place] for place in context.profile.captured]
