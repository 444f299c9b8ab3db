"""How far chance alone puts two recordings apart, from how each of them differs from itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routeprof.dashboards.live.spans import Span
from routeprof.dashboards.panels.stepwise import whole_steps
from routeprof.metrics.drift import bootstrap_noise
from routeprof.profile import Profile
from routeprof.tables import moe_layers, tag_name

FEW = 8
"""Stretches of time below which single steps are the better sample, where they are known."""

MOST = 32
"""Stretches to draw from; neighbours of more are put together."""

QUANTILE = 0.95
RESAMPLES = 100


@dataclass(frozen=True)
class Samples:
    """Pieces of a recording, each with the load of all layers.

    Attributes:
        unit: what a piece is.
        counts: for each layer, by its index, int64 [pieces, experts]; without empty pieces.
    """

    unit: str
    counts: Mapping[int, NDArray[np.int64]]

    @property
    def number(self) -> int:
        """Pieces of the layer with the most."""
        return max((len(counts) for counts in self.counts.values()), default=0)


def samples(
    one: tuple[Profile, Sequence[Span]], other: tuple[Profile, Sequence[Span]]
) -> tuple[Samples, Samples]:
    """Pieces of the selections of two recordings, of the same kind.

    Neighbouring steps are alike, so that stretches of time are better where there are enough.
    """
    stretches = _stretches(*one), _stretches(*other)
    if min(each.number for each in stretches) < FEW:
        steps = _steps(one[0]), _steps(other[0])
        if min(each.number for each in steps) > 1:
            return steps
    return stretches


def _stretches(profile: Profile, spans: Sequence[Span]) -> Samples:
    inside = [span for span in spans if _within(span, profile.between)]
    width = max((layer.experts for layer in profile.info.layers), default=0)
    number = min(len(inside), MOST)
    cube = np.zeros((number, len(profile.info.layers), width), dtype=np.int64)
    for place, span in enumerate(inside):
        piece = cube[place * number // len(inside)]
        for key, counts in zip(span.totals.keys, span.totals.lists["counts"], strict=True):
            if _selected(profile, key):
                piece[:, : counts.shape[1]] += counts[:, :width]
    return Samples(
        "stretches of time",
        {
            layer.index: _busy(cube[:, position, : layer.experts])
            for position, layer in moe_layers(profile)
        },
    )


def _steps(profile: Profile) -> Samples:
    steps = whole_steps(profile)
    return Samples("steps", {index: _busy(own.counts) for index, own in steps.items()})


def _busy(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return counts[counts.any(axis=1)]


def _within(span: Span, between: tuple[float, float] | None) -> bool:
    return between is None or (between[0] < span.first and span.last <= between[1])


def _selected(profile: Profile, key: tuple[str, str | None]) -> bool:
    return profile.phase in (None, key[0]) and profile.tag in (None, tag_name(key[1]))


def bound(one: Samples, other: Samples, layer: int) -> float:
    """The divergence that chance stays below in most cases; NaN with too few pieces to tell.

    Each recording is held against itself, in two samples as large as the two recordings; the
    larger of both results counts.
    """
    counts = [each.counts.get(layer) for each in (one, other)]
    known = [values for values in counts if values is not None and len(values) > 1]
    if len(known) < 2:
        return float("nan")
    sizes = (len(known[0]), len(known[1]))
    bounds = [
        bootstrap_noise(values, quantile=QUANTILE, resamples=RESAMPLES, sizes=sizes)
        for values in known
    ]
    return float(np.max(bounds))
