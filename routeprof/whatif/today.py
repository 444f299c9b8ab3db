"""Where the experts are today: as a file says, as the recording says, or in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routeprof.errors import UsageError
from routeprof.formats.placements.expert_map import Deployment, ExpertMap
from routeprof.metrics._arrays import IntArray
from routeprof.metrics.ranks import contiguous, rank_loads
from routeprof.placements import placed, recorded
from routeprof.tables import moe_layers

if TYPE_CHECKING:
    from routeprof.profile import Profile


@dataclass(frozen=True)
class Today:
    """The placement that is there today.

    Attributes:
        name: ``given``, ``recorded`` or ``contiguous``.
        slots: for each MoE layer, by its number, the expert in every slot ``[slots]``; a layer with
            fewer experts than GPUs has none.
    """

    name: str
    slots: dict[int, IntArray]

    def of(self, layers: Sequence[int]) -> IntArray | None:
        """``[layers, slots]`` of layers that have as many; None where there is no placement."""
        if not all(layer in self.slots for layer in layers):
            return None
        return np.stack([self.slots[layer] for layer in layers])

    def in_slots(self, layers: Sequence[int], slots: int) -> IntArray | None:
        """The same, None also where today's placement has another number of slots."""
        rows = self.of(layers)
        return rows if rows is not None and rows.shape[1] == slots else None

    def require_slots(self, layers: Sequence[int], slots: int) -> None:
        """Check that moves from today's placement can be counted.

        Raises:
            UsageError: it has another number of slots.
        """
        rows = self.of(layers)
        if rows is None or rows.shape[1] != slots:
            has = "no slots" if rows is None else f"{rows.shape[1]} slots"
            raise UsageError(
                f"moves are counted from today's placement, which is {self.name} and has {has}, "
                f"not {slots}: pass as many slots, or today's placement in as many (--today)"
            )


def deployment_of(profile: Profile, gpus: int) -> Deployment:
    """The recorded model on so many GPUs.

    Raises:
        UsageError: its MoE layers differ in their number of experts, or it has none.
    """
    layers = [layer for _, layer in moe_layers(profile)]
    sizes = sorted({placed(layer) for layer in layers if placed(layer)})
    if len(sizes) != 1:
        raise UsageError(
            f"MoE layers have {' and '.join(map(str, sizes)) or 'no'} experts: placements are "
            f"written and read for models whose layers have the same number"
        )
    numbers = sorted(layer.index for layer in layers)
    last = max(layer.index for layer in profile.info.layers)
    return Deployment(tuple(numbers), sizes[0], gpus, last + 1)


def todays(profile: Profile, gpus: int, given: ExpertMap | None = None) -> Today:
    """Today's placement on so many GPUs.

    Args:
        given: takes precedence over what the recording says. Where that says nothing for as many
            GPUs, experts are taken to be in order.

    Raises:
        UsageError: ``given`` is for another model, or another number of GPUs.
    """
    if given is not None:
        if given.deployment != deployment_of(profile, gpus):
            raise UsageError(
                f"today's placement is for {given.deployment}, and this is "
                f"{deployment_of(profile, gpus)}: pass one for this"
            )
        return Today("given", dict(zip(given.deployment.layers, given.slots, strict=True)))
    slots = _recorded(profile, gpus)
    if slots is not None:
        return Today("recorded", slots)
    in_order = {
        layer.index: contiguous(placed(layer), gpus)
        for _, layer in moe_layers(profile)
        if placed(layer) >= gpus
    }
    return Today("contiguous", in_order)


def _recorded(profile: Profile, gpus: int) -> dict[int, IntArray] | None:
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
    return {layer.index: slots[layer.index] for _, layer in moe_layers(profile)}
