"""fold: the sum by hand, in any order, on any executor."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routeprof
from routeprof.recording.fold import Totals, fold, merge
from routeprof.recording.reader import open_recording
from routeprof.topology import RankRole
from tests.recording.made import (
    FACTORS,
    LAYERS,
    LISTS,
    NULLABLE,
    NULLABLE_LISTS,
    SUMS,
    by_hand,
    info_of,
    random_parts,
    write,
)

WHOLE = "steps calls tokens invalid max_load_sum gate_rows expected_tokens".split() + LISTS
INFO = info_of()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Parts on disk, and the rows that are in them."""
    rows = random_parts(seed=1)
    directory = tmp_path_factory.mktemp("fold") / "r"
    write(directory, rows)
    return open_recording(directory).parts("part"), [row for part in rows for row in part]


def equal(one: Totals, other: Totals, *, exactly: bool = True) -> None:
    """The same totals; floats to the bit, or up to rounding."""
    assert one.keys == other.keys
    assert one.unread == other.unread
    for kind in ("sums", "lists"):
        for name, values in getattr(one, kind).items():
            same = np.testing.assert_array_equal
            if not exactly and name not in WHOLE:
                same = np.testing.assert_allclose
            same(values, getattr(other, kind)[name], err_msg=name)
    np.testing.assert_array_equal(one.imbalance_max, other.imbalance_max)


def in_order(windows):
    """Rows of the timeline as a sorted table."""
    columns = [getattr(windows, name) for name in windows.__dataclass_fields__]
    table = np.column_stack([column.reshape(len(windows.window), -1) for column in columns])
    return table[np.lexsort(table.T)]


def test_the_sum_is_the_one_by_hand(recorded):
    parts, rows = recorded
    totals, expected = fold(parts, INFO), by_hand(rows)
    assert set(totals.keys) == {(row["phase"], row["tag"]) for row in rows}
    assert totals.keys[0] == ("decode", None)
    for number, key in enumerate(totals.keys):
        for place, layer in enumerate(LAYERS):
            for name in SUMS + NULLABLE:
                found = totals.sums[name][number, place]
                unknown = {"expected_tokens": -1}.get(name, np.nan if name in NULLABLE else 0)
                want = expected.get((key, layer.index, name), unknown)
                assert found == pytest.approx(want, nan_ok=True), name
            for name in LISTS + NULLABLE_LISTS:
                _same_list(totals.lists[name][number, place], expected, (key, layer.index, name))
            largest = expected.get((key, layer.index, "imbalance_max"), np.nan)
            assert totals.imbalance_max[number, place] == pytest.approx(largest, nan_ok=True)


def _same_list(found, expected, place) -> None:
    if place not in expected:
        unknown = np.isnan(found) if place[2] in NULLABLE_LISTS else found == 0
        assert unknown.all(), place
        return
    want = np.zeros(len(found))
    for index, value in expected[place].items():
        want[index] = value
    np.testing.assert_allclose(found, want, err_msg=str(place))


def test_the_timeline_has_the_rows_that_ran(recorded):
    parts, rows = recorded
    totals = fold(parts, INFO)
    found = sorted(
        zip(
            totals.windows.window,
            [totals.keys[key] for key in totals.windows.key],
            totals.windows.layer,
            totals.windows.tokens,
            totals.windows.assignments,
            totals.windows.max_count,
            strict=True,
        ),
        key=str,
    )
    place = {layer.index: number for number, layer in enumerate(LAYERS)}
    want = [
        (
            row["window"],
            (row["phase"], row["tag"]),
            place[row["layer"]],
            row["tokens"],
            sum(row["counts"]),
            max(row["counts"]),
        )
        for row in rows
        if row["calls"]
    ]
    assert found == sorted(want, key=lambda row: str(tuple(map(_plain, row))))


def _plain(value):
    return np.int64(value) if isinstance(value, int) else value


@settings(deadline=None, max_examples=25)
@given(random=st.randoms(use_true_random=False))
def test_the_order_of_the_parts_does_not_matter(recorded, random):
    parts, _ = recorded
    shuffled = random.sample(parts, len(parts))
    one, other = fold(parts, INFO), fold(shuffled, INFO)
    equal(one, other)
    np.testing.assert_array_equal(in_order(one.windows), in_order(other.windows))


@settings(deadline=None, max_examples=25)
@given(random=st.randoms(use_true_random=False))
def test_parts_may_be_folded_apart_and_merged_in_any_order(recorded, random):
    parts, _ = recorded
    shuffled = random.sample(parts, len(parts))
    cuts = sorted(random.sample(range(len(parts) + 1), 2))
    groups = [shuffled[: cuts[0]], shuffled[cuts[0] : cuts[1]], shuffled[cuts[1] :]]
    merged = merge([fold(group, INFO) for group in groups], INFO)
    whole = fold(parts, INFO)
    equal(whole, merged, exactly=False)
    np.testing.assert_array_equal(in_order(whole.windows), in_order(merged.windows))


def test_the_executor_does_not_matter(recorded):
    parts, _ = recorded
    alone = fold(parts, INFO)
    with ThreadPoolExecutor(3) as executor:
        equal(alone, fold(parts[::-1], INFO, executor=executor))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        equal(alone, fold(parts[::-1], INFO, executor=executor))


def test_nothing_adds_up_to_nothing():
    totals = fold([], INFO)
    assert totals.keys == ()
    assert totals.lists["counts"].shape[:2] == (0, len(LAYERS))


def test_between_keeps_the_windows_that_end_inside(recorded):
    parts, rows = recorded
    inside = [row for row in rows if 102.0 < row["end"] <= 104.0]
    totals, expected = fold(parts, INFO, between=(102.0, 104.0)), by_hand(inside)
    assert set(totals.keys) == {(row["phase"], row["tag"]) for row in inside}
    steps = sum(value for (*_, name), value in expected.items() if name == "steps")
    assert totals.sums["steps"].sum() == steps
    assert fold(parts, INFO, between=(0.0, 1.0)).keys == ()


def test_neighbouring_ranges_share_no_window(recorded):
    parts, _ = recorded
    ranges = ((100.0, 102.0), (102.0, 104.0), (100.0, 104.0))
    one, other, both = (
        fold(parts, INFO, between=between).sums["steps"].sum() for between in ranges
    )
    assert one + other == both > 0


def test_a_part_in_which_no_layer_ran(tmp_path):
    rows = [row for part in random_parts(2) for row in part]
    silent = [row for row in rows if not row["calls"]]
    write(tmp_path / "r", [silent, rows])
    parts = open_recording(tmp_path / "r").parts("part")
    for chosen in (parts[:1], parts):
        totals = fold(chosen, INFO)
        assert totals.windows.overflow.shape[1] == len(FACTORS)
        assert totals.unread == ()
    assert routeprof.load(tmp_path / "r").windows().shape[0] == len(rows) - len(silent)


def test_ranks_that_own_their_tokens_are_summed_and_twins_are_not(tmp_path):
    own, other, twin = (random_parts(seed, parts=3, rank=seed - 5) for seed in (5, 6, 7))
    write(tmp_path / "r", own, RankRole(rank=0, world_size=3))
    write(tmp_path / "r", other, RankRole(rank=1, world_size=3, dp=1))
    write(tmp_path / "r", twin, RankRole(rank=2, world_size=3, tp=1, owns_tokens=False))
    files = open_recording(tmp_path / "r")
    assert [rank.rank for rank in files.ranks] == [0, 1, 2]
    totals = routeprof.load(tmp_path / "r").totals
    rows = [row for part in own + other for row in part]
    assert totals.sums["tokens"].sum() == sum(row["tokens"] or 0 for row in rows)
    assert set(totals.windows.rank) == {0, 1}
