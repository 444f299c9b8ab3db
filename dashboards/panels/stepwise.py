"""Steps layer by layer, for what sums over time cannot answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routeprof.profile import Profile
from routeprof.tables import moe_layers

MOST_CELLS = 4_000_000
"""(step, expert) pairs of a selection that a page still goes through."""


@dataclass(frozen=True)
class LayerSteps:
    """Steps of one layer.

    Attributes:
        counts: int64 [steps, experts]; tokens: int64 [steps].
    """

    counts: NDArray[np.int64]
    tokens: NDArray[np.int64]


def whole_steps(profile: Profile) -> dict[int, LayerSteps]:
    """Steps of each layer that are all of its steps in the selection, by the layer's index.

    None of a recording of level windows, nor where they are more than a page can go through.
    """
    if not profile.has("steps") or profile.files is None:
        return {}
    table = profile.step_counts()
    if table.counts.size > MOST_CELLS:
        return {}
    found = {}
    for position, layer in moe_layers(profile):
        mine = table.layer == layer.index
        counts, tokens = table.counts[mine][:, : layer.experts], table.tokens[mine]
        summed = profile.totals.lists["counts"][:, position, : layer.experts].sum(0)
        if len(tokens) and tokens.min() >= 0 and np.array_equal(counts.sum(0), summed):
            found[layer.index] = LayerSteps(counts, tokens)
    return found


def is_too_long(profile: Profile) -> bool:
    """Whether a recording has more steps than a page can go through."""
    kept = profile.has("steps") and profile.files is not None
    return kept and profile.step_counts().counts.size > MOST_CELLS
