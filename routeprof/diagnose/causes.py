"""Whose doing skew is: the input's, which mixing cures, or the model's, which it does not.

Max ÷ mean load of each tag alone is compared with that of all tags mixed evenly (the mean of their
shares); where the mix is skewed too, whether most tags share its hottest expert. A difference
counts where the worst tag's shares are farther from the others' than chance puts the same stretches
of time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Literal

import numpy as np

from routeprof.diagnose.question import Question
from routeprof.diagnose.thresholds import Thresholds
from routeprof.metrics import balance
from routeprof.metrics._arrays import FloatArray, shares
from routeprof.metrics.drift import bootstrap_noise, jensen_shannon
from routeprof.tables import moe_layers, tag_name

Cause = Literal["model", "input", "unclear", "none"]

FEWEST_STRETCHES = 4
"""Of fewer, resampling says nothing about chance."""

QUANTILE = 0.99


@dataclass(frozen=True)
class LayerSkew:
    """Skew of one layer by tag.

    Attributes:
        tag: the worst one; ``worst`` its imbalance, ``least`` that of the best.
        mixed: imbalance of all tags mixed evenly.
        tags: how many there are; ``sharing`` those in which the mix's hottest expert, too, gets
            more than the mean.
        divergence: of the worst tag from the others, in bits, in the phase with most stretches.
        noise: what chance stays below there; NaN where there are too few stretches. Both are NaN
            for a layer that is not skewed.
    """

    layer: int
    tag: str
    worst: float
    least: float
    mixed: float
    tags: int
    sharing: int
    divergence: float
    noise: float

    def cause(self, limits: Thresholds) -> Cause:
        """The model where the mix is skewed, and most tags to the same expert; else the input."""
        hot = limits.hot_imbalance
        alike = self.divergence <= self.noise
        if max(self.worst, self.mixed) <= hot:
            return "none"
        same = self.least > hot and 2 * self.sharing > self.tags
        if self.mixed > hot and (same or alike):
            return "model"
        if not alike and self.worst >= limits.narrow_ratio * self.mixed:
            return "input"
        return "unclear"


def skew_by_tag(question: Question) -> list[LayerSkew]:
    """Every layer that at least two tags have enough load of."""
    found = []
    for position, layer in moe_layers(question.profile):
        loads = _by_tag(question, position)
        if len(loads) < 2:
            continue
        ratios = {tag: float(balance.imbalance_ratio(own)) for tag, own in loads.items()}
        tag = max(ratios, key=lambda one: ratios[one])
        over_mean = shares(np.stack(list(loads.values()))) * layer.experts
        mix = over_mean.mean(axis=0)
        skewed = max(ratios[tag], mix.max()) > question.limits.hot_imbalance
        found.append(
            LayerSkew(
                layer.index,
                tag,
                ratios[tag],
                min(ratios.values()),
                float(mix.max()),
                len(loads),
                int((over_mean[:, mix.argmax()] > 1).sum()),
                *(_distance(question, layer.index, tag) if skewed else (nan, nan)),
            )
        )
    return found


def _by_tag(question: Question, position: int) -> dict[str, FloatArray]:
    """Assignments ``[experts]`` of each tag that has enough to be judged."""
    loads: dict[str, FloatArray] = {}
    for (_, tag), own in question.loads(position).items():
        loads[tag_name(tag)] = loads.get(tag_name(tag), 0.0) + own
    return {tag: own for tag, own in loads.items() if own.mean() >= question.limits.min_load}


def _distance(question: Question, layer: int, tag: str) -> tuple[float, float]:
    """Divergence of a tag from the others, and what chance stays below; NaN for not known."""
    best: tuple[FloatArray, FloatArray] | None = None
    for phase in question.profile.phases:
        own: list[FloatArray] = []
        others: list[FloatArray] = []
        for key, index in question.stretches:
            if index == layer and key[0] == phase:
                side = own if tag_name(key[1]) == tag else others
                side.append(question.stretches[key, index])
        if own and others:
            pair = np.concatenate(own), np.concatenate(others)
            if best is None or len(pair[0]) > len(best[0]):
                best = pair
    if best is None:
        return nan, nan
    one, rest = best
    divergence = float(jensen_shannon(one.sum(axis=0), rest.sum(axis=0)))
    if min(len(one), len(rest)) < FEWEST_STRETCHES:
        return divergence, nan
    pool, sizes = np.concatenate(best), (len(one), len(rest))
    return divergence, bootstrap_noise(pool, quantile=QUANTILE, resamples=400, sizes=sizes)
