import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from routeprof.errors import UsageError
from routeprof.metrics.drift import bootstrap_noise, divergence_matrix, jensen_shannon

pairs = hnp.arrays(np.int64, (2, 5), elements=st.integers(0, 1000))


def bits(p):
    return -sum(x * math.log2(x) for x in p if x)


def by_entropies(p, q):
    if not sum(p) or not sum(q):
        return math.nan
    p, q = ([x / sum(c) for x in c] for c in (p, q))
    return bits([(a + b) / 2 for a, b in zip(p, q, strict=True)]) - (bits(p) + bits(q)) / 2


@given(pair=pairs)
def test_equals_the_difference_of_entropies(pair):
    p, q = pair.tolist()
    expected = pytest.approx(by_entropies(p, q), abs=1e-9, nan_ok=True)
    assert float(jensen_shannon(p, q)) == expected


@given(pair=pairs, factor=st.integers(1, 100), order=st.permutations(range(5)))
def test_a_distance_between_shares(pair, factor, order):
    p, q = pair
    divergence = jensen_shannon(p, q)
    assert np.isnan(divergence) or 0 <= divergence <= 1
    for other in (
        jensen_shannon(q, p),
        jensen_shannon(p * factor, q),
        jensen_shannon(p[order], q[order]),
    ):
        np.testing.assert_allclose(other, divergence, atol=1e-12)


def test_known_distances():
    assert jensen_shannon([1, 2, 3], [2, 4, 6]) == 0
    assert jensen_shannon([3, 0, 0], [0, 1, 1]) == 1
    assert jensen_shannon([1, 0], [1, 1]) == pytest.approx(0.311278124459)
    assert np.isnan(jensen_shannon([0, 0], [1, 1]))


def test_leading_axes_broadcast():
    windows = [[4, 0], [0, 4], [2, 2]]
    np.testing.assert_allclose(jensen_shannon(windows, [1, 1]), [0.311278124459, 0.311278124459, 0])


@given(counts=hnp.arrays(np.int64, (4, 5), elements=st.integers(0, 50)))
def test_matrix_holds_every_pair(counts):
    matrix = divergence_matrix(counts)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-15)
    for i, j in np.ndindex(matrix.shape):
        expected = by_entropies(counts[i].tolist(), counts[j].tolist())
        assert matrix[i, j] == pytest.approx(expected, abs=1e-9, nan_ok=True)


def steps_of(shares, steps, tokens, seed):
    return np.random.default_rng(seed).multinomial(tokens, shares, size=steps)


POOL, OTHER = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]


def test_equal_steps_have_no_noise():
    assert bootstrap_noise(np.tile([3, 2, 1], (10, 1))) == pytest.approx(0, abs=1e-15)


def test_noise_covers_chance_and_not_change():
    bound = bootstrap_noise(steps_of(POOL, 100, 20, seed=1), sizes=(100, 100))
    chance = [
        jensen_shannon(*(steps_of(POOL, 100, 20, (seed, half)).sum(axis=0) for half in (0, 1)))
        for seed in range(200)
    ]
    assert 0.85 <= np.mean(chance <= np.float64(bound)) <= 1
    changed = steps_of(OTHER, 100, 20, seed=5).sum(axis=0)
    assert jensen_shannon(steps_of(POOL, 100, 20, seed=1).sum(axis=0), changed) > 10 * bound


def test_noise_shrinks_with_more_steps_and_grows_with_the_quantile():
    few, many = steps_of(POOL, 20, 20, seed=2), steps_of(POOL, 500, 20, seed=2)
    assert bootstrap_noise(many) < bootstrap_noise(few) / 5
    assert bootstrap_noise(few, sizes=(20, 20)) < bootstrap_noise(few)
    assert bootstrap_noise(few, quantile=0.5) < bootstrap_noise(few, quantile=0.99)


def test_noise_is_reproducible_and_seeded():
    steps = steps_of(POOL, 30, 20, seed=3)
    assert bootstrap_noise(steps) == bootstrap_noise(steps, seed=np.random.default_rng(0))
    assert bootstrap_noise(steps, seed=1) != bootstrap_noise(steps, seed=2)


def test_noise_over_nothing_is_nan():
    for steps in (np.ones((1, 3)), np.zeros((0, 3)), np.zeros((6, 3))):
        assert math.isnan(bootstrap_noise(steps))
    assert not math.isnan(bootstrap_noise([[1, 2], [0, 0], [0, 0], [2, 1]]))


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match=r"\(3,\).*\(2,\)"):
        jensen_shannon([1, 2], [1, 2, 3])
    with pytest.raises(UsageError, match=r"\(2, 4\).*\(3, 4\).*broadcast"):
        jensen_shannon(np.ones((2, 4)), np.ones((3, 4)))
    for function in (divergence_matrix, bootstrap_noise):
        for shape in ((4,), (2, 3, 4)):
            with pytest.raises(UsageError, match="axes"):
                function(np.ones(shape))
    with pytest.raises(UsageError, match="quantile is 2"):
        bootstrap_noise(np.ones((2, 2)), quantile=2)
    with pytest.raises(UsageError, match="resamples is 0"):
        bootstrap_noise(np.ones((2, 2)), resamples=0)
    with pytest.raises(UsageError, match="second_size is 0"):
        bootstrap_noise(np.ones((2, 2)), sizes=(1, 0))
