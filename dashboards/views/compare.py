"""Compare: what changed, and is it more than noise?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from routeprof.dashboards import formats
from routeprof.dashboards.components import notice
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.comparison import divergence_by_layer, ratios_by_layer
from routeprof.dashboards.figures.experts import change_bars
from routeprof.dashboards.panels.comparison import Pair, pair
from routeprof.dashboards.panels.noise import QUANTILE
from routeprof.dashboards.view import Card, Content, Context, Filled, Panel, View, has_values
from routeprof.profile import Profile
from routeprof.topology import Layer

DIVERGENCE = "layer divergence noise_bound".split()
IMBALANCE = "layer imbalance_a imbalance_b".split()
SHARES = "expert share_a share_b share_change".split()


def fill(context: Context) -> Content:
    """The page's content."""
    both = pair(context)
    if isinstance(both, str):
        columns = {"divergence": DIVERGENCE, "imbalances": IMBALANCE, "share_changes": SHARES}
        panels = {
            name: Filled(blank(both, context.scheme), "", pd.DataFrame(columns=names))
            for name, names in columns.items()
        }
        return Content(panels=panels)
    return Content(
        panels={
            "divergence": divergence(both),
            "imbalances": imbalances(both),
            "share_changes": share_changes(both),
        },
        cards=cards(both),
        lead=[notice(f"B: {line}") for line in messages(context)],
    )


def messages(context: Context) -> list[str]:
    """What the reader must know of the other recording."""
    against = context.against
    return [against.message] if against is not None and against.message else []


def cards(both: Pair) -> list[Card]:
    """The key figures."""
    against = both.context.against
    names = (both.context.name, against.name if against else "")
    tokens = [
        Card(name, formats.large(_tokens(profile)), title)
        for name, profile, title in zip(
            ("tokens_a", "tokens_b"),
            (both.context.profile, against.profile if against else both.context.profile),
            names,
            strict=True,
        )
    ]
    largest, layer = _largest(both)
    return [changed_card(both), Card("divergence_largest", largest, layer), *tokens]


def changed_card(both: Pair) -> Card:
    """How many layers are further apart than chance puts them."""
    known = np.isfinite(both.noise) & np.isfinite(both.divergence)
    if not known.any():
        return Card("layers_changed", formats.NOTHING, "the noise is not known")
    above = int((both.divergence > both.noise).sum())
    by_chance = (1 - QUANTILE) * known.sum()
    note = f"chance alone: about {by_chance:.0f}" if by_chance >= 1 else "chance alone: about none"
    return Card("layers_changed", f"{above} of {known.sum()}", note)


def _largest(both: Pair) -> tuple[str, str]:
    if not has_values(both.divergence):
        return formats.NOTHING, "no layer has tokens in both"
    place = int(np.nanargmax(both.divergence))
    noise = both.noise[place]
    limit = f"noise bound {_written(noise)}" if np.isfinite(noise) else "noise not known"
    return _written(both.divergence[place]), f"layer {both.indices[place]} · {limit}"


def _written(divergence: float) -> str:
    return "< 0.001" if 0 < divergence < 0.001 else formats.number(divergence)


def _tokens(profile: Profile) -> int:
    return int(profile.totals.sums["tokens"].sum(0).max(initial=0))


def divergence(both: Pair) -> Filled:
    """How far the two lie apart in every layer, and how far chance would put them."""
    table = pd.DataFrame(
        {"layer": both.indices, "divergence": both.divergence, "noise_bound": both.noise}
    )
    seen = table[table["divergence"].notna()]
    if not len(seen):
        text = "No layer has tokens in both recordings."
        return Filled(blank(text, both.context.scheme), "", seen)
    figure = divergence_by_layer(
        seen["layer"].to_numpy(),
        seen["divergence"].to_numpy(),
        seen["noise_bound"].to_numpy(),
        _unseen(both),
        both.context.scheme,
    )
    caption = (
        f"Jensen–Shannon divergence between the load shares of A and B; {selections(both)}. 0 is "
        f"equal, 1 has no expert in common. {noise_text(both)}"
    )
    return Filled(figure, caption, seen)


def noise_text(both: Pair) -> str:
    """How the noise bound was found, or why there is none."""
    numbers = [piece.number for piece in both.pieces]
    unit = both.pieces[0].unit
    if not np.isfinite(both.noise).any():
        return (
            f"How much is noise cannot be told from {numbers[0]} and {numbers[1]} {unit}: it "
            "takes at least two of each."
        )
    return (
        f"The noise bound is what {QUANTILE:.0%} of resamples of one recording against itself "
        f"stay below, from {numbers[0]:,} and {numbers[1]:,} {unit}; the larger of both."
    )


def selections(both: Pair) -> str:
    """What of A and of B is compared."""
    state = both.context.state
    if state.between is None:
        return both.context.selection
    return f"A: {both.context.selection}; B: all of its time"


def _unseen(both: Pair) -> dict[int, str]:
    """Layers that are not drawn, and why."""
    missing = {int(index): "no tokens" for index in both.indices[np.isnan(both.divergence)]}
    return missing | {index: state for index, state in both.absent.items() if index in missing}


def imbalances(both: Pair) -> Filled:
    """Imbalance of both, side by side."""
    one, other = both.imbalance
    table = pd.DataFrame({"layer": both.indices, "imbalance_a": one, "imbalance_b": other})
    seen = table[np.isfinite(one) | np.isfinite(other)]
    figure = ratios_by_layer(
        seen["layer"].to_numpy(),
        {"A": seen["imbalance_a"].to_numpy(), "B": seen["imbalance_b"].to_numpy()},
        {index: state for index, state in both.absent.items() if index not in set(seen["layer"])},
        "max / mean load",
        both.context.scheme,
    )
    caption = (
        f"Load of the hottest expert ÷ mean load, all steps together; {selections(both)}. Two "
        "recordings can be equally imbalanced by different experts."
    )
    return Filled(figure, caption, seen)


def _chosen(both: Pair) -> Layer | None:
    """The chosen layer, else the one that differs most."""
    if both.context.state.layer is not None:
        return both.context.layer
    if not has_values(both.divergence):
        return None
    return both.layers[int(np.nanargmax(both.divergence))]


def share_changes(both: Pair) -> Filled:
    """By how much each expert's share of the chosen layer differs."""
    layer = _chosen(both)
    place = np.flatnonzero(both.indices == (-1 if layer is None else layer.index))
    if layer is None or not len(place) or np.isnan(both.divergence[place[0]]):
        text = "The chosen layer has no tokens in one of the two recordings."
        return Filled(blank(text, both.context.scheme), "", pd.DataFrame(columns=SHARES))
    one, other = (
        counts[place[0], : layer.experts] / counts[place[0]].sum() for counts in both.counts
    )
    change = 100 * (other - one)
    if not change.any():
        text = f"The experts of layer {layer.index} have the same shares in both."
        return Filled(blank(text, both.context.scheme), "", pd.DataFrame(columns=SHARES))
    order = np.argsort(-np.abs(change), kind="stable")
    table = pd.DataFrame(
        {
            "expert": order,
            "share_a": one[order],
            "share_b": other[order],
            "share_change": change[order],
        }
    )
    figure = change_bars(change[order], order, both.context.scheme)
    caption = (
        f"Layer {layer.index}: share of the load in B minus that in A, in percentage points; "
        f"{selections(both)}. An even share is {100 / layer.experts:.3g} %."
    )
    return Filled(figure, caption, table)


VIEW = View(
    path="compare",
    title="Compare",
    question="What changed, and is it more than noise?",
    reports=("layers", "experts"),
    panels=(
        Panel(
            "divergence",
            "Divergence by layer",
            "Bar chart: divergence between both recordings and its noise bound for every layer",
            leads="layer",
        ),
        Panel(
            "imbalances",
            "Imbalance of both",
            "Bar chart: imbalance of every layer in both recordings",
            height=300,
            leads="layer",
        ),
        Panel(
            "share_changes",
            "Experts that changed",
            "Bar chart: difference of every expert's share of the chosen layer",
            height=300,
            leads="expert",
        ),
    ),
    fill=fill,
    controls=("between", "layer", "against"),
)
