"""Putting one part in the place of many, and deleting, so that nothing is lost at any moment.

A coarse part is whole, read back and on the disk before it gets the name at which readers leave
out what it stands for; only then that is deleted. Detail is named as dropped, then deleted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from routeprof.errors import OverflowingError
from routeprof.recording.coarse import Coarse
from routeprof.recording.dropped import DROPPED_FILE, Dropped
from routeprof.recording.exact import Exact
from routeprof.recording.reader import Part, RankFiles, all_parts
from routeprof.recording.retention import Detail, Timed
from routeprof.recording.schema import RecordingInfo, coarse_name, rank_directory
from routeprof.recording.spread import BATCH
from routeprof.recording.writer import write_sealed, write_whole


def folder(rank: RankFiles) -> Path:
    """A rank's directory."""
    return rank.directory / rank_directory(rank.rank)


def put_together(
    group: Sequence[Timed], rank: RankFiles, info: RecordingInfo, remarks: list[str]
) -> list[Timed]:
    """Write one coarse part for neighbouring window parts, and delete them.

    A part that cannot be read is left where it is, and so are those on its two sides apart.

    Args:
        remarks: what is left as it is, and why, is added.

    Returns:
        The parts that there are now.

    Raises:
        OSError: it cannot be written.
    """
    try:
        pieces = _pieces(group, info, remarks)
    except OverflowingError as error:
        remarks.append(f"{group[0].part.label} and those after it are left as they are: {error}")
        return list(group)
    found = []
    for some, coarse in pieces:
        if coarse is None or (len(some) == 1 and len(some[0].windows) == 1):
            found += some
        else:
            found += _replaced(some, coarse, rank, info, remarks)
    return found


def _pieces(
    group: Sequence[Timed], info: RecordingInfo, remarks: list[str]
) -> list[tuple[list[Timed], Coarse | None]]:
    """Runs of parts that can be read, with their sums, and between them the others."""
    pieces: list[tuple[list[Timed], Coarse | None]] = []
    run, waiting = list[Timed](), list[Coarse]()
    for one in group:
        coarse = Coarse.of(one.part, info)
        if isinstance(coarse, str):
            remarks.append(f"{coarse}: left as it is")
            pieces += [(run, Coarse.merged(waiting, info))] if run else []
            pieces.append(([one], None))
            run, waiting = [], []
            continue
        run.append(one)
        waiting.append(coarse)
        if len(waiting) == BATCH:
            waiting = [Coarse.merged(waiting, info)]
    return [*pieces, (run, Coarse.merged(waiting, info))] if run else pieces


def _replaced(
    some: Sequence[Timed], coarse: Coarse, rank: RankFiles, info: RecordingInfo, remarks: list[str]
) -> list[Timed]:
    first, stop = some[0].part.number, some[-1].part.numbers.stop
    target = folder(rank) / coarse_name(first, stop - 1)
    temporary = target.with_suffix(".tmp")
    write_sealed(temporary, [coarse.table(info, rank.rank)])
    part = Part(temporary, "part", some[0].part.rank, first, stop=stop)
    if not _same(Coarse.of(part, info), coarse):
        temporary.unlink()
        remarks.append(f"{some[0].part.label} and those after it do not fit into one: left")
        return list(some)
    _on_disk(temporary)
    temporary.replace(target)
    _on_disk(target.parent)
    for one in some:
        one.part.path.unlink(missing_ok=True)
    ends = some[0].first, max(one.last for one in some)
    size = target.stat().st_size
    return [Timed(replace(part, path=target), ends[1], ends[1], (coarse.window,), size)]


def _same(read: Coarse | str, due: Coarse) -> bool:
    """Whether what was read back is what was written, to the last bit."""
    if isinstance(read, str):
        return False
    one, other = read.totals, due.totals
    whole = [(one.sums, other.sums), (one.lists, other.lists)]
    return (
        (read.window, read.start, read.end) == (due.window, due.start, due.end)
        and one.keys == other.keys
        and all(np.array_equal(a[name], b[name]) for a, b in whole for name in b)
        and np.array_equal(one.imbalance_max, other.imbalance_max, equal_nan=True)
        and all(_exactly(one.exact[name], other.exact[name]) for name in other.exact)
    )


def _exactly(one: Exact, other: Exact) -> bool:
    return (
        np.array_equal(one.seen, other.seen)
        and one.digits.keys() == other.digits.keys()
        and all(np.array_equal(one.digits[place], other.digits[place]) for place in other.digits)
    )


def delete_detail(details: Sequence[Detail], rank: RankFiles, dropped: Dropped) -> Dropped:
    """Delete detail of a rank, once it is written down that it was.

    Args:
        dropped: what was deleted before.

    Raises:
        OSError: it cannot be written.
    """
    numbers = [(one.part.kind, one.part.number) for one in details]
    dropped = dropped.more(numbers, max(one.time for one in details))
    write_whole(folder(rank) / DROPPED_FILE, dropped.to_json())
    _on_disk(folder(rank) / DROPPED_FILE)
    _on_disk(folder(rank))
    for one in details:
        one.part.path.unlink(missing_ok=True)
    return dropped


def leftovers(rank: RankFiles, info: RecordingInfo, remarks: list[str]) -> list[Path]:
    """Files of a rank that count for nothing, since a run was broken off before it deleted them.

    What a coarse part stands for is none of them while that cannot be read.
    """
    counting = {part.path for part in rank.parts}
    found = [*folder(rank).glob("coarse-*.tmp"), *folder(rank).glob(f"{DROPPED_FILE}.*.tmp")]
    others = [part for part in all_parts(folder(rank), rank.rank) if part.path not in counting]
    found += [part.path for part in others if part.number in rank.dropped.numbers(part.kind)]
    for coarse in rank.parts:
        inside = [part.path for part in others if coarse.stop and _within(part, coarse)]
        fault = Coarse.of(coarse, info) if inside else ""
        if isinstance(fault, str) and inside:
            remarks.append(
                f"{fault}, and {len(inside)} parts that it stands for are there still: remove it, "
                "and they count"
            )
        else:
            found += inside
    return found


def _within(part: Part, coarse: Part) -> bool:
    inside = coarse.number <= part.number and part.numbers.stop <= coarse.stop
    return part.kind == "part" and inside


def _on_disk(path: Path) -> None:
    """Wait until a file, or what a directory lists, would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
