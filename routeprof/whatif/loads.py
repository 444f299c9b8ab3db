"""Loads of a recording's layers, step by step, as placements are fitted on and judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routeprof.metrics._arrays import FloatArray
from routeprof.placements import placed
from routeprof.tables import moe_layers
from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

MOST_STEPS = 1024
"""More steps than these are added up to so many, neighbours together."""


@dataclass(frozen=True)
class Stack:
    """Loads of layers that have as many experts and run in the same passes.

    Attributes:
        layers: their numbers.
        fit: ``[steps, layers, experts]``, the first half of the steps; sums as one step where the
            recording has no more.
        later: the same, of later steps; none from sums alone.
        steps: how many they are of, before neighbours were added up.
    """

    layers: tuple[int, ...]
    fit: FloatArray
    later: FloatArray
    steps: tuple[int, int]

    @property
    def all(self) -> FloatArray:
        """Both, ``[steps, layers, experts]``."""
        return np.concatenate((self.fit, self.later))


def stacks(profile: Profile) -> list[Stack]:
    """All layers with assignments, by number of experts that need a place and by pass."""
    counts = profile.totals.lists["counts"].sum((0, 2))
    found: dict[tuple[int, str], list[tuple[int, Layer]]] = {}
    for position, layer in moe_layers(profile):
        if counts[position] and placed(layer):
            key = placed(layer), profile.info.passes[position]
            found.setdefault(key, []).append((position, layer))
    return [_stack(profile, members) for members in found.values()]


def _stack(profile: Profile, members: Sequence[tuple[int, Layer]]) -> Stack:
    layers = tuple(layer.index for _, layer in members)
    experts = placed(members[0][1])
    if profile.has("steps") and profile.files is not None:
        loads, steps = _step_loads(profile, layers, experts)
        if steps > 1:
            first, later = np.array_split(loads, 2)
            half = -(-steps // 2)
            return Stack(layers, first, later, (half, steps - half))
    positions = [position for position, _ in members]
    sums = profile.totals.lists["counts"].sum(0)[positions, :experts].astype(np.float64)
    return Stack(layers, sums[np.newaxis], np.zeros((0, *sums.shape)), (0, 0))


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
