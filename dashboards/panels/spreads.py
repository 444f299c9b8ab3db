"""A recording's load, spread over expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from routeprof.dashboards import formats
from routeprof.dashboards.state import PLACEMENTS
from routeprof.dashboards.view import Context, has_values
from routeprof.metrics import balance
from routeprof.placements import Recorded, recorded
from routeprof.rank_loads import loads_of_ranks, usual_ranks
from routeprof.tables import moe_layers
from routeprof.topology import Layer


@dataclass(frozen=True)
class Spread:
    """The selection's load, spread over ranks.

    Attributes:
        known: what the recording says of placements.
        loads: for each placement there is, [MoE layers, ranks]; NaN where there is none.
    """

    context: Context
    ranks: int
    known: Recorded | None
    loads: Mapping[str, NDArray[np.float64]]

    @property
    def chosen(self) -> NDArray[np.float64]:
        """The loads in the chosen placement."""
        usual = np.full_like(self.loads["contiguous"], np.nan)
        return self.loads.get(self.context.state.placement, usual)

    @cached_property
    def slowest(self) -> dict[str, NDArray[np.float64]]:
        """For each placement the slowest rank ÷ the mean, [MoE layers]."""
        return {name: ratio(values) for name, values in self.loads.items()}

    @cached_property
    def layers(self) -> NDArray[np.int64]:
        """Index of each MoE layer."""
        return np.array([layer.index for _, layer in moe_layers(self.context.profile)], dtype=int)

    @cached_property
    def layer(self) -> Layer | None:
        """The layer to look at: the chosen one, else that with the slowest rank."""
        slowest = ratio(self.chosen)
        if self.context.state.layer is not None or not has_values(slowest):
            return self.context.layer
        return self.context.whole.layer(int(self.layers[int(np.nanargmax(slowest))]))

    @cached_property
    def stragglers(self) -> dict[str, NDArray[np.float64]]:
        """For each placement the straggler factor over steps, [MoE layers]; NaN if not known."""
        steps = self.context.steps
        found = {name: np.full(len(self.layers), np.nan) for name in self.loads}
        for place, (_, layer) in enumerate(moe_layers(self.context.profile)):
            for name, factors in found.items() if layer.index in steps else ():
                each = loads_of_ranks(
                    steps[layer.index].counts, layer, name, self.ranks, self.known
                )
                if has_values(each.ravel()):
                    factors[place] = balance.straggler_factor(each)
        return found


def ratio(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Largest ÷ mean over the ranks, [layers]; NaN where nothing is known or routed."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(values.max(axis=1) / values.mean(axis=1))


def spread(context: Context) -> Spread:
    """The selection's load over ranks, in each placement."""
    ranks, known = context.state.ranks, recorded(context.profile)
    if ranks is None:
        ranks, _ = usual_ranks(context.whole)
    counts = context.profile.totals.lists["counts"].sum(0)
    layers = moe_layers(context.profile)
    found = {}
    for name in PLACEMENTS:
        if name == "recorded" and known is None:
            continue
        values = np.full((len(layers), ranks), np.nan)
        for place, (position, layer) in enumerate(layers):
            own = counts[position, : layer.experts]
            if own.any():
                values[place] = loads_of_ranks(own, layer, name, ranks, known)
        found[name] = values
    return Spread(context, ranks, known, found)


def wording(over: Spread) -> str:
    """The chosen placement in words."""
    if over.context.state.placement == "striped":
        return f"with expert i on rank i mod {over.ranks}"
    if over.context.state.placement == "recorded" and over.known is not None:
        given = over.known.map.ranks
        return "with experts where the engine put them" + (
            f" on {given} ranks, its slots dealt to {over.ranks}" if given != over.ranks else ""
        )
    return "with experts in order, neighbours together"


def honesty(over: Spread) -> str:
    """What the placement is worth."""
    if over.context.state.placement != "recorded":
        return "A supposition: what it would be like, not where the experts were. "
    changes = over.known.changes if over.known is not None else 0
    moved = (
        f"Experts moved {formats.plural(changes, 'time')} meanwhile: this is the last map, for "
        "all of the load. "
        if changes
        else ""
    )
    return f"An expert's load is shared evenly by its replicas. {moved}"


def holes(over: Spread) -> str:
    lost = [
        int(index)
        for index, values in zip(over.layers, over.chosen, strict=True)
        if np.isnan(values).all() and index not in over.context.absent
    ]
    parts = []
    if lost and over.context.profile.captured:
        parts.append(
            f"No row for {formats.plural(len(lost), 'layer')} with fewer experts than ranks."
        )
    if over.context.absent:
        parts.append("Shaded rows were not captured, which is not zero.")
    return " ".join(parts)


def nothing(over: Spread) -> str:
    """Why there is nothing to show."""
    routed = over.context.profile.totals.lists["counts"].any()
    if over.context.state.placement == "recorded" and over.known is None:
        return "This recording does not say where the experts were."
    if over.context.state.placement == "recorded" and routed:
        return "The map of experts that was recorded does not fit this."
    if routed:
        return f"No layer has as many as {over.ranks} experts: choose fewer ranks."
    return "No routed tokens in this selection."
