"""Affinity: which experts go together, and do tokens keep their experts?"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.affinity_tables import Pairs, pairs, transitions
from routeprof.dashboards import formats
from routeprof.dashboards.figures.affinity import lift_heatmap, transition_heatmap
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.panels.expert_pairs import NO_PAIRS, pair_table, tellable
from routeprof.dashboards.panels.repetition import (
    captured,
    repetition,
    repetition_cards,
    repetition_table,
)
from routeprof.dashboards.panels.token_rows import NEEDED, has_tokens
from routeprof.dashboards.view import Card, Content, Context, Filled, Panel, View
from routeprof.dashboards.views.layer import absent
from routeprof.token_parts import TokenTable
from routeprof.topology import Layer


def fill(context: Context) -> Content:
    """The page's content."""
    layer = context.layer
    if not has_tokens(context.profile):
        return _nothing(context, NEEDED)
    if layer is None or layer.index in context.absent:
        return absent(context, layer, PANELS)
    tokens = context.profile.tokens(layer.index)
    if not len(tokens.ids):
        text = f"No single tokens of layer {layer.index} were kept in this selection."
        return _nothing(context, text)
    found = pairs(tokens.ids, layer) if layer.choices > 1 else None
    table = pair_table(found) if found is not None else pd.DataFrame()
    repeated = repetition_table(context, layer)
    return Content(
        panels={
            "lift": lift(context, layer, found, table),
            "next": inter_layer(context, layer, tokens),
            "repetition": repetition(context, repeated),
        },
        cards=[*repetition_cards(repeated, layer), _strongest(found, table)],
    )


def _nothing(context: Context, text: str) -> Content:
    empty = Filled(blank(text, context.scheme), "", pd.DataFrame())
    return Content(panels={panel.name: empty for panel in PANELS})


# -- within a token


def lift(context: Context, layer: Layer, found: Pairs | None, table: pd.DataFrame) -> Filled:
    """How much more often than independently two experts serve the same token.

    Args:
        found: None where a token has one expert only.
        table: the pairs, by lift.
    """
    if found is None:
        return Filled(blank(NO_PAIRS, context.scheme), "", table)
    if not len(table):
        text = "No two experts had tokens in this selection."
        return Filled(blank(text, context.scheme), "", table)
    figure = lift_heatmap(found.lifts, found.random, context.scheme)
    caption = (
        f"Layer {layer.index}, {context.selection}, {formats.count(found.tokens)} tokens: how much "
        "more often than by independent choice one token takes both experts, in doublings around "
        f"what random top-{layer.choices} routing gives, {found.random:.2f}. Orange pairs attract "
        "each other, blue ones avoid each other."
    )
    return Filled(figure, caption, table)


def _strongest(found: Pairs | None, table: pd.DataFrame) -> Card:
    known = tellable(table) if len(table) else table
    if found is None or not len(known):
        return Card("strongest_pair", formats.NOTHING, "too few tokens to tell")
    row = known.iloc[0]
    note = f"lift {row['lift']:.2f} · random {found.random:.2f}"
    return Card("strongest_pair", f"{row['expert']:.0f} + {row['partner']:.0f}", note)


# -- from layer to layer


def inter_layer(context: Context, layer: Layer, tokens: TokenTable) -> Filled:
    """Where the tokens of an expert go in the next layer that has tokens."""
    after = [other for other in captured(context) if other.index > layer.index]
    tables = ((other, context.profile.tokens(other.index)) for other in after)
    following, theirs = next((pair for pair in tables if len(pair[1].ids)), (None, None))
    if following is None or theirs is None:
        text = f"Layer {layer.index} is the last one with tokens."
        return Filled(blank(text, context.scheme), "", pd.DataFrame())
    found = transitions(layer, tokens, following, theirs)
    if not found.tokens:
        text = f"Layers {layer.index} and {following.index} have no tokens of the same steps."
        return Filled(blank(text, context.scheme), "", pd.DataFrame())
    figure = transition_heatmap(found.shares, layer.index, following.index, context.scheme)
    caption = (
        f"Of the tokens that take an expert of layer {layer.index}, the share that takes each "
        f"expert of layer {following.index}, {context.selection}, "
        f"{formats.count(found.tokens)} tokens. At random it is "
        f"{formats.percent(following.choices / following.experts)}; a row adds up to "
        f"{following.choices}, a token's choices."
    )
    return Filled(figure, caption, _pairs_by_share(found.shares))


def _pairs_by_share(chances: NDArray[np.float64]) -> pd.DataFrame:
    """The pairs of experts that share tokens, the largest share first."""
    one, other = np.nonzero(np.nan_to_num(chances))
    shares = chances[one, other]
    order = np.argsort(-shares, kind="stable")
    columns = [one[order], other[order], shares[order]]
    return pd.DataFrame(dict(zip(("expert", "next_expert", "next_share"), columns, strict=True)))


PANELS = (
    Panel(
        "lift",
        "Pairs of experts",
        "Heatmap: how often every two experts of the layer serve the same token",
        height=420,
        wide=False,
    ),
    Panel(
        "next",
        "Into the next layer",
        "Heatmap: share of each expert's tokens that choose each expert of the next layer",
        height=420,
        wide=False,
    ),
    Panel(
        "repetition",
        "Repetition by layer",
        "Line chart: share of tokens that keep an expert of the token before, for every layer",
        height=300,
        leads="layer",
    ),
)

VIEW = View(
    path="affinity",
    title="Affinity",
    question="Which experts go together, and do tokens keep their experts?",
    reports=("affinity", "transitions", "repetition"),
    panels=PANELS,
    fill=fill,
    controls=("between", "layer"),
)
