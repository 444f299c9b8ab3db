"""The load of expert-parallel ranks, as a recording or a supposition has its experts: ranks.csv."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.errors import UsageError
from routeprof.metrics.ranks import contiguous, rank_loads, rank_of_slot
from routeprof.placements import Recorded, placed, recorded
from routeprof.tables import moe_layers
from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

SUPPOSED = ("contiguous", "striped")
"""Placements that any recording can be looked at with."""

USUAL_RANKS = 8

COLUMNS = "placement layer rank experts assignments load_over_mean".split()


def rank_loads_table(profile: Profile, ranks: int | None = None) -> pd.DataFrame:
    """See ``Profile.rank_loads``."""
    if ranks is None:
        ranks, _ = usual_ranks(profile)
    elif ranks < 1:
        raise UsageError(f"{ranks} ranks: pass 1 or more")
    known = recorded(profile)
    parts = [
        _rows(counts, layer, placement, ranks, known)
        for placement in (*SUPPOSED, *(["recorded"] if known else []))
        for counts, layer in _routed(profile)
    ]
    rows = pd.concat([part for part in parts if part is not None] or [pd.DataFrame()])
    table = rows.reindex(columns=COLUMNS).sort_values(COLUMNS[:3], ignore_index=True)
    whole = ["layer", "rank", "experts"]
    if not (table["assignments"] % 1).any():  # no replica shares an odd load
        whole.append("assignments")
    return table.astype(dict.fromkeys(whole, np.int64))


def _routed(profile: Profile) -> Iterator[tuple[NDArray[np.int64], Layer]]:
    """Assignments of each layer that has any, ``[experts]``."""
    counts = profile.totals.lists["counts"].sum(0)
    for position, layer in moe_layers(profile):
        own = counts[position, : layer.experts]
        if own.any():
            yield own, layer


def _rows(
    counts: NDArray[np.int64], layer: Layer, placement: str, ranks: int, known: Recorded | None
) -> pd.DataFrame | None:
    slots = slots_of(placement, layer, ranks, known)
    loads = loads_of_ranks(counts, layer, placement, ranks, known)
    if slots is None or np.isnan(loads).any():
        return None
    return pd.DataFrame(
        {
            "placement": placement,
            "layer": layer.index,
            "rank": np.arange(ranks),
            "experts": np.bincount(rank_of_slot(len(slots), ranks), minlength=ranks),
            "assignments": loads,
            "load_over_mean": loads / loads.mean(),
        }
    )


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
        placement: one of SUPPOSED, or ``recorded``.
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


def loads_of_ranks(
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
