import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.metrics.capacity import capacity, parse_factor, required_capacity_factor
from routeprof.metrics.overflow import overflow_assignments

rules = st.sampled_from(["ceil", "floor"])


@st.composite
def routed_steps(draw):
    """Random routing of a few steps: (counts [steps, experts], tokens [steps], top_k)."""
    experts = draw(st.integers(1, 8))
    top_k = draw(st.integers(1, experts))
    tokens = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = [[rng.permutation(experts)[:top_k] for _ in range(rows)] for rows in tokens]
    counts = [np.bincount(np.ravel(step).astype(int), minlength=experts) for step in ids]
    return np.array(counts), np.array(tokens), top_k


def test_exact_where_floats_are_not():
    assert math.ceil(1.1 * 100) == 111
    assert capacity(100, 1, 1, 1.1) == 110
    assert capacity(100, 1, 1, "1.1") == capacity(100, 1, 1, Fraction(11, 10)) == 110
    assert math.floor(0.29 * 100) == 28
    assert capacity(100, 1, 1, 0.29, rule="floor") == 29


@given(
    tokens=st.integers(0, 10**6),
    top_k=st.integers(1, 16),
    experts=st.integers(1, 512),
    grid=st.integers(1, 80_000),
)
def test_equals_rational_arithmetic(tokens, top_k, experts, grid):
    exact = Fraction(grid, 10_000) * tokens * top_k / experts
    factor = grid / 10_000
    assert capacity(tokens, top_k, experts, factor) == math.ceil(exact)
    assert capacity(tokens, top_k, experts, factor, rule="floor") == math.floor(exact)
    assert capacity(tokens, top_k, experts, factor, minimum=4) == max(4, math.ceil(exact))
    assert capacity(tokens, top_k, experts, factor, rule="floor", minimum=4) == max(
        4, math.floor(exact)
    )


def test_one_capacity_per_step():
    slots = capacity([[0, 1], [4, 8]], top_k=2, experts=4, factor=1.25)
    assert slots.tolist() == [[0, 1], [3, 5]]
    assert slots.dtype == np.int64


@pytest.mark.parametrize(("text", "fraction"), [(1, "1"), (1.25, "5/4"), ("4/3", "4/3")])
def test_factors_are_fractions(text, fraction):
    assert parse_factor(text) == Fraction(fraction)


@pytest.mark.parametrize("factor", [0, -1.0, 1e-9, math.inf, math.nan, "", "lots", "1/0", None])
def test_impossible_factors_are_refused(factor):
    with pytest.raises(UsageError, match="positive number"):
        parse_factor(factor)


@given(steps=routed_steps(), rule=rules)
def test_required_factor_is_the_smallest_without_overflow(steps, rule):
    counts, tokens, top_k = steps
    factors = required_capacity_factor(counts, tokens, top_k, rule)
    for step, rows, factor in zip(counts, tokens, factors, strict=True):
        if rows == 0:
            assert np.isnan(factor)
            continue
        grid = round(factor * 10_000)
        assert factor == grid / 10_000 >= 0.0001

        def overflows(g, step=step, rows=rows):
            slots = capacity(rows, top_k, counts.shape[1], Fraction(g, 10_000), rule=rule)
            return overflow_assignments(step, slots) > 0

        assert not overflows(grid)
        assert grid == 1 or overflows(grid - 1)


def test_required_factor_of_known_steps():
    counts, tokens = [[4, 4], [8, 0], [0, 0]], [8, 8, 0]
    # Ceil: 4 slots from just above 3/4, 8 from just above 7/4; floor needs the full 1 and 2.
    np.testing.assert_array_equal(
        required_capacity_factor(counts, tokens, 1), [0.7501, 1.7501, np.nan]
    )
    np.testing.assert_array_equal(
        required_capacity_factor(counts, tokens, 1, "floor"), [1.0, 2.0, np.nan]
    )
    assert required_capacity_factor([1, 0], 1, 1) == 0.0001


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match=r"\(3,\).*\(2, 4\)"):
        required_capacity_factor(np.ones((2, 4), dtype=int), [1, 1, 1], 1)
    with pytest.raises(UsageError, match="no tokens"):
        required_capacity_factor([1, 0], 0, 1)
    with pytest.raises(UsageError, match="single steps"):
        capacity(2**62, 1, 7, 1.25)
    with pytest.raises(UsageError, match="single steps"):
        required_capacity_factor([2**62, 0], 2**62, 1)
    for call in (
        lambda: capacity(1, 1, 1, 1.0, rule="round"),
        lambda: required_capacity_factor([1], 1, 1, "round"),
    ):
        with pytest.raises(UsageError, match="'ceil' or 'floor'"):
            call()
    with pytest.raises(UsageError, match="integers"):
        capacity(1.5, 1, 1, 1.0)
    with pytest.raises(UsageError, match="experts is 0"):
        capacity(1, 1, 0, 1.0)
    with pytest.raises(UsageError, match="top_k is 0"):
        required_capacity_factor([1], 1, 0)
