"""Where experts sit: as the reader supposes, and as a recording may say."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from routeprof.errors import UsageError
from routeprof.metrics.ranks import contiguous, rank_loads
from routeprof.profile import Profile
from routeprof.tables import moe_layers
from routeprof.topology import Layer

USUAL_RANKS = 8

PLACEMENTS_FILE = "placements.json"


@dataclass(frozen=True)
class Map:
    """A map of experts to slots that an engine noted.

    Attributes:
        time: when it came into force, seconds since the epoch.
        ranks: expert-parallel ranks that its slots are dealt to.
        slots: int64 [layers of the model, slots], the logical expert in every slot.
    """

    time: float
    ranks: int
    slots: NDArray[np.int64]


@dataclass(frozen=True)
class Recorded:
    """The last map in force in a selection; ``changes`` says how often it changed there."""

    map: Map
    changes: int


def recorded(profile: Profile) -> Recorded | None:
    """What the recording says about where its experts were; None if it says nothing."""
    for rank in profile.files.ranks if profile.files else ():
        maps = _maps(rank.directory / f"rank-{rank.rank:05d}" / PLACEMENTS_FILE)
        if maps:
            return _in_force(profile, maps)
    return None


def _in_force(profile: Profile, maps: tuple[Map, ...]) -> Recorded:
    windows = profile.totals.windows
    if not len(windows.end):
        return Recorded(maps[-1], 0)
    start, end = float(windows.start.min()), float(windows.end.max())
    until = [item for item in maps if item.time <= end] or [maps[0]]
    return Recorded(until[-1], sum(item.time > start for item in until[1:]))


def _maps(path: Path) -> tuple[Map, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return _read(path, status.st_mtime_ns, status.st_size)


# A page asks again and again; an engine that balances notes many maps.
@lru_cache(maxsize=16)
def _read(path: Path, changed: int, size: int) -> tuple[Map, ...]:
    """The maps of a file, the earliest first; none of a file that holds something else."""
    try:
        notes = json.loads(path.read_text(encoding="utf-8"))
        maps = [
            Map(
                float(note["time"]),
                int(note["ep_size"]),
                np.array(note["physical_to_logical"], dtype=np.int64),
            )
            for note in notes
        ]
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return ()
    whole = all(item.slots.ndim == 2 and item.ranks > 0 for item in maps)
    return tuple(sorted(maps, key=lambda item: item.time)) if whole else ()


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


def placed(layer: Layer) -> int:
    """Experts that need a place: those that do no work have none."""
    return layer.experts - layer.zero_experts


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
