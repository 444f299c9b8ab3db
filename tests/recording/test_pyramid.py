"""The pyramid: the same sums to the last bit as without it, whatever happens to its files."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.recording import batch, groups, pyramid
from routeprof.recording.compact import compact
from routeprof.recording.fold import Totals, fold
from routeprof.recording.merge import open_recordings
from routeprof.recording.pyramid import Pyramid
from routeprof.recording.pyramid_file import read
from routeprof.recording.reader import open_recording
from routeprof.recording.retention import Policy
from routeprof.recording.schema import part_name
from routeprof.topology import RankRole
from tests.recording.made import info_of, random_parts, write, write_part
from tests.recording.test_compact import same_sums
from tests.recording.test_fold import equal

PARTS = 25
FILES = {
    f"rank-0000{rank}/{level}-00000{number}"
    for rank in range(2)
    for level, count in ((1, 6), (2, 3), (3, 1))
    for number in range(count)
}
"""What is kept of so many parts in groups of four, two and two."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Groups of few parts."""
    monkeypatch.setattr(groups, "FEWEST", 4)
    monkeypatch.setattr(groups, "SIZE", 4)
    monkeypatch.setattr(groups, "FANOUT", 2)


@pytest.fixture
def directory(tmp_path) -> Path:
    """A recording of two ranks, with every kind of null, several phases and tags."""
    for rank in range(2):
        role = RankRole(rank=rank, world_size=2, dp=rank)
        write(tmp_path / "r", random_parts(rank, PARTS, 3, rank), role)
    return tmp_path / "r"


def both(*directories: Path, **options) -> Totals:
    """What is found with the pyramid, after it was held against what is found without."""
    files = open_recordings(directories)
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


def part(directory: Path, number: int, rank: int = 0) -> Path:
    return directory / f"rank-0000{rank}" / part_name("part", number)


def test_sums_are_kept_and_are_the_same(directory):
    both(directory)
    assert kept(directory).keys() == FILES
    assert used(directory) == 2 * 24
    before = kept(directory)
    both(directory)
    assert kept(directory) == before


def test_parts_of_which_sums_are_kept_are_not_read(directory, monkeypatch):
    both(directory)
    read = []
    whole = batch.read_part

    def noting(one, *rest):
        read.append(one.path.name)
        return whole(one, *rest)

    monkeypatch.setattr(batch, "read_part", noting)
    routeprof.load(directory)
    assert read == [part_name("part", 24)] * 2


@pytest.mark.parametrize("count", [0, 4, 5, 17])
def test_every_number_of_parts(tmp_path, count):
    directory = tmp_path / "r"
    write(directory, random_parts(3, count))
    for _ in range(2):
        both(directory)
    whole = max(0, (count - 1) // 4) * 4
    assert used(directory) == whole


def test_a_recording_that_grows(tmp_path):
    rows = random_parts(4, 14, 3)
    writer = write(tmp_path / "r", rows[:2])
    for number in range(2, 14):
        write_part(writer, rows[number])
        both(tmp_path / "r")
    assert used(tmp_path / "r") == 12


def test_a_part_in_place_of_another_of_the_same_size_and_time(directory):
    both(directory)
    one, other = part(directory, 5), part(directory, 6)
    content, status = bytearray(other.read_bytes()), one.stat()
    content += bytes(max(0, status.st_size - len(content)))
    with one.open("r+b") as file:  # the same inode
        file.write(content[: status.st_size])
    os.utime(one, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (one.stat().st_size, one.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert used(directory) == 2 * 24 - 4
    assert both(directory).unread


def test_a_part_that_is_gone_and_one_that_comes_late(directory, tmp_path):
    both(directory)
    late = tmp_path / "late"
    shutil.move(part(directory, 9), late)
    assert used(directory) == 2 * 24 - 4
    both(directory)
    assert used(directory) == 2 * 24 - 1
    shutil.move(late, part(directory, 9))
    assert used(directory) == 2 * 24 - 4
    both(directory)
    both(directory)  # the first could not tell whether the part may change without a trace
    assert used(directory) == 2 * 24


def test_files_of_parts_that_are_gone_are_removed(directory):
    both(directory)
    for number in range(8):
        part(directory, number).unlink()
    both(directory)
    gone = {"rank-00000/1-000000", "rank-00000/1-000001", "rank-00000/2-000000"}
    assert kept(directory).keys() == FILES - gone
    stale = directory / groups.FOLDER / "rank-00000" / "1-000000.1.2.tmp"
    stale.write_bytes(b"half")
    os.utime(stale, (0, 0))
    both(directory)
    assert not stale.exists()


def test_a_damaged_part_is_named_every_time(directory):
    content = part(directory, 6).read_bytes()
    part(directory, 6).write_bytes(content[: len(content) // 2])
    for _ in range(2):
        assert [line.split()[0] for line in both(directory).unread] == [
            "rank-00000/" + part_name("part", 6)
        ]
    assert used(directory) == 2 * 24 - 4
    part(directory, 6).write_bytes(content)
    both(directory)
    both(directory)
    assert used(directory) == 2 * 24


@pytest.mark.parametrize("other", [6, 7, 20, 24])
def test_a_copy_is_named_every_time(directory, other):
    """Within its group, in another group, and where nothing is kept."""
    both(directory)
    shutil.copy(part(directory, 5), part(directory, other))
    for _ in range(2):
        (line,) = both(directory).unread
        assert "one is a copy" in line


def test_any_flipped_bit_of_a_kept_file_is_seen(tmp_path):
    directory = tmp_path / "r"
    write(directory, random_parts(5, 5, 1))
    both(directory)
    (path,) = (directory / groups.FOLDER).rglob("1-000000")
    good = path.read_bytes()
    identity = json.loads(good[good.index(b"{") : good.index(b"}") + 1])["identity"]
    assert read(path, identity) is not None
    random = np.random.default_rng(0)
    for bit in {*range(256), *random.integers(8 * len(good), size=1000).tolist()}:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        assert read(path, identity) is None, bit
    for size in range(0, len(good), 37):
        path.write_bytes(good[:size])
        assert read(path, identity) is None, size
    both(directory)
    assert path.read_bytes() == good


def test_a_file_of_another_make_is_made_anew(directory, monkeypatch):
    both(directory)
    before = kept(directory)
    monkeypatch.setattr(groups, "__version__", "0.0.1")
    assert used(directory) == 0
    both(directory)
    assert kept(directory).keys() == FILES
    assert all(before[name] != content for name, content in kept(directory).items())


def test_ranges_of_time_take_whole_groups(directory):
    both(directory)
    for first, last in ((0, 1000), (101, 120), (104, 112), (110, 111), (300, 400), (0, 130.5)):
        both(directory, between=(float(first), float(last)))
    files = open_recording(directory)
    known = list(Pyramid(files.parts("part"), files.info).known(between=(101.0, 117.0)))
    inside = [group.path.name for group, sums in known if sums is not None]
    # Window n ends at 101 + n: windows 1 to 16.
    assert inside == ["1-000001", "2-000001"] * 2
    assert len([group for group, sums in known if sums is None]) == 2


def test_rows_without_a_time_are_in_no_range(tmp_path):
    rows = random_parts(6, 9)
    rows[2][0] |= {"start": None, "end": None}
    directory = tmp_path / "r"
    write(directory, rows)
    for between in (None, (0.0, 1e9), (101.0, 106.0)):
        both(directory, between=between)


def test_a_rank_of_several_recordings_has_another_number(directory, tmp_path):
    both(directory)
    other = tmp_path / "other"
    write(other, random_parts(7, 9), id="other", capacity_factors=(1.5,))
    for _ in range(2):
        both(directory, other)
    both(directory)
    both(other)


def test_sums_of_a_few_columns_take_nothing(directory):
    both(directory)
    both(directory, columns={"window", "start", "end", "layer", "phase", "tag", "counts", "steps"})


def test_some_of_the_parts_leave_what_is_kept_alone(directory):
    both(directory)
    before = kept(directory)
    files = open_recording(directory)
    parts = files.parts("part")
    some = parts[3:17] + parts[30:45]
    equal(fold(some, files.info, pyramid=False), fold(some, files.info))
    assert kept(directory) == before


def test_with_workers(directory):
    with ThreadPoolExecutor(3) as executor:
        both(directory, executor=executor)
        assert used(directory) == 2 * 24
        both(directory, executor=executor)


BUILD = """
import sys
from routeprof.recording import groups
groups.FEWEST, groups.SIZE, groups.FANOUT = 4, 4, 2
import routeprof
print(int(routeprof.load(sys.argv[1]).counts.sum()))
"""


def test_several_processes_at_once(directory):
    command = [sys.executable, "-c", BUILD, str(directory)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate()[0] for process in running}
    assert said == {f"{both(directory).lists['counts'].sum()}\n"}
    assert kept(directory).keys() == FILES
    assert used(directory) == 2 * 24


def test_a_place_where_nothing_can_be_written(directory):
    (directory / groups.FOLDER).write_text("a file, where a directory would be")
    both(directory)
    assert used(directory) == 0


def test_a_full_disk_is_left_alone(directory, monkeypatch):
    monkeypatch.setattr(pyramid, "ROOM", 1 << 62)
    both(directory)
    assert kept(directory) == {}


def test_files_that_may_change_without_a_trace_are_not_kept(directory):
    """The last change of a group may be as old as its directory's: another could follow unseen."""
    files = open_recording(directory)
    found = Pyramid(files.parts("part"), files.info).lowest()
    assert all(group.settled for group in found)
    os.utime(part(directory, 3))
    files = open_recording(directory)
    found = Pyramid(files.parts("part"), files.info).lowest()
    assert [group.settled for group in found] == [False] + [True] * 11


def test_folds_of_nothing(tmp_path):
    equal(fold([], info_of(), pyramid=False), fold([], info_of()))


def test_compaction_ends_it_and_does_not_count_it(directory):
    before = both(directory)
    assert kept(directory)
    without = sum(
        file.stat().st_size
        for file in directory.rglob("*")
        if file.is_file() and directory / groups.FOLDER not in file.parents
    )
    outcome = compact(directory, Policy(tiers=(), least=math.inf))
    assert outcome.before.bytes == without
    assert kept(directory) == {}
    same_sums(before, both(directory))
