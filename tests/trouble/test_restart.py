"""A rank dies and comes back: into the same directory, into another one, on another node."""

from __future__ import annotations

import signal
from pathlib import Path
from time import time

import pytest

import routeprof
from routeprof.capture.control import health, rank_states
from routeprof.errors import OverlapError, RecordingExistsError
from tests.recording.made import by_hand
from tests.trouble.conftest import documented, program
from tests.trouble.dying import rows_of, writer_of


def die(directory: Path, run: str, *ranks: int) -> None:
    for rank in ranks:
        program("dying", directory, run, rank, status=-signal.SIGKILL)


def counted(*lives: tuple[str, int]) -> int:
    rows = [row for name, rank in lives for part in rows_of(name, rank) for row in part]
    sums = by_hand(rows)
    return sum(sum(into.values()) for place, into in sums.items() if place[2] == "counts")


def held(profile: routeprof.Profile) -> int:
    assert profile.totals.unread == ()
    return int(profile.totals.lists["counts"].sum())


@pytest.fixture(scope="module")
def died(tmp_path_factory) -> Path:
    """Two ranks of a launch that recorded in ``a``, and both again of another in ``b``."""
    folder = tmp_path_factory.mktemp("died")
    die(folder / "a", "", 0, 1)
    die(folder / "b", "", 0, 1)
    return folder


def test_what_it_had_written_is_there_and_it_is_called_dead(died):
    profile = routeprof.load(died / "a")
    assert held(profile) == counted(("a", 0), ("a", 1))
    states = rank_states(died / "a")
    assert {health(state, time()) for state in states.values()} == {"dead"}
    findings = {finding.code: finding for finding in profile.findings(now=time() + 1e6)}
    assert documented(findings["not-stopped"].suggestion)


def test_into_the_same_directory_it_is_refused_and_harms_nothing(died):
    before = {path: path.read_bytes() for path in died.rglob("*") if path.is_file()}
    with pytest.raises(RecordingExistsError) as refused:
        writer_of(died / "a", "", 1)
    line = str(refused.value).replace("rank-00001", "rank-00000")
    assert documented(line, DIR=died / "a")
    assert {path: path.read_bytes() for path in died.rglob("*") if path.is_file()} == before


def test_into_another_directory_both_lives_add_up(died):
    both = routeprof.load(died / "a", died / "b")
    assert held(both) == counted(*((name, rank) for name in "ab" for rank in (0, 1)))


def test_on_another_node_in_the_same_launch(tmp_path):
    """Its directory there holds a rank that the first node's holds already."""
    first, other = tmp_path / "node-0", tmp_path / "node-1"
    die(first, "launch", 0, 1)
    die(other, "launch", 1)
    with pytest.raises(OverlapError) as refused:
        routeprof.load(first, other)
    assert documented(str(refused.value), DIR=first, OTHER=other)
    # What the line says: one at a time.
    assert held(routeprof.load(first)) == counted(("node-0", 0), ("node-0", 1))
    assert held(routeprof.load(other)) == counted(("node-1", 1))
