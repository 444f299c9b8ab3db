"""fold: the sum by hand, in any order, on any executor."""

from __future__ import annotations

import pickle
import shutil
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import fields, replace
from fractions import Fraction
from multiprocessing import get_context

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routeprof
from routeprof.errors import OverflowingError
from routeprof.recording.fold import Totals, fold, merge
from routeprof.recording.reader import open_recording
from routeprof.recording.schema import part_name
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

INFO = info_of()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Parts on disk, and the rows that are in them."""
    rows = random_parts(seed=1)
    directory = tmp_path_factory.mktemp("fold") / "r"
    write(directory, rows)
    return open_recording(directory).parts("part"), [row for part in rows for row in part]


def equal(one: Totals, other: Totals) -> None:
    """The same totals to the last bit, the timeline too."""
    assert one.keys == other.keys
    assert one.unread == other.unread
    for name, values in (one.sums | one.lists).items():
        same_bits(values, (other.sums | other.lists)[name], name)
    same_bits(one.imbalance_max, other.imbalance_max, "imbalance_max")
    for item in fields(one.windows):
        values, others = (getattr(totals.windows, item.name) for totals in (one, other))
        same_bits(values, others, item.name)
    for name, exact in one.exact.items():
        same_bits(exact.seen, other.exact[name].seen, name)
        assert exact.digits.keys() == other.exact[name].digits.keys()
        for place, digits in exact.digits.items():
            same_bits(digits, other.exact[name].digits[place], name)


def same_bits(one, other, name) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape), name
    assert np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes(), name


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
    equal(fold(parts, INFO), fold(random.sample(parts, len(parts)), INFO))


@settings(deadline=None, max_examples=25)
@given(random=st.randoms(use_true_random=False))
def test_parts_may_be_folded_apart_and_merged_in_any_order(recorded, random):
    parts, _ = recorded
    shuffled = random.sample(parts, len(parts))
    cuts = sorted(random.sample(range(len(parts) + 1), 2))
    groups = [shuffled[: cuts[0]], shuffled[cuts[0] : cuts[1]], shuffled[cuts[1] :]]
    folded = [fold(group, INFO) for group in groups]
    equal(fold(parts, INFO), merge([merge(folded[:2], INFO), folded[2]], INFO))


HOSTILE = (
    *(0.0, -0.0, 1.0, -1.0, 0.1, 1e-300, 5e-324, -5e-324, 2.0**53, 2.0**-53, 1 + 2.0**-52),
    *(1e300, -1e300, np.finfo(float).max, -np.finfo(float).max, np.inf, -np.inf, np.nan),
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Parts of three ranks with every float there is, and their rows."""
    random = np.random.default_rng(9)
    directory, everything = tmp_path_factory.mktemp("fold") / "hostile", []
    for rank in range(3):
        parts = random_parts(20 + rank, parts=4, rank=rank)
        for row in (row for part in parts for row in part):
            floats = HOSTILE[: len(HOSTILE) - 3] if row["layer"] == 3 else HOSTILE
            for name in ("cost_seconds", *NULLABLE[:4]):
                if row[name] is not None:
                    row[name] = float(random.choice(floats))
            for name in NULLABLE_LISTS:
                if row[name] is not None:
                    row[name] = random.choice(floats, len(row[name])).tolist()
            everything.append(row)
        write(directory, parts, RankRole(rank=rank, world_size=3, dp=rank))
    return open_recording(directory).parts("part"), everything


def true_sum(values: list[float]) -> float:
    """The sum in fractions, rounded once."""
    odd = {value for value in values if np.isinf(value)}
    if any(np.isnan(value) for value in values) or len(odd) == 2:
        return np.nan
    if odd:
        return odd.pop()
    total = sum(map(Fraction, values), Fraction(0))
    try:
        return float(total)
    except OverflowError:
        return np.inf if total > 0 else -np.inf


def test_sums_of_hostile_floats_are_the_true_ones(hostile):
    parts, rows = hostile
    totals = fold(parts, INFO)
    assert totals.unread == ()
    for number, key in enumerate(totals.keys):
        for place, layer in enumerate(LAYERS):
            own = [r for r in rows if ((r["phase"], r["tag"]), r["layer"]) == (key, layer.index)]
            for name in ("cost_seconds", *NULLABLE[:4]):
                values = [row[name] for row in own if row[name] is not None]
                missing = 0.0 if name == "cost_seconds" else np.nan
                want = true_sum(values) if values else missing
                np.testing.assert_array_equal(totals.sums[name][number, place], want)
            for name in NULLABLE_LISTS:
                lists = [row[name] for row in own if row[name] is not None]
                want = [true_sum(column) for column in zip(*lists, strict=True)]
                found = totals.lists[name][number, place]
                np.testing.assert_array_equal(found[: len(want)], want)


@settings(deadline=None, max_examples=8)
@given(random=st.randoms(use_true_random=False))
def test_hostile_floats_in_any_order_split_and_executor(hostile, random):
    parts, _ = hostile
    whole = fold(parts, INFO)
    shuffled = random.sample(parts, len(parts))
    cut = random.randrange(len(parts) + 1)
    equal(whole, merge([fold(shuffled[cut:], INFO), fold(shuffled[:cut], INFO)], INFO))
    with ThreadPoolExecutor(random.randrange(1, 5)) as executor:
        equal(whole, fold(shuffled, INFO, executor=executor))


def test_processes_do_not_matter(recorded, hostile):
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        for parts, _ in (recorded, hostile):
            equal(fold(parts, INFO), fold(parts[::-1], INFO, executor=executor))


def test_a_broken_executor_leaves_the_rest_to_this_process(recorded):
    class Breaks(ThreadPoolExecutor):
        left = 2

        def submit(self, *args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise BrokenExecutor
            return super().submit(*args, **kwargs)

    parts, _ = recorded
    with Breaks(1) as executor:
        equal(fold(parts, INFO), fold(parts, INFO, executor=executor))


def test_few_parts_are_under_way_at_once(recorded):
    parts, _ = recorded
    many = [replace(part, rank=rank) for rank in range(40) for part in parts]
    under_way, most = 0, 0

    class Counts(ThreadPoolExecutor):
        def submit(self, *args, **kwargs):
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            future = super().submit(*args, **kwargs)
            taken = future.result

            def result(timeout=None):
                nonlocal under_way
                under_way -= 1
                return taken(timeout)

            future.result = result
            return future

    told = []
    with Counts(2) as executor:
        found = fold(many, INFO, executor=executor, progress=lambda *done: told.append(done))
    equal(found, fold(many, INFO))
    assert most <= 2 * 2 + 2 < len(many) // 16
    assert told[-1] == (len(many), len(many))
    assert sorted(told) == told


def copied(directory, places):
    """The parts of a recording in which some parts repeat others, by number: [(from, to)]."""
    parts = open_recording(directory).parts("part")
    for source, target in places:
        shutil.copy(parts[source].path, parts[source].path.with_name(part_name("part", target)))
    return open_recording(directory).parts("part")


def test_a_copy_is_left_out_wherever_it_is_folded(tmp_path):
    rows = [
        [row | {"window": number, "rank": 0} for row in random_parts(number, parts=1)[0]]
        for number in range(40)
    ]
    write(tmp_path / "r", rows)
    whole = fold(open_recording(tmp_path / "r").parts("part"), INFO)
    parts = copied(tmp_path / "r", [(1, 40), (39, 41), (1, 42), (20, 43)])
    found = fold(parts, INFO)
    equal(found, replace(whole, unread=found.unread))
    assert found.unread == tuple(
        f"rank-00000/part-0000{copy}.parquet holds windows that rank-00000/part-0000{of}.parquet "
        "holds too: one is a copy"
        for copy, of in ((40, "01"), (41, "39"), (42, "01"), (43, "20"))
    )
    with ThreadPoolExecutor(2) as executor:
        equal(found, fold(parts[::-1], INFO, executor=executor))


def test_what_a_copy_of_a_copy_holds_alone_is_kept(tmp_path):
    """A part that is left out does not keep others out: it does not matter where batches end."""
    one = random_parts(1, parts=1)[0]
    spans = ((0, 1), *(() for _ in range(20)), (1, 2), (2, 3))
    rows = [[row | {"window": window} for window in span for row in one] for span in spans]
    write(tmp_path / "r", rows)
    parts = open_recording(tmp_path / "r").parts("part")
    found = fold(parts, INFO)
    assert [line.split()[0] for line in found.unread] == ["rank-00000/part-000021.parquet"]
    assert set(found.windows.window) == {0, 1, 2, 3}
    with ThreadPoolExecutor(3) as executor:
        equal(found, fold(parts, INFO, executor=executor))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("counts", [-1, 0, 0, 0, 0, 0, 0, 0], "counts"),
        ("tokens", -5, "tokens"),
        ("tokens", 2**53 + 1, "tokens"),
        ("gemm_histogram", [None, 2], "gemm_histogram"),
        ("expected_tokens", -1, "expected_tokens"),
    ],
)
def test_numbers_that_are_no_counts_are_named_and_not_added(tmp_path, name, value, said):
    parts = random_parts(3, parts=2)
    row = next(row for row in parts[1] if row["layer"] == 3 and row["calls"])
    row[name] = value
    write(tmp_path / "r", parts)
    found = open_recording(tmp_path / "r").parts("part")
    totals = fold(found, INFO)
    line = f"rank-00000/part-000001.parquet has numbers that are no counts: {said}"
    equal(totals, replace(fold(found[:1], INFO), unread=(line,)))


def test_a_part_without_phases_is_named(tmp_path):
    parts = random_parts(3, parts=2)
    parts[0][0]["phase"] = None
    write(tmp_path / "r", parts)
    totals = fold(open_recording(tmp_path / "r").parts("part"), INFO)
    assert totals.unread == ("rank-00000/part-000000.parquet has rows without a phase",)


def test_sums_that_do_not_fit_are_an_error_and_not_a_wrong_number(recorded):
    parts, _ = recorded
    totals = fold(parts, INFO)
    totals.lists["counts"][0, 1, 0] = 2**62
    with pytest.raises(OverflowingError, match="counts of this recording"):
        merge([totals, totals], INFO)


def test_totals_of_floats_alone_add_up(recorded):
    """Without ``exact``, as of totals that were made from arrays."""
    parts, _ = recorded
    totals = fold(parts, INFO)
    twice = merge([replace(totals, exact={}), replace(totals, exact={})], INFO)
    for name in NULLABLE[:4]:
        np.testing.assert_array_equal(twice.sums[name], 2 * totals.sums[name])


def test_a_timeline_between_processes_keeps_its_types(recorded):
    parts, _ = recorded
    totals = fold(parts, INFO)
    equal(totals, pickle.loads(pickle.dumps(totals)))


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


def test_layers_of_different_width_are_the_same_together_and_apart(tmp_path):
    rows = [row for part in random_parts(8, parts=4) for row in part]
    for row in rows:
        row["window"] = 0 if row["layer"] == 3 else 1
        row["start"], row["end"] = 100.0 + row["window"], 101.0 + row["window"]
    by_layer = [[row for row in rows if row["layer"] == layer] for layer in (3, 4)]
    write(tmp_path / "apart", by_layer)
    write(tmp_path / "together", [by_layer[0] + by_layer[1]])
    one, other = (open_recording(tmp_path / name).parts("part") for name in ("apart", "together"))
    equal(fold(one, INFO), fold(other, INFO))
