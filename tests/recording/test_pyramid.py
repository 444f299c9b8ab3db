"""The pyramid: the same sums to the last bit as without it, whatever happens to its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from routeprof.recording import groups
from routeprof.recording.fold import Totals, fold
from routeprof.recording.pyramid import Pyramid
from routeprof.recording.reader import open_recording
from routeprof.recording.schema import part_name
from routeprof.topology import RankRole
from tests.recording.made import random_parts, write
from tests.recording.test_fold import equal

PARTS = 37
"""With groups of 4 parts and of 2 groups: 9 of level 1, 4 of level 2, 2 of level 3, 1 of level 4."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Groups of few parts."""
    monkeypatch.setattr(groups, "SIZE", 4)
    monkeypatch.setattr(groups, "FANOUT", 2)


@pytest.fixture
def directory(tmp_path) -> Path:
    """A recording of two ranks, with every kind of null, several phases and tags."""
    for rank in range(2):
        role = RankRole(rank=rank, world_size=2, dp=rank)
        write(tmp_path / "r", random_parts(rank, PARTS, 5, rank), role)
    return tmp_path / "r"


def both(directory: Path, **options) -> Totals:
    """What is found with the pyramid, after it was held against what is found without."""
    files = open_recording(directory)
    plain = fold(files.parts("part"), files.info, pyramid=False, **options)
    found = fold(files.parts("part"), files.info, **options)
    equal(plain, found)
    return found


def kept(directory: Path) -> dict[str, bytes]:
    """The pyramid's files by their place."""
    folder = directory / groups.FOLDER
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def used(directory: Path) -> int:
    """For how many parts there are sums that can be taken."""
    files = open_recording(directory)
    known = Pyramid(files.parts("part"), files.info).known()
    return sum(len(group.places) for group, _ in known)


def test_sums_are_kept_and_are_the_same(directory):
    both(directory)
    names = [
        f"rank-0000{rank}/{level}-00000{number}" for rank in range(2) for level, number in LEVELS
    ]
    assert sorted(kept(directory)) == sorted(names)
    assert used(directory) == 2 * 36
    before = kept(directory)
    both(directory)
    assert kept(directory) == before


LEVELS = [(1, n) for n in range(9)] + [(2, n) for n in range(4)] + [(3, 0), (3, 1), (4, 0)]


def test_parts_of_groups_that_are_kept_are_not_opened(directory, monkeypatch):
    want = both(directory)
    for part in (directory / "rank-00000").glob("part-*.parquet"):
        if part.name != part_name("part", 36):
            with part.open("r+b") as file:  # whoever reads it, fails; its times stay as they are
                ...
    assert want
