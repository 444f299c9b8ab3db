"""The placement to use: fitted on every step that is selected, for all MoE layers of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from routeprof.formats.placements.expert_map import ExpertMap, in_order
from routeprof.metrics._arrays import IntArray
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.evidence import require_tokens
from routeprof.whatif.loads import stacks
from routeprof.whatif.placement import Effort, place
from routeprof.whatif.today import deployment_of, todays

if TYPE_CHECKING:
    from routeprof.profile import Profile


class Wish(TypedDict, total=False):
    """What `comparison.compare` and `decide` are both asked, by name."""

    groups: int
    effort: Effort
    today: ExpertMap | None
    moves: int | None
    repeats: bool


@dataclass(frozen=True)
class Decision:
    """A placement to put to use.

    Attributes:
        placement: of all MoE layers.
        steps: what it was fitted on; 0 where there were sums alone.
        unmeasured: MoE layers without tokens in the selection; they stay as they are today, or are
            in order.
        moved: experts that come to a GPU that does not hold them today, over all measured layers;
            None where today's placement has another number of slots.
    """

    placement: ExpertMap
    steps: int
    unmeasured: tuple[int, ...]
    moved: int | None


def decide(
    profile: Profile,
    cluster: Cluster,
    *,
    groups: int = 1,
    effort: Effort = "normal",
    today: ExpertMap | None = None,
    moves: int | None = None,
    repeats: bool = True,
) -> Decision:
    """Place all MoE layers, fitted on all steps; `comparison.compare` says how that does later.

    Args:
        cluster: GPUs with as many slots each.
        today: as for `compare`; what stays on its GPU stays in its slot.
        groups, effort, moves, repeats: as for `placement.place`.

    Raises:
        UsageError: no tokens, layers that differ in their number of experts, or what `place`
            refuses.
    """
    require_tokens(profile)
    deployment = deployment_of(profile, cluster.gpus)
    now = todays(profile, cluster.gpus, today)
    found: dict[int, IntArray] = {}
    moved: int | None = 0
    measured = stacks(profile)
    for stack in measured:
        if moves is not None:
            now.require_slots(stack.layers, cluster.slots)
        kept = now.in_slots(stack.layers, cluster.slots)
        made = place(
            stack.all,
            cluster,
            groups=groups,
            effort=effort,
            today=kept,
            moves=moves,
            repeats=repeats,
        )
        found |= dict(zip(stack.layers, made.slots, strict=True))
        moved = None if kept is None or moved is None else moved + int(made.moved.sum())
    unmeasured = tuple(layer for layer in deployment.layers if layer not in found)
    for layer in unmeasured:
        row = now.in_slots([layer], cluster.slots)
        found[layer] = in_order(deployment.experts, cluster.slots) if row is None else row[0]
    slots = np.stack([found[layer] for layer in deployment.layers])
    steps = max((sum(stack.steps) for stack in measured), default=0)
    return Decision(ExpertMap(deployment, slots), steps, unmeasured, moved)
