"""Compaction: what is left says the same as what there was, wherever it is broken off."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routeprof
from routeprof.dashboards.live.follower import Follower
from routeprof.errors import RecordingError
from routeprof.recording.compact import LOCK_FILE, compact
from routeprof.recording.fold import Totals, fold
from routeprof.recording.id_bytes import packed
from routeprof.recording.reader import Part, all_parts, open_recording
from routeprof.recording.recount import gaps
from routeprof.recording.retention import Policy, Timed, groups
from routeprof.recording.schema import (
    ROW_SCHEMA,
    STEP_SCHEMA,
    TOKEN_SCHEMA,
    RankState,
    coarse_name,
    part_name,
)
from routeprof.recording.totals import Windows
from routeprof.recording.writer import RecordingWriter
from routeprof.topology import RankRole
from tests.recording.made import FACTORS, LAYERS, info_of, random_parts, write, write_part
from tests.recording.test_fold import equal

INFO = info_of()
ALL = Policy(tiers=(), least=math.inf)
"""Everything becomes one window a rank."""

SCALARS = "cost_seconds entropy_sum top1_sum margin_sum z_sum".split()
FLOAT_LISTS = "probability_mass weight_sum".split()


def totals_of(directory: Path) -> Totals:
    files = open_recording(directory)
    assert [rank.missing() for rank in files.ranks] == [[] for _ in files.ranks]
    return fold(files.parts("part"), files.info)


def same_sums(one: Totals, other: Totals) -> None:
    """All but the timeline to the last bit, and of it what adds up."""
    none = Windows.empty(len(FACTORS))
    equal(replace(one, windows=none), replace(other, windows=none))
    assert added_up(one) == added_up(other)


def added_up(totals: Totals) -> dict:
    """By rank, key and layer. Steps in which a layer did not run are in no row of the timeline
    where it did not run in the whole window."""
    windows, sums = totals.windows, defaultdict(lambda: np.zeros(2 + len(FACTORS), dtype=int))
    for place in range(len(windows.window)):
        own = windows.rank[place], totals.keys[windows.key[place]], windows.layer[place]
        numbers = windows.tokens[place], windows.assignments[place]
        sums[own] += [*numbers, *windows.overflow[place]]
    return {key: tuple(own.tolist()) for key, own in sums.items()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("rank-00000/*.parquet"))


# -- the sums


@pytest.mark.parametrize("seed", range(4))
def test_many_windows_become_one_with_the_same_sums(seed: int, tmp_path: Path):
    write(tmp_path / "r", random_parts(seed, parts=40))
    before = totals_of(tmp_path / "r")
    outcome = compact(tmp_path / "r", ALL)
    assert names(tmp_path / "r") == ["coarse-000000-000039.parquet"]
    assert (outcome.before.parts, outcome.after.parts, outcome.remarks) == (40, 1, ())
    size = sum(path.stat().st_size for path in (tmp_path / "r").rglob("*") if path.is_file())
    assert outcome.after.bytes == size < outcome.before.bytes
    after = totals_of(tmp_path / "r")
    same_sums(before, after)
    assert set(after.windows.window) == {0}
    assert set(zip(after.windows.start, after.windows.end, strict=True)) == {(100.0, 140.0)}


@pytest.mark.parametrize("seed", range(12))
def test_what_nobody_knew_stays_unknown(seed: int, tmp_path: Path):
    """With so few rows most layers, phases and tags lack some column altogether."""
    write(tmp_path / "r", random_parts(seed, parts=3, rows=2))
    before, unknown = totals_of(tmp_path / "r"), nulls(tmp_path / "r")
    outcome = compact(tmp_path / "r", ALL)
    assert (outcome.after.parts, outcome.remarks) == (1, ())
    same_sums(before, totals_of(tmp_path / "r"))
    assert nulls(tmp_path / "r") == unknown


def nulls(directory: Path) -> dict[tuple, set[str]]:
    """Columns without any value, by layer, phase and tag."""
    found: dict[tuple, set[str]] = {}
    for path in directory.rglob("*.parquet"):
        for row in pq.read_table(path).to_pylist():
            own = {name for name, value in row.items() if value is None}
            key = row["layer"], row["phase"], row["tag"]
            found[key] = found.get(key, own) & own
    return found


def by_fractions(paths: list[Path]) -> dict:
    """The true sum of every float, and which are unknown, as any other reader may find them."""
    sums = {}
    for path in paths:
        for row in pq.read_table(path).to_pylist():
            own = row["layer"], row["phase"], row["tag"]
            for name in SCALARS:
                sums.setdefault((*own, name), None)
                if row[name] is not None:
                    sums[*own, name] = (sums[*own, name] or 0) + Fraction(row[name])
            for name in FLOAT_LISTS:
                sums.setdefault((*own, name), None)
                if row[name] is not None:
                    now = sums[*own, name] or [Fraction(0)] * len(row[name])
                    pairs = zip(now, row[name], strict=True)
                    sums[*own, name] = [one + Fraction(other) for one, other in pairs]
    return sums


MAGNITUDES = [1e300, -1e300, 1e-300, 5e-324, -5e-324, 1.0, 2.0**-53, 1e16, -1.0, 0.0, -0.0, 0.1]
FINITE = st.one_of(st.sampled_from(MAGNITUDES), st.floats(allow_nan=False, allow_infinity=False))


def with_floats(draw, floats) -> list[list[dict]]:
    """Random parts whose gate sums are drawn."""
    parts = random_parts(draw(st.integers(0, 99)), parts=draw(st.integers(2, 5)), rows=3)
    for row in (row for rows in parts for row in rows):
        for name in SCALARS:
            row[name] = draw(st.one_of(st.none(), floats)) if row["calls"] else row[name]
        for name in FLOAT_LISTS:
            if row[name] is not None:
                row[name] = draw(st.lists(floats, min_size=len(row[name]), max_size=len(row[name])))
    return parts


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_floats_of_any_size_keep_their_true_sum(data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("floats") / "r"
    write(directory, with_floats(data.draw, FINITE))
    true, before = by_fractions(sorted(directory.rglob("*.parquet"))), totals_of(directory)
    compact(directory, ALL)
    (path,) = directory.rglob("*.parquet")
    assert by_fractions([path]) == true
    same_sums(before, totals_of(directory))


@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_what_is_not_finite_stays_what_it_is(data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("odd") / "r"
    odd = st.sampled_from([math.nan, math.inf, -math.inf, 1e300, 1.0, 1e-300])
    write(directory, with_floats(data.draw, odd))
    before = totals_of(directory)
    outcome = compact(directory, ALL)
    assert (outcome.after.parts, outcome.remarks) == (1, ())
    same_sums(before, totals_of(directory))


def test_what_cancels_leaves_what_was_small(tmp_path: Path):
    """1e300 + 1e-300 - 1e300 is 1e-300, and needs three rows before it is known to."""
    parts = random_parts(3, parts=3, rows=1)
    row = next(row for rows in random_parts(0) for row in rows if row["calls"])
    values = (1e300, 1e-300, -1e300)
    parts = [
        [row | {"window": number, "end": 101.0 + number, "z_sum": value}]
        for number, value in enumerate(values)
    ]
    write(tmp_path / "one", parts[:2])
    write(tmp_path / "all", parts)
    for directory in (tmp_path / "one", tmp_path / "all"):
        compact(directory, ALL)
    table = pq.read_table(next((tmp_path / "one").rglob("*.parquet")))
    assert table["z_sum"].to_pylist() == [1e300, 1e-300]
    assert table["tokens"].to_pylist() == [2 * row["tokens"], 0]
    assert table["counts"].to_pylist()[1] is None
    (line,) = pq.read_table(next((tmp_path / "all").rglob("*.parquet")))["z_sum"].to_pylist()[:1]
    assert line == 1e-300


def test_it_may_be_done_again_and_again_to_wider_windows(tmp_path: Path):
    write(tmp_path / "r", random_parts(5, parts=32, rows=4))
    before = totals_of(tmp_path / "r")
    for width in (2.0, 8.0, 8.0, math.inf):
        compact(tmp_path / "r", replace(ALL, least=width))
        same_sums(before, totals_of(tmp_path / "r"))
    assert names(tmp_path / "r") == ["coarse-000000-000031.parquet"]


def test_ranks_are_compacted_apart(tmp_path: Path):
    for rank in range(3):
        role = RankRole(rank, 3, dp=rank, owns_tokens=rank != 1)
        write(tmp_path / "r", random_parts(rank, parts=9, rank=rank), role)
    before = totals_of(tmp_path / "r")
    compact(tmp_path / "r", ALL)
    same_sums(before, totals_of(tmp_path / "r"))
    found = sorted(path.parent.name for path in (tmp_path / "r").rglob("*.parquet"))
    assert found == ["rank-00000", "rank-00001", "rank-00002"]


def test_reports_stay_the_same_but_for_the_timeline(tmp_path: Path):
    write(tmp_path / "r", random_parts(2, parts=30))
    routeprof.load(tmp_path / "r").write_csv(tmp_path / "before")
    compact(tmp_path / "r", ALL)
    routeprof.load(tmp_path / "r").write_csv(tmp_path / "after")
    files = {path.name for path in (tmp_path / "before").iterdir()}
    assert files == {path.name for path in (tmp_path / "after").iterdir()}
    differ = {
        name
        for name in files
        if (tmp_path / "before" / name).read_bytes() != (tmp_path / "after" / name).read_bytes()
    }
    assert differ == {"windows.csv"}


def test_a_part_without_times_is_left_as_it_is(tmp_path: Path):
    parts = random_parts(1, parts=6)
    for row in parts[2]:
        row |= {"start": None, "end": None}
    write(tmp_path / "r", parts)
    before = totals_of(tmp_path / "r")
    assert compact(tmp_path / "r", ALL).remarks == ()
    assert names(tmp_path / "r") == [
        "coarse-000000-000001.parquet",
        "coarse-000003-000005.parquet",
        "part-000002.parquet",
    ]
    same_sums(before, totals_of(tmp_path / "r"))


def test_what_would_be_no_counts_is_left_as_it_is(tmp_path: Path):
    """A sum above 2^53 is taken for damage where it stands in one row."""
    parts = random_parts(1, parts=3)
    for rows in parts:
        rows[:] = [row | {"tokens": 2**53} for row in rows if row["calls"]][:1]
        rows[0] |= {"layer": 3, "phase": "decode", "tag": None, "counts": [0] * 8}
        rows[0] |= dict.fromkeys(FLOAT_LISTS)
    write(tmp_path / "r", parts)
    before = totals_of(tmp_path / "r")
    assert before.unread == ()
    (line,) = compact(tmp_path / "r", ALL).remarks
    assert "do not fit into one" in line
    assert len(names(tmp_path / "r")) == 3
    same_sums(before, totals_of(tmp_path / "r"))


# -- by age


def due_by_hand(ends: list[float], tiers) -> list[list[int]]:
    """Runs of windows, by number, that are to become one; each alone where it stays."""
    found: list[tuple[object, list[int]]] = []
    for number, end in enumerate(ends):
        allowed = [width for age, width in tiers if ends[-1] - end > age]
        place = (allowed[-1], math.ceil(end / allowed[-1])) if allowed else number
        if not found or found[-1][0] != place:
            found.append((place, []))
        found[-1][1].append(number)
    return [own for _, own in found]


def test_windows_become_coarser_with_age(tmp_path: Path):
    tiers = ((10.0, 2.0), (30.0, 5.0), (60.0, 10.0))
    write(tmp_path / "r", random_parts(6, parts=100, rows=2))
    before = totals_of(tmp_path / "r")
    compact(tmp_path / "r", Policy(tiers=tiers))
    same_sums(before, totals_of(tmp_path / "r"))
    due = due_by_hand([101.0 + number for number in range(100)], tiers)
    assert names(tmp_path / "r") == sorted(
        coarse_name(own[0], own[-1]) if len(own) > 1 else part_name("part", own[0]) for own in due
    )
    assert len(due) == 33
    again = compact(tmp_path / "r", Policy(tiers=tiers))
    assert (again.before, again.after) == (again.after, again.before)


def test_what_is_kept_of_a_month_unless_told_otherwise():
    """A window a minute, and one a second in the last two hours."""
    ends = [60.0 * number for number in range(1, 30 * 24 * 60)]
    ends += [ends[-1] + number for number in range(1, 7200)]
    timed = [
        Timed(Part(Path(str(number)), "part", 0, number), end, end, (number,), 1)
        for number, end in enumerate(ends)
    ]
    found = [[one.part.number for one in group] for group in groups(timed, Policy(), ends[-1])]
    tiers = ((3600, 60), (86400, 600), (7 * 86400, 3600))
    assert found == [own for own in due_by_hand(ends, tiers) if len(own) > 1]
    assert len(found) == pytest.approx(23 * 24 + 6 * 24 * 6 + 60, abs=5)


def test_a_range_of_time_takes_the_coarse_windows_that_end_in_it(tmp_path: Path):
    write(tmp_path / "r", random_parts(8, parts=40))
    whole = routeprof.load(tmp_path / "r")
    before = whole.select(between=(110.0, 130.0)).totals
    compact(tmp_path / "r", replace(ALL, least=10.0))
    after = routeprof.load(tmp_path / "r").select(between=(110.0, 130.0)).totals
    same_sums(before, after)  # whose ends are those of windows, as the range's are
    assert len(set(after.windows.window)) == 2


# -- what is missing, damaged, or there twice


def test_a_damaged_part_is_left_and_those_beside_it_are_not(tmp_path: Path):
    write(tmp_path / "r", random_parts(4, parts=9))
    path = tmp_path / "r" / "rank-00000" / part_name("part", 4)
    good = path.read_bytes()
    path.write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:])
    before = totals_of(tmp_path / "r")
    (line,) = compact(tmp_path / "r", ALL).remarks
    assert line == "rank-00000/part-000004.parquet does not match its checksum: left as it is"
    left = ["coarse-000000-000003.parquet", "coarse-000005-000008.parquet", "part-000004.parquet"]
    assert names(tmp_path / "r") == left
    same_sums(before, totals_of(tmp_path / "r"))
    path.write_bytes(good)  # restored from a copy: it counts again
    write(tmp_path / "other", random_parts(4, parts=9))
    same_sums(totals_of(tmp_path / "other"), totals_of(tmp_path / "r"))


def test_a_part_that_ends_too_early_is_left_too(tmp_path: Path):
    write(tmp_path / "r", random_parts(4, parts=4))
    path = tmp_path / "r" / "rank-00000" / part_name("part", 1)
    path.write_bytes(path.read_bytes()[:-1])
    (line,) = compact(tmp_path / "r", ALL).remarks
    assert line.startswith("rank-00000/part-000001.parquet cannot be read")
    assert part_name("part", 1) in names(tmp_path / "r")


def test_columns_of_a_later_version_are_not_lost(tmp_path: Path):
    write(tmp_path / "r", random_parts(4, parts=4))
    path = tmp_path / "r" / "rank-00000" / part_name("part", 1)
    table = pq.read_table(path)
    pq.write_table(table.append_column("novel", pa.array([1] * table.num_rows)), path)
    (line,) = compact(tmp_path / "r", ALL).remarks
    label = "rank-00000/part-000001.parquet"
    assert line == f"{label} has columns of a later routeprof: novel: left as it is"
    assert "novel" in pq.read_schema(path).names


def test_a_dashboard_that_follows_begins_again(tmp_path: Path):
    write(tmp_path / "r", random_parts(4, parts=12))
    files = open_recording(tmp_path / "r")
    follower = Follower(files.info)
    before = follower.update(files, math.inf)
    compact(tmp_path / "r", replace(ALL, least=4.0))
    files = open_recording(tmp_path / "r")
    assert not follower.belongs_to(files)
    same_sums(before, Follower(files.info).update(files, math.inf))


def test_a_lost_part_stays_known_as_lost(tmp_path: Path):
    write(tmp_path / "r", random_parts(4, parts=9))
    (tmp_path / "r" / "rank-00000" / part_name("part", 4)).unlink()
    before = fold(open_recording(tmp_path / "r").parts("part"), INFO)
    compact(tmp_path / "r", ALL)
    (rank,) = open_recording(tmp_path / "r").ranks
    assert rank.missing() == ["part-000004"]
    same_sums(before, fold(list(rank.parts), INFO))


def test_a_copy_of_a_part_is_counted_once_before_and_after(tmp_path: Path):
    write(tmp_path / "r", random_parts(4, parts=9))
    rank = tmp_path / "r" / "rank-00000"
    shutil.copy(rank / part_name("part", 2), rank / part_name("part", 9))
    before = totals_of(tmp_path / "r")
    outcome = compact(tmp_path / "r", ALL)
    assert len(outcome.remarks) == 2
    same_sums(before, totals_of(tmp_path / "r"))


def test_what_a_coarse_part_stands_for_does_not_count(tmp_path: Path):
    """Files that a run broken off has left, also an earlier coarse part among them."""
    write(tmp_path / "r", random_parts(4, parts=9))
    before = totals_of(tmp_path / "r")
    old = shutil.copytree(tmp_path / "r" / "rank-00000", tmp_path / "old")
    compact(tmp_path / "r", replace(ALL, least=3.0))
    for path in (tmp_path / "r" / "rank-00000").glob("coarse-*"):
        shutil.copy(path, old)
    compact(tmp_path / "r", ALL)
    for path in old.glob("*.parquet"):
        shutil.copy(path, tmp_path / "r" / "rank-00000")
    assert len(names(tmp_path / "r")) > 10
    same_sums(before, totals_of(tmp_path / "r"))
    compact(tmp_path / "r", ALL)
    assert names(tmp_path / "r") == ["coarse-000000-000008.parquet"]


def test_originals_stay_while_their_coarse_part_is_damaged(tmp_path: Path):
    write(tmp_path / "r", random_parts(4, parts=4))
    before = totals_of(tmp_path / "r")
    old = shutil.copytree(tmp_path / "r" / "rank-00000", tmp_path / "old")
    compact(tmp_path / "r", ALL)
    for path in old.glob("*.parquet"):
        shutil.copy(path, tmp_path / "r" / "rank-00000")
    coarse = tmp_path / "r" / "rank-00000" / "coarse-000000-000003.parquet"
    coarse.write_bytes(coarse.read_bytes()[:-1])
    line = compact(tmp_path / "r", ALL).remarks[0]
    assert "4 parts that it stands for are there still: remove it, and they count" in line
    coarse.unlink()
    same_sums(before, totals_of(tmp_path / "r"))


def test_coarse_parts_that_overlap_leave_a_gap_that_is_named(tmp_path: Path):
    writer = write(tmp_path / "r", random_parts(4, parts=6))
    for path in writer.rank.glob("part-*"):
        path.unlink()
    other = write(tmp_path / "other", random_parts(4, parts=4))
    compact(tmp_path / "other", ALL)
    for name in ("coarse-000000-000003.parquet", "coarse-000002-000005.parquet"):
        shutil.copy(other.rank / "coarse-000000-000003.parquet", writer.rank / name)
    (rank,) = open_recording(tmp_path / "r").ranks
    assert [part.path.name for part in rank.parts] == ["coarse-000000-000003.parquet"]
    assert rank.missing() == ["part-000004", "part-000005"]


# -- detail


def step_rows(step: int, rank: int, time: float) -> tuple[list[dict], list[dict], dict]:
    """Rows of steps, tokens and rows parts of one step."""
    draw = np.random.default_rng(1000 * rank + step)
    steps, tokens, count = [], [], int(draw.integers(1, 5))
    for layer in LAYERS[1:]:
        ids = draw.integers(0, layer.experts, (count, layer.top_k))
        row = {"step": step, "time": time, "rank": rank, "layer": layer.index, "phase": "decode"}
        row |= {"requests": 1, "tokens": count, "invalid": 0}
        steps.append(row | {"counts": np.bincount(ids.ravel(), minlength=layer.experts)})
        tokens.append({"step": step, "rank": rank, "layer": layer.index, "tokens": count})
        tokens[-1] |= {"ids": packed(ids.ravel(), layer.experts), "phase": "decode"}
    positions = {"request": [0] * count, "position": list(range(count))}
    return steps, tokens, {"step": step, "rank": rank, "pass": "model@cpu", **positions}


def write_rows(writer: RecordingWriter, kind: str, schema, rows: list[dict]) -> None:
    writer.write(kind, schema, {name: [row.get(name) for row in rows] for name in schema.names})


def with_detail(directory: Path, windows: int = 12, ranks: int = 1, state="stopped") -> Path:
    """Windows of a second with two steps each, all of whose detail is there."""
    for rank in range(ranks):
        role = RankRole(rank, ranks, dp=rank)
        told = RankState(role=role, passes=("", "model", "model"), layers=LAYERS)
        writer = RecordingWriter(directory, info_of(level="tokens"), told)
        for window, rows in enumerate(random_parts(rank, parts=windows, rank=rank)):
            found = [step_rows(2 * window + n, rank, 100.25 + window + n / 2) for n in (0, 1)]
            write_part(writer, rows)
            write_rows(writer, "steps", STEP_SCHEMA, [row for one in found for row in one[0]])
            write_rows(writer, "tokens", TOKEN_SCHEMA, [row for one in found for row in one[1]])
            write_rows(writer, "rows", ROW_SCHEMA, [one[2] for one in found])
        writer.write_state(state=state)
    return directory


def left(directory: Path) -> dict[str, list[int]]:
    """Numbers of the parts of each kind that are on disk."""
    found: dict[str, list[int]] = {}
    for path in sorted(directory.rglob("*.parquet")):
        kind, number = path.stem.split("-", 1)
        if kind != "coarse":
            found.setdefault(kind, []).append(int(number))
    return found


def test_detail_goes_with_age_and_totals_stay(tmp_path: Path):
    """The newest window ends at 112; windows older than 3.5 s end at 108 or before."""
    before = totals_of(with_detail(tmp_path / "r"))
    steps = routeprof.load(tmp_path / "r").steps()
    outcome = compact(tmp_path / "r", Policy(keep=3.5))
    assert outcome.dropped == 3 * 8
    kept = [8, 9, 10, 11]
    assert left(tmp_path / "r") == dict.fromkeys(("part", "steps", "tokens", "rows"), kept)
    same_sums(before, totals_of(tmp_path / "r"))  # which says that nothing is lost, too
    profile = routeprof.load(tmp_path / "r")
    wanted = steps[steps.step >= 16].reset_index(drop=True)
    assert profile.steps().equals(wanted)
    tokens = profile.tokens(3)
    assert set(tokens.step) == set(range(16, 24))
    assert set(tokens.request) == {0}
    (finding,) = [one for one in profile.findings() if one.code == "detail-dropped"]
    text = "rows, steps, tokens dropped before 1970-01-01T00:01:47Z by compact"
    assert finding.evidence == f"{text}: 24 part files"
    assert gaps(profile.files) == [f"rank 0: {text}"]


def test_a_lost_part_is_not_taken_for_a_dropped_one(tmp_path: Path):
    with_detail(tmp_path / "r")
    for name in ("steps-000002", "tokens-000010"):
        (tmp_path / "r" / "rank-00000" / f"{name}.parquet").unlink()
    compact(tmp_path / "r", Policy(keep=3.5))
    (rank,) = open_recording(tmp_path / "r").ranks
    assert rank.missing() == ["steps-000002", "tokens-000010"]
    compact(tmp_path / "r", Policy(keep=1.5))
    (rank,) = open_recording(tmp_path / "r").ranks
    assert rank.missing() == ["steps-000002", "tokens-000010"]
    assert left(tmp_path / "r")["steps"] == [10, 11]


def test_detail_that_was_dropped_stays_dropped_where_its_file_is_there_still(tmp_path: Path):
    with_detail(tmp_path / "r")
    old = shutil.copytree(tmp_path / "r", tmp_path / "old")
    compact(tmp_path / "r", Policy(keep=3.5))
    steps = routeprof.load(tmp_path / "r").steps()
    for path in (old / "rank-00000").glob("*-*.parquet"):
        shutil.copy(path, tmp_path / "r" / "rank-00000")
    assert routeprof.load(tmp_path / "r").steps().equals(steps)
    compact(tmp_path / "r", Policy(keep=3.5))
    assert left(tmp_path / "r")["steps"] == [8, 9, 10, 11]


def test_detail_without_times_or_damaged_is_kept(tmp_path: Path):
    with_detail(tmp_path / "r")
    rank = tmp_path / "r" / "rank-00000"
    (rank / "steps-000001.parquet").write_bytes(b"PAR1")
    table = pq.read_table(rank / "steps-000003.parquet")
    place = table.schema.get_field_index("time")
    none = [None] * table.num_rows
    unknown = pa.array(none, table.schema.field(place).type)
    pq.write_table(table.set_column(place, "time", unknown), rank / "steps-000003.parquet")
    (line,) = compact(tmp_path / "r", Policy(keep=3.5)).remarks
    assert line.startswith("rank-00000/steps-000001.parquet cannot be read")
    assert left(tmp_path / "r")["steps"] == [1, 3, 8, 9, 10, 11]


def test_the_last_parts_of_a_rank_that_goes_on_are_left_alone(tmp_path: Path):
    with_detail(tmp_path / "r", state="recording")
    compact(tmp_path / "r", replace(ALL, keep=1e-3))
    assert left(tmp_path / "r") == {kind: [11] for kind in ("part", "steps", "tokens", "rows")}
    with_detail(tmp_path / "other")
    compact(tmp_path / "other", replace(ALL, keep=1e-3))
    assert left(tmp_path / "other") == {}


def test_ages_count_from_the_newest_window_of_all_ranks(tmp_path: Path):
    with_detail(tmp_path / "r", ranks=2)
    shutil.rmtree(tmp_path / "r" / "rank-00001")
    with_detail(tmp_path / "other", windows=20, ranks=2)
    shutil.copytree(tmp_path / "other" / "rank-00001", tmp_path / "r" / "rank-00001")
    compact(tmp_path / "r", Policy(keep=9.5))
    found = sorted(path.name for path in (tmp_path / "r" / "rank-00000").glob("steps-*"))
    assert found == ["steps-000010.parquet", "steps-000011.parquet"]


# -- by size


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_the_oldest_detail_goes_first_and_no_more_than_must(tmp_path: Path):
    with_detail(tmp_path / "r", ranks=2)
    before, size = totals_of(tmp_path / "r"), bytes_of(tmp_path / "r")
    outcome = compact(tmp_path / "r", Policy(), most=size - 30_000)
    assert outcome.after.bytes == bytes_of(tmp_path / "r") <= size - 30_000
    numbers = left(tmp_path / "r")
    assert len(numbers["part"]) == 24
    assert 0 < len(numbers["steps"]) < 24
    for kind in ("steps", "tokens", "rows"):
        first = min(numbers[kind])
        assert sorted(numbers[kind]) == sorted([*range(first, 12)] * 2)
    same_sums(before, totals_of(tmp_path / "r"))


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2, 0.1])
def test_it_fits_where_it_can(share: float, tmp_path: Path):
    with_detail(tmp_path / "r", windows=40)
    before, most = totals_of(tmp_path / "r"), int(share * bytes_of(tmp_path / "r"))
    outcome = compact(tmp_path / "r", Policy(), most=most)
    assert outcome.after.bytes == bytes_of(tmp_path / "r") <= most
    same_sums(before, totals_of(tmp_path / "r"))


def test_what_cannot_fit_is_as_small_as_it_gets(tmp_path: Path):
    before = totals_of(with_detail(tmp_path / "r"))
    outcome = compact(tmp_path / "r", Policy(), most=1)
    assert outcome.after.bytes == bytes_of(tmp_path / "r") > 1
    assert (outcome.after.parts, left(tmp_path / "r")) == (1, {})
    same_sums(before, totals_of(tmp_path / "r"))


def stamped(directory: Path) -> dict[Path, tuple[int, int]]:
    """When each file was written, and its number on the disk."""
    found = {path: path.stat() for path in directory.rglob("*")}
    return {path: (status.st_mtime_ns, status.st_ino) for path, status in found.items()}


@pytest.mark.parametrize("most", [None, 1, 60_000])
def test_a_dry_run_touches_nothing_and_says_what_would_be(most: int | None, tmp_path: Path):
    with_detail(tmp_path / "r")
    stamps = stamped(tmp_path / "r")
    policy = replace(ALL, keep=3.5)
    said = compact(tmp_path / "r", policy, most=most, dry_run=True)
    assert stamped(tmp_path / "r") == stamps
    done = compact(tmp_path / "r", policy, most=most)
    assert said.before == done.before
    assert (said.after.parts, said.dropped) == (done.after.parts, done.dropped)
    assert said.after.bytes == pytest.approx(done.after.bytes, rel=0.3)


# -- beside others


def test_a_second_compaction_is_refused_and_touches_nothing(tmp_path: Path):
    import fcntl

    write(tmp_path / "r", random_parts(1))
    with (tmp_path / "r" / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RecordingError, match="another compact is at work in"):
            compact(tmp_path / "r", ALL)
    assert len(names(tmp_path / "r")) == 6
    compact(tmp_path / "r", ALL)
    assert len(names(tmp_path / "r")) == 1


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``/dev/full`` takes no byte."""
    write(tmp_path / "r", random_parts(1))
    before = totals_of(tmp_path / "r")
    (tmp_path / "r" / "rank-00000" / "coarse-000000-000005.tmp").symlink_to("/dev/full")
    monkeypatch.setattr("routeprof.recording.compact.leftovers", lambda *_: [])
    with pytest.raises(RecordingError, match="nothing is lost"):
        compact(tmp_path / "r", ALL)
    assert len(names(tmp_path / "r")) == 6
    same_sums(before, totals_of(tmp_path / "r"))


def test_a_listing_that_is_overtaken_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The coarse part came after its place in the listing was read, and took away the rest."""
    write(tmp_path / "r", random_parts(1))
    before, listed = totals_of(tmp_path / "r"), [True]

    def torn(directory: Path, rank: int) -> list[Part]:
        if listed:
            listed.clear()
            first = all_parts(directory, rank)[:2]
            compact(tmp_path / "r", ALL)
            return first
        return all_parts(directory, rank)

    monkeypatch.setattr("routeprof.recording.reader.all_parts", torn)
    same_sums(before, totals_of(tmp_path / "r"))


def test_a_recording_may_be_compacted_and_read_while_it_grows(tmp_path: Path):
    """Whoever reads meanwhile finds the sums of the first n windows, for some n, never less."""
    rows = random_parts(9, parts=60)
    writer = RecordingWriter(tmp_path / "r", INFO, RankState())
    write_part(writer, rows[0])
    sums = [totals_of(tmp_path / "r").lists["counts"].sum()]
    for part in rows[1:]:
        sums.append(sums[-1] + sum(sum(row["counts"] or ()) for row in part))
    done, faults = threading.Event(), []

    def go_on() -> None:
        try:
            for number, part in enumerate(rows[1:], 1):
                write_part(writer, part)
                if not number % 4:
                    compact(tmp_path / "r", replace(ALL, least=7.0))
            writer.write_state(state="stopped")
        except Exception as error:
            faults.append(error)
        done.set()

    thread = threading.Thread(target=go_on)
    thread.start()
    seen = 0
    while not done.is_set():
        profile = routeprof.load(tmp_path / "r")
        assert profile.totals.unread == ()
        assert profile.files is not None
        assert profile.files.ranks[0].missing() == []
        now = sums.index(int(profile.totals.lists["counts"].sum()))
        assert now >= seen
        seen = now
    thread.join()
    assert faults == []
    write(tmp_path / "other", rows)
    same_sums(totals_of(tmp_path / "other"), totals_of(tmp_path / "r"))


# -- killed

_KILLED = """
import os, signal, sys
from math import inf
from pathlib import Path
from routeprof.recording.compact import compact
from routeprof.recording.retention import Policy

def killed_at(number):
    def hook(event, arguments):
        nonlocal number
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in ("os.rename", "os.remove") or writes:
            number -= 1
            if not number:
                os.kill(os.getpid(), signal.SIGKILL)
    return hook

for line in sys.stdin:
    directory, number = line.split()
    child = os.fork()
    if not child:
        sys.addaudithook(killed_at(int(number)))
        compact(Path(directory), Policy(tiers=(), least=4.0, keep=3.5))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_nothing_is_lost_wherever_it_is_killed(tmp_path: Path):
    """SIGKILL before each file that it opens to write, renames or removes, one after the other."""
    made = with_detail(tmp_path / "made", windows=6)
    before = totals_of(made)
    done = shutil.copytree(made, tmp_path / "done")
    compact(done, Policy(tiers=(), least=4.0, keep=3.5))
    steps, whole = routeprof.load(done).steps(), routeprof.load(made).steps()
    command = [sys.executable, "-c", _KILLED]
    found = []
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(1, 1000):
            directory = shutil.copytree(made, tmp_path / f"killed-{number}")
            process.stdin.write(f"{directory} {number}\n")
            process.stdin.flush()
            found.append(int(process.stdout.readline()))
            same_sums(before, totals_of(directory))
            shown = routeprof.load(directory).steps()
            assert shown.equals(steps) or shown.equals(whole)
            compact(directory, Policy(tiers=(), least=4.0, keep=3.5))
            same_sums(before, totals_of(directory))
            files = {path.relative_to(directory) for path in directory.rglob("*")}
            assert files == {path.relative_to(done) for path in done.rglob("*")}
            shutil.rmtree(directory)
            if not found[-1]:
                break
        process.stdin.close()
    assert found == [-9] * (len(found) - 1) + [0]
    assert len(found) > 20
