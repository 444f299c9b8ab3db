from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeprof.dashboards.controls import MOST_GPUS, control
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.live.memo import Memo
from routeprof.dashboards.panels import layout_table
from routeprof.dashboards.panels.layout_table import PARTS, Ranked, ranked
from routeprof.dashboards.view import Content, Context
from routeprof.dashboards.views import layouts
from routeprof.whatif.hardware import hardware
from routeprof.whatif.layout import layouts as every_layout
from routeprof.whatif.layout_sums import Setting
from routeprof.whatif.layouts import Predictions, predict
from routeprof.whatif.sizes import sizes_of
from tests.commands.conftest import recording
from tests.dashboards.made import HOSTILE
from tests.dashboards.tokens import EXPERTS, context_of, record_tokens

Make = Callable[..., Context]

__all__ = ["recording"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_tokens(tmp_path_factory.mktemp("layouts") / "run", "code", HOSTILE)


def predicted(view: Context, gpus: int, nodes: int = 1, gpu: str = "h100") -> Predictions:
    setting = Setting(sizes_of(view.profile), hardware(gpu))
    return predict(view.profile, every_layout(gpus, EXPERTS, nodes), setting)


def said(content: Content) -> str:
    """What stands in for the figure."""
    (line,) = content.panels["layouts"].figure.layout.annotations
    return str(line.text).replace("<br>", " ")


def text_of(parts: Any) -> str:
    return json.dumps(parts, default=lambda item: item.to_plotly_json(), ensure_ascii=False)


def without_width(view: Context) -> Context:
    """As of a recording that does not say how wide an expert is."""
    model = replace(view.profile.info.model, expert_width=None)
    profile = replace(view.profile, info=replace(view.profile.info, model=model))
    return replace(view, whole=profile, profile=profile)


@pytest.mark.parametrize(
    ("state", "gpus", "nodes", "gpu"),
    [
        ({}, EXPERTS, 1, "h100"),
        ({"ranks": 4, "gpu": "mi300x", "phase": "decode"}, 4, 1, "mi300x"),
        ({"ranks": 16, "nodes": 2, "gpu": "h20", "tag": HOSTILE}, 16, 2, "h20"),
    ],
)
def test_figures_table_and_cards_are_the_predictions(
    tokens: Path, state: dict[str, Any], gpus: int, nodes: int, gpu: str
) -> None:
    view = context_of(tokens, **state)
    made = predicted(view, gpus, nodes, gpu)
    content = layouts.fill(view)
    filled = content.panels["layouts"]
    table = filled.table
    assert table["step_ms"].tolist() == [row.total_ms for row in made.rows]
    assert (table["layout_attention"] + ", " + table["layout_experts"]).tolist() == [
        str(row.layout) for row in made.rows
    ]
    for name in ("straggler_factor", "ranks_per_token", "small_gemm_share", "experts_ms"):
        assert table[name].tolist() == [getattr(row, name) for row in made.rows]
    inside = [row.dispatch_inside + row.combine_inside for row in made.rows]
    np.testing.assert_allclose(table["sent_inside"] * 2**20, inside)
    assert ("sent_between" in table) == ("nodes_per_token" in table) == (nodes > 1)
    if nodes > 1:
        between = [row.dispatch_between + row.combine_between for row in made.rows]
        np.testing.assert_allclose(table["sent_between"] * 2**20, between)
    np.testing.assert_allclose(
        table["layout_weights"] * 2**20, [row.expert_bytes for row in made.rows]
    )
    bars = filled.figure.data
    assert [bar.name for bar in bars] == list(PARTS)
    for bar in bars:
        assert list(bar.y) == [str(row.layout).replace(", ", "<br>") for row in made.rows[:12]]
    ends = np.sum([bar.x for bar in bars], axis=0)
    np.testing.assert_allclose(ends / 1e3, [row.total_ms for row in made.rows[:12]], rtol=1e-5)
    assert (np.diff(ends) >= -1e-6).all()
    assert filled.figure.layout.xaxis.title.text == "µs of a step"
    assert filled.figure.layout.yaxis.autorange == "reversed"  # the quickest on top
    cards = {card.name: card for card in content.cards}
    best, slowest = made.rows[0], made.rows[-1]
    assert cards["layout_quickest"].value == str(best.layout)
    assert cards["straggler_factor"].value == f"{best.straggler_factor:.2f}"
    assert ("layout_sent_between" in cards) == (nodes > 1)
    alone = next(row for row in made.rows if row.layout.dp == row.layout.ep == 1)
    assert cards["layout_gain"].value == f"{alone.total_ms / best.total_ms:.2f} times"
    assert f"slowest of {len(made.rows)}" in cards["layout_gain"].note
    assert f"{slowest.total_ms / best.total_ms:.1f} times" in cards["layout_gain"].note


def test_the_command_says_the_same_selection(tokens: Path) -> None:
    view = context_of(tokens, ranks=16, nodes=2, gpu="h200", tag=HOSTILE, phase="decode")
    shown = text_of(list(layouts.fill(view).body))
    assert "routeprof whatif layout RECORDING --gpus 16 --nodes 2 --gpu h200" in shown
    assert "--phase decode --tag '<img src=x" in shown
    assert hardware("h200").source in shown
    assert "dangerouslySetInnerHTML" not in shown


def test_without_tokens_only_what_is_known_of_all_layouts_is_drawn(recording: Path) -> None:
    content = layouts.fill(context_of(recording, ranks=4))
    filled = content.panels["layouts"]
    assert [bar.name for bar in filled.figure.data] == ["attention", "experts"]
    assert "Only attention and experts" in filled.caption
    assert "record with level='tokens'" in filled.caption
    several = filled.table["layout_attention"].str.contains("DP")
    unknown = filled.table.loc[several, ["step_ms", "dispatch_ms", "combine_ms", "sent_inside"]]
    assert unknown.isna().all(axis=None)
    known = filled.table["attention_ms"] + filled.table["experts_ms"]
    assert known.is_monotonic_increasing
    (card,) = content.cards
    assert (card.name, card.value) == ("layout_quickest", "–")
    assert "level='tokens'" in card.note


def test_without_the_width_of_an_expert_its_time_is_not_known(tokens: Path) -> None:
    view = context_of(tokens, ranks=4)
    content = layouts.fill(without_width(view))
    filled, made = content.panels["layouts"], predicted(view, 4)
    assert [bar.name for bar in filled.figure.data] == ["attention", "dispatch", "combine"]
    assert filled.table[["experts_ms", "step_ms", "layout_weights"]].isna().all(axis=None)
    assert "--expert-width" in content.cards[0].note
    sent = {str(row.layout): row.dispatch_ms for row in made.rows}
    for row in filled.table.itertuples():
        assert row.dispatch_ms == sent[f"{row.layout_attention}, {row.layout_experts}"]


def test_windows_say_which_level_is_needed(context: Make) -> None:
    content = layouts.fill(context())
    assert not content.cards
    assert not content.panels["layouts"].figure.data
    assert "record with level='steps'" in said(content)
    assert "Level tokens also" in said(content)


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ({"ranks": 6, "nodes": 4}, "6 GPUs on 4 nodes"),
        ({"ranks": MOST_GPUS + 1}, f"{MOST_GPUS} GPUs at most"),
        ({"phase": "encode"}, "no tokens"),
    ],
)
def test_what_cannot_be_is_one_line(tokens: Path, state: dict[str, Any], line: str) -> None:
    view = context_of(tokens, **{name: state[name] for name in state if name != "phase"})
    if "phase" in state:
        view = replace(view, profile=view.profile.narrowed(state["phase"], None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        content = layouts.fill(view)
    assert line in said(content)
    assert not content.cards
    assert "routeprof whatif layout" in text_of(list(content.body))


def test_long_recordings_are_left_to_the_command(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_table, "MOST_TOKENS", 10)
    assert "more tokens than a page" in said(layouts.fill(context_of(tokens)))


def test_it_says_of_how_many_steps_it_is(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = context_of(tokens, ranks=4)
    steps = predicted(view, 4).steps
    assert f"{steps} steps." in layouts.fill(view).panels["layouts"].caption
    work = int(view.profile.step_counts().tokens.sum()) * 6
    monkeypatch.setattr(layout_table, "MOST_WORK", work)
    found = ranked(view)
    assert isinstance(found, Ranked)
    assert found.made.every == 2
    caption = layouts.fill(view).panels["layouts"].caption
    assert f"{-(-steps // 2)} steps, one in 2 of those selected" in caption


def test_predictions_are_made_once_for_a_selection(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*arguments: Any, **options: Any) -> Predictions:
        calls.append(arguments)
        return predict(*arguments, **options)

    monkeypatch.setattr(layout_table, "predict", counted)
    view = replace(context_of(tokens, ranks=4), version="1", answers=Memo(4))
    first = layouts.fill(view)
    again = layouts.fill(replace(view, scheme="dark", state=replace(view.state, layer=1)))
    assert len(calls) == 1
    assert again.panels["layouts"].table.equals(first.panels["layouts"].table)
    layouts.fill(replace(view, version="2"))
    layouts.fill(replace(view, state=replace(view.state, phase="decode")))
    layouts.fill(replace(view, state=replace(view.state, ranks=2)))
    layouts.fill(replace(view, state=replace(view.state, gpu="a100")))
    assert len(calls) == 5


def test_controls_offer_what_there_is(tokens: Path) -> None:
    opened = Library(tokens).open("?ranks=12&nodes=3&gpu=b200")
    assert not opened.ignored
    gpus, nodes, gpu = (
        control(name, opened, [], layouts.VIEW.controls) for name in ("ranks", "nodes", "gpu")
    )
    assert gpus.label == "GPUs"
    assert [item["value"] for item in gpus.data] == "all 2 4 8 12 16 32 64".split()
    assert gpus.data[0]["label"] == "8, for example"
    assert [item["value"] for item in nodes.data] == "1 2 3 4 8".split()
    assert (nodes.value, gpu.value) == ("3", "b200")
    assert {"value": "mi300x", "label": "MI300X"} in gpu.data
