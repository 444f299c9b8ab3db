"""Processes that begin to record in one directory at the same moment.

``python -m tests.trouble.racing DIRECTORY ROUNDS RANK…`` starts one process for each of the ranks
in every round, and prints for each round a JSON line of what they met and what a reader saw.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pandas  # noqa: F401  (pyarrow imports it when it first makes an array: once, not in each child)

from routeprof.errors import NotARecordingError, RecordingExistsError
from routeprof.recording.schema import RankState, RecordingInfo
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import RankRole
from tests.recording.made import info_of, random_parts, write_part


def one(directory: Path, number: int, rank: int, ranks: list[int], start: int) -> str:
    """A process that records; returns what it met."""
    # Long: half of it read would be no JSON.
    info = replace(info_of(id=f"process {number}"), notes=("a note",) * 1000)
    role = RankRole(rank, world_size=len(set(ranks)))
    rows = random_parts(number, parts=1, rank=rank)[0]
    os.read(start, 1)
    try:
        writer = RecordingWriter(directory, info, RankState(role))
    except RecordingExistsError as error:
        return str(error)
    write_part(writer, rows)
    writer.write_state(state="stopped")
    return ""


def look(path: Path) -> set[str]:
    """Which recording a reader finds, if any."""
    try:
        return {RecordingInfo.from_json(path.read_text("utf-8"), "").id}
    except FileNotFoundError:
        return set()
    except NotARecordingError:
        return {"damaged"}


def race(directory: Path, ranks: list[int]) -> dict[str, object]:
    """One round; the reader looks all the while."""
    go, told = os.pipe(), os.pipe()
    children = []
    for number, rank in enumerate(ranks):
        child = os.fork()
        if not child:
            met = one(directory, number, rank, ranks, go[0])
            os.write(told[1], json.dumps([number, met]).encode() + b"\n")
            os._exit(0)
        children.append(child)
    os.write(go[1], bytes(len(ranks)))
    seen: set[str] = set()
    while children:
        seen |= look(directory / "recording.json")
        os.sched_yield()
        if done := os.waitpid(-1, os.WNOHANG)[0]:
            children.remove(done)
    os.close(told[1])
    with os.fdopen(told[0]) as lines:
        met = dict(sorted(json.loads(line) for line in lines))
    for descriptor in go:
        os.close(descriptor)
    return {"directory": str(directory), "met": list(met.values()), "seen": sorted(seen)}


if __name__ == "__main__":
    for round_number in range(int(sys.argv[2])):
        place = Path(sys.argv[1]) / str(round_number)
        print(json.dumps(race(place, [int(rank) for rank in sys.argv[3:]])))
