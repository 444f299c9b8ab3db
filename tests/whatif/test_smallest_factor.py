"""The smallest factor from bounds, found by halving: what going through every factor finds."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from routeprof.metrics.overflow import accepted_overflow
from routeprof.whatif.capacity import _needed
from routeprof.whatif.outcome import together
from tests.whatif.test_capacity import routed_steps, rules, sums_of


def one_by_one(layers, target, rule, grid):
    lower = Fraction(0)
    for factor in grid:
        outcome = together([one.outcome(factor, rule) for one in layers])
        accepted = accepted_overflow(target, outcome.routed)
        if outcome.overflow[1] <= accepted:
            return float(lower), float(factor)
        if outcome.overflow[0] > accepted:
            lower = factor
    return float(lower), float(grid[-1])


@given(
    st.lists(routed_steps(), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.001, 0.05, 0.3, 0.9]),
    rules,
    st.lists(st.integers(1, 120), min_size=1, max_size=25, unique=True),
    st.integers(0, 3),
)
def test_halving_finds_what_going_through_all_factors_does(layers, target, rule, places, dropped):
    known = [replace(sums_of(steps), dropped=dropped) for steps in layers]
    grid = sorted(Fraction(place, 20) for place in places)
    assert _needed(known, target, rule, grid) == one_by_one(known, target, rule, grid)
