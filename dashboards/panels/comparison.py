"""Two recordings of the same layers, held against each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.compare.comparable import incomparable
from routeprof.compare.difference import Difference
from routeprof.dashboards.panels.differences import difference
from routeprof.dashboards.view import Against, Context
from routeprof.metrics.balance import imbalance_ratio
from routeprof.profile import Profile
from routeprof.tables import moe_layers
from routeprof.topology import Layer

OPEN_TWO = "Open two recordings: routeprof dashboard A B, or a directory that holds several."


@dataclass(frozen=True)
class Pair:
    """Two recordings of the same layers: A is the one that is open, B the other.

    Attributes:
        layers: the MoE layers.
        counts: of A and B, int64 [MoE layers, experts]; 0 beyond a layer's own experts.
        difference: what changed, phase by phase and tag by tag.
        absent: why a layer has no counts, in the first of the two that has none.
    """

    context: Context
    other: Against
    layers: tuple[Layer, ...]
    counts: tuple[NDArray[np.int64], NDArray[np.int64]]
    difference: Difference
    absent: dict[int, str] = field(default_factory=dict)

    @cached_property
    def indices(self) -> NDArray[np.int64]:
        """Index of each layer."""
        return np.array([layer.index for layer in self.layers], dtype=np.int64)

    @cached_property
    def leading(self) -> pd.DataFrame:
        """Of each layer the row of the phase and tag that changed most, by layer."""
        rows = self.difference.layers.drop_duplicates("layer")
        return rows.sort_values("layer", ignore_index=True)

    @cached_property
    def imbalance(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Max ÷ mean load of A and B, [MoE layers]; NaN without assignments."""
        one, other = (
            np.array(
                [
                    float(imbalance_ratio(counts[place, : layer.experts]))
                    for place, layer in enumerate(self.layers)
                ]
            )
            for counts in self.counts
        )
        return one, other


def pair(context: Context) -> Pair | str:
    """What is compared, or why nothing is."""
    other = context.against
    if other is None:
        chosen = context.state.against is not None
        return "There is no recording of that name." if chosen else OPEN_TWO
    reason = incomparable(context.profile, other.profile)
    if reason:
        return reason
    layers = tuple(layer for _, layer in moe_layers(context.profile))
    width = max(layer.experts for layer in layers)
    counts = _counts(context.profile, width), _counts(other.profile, width)
    if not all(one.any() for one in counts):
        return f"{'B' if counts[0].any() else 'A'} has no tokens in this selection."
    found = difference(context, other)
    if isinstance(found, str):
        return found
    absent = _absent(other.profile) | _absent(context.profile)
    return Pair(context, other, layers, counts, found, absent)


def _counts(profile: Profile, width: int) -> NDArray[np.int64]:
    """Assignments of the MoE layers in the order of their index, int64 [layers, width]."""
    summed = profile.totals.lists["counts"].sum(0)
    counts = np.zeros((len(moe_layers(profile)), width), dtype=np.int64)
    for place, (position, layer) in enumerate(moe_layers(profile)):
        own = summed[position, : layer.experts]
        counts[place, : len(own)] = own
    return counts


def _absent(profile: Profile) -> dict[int, str]:
    pairs = zip(profile.info.layers, profile.states, strict=True)
    return {layer.index: state for layer, state in pairs if state not in ("captured", "dense")}
