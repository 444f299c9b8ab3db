"""Predicted overflow, padding and memory against counting slot by slot, and bounds against both."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import routeprof
from routeprof.errors import LevelRequiredError, UsageError
from routeprof.metrics.overflow import RoutedSteps
from routeprof.metrics.quantiles import histogram_bin
from routeprof.sample_data import RECORDINGS_DIR
from routeprof.topology import RankRole
from routeprof.whatif.advice import recommend
from routeprof.whatif.capacity import curve, smallest_factor, smallest_factors, worst
from routeprof.whatif.capacity_rules import RULES, CapacityRule, capacity_rule
from routeprof.whatif.evidence import evidence
from routeprof.whatif.outcome import Steps, Sums, together
from tests.profile.by_hand import SEEN, counts_of, of, record, some_steps

RECORDED = (1.0, 1.25, 1.5, 2.0)
FACTORS = [0.1, 0.37, 1.0, 1.1, 1.25, 1.6, 2.0, 3.3, 50.0]
RULE_NAMES = ["ceil", "floor", "deepspeed", "floor at least 3"]

rules = st.sampled_from(
    [RULES["ceil"], RULES["floor"], RULES["deepspeed"], CapacityRule("floor", "floor", 3)]
)
factors = st.integers(1, 90).map(lambda twentieths: Fraction(twentieths, 20))


def rule_of(name):
    return CapacityRule("floor", "floor", 3) if name == "floor at least 3" else capacity_rule(name)


@st.composite
def routed_steps(draw):
    experts = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, experts))
    rows = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = random.dirichlet(np.full(experts, draw(st.sampled_from([0.3, 1.0, 50.0]))))
    # An expert may be chosen twice by a token, as in models that do not forbid it.
    ids = [random.choice(experts, (number, top_k), p=skew) for number in rows]
    counts = np.array([np.bincount(one.ravel(), minlength=experts) for one in ids])
    return RoutedSteps(counts, np.array(rows), top_k)


def fill(steps, factor, rule):
    """Overflow, kept, slots, and slots of the largest step, slot by slot."""
    lost = kept = paid = peak = 0
    for counts, tokens in zip(steps.counts.tolist(), steps.tokens.tolist(), strict=True):
        exact = Fraction(factor) * tokens * steps.top_k / steps.experts
        slots = max(rule.minimum, ceil(exact) if rule.rounding == "ceil" else floor(exact))
        for count in counts:
            for place in range(count):
                kept, lost = (kept + 1, lost) if place < slots else (kept, lost + 1)
        paid += slots * steps.experts
        peak = max(peak, slots * steps.experts)
    return lost, kept, paid, peak


def sums_of(steps):
    """The same steps as level windows keeps them."""
    recorded = {Fraction(factor): fill(steps, factor, RULES["ceil"]) for factor in RECORDED}
    ratios = [Fraction(int(one.max()) * len(one), int(one.sum())) for one in steps.counts]
    bins = histogram_bin([float(ratio) for ratio in ratios])
    return Sums(
        experts=steps.experts,
        top_k=steps.top_k,
        steps=len(steps.tokens),
        tokens=int(steps.tokens.sum()),
        assignments=int(steps.counts.sum()),
        cells=int((steps.counts > 0).sum()),
        dropped=0,
        overflow={factor: made[0] for factor, made in recorded.items()},
        slots={factor: made[2] for factor, made in recorded.items()},
        largest=(ceil(steps.tokens.mean()), int(steps.tokens.sum())),
        enough=max(ratios),
        spread=tuple(
            (min(2 ** ((place + 1) / 32), float(max(ratios))), tokens)
            for place, tokens in zip(bins.tolist(), steps.tokens.tolist(), strict=True)
        ),
    )


# -- from steps


@given(steps=routed_steps(), factor=factors, rule=rules)
def test_every_rule_equals_filling_slots_one_by_one(steps, factor, rule):
    lost, kept, paid, peak = fill(steps, factor, rule)
    made = Steps(steps).outcome(factor, rule)
    assert made.is_exact
    assert (made.overflow[0], made.kept[0], made.slots[0], made.peak[0]) == (lost, kept, paid, peak)
    assert made.overflow_rate[0] == lost / (int(steps.tokens.sum()) * steps.top_k)
    if paid:
        assert made.padding_rate == ((paid - kept) / paid,) * 2
    else:
        assert np.isnan(made.padding_rate).all()


@given(layers=st.lists(routed_steps(), min_size=1, max_size=3), factor=factors, rule=rules)
def test_layers_together_are_their_sums(layers, factor, rule):
    made = together([Steps(one).outcome(factor, rule) for one in layers])
    each = np.array([fill(one, factor, rule) for one in layers])
    assert (made.overflow[0], made.kept[0], made.slots[0]) == tuple(each[:, :3].sum(0))
    assert made.peak[0] == each[:, 3].max()
    assert made.routed == sum(int(one.tokens.sum()) * one.top_k for one in layers)


# -- from sums


@given(steps=routed_steps(), factor=factors, rule=rules)
def test_bounds_hold_what_is_true(steps, factor, rule):
    truth, made = Steps(steps).outcome(factor, rule), sums_of(steps).outcome(factor, rule)
    for name in ("overflow", "kept", "slots", "peak", "overflow_rate"):
        low, high = getattr(made, name)
        assert low <= getattr(truth, name)[0] <= high, name
    low, high = made.padding_rate
    if truth.slots[0]:
        assert low <= truth.padding_rate[0] <= high


def test_the_spread_of_imbalance_tightens_bounds():
    random = np.random.default_rng(0)
    counts = random.multinomial(64, np.full(8, 1 / 8), 200)
    counts[0] = [64, *[0] * 7]  # one step that needs the factor 8
    steps = RoutedSteps(counts, np.full(200, 64), 1)
    made = sums_of(steps)
    factor, rule = Fraction(3), RULES["ceil"]
    truth = Steps(steps).outcome(factor, rule).overflow[0]
    with_spread = made.outcome(factor, rule).overflow
    without = replace(made, spread=()).outcome(factor, rule).overflow
    assert with_spread[0] <= truth == with_spread[1] == 40
    assert without[1] > truth


@given(steps=routed_steps(), factor=st.sampled_from(RECORDED))
def test_recorded_factors_are_exact(steps, factor):
    made = sums_of(steps).outcome(Fraction(factor), RULES["ceil"])
    assert made.is_exact
    assert made.overflow == Steps(steps).outcome(Fraction(factor), RULES["ceil"]).overflow


@given(steps=routed_steps(), factor=factors, rule=rules, data=st.data())
def test_what_a_model_dropped_is_between_the_bounds(steps, factor, rule, data):
    # The recording has the counts that are left after the model dropped some.
    left = np.array(
        [[data.draw(st.integers(0, count)) for count in step] for step in steps.counts.tolist()]
    )
    dropped = int(steps.counts.sum() - left.sum())
    made = Steps(RoutedSteps(left, steps.tokens, steps.top_k), dropped).outcome(factor, rule)
    lost, kept, _, _ = fill(steps, factor, rule)
    assert made.overflow[0] <= lost <= made.overflow[1]
    assert made.kept[0] <= kept <= made.kept[1]


# -- from recordings


@pytest.fixture(scope="module")
def steps():
    return some_steps(60)


@pytest.fixture(scope="module")
def windows(tmp_path_factory, steps):
    return record(tmp_path_factory.mktemp("windows") / "r", steps)


@pytest.fixture(scope="module")
def detailed(tmp_path_factory, steps):
    return record(tmp_path_factory.mktemp("steps") / "r", steps, level="steps")


def by_hand(steps, phase, tag, layer, factor, rule):
    position = [one.index for one in SEEN].index(layer)
    counts, tokens = counts_of(of(steps, phase, tag), position)
    routed = RoutedSteps(counts, tokens, SEEN[position].top_k)
    lost, kept, paid, _ = fill(routed, Fraction(factor).limit_denominator(10_000), rule)
    return lost / (int(tokens.sum()) * routed.top_k), (paid - kept) / paid if paid else np.nan


@pytest.mark.parametrize("name", RULE_NAMES)
def test_curves_by_phase_tag_and_layer_equal_brute_force(detailed, steps, name):
    rule = rule_of(name)
    table = curve(detailed, FACTORS, rule, breakdown=True)
    assert (table["certainty"] == "exact").all()
    assert set(table["phase"]) == {"all", "prefill", "decode", "mixed"}
    for row in table[table["layer"] != "all"].itertuples():
        expected = by_hand(steps, row.phase, row.tag, row.layer, row.capacity_factor, rule)
        assert (row.overflow_rate, row.padding_rate) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("name", RULE_NAMES)
def test_curves_from_windows_contain_those_from_steps(windows, detailed, name):
    rule = rule_of(name)
    exact = curve(detailed, FACTORS, rule, breakdown=True)
    bounded = curve(windows, FACTORS, rule, breakdown=True)
    keys = ["phase", "tag", "layer", "capacity_factor"]
    assert exact[keys].to_numpy().tolist() == bounded[keys].to_numpy().tolist()
    for rate in ("overflow_rate", "padding_rate"):
        known = exact[rate].notna()
        assert (bounded[f"{rate}_lower"] <= exact[rate])[known].all()
        assert (exact[rate] <= bounded[f"{rate}_upper"])[known].all()
    sure = bounded["certainty"] == "exact"
    recorded = bounded["capacity_factor"].isin(windows.info.capacity_factors)
    assert sure[recorded].all() == (name == "ceil")
    assert bounded["overflow_rate"][sure].tolist() == exact["overflow_rate"][sure].tolist()
    assert bounded["slots_per_step"][sure].tolist() == exact["slots_per_step"][sure].tolist()
    everything = (bounded["phase"] == "all") & (bounded["tag"] == "all")
    assert not sure[everything & bounded["capacity_factor"].isin([1.6, 0.37])].any()


def test_a_curve_over_recorded_factors_is_the_overflow_table(windows):
    table, known = curve(windows), windows.overflow()
    of_layers = table[table["layer"] != "all"].sort_values(
        ["layer", "capacity_factor"], ignore_index=True
    )
    for name in ("layer", "capacity_factor", "overflow_rate", "padding_rate", "happened"):
        assert of_layers[name].tolist() == known[name].tolist()


def test_the_spread_of_a_recording_is_that_of_its_steps(windows, steps):
    found = evidence(windows, list(range(len(windows.totals.keys))))
    for position, layer in enumerate(SEEN):
        counts, tokens = counts_of(steps, position)
        ratios = counts.max(1) / counts.mean(1)
        spread = dict(found[layer.index].spread)
        assert sum(spread.values()) == tokens.sum()
        for above in (1.0, 1.4, 2.0, 2.7):
            over = sum(number for most, number in spread.items() if most > above)
            assert over >= tokens[ratios > above].sum()
            assert over <= tokens[ratios > above / 2 ** (1 / 32)].sum()
        assert found[layer.index].enough == ceil(ratios.max() * 10_000 - 1e-6) / Fraction(10_000)


def test_buffers_hold_the_slots_of_the_largest_step(detailed, steps):
    model = replace(detailed.info.model, hidden_size=100, dtype="bfloat16")
    profile = replace(detailed, info=replace(detailed.info, model=model))
    table = curve(profile, [1.5]).set_index("layer")
    peaks = []
    for position, layer in enumerate(SEEN):
        tokens = counts_of(steps, position)[1]
        peak = ceil(Fraction(3, 2) * int(tokens.max()) * layer.top_k / layer.experts)
        peaks.append(peak * layer.experts * 100 * 2)
        assert table.loc[layer.index, "buffer_bytes"] == peaks[-1]
    assert table.loc["all", "buffer_bytes"] == max(peaks)
    assert curve(detailed, [1.5])["buffer_bytes"].isna().all()


def test_buffers_from_windows_are_bounded(windows, detailed):
    tables = []
    for profile in (windows, detailed):
        model = replace(profile.info.model, hidden_size=8, dtype="float32")
        profile = replace(profile, info=replace(profile.info, model=model))
        tables.append(curve(profile, FACTORS, breakdown=True))
    bounded, exact = tables
    assert (bounded["buffer_bytes_lower"] <= exact["buffer_bytes"]).all()
    assert (exact["buffer_bytes"] <= bounded["buffer_bytes_upper"]).all()


# -- the smallest factor, and what is recommended


@pytest.mark.parametrize("name", RULE_NAMES)
@pytest.mark.parametrize("target", [0.0, 0.001, 0.07, 0.3])
def test_the_smallest_factor_keeps_the_target_and_the_next_smaller_does_not(
    windows, detailed, name, target
):
    rule = rule_of(name)
    exact, bounded = (
        [smallest_factor(one, target, rule), *smallest_factors(one, target, rule)]
        for one in (detailed, windows)
    )
    for one, about in zip(exact, bounded, strict=True):
        assert one.certainty == "exact"
        grid = round(one.upper * 10_000)
        layer = "all" if one.layer is None else one.layer
        near = curve(detailed, [Fraction(grid, 10_000)], rule).set_index("layer")
        assert near.loc[layer, "overflow_rate"] <= target
        if grid > 1:
            below = curve(detailed, [Fraction(grid - 1, 10_000)], rule).set_index("layer")
            assert below.loc[layer, "overflow_rate"] > target
        assert about.lower <= one.upper <= about.upper
        assert about.layer == one.layer
    assert worst(exact[1:]).upper == max(one.upper for one in exact[1:])


def test_latency_looks_at_decode_and_quality_at_every_layer_of_prefill(detailed):
    latency, quality = recommend(detailed, 0.05)
    assert (latency.goal, latency.phase) == ("latency", "decode")
    assert (quality.goal, quality.phase) == ("quality", "prefill")
    decode, prefill = (detailed.select(phase=phase) for phase in ("decode", "prefill"))
    assert latency.factor == smallest_factor(decode, 0.05).upper
    assert latency.overflow_rate <= 0.05
    assert quality.factor == max(one.upper for one in smallest_factors(prefill, 0.0))
    assert quality.overflow_rate == 0
    assert quality.needed.layer in (1, 2)
    mixed = detailed.select(phase="mixed")
    assert [one.phase for one in recommend(mixed)] == ["mixed", "mixed"]


# -- groups


def test_per_rank_applies_the_capacity_to_each_ranks_tokens_apart(tmp_path, steps):
    first, second = steps[::2], steps[1::2]
    for rank, own in enumerate((first, second)):
        role = RankRole(rank=rank, world_size=2, dp=rank)
        record(tmp_path / "r", own, level="steps", role=role)
    profile = routeprof.load(tmp_path / "r")
    for row in curve(profile, FACTORS, "per-rank").itertuples():
        if row.layer == "all":
            continue
        position = [one.index for one in SEEN].index(row.layer)
        parts = [counts_of(own, position) for own in (first, second)]
        made = [
            fill(RoutedSteps(*part, SEEN[position].top_k), Fraction(str(row.capacity_factor)), rule)
            for part in parts
            for rule in [RULES["per-rank"]]
        ]
        routed = sum(int(part[1].sum()) for part in parts) * SEEN[position].top_k
        assert row.overflow_rate == pytest.approx(sum(one[0] for one in made) / routed)


def test_per_rank_needs_several_ranks_with_tokens(tmp_path, detailed, steps):
    with pytest.raises(UsageError, match="record every rank"):
        curve(detailed, [1.0], "per-rank")
    for rank in range(2):
        role = RankRole(rank=rank, world_size=2, tp=rank, owns_tokens=rank == 0)
        record(tmp_path / "r", steps, role=role)
    with pytest.raises(UsageError, match="record every rank"):
        curve(routeprof.load(tmp_path / "r"), [1.0], "per-rank")


# -- the sample, and what cannot be


def test_the_sample_recording():
    profile = routeprof.load(RECORDINGS_DIR / "healthy")
    table = curve(profile, [1.0, 1.3, 1.5])
    of_all = table[table["layer"] == "all"]
    known = profile.overflow()
    for factor, row in zip((1.0, 1.5), of_all.iloc[[0, 2]].itertuples(), strict=True):
        own = known[known["capacity_factor"] == factor]
        # All layers route the same tokens with the same top_k.
        assert row.overflow_rate == pytest.approx(own["overflow_rate"].mean())
        assert row.certainty == "exact"
    between = of_all.iloc[1]
    assert between["certainty"] == "bounded"
    assert between["overflow_rate_lower"] == of_all.iloc[2]["overflow_rate"]
    assert np.isnan(between["overflow_rate"])
    assert between["overflow_rate_lower"] < between["overflow_rate_upper"]


def test_what_cannot_be_is_refused(windows):
    for wrong in ([0], [-1.0], ["x"], []):
        with pytest.raises(UsageError, match="pass"):
            curve(windows, wrong)
    with pytest.raises(UsageError, match="not one of ceil, floor"):
        curve(windows, [1.0], "round")
    with pytest.raises(UsageError, match="0 or more"):
        capacity_rule("ceil", -1)
    with pytest.raises(UsageError, match="from 0 to 1"):
        smallest_factors(windows, 1.5)
    with pytest.raises(UsageError, match="no tokens"):
        curve(windows.narrowed("verify", None), [1.0])
    sums = replace(windows, info=replace(windows.info, capacity_factors=()))
    with pytest.raises(LevelRequiredError, match="level='steps'"):
        curve(sums, [1.0])
