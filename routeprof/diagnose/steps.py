"""Rules on what an average hides: skewed steps, and cold experts beside hot ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from routeprof.diagnose.finding import Finding, layer_count
from routeprof.diagnose.question import Question
from routeprof.diagnose.routing import routed
from routeprof.metrics._arrays import IntArray
from routeprof.metrics.quantiles import weighted_quantile
from routeprof.tables import column, moe_layers

if TYPE_CHECKING:
    from routeprof.topology import Layer

DRAWS = 256
"""Steps drawn to see what chance makes of them."""

ENOUGH = 100
"""Assignments of an expert, in the mean: of fewer the coldest is cold by chance."""


def step_skew(question: Question, but: Collection[int]) -> list[Finding]:
    """Layers that are even over the recording and skewed in its steps.

    Args:
        but: indices of layers that something else is said of.
    """
    limits, found = question.limits, []
    table = routed(question.profile)
    p95s = dict(zip(table["layer"], column(table, "step_imbalance_p95"), strict=True))
    for position, layer in moe_layers(question.profile):
        if layer.index not in p95s or layer.index in but:
            continue
        p95 = float(p95s[layer.index])
        if p95 > limits.hot_imbalance:
            chance = _chance(question, position, layer)
            if p95 > limits.step_ratio * chance:
                found.append((p95 / chance, layer.index, p95, chance))
    if not found:
        return []
    _, worst, p95, chance = max(found)
    average = float(table.loc[table["layer"] == worst, "imbalance_ratio"].iloc[0])
    return [
        Finding(
            "step-skew",
            "warning",
            f"the average hides skewed steps: in layer {worst} the hottest expert gets "
            f"{average:.2f} times the mean over the recording, and {p95:.2f} in the steps (p95), "
            f"where chance makes {chance:.2f}; {layer_count(len(found))} like that",
            "one placement cannot follow hot experts that change: mix what comes in bursts "
            "(routeprof whatif batching), or split experts rather than place them",
            tuple(sorted(layer for _, layer, _, _ in found)),
            figures={
                "layer": worst,
                "imbalance_ratio": average,
                "step_imbalance_p95": p95,
                "chance_p95": chance,
            },
        )
    ]


def _chance(question: Question, position: int, layer: Layer) -> float:
    """p95 of the imbalance of steps of the same sizes that draw from the layer's own shares.

    Choices are drawn with replacement, and no expert gets a token twice.
    """
    sums, loads = question.profile.totals.sums, question.loads(position)
    random = np.random.default_rng(0)
    total = np.sum(list(loads.values()), axis=0)
    ratios, weights = [], []
    for number, key in enumerate(question.profile.totals.keys):
        steps = int(sums["steps"][number, position])
        if key not in loads or not steps:
            continue
        sizes = _sizes(question, layer.index, number, float(loads[key].sum()) / steps)
        drawn = random.multinomial(sizes, total / total.sum()).max(axis=1)
        largest = np.minimum(drawn, -(-sizes // layer.choices))
        ratios.append(largest * layer.experts / sizes)
        weights.append(sizes * (loads[key].sum() / sizes.sum()))
    return float(weighted_quantile(np.concatenate(ratios), np.concatenate(weights), 0.95))


def _sizes(question: Question, layer: int, key: int, mean: float) -> IntArray:
    """Assignments of some steps of a key: as recorded, else the mean."""
    profile = question.profile
    if profile.has("steps") and profile.files is not None:
        table = profile.step_counts()
        own = table.counts[(table.layer == layer) & (profile.step_keys == key)].sum(axis=1)
        own = own[own > 0]
        if len(own):
            return np.resize(np.random.default_rng(key).permutation(own)[:DRAWS], DRAWS)
    return np.full(DRAWS, max(round(mean), 1))


def hot_cold(question: Question, but: Collection[int]) -> list[Finding]:
    """Layers whose hottest and coldest expert lie far apart.

    Args:
        but: indices of layers that something else is said of.
    """
    table = routed(question.profile)
    table = table[~table["layer"].isin(but)]
    ratio = column(table, "hot_cold_ratio_alive")
    mean = column(table, "assignments") / column(table, "experts")
    wide = table[(ratio > question.limits.hot_cold) & (mean >= ENOUGH)]
    if not len(wide):
        return []
    worst = wide.sort_values("hot_cold_ratio_alive").iloc[-1]
    return [
        Finding(
            "hot-cold",
            "info",
            f"in layer {worst['layer']} expert {worst['hottest_expert']} gets "
            f"{worst['hot_cold_ratio_alive']:.1f} times what the coldest expert with tokens gets; "
            f"above {question.limits.hot_cold:g} : 1 in {layer_count(len(wide))}",
            "no harm while max ÷ mean stays low; cold experts may do with fewer bits (routeprof "
            "audit --recording)",
            tuple(int(index) for index in wide["layer"]),
            figures={"hot_cold_ratio_alive": float(worst["hot_cold_ratio_alive"])},
        )
    ]
