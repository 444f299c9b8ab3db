import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from routeprof.errors import UsageError
from routeprof.metrics import gate

SCORES = {
    "softmax": math.exp,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "sqrtsoftplus": lambda x: math.sqrt(math.log1p(math.exp(x))),
    "probabilities": lambda x: x,
}
logits = hnp.arrays(
    np.float64,
    st.tuples(st.integers(0, 6), st.integers(1, 6)),
    elements=st.floats(-20, 20, width=32),
)


def by_hand(rows, top_k, scoring):
    sums = {"entropy": 0.0, "top1": 0.0, "margin": 0.0, "z": 0.0, "mass": [0.0] * len(rows[0])}
    for row in rows:
        scores = [SCORES[scoring](x) for x in row]
        p = [score / sum(scores) for score in scores]
        best = sorted(p, reverse=True)
        sums["mass"] = [a + b for a, b in zip(sums["mass"], p, strict=True)]
        sums["entropy"] -= sum(x * math.log(x) for x in p if x)
        sums["top1"] += best[0]
        sums["margin"] += best[top_k - 1] - best[top_k] if top_k < len(row) else 0
        if scoring != "probabilities":
            sums["z"] += math.log(sum(map(math.exp, row))) ** 2
    return sums


@pytest.mark.parametrize("scoring", SCORES)
@given(values=logits, data=st.data())
def test_sums_equal_a_loop_over_tokens(scoring, values, data):
    top_k = data.draw(st.integers(1, values.shape[1]))
    if scoring == "probabilities":
        values = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
    sums = gate.gate_sums(values, top_k, scoring)
    rows = len(values)
    assert (sums.rows, sums.margin_rows, sums.z_rows) == (
        rows,
        rows if top_k < values.shape[1] else 0,
        rows if scoring != "probabilities" else 0,
    )
    expected = by_hand(values.tolist(), top_k, scoring) if rows else None
    for name in ("entropy", "top1", "margin", "z", "mass"):
        result = getattr(sums, name)
        np.testing.assert_allclose(result, expected[name] if rows else 0, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scoring", SCORES)
@given(values=logits, data=st.data())
def test_sums_are_additive_and_follow_the_experts(scoring, values, data):
    values = np.abs(values) + 0.1
    cut = data.draw(st.integers(0, len(values)))
    order = data.draw(st.permutations(range(values.shape[1])))
    whole, head, tail, renamed = (
        gate.gate_sums(part, 1, scoring)
        for part in (values, values[:cut], values[cut:], values[:, order])
    )
    for name in ("mass", "entropy", "top1", "margin", "z", "rows", "margin_rows", "z_rows"):
        total = getattr(head, name) + getattr(tail, name)
        np.testing.assert_allclose(total, getattr(whole, name), rtol=1e-9)
        same = getattr(whole, name)[order] if name == "mass" else getattr(whole, name)
        np.testing.assert_allclose(getattr(renamed, name), same, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scoring", SCORES)
def test_an_undecided_router(scoring):
    sums = gate.gate_sums(np.full((5, 8), 0.125), 2, scoring)
    assert gate.gate_entropy(sums.entropy, sums.rows) == pytest.approx(math.log(8))
    assert gate.top1_probability(sums.top1, sums.rows) == pytest.approx(1 / 8)
    assert gate.margin(sums.margin, sums.margin_rows) == 0
    np.testing.assert_allclose(gate.mean_probability(sums.mass, sums.rows), 1 / 8)


def test_a_decided_router_with_extreme_logits():
    sums = gate.gate_sums([[1000.0, -1000.0, -np.inf]], 1, "softmax")
    assert (sums.entropy, sums.top1, sums.margin, sums.z) == (0, 1, 1, 1e6)


def test_probabilities_are_not_softmaxed_again():
    sums = gate.gate_sums([[0.9, 0.1]], 1, "probabilities")
    np.testing.assert_allclose(sums.mass, [0.9, 0.1])
    assert np.isnan(gate.router_z_loss(sums.z, sums.z_rows))


def test_margin_where_every_expert_is_chosen_is_over_nothing():
    sums = gate.gate_sums([[0.9, 0.1]], 2, "softmax")
    assert np.isnan(gate.margin(sums.margin, sums.margin_rows))


MEANS = [gate.mean, gate.router_z_loss, gate.gate_entropy, gate.top1_probability, gate.margin]


@pytest.mark.parametrize("function", MEANS)
def test_means_over_nothing_are_nan(function):
    np.testing.assert_array_equal(function([6.0, 0.0], [4, 0]), [1.5, np.nan])
    with pytest.raises(UsageError, match=r"\(2,\).*\(3,\)"):
        function([1.0, 2.0, 3.0], [1, 1])


@given(
    counts=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    mass=st.lists(st.floats(0, 50), min_size=4, max_size=4),
    rows=st.integers(0, 50),
)
def test_aux_loss_equals_its_formula(counts, mass, rows):
    result = gate.aux_loss(counts, mass, rows)
    if not rows or not sum(counts):
        assert np.isnan(result)
        return
    pairs = zip(counts, mass, strict=True)
    assert result == pytest.approx(4 * sum(c / sum(counts) * p / rows for c, p in pairs))


def test_aux_loss_of_balance_collapse_and_nothing():
    counts = [[5, 5, 5, 5], [20, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    mass = [[2.5, 2.5, 2.5, 2.5], [10, 0, 0, 0], [2.5, 2.5, 2.5, 2.5], [0, 0, 0, 0]]
    np.testing.assert_allclose(gate.aux_loss(counts, mass, [10, 10, 10, 0]), [1, 4, np.nan, np.nan])


def test_mean_weight():
    np.testing.assert_array_equal(gate.mean_weight([3.0, 0.0], [4, 0]), [0.75, np.nan])


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match=r"\(3,\).*\(2,\)"):
        gate.mean_weight([1, 2, 3], [1, 2])
    with pytest.raises(UsageError, match=r"\(3,\).*\(2,\)"):
        gate.aux_loss([1, 2], [1, 2, 3], 4)
    with pytest.raises(UsageError, match=r"\(2,\).*\(2,\)"):
        gate.aux_loss([1, 2], [1, 2], [4, 4])
    with pytest.raises(UsageError, match=r"\(2,\).*top_k is 1"):
        gate.gate_sums([1.0, 2.0], 1, "softmax")
    for top_k in (0, 3):
        with pytest.raises(UsageError, match=f"top_k is {top_k}"):
            gate.gate_sums([[1.0, 2.0]], top_k, "softmax")
    with pytest.raises(UsageError, match="scoring is 'relu'"):
        gate.gate_sums([[1.0]], 1, "relu")
