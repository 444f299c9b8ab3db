"""The expert view against part files read with pandas, and against loops over every token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import routeprof
from routeprof.dashboards import formats
from routeprof.dashboards.drawing import click_target
from routeprof.dashboards.live import follower
from routeprof.dashboards.live.source import Source
from routeprof.dashboards.live.spans import Span
from routeprof.dashboards.panels.stretches import stretches
from routeprof.dashboards.state import ViewState
from routeprof.dashboards.view import Context
from routeprof.dashboards.views import expert, prompts
from routeprof.recording.fold import fold
from routeprof.topology import Layer
from tests.dashboards.made import EXPERTS, HOSTILE, LAYERS, LONG, Writer
from tests.dashboards.tokens import EXPERTS as FEW
from tests.dashboards.tokens import context_of, record_tokens

Make = Callable[..., Context]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_tokens(tmp_path_factory.mktemp("runs") / "tokens", "code", "prose")


def said(filled: object) -> str:
    return filled.figure.layout.annotations[0].text.replace("<br>", " ")


def rows(path: Path) -> pd.DataFrame:
    """Every row of every window part that counted something."""
    parts = [pd.read_parquet(part) for part in sorted(path.glob("rank-*/part-*.parquet"))]
    table = pd.concat(parts, ignore_index=True)
    return table[table["counts"].notna()]


def load(table: pd.DataFrame, number: int) -> float:
    counts = np.sum(np.stack(table["counts"].to_list()), axis=0)
    return counts[number] / counts.mean()


# -- when


@pytest.mark.parametrize("state", [{}, {"phase": "decode"}, {"tag": HOSTILE}, {"tag": "untagged"}])
def test_over_time_is_that_of_the_windows(
    recorded: Path, context: Make, state: dict[str, str]
) -> None:
    view = context(layer=6, expert=2, **state)
    table = expert.fill(view).panels["load_time"].table
    windows = rows(recorded)
    windows = windows[windows["layer"] == 6]
    if "phase" in state:
        windows = windows[windows["phase"] == state["phase"]]
    if state.get("tag") == HOSTILE:
        windows = windows[windows["tag"] == HOSTILE]
    if state.get("tag") == "untagged":
        windows = windows[windows["tag"].isna()]
    start = rows(recorded)["start"].min()
    expected = [
        (own["start"].iloc[0] + 0.5 - start, own["counts"].iloc[0][2], load(own, 2))
        for _, own in windows.groupby("window")
    ]
    assert len(table) == len(windows)
    np.testing.assert_allclose(table.to_numpy(dtype=float), expected, atol=1e-6)


def test_a_range_of_time_is_shaded_and_all_of_it_is_shown(context: Make) -> None:
    filled = expert.fill(context(layer=6, between=(1.0, 3.0))).panels["load_time"]
    assert len(filled.table) == 8
    assert 3.0 in [shape.x1 for shape in filled.figure.layout.shapes]
    assert next(panel for panel in expert.PANELS if panel.name == "load_time").drags


def test_ranks_side_by_side_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same thing second by thousandth: overlapping spans are spread over their time."""
    monkeypatch.setattr(follower, "BATCH", 1)
    path = tmp_path / "two"
    writers = [Writer(path, rank, world=2, started=1000.0 + 0.25 * rank) for rank in range(2)]
    for _ in range(3):
        for writer in writers:
            writer.write()
    source = Source(path)
    source.read()
    seen = stretches(source.spans(), lambda key: True, 6, EXPERTS)
    table = rows(path)
    table = table[table["layer"] == 6]
    assert seen.counts.sum() == pytest.approx(sum(counts.sum() for counts in table["counts"]))
    for low, high, counts in zip(seen.edges[:-1], seen.edges[1:], seen.counts, strict=True):
        expected = np.zeros(EXPERTS)
        for moment in np.arange(low + 0.0005, high, 0.001):
            for start, end, own in table[["start", "end", "counts"]].itertuples(index=False):
                expected += own * 0.001 if start <= moment < end else 0
        np.testing.assert_allclose(counts, expected, rtol=0.02)


def test_a_stretch_may_know_fewer_experts_than_the_layer_has(recorded: Path) -> None:
    whole = routeprof.load(recorded)
    totals = whole.totals
    totals.lists["counts"] = totals.lists["counts"][..., :4]
    seen = stretches([Span((), 1.0, 2.0, totals)], lambda key: True, 6, EXPERTS)
    assert seen.counts.shape[1] == EXPERTS
    assert not seen.counts[:, 4:].any()
    assert stretches([], lambda key: True, 6, EXPERTS).counts.shape == (0, EXPERTS)


def test_edges_that_nearly_fall_together_are_one(recorded: Path) -> None:
    """Sixteen ranks whose windows begin a sixteenth of a second apart."""
    info = routeprof.load(recorded).info
    part = routeprof.load(recorded).files.parts("part")[0]
    totals = fold([part], info)
    windows = totals.windows
    spans = []
    for rank in range(16):
        for second in range(4):
            shift = second + rank / 16 - windows.start.min()
            moved = routeprof.profile.replace(
                windows, start=windows.start + shift, end=windows.end + shift
            )
            one = routeprof.profile.replace(totals, windows=moved)
            spans.append(Span((), float(moved.end.min()), float(moved.end.max()), one))
    seen = stretches(spans, lambda key: True, 6, EXPERTS)
    assert 4 <= len(seen.counts) <= 12
    assert seen.counts.sum() == pytest.approx(64 * totals.lists["counts"][:, 6].sum())


# -- where


@pytest.mark.parametrize("state", [{}, {"phase": "prefill"}, {"tag": "code"}, {"tag": LONG}])
def test_phases_and_tags_are_those_of_the_report(context: Make, state: dict[str, str]) -> None:
    view = context(layer=2, expert=5, **state)
    panels = expert.fill(view).panels
    report = view.whole.experts(breakdown=True)
    report = report[(report["layer"] == 2) & (report["expert"] == 5)]
    by_phase = report[(report["tag"] == state.get("tag", "all")) & (report["phase"] != "all")]
    by_tag = report[(report["phase"] == state.get("phase", "all")) & (report["tag"] != "all")]
    for name, expected in (("phase", by_phase), ("tag", by_tag)):
        own = panels[f"{name}s"].table.set_index(name).sort_index()
        expected = expected.set_index(name).sort_index()
        assert own.index.tolist() == expected.index.tolist()
        assert own["expert_tokens"].tolist() == expected["tokens"].tolist()
        np.testing.assert_allclose(own["load_over_mean"], expected["load_over_mean"])
    assert len(panels["tags"].table) == 4
    assert panels["phases"].table["phase"].tolist() == ["prefill", "decode"]


def test_a_range_of_time_narrows_phases_and_tags(context: Make) -> None:
    # The first two of eight windows: prefill, untagged and code.
    panels = expert.fill(context(layer=2, between=(0.0, 2.0))).panels
    assert panels["phases"].table["phase"].tolist() == ["prefill"]
    assert panels["tags"].table["tag"].tolist() == ["untagged", "code"]


def test_names_of_tags_are_short_and_text(context: Make) -> None:
    axis = expert.fill(context(layer=6)).panels["tags"].figure.layout.xaxis
    assert "untagged" in axis.ticktext
    assert not any("<" in text for text in axis.ticktext)
    assert max(len(text) for text in axis.ticktext) <= 18 + len("&lt;") - 1
    assert set(expert.fill(context(layer=6)).panels["tags"].table["tag"]) == {
        "untagged",
        "code",
        HOSTILE,
        LONG,
    }


def test_without_tags_it_says_how_to_tag(writer: Writer) -> None:
    writer.write()
    writer.stop()
    view = context_of(writer.path, layer=6)
    assert 'with recording.tag("code"):' in said(expert.fill(view).panels["tags"])


def test_of_many_tags_those_with_most_tokens_are_drawn(writer: Writer) -> None:
    for number in range(30):
        writer.write("prefill", f"tag {number:02}", tokens=4 + number)
    filled = expert.fill(context_of(writer.path, layer=6)).panels["tags"]
    assert len(filled.table) == 30
    assert list(filled.figure.layout.xaxis.ticktext)[-1] == "tag 29"
    assert len(filled.figure.data[0].y) == 24
    assert "24 with the most tokens" in filled.caption


# -- which


def test_the_hottest_unless_told(context: Make) -> None:
    view = context(layer=6, phase="decode")
    report = view.profile.experts()
    report = report[report["layer"] == 6].set_index("expert")
    hottest = report["tokens"].idxmax()
    cards = {card.name: card for card in expert.fill(view).cards}
    assert cards["expert"].value == str(hottest)
    assert cards["load_rank"].value == f"1 of {EXPERTS}"
    assert cards["load_over_mean"].value == f"{report['load_over_mean'].max():.2f}"
    cards = {card.name: card for card in expert.fill(context(layer=6, expert=EXPERTS - 2)).cards}
    assert cards["expert_tokens"].value == "0"  # the dead one
    assert cards["load_rank"].value == f"{EXPERTS} of {EXPERTS}"
    assert cards["mean_weight"].value == "–"


@pytest.mark.parametrize("state", [{"phase": "decode"}, {"tag": "code"}])
def test_cards_are_those_of_the_report(context: Make, state: dict[str, str]) -> None:
    report = context(**state).profile.experts()
    for row in report[report["layer"] == 6].to_dict("records"):
        view = context(layer=6, expert=row["expert"], **state)
        cards = {card.name: card.value for card in expert.fill(view).cards}
        assert cards["expert_tokens"] == f"{row['tokens']:,}"
        assert cards["share"] == formats.percent(row["share"])
        assert cards["load_over_mean"] == formats.ratio(row["load_over_mean"])
        assert cards["probability_mass"] == formats.percent(row["probability_mass"])
        assert cards["mean_weight"] == formats.number(row["mean_weight"])


def test_gate_numbers_that_nobody_knows_are_dashes(context: Make) -> None:
    view = context(layer=6)
    unknown = {
        name: np.full_like(view.profile.totals.lists[name], np.nan)
        for name in ("probability_mass", "weight_sum")
    }
    totals = replace(view.profile.totals, lists=view.profile.totals.lists | unknown)
    view = replace(view, profile=replace(view.profile, totals=totals))
    cards = {card.name: card for card in expert.fill(view).cards}
    assert cards["probability_mass"].value == cards["mean_weight"].value == "–"
    assert cards["probability_mass"].note == "not recorded for this router"


def test_layers_without_the_expert_or_without_counts(context: Make) -> None:
    content = expert.fill(context(layer=6, expert=EXPERTS))
    assert said(content.panels["load_time"]) == "Layer 6 has experts 0 to 15; choose one of them."
    content = expert.fill(context(layer=3, expert=1))
    assert content.cards[0].value == "silent"
    assert "not zero" in said(content.panels["partners"])


class Narrow(Writer):
    """Layer 2 has half of the experts of the others."""

    def _counted(self, layer: Layer, tokens: int) -> dict[str, Any]:
        row = super()._counted(layer, tokens)
        lists = ("counts", "probability_mass", "weight_sum") if layer.index == 2 else ()
        return row | {name: row[name][: EXPERTS // 2] for name in lists}


def test_layers_of_different_widths(tmp_path: Path) -> None:
    layers = [replace(layer, experts=8) if layer.index == 2 else layer for layer in LAYERS]
    writer = Narrow(tmp_path / "narrow", layers=tuple(layers))
    for tag in ("code", "prose"):
        writer.write("prefill", tag)
    view = context_of(writer.path, layer=2, expert=7)
    panels = expert.fill(view).panels
    report = view.whole.experts(breakdown=True)
    report = report[(report["layer"] == 2) & (report["expert"] == 7)].set_index("tag")
    for name in ("code", "prose"):
        own = panels["tags"].table.set_index("tag").loc[name, "load_over_mean"]
        assert own == pytest.approx(report.loc[name, "load_over_mean"].iloc[0])
    assert len(panels["load_time"].table) == 2
    assert "experts 0 to 7" in said(
        expert.fill(context_of(writer.path, layer=2, expert=8)).panels["tags"]
    )
    alone = prompts.fill(view).panels["tag_imbalance"].table.set_index("tag")
    report = view.whole.layers(breakdown=True).query("phase == 'all'").groupby("tag")
    worst = report["imbalance_ratio"].max()
    assert alone.loc["code", "imbalance_worst"] == pytest.approx(worst["code"])


# -- with whom


@pytest.mark.parametrize("state", [{}, {"tag": "code"}, {"phase": "decode", "tag": "prose"}])
def test_partners_are_those_of_a_loop_over_tokens(tokens: Path, state: dict[str, str]) -> None:
    view = context_of(tokens, layer=1, expert=3, **state)
    table = expert.fill(view).panels["partners"].table.set_index("partner")
    wanted = {
        (step, rank)
        for step, rank, phase, tag in zip(
            *(getattr(view.whole.step_counts(), name) for name in ("step", "rank", "phase", "tag")),
            strict=True,
        )
        if state.get("phase", phase) == phase and state.get("tag", tag) == tag
    }
    every = view.whole.tokens(1)
    chosen = [
        row.tolist()
        for row, step, rank in zip(every.ids, every.step, every.rank, strict=True)
        if (step, rank) in wanted
    ]
    alone = Counter(number for row in chosen for number in set(row))
    together = Counter(number for row in chosen if 3 in row for number in row)
    assert len(chosen) == view.layers.set_index("layer").loc[1, "tokens"]
    assert sorted(table.index) == [number for number in range(FEW) if number != 3]
    for number, row in table.iterrows():
        assert row["together"] == together[number]
        assert row["together_expected"] == pytest.approx(alone[3] * alone[number] / len(chosen))
        expected = together[number] * len(chosen) / (alone[3] * alone[number] or np.nan)
        assert row["lift"] == pytest.approx(expected, nan_ok=True)
    assert table["lift"].dropna().is_monotonic_decreasing


def test_partners_lead_to_their_page_and_chance_is_left_out(tokens: Path) -> None:
    filled = expert.fill(context_of(tokens, layer=1, expert=3)).panels["partners"]
    bars = filled.figure.data[0]
    shown = filled.table[filled.table["together_expected"] >= 5]
    assert bars.customdata.tolist() == shown["partner"].tolist()
    assert filled.figure.layout.shapes[0].y0 == pytest.approx(FEW * 1 / (2 * (FEW - 1)))
    panel = next(panel for panel in expert.PANELS if panel.name == "partners")
    click = {"points": [{"x": 0, "customdata": int(bars.customdata[0])}]}
    assert click_target(panel, click, ViewState(layer=1)) == (
        "/expert",
        f"?layer=1&expert={bars.customdata[0]}",
    )


def test_partners_of_a_tag_with_few_tokens_are_not_told(tmp_path: Path) -> None:
    few = record_tokens(tmp_path / "few", "code", rows=1, tokens=4)
    filled = expert.fill(context_of(few, layer=1, expert=3)).panels["partners"]
    assert "too few tokens" in said(filled)


def test_partners_need_level_tokens(context: Make) -> None:
    filled = expert.fill(context(layer=6)).panels["partners"]
    assert said(filled) == "This needs a recording of level tokens; record with level='tokens'."
    assert not len(filled.table)
