"""Several processes begin to record in one directory at the same moment."""

from __future__ import annotations

from pathlib import Path

import routeprof
from routeprof.recording.reader import open_recording
from tests.recording.made import by_hand, random_parts
from tests.trouble.conftest import documented, program

ROUNDS = 5


def counted(ranks: list[tuple[int, int]]) -> int:
    """Assignments in the parts that these processes write, as (number, rank)."""
    rows = [row for number, rank in ranks for row in random_parts(number, 1, rank=rank)[0]]
    sums = by_hand(rows)
    return sum(sum(into.values()) for place, into in sums.items() if place[2] == "counts")


def held(directory: Path) -> int:
    profile = routeprof.load(directory)
    assert profile.totals.unread == ()
    return int(profile.totals.lists["counts"].sum())


def test_ranks_that_come_together_agree_on_one_recording(tmp_path):
    ranks = [0, 1, 2]
    rounds = program("racing", tmp_path, ROUNDS, *ranks)
    for said in rounds:
        directory = Path(said["directory"])
        files = open_recording(directory)
        assert said["met"] == ["", "", ""]
        assert set(said["seen"]) <= {files.info.id}  # one from the first moment on, and never half
        assert [rank.rank for rank in files.ranks] == ranks
        assert held(directory) == counted([(0, 0), (1, 1), (2, 2)])
        assert not list(directory.rglob("*.tmp"))


def test_the_same_rank_twice_is_one_recording_and_one_refusal(tmp_path):
    for said in program("racing", tmp_path, ROUNDS, 0, 0):
        directory = Path(said["directory"])
        first, (line,) = said["met"].index(""), [met for met in said["met"] if met]
        assert open_recording(directory).info.id == f"process {first}"
        assert held(directory) == counted([(first, 0)])
        assert documented(line, **{"DIR": directory})


def test_the_same_rank_of_several_twice(tmp_path):
    for said in program("racing", tmp_path, ROUNDS, 0, 1, 1):
        directory, met = Path(said["directory"]), said["met"]
        (line,) = [one for one in met if one]
        first = 1 if not met[1] else 2
        assert held(directory) == counted([(0, 0), (first, 1)])
        assert documented(line.replace("rank-00001", "rank-00000"), DIR=directory)
