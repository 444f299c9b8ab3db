"""Layer: what does one layer do with its tokens?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from routeprof.dashboards import formats
from routeprof.dashboards.components import plain_table
from routeprof.dashboards.figures.common import blank, expert_bars, histogram
from routeprof.dashboards.panels.gates import expert_rows, gate_mass, gate_outputs
from routeprof.dashboards.view import Card, Content, Context, Filled, Panel, View
from routeprof.diagnose import HOT_IMBALANCE
from routeprof.metrics.gemm import gemm_size_table
from routeprof.topology import Layer

EXPERT_TABLE = "expert tokens share load_over_mean probability_mass mean_weight".split()


def fill(context: Context) -> Content:
    """The page's content."""
    layer = context.layer
    if layer is None or layer.index in context.absent:
        return absent(context, layer, PANELS)
    return Content(
        panels={
            "experts": experts(context, layer),
            "steps": step_imbalance(context, layer),
            "gemm": gemm_sizes(context, layer),
            "gate": gate_mass(context, layer),
        },
        cards=cards(context, layer),
        body=[plain_table("Gate outputs", gate_outputs(context, layer))],
    )


def absent(context: Context, layer: Layer | None, panels: Sequence[Panel]) -> Content:
    """A page on a layer that has no counts: why not, in place of every figure."""
    state = "missing" if layer is None else context.absent[layer.index]
    reason = layer.unsupported if layer is not None and layer.unsupported else ""
    text = {
        "silent": "This layer never ran a hook although the model ran: unknown, not zero.",
        "unsupported": "This layer's router cannot be read.",
        "idle": "No tokens of this selection reached the layer.",
    }.get(state, "The model has no MoE layer.")
    empty = Filled(blank(text, context.scheme), "", pd.DataFrame())
    return Content(
        panels={panel.name: empty for panel in panels},
        cards=[Card("state", state, reason[:200], "bad" if state != "idle" else "")],
    )


def cards(context: Context, layer: Layer) -> list[Card]:
    """The layer's key figures."""
    row = context.row(layer)
    gemm = context.profile.gemm()
    small = gemm.loc[gemm["layer"] == layer.index, "small_gemm_share"]
    hot = formats.known(row["imbalance_ratio"]) and row["imbalance_ratio"] > HOT_IMBALANCE
    note = f"hottest: expert {formats.count(row['hottest_expert'])}"
    gate = "" if formats.known(row["gate_entropy"]) else "not recorded for this router"
    return [
        Card("tokens", formats.large(row["tokens"]), f"in {formats.count(row['steps'])} steps"),
        Card("imbalance_ratio", formats.ratio(row["imbalance_ratio"]), note, "bad" if hot else ""),
        Card(
            "effective_experts",
            formats.number(row["effective_experts"]),
            f"of {layer.experts} · {formats.count(row['dead_experts'])} dead",
        ),
        Card(
            "aux_loss",
            formats.ratio(row["aux_loss"]),
            gate or "1 is balanced",
        ),
        Card(
            "gate_entropy",
            formats.ratio(row["gate_entropy"]),
            gate or f"uniform: {np.log(layer.experts):.2f}",
        ),
        Card("top1_probability", formats.percent(row["top1_probability"]), gate or "of a token"),
        Card("small_gemm_share", formats.percent(small.iloc[0] if len(small) else None)),
    ]


def experts(context: Context, layer: Layer) -> Filled:
    """Load of each of the layer's experts."""
    table = expert_rows(context.profile, layer)
    ranked = context.state.order != "index"
    if ranked:
        table = table.sort_values("tokens", ascending=False, kind="stable")
    shown = table[EXPERT_TABLE].rename(columns={"tokens": "expert_tokens"})
    if not table["tokens"].sum():
        return Filled(blank("No routed tokens in this selection.", context.scheme), "", shown)
    loads, numbers = table["load_over_mean"].to_numpy(), table["expert"].to_numpy()
    figure = expert_bars(loads, numbers, context.scheme, ranked=ranked)
    caption = (
        f"Layer {layer.index}, {context.selection}: tokens of each expert ÷ the layer's mean. "
        f"Top-{layer.top_k} of {layer.experts} experts, {layer.router} router."
    )
    return Filled(figure, caption, shown)


def step_imbalance(context: Context, layer: Layer) -> Filled:
    """How the per-step imbalance is distributed over the tokens."""
    position = context.profile.info.layers.index(layer)
    weights = context.profile.totals.lists["imbalance_histogram"][:, position].sum(0)
    per_octave = context.profile.info.imbalance_bins_per_octave
    edges = 2.0 ** (np.arange(len(weights) + 1) / per_octave)
    table = pd.DataFrame({"from": edges[:-1], "step_tokens": weights})
    table = table[table["step_tokens"] > 0]
    if not len(table):
        return Filled(blank("No steps in this selection.", context.scheme), "", table)
    row = context.row(layer)
    kept = table.index.to_numpy()
    span = slice(kept.min(), kept.max() + 1)
    figure = histogram(
        ((edges[:-1] + edges[1:]) / 2)[span],
        weights[span],
        context.scheme,
        x="max / mean load of the step",
        y="tokens",
        marks={"p50": row["step_imbalance_p50"], "p95": row["step_imbalance_p95"]},
        width=np.diff(edges)[span],
    )
    caption = "Steps by their imbalance, weighted by their tokens; dotted: p50 and p95."
    return Filled(figure, caption, table)


def gemm_sizes(context: Context, layer: Layer) -> Filled:
    """How many tokens the expert matrix products get."""
    position = context.profile.info.layers.index(layer)
    cells = context.profile.totals.lists["gemm_histogram"][:, position].sum(0)
    if not cells[1:].any():
        return Filled(blank("No expert ran in this selection.", context.scheme), "", _no_sizes())
    sizes = gemm_size_table(cells)
    last = int(np.flatnonzero(cells).max())
    labels = [
        f"{low}" if low == high else f"{low}–{high}"
        for low, high in zip(sizes.lower[1:], sizes.upper[1:], strict=True)
    ][:last]
    figure = histogram(
        labels, cells[1 : last + 1], context.scheme, x="tokens per expert and step", y="GEMMs"
    )
    figure.update_xaxes(type="category")
    caption = (
        "Expert matrix products by their number of tokens. Below 16, one tensor-core tile, they "
        "are bound by reading the weights."
    )
    table = pd.DataFrame({"gemm_tokens": labels, "cells": cells[1 : last + 1]})
    return Filled(figure, caption, table)


def _no_sizes() -> pd.DataFrame:
    return pd.DataFrame({"gemm_tokens": [], "cells": []})


PANELS = (
    Panel(
        "experts",
        "Load of the experts",
        "Bar chart: load of every expert of the layer",
        leads="expert",
    ),
    Panel(
        "steps",
        "Imbalance of the steps",
        "Histogram: tokens by the imbalance of their step",
        height=280,
        wide=False,
    ),
    Panel(
        "gemm",
        "Size of the expert GEMMs",
        "Bar chart: expert matrix products by number of tokens",
        height=280,
        wide=False,
    ),
    Panel(
        "gate",
        "Load against gate mass",
        "Scatter chart: share of the load against the router's mean probability of every expert",
        leads="expert",
    ),
)

VIEW = View(
    path="layer",
    title="Layer",
    question="What does one layer do with its tokens?",
    reports=("experts", "layers"),
    panels=PANELS,
    fill=fill,
    controls=("between", "layer", "order"),
)
