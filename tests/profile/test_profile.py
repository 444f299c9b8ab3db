"""Profile: what was captured, what is selected, how much of everything it is."""

from __future__ import annotations

import threading

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routeprof
from routeprof.errors import UsageError
from routeprof.topology import RankRole
from tests.capture.oracle import Call, Step, begin, call, random_step
from tests.capture.recordings import recorder_of, serve
from tests.profile.by_hand import LAYERS, SEEN, assert_quantiles, counts_of, of, record

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
