"""Ranks by their roles: what is summed, what is missing, and twins that differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

import routeprof
from routeprof.commands.report import report
from routeprof.commands.summary import summary
from routeprof.dashboards.live.source import Source
from routeprof.profile import Profile
from routeprof.report.csv import csv_text
from routeprof.report.summary import summary_json
from routeprof.report.text import summary_text
from tests.recording.parallel import (
    BOTH,
    A,
    B,
    Rank,
    change,
    codes,
    column,
    days,
    grid,
    nodes,
    pipeline,
    role,
    tables,
)

# -- roles


def test_tensor_times_data_parallel(tmp_path):
    profile = routeprof.load(grid(tmp_path / "r"))
    assert profile.counts.tolist() == [[8, 4, 10, 10], [6, 6, 8, 12]]  # 2 A + 2 B
    assert column(profile, "steps") == [4, 4]
    assert column(profile, "tokens") == [16, 16]
    assert column(profile, "coverage") == [1.0, 1.0]
    assert profile.totals.sums["expected_tokens"].sum(0).tolist() == [16, 16]
    assert profile.totals.sums["cost_seconds"].sum() == pytest.approx(4 * 2 * 0.25)
    # Each rank steps by itself: 8 assignments and 4 experts a step, so ratios are 2, 2, 2, 2
    # and 1, 1, 2, 2, while that of the sums is 10 · 4 / 32 and 12 · 4 / 32.
    assert column(profile, "imbalance_ratio") == [1.25, 1.5]
    assert column(profile, "step_imbalance_max") == [2.0, 2.0]
    assert column(profile, "step_imbalance_p50") == pytest.approx([2.0, 1.0], rel=0.011)
    # At factor 1 an expert has room for 2: A overflows by 2 and 0, B by 4 and 2.
    overflow = profile.overflow([1.0])
    assert overflow["overflow_assignments"].tolist() == [2 * 2 + 2 * 4, 2 * 2]
    assert overflow["steps_with_overflow"].tolist() == [4, 2]
    assert not {"ranks-missing", "twins-differ", "coverage"} & codes(profile).keys()


@pytest.mark.parametrize("level", ["windows", "steps", "tokens"])
def test_twins_are_in_no_table(tmp_path, level):
    with_twins = routeprof.load(grid(tmp_path / "all", level=level))
    owners = routeprof.load(grid(tmp_path / "owners", twins=False, level=level))
    assert tables(with_twins) == tables(owners)
    assert with_twins.coverage == owners.coverage == 1.0
    pd.testing.assert_frame_equal(with_twins.gemm(), owners.gemm())
    if level == "tokens":
        for layer in (0, 1):
            assert with_twins.tokens(layer).rank.tolist() == owners.tokens(layer).rank.tolist()
        assert with_twins.requests()["request"].tolist() == [
            *(f"0/{request}" for request in range(4)),
            *(f"2/{request}" for request in range(4)),
        ]
        assert with_twins.requests()["tokens"].tolist() == [3] * 4 + [1] * 4


def test_ranks(tmp_path):
    grid(tmp_path / "r")
    table = routeprof.load(tmp_path / "r").ranks()
    assert table["rank"].tolist() == [0, 1, 2, 3]
    assert table["tp"].tolist() == [0, 1, 0, 1]
    assert table["dp"].tolist() == [0, 0, 1, 1]
    assert table["ep"].tolist() == [0, 1, 2, 3]
    assert table["owns_tokens"].tolist() == [True, False, True, False]
    assert table["steps"].tolist() == [3, 3, 1, 1]
    assert table["tokens"].tolist() == [12, 12, 4, 4]
    assert table["assignments"].tolist() == [48, 48, 16, 16]
    assert table["coverage"].tolist() == [1.0] * 4
    assert table["problems"].tolist() == [0] * 4
    assert table["pid"].tolist() == [0, 1, 2, 3]
    assert set(table["state"]) == {"stopped"}
    assert set(table["directory"]) == {str(tmp_path / "r")}


def test_ranks_of_a_selection(tmp_path):
    owner, twin = role(0, 2), role(1, 2, tp=1, owns_tokens=False)
    for place in (owner, twin):
        rank = Rank(tmp_path / "r", place)
        rank.steps(A, phase="prefill", tag="code").steps(B, B).stop(problems={"missed_tokens": 4})
    profile = routeprof.load(tmp_path / "r")
    assert profile.ranks()["coverage"].tolist() == [12 / 16] * 2
    assert profile.select(phase="decode").ranks()["tokens"].tolist() == [8, 8]
    assert profile.select(tag="code").ranks()["tokens"].tolist() == [4, 4]
    between = profile.select(between=(1001.5, 1002.5))
    assert between.ranks()["tokens"].tolist() == [4, 4]
    assert between.ranks()["coverage"].tolist() == [1.0, 1.0]


def test_a_rank_without_rank_json_is_counted_and_its_role_unknown(tmp_path):
    grid(tmp_path / "r", twins=False)
    (tmp_path / "r/rank-00002/rank.json").unlink()
    table = routeprof.load(tmp_path / "r").ranks()
    assert table["state"].tolist() == ["stopped", "unknown"]
    assert table["tokens"].tolist() == [12, 4]
    assert pd.isna(table.loc[1, ["dp", "pid", "problems"]]).all()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pipeline_stages(tmp_path, order):
    profile = routeprof.load(pipeline(tmp_path / "r", order))
    assert profile.layer_indices == [0, 1, 2, 3]
    assert profile.counts.tolist() == BOTH + BOTH
    assert column(profile, "steps") == [2] * 4
    assert column(profile, "coverage") == [1.0] * 4
    assert profile.totals.sums["expected_tokens"].sum(0).tolist() == [8] * 4
    assert profile.ranks()["assignments"].tolist() == [32, 32]
    assert profile.states == ("captured",) * 4
    assert not {"silent-layers", "coverage", "ranks-missing"} & codes(profile).keys()


def test_what_a_stage_missed_is_missing_in_its_layers_alone(tmp_path):
    pipeline(tmp_path / "r")
    change(tmp_path / "r", 1, problems={"missed_tokens": 8})
    profile = routeprof.load(tmp_path / "r")
    assert profile.missed_by_layer.tolist() == [0, 0, 8, 8]
    assert profile.missed_tokens == 8
    assert column(profile, "coverage") == [1.0, 1.0, 0.5, 0.5]
    assert profile.coverage == pytest.approx(2 / 3)
    assert profile.ranks()["coverage"].tolist() == [1.0, 0.5]


def test_stages_share_the_row_of_a_request(tmp_path):
    profile = routeprof.load(pipeline(tmp_path / "r", level="tokens"))
    requests = profile.requests()
    assert requests["request"].tolist() == ["0", "1", "2", "3"]
    assert requests["tokens"].tolist() == [2] * 4
    assert requests["divergence_from_all"].notna().all()
    assert column(profile, "step_imbalance_max") == [2.0] * 4


def test_replicas_that_nobody_numbered_have_requests_of_their_own(tmp_path):
    for rank in range(2):
        Rank(tmp_path / "r", role(rank, 2), level="tokens").steps(A).stop()
    names = routeprof.load(tmp_path / "r").requests()["request"].tolist()
    assert names == ["0/0", "0/1", "0/2", "0/3", "1/0", "1/1", "1/2", "1/3"]


def test_shards_of_sequence_parallel_ranks_add_up(tmp_path):
    for tp, step in enumerate((A, B)):
        Rank(tmp_path / "r", role(tp, 2, tp=tp), level="tokens").steps(step).stop()
    profile = routeprof.load(tmp_path / "r")
    assert profile.counts.tolist() == BOTH
    assert column(profile, "tokens") == [8, 8]
    assert profile.requests()["tokens"].tolist() == [2] * 4
    assert "twins-differ" not in codes(profile)


# -- what is missing


def test_missing_ranks_are_named(tmp_path):
    one, other = nodes(tmp_path, run="r")
    assert "rank 1 of 2 wrote nothing" in codes(routeprof.load(one))["ranks-missing"]
    assert "ranks-missing" not in codes(routeprof.load(one, other))
    for rank in (0, 4):
        Rank(tmp_path / "wide", role(rank, 6)).steps(A).stop()
    profile = routeprof.load(tmp_path / "wide")
    (finding,) = [found for found in profile.findings() if found.code == "ranks-missing"]
    assert finding.severity == "warning"
    assert finding.evidence.startswith("ranks 1–3, 5 of 6 wrote nothing")


def test_missing_ranks_of_one_run_among_two(tmp_path):
    Rank(tmp_path / "a", id="a").steps(A).stop()
    Rank(tmp_path / "b", role(1, 2), id="b").steps(A).stop()
    profile = routeprof.load(tmp_path / "a", tmp_path / "b")
    assert f"rank 0 of 2 wrote nothing in {tmp_path / 'b'}" in codes(profile)["ranks-missing"]


def test_a_hostile_world_size(tmp_path):
    Rank(tmp_path / "r", role(0, 1)).steps(A).stop()
    change(tmp_path / "r", 0, role={"rank": 0, "world_size": 10**15})
    assert "ranks-missing" in codes(routeprof.load(tmp_path / "r"))


# -- twins that differ


def twins(directory: Path, own, twin, *, state="stopped", **changes) -> Profile:
    Rank(directory, role(0, 2)).steps(*own).stop()
    rank = Rank(directory, role(1, 2, tp=1, owns_tokens=False)).steps(*twin)
    rank.stop(state, **changes)
    return routeprof.load(directory)


def test_twins_that_counted_something_else(tmp_path):
    other = {0: A[0], 1: [2, 2, 1, 3]}
    profile = twins(tmp_path / "r", [A, A, B], [A, other, B])
    (finding,) = [found for found in profile.findings() if found.code == "twins-differ"]
    assert finding.severity == "warning"
    assert finding.layers == (1,)
    assert "rank 1 is a tensor-parallel twin of rank 0" in finding.evidence
    assert "in layer 1 2 of 24 assignments in 3 passes" in finding.evidence
    assert profile.counts.tolist() == [[8, 4, 6, 6], [5, 5, 6, 8]]


@pytest.mark.parametrize(
    ("own", "twin"), [([A, A, B], [A, A]), ([A, A], [A, A, B])], ids=["earlier", "later"]
)
def test_a_twin_that_was_stopped_one_window_apart_is_one(tmp_path, own, twin):
    assert "twins-differ" not in codes(twins(tmp_path / "r", own, twin))


@pytest.mark.parametrize(
    ("own", "twin", "passes"),
    [
        ([A, A, A], [A], "3 against 1"),
        ([A], [A, A, A], "1 against 3"),
        ([A, A], [B], "2 against 1"),
        ([A], [B, B], "1 against 2"),
    ],
)
def test_no_window_explains_it(tmp_path, own, twin, passes):
    evidence = codes(twins(tmp_path / "r", own, twin))["twins-differ"]
    assert f"in {passes} passes" in evidence


def test_twins_that_began_and_ended_a_window_apart_when_told_to(tmp_path):
    """Two requests, each obeyed a window later by the twin: two windows of 8 may differ."""
    assert "twins-differ" in codes(twins(tmp_path / "r", [A, A, A], [A, A, B]))
    told = {"control": 2}
    assert "twins-differ" not in codes(twins(tmp_path / "s", [A, A, A], [A, A, B], **told))
    assert "twins-differ" not in codes(twins(tmp_path / "t", [A, A], [A, A, A, A], **told))
    assert "twins-differ" in codes(twins(tmp_path / "u", [A, A], [A, A, A, A, A], **told))
    assert "twins-differ" in codes(twins(tmp_path / "v", [A, A, A], [B, B, B], **told))


def test_a_twin_whose_layer_never_ran(tmp_path):
    profile = twins(tmp_path / "r", [A, A], [{0: A[0]}, {0: A[0]}])
    (finding,) = [found for found in profile.findings() if found.code == "twins-differ"]
    assert finding.layers == (1,)


def test_twins_are_compared_when_both_were_stopped_and_nothing_is_selected(tmp_path):
    assert "twins-differ" not in codes(twins(tmp_path / "r", [A], [B], state="recording"))
    profile = twins(tmp_path / "s", [A], [B])
    assert "twins-differ" in codes(profile)
    assert "twins-differ" not in codes(profile.select(phase="decode"))


def test_twins_of_other_ranks_and_stages_are_not_compared(tmp_path):
    Rank(tmp_path / "r", role(0, 3)).steps(A).stop()
    Rank(tmp_path / "r", role(1, 3, dp=1, tp=1, owns_tokens=False)).steps(B).stop()
    Rank(tmp_path / "r", role(2, 3, pp=1, tp=1, owns_tokens=False)).steps(B).stop()
    assert "twins-differ" not in codes(routeprof.load(tmp_path / "r"))


def test_a_twin_is_compared_when_all_of_it_can_be_read(tmp_path):
    profile = twins(tmp_path / "r", [A, A, A], [A, A, B])
    assert "twins-differ" in codes(profile)
    parts = [tmp_path / f"r/rank-00001/part-00000{number}.parquet" for number in (0, 1)]
    whole = [part.read_bytes() for part in parts]
    for part in parts:
        part.write_bytes(b"x")
    assert "twins-differ" not in codes(profile)
    for part, data in zip(parts, whole, strict=True):
        part.write_bytes(data)
    assert "twins-differ" in codes(profile)
    for part in parts:
        part.unlink()
    found = codes(routeprof.load(tmp_path / "r"))
    assert "missing-parts" in found
    assert "twins-differ" not in found


# -- shown


def test_the_summary_shows_ranks(tmp_path):
    profile = routeprof.load(grid(tmp_path / "r"))
    text = summary_text(profile, width=120)
    assert "windows, 4 ranks" in text
    assert "stopped, twin" in text
    assert "(12)" in text
    assert [row["rank"] for row in summary_json(profile)["ranks"]] == [0, 1, 2, 3]
    Rank(tmp_path / "one").steps(A).stop()
    alone = routeprof.load(tmp_path / "one")
    assert "\nranks" not in summary_text(alone)
    assert json.loads(json.dumps(summary_json(alone)))["ranks"][0]["tokens"] == 4


def test_a_summary_of_many_ranks_shows_some(tmp_path):
    for rank in range(20):
        Rank(tmp_path / "r", role(rank, 20, dp=rank)).steps(A).stop()
    text = summary_text(routeprof.load(tmp_path / "r"))
    assert "… and 4 more; --json has them all" in text


def test_verbs_take_several_directories(tmp_path, capsys):
    paths = list(days(tmp_path))
    summary(paths, as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert [layer["tokens"] for layer in data["layers"]] == [12, 12]
    summary(paths)
    assert "2 recordings" in capsys.readouterr().out
    report(paths, tmp_path / "out", csv_only=True)
    assert (tmp_path / "out/layers.csv").read_bytes() == csv_text(
        routeprof.load(paths), "layers"
    ).encode()


def test_the_dashboard_follows_several_directories(tmp_path):
    paths = nodes(tmp_path, run="r")
    source = Source(*paths)
    profile, loaded = source.read().profile, routeprof.load(paths)
    assert profile is not None
    assert tables(profile) == tables(loaded)
    shutil.copytree(paths[0], tmp_path / "copy")
    assert "one is a copy" in Source(*paths, tmp_path / "copy").read().message


def test_what_happened_to_requests_is_said_once_an_engine(tmp_path):
    """Ranks 0 and 1 are twins of one engine, 2 and 3 of another: each pair saw the same."""
    directory = grid(tmp_path / "r")
    for rank, cached in enumerate([5, 5, 1200, 1200]):
        change(directory, rank, facts={"prefix_cached_tokens": cached})
    found = codes(routeprof.load(directory))
    assert "1,205 prompt tokens" in found["prefix-cached-tokens"]
    assert "preemptions" not in found
