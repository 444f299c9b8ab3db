"""Figures of findings and gains against brute force."""

from __future__ import annotations

from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.compare.stretches import MOST_STRETCHES, stretches
from routeprof.diagnose import findings
from routeprof.diagnose.batches import MIXED, batch_gain, mixing_gain
from routeprof.diagnose.causes import LayerSkew, skew_by_tag
from routeprof.diagnose.examine import RULES, SKEW, examine
from routeprof.diagnose.finding import Finding
from routeprof.diagnose.overflow import overflow_gain
from routeprof.diagnose.placed import placement_gain
from routeprof.diagnose.question import Question
from routeprof.diagnose.speed import _even, _remedy
from routeprof.diagnose.steps import _chance
from routeprof.diagnose.thresholds import DEFAULTS
from routeprof.metrics.ranks import rank_of_slot
from routeprof.topology import RankRole
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.comparison import compare
from routeprof.whatif.hardware import HARDWARE
from tests.diagnose.made import EXPERTS, MODEL, Step, halves, moe, one_hot, record, steady
from tests.report.conftest import build


def drawn(seed: int, shares, steps: int, tokens: int, **facts) -> list[Step]:
    """Steps of two layers that draw from the same shares."""
    random = np.random.default_rng(seed)
    shares = np.array(shares) / np.sum(shares)
    return [Step(random.multinomial(2 * tokens, shares, 2), **facts) for _ in range(steps)]


def found(directory: Path, code: str, **ask) -> Finding:
    question = Question(routeprof.load(directory), hardware="h100", **ask)
    (finding,) = [one for one in examine(question).findings if one.code == code]
    return finding


# -- stretches


@pytest.mark.parametrize("level", ["windows", "steps"])
def test_stretches_add_up_to_the_counts_in_the_order_of_time(tmp_path: Path, level: str):
    random = np.random.default_rng(0)
    kinds = [("decode", "a"), ("prefill", "a"), ("decode", None)]
    steps = [
        Step(random.integers(0, 40, (2, EXPERTS)) * 2, *kinds[random.integers(3)])
        for _ in range(150)
    ]
    profile = routeprof.load(record(tmp_path / "run", steps, level=level))
    made = stretches(profile)
    assert set(made) == {(kind, layer) for kind in kinds for layer in (0, 1)}
    for (key, layer), loads in made.items():
        own = [np.array(one.counts[layer]) for one in steps if (one.phase, one.tag) == key]
        assert len(loads) == min(len(own), MOST_STRETCHES)
        groups = [
            [place for place in range(len(own)) if place * len(loads) // len(own) == number]
            for number in range(len(loads))
        ]
        expected = [sum(own[place] for place in group) for group in groups]
        np.testing.assert_array_equal(loads, expected)


def test_stretches_of_a_selection(tmp_path: Path):
    steps = drawn(0, np.ones(EXPERTS), 20, 64, tag="a") + drawn(1, np.ones(EXPERTS), 9, 64)
    profile = routeprof.load(record(tmp_path / "run", steps, level="windows"))
    assert set(stretches(profile.select(tag="a"))) == {(("decode", "a"), 0), (("decode", "a"), 1)}
    part = stretches(profile.select(between=(1000.0, 1007.5)))
    np.testing.assert_array_equal(
        part[("decode", "a"), 0].sum(0), sum(np.array(one.counts[0]) for one in steps[:7])
    )


# -- noise


@pytest.mark.parametrize("level", ["windows", "steps"])
def test_what_does_not_change_is_seldom_called_drift_or_narrow(tmp_path: Path, level: str):
    """Hot experts throughout, and tags that mean nothing; no limit but noise."""
    limits, shares = DEFAULTS.changed(drift=0.0), one_hot(3.4)
    alarms = 0
    for seed in range(30):
        steps = drawn(seed, shares, 40, 64, tag="a") + drawn(seed + 100, shares, 40, 64, tag="b")
        before = record(
            tmp_path / f"{seed}-", drawn(seed + 200, shares, 30, 64, tag="a"), level=level
        )
        now = record(tmp_path / str(seed), steps, level=level)
        question = Question(routeprof.load(now), limits, since=routeprof.load(before))
        codes = {one.code for one in examine(question, gains=False).findings}
        assert "model-skew" in codes
        assert "narrow-input" not in codes
        alarms += len(codes & {"drift-since", "drift-within"})
    # Each of 60 questions may be wrong with a chance of 0.05: 8 or fewer in 99.5 % of the cases.
    assert alarms <= 8


def test_drift_is_not_the_mix_of_traffic(tmp_path: Path):
    """Other shares of the same two kinds; each routes as before."""
    code, prose = one_hot(2.5, 1), one_hot(2.5, 9)
    before = drawn(0, code, 60, 64, tag="code") + drawn(1, prose, 20, 64, tag="prose")
    after = drawn(2, code, 20, 64, tag="code") + drawn(3, prose, 60, 64, tag="prose")
    question = Question(
        routeprof.load(record(tmp_path / "after", after)),
        since=routeprof.load(record(tmp_path / "before", before)),
    )
    assert not [one for one in examine(question).findings if one.code.startswith("drift")]


def test_too_few_steps_are_no_evidence_of_drift(tmp_path: Path):
    steps = steady(halves(1.7), 3) + steady(halves(0.3), 3)
    answer = examine(Question(routeprof.load(record(tmp_path / "run", steps))))
    assert "record longer" in answer.unjudged["drift-within"]
    assert not [one for one in answer.findings if one.severity == "warning"]


def test_few_tokens_are_no_evidence_of_skew(tmp_path: Path):
    """Of one token two experts have everything, of eight some have a multiple of the mean."""
    random = np.random.default_rng(12)
    limit, even = DEFAULTS.min_load, np.full(EXPERTS, 1 / EXPERTS)
    few, enough = (random.multinomial(round(n * EXPERTS), even, 4000) for n in (1, limit))
    hot = [(own.max(axis=1) > 3 * own.mean(axis=1)).mean() for own in (few, enough)]
    assert hot[0] > 0.1 > hot[1] == 0
    for tokens in (1, 127, 128):  # 128 tokens with two experts each are 16 for each of 16
        directory = record(tmp_path / str(tokens), steady(one_hot(7.0), 1, tokens))
        answer = examine(Question(routeprof.load(directory)), gains=False)
        codes = {one.code for one in answer.findings if one.severity != "info"}
        assert codes == ({"hot-experts"} if tokens == 128 else set())
        assert (SKEW in answer.unjudged) == (tokens < 128)
        quick = {one.code for one in findings(routeprof.load(directory))}
        assert codes == quick & {"hot-experts", "collapse"}
    counts = [[*([0] * 14), 128, 128], [*([0] * 14), 127, 127]]
    directory = record(tmp_path / "collapsed", [Step(counts)])
    answer = examine(Question(routeprof.load(directory)), gains=False)
    (collapse,) = [one for one in answer.findings if one.code == "collapse"]
    assert collapse.layers == (0,)
    assert "which layer 1 lacks" in answer.unjudged[SKEW]


@pytest.mark.parametrize("level", ["windows", "steps"])
def test_small_steps_are_uneven_by_chance(tmp_path: Path, level: str):
    """An even router: of four tokens' eight choices one expert of 16 often gets three."""
    random = np.random.default_rng(11)

    def counts() -> np.ndarray:
        ids = np.argsort(random.random((2, 4, EXPERTS)), axis=2)[:, :, :2].reshape(2, 8)
        return np.stack([np.bincount(own, minlength=EXPERTS) for own in ids])

    directory = record(tmp_path / "run", [Step(counts()) for _ in range(300)], level=level)
    profile = routeprof.load(directory)
    assert profile.layers()["step_imbalance_p95"].min() > 3
    question = Question(profile)
    assert "step-skew" not in {one.code for one in examine(question, gains=False).findings}
    drawn = [float(counts()[0].max() * 2) for _ in range(4000)]
    chance = _chance(question, 0, profile.info.layers[0])
    assert chance == pytest.approx(np.quantile(drawn, 0.95), abs=2.01)  # whole assignments


def test_another_model_cannot_be_compared(tmp_path: Path):
    ours = routeprof.load(record(tmp_path / "ours", steady(np.ones(EXPERTS))))
    for number, facts in enumerate(({"experts": 8}, {"top_k": 4})):
        layers = [moe(0, **facts), moe(1, **facts)]
        shares = np.ones(facts.get("experts", EXPERTS))
        theirs = record(tmp_path / str(number), steady(shares), layers=layers)
        answer = examine(Question(ours, since=routeprof.load(theirs)))
        assert "other layers, experts or top-k" in answer.unjudged["drift-since"]


def test_without_tokens_nothing_is_judged(tmp_path: Path):
    answer = examine(Question(routeprof.load(record(tmp_path / "run", [])), gpus=4))
    assert [one.code for one in answer.findings] == ["nothing-captured"]
    assert set(answer.unjudged) == set(RULES)


def test_a_profile_in_memory_has_no_time_and_no_ranks():
    """Layers that were not captured, of different width, and no files."""
    random = np.random.default_rng(0)
    layers = [moe(0, experts=8), moe(1, experts=8), moe(2, unsupported="unknown")]
    steps = {("decode", "a"): random.integers(20, 30, (6, 3, 8))}
    answer = examine(Question(build(layers, steps, silent=[1]), gpus=4, hardware="h100"))
    codes = {one.code for one in answer.findings}
    assert {"silent-layers", "unsupported-layers"} <= codes
    assert not codes & {"rank-imbalance", "drift-within", "narrow-input"}


# -- causes


def test_mixed_evenly_is_the_mean_of_shares_whatever_the_traffic(tmp_path: Path):
    """Nine in ten tokens are code, which makes the sum as skewed as code alone."""
    steps = steady(one_hot(4.0, 2), 45, tag="code") + steady(one_hot(1.0), 5, tag="prose")
    question = Question(routeprof.load(record(tmp_path / "run", steps)))
    one = skew_by_tag(question)[0]
    assert one.mixed == pytest.approx((4 + 1) / 2, abs=0.02)
    assert one.cause(question.limits) == "input"
    assert found(tmp_path / "run", "narrow-input").layers == (0, 1)


def test_the_input_is_not_blamed_where_mixing_would_not_help(tmp_path: Path):
    steps = steady(one_hot(3.2, 2), 16, tag="code") + steady(one_hot(2.9, 2), 16, tag="prose")
    (code,) = {
        one.code
        for one in examine(Question(routeprof.load(record(tmp_path / "run", steps)))).findings
        if one.severity == "warning"
    }
    assert code == "hot-experts"


CAUSES = [
    # worst, least, mixed, tags, sharing, divergence, noise
    ((2.9, 2.0, 1.5, 2, 1, 0.3, 0.01), "none"),
    ((4.0, 3.5, 3.4, 2, 2, 0.3, 0.01), "model"),
    ((4.0, 2.5, 3.4, 2, 2, 0.01, 0.02), "model"),  # the best tag differs by chance
    ((3.1, 2.8, 2.95, 2, 2, 0.01, 0.02), "unclear"),  # by chance above the limit
    ((4.0, 2.5, 1.8, 2, 2, 0.01, 0.02), "unclear"),  # too little to say
    ((4.0, 3.5, 2.1, 2, 1, 0.3, 0.01), "input"),
    ((4.0, 3.5, 2.1, 2, 1, 0.3, float("nan")), "input"),
    ((6.0, 6.0, 3.3, 2, 1, 0.3, 0.01), "input"),  # two kinds with a hot expert each
    ((4.0, 2.5, 3.9, 2, 2, 0.3, 0.01), "unclear"),  # mixing would not help
]


@pytest.mark.parametrize(("figures", "cause"), CAUSES)
def test_causes(figures: tuple, cause: str):
    worst, least, mixed, tags, sharing, divergence, noise = figures
    one = LayerSkew(0, "code", worst, least, mixed, tags, sharing, divergence, noise)
    assert one.cause(DEFAULTS) == cause


def test_two_kinds_with_a_hot_expert_each_are_no_model_skew(tmp_path: Path):
    """Their mix is above the limit too, as there are but two of them."""
    steps = steady(one_hot(6.5, 0), 16, tag="code") + steady(one_hot(6.5, 8), 16, tag="prose")
    finding = found(record(tmp_path / "run", steps), "narrow-input")
    assert float(finding.figures["imbalance_ratio_mixed"]) > 3
    assert (finding.figures["tags_sharing_hottest"], finding.figures["tags"]) == (1, 2)


def test_very_narrow_input_is_one_finding(tmp_path: Path):
    """Hot steps are not told of again where the cause of skew is known."""
    steps = [
        step
        for number in range(8)
        for step in steady(one_hot(9.0, 2 * number), 8, tag=f"kind {number}")
    ]
    answer = examine(Question(routeprof.load(record(tmp_path / "run", steps))))
    assert {one.code for one in answer.findings if one.severity == "warning"} == {"narrow-input"}


# -- gains


def test_what_mixing_brings_is_the_hypergeometric_mean(tmp_path: Path):
    """Two tags with a rank of their own, 32 requests each, judged half by half."""
    steps = [
        Step(
            [32 * np.bincount(pair, minlength=EXPERTS)] * 2,
            tag=tag,
            ids=np.array([pair] * 32),
            request=request,
            position=position,
        )
        for tag, pair, request in (("a", (0, 1), 0), ("b", (8, 9), 32))
        for position in range(3)
    ]
    profile = routeprof.load(record(tmp_path / "run", steps, level="tokens"))
    said = mixing_gain(Question(profile, gpus=2))
    # Of 16 requests of each tag, so many ways to draw a batch with k of the first.
    ways = {k: comb(16, k) * comb(16, MIXED - k) for k in range(MIXED + 1)}
    waits = sum(max(k, MIXED - k) * n for k, n in ways.items()) / sum(ways.values()) / (MIXED / 2)
    assert said.startswith(f"decode in batches of {MIXED} mixed at random would wait ")
    assert float(said.split("would wait ")[1].split()[0]) == pytest.approx(2 / waits, abs=0.05)
    assert "the slowest of 2 ranks (95 % interval" in said


@pytest.mark.parametrize("tokens", [8, 64])
def test_the_batch_that_fills_a_tile(tmp_path: Path, tokens: int):
    """Steps of the batch that is recommended are drawn, and their small GEMMs counted."""
    shares = 1 / np.arange(1, EXPERTS + 1) ** 0.5
    # Prefill, which fills its tiles, says nothing of decode.
    steps = drawn(3, shares, 200, tokens) + drawn(8, shares, 200, 2000, phase="prefill")
    directory = record(tmp_path / "run", steps, level="windows")
    text = batch_gain(Question(routeprof.load(directory)))
    times, share = int(text.split()[0]), float(text.split("would leave ")[1].split("%")[0]) / 100

    def small(factor: int) -> float:
        counts = np.concatenate([one.counts for one in drawn(4, shares, 2000, tokens * factor)])
        return float(((counts > 0) & (counts < 16)).sum() / (counts > 0).sum())

    assert small(times) == pytest.approx(share, abs=0.02)
    assert small(times) < 0.51
    assert small(times - 1) > 0.49
    assert f"about {tokens * times} tokens" in text


def test_the_factor_that_keeps_overflow_low(tmp_path: Path):
    directory = record(tmp_path / "run", drawn(5, one_hot(2.0), 50, 64))
    text = overflow_gain(Question(routeprof.load(directory), DEFAULTS.changed(max_overflow=0.05)))
    factor = float(text.split()[3])
    counts = np.array([one.counts for one in drawn(5, one_hot(2.0), 50, 64)])

    def rate(factor: float) -> float:
        slots = np.ceil(round(factor * 10_000) * 128 / 16 / 10_000)
        over = np.maximum(counts - slots, 0).sum(axis=(0, 2)) / counts.sum(axis=(0, 2))
        return float(over.max())

    assert rate(factor) <= 0.05 < rate(factor - 0.0001)


def test_what_a_placement_would_bring_is_what_whatif_says(tmp_path: Path):
    shares = np.repeat([1.7, 0.9, 0.8, 0.6], 4)
    profile = routeprof.load(record(tmp_path / "run", drawn(6, shares, 40, 128)))
    text = placement_gain(Question(profile, gpus=4))
    for slots in (16, 20):
        held_out = compare(profile, Cluster.even(4, slots), effort="low").held_out
        assert held_out is not None
        assert f"{held_out.means()['routeprof']:.2f} with {slots} slots" in text
    assert f"instead of {held_out.means()['before']:.2f} times the mean, on later steps" in text


def test_a_placement_that_would_not_help_is_not_praised(tmp_path: Path):
    """Cold experts come together beside the hottest, and are the hot ones later."""
    first, second = np.full(EXPERTS, 1.7), np.full(EXPERTS, 1 / 3)
    first[1], first[::4], second[::4] = 6.0, 0.1, 3.0
    steps = drawn(6, first, 20, 128) + drawn(7, second, 20, 128)
    profile = routeprof.load(record(tmp_path / "run", steps))
    assert placement_gain(Question(profile, gpus=4)).startswith("no placement found helps")


# -- nodes


def test_sends_between_nodes_are_counted_token_by_token(tmp_path: Path):
    random = np.random.default_rng(8)
    sends = cross = relayed = tokens = 0
    for rank in range(4):
        steps = []
        for _ in range(5):
            ids = np.array([random.permutation(EXPERTS)[:2] for _ in range(40)])
            counts = np.bincount(ids.ravel(), minlength=EXPERTS)
            steps.append(Step([counts, counts], ids=ids))
            for token in ids // 4:  # experts in order on four ranks
                reached = set(token.tolist()) - {rank}
                away = {one for one in reached if one // 2 != rank // 2}
                sends, cross = sends + 2 * len(reached), cross + 2 * len(away)
                relayed, tokens = relayed + 2 * bool(away), tokens + 2
        place = RankRole(rank, 4, ep=rank, dp=rank)
        record(tmp_path / "run", steps, level="tokens", role=place, host=f"node{rank // 2}")
    finding = found(tmp_path / "run", "cross-node")
    assert finding.figures["cross_node_share"] == pytest.approx(cross / sends)
    assert finding.figures["cross_node_sends_per_token"] == pytest.approx(cross / tokens)
    assert finding.figures["cross_node_share_at_random"] == pytest.approx(2 / 3)
    assert f"{relayed / tokens:.2f} sends" in finding.gain


# -- time


def test_time_against_a_loop_over_experts(tmp_path: Path):
    gpu, weights = HARDWARE["h100"], 3 * 2048 * 1024
    steps = drawn(9, one_hot(3.0), 12, 20)
    finding = found(record(tmp_path / "run", steps), "slower-than-dense")
    figures = finding.figures

    def gemm(tokens: float, size: float = weights) -> float:
        reading = size * 2 / gpu.memory if tokens else 0.0
        return max(2 * tokens * size / gpu.flops, reading)

    loads = [np.array(layer) for step in steps for layer in step.counts]

    def ratio(times: int) -> float:
        ours = sum(gemm(times * float(count)) for layer in loads for count in layer)
        return ours / sum(gemm(times * 20, 2 * weights) for _ in loads)

    dense = sum(gemm(20, 2 * weights) for _ in loads)
    even = sum(EXPERTS * gemm(40 / EXPERTS) for _ in loads)
    actual = sum(gemm(float(count)) for layer in loads for count in layer)
    assert figures["dense_ms"] == pytest.approx(dense / 12 * 1e3)
    assert figures["small_gemms"] == pytest.approx((even - dense) / 12 * 1e3)
    assert figures["skew"] == pytest.approx((actual - even) / 12 * 1e3)
    assert figures["communication"] == 0
    assert figures["ratio"] == pytest.approx(actual / dense)
    assert figures["cause"] == "small_gemms"
    assert ratio(64) > 1.5 > ratio(256)
    assert (
        finding.gain
        == f"at 256 times the batch, if it routes alike, {ratio(256):.1f} times as long"
    )


def test_experts_in_fp8_are_read_and_computed_as_such(tmp_path: Path):
    """One byte a weight, and the rate of 8 bits."""
    gpu, weights = HARDWARE["h100"], 3 * 2048 * 1024
    steps = drawn(10, one_hot(8.0), 12, 400)
    loads = [np.array(layer) for step in steps for layer in step.counts]
    model = replace(MODEL, config={"quantization_config": {"quant_method": "fp8"}})
    half = found(record(tmp_path / "run", steps), "slower-than-dense").figures
    byte = found(record(tmp_path / "fp8", steps, model=model), "slower-than-dense").figures
    for figures, flops, each in ((half, gpu.flops, 2), (byte, gpu.flops_8bit, 1)):
        reading = weights * each / gpu.memory
        actual = sum(max(2 * n * weights / flops, reading) for layer in loads for n in layer)
        dense = len(loads) * max(2 * 400 * 2 * weights / flops, 2 * reading)
        assert figures["dense_ms"] == pytest.approx(dense / 12 * 1e3)
        assert figures["ratio"] == pytest.approx(actual / dense)


def test_a_larger_batch_is_not_advised_where_what_is_sent_grows_with_it(tmp_path: Path):
    random = np.random.default_rng(11)
    ids = [np.array([random.permutation(EXPERTS)[:2] for _ in range(4096)]) for _ in range(4)]
    counts = [np.bincount(one.ravel(), minlength=EXPERTS) for one in ids]
    steps = [Step([load, load], ids=one) for one, load in zip(ids, counts, strict=True)]
    finding = found(record(tmp_path / "run", steps, level="tokens"), "slower-than-dense", gpus=4)
    assert finding.figures["cause"] == "communication"
    assert finding.gain.startswith("a larger batch would not help")
    assert _remedy("small_gemms", 2.1, {4: 2.7, 16: 2.1}).endswith("routeprof whatif layout")
    assert _remedy("small_gemms", 2.1, {4: 2.7, 16: 2.0}).endswith("a larger batch")


def test_on_ranks_the_slowest_counts_and_communication_needs_tokens(tmp_path: Path):
    gpu, weights = HARDWARE["h100"], 3 * 2048 * 1024
    shares = np.repeat([3.7, 0.1, 0.1, 0.1], 4)
    steps = drawn(10, shares, 10, 4000)
    finding = found(record(tmp_path / "run", steps), "slower-than-dense", gpus=4)
    seconds = [
        max(
            sum(max(2 * n * weights / gpu.flops, weights * 2 / gpu.memory * (n > 0)) for n in rank)
            for rank in np.array(layer).reshape(4, 4)
        )
        for step in steps
        for layer in step.counts
    ]
    dense = 2 * 4000 / 4 * 2 * weights / gpu.flops
    assert finding.figures["ratio"] == pytest.approx(np.mean(seconds) / dense, rel=1e-6)
    assert finding.figures["cause"] == "skew"
    assert np.isnan(float(finding.figures["communication"]))
    assert "communication not known" in finding.evidence


def test_few_tokens_go_to_an_expert_each_rank_by_rank():
    spread = _even(np.array([[3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 3]]), rank_of_slot(6, 3))
    assert spread.tolist() == [[1, 0, 1, 0, 1, 0], [3, 3, 3, 3, 3, 3]]


def test_a_model_of_unknown_size_has_no_time(tmp_path: Path):
    model = replace(MODEL, expert_width=None)
    directory = record(tmp_path / "run", steady(np.ones(EXPERTS)), model=model)
    answer = examine(Question(routeprof.load(directory), hardware="h100"))
    assert "how wide an expert is" in answer.unjudged["slower-than-dense"]
