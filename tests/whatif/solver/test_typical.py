"""Typical steps are the means of steps that are alike."""

import numpy as np
import pytest

from routeprof.whatif.solver.typical import typical_steps


def steps_of_topics(topic, tokens, layers=3, experts=64):
    """Noisy loads of topics of very different size, ``[steps, layers, experts]``."""
    random = np.random.default_rng(5)
    shares = random.lognormal(0, 1, (topic.max() + 1, layers, experts))
    shares /= shares.sum(axis=2, keepdims=True)
    return random.poisson(shares[topic] * tokens[:, np.newaxis, np.newaxis]).astype(float)


@pytest.mark.parametrize("topics", [2, 4, 6])
def test_steps_of_one_topic_are_one_typical_step(topics):
    random = np.random.default_rng(topics)
    topic = random.permutation(np.repeat(np.arange(topics), np.arange(topics) + 3))
    # Steps differ in size more than in kind.
    loads = steps_of_topics(topic, random.choice([2_000.0, 50_000.0], len(topic)))
    found = typical_steps(loads, topics)
    wanted = [loads[topic == one].sum(axis=0) / len(topic) for one in range(topics)]
    in_order = sorted(found.tolist())
    np.testing.assert_allclose(in_order, sorted(np.array(wanted).tolist()))


def test_outliers_have_their_own():
    topic = np.array([0] * 40 + [1] + [0] * 40 + [2])
    loads = steps_of_topics(topic, np.full(len(topic), 20_000.0))
    found = typical_steps(loads, 3)
    for one in (40, 81):
        assert any(np.allclose(step, loads[one] / len(topic)) for step in found)


@pytest.mark.parametrize(("steps", "experts", "number"), [(1, 8, 4), (3, 2, 8), (50, 300, 5)])
def test_they_add_up_to_the_mean(steps, experts, number):
    loads = np.random.default_rng(0).poisson(3, (steps, 2, experts)).astype(float)
    loads[0] = 0  # no shares
    found = typical_steps(loads, number)
    assert 1 <= len(found) <= min(steps, number)
    np.testing.assert_allclose(found.sum(axis=0), loads.mean(axis=0))
