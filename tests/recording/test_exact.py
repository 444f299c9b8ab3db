"""Exact sums against fractions, which do not round."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeprof.recording.exact import KNOWN, Exact, merged, placed, sum_rows
from routeprof.recording.grouping import PIECE, Grouping, sum_whole

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TIES = st.builds(
    math.ldexp,
    st.sampled_from([1.0, -1.0, 0.5, 1 + 2.0**-52, -1 - 2.0**-52, 1 - 2.0**-53]),
    st.sampled_from([0, -1, -52, -53, -54, -106, -107, 52, 53, 971, 1022, 1023, -1022, -1074]),
)
NUMBERS = st.lists(st.one_of(FINITE, TIES, st.sampled_from([0.0, -0.0, 5e-324])), max_size=30)


def exact(values: list[float]) -> Exact:
    """The sum of a list, [1, 1]."""
    matrix = np.array(values, dtype=np.float64).reshape(-1, 1)
    return sum_rows(matrix, Grouping.of(np.zeros(len(values), dtype=np.int64)), 1)


def fraction(values: list[float]) -> Fraction:
    return sum(map(Fraction, values), Fraction(0))


def nearest(total: Fraction) -> float:
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


@settings(deadline=None, max_examples=500)
@given(values=NUMBERS)
def test_a_sum_is_the_true_one_rounded_once(values):
    found = exact(values).rounded(missing=-7.0)[0, 0]
    assert found == (nearest(fraction(values)) if values else -7.0)


@settings(deadline=None, max_examples=200)
@given(values=NUMBERS, data=st.data())
def test_it_is_the_same_whatever_is_added_first(values, data):
    shuffled = data.draw(st.permutations(values))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    groups = np.split(np.array(shuffled), cuts)
    one, other = exact(values), merged([exact(list(group)) for group in groups])
    assert one.digits == other.digits
    assert one.seen == other.seen


@settings(deadline=None, max_examples=200)
@given(values=NUMBERS)
def test_its_terms_lose_nothing(values):
    terms = [float(term[0, 0]) for term in exact(values).terms()]
    assert fraction(terms) == fraction(values)
    again = merged([exact([]), *(Exact.of(np.array([[term]])) for term in terms)])
    assert again.digits == exact(values).digits


ODD = (math.nan, math.inf, -math.inf, 1.0, -1e308)


@pytest.mark.parametrize("first", ODD)
@pytest.mark.parametrize("second", ODD)
@pytest.mark.parametrize("third", ODD)
def test_what_is_not_finite_follows_ieee(first, second, third):
    values = [first, second, third]
    want = math.nan
    odd = {value for value in values if math.isinf(value)}
    if not any(map(math.isnan, values)) and len(odd) < 2:
        want = odd.pop() if odd else nearest(fraction(values))
    for found in (exact(values), merged([exact([value]) for value in values])):
        np.testing.assert_array_equal(found.rounded()[0, 0], want)


def test_rows_of_many_groups_in_many_pieces():
    random = np.random.default_rng(0)
    width, rows, groups = 300, 5 * PIECE // 300, 7
    matrix = np.ldexp(random.normal(size=(rows, width)), random.integers(-60, 60, (rows, width)))
    place = random.integers(0, groups, rows)
    found = sum_rows(matrix, Grouping.of(place), groups + 1)
    for group in range(groups):
        own = matrix[place == group]
        want = [math.fsum(column) for column in own.T]
        np.testing.assert_array_equal(found.rounded()[group], want)
    assert (found.seen[:groups] == KNOWN).all()
    assert np.isnan(found.rounded()[groups]).all()
    counts = random.integers(0, 2**52, (rows, width))
    whole = sum_whole(counts, Grouping.of(place), groups)
    for group in range(groups):
        assert whole[group].tolist() == [
            sum(column.tolist()) for column in counts[place == group].T
        ]


def test_places_of_a_larger_array():
    one, other = Exact.of(np.array([[0.1, np.nan]])), Exact.of(np.array([[0.2, 1.0, 4.0]]))
    found = placed([(one, np.array([1])), (other, np.array([1]))], (2, 3))
    rounded = found.rounded()
    assert np.isnan(rounded[0]).all()
    assert rounded[1].tolist() == [math.fsum([0.1, 0.2]), 1.0, 4.0]
    assert found.at([0]).digits == {}
    assert found.at((slice(None), 2)).rounded()[1] == 4.0
