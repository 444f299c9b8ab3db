import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from routeprof.errors import UsageError
from routeprof.metrics import balance

loads = st.lists(st.integers(0, 10**6), min_size=1, max_size=24)
tables = hnp.arrays(
    np.int64,
    hnp.array_shapes(min_dims=2, max_dims=3, max_side=5),
    elements=st.integers(0, 1000),
)

PLAIN = {  # independent of numpy: the definitions, one expert at a time
    "imbalance_ratio": lambda c: max(c) * len(c) / sum(c),
    "balancedness": lambda c: sum(c) / len(c) / max(c),
    "max_violation": lambda c: (max(c) - sum(c) / len(c)) / (sum(c) / len(c)),
    "hot_cold_ratio": lambda c: max(c) / min(c) if min(c) else math.inf,
    "hot_cold_ratio_alive": lambda c: max(c) / min(x for x in c if x),
    "cv": lambda c: statistics.pstdev(c) / statistics.fmean(c),
    "gini": lambda c: sum(abs(a - b) for a in c for b in c) / (2 * len(c) * sum(c)),
    "entropy_normalized": lambda c: nats(c) / math.log(len(c)) if len(c) > 1 else math.nan,
    "effective_experts": lambda c: math.exp(nats(c)),
    "dead_experts": lambda c: c.count(0),
    "top2_share": lambda c: sum(sorted(c)[-2:]) / sum(c),
    "hottest_expert": lambda c: c.index(max(c)),
    "coldest_expert": lambda c: c.index(min(c)),
}
RATIOS = sorted(set(PLAIN) - {"hottest_expert", "coldest_expert"})


def nats(c):
    return -sum(x / sum(c) * math.log(x / sum(c)) for x in c if x)


def metric(name):
    return getattr(balance, name)


@pytest.mark.parametrize("name", PLAIN)
@given(counts=loads)
def test_equals_the_definition(name, counts):
    assume(sum(counts) > 0)
    expected = pytest.approx(PLAIN[name](counts), rel=1e-9, abs=1e-9, nan_ok=True)
    assert float(metric(name)(counts)) == expected


@pytest.mark.parametrize("name", PLAIN)
@given(counts=tables)
def test_leading_axes_are_independent(name, counts):
    together = metric(name)(counts)
    assert together.shape == counts.shape[:-1]
    for index in np.ndindex(together.shape):
        np.testing.assert_array_equal(together[index], metric(name)(counts[index]))


@pytest.mark.parametrize("name", RATIOS)
def test_a_ratio_over_nothing_is_nan(name):
    assert np.isnan(metric(name)(np.zeros((2, 4), dtype=int))).all()


@pytest.mark.parametrize("name", ["hottest_expert", "coldest_expert"])
def test_no_expert_is_extreme_when_nothing_was_seen(name):
    assert metric(name)([[0, 0, 0], [1, 2, 1]]).tolist() == [-1, 1 if name[0] == "h" else 0]


@pytest.mark.parametrize("name", RATIOS)
@given(counts=loads, data=st.data())
def test_renaming_experts_changes_nothing(name, counts, data):
    shuffled = data.draw(st.permutations(counts))
    np.testing.assert_allclose(metric(name)(counts), metric(name)(shuffled), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RATIOS)
@given(counts=loads, factor=st.integers(1, 1000))
def test_only_shares_matter(name, counts, factor):
    scaled = np.array(counts) * factor
    np.testing.assert_allclose(metric(name)(counts), metric(name)(scaled), rtol=1e-9, atol=1e-12)


@given(counts=loads)
def test_bounds(counts):
    assume(sum(counts) > 0)
    experts = len(counts)
    assert 1 <= balance.imbalance_ratio(counts) <= experts * (1 + 1e-12)
    assert 0 <= balance.gini(counts) + 1e-12 <= (experts - 1) / experts + 2e-12
    assert 1 <= balance.effective_experts(counts) <= experts * (1 + 1e-12)
    assert balance.imbalance_ratio(counts) * balance.balancedness(counts) == pytest.approx(1)
    assert balance.max_violation(counts) + 1 == pytest.approx(balance.imbalance_ratio(counts))


def test_perfect_balance_and_collapse():
    even, collapsed = [7, 7, 7, 7], [0, 0, 28, 0]
    values = {name: (float(metric(name)(even)), float(metric(name)(collapsed))) for name in PLAIN}
    assert values == {
        "imbalance_ratio": (1, 4),
        "balancedness": (1, 0.25),
        "max_violation": (0, 3),
        "hot_cold_ratio": (1, math.inf),
        "hot_cold_ratio_alive": (1, 1),
        "cv": (0, pytest.approx(math.sqrt(3))),
        "gini": (0, 0.75),
        "entropy_normalized": (1, 0),
        "effective_experts": (pytest.approx(4), 1),
        "dead_experts": (0, 3),
        "top2_share": (0.5, 1),
        "hottest_expert": (0, 2),
        "coldest_expert": (0, 0),
    }


def test_narrow_types_are_widened_before_any_arithmetic():
    counts = np.array([1, 3, 70, 2000], dtype=np.float32)
    assert float(balance.effective_experts(counts)) == pytest.approx(
        PLAIN["effective_experts"](counts.tolist()), rel=1e-14
    )


@given(ranks=hnp.arrays(np.int64, (3, 4), elements=st.integers(0, 500)))
def test_engine_figures_equal_their_logs(ranks):
    rows = [[int(x) for x in row] for row in ranks]
    vllm = balance.vllm_balancedness(ranks)
    sglang = balance.sglang_balancedness(ranks)
    if not ranks.any():
        assert np.isnan(vllm)
        assert np.isnan(sglang)
        return
    assert vllm == pytest.approx(sum(sum(r) / 4 for r in rows) / sum(max(r) for r in rows))
    assert sglang == pytest.approx(sum((sum(r) / 4 + 1e-5) / (max(r) + 1e-5) for r in rows) / 3)


def test_engine_figures_tell_ranks_from_layers():
    # Each layer is perfectly even over its ranks; only a mean over layers sees a difference.
    assert balance.vllm_balancedness([[4, 4], [1, 1]]) == 1
    assert balance.vllm_balancedness([[4, 0], [0, 4]]) == 0.5
    assert balance.sglang_balancedness([[8, 0], [0, 0]]) == pytest.approx(0.75, abs=1e-5)
    assert balance.vllm_balancedness(np.ones((5, 3, 2))).shape == (5,)
    assert balance.sglang_balancedness(np.ones((5, 3, 2))).shape == (5,)


@given(steps=hnp.arrays(np.int64, (4, 3, 5), elements=st.integers(0, 100)))
def test_straggler_factor(steps):
    factors = balance.straggler_factor(steps)
    for layer in range(3):
        rows = [[int(x) for x in step[layer]] for step in steps]
        if not any(map(any, rows)):
            assert np.isnan(factors[layer])
            continue
        assert factors[layer] == pytest.approx(
            sum(max(row) for row in rows) / sum(sum(row) / 5 for row in rows)
        )
        assert factors[layer] >= balance.imbalance_ratio(steps[:, layer].sum(axis=0)) - 1e-12


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("counts", [3, [], np.zeros((2, 0)), [1, -1], ["a"]])
def test_impossible_counts_are_refused(name, counts):
    with pytest.raises(UsageError, match="counts"):
        metric(name)(counts)


@pytest.mark.parametrize("name", ["vllm_balancedness", "sglang_balancedness", "straggler_factor"])
def test_ranks_need_a_second_axis(name):
    with pytest.raises(UsageError, match=r"\(2,\).*2 axes"):
        metric(name)([1, 2])


def figures_of(counts):
    ratios = balance.imbalance_ratio(counts)
    return [np.median(ratios), ratios.min(), ratios.max(), balance.gini(counts).mean()]


def sglang_counts(folder, name):
    text = (folder / "sglang-dsv3" / name).read_text(encoding="utf-8")
    return np.array(json.loads(text)["logical_count"])


def test_deepseek_v3_decode(realdata):
    counts = sglang_counts(realdata, "decode_in2000out100.json")
    assert np.isnan(balance.dead_experts(counts[:3])).all()  # dense layers
    live = counts[3:]
    np.testing.assert_allclose(figures_of(live), [5.79, 2.61, 10.49, 0.377], rtol=2e-3)
    assert int(balance.hot_cold_ratio(live).max()) == 253
    assert not balance.dead_experts(live).any()


def test_deepseek_v3_prefill(realdata):
    live = sglang_counts(realdata, "prefill_in2048.json")[3:]
    np.testing.assert_allclose(figures_of(live), [7.06, 4.02, 13.65, 0.417], rtol=2e-3)


def test_deepseek_moe_16b_is_the_balanced_reference(realdata):
    text = (realdata / "cdmoe" / "dynamic_weight.json").read_text(encoding="utf-8")
    counts = np.zeros((27, 64), dtype=int)
    for key, (_, count, _) in json.loads(text).items():
        layer, expert = key.split("-")
        counts[int(layer), int(expert)] = count
    assert set(counts.sum(axis=1)) == {283_740}
    np.testing.assert_allclose(figures_of(counts), [1.46, 1.16, 1.85, 0.091], atol=5e-3)


def test_warm_up_on_dummy_tokens_looks_like_collapse(realdata):
    lines = (realdata / "vllm-routes" / "qwen15moe.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row["topk_ids"] for row in map(json.loads, lines) if row["type"] == "route"]
    served = [ids for ids in rows if ids != rows[0]]  # dummy tokens are all alike, row 0 too
    assert (len(rows), len(served)) == (18_818, 18_818 - 16_384)
    both = [np.bincount(np.ravel(part), minlength=60) for part in (rows, served)]
    np.testing.assert_allclose(balance.imbalance_ratio(both), [13.2, 1.48], rtol=1e-3)
