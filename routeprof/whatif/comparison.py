"""A placement beside what is there today, EPLB's and the best there can be, on unseen steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routeprof.errors import UsageError
from routeprof.metrics._arrays import FloatArray, IntArray, ratio
from routeprof.metrics.balance import imbalance_ratio
from routeprof.metrics.ranks import contiguous, rank_loads
from routeprof.placements import placed, recorded
from routeprof.tables import moe_layers
from routeprof.topology import Layer
from routeprof.whatif.bounds import lower_bound
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.eplb import rebalance_experts
from routeprof.whatif.evidence import require_tokens
from routeprof.whatif.placement import Effort, place

if TYPE_CHECKING:
    from routeprof.profile import Profile

MOST_STEPS = 1024
"""More steps than these are added up to so many, neighbours together."""


@dataclass(frozen=True)
class RankBalance:
    """Largest ÷ mean rank load by layer, ``[layers]`` each; NaN where a layer has no load.

    Attributes:
        before: of the placement that is there today; NaN where there can be none, as with fewer
            experts than GPUs.
        eplb: of EPLB's.
        routeprof: of `place`'s.
        lower_bound: what no placement is below.
    """

    before: FloatArray
    eplb: FloatArray
    routeprof: FloatArray
    lower_bound: FloatArray

    def means(self) -> dict[str, float]:
        """Each as its mean over the layers that have load."""
        return {name: _mean(values) for name, values in vars(self).items()}


@dataclass(frozen=True)
class Comparison:
    """Placements that were fitted on a part of a recording.

    Attributes:
        layers: their indices, in the order of the arrays.
        before: ``recorded`` or ``contiguous``: what today's placement is.
        steps: fitted on, and held out; 0 and 0 where there are sums alone.
        fitted: on the loads that the placements were made for.
        held_out: on those of later steps; None where there are none.
    """

    layers: tuple[int, ...]
    before: str
    steps: tuple[int, int]
    fitted: RankBalance
    held_out: RankBalance | None


def compare(
    profile: Profile, cluster: Cluster, *, groups: int = 1, effort: Effort = "normal"
) -> Comparison:
    """Fit placements on the first half of the steps, and judge them on the second.

    The figure is the largest rank's load over the mean rank's, with loads added up over the steps;
    replicas share an expert's load evenly. Passes of several ranks come in the order of time.

    Args:
        cluster: equal GPUs. Today's placement deals the experts to as many, in order, unless the
            recording holds one for so many ranks.
        groups, effort: as for `place`.

    Raises:
        UsageError: no tokens, GPUs that are not equal, or what `place` refuses.
    """
    require_tokens(profile)
    if not cluster.is_even:
        raise UsageError("EPLB needs equal GPUs: pass the same capacity and speed for each")
    known = _recorded(profile, cluster.gpus)
    stacks = [_stack(profile, members) for members in _alike(profile)]
    made = [_placed(stack, cluster, groups, effort, known) for stack in stacks]
    pairs = list(zip(stacks, made, strict=True))
    order = np.argsort([index for stack in stacks for index in stack.layers])
    later = [stack.steps[1] > 0 for stack in stacks]
    return Comparison(
        layers=tuple(sorted(index for stack in stacks for index in stack.layers)),
        before="contiguous" if known is None else "recorded",
        steps=max(stack.steps for stack in stacks),
        fitted=_joined([_balance(one, stack.fit, cluster, groups) for stack, one in pairs], order),
        held_out=(
            _joined([_balance(one, stack.later, cluster, groups) for stack, one in pairs], order)
            if any(later)
            else None
        ),
    )


# -- loads


@dataclass(frozen=True)
class _Stack:
    """Loads of layers that have as many experts and run in the same passes.

    Attributes:
        fit: ``[steps, layers, experts]``; later: the same, of later steps; none from sums alone.
        steps: how many they are of, before neighbours were added up.
    """

    layers: tuple[int, ...]
    fit: FloatArray
    later: FloatArray
    steps: tuple[int, int]


def _alike(profile: Profile) -> list[list[tuple[int, Layer]]]:
    """Layers with assignments, by number of experts that need a place and by pass."""
    counts = profile.totals.lists["counts"].sum((0, 2))
    found: dict[tuple[int, str], list[tuple[int, Layer]]] = {}
    for position, layer in moe_layers(profile):
        if counts[position] and placed(layer):
            key = placed(layer), profile.info.passes[position]
            found.setdefault(key, []).append((position, layer))
    return list(found.values())


def _stack(profile: Profile, members: Sequence[tuple[int, Layer]]) -> _Stack:
    layers = tuple(layer.index for _, layer in members)
    experts = placed(members[0][1])
    if profile.has("steps") and profile.files is not None:
        loads, steps = _step_loads(profile, layers, experts)
        if steps > 1:
            first, later = np.array_split(loads, 2)
            half = -(-steps // 2)
            return _Stack(layers, first, later, (half, steps - half))
    positions = [position for position, _ in members]
    sums = profile.totals.lists["counts"].sum(0)[positions, :experts].astype(np.float64)
    return _Stack(layers, sums[np.newaxis], np.zeros((0, *sums.shape)), (0, 0))


def _step_loads(profile: Profile, layers: tuple[int, ...], experts: int) -> tuple[FloatArray, int]:
    """Loads of at most ``MOST_STEPS`` steps in the order of time, and of how many they are."""
    table = profile.step_counts()
    mine = np.isin(table.layer, layers)
    passes = np.stack((table.rank[mine], table.step[mine]), axis=1)
    _, first, number = np.unique(passes, axis=0, return_index=True, return_inverse=True)
    place_in_time = np.argsort(np.argsort(table.time[mine][first], kind="stable"))
    steps, column = len(first), {layer: place for place, layer in enumerate(layers)}
    rows = place_in_time[number.reshape(-1)] * min(steps, MOST_STEPS) // max(steps, 1)
    columns = np.array([column[int(index)] for index in table.layer[mine]], dtype=np.int64)
    loads = np.zeros((min(steps, MOST_STEPS), len(layers), experts))
    np.add.at(loads, (rows, columns), table.counts[mine][:, :experts])
    return loads, steps


# -- placements


@dataclass(frozen=True)
class _Slots:
    """Placements ``[layers, slots]``; before is None where there is none."""

    before: IntArray | None
    eplb: IntArray
    routeprof: IntArray


def _recorded(profile: Profile, gpus: int) -> IntArray | None:
    """The recorded map of experts to slots, if it is one of all layers for so many ranks."""
    found = recorded(profile)
    if found is None or found.map.ranks != gpus:
        return None
    slots = found.map.slots
    for position, layer in moe_layers(profile):
        counts = profile.totals.lists["counts"][:, position, : placed(layer)].sum(0)
        try:
            rank_loads(counts, slots[layer.index], gpus)
        except (UsageError, IndexError):  # of another model
            return None
    return slots


def _placed(
    stack: _Stack, cluster: Cluster, groups: int, effort: Effort, known: IntArray | None
) -> _Slots:
    ours = place(stack.fit, cluster, groups=groups, effort=effort).slots
    grounds = _grounds(cluster, groups)
    sums, (layers, experts) = stack.fit.sum(axis=0), stack.fit.shape[1:]
    eplb = rebalance_experts(sums, cluster.slots, groups, grounds.nodes, cluster.gpus)[0]
    before = None if known is None else known[list(stack.layers)]
    if known is None and experts >= cluster.gpus:
        before = np.tile(contiguous(experts, cluster.gpus), (layers, 1))
    return _Slots(before, eplb, ours)


def _grounds(cluster: Cluster, groups: int) -> Cluster:
    """Nodes matter only where groups are kept on them."""
    return cluster if groups > 1 else cluster.as_one_node()


def _balance(slots: _Slots, loads: FloatArray, cluster: Cluster, groups: int) -> RankBalance:
    sums = loads.sum(axis=0)
    bound = lower_bound(sums[np.newaxis], _grounds(cluster, groups), groups)

    def figure(placement: IntArray | None) -> FloatArray:
        if placement is None:
            return np.full(len(sums), np.nan)
        return imbalance_ratio(rank_loads(sums, placement, cluster.gpus))

    return RankBalance(
        figure(slots.before),
        figure(slots.eplb),
        figure(slots.routeprof),
        ratio(bound * cluster.gpus, sums.sum(axis=1)),
    )


def _joined(parts: Sequence[RankBalance], order: IntArray) -> RankBalance:
    return RankBalance(
        *(np.concatenate([vars(part)[name] for part in parts])[order] for name in vars(parts[0]))
    )


def _mean(values: FloatArray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
