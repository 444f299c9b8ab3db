import json
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeprof.errors import UsageError
from routeprof.metrics import affinity

EXPERTS, TOP_K = 5, 3
rows = st.lists(
    st.lists(st.integers(-1, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K),
    min_size=1,
    max_size=20,
)


def valid(row):
    return {expert for expert in row if expert >= 0}


@given(ids=rows)
def test_coactivation_equals_a_loop_over_all_pairs(ids):
    expected = np.zeros((EXPERTS, EXPERTS), dtype=int)
    for row in ids:
        for i, j in product(valid(row), repeat=2):
            expected[i, j] += 1
    np.testing.assert_array_equal(affinity.coactivation(ids, EXPERTS), expected)


def test_coactivation_is_not_about_neighbours_only():
    assert affinity.coactivation([[0, 1, 2]], 3)[0, 2] == 1


@given(head=rows, tail=rows, order=st.permutations(range(EXPERTS)))
def test_coactivation_is_additive_and_follows_the_experts(head, tail, order):
    together = affinity.coactivation(head + tail, EXPERTS)
    parts = affinity.coactivation(head, EXPERTS) + affinity.coactivation(tail, EXPERTS)
    np.testing.assert_array_equal(together, parts)
    renamed = [[order[e] if e >= 0 else -1 for e in row] for row in head + tail]
    np.testing.assert_array_equal(
        affinity.coactivation(renamed, EXPERTS)[np.ix_(order, order)], together
    )


@given(ids=rows)
def test_lift_equals_its_formula(ids):
    lift = affinity.lift(affinity.coactivation(ids, EXPERTS), len(ids))
    for i, j in product(range(EXPERTS), repeat=2):
        p_i, p_j = (sum(e in row for row in ids) / len(ids) for e in (i, j))
        p_ij = sum(i in row and j in row for row in ids) / len(ids)
        if i == j or p_i * p_j == 0:
            assert np.isnan(lift[i, j])
        else:
            assert lift[i, j] == pytest.approx(p_ij / (p_i * p_j))


def test_lift_of_a_random_top_k():
    every_pair = [[i, j] for i in range(8) for j in range(8) if i != j]
    lift = affinity.lift(affinity.coactivation(every_pair, 8), len(every_pair))
    np.testing.assert_allclose(lift[~np.eye(8, dtype=bool)], 8 * 1 / (2 * 7))


def consecutive(ids, request):
    """Walk each request by itself."""
    for name in set(request):
        own = [row for row, owner in zip(ids, request, strict=True) if owner == name]
        yield from pairwise(own)


def share(flags):
    flags = list(flags)
    return sum(flags) / len(flags) if flags else float("nan")


@given(ids=rows, data=st.data())
def test_repetition_equals_walking_each_request(ids, data):
    size = len(ids)
    request = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    pairs = list(consecutive(ids, request))
    first = share(a[0] == b[0] for a, b in pairs if a[0] >= 0 and b[0] >= 0)
    overlap = share(bool(valid(a) & valid(b)) for a, b in pairs if valid(a) and valid(b))
    assert affinity.repetition_first(ids, request) == pytest.approx(first, nan_ok=True)
    assert affinity.repetition_any(ids, request) == pytest.approx(overlap, nan_ok=True)


def test_requests_do_not_touch_and_batches_may_interleave():
    ids, request = [[0], [1], [0], [1]], [7, 9, 7, 9]
    assert affinity.repetition_first(ids, request) == 1
    assert np.isnan(affinity.repetition_any(ids, [1, 2, 3, 4]))
    assert np.isnan(affinity.repetition_first([[3]], [1]))


def test_mixtral_random_baselines():
    assert affinity.random_repetition_first(8) == 0.125
    assert affinity.random_repetition_any(8, 2) == pytest.approx(1 - 6 / 8 * 5 / 7)
    assert affinity.random_repetition_any(8, 2) == pytest.approx(0.46, abs=0.005)
    assert affinity.random_repetition_any(8, 5) == 1


def test_random_routing_meets_the_baselines():
    rng = np.random.default_rng(1)
    ids = rng.permuted(np.tile(np.arange(8), (60_000, 1)), axis=1)[:, :2]
    request = np.zeros(len(ids), dtype=int)
    assert affinity.repetition_first(ids, request) == pytest.approx(0.125, abs=0.01)
    assert affinity.repetition_any(ids, request) == pytest.approx(0.464, abs=0.01)


@given(pairs=st.lists(st.tuples(*[st.integers(-1, 3)] * 5), min_size=1, max_size=20))
def test_inter_layer_equals_a_loop(pairs):
    ids, ids_next = [list(p[:2]) for p in pairs], [list(p[2:]) for p in pairs]
    result = affinity.inter_layer(ids, ids_next, 4, 4)
    for before, after in product(range(4), repeat=2):
        there = [n for i, n in zip(ids, ids_next, strict=True) if before in i and valid(n)]
        expected = share(after in n for n in there)
        assert result[before, after] == pytest.approx(expected, nan_ok=True)


@given(pairs=st.lists(st.tuples(*[st.integers(-1, 3)] * 5), min_size=1, max_size=20))
def test_transitions_equal_a_loop(pairs):
    found = affinity.transitions([p[:2] for p in pairs], [p[2:] for p in pairs], 4, 4)
    known = [(valid(p[:2]), valid(p[2:])) for p in pairs]
    known = [(here, there) for here, there in known if here and there]
    assert found.tokens == len(known)
    for before, after in product(range(4), repeat=2):
        both = sum(before in here and after in there for here, there in known)
        one = sum(before in here for here, _ in known)
        other = sum(after in there for _, there in known)
        assert found.together[before, after] == both
        assert (found.here[before], found.there[after]) == (one, other)
        expected = one * other / len(known) if known else np.nan
        assert found.expected[before, after] == pytest.approx(expected, nan_ok=True)
        lift = both / one / (other / len(known)) if one and other else np.nan
        assert found.lift[before, after] == pytest.approx(lift, nan_ok=True)


def test_lift_between_layers_that_choose_independently_is_one():
    random = np.random.default_rng(3)
    ids, later = (np.argsort(random.random((20_000, 6)), axis=1)[:, :2] for _ in range(2))
    found = affinity.transitions(ids, later, 6, 6)
    np.testing.assert_allclose(found.lift, 1, atol=0.06)
    np.testing.assert_allclose(found.shares, 1 / 3, atol=0.02)


def test_inter_layer_rows_are_conditional_on_this_layer():
    result = affinity.inter_layer([[0], [0], [1]], [[2, 0], [2, 1], [0, 1]], 2, 3)
    np.testing.assert_array_equal(result, [[0.5, 0.5, 1], [1, 1, 0]])
    np.testing.assert_array_equal(result.sum(axis=1), [2, 2])


@given(ids=rows, ranks=st.lists(st.integers(0, 2), min_size=EXPERTS, max_size=EXPERTS))
def test_fan_out_equals_a_set_of_ranks(ids, ranks):
    expected = [len({ranks[e] for e in valid(row)}) for row in ids]
    assert affinity.fan_out(ids, ranks).tolist() == expected


def test_ids_may_be_as_narrow_as_recordings_keep_them():
    pairs = affinity.coactivation(np.array([[255, 254]], dtype=np.uint8), 256)
    assert np.argwhere(pairs).tolist() == [[254, 254], [254, 255], [255, 254], [255, 255]]


def test_ids_beyond_the_experts_are_ignored():
    assert affinity.coactivation([[0, 9]], 2).tolist() == [[1, 0], [0, 0]]
    assert affinity.fan_out([[0, 9], [-1, 2]], [0, 1]).tolist() == [1, 0]


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match=r"\(2,\).*\[tokens, k\]"):
        affinity.coactivation([0, 1], 2)
    with pytest.raises(UsageError, match=r"float64.*\[tokens, k\]"):
        affinity.repetition_any([[0.5]], [0])
    with pytest.raises(UsageError, match=r"\(3,\).*\(2, 1\)"):
        affinity.repetition_first([[0], [1]], [0, 0, 0])
    with pytest.raises(UsageError, match=r"\(1, 1\).*\(2, 1\)"):
        affinity.inter_layer([[0], [1]], [[0]], 2, 2)
    with pytest.raises(UsageError, match=r"\(2, 3\)"):
        affinity.lift(np.ones((2, 3), dtype=int), 4)
    with pytest.raises(UsageError, match=r"\(1, 2\).*\(1, 1\)"):
        affinity.fan_out([[0]], [[0, 1]])
    with pytest.raises(UsageError, match="top_k up to experts"):
        affinity.random_repetition_any(2, 3)
    with pytest.raises(UsageError, match="experts is 0"):
        affinity.random_repetition_first(0)


def test_token_level_ids_of_deepseek_v2_lite(realdata):
    folder = realdata / "esft-dsv2lite"
    text = (folder / "expert_weights_1.txt").read_text(encoding="utf-8")
    sequences = [line.split("\t\t")[0].split("\t") for line in text.splitlines()]
    ids = np.array([int(i) for line in sequences for i in line]).reshape(-1, 6)
    request = np.repeat(np.arange(33), [len(line) // 6 for line in sequences])
    assert ids.shape == (8_327, 6)
    pairs = affinity.coactivation(ids, 64)
    assert pairs.sum() == 8_327 * 36
    published = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["token_scores"]
    shares = [published["1"][str(expert)] for expert in range(64)]
    np.testing.assert_allclose(np.diagonal(pairs) / ids.size, shares, atol=1e-4)
    assert affinity.repetition_any(ids, request) > affinity.random_repetition_any(64, 6)
