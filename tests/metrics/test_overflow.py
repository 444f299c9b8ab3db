from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.metrics.capacity import capacity, required_capacity_factor
from routeprof.metrics.overflow import (
    dropped_token_rate,
    overflow_assignments,
    overflow_rate,
    padding_rate,
    padding_slots,
    smallest_factor_for,
)

EXPERTS, TOP_K = 6, 2
rules = st.sampled_from(["ceil", "floor"])
token = st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True)
batches = st.lists(st.lists(token, max_size=15), min_size=1, max_size=6)
factors = st.integers(1, 60).map(lambda tenths: tenths / 10)


def count(batch):
    counts = [[sum(e in row for row in step) for e in range(EXPERTS)] for step in batch]
    return np.array(counts), np.array([len(step) for step in batch])


@given(batch=batches, factor=factors)
def test_equals_filling_slots_one_by_one(batch, factor):
    counts, tokens = count(batch)
    slots = capacity(tokens, TOP_K, EXPERTS, factor)
    overflow, padding = overflow_assignments(counts, slots), padding_slots(counts, slots)
    for index, step in enumerate(batch):
        free = [int(slots[index])] * EXPERTS
        lost = 0
        for row in step:
            for expert in row:
                if free[expert]:
                    free[expert] -= 1
                else:
                    lost += 1
        assert (overflow[index], padding[index]) == (lost, sum(free))


@given(batch=batches, factor=factors)
def test_slots_add_up(batch, factor):
    counts, tokens = count(batch)
    slots = capacity(tokens, TOP_K, EXPERTS, factor)
    missing = EXPERTS * slots - counts.sum(axis=1) + overflow_assignments(counts, slots)
    np.testing.assert_array_equal(padding_slots(counts, slots), missing)


@given(batch=batches, pair=st.tuples(factors, factors), data=st.data())
def test_more_capacity_never_overflows_more(batch, pair, data):
    counts, tokens = count(batch)
    less, more = sorted(pair)
    small, large = (capacity(tokens, TOP_K, EXPERTS, f) for f in (less, more))
    assert np.all(overflow_assignments(counts, large) <= overflow_assignments(counts, small))
    renamed = counts[:, data.draw(st.permutations(range(EXPERTS)))]
    np.testing.assert_array_equal(
        overflow_assignments(renamed, small), overflow_assignments(counts, small)
    )


def test_counts_summed_over_steps_hide_overflow():
    counts, tokens = np.array([[4, 0], [0, 4]]), np.array([4, 4])
    by_step = overflow_assignments(counts, capacity(tokens, 1, 2, 1.0)).sum()
    at_once = overflow_assignments(counts.sum(axis=0), capacity(tokens.sum(), 1, 2, 1.0))
    assert (by_step, at_once) == (4, 0)


def test_narrow_counts_do_not_wrap_around():
    counts, slots = np.array([1, 5], dtype=np.uint8), np.uint8(2)
    assert (overflow_assignments(counts, slots), padding_slots(counts, slots)) == (3, 1)


def test_rates_of_a_step_and_of_sums():
    np.testing.assert_array_equal(overflow_rate([1, 0, 0], [4, 8, 0], 2), [1 / 8, 0, np.nan])
    assert overflow_rate(3, 10, 2) == 0.15
    np.testing.assert_array_equal(padding_rate([3, 0, 0], [12, 8, 0]), [0.25, 0, np.nan])


@given(batch=batches, rule=rules, rate=st.integers(0, 100).map(lambda percent: percent / 100))
def test_smallest_factor_keeps_the_rate_and_the_next_smaller_does_not(batch, rule, rate):
    counts, tokens = count(batch)
    factor = smallest_factor_for(counts, tokens, TOP_K, rate, rule)
    if not tokens.any():
        assert np.isnan(factor)
        return
    grid = round(factor * 10_000)
    assert factor == grid / 10_000 >= 0.0001

    def exact_rate(g):
        slots = capacity(tokens, TOP_K, EXPERTS, Fraction(g, 10_000), rule=rule)
        return Fraction(int(overflow_assignments(counts, slots).sum()), int(tokens.sum()) * TOP_K)

    assert exact_rate(grid) <= Fraction(str(rate))
    assert grid == 1 or exact_rate(grid - 1) > Fraction(str(rate))


@given(batch=batches, rule=rules)
def test_no_overflow_at_all_needs_the_worst_step(batch, rule):
    counts, tokens = count(batch)
    required = required_capacity_factor(counts, tokens, TOP_K, rule)
    if tokens.any():
        assert smallest_factor_for(counts, tokens, TOP_K, 0.0, rule) == np.nanmax(required)


def test_a_rate_that_is_met_exactly_is_met():
    # 7 of 100 assignments above 93 slots: 0.07 as a float is a little more than 7/100, 0.29 less.
    assert smallest_factor_for([[100, 0]], [100], 1, 0.07, "floor") == 1.86
    assert smallest_factor_for([[100, 0]], [100], 1, 0.29, "floor") == 1.42
    assert smallest_factor_for([[100, 0]], [100], 1, 1.0, "floor") == 0.0001


def simulate(ids, slots, order):
    """GShard admits all first choices before any second one; the other order takes whole tokens."""
    queue = [(token, choice) for token in range(len(ids)) for choice in range(len(ids[0]))]
    if order == "choice":
        queue.sort(key=lambda place: (place[1], place[0]))
    free, served = [slots] * EXPERTS, set()
    for token_index, choice in queue:
        expert = ids[token_index][choice]
        if 0 <= expert < EXPERTS and free[expert]:
            free[expert] -= 1
            served.add(token_index)
    present = [t for t, row in enumerate(ids) if any(0 <= e < EXPERTS for e in row)]
    return sum(t not in served for t in present) / len(present) if present else float("nan")


ids_with_gaps = st.lists(
    st.lists(st.integers(-1, EXPERTS), min_size=3, max_size=3), min_size=1, max_size=20
)


@given(ids=ids_with_gaps, slots=st.integers(0, 5), order=st.sampled_from(["choice", "token"]))
def test_dropped_tokens_equal_a_simulation(ids, slots, order):
    assert dropped_token_rate(ids, slots, EXPERTS, order=order) == pytest.approx(
        simulate(ids, slots, order), nan_ok=True
    )


def test_the_order_of_admission_matters():
    ids = [[0, 1], [1, 0], [2, 1]]
    # One slot each: by choice every token gets its first one. By token the first takes 0 and 1.
    assert dropped_token_rate(ids, 1, 3, order="choice") == 0
    assert dropped_token_rate(ids, 1, 3, order="token") == pytest.approx(1 / 3)


@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=30), slots=st.integers(0, 8))
def test_with_one_choice_a_lost_assignment_is_a_lost_token(ids, slots):
    lost = overflow_assignments(np.bincount(ids, minlength=4), slots)
    rate = dropped_token_rate([[expert] for expert in ids], slots, 4)
    assert rate == pytest.approx(float(overflow_rate(lost, len(ids), 1)))


def test_what_cannot_be_is_refused():
    counts = np.ones((2, 4), dtype=int)
    for function in (overflow_assignments, padding_slots):
        with pytest.raises(UsageError, match=r"\(3,\).*\(2, 4\)"):
            function(counts, [1, 1, 1])
        with pytest.raises(UsageError, match="integers"):
            function([0.5, 1.5], 1)
    with pytest.raises(UsageError, match=r"\(1,\).*\(2,\)"):
        overflow_rate([1, 1], [1], 1)
    with pytest.raises(UsageError, match=r"\(1,\).*\(2,\)"):
        padding_rate([1, 1], [1])
    with pytest.raises(UsageError, match=r"\[steps, experts\]"):
        smallest_factor_for([1, 2], 3, 1, 0.0)
    with pytest.raises(UsageError, match="rate is 2"):
        smallest_factor_for([[1, 2]], [3], 1, 2)
    with pytest.raises(UsageError, match=r"\(2,\).*\[tokens, k\]"):
        dropped_token_rate([0, 1], 1, 2)
    with pytest.raises(UsageError, match="'choice' or 'token'"):
        dropped_token_rate([[0]], 1, 2, order="random")
