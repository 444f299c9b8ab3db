from fractions import Fraction
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.metrics.quantiles import (
    BINS_PER_OCTAVE,
    histogram_bin,
    histogram_quantile,
    weighted_quantile,
)

hundredths = st.integers(0, 100).map(lambda percent: percent / 100)
steps = st.lists(st.tuples(st.floats(1, 256), st.integers(0, 50)), min_size=1, max_size=40)


def plain_quantile(pairs, q):
    """Write every value out as often as its weight says, sort, and count."""
    written = sorted(value for value, weight in pairs for _ in range(weight))
    if not written:
        return float("nan")
    rank = ceil(Fraction(str(q)) * len(written))
    return written[max(rank, 1) - 1]


@given(pairs=steps, q=hundredths)
def test_weighted_quantile_equals_counting(pairs, q):
    values, weights = zip(*pairs, strict=True)
    assert float(weighted_quantile(values, weights, q)) == pytest.approx(
        plain_quantile(pairs, q), rel=0, abs=0, nan_ok=True
    )


def test_products_that_round_up_do_not_skip_a_value():
    assert 0.07 * 100 > 7
    assert weighted_quantile(np.arange(1, 101), np.ones(100), 0.07) == 7


def test_weighted_quantile_over_leading_axes_and_nan():
    values = [[3.0, 1.0, np.nan], [np.nan, np.nan, np.nan]]
    result = weighted_quantile(values, [[1, 1, 9], [1, 1, 1]], 1.0)
    np.testing.assert_array_equal(result, [3.0, np.nan])
    assert np.isnan(weighted_quantile([], [], 0.5))
    assert np.isnan(weighted_quantile([1.0, 2.0], [0, 0], 0.5))


def histogram(pairs, bins=8 * BINS_PER_OCTAVE + 1):
    hist = np.zeros(bins, dtype=np.int64)
    for ratio, weight in pairs:
        hist[int(histogram_bin(ratio))] += weight
    return hist


@given(pairs=steps, q=hundredths)
def test_histogram_quantile_is_within_its_resolution(pairs, q):
    seen = [value for value, weight in pairs if weight]
    maximum = max(seen, default=float("nan"))
    estimate = float(histogram_quantile(histogram(pairs), q, maximum))
    exact = plain_quantile(pairs, q)
    assert estimate == pytest.approx(exact, rel=0.011, nan_ok=True)
    if seen:
        assert 1 <= estimate <= maximum


@given(parts=st.lists(steps, min_size=2, max_size=4))
def test_histograms_of_parts_add_up(parts):
    together = histogram([pair for part in parts for pair in part])
    np.testing.assert_array_equal(sum(map(histogram, parts)), together)


@given(exponent=st.integers(0, 9 * BINS_PER_OCTAVE))
def test_bins_are_32_to_the_octave(exponent):
    inside = 2 ** ((exponent + 0.5) / BINS_PER_OCTAVE)
    assert int(histogram_bin(inside)) == exponent == int(32 * log2(inside))


def test_quantile_is_the_geometric_centre_clipped_to_what_was_seen():
    hist = np.zeros((3, 40), dtype=int)
    hist[0, 32] = hist[1, 32] = 5
    result = histogram_quantile(hist, 0.5, [9.0, 2.001, np.nan])
    np.testing.assert_allclose(result, [2 ** (32.5 / 32), 2.001, np.nan])
    np.testing.assert_allclose(histogram_quantile([4, 0], 0.5, 1.0), 1.0)


def test_perfect_balance_reads_as_one():
    assert histogram_quantile([7, 0, 0], 0.95, 1.0) == 1


@pytest.mark.parametrize("q", [-0.1, 1.1, float("nan")])
def test_impossible_quantiles_are_refused(q):
    with pytest.raises(UsageError, match="from 0 to 1"):
        weighted_quantile([1.0], [1], q)
    with pytest.raises(UsageError, match="from 0 to 1"):
        histogram_quantile([1], q, 1.0)


def test_shapes_that_disagree_are_named():
    with pytest.raises(UsageError, match=r"\(3,\).*\(2,\)"):
        weighted_quantile([1.0, 2.0], [1, 1, 1], 0.5)
    with pytest.raises(UsageError, match=r"\(3,\).*\(2, 4\)"):
        histogram_quantile(np.ones((2, 4)), 0.5, [1.0, 1.0, 1.0])
    for ratio in (0.5, float("nan")):
        with pytest.raises(UsageError, match="below 1"):
            histogram_bin(ratio)
