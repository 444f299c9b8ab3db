"""Prompts: is the skew the data's or the model's?"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.dashboards import formats
from routeprof.dashboards.figures.common import blank
from routeprof.dashboards.figures.tags import divergence_heatmap, imbalance_by_group
from routeprof.dashboards.panels import batches, key_groups
from routeprof.dashboards.panels.requests import requests
from routeprof.dashboards.panels.skew import (
    FEWEST,
    LITTLE,
    Skew,
    Verdict,
    mean_divergence,
    skew_of,
)
from routeprof.dashboards.view import Card, Content, Context, Filled, Panel, View, has_values

MOST_TAGS = 16
"""Tags that are drawn, those with the most tokens."""

TOGETHER, MIXED = "all together", "all in equal parts"

VERDICTS: dict[Verdict, tuple[str, str]] = {
    "data": ("the data's", "The skew is mostly the data's: tags load different experts."),
    "model": ("the model's", "The skew is mostly the model's: tags load the same experts."),
    "even": ("little skew", "Under no tag is there much skew to explain."),
    "unknown": (formats.NOTHING, "There are too few tokens under two tags for a verdict."),
}


def fill(context: Context) -> Content:
    """The page's content."""
    names, counts, experts = tag_counts(context)
    by_request = {"requests": requests(context), "batching": batches.batching(context)}
    body = batches.commands(context)
    if len(names) < 2:
        empty = Filled(blank(key_groups.NO_TAGS, context.scheme), "", pd.DataFrame())
        return Content({"tag_divergence": empty, "tag_imbalance": empty, **by_request}, body=body)
    skew = skew_of(counts, experts)
    table, divergence_panel = divergence(context, names, counts, experts)
    return Content(
        panels={
            "tag_divergence": divergence_panel,
            "tag_imbalance": imbalance(context, names, counts, skew),
            **by_request,
        },
        cards=cards(skew, len(names), table),
        body=body,
    )


def tag_counts(context: Context) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """Tags, their counts [tags, layers, widest] and the layers' experts, of captured layers.

    Of the selected phase and time; the selected tag does not matter. Tags and layers without
    tokens are left out.
    """
    names, counts = key_groups.by_tag(context)
    experts = np.array([layer.experts for layer in context.whole.info.layers], dtype=np.int64)
    routed = counts.sum(2)
    tags, layers = routed.any(1), routed.any(0)
    kept = [name for name, has_tokens in zip(names, tags, strict=True) if has_tokens]
    return kept, counts[tags][:, layers], experts[layers]


def cards(skew: Skew, tags: int, table: pd.DataFrame) -> list[Card]:
    """The key figures."""
    left = f"{skew.left:.0%} of it is left when tags are mixed"
    known = skew.verdict in ("data", "model")
    mean, chance = table["divergence"].mean(), table["divergence_chance"].mean()
    alone = np.nanmedian(skew.alone)
    return [
        Card("skew_source", VERDICTS[skew.verdict][0], left if known else ""),
        Card("tags", formats.count(tags), f"{skew.counted} with tokens enough to judge"),
        Card(
            "divergence",
            formats.number(mean),
            f"mean of pairs · by chance {formats.number(chance)}",
        ),
        Card("imbalance_tags", formats.ratio(alone), "median of tags and layers"),
        Card("imbalance_mixed", formats.ratio(_median(skew.mixed)), "median layer"),
    ]


# -- tags


def divergence(
    context: Context, names: list[str], counts: NDArray[np.int64], experts: NDArray[np.int64]
) -> tuple[pd.DataFrame, Filled]:
    """How differently the tags load the experts, and the table of all pairs that are drawn."""
    shown = most(counts)
    own = [names[place] for place in shown]
    found, chance = mean_divergence(counts[shown], experts)
    one, other = np.triu_indices(len(own), 1)
    columns = {
        "tag": [own[place] for place in one],
        "other_tag": [own[place] for place in other],
        "divergence": found[one, other],
        "divergence_chance": chance[one, other],
    }
    table = pd.DataFrame(columns).sort_values("divergence", ascending=False, kind="stable")
    if not has_values(table["divergence"]):
        text = "No two tags have tokens in the same layer."
        return table, Filled(blank(text, context.scheme), "", table)
    figure = divergence_heatmap(own, found, context.scheme)
    caption = (
        "Jensen–Shannon divergence between the loads of every two tags, mean over layers, "
        f"{key_groups.phase_and_time(context)}: 0 is the same load, 1 no expert in common. By "
        f"chance alone tags of this size lie about {table['divergence_chance'].median():.2g} "
        f"apart.{_some(own, names)}"
    )
    return table, Filled(figure, caption, table)


def imbalance(context: Context, names: list[str], counts: NDArray[np.int64], skew: Skew) -> Filled:
    """How skewed each tag is, and all of them together."""
    rows = np.vstack([skew.alone, skew.together, skew.mixed])
    table = pd.DataFrame(
        {
            "tag": [*names, TOGETHER, MIXED],
            "assignments": [*counts.sum((1, 2)).tolist(), int(counts.sum()), None],
            "imbalance_median": [_median(row) for row in rows],
            "imbalance_worst": [_largest(row) for row in rows],
        }
    ).astype({"assignments": "Int64"})
    drawn = table.iloc[[*most(counts), len(names), len(names) + 1]]
    series = {
        "median layer": drawn["imbalance_median"].to_numpy(),
        "worst layer": drawn["imbalance_worst"].to_numpy(),
    }
    figure = imbalance_by_group(drawn["tag"].tolist(), series, context.scheme)
    shown = names[: len(drawn) - 2]
    caption = f"{_verdict(skew)} {key_groups.phase_and_time(context).capitalize()}."
    return Filled(figure, f"{caption}{_some(shown, names)}", table)


def _verdict(skew: Skew) -> str:
    sentence = VERDICTS[skew.verdict][1]
    if skew.verdict == "unknown":
        return f"{sentence} It takes {FEWEST} assignments per expert."
    if skew.verdict == "even":
        return f"{sentence} The mean of max ÷ mean − 1 is below {LITTLE:g}."
    return (
        f"{sentence} Of the skew of the tags (max ÷ mean − 1, all layers) {skew.left:.0%} is left "
        "when they are mixed in equal parts; below half it is the data's, else the model's."
    )


def most(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of the tags with the most tokens, in the order of the tags."""
    order = np.argsort(-counts.sum((1, 2)), kind="stable")
    return np.sort(order[:MOST_TAGS])


def _some(shown: list[str], names: list[str]) -> str:
    few = len(shown) < len(names)
    return f" The {len(shown)} tags with the most tokens of {len(names)}." if few else ""


def _median(values: NDArray[np.float64]) -> float:
    return float(np.nanmedian(values)) if has_values(values) else float("nan")


def _largest(values: NDArray[np.float64]) -> float:
    return float(np.nanmax(values)) if has_values(values) else float("nan")


VIEW = View(
    path="prompts",
    title="Prompts",
    question="Is the skew the data's or the model's?",
    reports=("layers", "experts", "requests"),
    panels=(
        Panel(
            "tag_divergence",
            "Divergence between tags",
            "Heatmap: how differently every two tags load the experts",
            height=380,
            wide=False,
        ),
        Panel(
            "tag_imbalance",
            "Imbalance by tag",
            "Bar chart: ratio of largest to mean load under every tag and of all tags together",
            height=380,
            wide=False,
        ),
        Panel(
            "requests",
            "Requests",
            "Scatter chart: divergence of every request from all of them, against its tokens",
            height=320,
        ),
        batches.PANEL,
    ),
    fill=fill,
    controls=("between", "batch"),
)
