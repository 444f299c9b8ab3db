"""The ranks of a recording, each by itself: what it counted, and whether twins agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from routeprof.recording.fold import Totals, Windows, fold
from routeprof.recording.reader import Part, RankFiles, RecordingFiles
from routeprof.recording.schema import RecordingInfo
from routeprof.tables import framed, tag_name
from routeprof.topology import Layer

if TYPE_CHECKING:
    from routeprof.profile import Profile

RANK_COLUMNS = (
    "directory run rank tp dp ep pp owns_tokens state host pid steps tokens assignments coverage "
    "problems"
).split()

_WHOLE = "tp dp ep pp pid steps tokens assignments problems".split()
_READ = "window start end layer phase tag steps calls tokens expected_tokens counts invalid".split()


def ranks_table(profile: Profile) -> pd.DataFrame:
    """See ``Profile.ranks``."""
    ranks = profile.files.ranks if profile.files else ()
    return framed([_row(profile, rank) for rank in ranks], RANK_COLUMNS, ["run", "rank"], _WHOLE)


def _row(profile: Profile, rank: RankFiles) -> dict[str, Any]:
    row: dict[str, Any] = {
        "directory": str(rank.directory),
        "run": rank.run,
        "rank": rank.rank,
        "owns_tokens": rank.owns_tokens,
        "state": "unknown",
    }
    if rank.state is not None:
        role = rank.state.role
        row |= {name: getattr(role, name) for name in ("tp", "dp", "ep", "pp")}
        row |= {name: getattr(rank.state, name) for name in ("state", "host", "pid")}
        # Beside their counts, problems may hold the first message of a kind.
        row["problems"] = sum(isinstance(count, int) for count in rank.state.problems.values())
    alone = _alone(profile, rank)
    sums = {name: alone.totals.sums[name].sum(0).max(initial=0) for name in ("steps", "tokens")}
    return row | {
        "steps": int(sums["steps"]),
        "tokens": int(sums["tokens"]),
        "assignments": int(alone.totals.lists["counts"].sum()),
        "coverage": alone.coverage,
    }


# -- one rank by itself


@dataclass(frozen=True)
class _Read:
    """What was read of one rank.

    Attributes:
        totals: sums of the columns in ``_READ``, without a timeline.
        last_steps: int64 [layers], passes in the last window in which the layer ran.
        largest: int64 [layers], assignments of the window with the most.
    """

    totals: Totals
    last_steps: NDArray[np.int64]
    largest: NDArray[np.int64]


def _alone(profile: Profile, rank: RankFiles) -> Profile:
    """The profile of one rank, as if it owned its tokens: coverage, counts, steps, tokens."""
    state = rank.state and replace(rank.state, role=replace(rank.state.role, owns_tokens=True))
    owner = replace(rank, state=state)
    totals = _read(profile, rank).totals.only(
        lambda key: profile.phase in (None, key[0]) and profile.tag in (None, tag_name(key[1]))
    )
    files = RecordingFiles(rank.directory, profile.info, (owner,))
    return replace(profile, totals=totals, files=files)


def _read(profile: Profile, rank: RankFiles) -> _Read:
    """The rank's sums; they are the profile's own where no other rank is in them."""
    others = [one for one in profile.files.ranks if one.owns_tokens] if profile.files else []
    if [one.number for one in others] == [rank.number]:
        return _summed(profile.totals, len(profile.info.layers))
    parts = tuple(part for part in rank.parts if part.kind == "part")
    info = profile.info
    stamps = tuple(_stamp(part) for part in parts)
    return _read_parts(parts, stamps, info.layers, info.capacity_factors, profile.between)


# A dashboard asks again and again, and each time of a new Profile.
@lru_cache(maxsize=256)
def _read_parts(
    parts: tuple[Part, ...],
    stamps: tuple[object, ...],
    layers: tuple[Layer, ...],
    factors: tuple[float, ...],
    between: tuple[float, float] | None,
) -> _Read:
    info = RecordingInfo("", layers, (), capacity_factors=factors)
    read = _summed(fold(parts, info, between=between, columns=_READ), len(layers))
    return replace(read, totals=replace(read.totals, windows=Windows.empty(len(factors))))


def _stamp(part: Part) -> object:
    """Changes when the part's file does."""
    try:
        status = part.path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _summed(totals: Totals, layers: int) -> _Read:
    """Totals of one rank with what its timeline says."""
    windows = totals.windows
    numbers, window = np.unique(windows.window, return_inverse=True)
    assignments = np.zeros((len(numbers), layers), dtype=np.int64)
    np.add.at(assignments, (window.reshape(-1), windows.layer), windows.assignments)
    last = np.full(layers, -1, dtype=np.int64)
    np.maximum.at(last, windows.layer, windows.window)
    steps = np.zeros(layers, dtype=np.int64)
    final = windows.window == last[windows.layer]
    np.add.at(steps, windows.layer[final], windows.steps[final])
    return _Read(totals, steps, assignments.max(0, initial=0))


# -- twins


@dataclass(frozen=True)
class TwinFault:
    """A tensor-parallel twin that did not count what its owner counted.

    Attributes:
        layers: indices of the layers in which they differ; the figures are of the first.
        difference: Σ over experts of the difference in assignments.
        assignments, steps: of the owner; ``twin_steps``: of the twin.
    """

    owner: RankFiles
    twin: RankFiles
    layers: tuple[int, ...]
    difference: int
    assignments: int
    steps: int
    twin_steps: int


def twin_faults(profile: Profile) -> Iterator[TwinFault]:
    """Twins whose counts are not their owner's, of ranks that were stopped and are complete.

    In as many passes they must have counted the same. One that was stopped later may have more
    of every expert, from no more passes than its last window had. A request to start, pause or
    stop may reach one of them a window later than the other.
    """
    ranks = profile.files.ranks if profile.files and profile.is_whole else ()
    whole = [rank for rank in ranks if _is_whole(rank)]
    owners = {_replica(rank): rank for rank in reversed(whole) if rank.owns_tokens}
    for twin in whole:
        owner = owners.get(_replica(twin))
        if not twin.owns_tokens and owner is not None:
            yield from _compared(profile, owner, twin)


def _is_whole(rank: RankFiles) -> bool:
    return rank.state is not None and rank.state.state == "stopped" and not rank.missing()


def _replica(rank: RankFiles) -> tuple[int, int, int]:
    """What a twin shares with its owner: run, data-parallel and pipeline rank."""
    assert rank.state is not None
    return rank.run, rank.state.role.dp, rank.state.role.pp


def _compared(profile: Profile, owner: RankFiles, twin: RankFiles) -> Iterator[TwinFault]:
    one, other = _read(profile, owner), _read(profile, twin)
    if one.totals.unread or other.totals.unread:
        return
    counts, twin_counts = (read.totals.lists["counts"].sum(0) for read in (one, other))
    width = max(counts.shape[1], twin_counts.shape[1])
    counts, twin_counts = (_widened(values, width) for values in (counts, twin_counts))
    steps, twin_steps = (read.totals.sums["steps"].sum(0) for read in (one, other))
    more, fewer = twin_counts - counts, counts - twin_counts
    later = (twin_steps > steps) & (twin_steps - steps <= other.last_steps)
    earlier = (twin_steps < steps) & (steps - twin_steps <= one.last_steps)
    explained = np.where(later, (more >= 0).all(1), earlier & (fewer >= 0).all(1))
    requests = max(rank.state.control for rank in (owner, twin) if rank.state)
    explained |= np.abs(more).sum(1) <= requests * np.maximum(one.largest, other.largest)
    wrong = np.flatnonzero((more != 0).any(1) & ~explained)
    if len(wrong):
        first = wrong[0]
        yield TwinFault(
            owner,
            twin,
            tuple(profile.info.layers[position].index for position in wrong),
            int(np.abs(more[first]).sum()),
            int(counts[first].sum()),
            int(steps[first]),
            int(twin_steps[first]),
        )


def _widened(values: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))
