"""Where experts sit: as the reader supposes, or as a recording says."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import UsageError
from routeprof.metrics.ranks import contiguous, rank_loads
from routeprof.placements import Recorded, placed, recorded
from routeprof.profile import Profile
from routeprof.tables import moe_layers
from routeprof.topology import Layer

USUAL_RANKS = 8


def usual_ranks(profile: Profile) -> tuple[int, bool]:
    """Number of ranks to look at unless told otherwise, and whether the recording says it."""
    roles = [
        rank.state.role for rank in (profile.files.ranks if profile.files else ()) if rank.state
    ]
    parallel = max((role.ep for role in roles), default=0) + 1
    if parallel > 1:
        return parallel, True
    found = recorded(profile)
    if found is not None and found.map.ranks > 1:
        return found.map.ranks, True
    sizes = Counter(placed(layer) for _, layer in moe_layers(profile) if placed(layer) > 0)
    experts = sizes.most_common(1)[0][0] if sizes else USUAL_RANKS
    divisors = [number for number in range(1, USUAL_RANKS + 1) if experts % number == 0]
    return divisors[-1], False


def slots_of(
    placement: str, layer: Layer, ranks: int, known: Recorded | None
) -> NDArray[np.int64] | None:
    """The logical expert in every slot of a layer, ``[slots]``; None where that is not known.

    Args:
        placement: a key of ``state.PLACEMENTS``.
        known: what the recording says.
    """
    if placement == "recorded":
        there = known is not None and layer.index < len(known.map.slots)
        return known.map.slots[layer.index] if known is not None and there else None
    if placed(layer) < ranks:
        return None
    if placement == "striped":
        return np.argsort(np.arange(placed(layer)) % ranks, kind="stable")
    return contiguous(placed(layer), ranks)


def loads(
    counts: NDArray[np.int64], layer: Layer, placement: str, ranks: int, known: Recorded | None
) -> NDArray[np.float64]:
    """Load of every rank, ``[..., ranks]``; NaN where it cannot be told.

    Args:
        counts: assignments of one layer, ``[..., experts]``.
    """
    nothing = np.full((*counts.shape[:-1], ranks), np.nan)
    slots = slots_of(placement, layer, ranks, known)
    if slots is None:
        return nothing
    try:
        return rank_loads(counts[..., : placed(layer)], slots, ranks)
    except UsageError:  # fewer slots than ranks, or a map of another model
        return nothing
