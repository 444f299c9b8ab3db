"""A placement beside what is there today, EPLB's and the best there can be, on unseen steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routeprof.errors import UsageError
from routeprof.formats.placements.expert_map import ExpertMap
from routeprof.metrics._arrays import FloatArray, IntArray, ratio
from routeprof.metrics.ranks import rank_loads
from routeprof.whatif.bounds import lower_bound
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.eplb import rebalance_experts
from routeprof.whatif.evidence import require_tokens
from routeprof.whatif.loads import Stack, stacks
from routeprof.whatif.placement import Effort, place
from routeprof.whatif.today import Today, todays

if TYPE_CHECKING:
    from routeprof.profile import Profile


@dataclass(frozen=True)
class RankBalance:
    """Largest ÷ mean rank load by layer, ``[layers]`` each; NaN where a layer has no load.

    Where GPUs have different speeds, the largest rank's load by speed ÷ the whole load by the speed
    of all.

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
        before: ``given``, ``recorded`` or ``contiguous``: what today's placement is.
        steps: fitted on, and held out; 0 and 0 where there are sums alone.
        fitted: on the loads that the placements were made for.
        held_out: on those of later steps; None where there are none.
        speeds: whether GPUs have different ones.
    """

    layers: tuple[int, ...]
    before: str
    steps: tuple[int, int]
    fitted: RankBalance
    held_out: RankBalance | None
    speeds: bool = False


def compare(
    profile: Profile,
    cluster: Cluster,
    *,
    groups: int = 1,
    effort: Effort = "normal",
    today: ExpertMap | None = None,
    moves: int | None = None,
    repeats: bool = True,
) -> Comparison:
    """Fit placements on the first half of the steps, and judge them on the second.

    The figure is the largest rank's load over the mean rank's, with loads added up over the steps;
    replicas share an expert's load evenly. Passes of several ranks come in the order of time.

    Args:
        cluster: GPUs with as many slots each; of different speeds, the figure is of loads by speed.
            EPLB knows no speeds: its placement is what it is for equal ones.
        today: the placement that is there today. Unset, the one that the recording holds for so
            many ranks; where it holds none, the experts in order.
        groups, effort, moves, repeats: as for `place`; moves are from today's placement.

    Raises:
        UsageError: no tokens, GPUs with different numbers of slots, moves from a placement with
            another number of slots, or what `place` refuses.
    """
    require_tokens(profile)
    if len(set(cluster.capacity)) > 1:
        raise UsageError("EPLB needs as many slots on each GPU: pass the same capacity for each")
    now = todays(profile, cluster.gpus, today)
    measured = stacks(profile)
    made = [
        _placed(stack, cluster, now, groups=groups, effort=effort, moves=moves, repeats=repeats)
        for stack in measured
    ]
    pairs = list(zip(measured, made, strict=True))
    order = np.argsort([index for stack in measured for index in stack.layers])
    later = [stack.steps[1] > 0 for stack in measured]
    return Comparison(
        layers=tuple(sorted(index for stack in measured for index in stack.layers)),
        before=now.name,
        steps=max(stack.steps for stack in measured),
        fitted=_joined([_balance(one, stack.fit, cluster, groups) for stack, one in pairs], order),
        held_out=(
            _joined([_balance(one, stack.later, cluster, groups) for stack, one in pairs], order)
            if any(later)
            else None
        ),
        speeds=not cluster.is_even,
    )


# -- placements


@dataclass(frozen=True)
class _Slots:
    """Placements ``[layers, slots]``; before is None where there is none."""

    before: IntArray | None
    eplb: IntArray
    routeprof: IntArray


def _placed(
    stack: Stack,
    cluster: Cluster,
    today: Today,
    *,
    groups: int,
    effort: Effort,
    moves: int | None,
    repeats: bool,
) -> _Slots:
    bound = None
    if moves is not None:
        today.require_slots(stack.layers, cluster.slots)
        bound = today.of(stack.layers)
    ours = place(
        stack.fit,
        cluster,
        groups=groups,
        effort=effort,
        today=bound,
        moves=moves,
        repeats=repeats,
    ).slots
    sums, nodes = stack.fit.sum(axis=0), _grounds(cluster, groups).nodes
    eplb = rebalance_experts(sums, cluster.slots, groups, nodes, cluster.gpus)[0]
    return _Slots(today.of(stack.layers), eplb, ours)


def _grounds(cluster: Cluster, groups: int) -> Cluster:
    """Nodes matter only where groups are kept on them."""
    return cluster if groups > 1 else cluster.as_one_node()


def _balance(slots: _Slots, loads: FloatArray, cluster: Cluster, groups: int) -> RankBalance:
    sums = loads.sum(axis=0)
    bound = lower_bound(sums[np.newaxis], _grounds(cluster, groups), groups)
    mean = sums.sum(axis=1) / cluster.pace.sum()

    def figure(placement: IntArray | None) -> FloatArray:
        if placement is None:
            return np.full(len(sums), np.nan)
        times = rank_loads(sums, placement, cluster.gpus) / cluster.pace
        return ratio(times.max(axis=1), mean)

    return RankBalance(
        figure(slots.before), figure(slots.eplb), figure(slots.routeprof), ratio(bound, mean)
    )


def _joined(parts: Sequence[RankBalance], order: IntArray) -> RankBalance:
    return RankBalance(
        *(np.concatenate([vars(part)[name] for part in parts])[order] for name in vars(parts[0]))
    )


def _mean(values: FloatArray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
