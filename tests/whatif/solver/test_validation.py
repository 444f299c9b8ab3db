"""What is expected of later steps, against plain Python and against laws of large numbers."""

import statistics

import numpy as np
import pytest

from routeprof.whatif.cluster import Cluster
from routeprof.whatif.solver.validation import (
    NORMAL,
    SCENARIOS,
    Outlook,
    in_scenarios,
    on_later_steps,
    scenarios,
    student,
)

CLUSTER = Cluster((2, 2), (1.0, 2.0))
TRUSTED, OTHER = [0, 1, 2, 3], [0, 2, 1, 3]


def times(slots, step):
    return [step[slots[0]] + step[slots[1]], (step[slots[2]] + step[slots[3]]) / 2]


def on_one_layer(method, loads):
    """Of the other placement: time, expected, risk."""
    found = method(np.array([[TRUSTED], [OTHER]]), np.array([TRUSTED]), loads, CLUSTER)
    for values, same in ((found.expected, 1.0), (found.time[0], found.time[0, 0])):
        np.testing.assert_allclose(values[0], same)
    return tuple(float(values[1, 0]) for values in (found.time, found.expected, found.risk))


def test_later_steps_are_compared_by_step_and_summed():
    loads = np.random.default_rng(2).integers(1, 40, (48, 1, 4)).astype(float)
    steps = loads[:, 0].tolist()
    old, new = ([max(times(slots, step)) for step in steps] for slots in (TRUSTED, OTHER))
    blocks = [
        statistics.mean(new[start + one] - old[start + one] for one in range(3))
        for start in range(0, 48, 3)
    ]
    margin = 2.947 * statistics.stdev(blocks) * (1 / 16 + 1 / 32) ** 0.5  # Student, 15 degrees
    total = [sum(step[expert] for step in steps) for expert in range(4)]
    summed = max(times(OTHER, total)) / max(times(TRUSTED, total))
    mean_old, mean_new = statistics.mean(old), statistics.mean(new)
    time, expected, risk = on_one_layer(on_later_steps, loads)
    assert time == pytest.approx(mean_new)
    assert expected == pytest.approx(max(mean_new / mean_old, summed))
    assert risk == pytest.approx(max((mean_new + margin) / mean_old, summed), rel=1e-3)


def test_what_is_even_by_step_may_be_uneven_in_sums():
    # The other is as slow in every step as the trusted one, always on the same GPU.
    loads = np.array([[[6.0, 0, 0, 0]], [[0.0, 0, 12, 0]]] * 8)
    turned = np.array([[[0, 2, 1, 3]]])
    found = on_later_steps(turned, np.array([TRUSTED]), loads, CLUSTER)
    assert found.expected[0, 0] >= 18 / 6
    assert found.risk[0, 0] >= 18 / 6


def test_scenarios_of_one_step_are_that_step():
    loads = np.array([[[9.0, 1, 4, 4]]])
    assert on_one_layer(in_scenarios, loads) == pytest.approx((13, 1.3, 1.3))


def test_risk_is_beyond_what_is_expected_of_noise():
    loads = np.random.default_rng(0).poisson([9, 1, 4, 4], (8, 1, 4)).astype(float)
    _, expected, risk = on_one_layer(in_scenarios, loads)
    slowest = np.array(
        [[max(times(slots, step[0])) for slots in (TRUSTED, OTHER)] for step in scenarios(loads)]
    )
    assert expected == pytest.approx(slowest[:, 1].mean() / slowest[:, 0].mean())
    assert np.mean(slowest[:, 1] / slowest[:, 0] > risk) == pytest.approx(0.01, abs=0.006)


# -- scenarios


def test_chance_is_that_of_the_mean_before_and_after():
    # One layer of many unequal experts that do not change: they vary as means of 64 steps do.
    rate = np.random.default_rng(1).uniform(200, 4_000, 2_000)
    loads = np.random.default_rng(0).poisson(rate, (64, 1, 2_000)).astype(float)
    found = scenarios(loads)[:, 0] - loads.mean(axis=0)[0]
    deviation = np.sqrt((found[: SCENARIOS // 2] ** 2).mean(axis=0) / (2 * rate / 64))
    assert np.sqrt((deviation**2).mean()) == pytest.approx(student(16) / NORMAL, rel=0.1)


def test_differences_that_are_chance_are_drawn_together():
    loads = np.random.default_rng(0).poisson(100, (32, 1, 500)).astype(float)
    centre = scenarios(loads).mean(axis=0)[0]
    assert centre.std() < loads.mean(axis=0).std() / 3
    assert centre.mean() == pytest.approx(100, rel=0.01)


def test_drift_goes_on_or_astray():
    way = np.linspace(-1, 1, 64)[:, np.newaxis, np.newaxis]
    turn = np.where(np.arange(400) % 2, 1.0, -1.0)
    loads = 1_000 + 100 * way * turn
    found = scenarios(loads)
    along, astray = np.split((found[:, 0] - 1_000) * turn, 2)
    # The halves differ by 100 less what the blocks' deviation explains: in the mean it goes on by
    # as much, in all experts alike, and by twice that at the most.
    blocks = np.linspace(-1, 1, 64).reshape(16, 4).mean(axis=1) * 100
    drift = 100 * (1 - 4 * statistics.variance(blocks.tolist()) / 16 / (100 * 64 / 63) ** 2)
    assert along.mean() == pytest.approx(drift, rel=0.1)
    assert along.mean(axis=1).max() > 1.7 * drift
    # Astray every expert goes to either side.
    assert abs(astray.mean()) < 0.1 * drift
    assert (astray.std(axis=1) > 0.9 * drift).all()


def test_no_load_is_negative():
    loads = np.random.default_rng(0).poisson(0.2, (8, 1, 50)).astype(float)
    assert scenarios(loads).min() == 0


@pytest.mark.parametrize(("blocks", "quantile"), [(2, 63.66), (5, 4.60), (16, 2.95), (40, 2.95)])
def test_few_blocks_have_a_wide_margin(blocks, quantile):
    assert student(blocks) == pytest.approx(quantile, rel=1e-3)


# -- what is sure


@pytest.mark.parametrize(
    ("expected", "risk", "sure"),
    [(0.99, 1.0, True), (0.99, 1.002, False), (1.0005, 1.0005, False), (1, 1.0009, True)],
)
def test_sure_is_better_on_the_whole_and_hardly_worse_at_worst(expected, risk, sure):
    one = np.ones((1, 1))
    assert Outlook(one, one * expected, one * risk).sure[0, 0] == sure
    doubted = Outlook(one, one * 0.9, one * 0.9).and_also(Outlook(one, one * expected, one * risk))
    assert doubted.sure[0, 0] == sure
