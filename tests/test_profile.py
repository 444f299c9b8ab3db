"""Profile: every table against counting the steps by hand."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routeprof
from routeprof.errors import LevelRequiredError, UsageError
from routeprof.metrics.gate import gate_sums
from routeprof.topology import Layer, RankRole
from tests.capture.oracle import Call, Step, begin, call, random_step
from tests.capture.recordings import flush, recorder_of, serve

MOE = {"router": "softmax", "gate": "logits"}
LAYERS = (
    Layer(0, "layers.0", kind="dense"),
    Layer(1, "layers.1.mlp", experts=8, top_k=2, **MOE),
    Layer(2, "layers.2.mlp", experts=6, top_k=3, **MOE),
    Layer(3, "layers.3.mlp", unsupported="nobody knows"),
    Layer(4, "layers.4.mlp", experts=8, top_k=2, **MOE),
    Layer(5, "layers.5.mlp", experts=8, top_k=2, sees_all_tokens=False, **MOE),
)
SEEN = (LAYERS[1], LAYERS[2])
"""What runs; layers 4 and 5 have hooks that never do."""

KEYS = [
    ("prefill", None),
    ("decode", None),
    ("prefill", "code"),
    ("decode", "code"),
    ("mixed", "b"),
]
ODD_FACTORS = [0.3, 1.0, 1.05, 2.7]


def some_steps(number: int = 40) -> list[Step]:
    random = np.random.default_rng(51)
    steps = []
    for count in range(number):
        phase, tag = KEYS[count % len(KEYS)]
        length = 1 if phase == "decode" else int(random.integers(2, 9))
        steps.append(random_step(random, SEEN, 3, length, phase=phase, tag=tag))
        if count % 7 == 0:
            steps[-1].calls.pop()  # layer 2 does not run in some steps
        if count % 11 == 0:
            steps[-1].calls[0].ids[0, 0] = -1
    return steps


def record(directory, steps, *, level="windows", layers=LAYERS, every=9, **facts):
    recorder, capture = recorder_of(directory, layers, level=level, **facts)
    for count, step in enumerate(steps):
        if not step.tag:
            serve(capture, step)
        else:
            with recorder.tag(step.tag):
                serve(capture, step)
        if count % every == every - 1:
            flush(recorder)
    recorder.close()
    return routeprof.load(directory)


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return some_steps()


@pytest.fixture(scope="module")
def windows(tmp_path_factory, steps):
    return record(tmp_path_factory.mktemp("windows") / "r", steps)


@pytest.fixture(scope="module")
def detailed(tmp_path_factory, steps):
    return record(tmp_path_factory.mktemp("steps") / "r", steps, level="steps")


@pytest.fixture(params=["windows", "detailed"])
def profile(request):
    return request.getfixturevalue(request.param)


# -- by hand


def of(steps, phase="all", tag="all") -> list[Step]:
    return [
        step
        for step in steps
        if phase in ("all", step.phase) and tag in ("all", step.tag or "untagged")
    ]


def counts_of(steps, position) -> tuple[np.ndarray, np.ndarray]:
    """Assignments [steps, experts] and tokens [steps] of the steps in which the layer ran."""
    experts = SEEN[position].experts
    calls = [one for step in steps for one in step.calls if one.position == position]
    counts = [[int((one.ids == expert).sum()) for expert in range(experts)] for one in calls]
    tokens = np.array([len(one.ids) for one in calls], dtype=int)
    return np.array(counts, dtype=int).reshape(len(calls), experts), tokens


def slots(factor, tokens, layer) -> np.ndarray:
    factor = Fraction(factor).limit_denominator(1000)
    capacities = [ceil(factor * int(count) * layer.top_k / layer.experts) for count in tokens]
    return np.array(capacities, dtype=int)


def quantile(ratios, weights, q) -> float:
    """Smallest ratio at which the tokens of all steps up to it are q of all."""
    order = np.argsort(ratios)
    reached = np.cumsum(weights[order]) >= q * weights.sum() - 1e-9
    return float(ratios[order][np.argmax(reached)])


# -- what there is


def test_states(profile):
    assert profile.states == ("dense", "captured", "captured", "unsupported", "silent", "idle")
    assert profile.layer_indices == [1, 2]
    assert profile.in_state("silent") == (4,)


def test_what_was_not_captured_is_nowhere_a_zero(profile):
    table = profile.layers().set_index("layer")
    assert sorted(table.index) == [1, 2, 3, 4, 5]
    for name in ("tokens", "assignments", "invalid", "imbalance_ratio", "dead_experts", "gini"):
        assert table.loc[[3, 4, 5], name].isna().all(), name
    for frame in (profile.experts(), profile.overflow(), profile.windows(), profile.gemm()):
        assert set(frame["layer"]) == {1, 2}


def test_counts_are_masked_where_a_layer_has_fewer_experts(profile, steps):
    assert profile.counts.shape == (2, 8)
    assert profile.counts.dtype == np.int64
    assert np.ma.getmaskarray(profile.counts).sum(1).tolist() == [0, 2]
    for position in range(2):
        expected = counts_of(steps, position)[0].sum(0)
        assert profile.counts[position].compressed().tolist() == expected.tolist()


def test_counts_are_not_masked_where_all_layers_have_as_many(tmp_path, steps):
    layers = LAYERS[:2]
    only = [Step(s.batch, s.length, s.calls[:1], s.phase) for s in steps]
    profile = record(tmp_path / "r", only, layers=layers)
    assert type(profile.counts) is np.ndarray
    assert profile.counts.shape == (1, 8)


# -- select


@pytest.mark.parametrize("tag", [None, "untagged", "code", "b"])
@pytest.mark.parametrize("phase", [None, "prefill", "decode", "mixed"])
def test_select(profile, steps, phase, tag):
    own = of(steps, phase or "all", tag or "all")
    selected = profile.select(phase=phase, tag=tag)
    for position in range(2):
        expected = counts_of(own, position)[0].sum(0)
        if expected.any():
            place = selected.layer_indices.index(SEEN[position].index)
            found = np.ma.getdata(selected.counts[place])[: len(expected)]
            assert found.tolist() == expected.tolist()
        else:
            assert SEEN[position].index not in selected.layer_indices
    table = selected.layers().set_index("layer")
    assert pd.isna(table.loc[1, "steps"]) if not own else table.loc[1, "steps"] == len(own)
    assert set(table["phase"]) == {phase or "all"}
    assert set(table["tag"]) == {tag or "all"}


def test_select_what_does_not_occur(profile):
    with pytest.raises(UsageError, match="prefill, decode, mixed"):
        profile.select(phase="verify")
    with pytest.raises(UsageError, match="untagged, b, code"):
        profile.select(tag="prose")


def test_selections_may_follow_one_another_in_any_order(profile):
    ends = np.unique(profile.windows()["end"])
    between = (ends[1], ends[3])
    one = profile.select(phase="prefill", tag="code", between=between)
    for other in (
        profile.select(phase="prefill").select(between=between).select(tag="code"),
        profile.select(between=between).select(tag="code").select(phase="prefill"),
        profile.select(tag="code", phase="prefill").select(between=between),
        profile.select(between=(ends[1], ends[4])).select(
            phase="prefill", tag="code", between=(ends[0], ends[3])
        ),
    ):
        np.testing.assert_array_equal(np.ma.getdata(one.counts), np.ma.getdata(other.counts))
        pd.testing.assert_frame_equal(one.layers(), other.layers())
        pd.testing.assert_frame_equal(one.windows(), other.windows())


def test_between_keeps_whole_windows(profile, steps):
    ends = np.unique(profile.windows()["end"])
    assert len(ends) == 5
    own = steps[9:27]  # the second and third window of nine steps
    selected = profile.select(between=(ends[0], ends[2]))
    for position in range(2):
        expected = counts_of(own, position)[0].sum(0)
        assert selected.counts[position].compressed().tolist() == expected.tolist()
    assert selected.missed_tokens == 0
    if profile.has("steps"):
        assert sorted(selected.steps()["step"].unique()) == list(range(9, 27))
        assert_quantiles(selected.layers(), own, exact=True)


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


def assert_quantiles(table, steps, *, exact: bool) -> None:
    for row in table[table["layer"].isin([1, 2])].itertuples():
        counts, tokens = counts_of(of(steps, row.phase, row.tag), row.layer - 1)
        ratios = counts.max(1) / counts.mean(1)
        rel = 1e-12 if exact else 0.011
        assert row.step_imbalance_p50 == pytest.approx(quantile(ratios, tokens, 0.5), rel=rel)
        assert row.step_imbalance_p95 == pytest.approx(quantile(ratios, tokens, 0.95), rel=rel)
        assert row.step_imbalance_max == pytest.approx(ratios.max(), rel=1e-12)


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


# -- coverage


def test_coverage(profile, steps):
    silent = sum(step.rows for step in steps) * 2
    made = sum(step.rows * (2 + 3) for step in steps) + silent
    ran = sum(one.ids.size for step in steps for one in step.calls)
    assert profile.coverage == pytest.approx(ran / made)
    assert "coverage" in {finding.code for finding in profile.findings()}


def test_coverage_is_one_where_every_layer_ran(tmp_path, steps):
    full = [step for step in steps if len(step.calls) == 2]
    profile = record(tmp_path / "r", full, layers=LAYERS[:3])
    assert profile.coverage == 1.0
    assert not {"coverage", "silent-layers"} & {f.code for f in profile.findings()}


def test_missed_passes_lower_coverage_of_the_sum_only(tmp_path, steps):
    import threading

    step = steps[1]
    recorder, capture = recorder_of(tmp_path / "r", LAYERS[:3])
    serve(capture, step)
    begin(capture, step)
    thread = threading.Thread(target=serve, args=(capture, step))
    thread.start()
    thread.join()
    for one in step.calls:
        call(capture, one)
    capture.end()
    recorder.close()
    profile = routeprof.load(tmp_path / "r")
    assert profile.missed_tokens == step.rows
    assert profile.coverage == pytest.approx(2 / 3)
    assert profile.layers()["coverage"].tolist() == pytest.approx([2 / 3, 2 / 3])
    assert profile.select(phase=step.phase).coverage == 1.0
    assert {"coverage", "missed-passes"} <= {finding.code for finding in profile.findings()}


def test_a_layer_that_runs_twice_is_covered_once(tmp_path, steps):
    twice = [Step(step.batch, step.length, step.calls[:1] * 2, step.phase) for step in steps[:5]]
    profile = record(tmp_path / "r", twice, layers=LAYERS[:2])
    assert profile.coverage == 1.0
    assert profile.layers()["tokens"].tolist() == [2 * sum(step.rows for step in twice)]


def test_twins_of_a_rank_count_neither_tokens_nor_misses(tmp_path, steps):
    for rank, owns in ((0, True), (1, False), (2, True)):
        role = RankRole(rank=rank, world_size=3, owns_tokens=owns)
        recorder, capture = recorder_of(tmp_path / "r", LAYERS[:3], role=role)
        serve(capture, steps[1])
        capture.missed_tokens = 5
        recorder.close()
    profile = routeprof.load(tmp_path / "r")
    assert profile.missed_tokens == 10
    expected = 2 * counts_of(steps[1:2], 0)[0].sum(0)
    assert profile.counts[0].compressed().tolist() == expected.tolist()


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


# -- nothing to divide by


def test_ratios_over_nothing_have_no_value(tmp_path):
    ids = np.full((2, 2), -1)
    profile = record(tmp_path / "r", [Step(1, 2, [Call(0, ids)])], layers=LAYERS[:3])
    (row,) = profile.layers().query("layer == 1").to_dict("records")
    assert (row["tokens"], row["assignments"], row["invalid"]) == (2, 0, 4)
    for name in ("imbalance_ratio", "gini", "step_imbalance_p50", "aux_loss", "dead_experts"):
        assert pd.isna(row[name]), name
    assert profile.experts()["share"].isna().all()
    assert profile.windows()["imbalance_ratio"].isna().all()
    assert profile.states[1:3] == ("captured", "silent")
    assert profile.gemm().empty


def test_a_recording_of_nothing(tmp_path):
    profile = record(tmp_path / "r", [], level="steps")
    assert profile.counts.shape == (0, 0)
    assert np.isnan(profile.coverage)
    for frame in (profile.experts(), profile.overflow(), profile.windows(), profile.steps()):
        assert frame.empty
    assert profile.layers()["tokens"].isna().all()
    assert profile.states[1] == "idle"
    assert "nothing-captured" in {finding.code for finding in profile.findings()}


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_few_steps(tmp_path_factory, seed):
    random = np.random.default_rng(seed)
    steps = [
        random_step(random, SEEN, int(random.integers(0, 4)), int(random.integers(0, 4)))
        for _ in range(random.integers(1, 5))
    ]
    profile = record(tmp_path_factory.mktemp("any") / "r", steps, level="steps", layers=LAYERS[:3])
    for position in range(2):
        expected = counts_of(steps, position)[0].sum(0)
        assert profile.counts[position].compressed().tolist() == expected.tolist()
    assert profile.coverage == 1.0 or (
        not sum(s.rows for s in steps) and np.isnan(profile.coverage)
    )
    profile.layers(breakdown=True), profile.overflow([1.01]), profile.steps(), profile.findings()
