"""Every table of a profile against counting the steps by hand."""

from __future__ import annotations

from math import ceil

import numpy as np
import pandas as pd
import pytest

import routeprof
from routeprof.errors import LevelRequiredError, UsageError
from routeprof.metrics.gate import gate_sums
from tests.capture.oracle import random_step
from tests.profile.by_hand import (
    LAYERS,
    SEEN,
    assert_quantiles,
    counts_of,
    of,
    quantile,
    record,
    slots,
)
from tests.recording.made import random_parts, write

ODD_FACTORS = [0.3, 1.0, 1.05, 2.7]

# -- layers


def test_layers_against_the_steps(profile, steps):
    table = profile.layers(breakdown=True)
    groups = table[["phase", "tag"]].drop_duplicates().itertuples(index=False)
    phases, tags = {"all", "prefill", "decode", "mixed"}, {"all", "untagged", "code", "b"}
    expected = {(phase, tag) for phase in phases for tag in tags if of(steps, phase, tag)}
    assert {tuple(group) for group in groups} == expected
    for row in table[table["layer"].isin([1, 2])].itertuples():
        own = of(steps, row.phase, row.tag)
        layer = SEEN[row.layer - 1]
        counts, tokens = counts_of(own, row.layer - 1)
        total = counts.sum(0)
        assert row.steps == len(own)
        assert (row.tokens, row.assignments) == (tokens.sum(), total.sum())
        assert row.invalid == tokens.sum() * layer.top_k - total.sum()
        assert row.coverage == pytest.approx(tokens.sum() / sum(step.rows for step in own))
        assert row.imbalance_ratio == pytest.approx(total.max() / total.mean())
        assert row.dead_experts == (total == 0).sum()
        assert total[row.hottest_expert] == total.max()
        assert total[row.coldest_expert] == total.min()


def test_step_imbalance_is_exact_where_all_steps_were_kept(detailed, steps):
    assert_quantiles(detailed.layers(breakdown=True), steps, exact=True)


def test_step_imbalance_is_within_a_bin_where_they_were_not(windows, steps):
    assert_quantiles(windows.layers(breakdown=True), steps, exact=False)
    found = windows.layers()["step_imbalance_p50"].dropna().tolist()
    exact = [
        quantile(counts.max(1) / counts.mean(1), tokens, 0.5)
        for counts, tokens in (counts_of(steps, 0), counts_of(steps, 1))
    ]
    assert found != exact  # else this tests nothing


def test_step_imbalance_comes_from_the_histogram_where_steps_were_lost(tmp_path, steps):
    profile = record(tmp_path / "r", steps * 4, level="steps", ring=64, every=1000)
    assert profile.files.ranks[0].state.problems["lost_step_rows"] > 0
    assert_quantiles(profile.layers(breakdown=True), steps * 4, exact=False)


def test_steps_are_read_once(detailed, monkeypatch):
    fresh = routeprof.load(detailed.files.directory)
    fresh.layers()
    monkeypatch.setattr("routeprof.profile.read_steps", None)
    assert fresh.step_counts() is fresh.step_counts()


def test_gate_columns(profile, steps):
    table = profile.layers().set_index("layer")
    experts = profile.experts().set_index(["layer", "expert"])
    for position, layer in enumerate(SEEN):
        calls = [one for step in steps for one in step.calls if one.position == position]
        sums = gate_sums(np.concatenate([one.logits for one in calls]), layer.top_k, "softmax")
        row, mean = table.loc[layer.index], sums.mass / sums.rows
        counts = counts_of(steps, position)[0].sum(0)
        assert row["gate_entropy"] == pytest.approx(sums.entropy / sums.rows, rel=1e-5)
        assert row["top1_probability"] == pytest.approx(sums.top1 / sums.rows, rel=1e-5)
        loss = layer.experts * (counts / counts.sum() * mean).sum()
        assert row["aux_loss"] == pytest.approx(loss, rel=1e-5)
        own = experts.loc[layer.index]
        np.testing.assert_allclose(own["probability_mass"], mean, rtol=1e-5)
        for expert in range(layer.experts):
            chosen = np.concatenate([one.weights[one.ids == expert] for one in calls])
            assert own.loc[expert, "mean_weight"] == pytest.approx(chosen.mean(), rel=1e-5)


def test_experts_against_the_steps(profile, steps):
    for row in profile.experts(breakdown=True).itertuples():
        counts = counts_of(of(steps, row.phase, row.tag), row.layer - 1)[0].sum(0)
        assert row.tokens == counts[row.expert]
        assert row.share == pytest.approx(counts[row.expert] / counts.sum())
        assert row.load_over_mean == pytest.approx(counts[row.expert] / counts.mean())


# -- overflow


@pytest.mark.parametrize("factors", [None, [1.0, 1.5], ODD_FACTORS])
def test_overflow_against_the_steps(detailed, windows, steps, factors):
    profile = detailed if factors is ODD_FACTORS else windows
    table = profile.overflow(factors, breakdown=True)
    assert set(table["capacity_factor"]) == set(factors or profile.info.capacity_factors)
    assert not table["happened"].any()
    for row in table.itertuples():
        own = of(steps, row.phase, row.tag)
        layer = SEEN[row.layer - 1]
        counts, tokens = counts_of(own, row.layer - 1)
        capacities = slots(row.capacity_factor, tokens, layer)
        over = np.maximum(counts - capacities[:, None], 0).sum(1)
        padding = np.maximum(capacities[:, None] - counts, 0).sum()
        assert row.overflow_assignments == over.sum()
        assert row.overflow_rate == pytest.approx(over.sum() / (tokens.sum() * layer.top_k))
        assert row.padding_rate == pytest.approx(padding / (capacities.sum() * layer.experts))
        assert (row.steps, row.steps_with_overflow) == (len(own), (over > 0).sum())


def test_both_ways_to_overflow_agree(detailed):
    recorded = detailed.overflow([1.0, 1.5], breakdown=True)
    both = detailed.overflow([1.0, 1.5, 1.234], breakdown=True)
    both = both[both["capacity_factor"] != 1.234].reset_index(drop=True)
    pd.testing.assert_frame_equal(recorded, both)


def test_overflow_at_a_factor_that_was_not_recorded(windows):
    with pytest.raises(LevelRequiredError, match="level='steps'"):
        windows.overflow([1.05])
    for factor in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError):
            windows.overflow([factor])


# -- windows, steps, GEMM sizes


def test_windows_against_the_steps(profile, steps):
    table = profile.windows()
    for row in table.itertuples():
        first = 9 * len(np.unique(table["end"][table["end"] < row.end]))
        own = of(steps[first : first + 9], row.phase, row.tag)
        counts, tokens = counts_of(own, row.layer - 1)
        total = counts.sum(0)
        assert (row.steps, row.tokens) == (len(own), tokens.sum())
        assert row.imbalance_ratio == pytest.approx(total.max() / total.mean())
    assert table["window"].tolist() == sorted(table["window"])
    assert set(table["window"]) == set(range(5))


def test_steps_against_the_steps(detailed, steps):
    table = detailed.steps()
    assert len(table) == sum(len(step.calls) for step in steps)
    for row in table.itertuples():
        step, layer = steps[row.step], SEEN[row.layer - 1]
        counts, tokens = counts_of([step], row.layer - 1)
        over = np.maximum(counts[0] - slots(1, tokens, layer)[0], 0).sum()
        assert (row.phase, row.tokens, row.requests) == (step.phase, step.rows, step.batch)
        assert row.max_load == counts.max()
        assert row.imbalance_ratio == pytest.approx(counts.max() / counts.mean())
        assert table.loc[row.Index, "overflow_rate_1.0"] == pytest.approx(
            over / (tokens[0] * layer.top_k)
        )


def test_steps_need_their_level(windows):
    for question in (windows.steps, windows.step_counts, lambda: windows.tokens(1)):
        with pytest.raises(LevelRequiredError, match="record with level"):
            question()


def test_step_counts_of_a_selection(detailed, steps):
    table = detailed.select(phase="decode", tag="code").step_counts()
    expected = [n for n, step in enumerate(steps) if (step.phase, step.tag) == ("decode", "code")]
    assert sorted(set(table.step)) == expected
    assert set(table.tag) == {"code"}


def test_gemm_sizes_against_the_steps(tmp_path):
    random = np.random.default_rng(52)
    steps = [random_step(random, SEEN, 1, int(size)) for size in random.integers(1, 250, 20)]
    profile = record(tmp_path / "r", steps, layers=LAYERS[:3])
    for row in profile.gemm().itertuples():
        sizes = np.sort(counts_of(steps, row.layer - 1)[0].ravel())
        sizes = sizes[sizes > 0]
        assert row.cells == len(sizes)
        assert row.small_gemm_share == pytest.approx((sizes < 16).mean())
        assert row.mean_tokens == pytest.approx(sizes.mean())
        middle = sizes[ceil(len(sizes) / 2) - 1]
        assert middle <= row.p50_at_most < 2 * middle


def test_the_widest_layer_may_lack_probabilities(tmp_path):
    """A narrower one that has them keeps its own."""
    rows = random_parts(seed=1, parts=1, rows=40)[0]
    for row in rows:
        if row["layer"] == 3:
            row["probability_mass"] = None
    write(tmp_path / "r", [rows])
    table = routeprof.load(tmp_path / "r").layers().set_index("layer")
    own = [row for row in rows if row["layer"] == 4 and row["calls"]]
    counts = np.sum([row["counts"] for row in own], axis=0)
    mass = np.sum([row["probability_mass"] for row in own if row["probability_mass"]], axis=0)
    share, probability = counts / counts.sum(), mass / sum(row["gate_rows"] for row in own)
    assert table.loc[4, "aux_loss"] == pytest.approx(6 * (share * probability).sum())
    assert np.isnan(table.loc[3, "aux_loss"])
