"""Heatmap: which experts of which layers are hot or cold?"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.heatmaps import label_columns, load_heatmap, share_heatmap
from routeprof.dashboards.state import MEASURES
from routeprof.dashboards.view import Content, Context, Filled, Panel, View, has_values

COLUMNS = {"load": "load_over_mean", "share": "share", "mass": "probability_mass"}


def fill(context: Context) -> Content:
    """The page's content."""
    return Content(panels={"heatmap": heatmap(context)})


def heatmap(context: Context) -> Filled:
    """The chosen measure of every layer and expert; a layer without counts is an empty row."""
    experts, state = context.profile.experts(), context.state
    values, names = grid(context, experts, COLUMNS[state.measure])
    table = experts[["layer", "expert", "tokens", "share", "load_over_mean", "probability_mass"]]
    table = table.rename(columns={"tokens": "expert_tokens"})
    if not has_values(values.ravel()):
        return Filled(blank(_nothing(context), context.scheme), "", table)
    loads, _ = grid(context, experts, "load_over_mean")
    order = ORDERINGS[state.order](loads)
    shown = np.take_along_axis(values, order, axis=1)
    axis = AXES[state.order]
    if state.measure == "load":
        figure = load_heatmap(shown, names, order, context.scheme, axis)
    else:
        title = MEASURES[state.measure].lower()
        figure = share_heatmap(shown, names, order, context.scheme, title, axis)
    if state.order == "load":
        label_columns(figure, order[0])
    return Filled(figure, _caption(context), table)


def grid(
    context: Context, experts: pd.DataFrame, name: str
) -> tuple[NDArray[np.float64], list[str]]:
    """A column as [layers, experts] with the names of the rows; NaN where nothing is known."""
    layers = [layer for layer in context.whole.info.layers if layer.kind == "moe"]
    places = {layer.index: place for place, layer in enumerate(layers)}
    values = np.full((len(layers), max((layer.experts for layer in layers), default=0)), np.nan)
    rows = experts["layer"].map(places).to_numpy(dtype=np.int64)
    values[rows, experts["expert"].to_numpy(dtype=np.int64)] = experts[name].to_numpy(dtype=float)
    return values, row_names(context)


def row_names(context: Context) -> list[str]:
    """What the MoE layers are called; those without counts say why."""
    states = context.absent
    return [
        f"{layer.index} · {states[layer.index]}" if layer.index in states else str(layer.index)
        for layer in context.whole.info.layers
        if layer.kind == "moe"
    ]


def ranking(loads: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each layer its experts, the most loaded first; unknown ones last."""
    return np.argsort(np.where(np.isnan(loads), np.inf, -loads), axis=1, kind="stable")


def by_load(loads: NDArray[np.float64]) -> NDArray[np.int64]:
    """For all layers the same order of experts: the most loaded over all of them first."""
    together = np.nansum(loads, axis=0, keepdims=True)
    return np.broadcast_to(np.argsort(-together, axis=1, kind="stable"), loads.shape)


def by_index(loads: NDArray[np.float64]) -> NDArray[np.int64]:
    """Experts as they are numbered."""
    return np.broadcast_to(np.arange(loads.shape[1]), loads.shape)


ORDERINGS = {"index": by_index, "load": by_load, "rank": ranking}
AXES = {
    "index": "expert",
    "load": "expert, the most loaded of all layers first",
    "rank": "experts, each layer's most loaded first",
}


def _nothing(context: Context) -> str:
    if context.state.measure == "mass" and not context.profile.info.gate:
        return "This recording was made without the router's outputs (gate=False)."
    if context.state.measure == "mass" and len(context.profile.experts()):
        return "No router of this model hands out probabilities."
    return "No routed tokens in this selection."


def _caption(context: Context) -> str:
    what = {
        "load": "Tokens of each expert ÷ the mean of its layer, in doublings: orange is above the "
        "mean, blue below",
        "share": "Each expert's share of its layer's assignments",
        "mass": "Mean probability that the router gives each expert, chosen or not",
    }[context.state.measure]
    holes = " Shaded rows were not captured, which is not zero." if context.absent else ""
    return f"{what}; {context.selection}. Click a cell to open its expert.{holes}"


VIEW = View(
    path="heatmap",
    title="Heatmap",
    question="Which experts of which layers are hot or cold?",
    reports=("experts",),
    panels=(
        Panel(
            "heatmap",
            "Experts by layer",
            "Heatmap with a row for each layer and a column for each expert",
            height=620,
            leads="cell",
        ),
    ),
    fill=fill,
    controls=("between", "measure", "order"),
)
