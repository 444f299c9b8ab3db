"""What chance stays below, against resampling written out, and what it is said of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.diagnose.changes import LEVEL, _shifts
from routeprof.diagnose.examine import examine
from routeprof.diagnose.finding import Finding
from routeprof.diagnose.question import Question
from routeprof.diagnose.steps import _chance
from tests.diagnose.made import EXPERTS, Step, apportioned, halves, one_hot, record, steady

LIKELY = np.linspace(1.5, 0.5, EXPERTS) / EXPERTS


def drawn(seed: int, shares: np.ndarray, steps: int, **facts) -> list[Step]:
    random = np.random.default_rng(seed)
    return [Step(random.multinomial(512, shares, 2), **facts) for _ in range(steps)]


def bits(one: np.ndarray, other: np.ndarray) -> float:
    """Jensen–Shannon divergence, as it is defined."""
    p, q = one / one.sum(), other / other.sum()
    middle = (p + q) / 2
    parts = [own[own > 0] * np.log2(own[own > 0] / middle[own > 0]) for own in (p, q)]
    return float(sum(part.sum() for part in parts) / 2)


def by_chance(pool: np.ndarray, sizes: tuple[int, int], quantile: float) -> float:
    """What the divergence of two samples of the pool stays below so often."""
    random = np.random.default_rng(99)
    found = [
        bits(*(pool[random.integers(len(pool), size=size)].sum(axis=0) for size in sizes))
        for _ in range(8000)
    ]
    return float(np.quantile(found, quantile))


def only(directory: Path, code: str) -> Finding:
    answer = examine(Question(routeprof.load(directory)), gains=False)
    (finding,) = [one for one in answer.findings if one.code == code]
    return finding


def test_tags_may_differ_by_what_two_samples_do_in_99_of_100_cases(tmp_path: Path):
    steps = [*drawn(1, one_hot(4.0) / EXPERTS, 20, tag="code"), *drawn(2, LIKELY, 20, tag="prose")]
    figures = only(record(tmp_path / "run", steps), "narrow-input").figures
    at = int(figures["layer"])
    loads = np.array([step.counts[at] for step in steps])
    assert figures["divergence"] == pytest.approx(bits(loads[:20].sum(0), loads[20:].sum(0)))
    assert figures["noise"] == pytest.approx(by_chance(loads, (20, 20), 0.99), rel=0.15)


def test_the_phase_with_most_steps_says_how_far_tags_are_apart(tmp_path: Path):
    """Prefill, which comes first, has fewer steps, and is alike."""
    few = [step for tag in "ab" for step in steady(LIKELY, 5, phase="prefill", tag=tag)]
    hot = {"a": one_hot(6.0, 0), "b": one_hot(6.0, 8)}
    many = [step for tag, shares in hot.items() for step in steady(shares, 16, tag=tag)]
    figures = only(record(tmp_path / "run", few + many), "narrow-input").figures
    one, other = (apportioned(shares, 512) for shares in hot.values())
    assert figures["divergence"] == pytest.approx(bits(one, other))


@pytest.mark.parametrize(("worst", "other"), [(16, 3), (3, 16)])
def test_noise_is_not_known_of_few_steps_of_either_side(tmp_path: Path, worst: int, other: int):
    steps = steady(one_hot(6.0, 0), worst, tag="a") + steady(LIKELY, other, tag="b")
    finding = only(record(tmp_path / "run", steps), "narrow-input")
    assert finding.figures["tag"] == "a"
    assert np.isnan(float(finding.figures["noise"]))
    assert "too few steps to bound noise" in finding.evidence


def test_an_expert_above_the_mean_is_shared_though_another_is_hotter(tmp_path: Path):
    """The mix's hottest expert has twice the mean in the tag whose own hottest is another."""
    second = one_hot(5.0, 8)
    second[0], second[1:8] = 2.0, (EXPERTS - 7.0 - 7 * second[15]) / 7
    steps = steady(one_hot(6.5, 0), 16, tag="code") + steady(second, 16, tag="prose")
    figures = only(record(tmp_path / "run", steps), "model-skew").figures
    assert (figures["tags_sharing_hottest"], figures["tags"]) == (2, 2)
    assert figures["imbalance_ratio_mixed"] == pytest.approx(4.25, abs=0.05)


def test_all_comparisons_share_the_chance_of_a_false_alarm():
    """Of 16 comparisons each may be wrong in 0.05 ÷ 16 of the cases."""
    random = np.random.default_rng(5)
    near, far = (halves(larger) / EXPERTS for larger in (1.3, 0.7))
    pairs = {
        (("decode", None), layer): (
            random.multinomial(512, near if layer == 7 else LIKELY, 10).astype(float),
            random.multinomial(512, far if layer == 7 else LIKELY, 12).astype(float),
        )
        for layer in range(16)
    }
    (moved,) = _shifts(pairs, 0.0)
    one, other = pairs[("decode", None), 7]
    assert moved.layer == 7
    assert moved.divergence == pytest.approx(bits(one.sum(0), other.sum(0)))
    due = by_chance(np.concatenate((one, other)), (10, 12), 1 - LEVEL / 16)
    assert moved.noise == pytest.approx(due, rel=0.12)
    wrong = by_chance(np.concatenate((one, other)), (10, 12), 1 - LEVEL)
    assert moved.noise > 1.12 * wrong


def test_chance_gives_no_expert_a_token_twice(tmp_path: Path):
    """Four tokens choose two experts each: however the draw goes, one gets four of eight."""
    counts = [4, 4] + [0] * (EXPERTS - 2)
    profile = routeprof.load(record(tmp_path / "run", [Step([counts, counts])] * 8))
    assert _chance(Question(profile), 0, profile.info.layers[0]) == 4 / (8 / EXPERTS)
