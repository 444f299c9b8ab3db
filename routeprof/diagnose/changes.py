"""Rules on change: since another recording, and from the first half of a recording to the second.

Loads are compared phase by phase and tag by tag, so that another mix of traffic is no drift. The
distance is the Jensen–Shannon divergence; the noise that it has to exceed is what two samples of
all stretches together stay below, at a level that all comparisons share (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np

from routeprof.compare.stretches import stretches
from routeprof.diagnose.finding import Finding, layer_count
from routeprof.diagnose.question import Question
from routeprof.metrics._arrays import FloatArray
from routeprof.metrics.drift import bootstrap_noise, jensen_shannon
from routeprof.recording.fold import Key
from routeprof.tables import tag_name

FEWEST_STRETCHES = 4
"""Of fewer, resampling says nothing about chance."""

LEVEL = 0.05
"""Chance that one of all comparisons exceeds noise where nothing changed."""

MOST_RESAMPLES = 4000

Pairs = Mapping[tuple[Key, int], tuple[FloatArray, FloatArray]]
"""Loads of stretches, ``[stretches, experts]``, of two times, by key and layer."""


@dataclass(frozen=True)
class Shift:
    """A layer whose load moved by more than noise."""

    key: Key
    layer: int
    divergence: float
    noise: float


def drift_since(question: Question) -> list[Finding] | str:
    """Against another recording of the model."""
    if question.since is None:
        return "needs another recording: pass --since"
    fault = _incomparable(question)
    if fault:
        return fault
    before = stretches(question.since)
    pairs = {
        place: (before[place], now) for place, now in question.stretches.items() if place in before
    }
    if not pairs:
        return "the recordings have no phase and tag in common"
    return _finding(
        question,
        pairs,
        "drift-since",
        "since the other recording",
        "fit placements and capacity on the new recording; both may be out of date",
    )


def drift_within(question: Question) -> list[Finding] | str:
    """The first half of the recording against the second."""
    pairs = {
        place: (loads[: ceil(len(loads) / 2)], loads[ceil(len(loads) / 2) :])
        for place, loads in question.stretches.items()
    }
    return _finding(
        question,
        pairs,
        "drift-within",
        "from the first half of the recording to the second",
        "select what stays alike with --between or --tag, or balance often (EPLB): a placement for "
        "the whole fits neither half",
    )


def _incomparable(question: Question) -> str:
    if question.since is None:
        return ""
    sizes, others = (
        {
            layer.index: (layer.experts, layer.top_k)
            for layer in profile.info.layers
            if layer.kind == "moe"
        }
        for profile in (question.profile, question.since)
    )
    if sizes == others:
        return ""
    return "the other recording is of a model with other layers, experts or top-k"


def _finding(
    question: Question, pairs: Pairs, code: str, when: str, suggestion: str
) -> list[Finding] | str:
    known = {
        place: pair for place, pair in pairs.items() if min(map(len, pair)) >= FEWEST_STRETCHES
    }
    known = {place: pair for place, pair in known.items() if _enough(question, pair)}
    if not known:
        return (
            f"needs {FEWEST_STRETCHES} steps or windows of a phase and tag, with tokens enough, on "
            "both sides: record longer"
        )
    shifts = list(_shifts(known, question.limits.drift))
    if not shifts:
        return []
    worst = max(shifts, key=lambda one: one.divergence)
    phase, tag = worst.key
    layers = sorted({one.layer for one in shifts})
    return [
        Finding(
            code,
            "warning",
            f"loads moved {when}: {worst.divergence:.3f} bits in layer {worst.layer} in {phase}"
            f"{f', tag {tag_name(tag)!r}' if tag else ''}, where noise stays below "
            f"{worst.noise:.3f}; {layer_count(len(layers))} like that",
            suggestion,
            tuple(layers),
            phase,
            figures={
                "layer": worst.layer,
                "tag": tag_name(tag),
                "divergence": worst.divergence,
                "noise": worst.noise,
            },
        )
    ]


def _enough(question: Question, pair: tuple[FloatArray, FloatArray]) -> bool:
    return bool(min(side.sum(axis=0).mean() for side in pair) >= question.limits.min_load)


def _shifts(pairs: Pairs, limit: float) -> Iterator[Shift]:
    """Comparisons above the limit, and above noise."""
    quantile = 1 - LEVEL / len(pairs)
    resamples = min(ceil(10 / (1 - quantile)), MOST_RESAMPLES)
    for (key, layer), (before, after) in pairs.items():
        divergence = float(jensen_shannon(before.sum(axis=0), after.sum(axis=0)))
        if divergence <= limit:
            continue
        noise = bootstrap_noise(
            np.concatenate((before, after)),
            quantile=quantile,
            resamples=resamples,
            sizes=(len(before), len(after)),
        )
        if divergence > noise:
            yield Shift(key, layer, divergence, noise)
