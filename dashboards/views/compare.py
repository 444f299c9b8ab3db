"""Compare: what changed, and is it more than noise?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from routeprof.dashboards import formats
from routeprof.dashboards.components import notice, told
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.comparison import divergence_by_layer, ratios_by_layer
from routeprof.dashboards.figures.experts import change_bars
from routeprof.dashboards.panels.comparison import Pair, pair
from routeprof.dashboards.panels.differences import diff_line, full, noise_text, verdicts
from routeprof.dashboards.view import Card, Content, Context, Filled, Panel, View, has_values
from routeprof.profile import Profile

DIVERGENCE = "phase tag layer divergence noise_bound p change experts_changed".split()
IMBALANCE = "layer imbalance_a imbalance_b".split()
SHARES = "expert share_a share_b share_change noise_bound p change".split()


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
        lead=[notice(f"B: {both.other.message}")] if both.other.message else [],
        body=[*caveats(both), command(both)],
    )


def caveats(both: Pair) -> list[Any]:
    """What is to be known of the two before their differences are believed."""
    text = " ".join(full(line) for line in both.difference.caveats)
    return [told("Before you compare", text)] if text else []


def command(both: Pair) -> Any:
    """The command that says the same."""
    text = (
        "With the directories of both. The command has more options: another level, every expert's "
        "change as a CSV file, an exit status that says whether anything changed."
    )
    return told("The same from the command line", text, diff_line(both.context))


def cards(both: Pair) -> list[Card]:
    """The key figures."""
    return [
        changed_card(both),
        largest_card(both),
        Card("tokens_a", formats.large(_tokens(both.context.profile)), both.context.name),
        Card("tokens_b", formats.large(_tokens(both.other.profile)), both.other.name),
    ]


def changed_card(both: Pair) -> Card:
    """How many layers of how many changed by more than noise, counted as ``routeprof diff`` does.

    A layer counts once in each phase and tag.
    """
    rows = both.difference.layers["significant"]
    unknown = int(rows.isna().sum())
    if unknown == len(rows):
        return Card("layers_changed", formats.NOTHING, "noise is not known, see below")
    value = f"{int(rows.eq(True).sum())} of {len(rows) - unknown}"
    groups = len(both.difference.groups)
    note = f"in {groups} phases and tags, " if groups > 1 else ""
    note += f"level {both.difference.alpha:g} for all together"
    return Card("layers_changed", value, f"{note}; {unknown} not known" if unknown else note)


def largest_card(both: Pair) -> Card:
    """The layer that lies furthest apart, in whichever phase and tag."""
    rows = both.difference.layers
    if not has_values(rows["divergence"].to_numpy(dtype=float)):
        return Card("divergence_largest", formats.NOTHING, "no layer has tokens in both")
    row = rows.nlargest(1, "divergence").to_dict("records")[0]
    noise = row["noise_bound"]
    limit = f"noise bound {_written(noise)}" if np.isfinite(noise) else "noise not known"
    where = f"layer {row['layer']}, {row['phase']} · {limit}"
    return Card("divergence_largest", _written(row["divergence"]), where)


def _written(divergence: float) -> str:
    return "< 0.001" if 0 < divergence < 0.001 else formats.number(divergence)


def _tokens(profile: Profile) -> int:
    return int(profile.totals.sums["tokens"].sum(0).max(initial=0))


def divergence(both: Pair) -> Filled:
    """How far the two lie apart in every layer, and how far chance would put them."""
    rows, leading = both.difference.layers, both.leading
    table = rows.assign(change=verdicts(rows))[DIVERGENCE]
    figure = divergence_by_layer(
        leading["layer"].to_numpy(),
        leading["divergence"].to_numpy(),
        leading["noise_bound"].to_numpy(),
        verdicts(leading),
        [_note(row) for row in leading.to_dict("records")],
        _unseen(both),
        both.context.scheme,
    )
    caption = (
        f"Jensen–Shannon divergence between the load shares of A and B; {selections(both)}. 0 is "
        "equal, 1 has no expert in common. Each phase and tag is judged by itself; of each layer "
        f"the one that changed most is drawn. {noise_text(both.difference)}"
    )
    return Filled(figure, caption, table)


def _note(row: dict[Any, Any]) -> str:
    """The phase and tag of a row, and how many experts changed."""
    where = f"{row['phase']}, {row['tag']}"
    changed = row["experts_changed"]
    return where if pd.isna(changed) else f"{formats.plural(int(changed), 'expert')}, {where}"


def selections(both: Pair) -> str:
    """What of A and of B is compared."""
    state = both.context.state
    if state.between is None:
        return both.context.selection
    return f"A: {both.context.selection}; B: all of its time"


def _unseen(both: Pair) -> dict[int, str]:
    """Layers that are not drawn, and why."""
    seen = set(both.leading["layer"])
    counted = (both.counts[0].sum(axis=1) > 0) & (both.counts[1].sum(axis=1) > 0)
    missing = {
        index: "no phase and tag in both" if both_ran else "no tokens"
        for index, both_ran in zip(both.indices.tolist(), counted.tolist(), strict=True)
        if index not in seen
    }
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


def share_changes(both: Pair) -> Filled:
    """By how much each expert's share of the chosen layer differs, where it changed most."""
    leading, chosen = both.difference.layers, both.context.state.layer
    if chosen is not None:
        leading = leading[leading["layer"] == chosen]
    if not len(leading):
        text = "The chosen layer has no tokens in one of the two recordings."
        return Filled(blank(text, both.context.scheme), "", pd.DataFrame(columns=SHARES))
    phase, tag, layer = leading[["phase", "tag", "layer"]].to_numpy()[0]
    rows = both.difference.experts
    rows = rows[(rows["layer"] == layer) & (rows["phase"] == phase) & (rows["tag"] == tag)]
    if not rows["share_change"].any():
        text = f"The experts of layer {layer} have the same shares in both."
        return Filled(blank(text, both.context.scheme), "", pd.DataFrame(columns=SHARES))
    rows = rows.sort_values("share_change", key=np.abs, ascending=False, kind="stable")
    points = 100 * rows[["share_change", "noise_bound"]]
    table = rows.assign(**points, change=verdicts(rows))[SHARES].reset_index(drop=True)
    figure = change_bars(
        table["share_change"].to_numpy(),
        table["noise_bound"].to_numpy(),
        rows["significant"].eq(True).fillna(False).to_numpy(dtype=bool),
        table["expert"].to_numpy(),
        both.context.scheme,
    )
    known = rows["significant"].notna().any()
    caption = (
        f"Layer {layer}: share of the load in B minus that in A, in percentage points; {phase}, "
        f"{tag}, where it changed most. An even share is {100 / len(rows):.3g} %. "
        + ("Grey is within the noise, lines are its bounds." if known else "Noise is not known.")
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
    controls=("between", "layer", "against", "noise"),
)
