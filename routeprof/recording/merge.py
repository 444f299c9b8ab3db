"""Opening several directories as one: nodes of one run, or runs of one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from routeprof.errors import OverlapError, UsageError
from routeprof.recording.layers import LayerSource, union
from routeprof.recording.places import place
from routeprof.recording.reader import RANKS_PER_RUN, RankFiles, RecordingFiles, open_recording
from routeprof.recording.schema import RecordingInfo
from routeprof.topology import LEVELS


def open_recordings(paths: Sequence[str | Path]) -> RecordingFiles:
    """List the files of one or more recordings, which are then read as one.

    Directories with the same ``id``, or with the same ``run``, are parts of one run; its ranks
    are put together. Other directories are runs of their own. The order of the paths does not
    matter.

    Raises:
        NotARecordingError: there is no recording at one of the paths.
        NewerSchemaError: one was written by a newer routeprof.
        OverlapError: two directories hold the same rank of one run.
        MismatchError: they are of different models.
    """
    if not paths:
        raise UsageError("no recording was named; name at least one directory")
    _check_named_once([place(path) for path in paths])
    found = [open_recording(path) for path in paths]
    if len(found) == 1:
        return found[0]
    found.sort(key=lambda files: (files.info.started, str(files.directory)))
    infos = [files.info for files in found]
    info = _common(infos, [str(files.directory) for files in found])
    ranks = [
        _moved(rank, run, files.info, info)
        for files, run in zip(found, _runs(infos), strict=True)
        for rank in files.ranks
    ]
    ranks.sort(key=lambda rank: rank.number)
    for one, other in pairwise(ranks):
        if one.number == other.number:
            raise OverlapError(_overlap(one, other))
    return RecordingFiles(found[0].directory, info, tuple(ranks), tuple(_remarks(infos, info)))


def _check_named_once(paths: list[Path]) -> None:
    seen: dict[Path, Path] = {}
    for path in paths:
        other = seen.setdefault(path.resolve(), path)
        if other is not path:
            names = f"{path} is" if path == other else f"{other} and {path} are"
            raise OverlapError(f"{names} the same directory named twice; name it once")


def _runs(infos: Sequence[RecordingInfo]) -> list[int]:
    """For each recording the number of its run, in the order in which runs begin."""
    groups: list[set[tuple[str, str]]] = []
    names = [{("id", info.id), ("run", info.run or info.id)} for info in infos]
    for own in names:
        related = [group for group in groups if group & own]
        groups = [group for group in groups if group not in related]
        groups.append(own.union(*related))
    firsts = [next(group for group in groups if own <= group) for own in names]
    order = list({id(group): None for group in firsts})
    return [order.index(id(group)) for group in firsts]


def _moved(rank: RankFiles, run: int, own: RecordingInfo, info: RecordingInfo) -> RankFiles:
    """The rank as one among the ranks of several recordings."""
    origin, number = str(rank.directory), run * RANKS_PER_RUN + rank.rank
    factors = None if own.capacity_factors == info.capacity_factors else own.capacity_factors
    parts = tuple(replace(part, rank=number, origin=origin, factors=factors) for part in rank.parts)
    return replace(rank, run=run, origin=origin, parts=parts)


def _overlap(one: RankFiles, other: RankFiles) -> str:
    """One line that says what the two directories hold twice, and what to do."""
    both = f"{one.origin} and {other.origin} are of one run and both hold rank {one.rank}"
    if one.state is None or other.state is None:
        return f"{both}: leave one out"
    processes = [(state.host, state.pid, state.started) for state in (one.state, other.state)]
    if processes[0] == processes[1]:
        process = f"process {one.state.pid} on {one.state.host or 'an unnamed host'}"
        return f"{both}, written by the same {process}: one is a copy of the other, leave it out"
    return (
        f"{both}, written by different processes: number ranks over all nodes when recording, "
        "or leave one out; where the rank was started again, read the directories one at a time"
    )


# -- what is true for all


def _common(infos: Sequence[RecordingInfo], names: Sequence[str]) -> RecordingInfo:
    """What holds for all recordings, the earliest first."""
    sources = [
        LayerSource(name, info.layers, info.passes) for name, info in zip(names, infos, strict=True)
    ]
    layers, passes = union(sources)
    rules = {info.capacity_rule for info in infos}
    shared = set(infos[0].capacity_factors).intersection(*(info.capacity_factors for info in infos))
    factors = [factor for factor in infos[0].capacity_factors if factor in shared]
    # One may be of an engine, or of a routeprof, that says less.
    config = next((info.model.config for info in infos if info.model.config is not None), None)
    return replace(
        infos[0],
        model=replace(infos[0].model, config=config),
        layers=layers,
        passes=passes,
        level=min((info.level for info in infos), key=LEVELS.index),
        gate=any(info.gate for info in infos),
        capacity_factors=tuple(factors) if len(rules) == 1 else (),
        notes=tuple(dict.fromkeys(note for info in infos for note in info.notes)),
        batches=all(info.batches for info in infos),
    )


def _remarks(infos: Sequence[RecordingInfo], common: RecordingInfo) -> Iterator[str]:
    """One line for each way in which they differ that a reader must know."""
    models = sorted({info.model.name for info in infos if info.model.name})
    if len(models) > 1:
        yield f"the recordings name different models: {', '.join(models)}"
    levels = sorted({info.level for info in infos}, key=LEVELS.index)
    if len(levels) > 1:
        yield f"levels differ ({', '.join(levels)}): shown is what all have, {common.level}"
    if len({(info.capacity_rule, info.capacity_factors) for info in infos}) > 1:
        factors = ", ".join(f"{factor:g}" for factor in common.capacity_factors)
        yield f"capacity factors differ: overflow is of those that all have ({factors or 'none'})"
