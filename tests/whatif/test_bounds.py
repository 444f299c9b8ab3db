"""The lower bound against every placement there is, on clusters small enough to try them all."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routeprof.whatif.bounds import lower_bound
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.placement import place


def best_of_all(loads, cluster, groups=1, *, repeats=False):
    """The smallest mean over steps of the slowest GPU's time, in plain Python."""
    steps, experts = len(loads), len(loads[0])
    best = np.inf
    for slots in product(range(experts), repeat=cluster.slots):
        if set(slots) != set(range(experts)):
            continue
        if not keeps_rules(slots, cluster, experts, groups, repeats):
            continue
        time = np.zeros((steps, cluster.gpus))
        for slot, expert in enumerate(slots):
            gpu = cluster.gpu_of_slot[slot]
            for step in range(steps):
                time[step, gpu] += loads[step][expert] / slots.count(expert) / cluster.speed[gpu]
        best = min(best, time.max(axis=1).mean())
    return best


def keeps_rules(slots, cluster, experts, groups, repeats):
    homes = {}
    for gpu in range(cluster.gpus):
        held = [slots[slot] for slot in range(cluster.slots) if cluster.gpu_of_slot[slot] == gpu]
        if not repeats and len(set(held)) < min(len(held), experts // cluster.nodes):
            return False
        for expert in held:
            homes.setdefault(expert // (experts // groups), set()).add(cluster.node_of_gpu[gpu])
    return groups == 1 or all(len(nodes) == 1 for nodes in homes.values())


CLUSTERS = [
    Cluster.even(2, 4),
    Cluster.even(2, 6),
    Cluster.even(3, 6),
    Cluster((3, 2), (1.0, 1.0)),
    Cluster((2, 3, 1), (1.0, 2.0, 0.5)),
]


@settings(max_examples=60)
@given(
    data=st.data(),
    cluster=st.sampled_from(CLUSTERS),
    experts=st.integers(2, 4),
    repeats=st.booleans(),
)
def test_nothing_is_below_the_bound(data, cluster, experts, repeats):
    load = st.lists(st.integers(0, 30), min_size=experts, max_size=experts)
    loads = data.draw(st.lists(load, min_size=1, max_size=3))
    best = best_of_all(loads, cluster, repeats=repeats)
    array = np.array(loads, dtype=float)[:, np.newaxis]
    assert lower_bound(array, cluster, repeats=repeats)[0] <= best + 1e-9
    found = place(array, cluster, repeats=repeats)
    assert found.slowest[0] >= best - 1e-9
    assert found.bound[0] <= best + 1e-9


@settings(max_examples=30)
@given(load=st.lists(st.integers(0, 30), min_size=4, max_size=4))
def test_nothing_is_below_the_bound_with_groups(load):
    cluster = Cluster.even(2, 6, nodes=2)
    for repeats in (False, True):
        best = best_of_all([load], cluster, groups=2, repeats=repeats)
        bound = lower_bound(np.array([[load]], dtype=float), cluster, groups=2, repeats=repeats)
        assert bound[0] <= best + 1e-9


@pytest.mark.parametrize(
    ("loads", "cluster", "bound"),
    [
        ([4, 4, 4, 4], Cluster.even(2, 4), 8),  # even
        ([9, 1, 1, 1], Cluster.even(2, 4), 10),  # the hottest, and the coldest beside it
        ([9, 1, 1, 1], Cluster.even(2, 6), 6),  # the hottest on both
        ([9, 3], Cluster((1, 1), (3.0, 1.0)), 3),  # by speed
    ],
)
def test_bounds_that_are_reached(loads, cluster, bound):
    array = np.array([[loads]], dtype=float)
    assert lower_bound(array, cluster, repeats=False)[0] == pytest.approx(bound)
    assert best_of_all([loads], cluster) == pytest.approx(bound)


def test_a_slot_that_may_repeat_an_expert_is_taken_for_empty():
    loads, cluster = np.array([[[9.0, 1, 1, 1, 1, 1, 1, 1]]]), Cluster.even(3, 9)
    strict = lower_bound(loads, cluster, repeats=False)[0]
    assert strict == pytest.approx(9 / 2 + 1 / 2 + 1)  # the hottest halved, beside it two cold ones
    assert lower_bound(loads, cluster)[0] == pytest.approx(16 / 3)  # even, above 9 / 2 + 1 / 2


def test_steps_beyond_the_pieces_are_averaged():
    loads = np.random.default_rng(0).poisson(20, (300, 2, 8)).astype(float)
    cluster = Cluster.even(4, 8)
    bound = lower_bound(loads, cluster)
    each = np.mean([lower_bound(step[np.newaxis], cluster) for step in loads], axis=0)
    assert (bound <= each + 1e-9).all()
    assert (bound >= loads.mean(axis=0).sum(axis=1) / 4 - 1e-9).all()
