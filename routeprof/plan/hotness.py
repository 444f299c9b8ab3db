"""Measured loads of experts, instead of even ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routeprof.errors import UsageError
from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.metrics.ranks import contiguous, rank_loads, rank_of_slot
from routeprof.plan.precision import hot_count

if TYPE_CHECKING:
    from routeprof.plan.model import Model
    from routeprof.profile import Profile


@dataclass(frozen=True)
class Hottest:
    """An expert that got more than its part.

    Attributes:
        layer, expert: where.
        share: of the layer's assignments.
        over_mean: its load ÷ the mean expert's.
    """

    layer: int
    expert: int
    share: float
    over_mean: float


@dataclass(frozen=True)
class Measured:
    """Loads of a recording's layers, in the model's order.

    Attributes:
        layers: index of each in the model.
        counts: assignments of each layer's experts, int64 ``[experts]`` each.
    """

    layers: tuple[int, ...]
    counts: tuple[IntArray, ...]

    def fullest(self, ep: int) -> tuple[float, ...]:
        """For each layer, the load of the fullest rank ÷ the mean's, experts placed in order."""
        return tuple(_imbalance(_ranks(counts, ep)) for counts in self.counts)

    def hottest(self, most: int = 8) -> tuple[Hottest, ...]:
        """The experts with the largest loads ÷ the mean of their layer, the hottest first."""
        found = [
            Hottest(layer, int(expert), float(counts[expert] / counts.sum()), float(over[expert]))
            for layer, counts in zip(self.layers, self.counts, strict=True)
            if counts.sum()
            for over in [counts / counts.mean()]
            for expert in np.argsort(-over, kind="stable")[:most]
        ]
        return tuple(sorted(found, key=lambda one: -one.over_mean)[:most])

    def hot_slots(self, share: float, ep: int) -> tuple[int, ...]:
        """Hot experts of each layer on the rank that holds the most of them over all layers.

        Args:
            share: of each layer's experts that count as hot.
        """
        held = []
        for counts in self.counts:
            experts = len(counts)
            ranks = rank_of_slot(experts, ep)
            hot = np.argsort(-counts, kind="stable")[: hot_count(experts, share)]
            held.append(np.bincount(ranks[hot], minlength=ep))
        table = np.array(held, dtype=np.int64).reshape(-1, ep)
        return tuple(int(count) for count in table[:, table.sum(0).argmax()])

    def hot_share(self, share: float) -> float:
        """Share of all assignments that go to the hot experts."""
        hot = sum(
            int(np.sort(one)[::-1][: hot_count(len(one), share)].sum()) for one in self.counts
        )
        return hot / sum(int(one.sum()) for one in self.counts)


def _ranks(counts: IntArray, ep: int) -> FloatArray:
    return rank_loads(counts, contiguous(len(counts), ep), ep)


def _imbalance(loads: FloatArray) -> float:
    total = loads.sum()
    return float(loads.max() * len(loads) / total) if total else 1.0


def measured(profile: Profile, model: Model) -> Measured:
    """The recorded loads of the model's MoE layers.

    Raises:
        UsageError: the recording is of another model, or holds no assignment.
    """
    from routeprof.placements import placed
    from routeprof.tables import moe_layers

    recorded = moe_layers(profile)
    experts = [placed(layer) for _, layer in recorded]
    wanted = [moe.experts for _, moe in model.moes]
    if experts != wanted:
        raise UsageError(
            f"the recording has {_described(experts)} and {model.name} {_described(wanted)}: pass "
            f"a recording of this model"
        )
    totals = profile.totals.lists["counts"].sum(0)
    counts = tuple(
        totals[position, :size].astype(np.int64)
        for (position, _), size in zip(recorded, experts, strict=True)
    )
    if not sum(int(one.sum()) for one in counts):
        raise UsageError("the recording holds no assignment: record while the model runs")
    return Measured(tuple(at for at, _ in model.moes), counts)


def _described(experts: list[int]) -> str:
    sizes = sorted(set(experts))
    of = " or ".join(map(str, sizes)) if sizes else "no"
    return f"{len(experts)} MoE layers of {of} experts"
