"""Where experts sat, as a recording may say: the maps of experts to slots that an engine noted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

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


def placed(layer: Layer) -> int:
    """Experts that need a place: those that do no work have none."""
    return layer.experts - layer.zero_experts
