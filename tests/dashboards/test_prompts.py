"""The prompts view against group-bys of the reports, closed forms and simulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from routeprof.dashboards.figures.tags import label
from routeprof.dashboards.panels import token_rows
from routeprof.dashboards.panels.skew import by_chance, mean_divergence, skew_of
from routeprof.dashboards.view import Context, Filled
from routeprof.dashboards.views import prompts
from tests.dashboards.made import CAPTURED, HOSTILE, LONG, Writer
from tests.dashboards.tokens import context_of, record_tokens

Make = Callable[..., Context]

SAMPLES = Path(__file__).parents[2] / "sample_data" / "recordings"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_tokens(tmp_path_factory.mktemp("runs") / "tokens", "code", "prose")


def said(filled: Filled) -> str:
    return filled.figure.layout.annotations[0].text.replace("<br>", " ")


def entropy(shares: np.ndarray) -> float:
    return -sum(share * np.log2(share) for share in shares if share > 0)


def divergence(one: pd.Series, other: pd.Series) -> float:
    """Entropy of the middle less the mean entropy: another form of the same divergence."""
    p, q = one / one.sum(), other / other.sum()
    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2


# -- tags


@pytest.mark.parametrize("phase", [None, "decode"])
def test_divergences_are_those_of_the_report(context: Make, phase: str | None) -> None:
    view = context(phase=phase)
    filled = prompts.fill(view).panels["tag_divergence"]
    report = view.whole.experts(breakdown=True)
    report = report[(report["phase"] == (phase or "all")) & (report["tag"] != "all")]
    loads = report.pivot(index=["layer", "expert"], columns="tag", values="tokens")
    table = filled.table.set_index(["tag", "other_tag"])
    assert len(table) == 4 * 3 / 2
    for (one, other), row in table.iterrows():
        each = [divergence(own[one], own[other]) for _, own in loads.groupby("layer")]
        assert len(each) == len(CAPTURED)
        assert row["divergence"] == pytest.approx(np.mean(each))
    assert filled.table["divergence"].is_monotonic_decreasing
    matrix = filled.figure.data[0].z[::-1]
    np.testing.assert_allclose(matrix, matrix.T, rtol=1e-6)
    assert not np.diagonal(matrix).any()
    assert sorted(matrix[np.triu_indices(4, 1)]) == pytest.approx(sorted(table["divergence"]))


def test_the_selected_tag_does_not_matter(context: Make) -> None:
    every, one = prompts.fill(context()), prompts.fill(context(tag="code"))
    for name in ("tag_divergence", "tag_imbalance"):
        pd.testing.assert_frame_equal(every.panels[name].table, one.panels[name].table)
    assert list(every.cards) == list(one.cards)


def test_a_range_of_time_leaves_its_tags(context: Make) -> None:
    filled = prompts.fill(context(between=(0.0, 3.0), tag="code")).panels["tag_divergence"]
    assert set(filled.table["tag"]) | set(filled.table["other_tag"]) == {
        "untagged",
        "code",
        HOSTILE,
    }
    assert "0 to 3 s" in filled.caption


def test_imbalance_by_tag_is_that_of_the_report(context: Make) -> None:
    view = context(phase="prefill")
    table = prompts.fill(view).panels["tag_imbalance"].table.set_index("tag")
    report = view.whole.layers(breakdown=True)
    report = report[(report["phase"] == "prefill") & report["imbalance_ratio"].notna()]
    report["tag"] = report["tag"].replace("all", prompts.TOGETHER)
    expected = report.groupby("tag")["imbalance_ratio"].agg(["median", "max"])
    assert set(table.index) == {*expected.index, prompts.MIXED}
    for tag, row in expected.iterrows():
        assert table.loc[tag, "imbalance_median"] == pytest.approx(row["median"])
        assert table.loc[tag, "imbalance_worst"] == pytest.approx(row["max"])
    assigned = report.groupby("tag")["assignments"].sum()
    assert table.loc[assigned.index, "assignments"].tolist() == assigned.tolist()


def test_names_are_short_text_and_whole_in_the_table(context: Make) -> None:
    panels = prompts.fill(context()).panels
    for name in ("tag_divergence", "tag_imbalance"):
        axis = panels[name].figure.layout.xaxis
        assert not any("<" in text for text in axis.ticktext)
        assert max(map(len, axis.ticktext)) <= 21
        names = panels[name].table.filter(like="tag").to_numpy().ravel()
        assert {HOSTILE, LONG} <= set(names)
    assert "<img" not in panels["tag_divergence"].figure.to_json()


def test_label() -> None:
    assert label("code") == "code"
    assert label("a\nb\t c") == "a b c"
    assert label("x" * 200, 10) == "x" * 9 + "…"
    assert label("<b>&") == "&lt;b&gt;&amp;"


def test_without_tags_it_says_how_to_tag(writer: Writer) -> None:
    writer.write()
    writer.write("decode")
    for filled in list(prompts.fill(context_of(writer.path)).panels.values())[:2]:
        assert 'with recording.tag("code"):' in said(filled)


def test_of_many_tags_those_with_most_tokens_are_drawn(writer: Writer) -> None:
    for number in range(20):
        writer.write("prefill", f"tag {number:02}", tokens=4 + number)
    panels = prompts.fill(context_of(writer.path)).panels
    assert panels["tag_divergence"].figure.data[0].z.shape == (16, 16)
    assert "16 tags with the most tokens of 20" in panels["tag_divergence"].caption
    assert len(panels["tag_imbalance"].table) == 22
    assert len(panels["tag_imbalance"].figure.data[0].y) == 18


# -- whose skew


def tags_of(*loads: list[int]) -> np.ndarray:
    """Counts of tags in one layer."""
    return np.array(loads)[:, None, :]


HOT = [900, 100, 100, 100]


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        (tags_of(HOT, HOT), "model"),
        (tags_of(HOT, HOT[::-1]), "data"),
        (tags_of([300, 300, 200, 200], [200, 300, 300, 200]), "even"),
        (tags_of([700, 500, 100, 100], [500, 700, 100, 100]), "model"),
        (tags_of([100, 100, 100, 100], [101, 99, 100, 100]), "even"),
        (tags_of(HOT), "unknown"),
        (tags_of(HOT, [9, 1, 1, 1]), "unknown"),
        # A tag with few tokens has no say, and one with many no more than the others.
        (tags_of(HOT, HOT, [1, 1, 1, 9]), "model"),
        (tags_of([1_000_000, 0, 0, 0], [0, 0, 0, 1000], [0, 1000, 0, 0]), "data"),
    ],
)
def test_verdict(counts: np.ndarray, verdict: str) -> None:
    assert skew_of(counts, np.array([4])).verdict == verdict


def test_what_is_left_of_the_skew() -> None:
    """Of a skew of 2 each, tags with their own hot experts keep (1.6 − 1) ÷ 2 when mixed."""
    skew = skew_of(tags_of(HOT, HOT[::-1]), np.array([4]))
    assert skew.alone[:, 0].tolist() == [3.0, 3.0]
    assert skew.mixed.tolist() == [pytest.approx((0.75 + 1 / 12) / 2 * 4)]
    assert skew.left == pytest.approx((skew.mixed[0] - 1) / 2)


def test_layers_of_different_widths_and_tags_that_are_not_everywhere() -> None:
    counts = np.zeros((3, 2, 4), dtype=np.int64)
    counts[0] = [HOT, [300, 100, 0, 0]]
    counts[1] = [HOT, [300, 100, 0, 0]]
    counts[2, 0] = HOT
    skew = skew_of(counts, np.array([4, 2]))
    np.testing.assert_allclose(skew.alone, [[3, 1.5], [3, 1.5], [3, np.nan]])
    np.testing.assert_allclose(skew.mixed, [3, 1.5])
    assert skew.left == pytest.approx(1)
    found, chance = mean_divergence(counts, np.array([4, 2]))
    assert not found.any()
    assert np.isfinite(chance).all()


@pytest.mark.parametrize(("name", "verdict"), [("healthy", "data"), ("collapsed", "model")])
def test_the_two_samples_are_told_apart(name: str, verdict: str) -> None:
    content = prompts.fill(context_of(SAMPLES / name))
    card = next(card for card in content.cards if card.name == "skew_source")
    assert card.value == prompts.VERDICTS[verdict][0]
    assert prompts.VERDICTS[verdict][1] in content.panels["tag_imbalance"].caption


@pytest.mark.parametrize(("experts", "assignments"), [(16, 400), (64, 2000)])
def test_chance_is_what_samples_of_one_pool_show(experts: int, assignments: int) -> None:
    random = np.random.default_rng(0)
    pool = random.dirichlet(np.full(experts, 5.0))
    samples = random.multinomial(assignments, pool, size=(300, 2))
    from_pool = [divergence(pd.Series(own), pd.Series(pool)) for own in samples[:, 0]]
    apart = [divergence(pd.Series(one), pd.Series(two)) for one, two in samples]
    assert by_chance(experts, assignments) == pytest.approx(np.mean(from_pool), rel=0.1)
    counts = samples[0][:, None, :]
    chance = mean_divergence(counts, np.array([experts]))[1][0, 1]
    assert chance == pytest.approx(np.mean(apart), rel=0.1)


# -- requests


def test_requests_are_those_of_the_report_of_the_selection(tokens: Path) -> None:
    view = context_of(tokens, phase="decode", tag="code")
    filled = prompts.fill(view).panels["requests"]
    report = view.whole.select(phase="decode", tag="code").requests()
    pd.testing.assert_frame_equal(filled.table, report)
    points = filled.figure.data[0]
    order = np.argsort(points.hovertext)
    assert points.x[order].tolist() == report["tokens"].tolist()
    assert points.y[order] == pytest.approx(report["divergence_from_all"])
    assert len(report) == 3


def test_too_many_tokens_to_wait_for(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_rows, "MOST_IDS", 1)
    filled = prompts.fill(context_of(tokens)).panels["requests"]
    assert "requests.csv has them" in said(filled)


def test_requests_need_level_tokens(context: Make) -> None:
    assert said(prompts.fill(context()).panels["requests"]).startswith("This needs")
