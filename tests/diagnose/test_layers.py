"""Layers that differ: the worst is told of, those beyond the limit are named, no others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import routeprof
from routeprof.diagnose import DEFAULTS
from routeprof.diagnose.examine import examine
from routeprof.diagnose.finding import Finding
from routeprof.diagnose.overflow import overflow_gain
from routeprof.diagnose.placed import placement_gain
from routeprof.diagnose.question import Answer, Question
from routeprof.topology import RankRole
from routeprof.whatif.hardware import HARDWARE
from routeprof.whatif.layout import Layout
from routeprof.whatif.layout_sums import Setting
from routeprof.whatif.layouts import predict
from routeprof.whatif.sizes import sizes_of
from tests.diagnose.made import (
    EXPERTS,
    Step,
    apportioned,
    halves,
    moe,
    one_hot,
    record,
    steady,
)

EVEN = np.ones(EXPERTS)
FOUR = [moe(index) for index in (0, 1, 2, 5)]


def layered(shares: Sequence[np.ndarray], steps: int = 32, **facts: Any) -> list[Step]:
    """The same step again and again, each layer with shares of its own."""
    return [Step([apportioned(own, 512) for own in shares], **facts) for _ in range(steps)]


def answered(directory: Path, **ask: Any) -> Answer:
    return examine(Question(routeprof.load(directory), **ask), gains=False)


def only(answer: Answer, code: str) -> Finding:
    (finding,) = [one for one in answer.findings if one.code == code]
    return finding


def codes(answer: Answer, but: Sequence[str] = ("info",)) -> set[str]:
    return {one.code for one in answer.findings if one.severity not in but}


# -- skew


def test_the_hottest_layer_is_told_of(tmp_path: Path):
    shares = [one_hot(3.4, 2), one_hot(5.0, 7), EVEN, one_hot(4.0, 1)]
    answer = answered(record(tmp_path / "run", layered(shares), layers=FOUR))
    finding = only(answer, "hot-experts")
    assert finding.layers == (0, 1, 5)
    assert finding.evidence.startswith("in layer 1 expert 7 gets 5.00 times")
    assert "hot-cold" not in codes(answer, but=())  # they are hot already, and layer 2 is even


@pytest.mark.parametrize(("times", "asked"), [(1.0, False), (4.0, True)])
def test_a_cause_is_missed_only_where_there_is_skew(tmp_path: Path, times: float, asked: bool):
    answer = answered(record(tmp_path / "run", steady(one_hot(times))))
    assert ("narrow-input, model-skew" in answer.unjudged) == asked


def test_the_layer_with_most_dead_experts_is_told_of(tmp_path: Path):
    shares = [EVEN.copy() for _ in FOUR]
    for place, dead in ((1, 2), (2, 5), (3, 1)):
        shares[place][:dead] = 0
    finding = only(answered(record(tmp_path / "run", layered(shares), layers=FOUR)), "dead-experts")
    assert finding.layers == (1, 2, 5)
    assert finding.figures == {"dead_experts": 5}


@pytest.mark.parametrize("others", [1, 2, 3])
def test_the_cause_of_most_layers_is_the_finding_and_names_the_others(tmp_path: Path, others: int):
    """So many layers are hot for one tag at one expert each; the rest alike for all tags."""
    narrow = list(range(others))
    shares = {
        tag: [one_hot(4.0 + at, hot if at in narrow else 3) for at in range(4)]
        for tag, hot in (("code", 0), ("prose", 8), ("json", 12))
    }
    steps = [step for tag, own in shares.items() for step in layered(own, 16, tag=tag)]
    answer = answered(record(tmp_path / "run", steps, layers=FOUR))
    assert codes(answer) == {"narrow-input" if others == 3 else "model-skew"}
    (finding,) = [one for one in answer.findings if one.severity == "warning"]
    assert finding.layers == (0, 1, 2, 5)
    also = {
        1: "in layer 0 it differs by tag",
        2: "in layers 0–1 it differs by tag",
        3: "in layer 5 every tag is skewed, and so is the mix",
    }
    assert also[others] in finding.evidence
    assert f"{others if others == 3 else 4 - others} layers like that" in finding.evidence
    # The mix of three tags with another hot expert each.
    index = {1: 5, 2: 5, 3: 2}[others]
    assert finding.figures["layer"] == index


def test_a_collapse_needs_no_other_cause(tmp_path: Path):
    shares = np.full(EXPERTS, 0.1 / (EXPERTS - 2))
    shares[[3, 9]] = 0.45
    steps = [step for tag in "ab" for step in steady(shares, 16, tag=tag)]
    assert codes(answered(record(tmp_path / "run", steps))) == {"collapse"}


@pytest.mark.parametrize(("experts", "found"), [(4, False), (5, True)])
def test_two_of_four_experts_are_no_collapse(tmp_path: Path, experts: int, found: bool):
    shares = np.full(experts, 0.1 / (experts - 2))
    shares[:2] = 0.45
    layers = [moe(0, experts=experts), moe(1, experts=experts)]
    answer = answered(record(tmp_path / "run", steady(shares), layers=layers))
    assert ("collapse" in codes(answer)) == found


def test_the_cold_expert_is_looked_for_where_nothing_else_is_said(tmp_path: Path):
    cold = EVEN.copy()
    cold[4] = 0.2
    shares = [one_hot(4.0), cold, EVEN, cold]
    directory = record(tmp_path / "run", layered(shares), layers=FOUR)
    assert only(answered(directory), "hot-cold").layers == (1, 5)
    # Of fewer than 100 tokens the coldest is cold by chance: here of 96.
    few = record(tmp_path / "few", layered(shares, 3), layers=FOUR)
    assert "hot-cold" not in codes(answered(few), but=())


# -- drift


def test_the_layer_that_moved_most_is_told_of(tmp_path: Path):
    before = record(tmp_path / "before", layered([EVEN] * 4), layers=FOUR)
    shares = [halves(1.6), EVEN, halves(1.9), halves(1.7)]
    now = record(tmp_path / "now", layered(shares), layers=FOUR)
    answer = answered(now, since=routeprof.load(before))
    finding = only(answer, "drift-since")
    assert (finding.layers, finding.figures["layer"]) == ((0, 2, 5), 2)


@pytest.mark.parametrize(("before", "now"), [(7, 256), (256, 7)])
def test_few_tokens_on_either_side_are_no_evidence_of_drift(tmp_path: Path, before: int, now: int):
    """Eight steps of 7 tokens are seven assignments an expert."""
    earlier = record(tmp_path / "before", steady(EVEN, 8, before))
    later = record(tmp_path / "now", steady(halves(1.9), 8, now))
    answer = answered(later, since=routeprof.load(earlier))
    assert "tokens enough" in answer.unjudged["drift-since"]


# -- margins


def test_the_closest_margin_is_told_of_and_ranks_without_gates_are_left_out(tmp_path: Path):
    for rank, margin in ((0, 0.002), (1, None)):
        role = RankRole(rank, 2, dp=rank, ep=rank)
        record(tmp_path / "run", steady(EVEN), role=role, margin=margin)
    finding = only(answered(tmp_path / "run"), "low-margin")
    assert finding.figures["margin"] == pytest.approx(0.002)
    wide = [moe(0, experts=8), moe(1)]
    steps = layered([np.ones(8), EVEN])
    finding = only(
        answered(record(tmp_path / "wide", steps, layers=wide, margin=0.003)), "low-margin"
    )
    # 0.003 of a probability is 0.024 of an even share of 8, and 0.048 of one of 16.
    assert finding.layers == (0, 1)
    assert finding.figures["layer"] == 0
    assert finding.figures["margin_of_even_share"] == pytest.approx(0.024)


# -- capacity


def test_only_layers_that_drop_are_blamed_for_what_was_dropped(tmp_path: Path):
    counts = apportioned(EVEN, 900)
    layers = [moe(0), moe(1, drops=True)]
    steps = [Step([counts, counts], invalid=100)] * 8
    answer = answered(record(tmp_path / "run", steps, layers=layers))
    finding = only(answer, "overflow")
    assert finding.layers == (1,)
    assert finding.figures["overflow_rate"] == pytest.approx(0.1)
    assert only(answer, "invalid-ids").layers == (0,)


def test_the_layer_that_would_overflow_most_is_told_of(tmp_path: Path):
    limits = DEFAULTS.changed(capacity_factor=1.25)
    shares = [one_hot(2.0), one_hot(2.9), EVEN, one_hot(2.5)]
    directory = record(tmp_path / "run", layered(shares), layers=FOUR)
    finding = only(answered(directory, limits=limits), "overflow")
    assert finding.layers == (0, 1, 5)
    slots = np.ceil(1.25 * 512 / EXPERTS)
    over = np.maximum(apportioned(one_hot(2.9), 512) - slots, 0).sum() / 512
    assert finding.figures["overflow_rate"] == pytest.approx(over)
    assert "of layer 1;" in finding.evidence


def test_a_factor_that_is_only_bounded_is_enough_in_any_case(tmp_path: Path):
    """Level windows, several steps in each: 2.0 is the first recorded factor that drops less."""
    random = np.random.default_rng(3)
    shares = one_hot(1.9) / EXPERTS
    steps = [Step(random.multinomial(512, shares, 2)) for _ in range(24)]
    directory = record(tmp_path / "run", steps, level="windows", windows=3)
    text = overflow_gain(Question(routeprof.load(directory), DEFAULTS))
    factor = float(text.split()[3])
    assert "or less keeps" in text
    counts = np.array([step.counts for step in steps])
    slots = np.ceil(factor * 512 / EXPERTS)
    over = np.maximum(counts - slots, 0).sum(axis=(0, 2))
    assert (over / counts.sum(axis=(0, 2))).max() <= DEFAULTS.max_overflow
    empty = np.maximum(slots - counts, 0).sum() / (slots * counts.size)
    assert f"with {empty:.0%} of the slots empty" in text


# -- ranks


def test_only_layers_with_a_full_rank_are_named(tmp_path: Path):
    full = np.repeat([1.9, 0.7, 0.7, 0.7], 4)
    shares = [full, EVEN, full, EVEN]
    directory = record(tmp_path / "run", layered(shares), layers=FOUR)
    finding = only(answered(directory, gpus=4), "rank-imbalance")
    assert finding.layers == (0, 2)
    assert finding.figures["rank_load_over_mean"] == pytest.approx((1.9 + 1) / 2, abs=0.01)
    # On average over the layers it is below the limit, in one layer above it.
    shares = [full, EVEN, EVEN, EVEN, EVEN]
    many = record(tmp_path / "many", layered(shares), layers=[moe(at) for at in range(5)])
    answer = answered(many, gpus=4)
    assert "rank-imbalance" not in codes(answer)
    assert "rank-imbalance" not in answer.unjudged


@pytest.mark.parametrize(("tokens", "judged"), [(31, False), (32, True)])
def test_few_tokens_are_no_evidence_of_a_full_rank(tmp_path: Path, tokens: int, judged: bool):
    """Four ranks with 16 assignments each need 32 tokens with two experts."""
    full = np.repeat([3.7, 0.1, 0.1, 0.1], 4)
    answer = answered(record(tmp_path / "run", steady(full, 1, tokens)), gpus=4)
    assert ("rank-imbalance" in codes(answer)) == judged
    assert ("tokens enough for 4 ranks" in answer.unjudged.get("rank-imbalance", "")) != judged


def test_a_placement_on_ranks_that_do_not_divide_the_experts(tmp_path: Path):
    profile = routeprof.load(record(tmp_path / "run", steady(np.linspace(2, 0.1, EXPERTS))))
    text = placement_gain(Question(profile, gpus=3))
    assert "with 18 slots" in text
    assert "with 21 slots" in text


def test_replicas_help_where_moving_experts_does_not(tmp_path: Path):
    """A rank for each expert: only a second copy of the hot one makes its rank less full."""
    profile = routeprof.load(record(tmp_path / "run", steady(one_hot(6.0))))
    text = placement_gain(Question(profile, gpus=EXPERTS))
    assert text.startswith("the fullest rank would have 6.00 with 16 slots or ")
    assert "instead of 6.00 times the mean" in text


def test_a_rank_that_wrote_nothing_leaves_its_node_open(tmp_path: Path):
    ids = np.array([[0, 5], [9, 13]] * 8)
    counts = np.bincount(ids.ravel(), minlength=EXPERTS)
    for rank in (0, 1, 3):
        record(
            tmp_path / "run",
            [Step([counts, counts], ids=ids)] * 4,
            level="tokens",
            role=RankRole(rank, 4, ep=rank, dp=rank),
            host=f"node{rank // 2}",
        )
    assert "record them all" in answered(tmp_path / "run").unjudged["cross-node"]


# -- time


def time_figures(directory: Path, **ask: Any) -> dict[str, Any]:
    return dict(only(answered(directory, hardware="h100", **ask), "slower-than-dense").figures)


def test_time_is_of_decode_alone(tmp_path: Path):
    decode = steady(one_hot(3.0), 8, 20)
    alone = time_figures(record(tmp_path / "decode", decode))
    both = decode + steady(EVEN, 8, 4000, phase="prefill")
    assert time_figures(record(tmp_path / "both", both)) == pytest.approx(alone)


@pytest.mark.parametrize("hosts", [1, 2])
def test_communication_is_dispatch_and_combine_over_the_nodes(tmp_path: Path, hosts: int):
    random = np.random.default_rng(4)
    for rank in range(4):
        steps = []
        for _ in range(3):
            ids = np.array([random.permutation(EXPERTS)[:2] for _ in range(24)])
            counts = np.bincount(ids.ravel(), minlength=EXPERTS)
            steps.append(Step([counts, counts], ids=ids))
        record(
            tmp_path / "run",
            steps,
            level="tokens",
            role=RankRole(rank, 4, ep=rank, dp=rank),
            host=f"node{rank * hosts // 4}",
        )
    figures = time_figures(tmp_path / "run")
    profile = routeprof.load(tmp_path / "run")
    setting = Setting(sizes_of(profile), HARDWARE["h100"])
    (row,) = predict(profile, [Layout(1, 4, 4, 1, hosts)], setting).rows
    (other,) = predict(profile, [Layout(1, 4, 4, 1, 3 - hosts)], setting).rows
    assert figures["communication"] == pytest.approx(row.dispatch_ms + row.combine_ms)
    assert row.combine_ms > 0
    assert row.dispatch_ms != pytest.approx(other.dispatch_ms)
