"""The level holds, shifts are found, and every figure is what its definition says."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest

from routeprof.compare.deals import dealt
from routeprof.compare.dependence import dependence, inflation, regrouped
from routeprof.compare.noise import enough, judge
from routeprof.errors import UsageError
from routeprof.metrics.drift import jensen_shannon
from tests.compare.traffic import EXPERTS, LAYERS, steps

TRIALS = 200
MOST_ALARMS = 19
"""More than so many of 200 happen once in 300 times where the level of 5 % is kept."""


def alarms(pairs, alpha: float = 0.05) -> int:
    """Pairs of which anything is significant."""
    found = 0
    for seed, pair in enumerate(pairs):
        judged = judge({"decode": pair}, alpha, seed)["decode"]
        found += bool((judged.p <= alpha).any() or (judged.divergence_p <= alpha).any())
    return found


def test_the_bound_on_false_alarms_is_that_of_the_binomial_distribution():
    above = sum(
        comb(TRIALS, n) * 0.05**n * 0.95 ** (TRIALS - n) for n in range(MOST_ALARMS + 1, TRIALS + 1)
    )
    assert 0.001 < above < 0.005


def test_random_splits_of_one_stationary_recording():
    """200 random halves of 64 stretches of it."""
    whole = steps(1, 1280).reshape(64, 20, LAYERS, EXPERTS).sum(axis=1)

    def splits():
        for seed in range(TRIALS):
            order = np.random.default_rng((5, seed)).permutation(64)
            yield whole[np.sort(order[:32])], whole[np.sort(order[32:])]

    assert alarms(splits()) <= MOST_ALARMS


def test_random_splits_by_step():
    """Halves that share their requests differ by less than chance, and never seem to change."""
    whole = steps(2, 800)

    def splits():
        for seed in range(TRIALS):
            order = np.random.default_rng((6, seed)).permutation(800)
            yield whole[np.sort(order[:400])], whole[np.sort(order[400:])]

    assert alarms(splits()) <= MOST_ALARMS


@pytest.mark.parametrize(("life", "batch", "size"), [(1, 16, 128), (10, 16, 200), (40, 16, 400)])
def test_halves_of_stationary_recordings(life: int, batch: int, size: int):
    """First against second half: requests last up to a tenth of either."""

    def halves():
        for seed in range(TRIALS):
            whole = steps((7, life, seed), 2 * size, life=life, batch=batch)
            yield whole[:size], whole[size:]

    assert alarms(halves()) <= MOST_ALARMS


def test_sides_that_are_not_equally_noisy():
    """A has a batch of 4 tokens, and B twice as many steps with 32 tokens each."""

    def pairs():
        for seed in range(TRIALS):
            yield steps((8, seed), 64, life=1, batch=4), steps((9, seed), 128, life=1)

    assert alarms(pairs()) <= MOST_ALARMS


def test_the_level_is_of_all_groups_together():
    """Six phases and tags: any change in any of them is one false alarm."""
    found = 0
    for seed in range(TRIALS):
        judged = judge({group: two((seed, group), 12, 12) for group in range(6)}, 0.05, seed)
        found += any(
            (one.p <= 0.05).any() or (one.divergence_p <= 0.05).any() for one in judged.values()
        )
    assert found <= MOST_ALARMS


def test_the_level_is_that_which_was_asked_for():
    """Not far below it, either: at 50 % a third of all comparisons or more are called changed."""

    def halves():
        for seed in range(TRIALS):
            whole = steps((10, seed), 256, life=1, batch=8)
            yield whole[:128], whole[128:]

    assert 40 <= alarms(halves(), alpha=0.5) <= 121


def test_a_planted_shift_of_five_per_cent_is_found():
    """One of 3 x 16 experts gets 5 % more; 410,000 tokens a side, from requests of 10 tokens."""
    whole = steps(11, 1600, life=10, batch=512, shift=0.05)
    judged = judge({"decode": (whole[:800], whole[800:])})["decode"]
    assert np.argwhere(judged.p <= 0.05).tolist() == [[1, 3]]
    share = whole[:800, 1, 3].sum() / whole[:800, 1].sum()
    expected = share * 0.05 / (1 + share * 0.05)
    assert abs(judged.change[1, 3] - expected) < judged.bound[1, 3] < expected


# -- figures


def two(seed, a: int = 4, b: int = 4, layers: int = 2, experts: int = 5):
    loads = np.random.default_rng(seed).poisson(20, size=(a + b, layers, experts)).astype(float)
    return loads[:a], loads[a:]


def by_definition(a: np.ndarray, b: np.ndarray):
    """Changes, standard errors and divergences, one number at a time."""
    layers, experts = a.shape[1:]
    change, error, divergence = (np.zeros((layers, experts)) for _ in range(3))
    for layer in range(layers):
        variances = []
        for side in (a, b):
            own = side[:, layer]
            n, total = len(own), own.sum()
            share = own.sum(axis=0) / total
            variance = np.array(
                [
                    sum((row[e] - share[e] * row.sum()) ** 2 for row in own)
                    * n
                    / (n - 1)
                    / total**2
                    for e in range(experts)
                ]
            )
            even = share * (1 - share)
            variances.append((variance + variance.sum() / even.sum() * even) / 2)
            change[layer] += share if side is b else -share
        error[layer] = np.sqrt(sum(variances))
        divergence[layer] = jensen_shannon(a[:, layer].sum(0), b[:, layer].sum(0))
    mean = (a.sum(0) / a.sum((0, 2))[:, None] + b.sum(0) / b.sum((0, 2))[:, None]) / 2
    return change, error, divergence[:, 0], (error**2 / mean).sum(axis=1) / 8 / np.log(2)


def test_statistics_by_definition():
    a, b = two(1, 4, 6)
    found = dealt(a, b, 10, np.random.default_rng(0))
    change, error, divergence, expected = by_definition(a, b)
    np.testing.assert_allclose(found.change, change)
    np.testing.assert_allclose(found.error, error)
    np.testing.assert_allclose(found.divergence, divergence)
    np.testing.assert_allclose(found.expected, expected)


def test_deals_are_all_ways_to_deal():
    """Every way once, by brute force: random deals find these, and as often as chance says."""
    a, b = two(2)
    both = np.concatenate((a, b))
    largest, distances = [], []
    for chosen in combinations(range(8), 4):
        rest = [place for place in range(8) if place not in chosen]
        change, error, divergence, expected = by_definition(both[list(chosen)], both[rest])
        largest.append(np.abs(change / error).max())
        distances.append(divergence / expected)
    found = dealt(a, b, 20_000, np.random.default_rng(3))
    np.testing.assert_allclose(np.unique(found.largest.round(9)), np.unique(np.round(largest, 9)))
    np.testing.assert_allclose(found.distances.mean(axis=0), np.mean(distances, 0), rtol=0.02)
    for quantile in (0.5, 0.9):
        expected = np.quantile(largest, quantile)
        assert np.quantile(found.largest, quantile) == pytest.approx(expected, rel=0.1)


def test_bounds_and_p_agree():
    for seed in range(20):
        a, b = two(seed, 16, 16)
        b[:, 1, 0] *= 1.3
        one = judge({"x": (a, b)}, 0.05, seed)["x"]
        np.testing.assert_array_equal(one.p <= 0.05, np.abs(one.change) > one.bound)
        np.testing.assert_array_equal(
            one.divergence_p <= 0.05, one.divergence > one.divergence_bound
        )


def test_more_comparisons_have_wider_bounds():
    a, b = two(4, 32, 32)
    alone = judge({1: (a, b)})[1]
    many = judge({number: two(number, 32, 32, 8, 64) if number else (a, b) for number in range(4)})
    assert (many[0].bound > alone.bound).all()
    assert (many[0].p >= alone.p).mean() > 0.9


def test_a_change_without_any_noise():
    """Loads that are the same in every step: any difference is a change, and none is none."""
    a = np.tile([[3.0, 2.0, 1.0], [1.0, 1.0, 1.0]], (8, 1, 1))
    b = a.copy()
    b[:, 0] = [1.0, 2.0, 3.0]
    one = judge({"x": (a, b)})["x"]
    assert (one.p <= 0.05).tolist() == [[True, False, True], [False] * 3]
    same = judge({"x": (a, a)})["x"]
    assert (same.p == 1).all()
    assert (same.divergence_p == 1).all()


def test_an_empty_stretch_is_no_error():
    a, b = two(5, 8, 8)
    a[:6] = 0
    b[:7, 1] = 0
    one = judge({"x": (a, b)})["x"]
    assert np.isfinite(one.p).all()
    assert np.isfinite(one.bound).all()


def test_neighbours_that_are_alike():
    random = np.random.default_rng(6)
    fresh = random.poisson(50, size=(64, 3, 20)).astype(float)
    assert dependence(fresh[:32], fresh[32:]) < 0.05
    noise, walk = random.normal(size=(5000, 1, 20)), np.zeros((5000, 1, 20))
    for place in range(1, 5000):
        walk[place] = 0.5 * walk[place - 1] + noise[place]
    found = dependence(walk[:2500] + 100, walk[2500:] + 100)
    assert found == pytest.approx(0.5, abs=0.03)
    assert inflation(0.5) == 3  # the variance of the mean of AR(1)
    deviations = walk[:, 0] - walk[:, 0].mean(axis=0)
    means = deviations[:5000].reshape(50, 100, 20).mean(axis=1)
    assert means.var() * 100 / deviations.var() == pytest.approx(3, rel=0.25)


def test_stretches_are_put_together_where_neighbours_are_alike():
    fresh, alike = steps(12, 256, life=1), steps(12, 256, life=20)
    assert [len(side) for side in regrouped(fresh[:128], fresh[128:])] == [32, 32]
    assert [len(side) for side in regrouped(alike[:128], alike[128:])] == [8, 8]
    one, other = regrouped(fresh[:64], fresh[64:])
    assert len(one) == 32
    assert 90 < len(other) < 100  # as long as the others: as many as there are more tokens
    np.testing.assert_array_equal(one.sum(axis=0), fresh[:64].sum(axis=0))
    np.testing.assert_array_equal(other.sum(axis=0), fresh[64:].sum(axis=0))
    one, other = regrouped(fresh[:8], fresh[8:])  # 31 times the tokens
    assert (len(one), len(other)) == (8, 128)


def test_too_few_stretches_and_levels():
    assert not enough(4, 4, 0.05)  # 70 deals
    assert enough(5, 5, 0.05)
    assert not enough(1, 1000, 0.05)
    assert not enough(5, 5, 0.001)
    for alpha in (0.0, 0.0009, 0.6, float("nan")):
        with pytest.raises(UsageError, match="alpha"):
            judge({}, alpha)
