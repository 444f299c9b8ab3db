from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dash import no_update

import routeprof
from routeprof.dashboards.components import term
from routeprof.dashboards.definitions import DEFINITIONS
from routeprof.dashboards.drawing import Places, click_target, draw, picked_range, revision
from routeprof.dashboards.state import ViewState, time_stops
from routeprof.dashboards.view import Context, Panel, View
from routeprof.dashboards.views import VIEWS, health, heatmap, layer, overflow, overview, timeline
from routeprof.dashboards.views import view_at as at
from routeprof.report.csv import TABLES
from tests.dashboards.made import EXPERTS, FACTORS, HOSTILE, LONG, Writer

Make = Callable[..., Context]

NOWHERE = Places([], [], set())


def drawn(view: View, context: Context | None, places: Places, messages: list[str]) -> Any:
    """What a page without neighbours is sent."""
    return draw(view, context, view.fill(context) if context else None, places, messages)


SELECTIONS = [
    {},
    {"phase": "decode"},
    {"tag": "code", "order": "load"},
    {"phase": "prefill", "tag": HOSTILE, "measure": "mass"},
    {"tag": LONG, "measure": "share"},
    {"layer": 3},
    {"layer": 4},
    {"layer": 6, "factor": 2.0},
    {"ranks": 5, "placement": "striped", "between": (1.0, 3.0)},
    {"ranks": 64, "placement": "recorded"},
    {"ranks": 8, "redundant": 1, "nodes": 2, "gpu": "h20"},
    {"batch": 4, "gains": "yes"},
    {"model": "mixtral-8x7b", "ranks": 4, "dtype": "fp8"},
    {"model": "jamba-v0.1", "ranks": 3, "nodes": 2, "length": 100},
]


def text_of(component: Any) -> str:
    return json.dumps(component, default=lambda item: item.to_plotly_json(), ensure_ascii=False)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda chosen: "-".join(chosen) or "all")
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.path)
def test_every_view_of_every_selection(
    view: View, selection: dict[str, Any], scheme: str, context: Make
) -> None:
    content = view.fill(context(scheme, **selection))
    assert set(content.panels) == {panel.name for panel in view.panels}
    for filled in content.panels.values():
        assert filled.figure.data or filled.figure.layout.annotations[0].text
        assert set(filled.table.columns) <= set(DEFINITIONS)
        filled.figure.to_json()
    assert {card.name for card in content.cards} <= set(DEFINITIONS)
    assert "NaN" not in text_of(list(content.body))
    assert not any("nan" in card.value + card.note for card in content.cards)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.path)
def test_sums_that_are_no_numbers_are_dashes(view: View, context: Make) -> None:
    """As of a recording whose gate outputs or times were damaged."""

    def spoiled(arrays: dict[str, Any]) -> dict[str, Any]:
        return {
            name: np.full_like(array, np.nan) if array.dtype.kind == "f" else array
            for name, array in arrays.items()
        }

    base = context(layer=2)
    totals = base.whole.totals
    totals = replace(totals, sums=spoiled(totals.sums), lists=spoiled(totals.lists))
    whole = replace(base.whole, totals=totals)
    content = view.fill(replace(base, whole=whole, profile=whole))
    for filled in content.panels.values():
        filled.figure.to_json()
        assert "nan" not in filled.caption
    assert "NaN" not in text_of([*content.lead, *content.body])
    assert not any("nan" in card.value + card.note for card in content.cards)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.path)
def test_views_are_complete(view: View) -> None:
    assert view.question.endswith("?")
    assert set(view.reports) <= set(TABLES)
    assert all(panel.label and panel.title for panel in view.panels)
    assert at(f"/{view.path}") is view


def test_addresses() -> None:
    assert at("/") is at(None) is VIEWS[0]
    assert at("/../../etc/passwd") is None
    assert at("/nonsense") is None


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.path)
def test_a_recording_without_a_window(view: View, writer: Writer) -> None:
    profile = routeprof.load(writer.path)
    activity = routeprof.dashboards.live.source.Source(writer.path).read().activity
    content = view.fill(Context(profile, profile, ViewState(), "light", activity, 0.0))
    for filled in content.panels.values():
        assert filled.figure.layout.annotations[0].text


def test_heatmap_leaves_uncaptured_layers_empty_and_names_them(context: Make) -> None:
    filled = heatmap.heatmap(context())
    trace = filled.figure.data[0]
    assert list(trace.y) == ["6", "5 · idle", "4 · unsupported", "3 · silent", "2", "1"]
    assert np.isnan(trace.z[1:4]).all()
    assert np.isfinite(trace.z[[0, 4, 5]]).all()
    assert set(filled.table["layer"]) == {1, 2, 6}


def test_heatmap_values_are_those_of_the_report(context: Make) -> None:
    view = context(phase="decode", order="rank")
    trace = heatmap.heatmap(view).figure.data[0]
    experts = view.profile.experts()
    own = experts[experts["layer"] == 6].sort_values("tokens", ascending=False, kind="stable")
    assert trace.text[0].tolist() == own["expert"].tolist()
    np.testing.assert_allclose(trace.customdata[0], own["load_over_mean"], rtol=1e-6)


def test_heatmap_columns_stay_experts_when_sorted_by_the_load_of_all(context: Make) -> None:
    view = context(order="load")
    trace = heatmap.heatmap(view).figure.data[0]
    loads = view.profile.experts().groupby("expert")["load_over_mean"].sum()
    expected = loads.sort_values(ascending=False, kind="stable").index.tolist()
    assert all(row.tolist() == expected for row in trace.text)


def test_layer_shows_the_worst_unless_told(context: Make) -> None:
    view = context()
    table = view.profile.layers()
    assert view.layer is not None
    assert view.layer.index == table.loc[table["imbalance_ratio"].idxmax(), "layer"]
    experts = layer.experts(view, view.layer)
    assert experts.table["expert_tokens"].sum() == table.loc[5, "assignments"]
    assert len(experts.figure.data[0].y) == EXPERTS


def test_layer_that_was_not_captured_says_so(context: Make) -> None:
    content = layer.fill(context(layer=3))
    assert content.cards[0].value == "silent"
    assert "not zero" in content.panels["experts"].figure.layout.annotations[0].text
    reason = layer.fill(context(layer=4)).cards[0].note
    assert HOSTILE in reason


def test_timeline_adds_up(context: Make) -> None:
    view = context()
    table = timeline.series(view.profile, 6)
    assert len(table) == 8
    assert (table["imbalance_worst"] >= table["imbalance_median"]).all()
    assert table["token_rate"].sum() == pytest.approx(view.layers["tokens"].max())
    assert table["steps"].sum() == view.layers["steps"].max()


def test_timeline_breaks_where_nothing_was_routed() -> None:
    table = pd.DataFrame({"time": [1.0, 2.0, 60.0], "token_rate": [5.0, 6.0, 7.0]})
    drawn = timeline.with_gaps(table, 1.0)
    assert drawn["token_rate"].isna().tolist() == [False, False, True, False]
    assert timeline.with_gaps(table.head(2), 1.0) is not drawn


def test_overflow_of_all_layers_is_that_of_the_report(context: Make) -> None:
    view = context(factor=1.0)
    report = view.profile.overflow()
    every = overflow.over_factors(view, report)
    assert every["capacity_factor"].tolist() == list(FACTORS)
    at_one = report[report["capacity_factor"] == 1.0]
    routed = view.layers["assignments"].sum()
    assert every["overflow_rate"].iloc[0] == at_one["overflow_assignments"].sum() / routed
    assert every["overflow_worst"].iloc[0] == at_one["overflow_rate"].max()
    # At a factor of 1 there are about as many slots as assignments: what overflows is missing.
    assert every["padding_rate"].iloc[0] == pytest.approx(every["overflow_rate"].iloc[0], abs=0.1)


@pytest.mark.parametrize(
    ("happened", "verb"),
    [
        ([False, False], "would overflow"),
        ([True, True], "overflowed"),
        ([True, False], "overflowed or would overflow"),
    ],
)
def test_only_what_was_dropped_overflowed(happened: list[bool], verb: str) -> None:
    assert overflow.verb(pd.DataFrame({"happened": happened})) == verb


def test_overview_puts_the_worst_first(context: Make) -> None:
    worst = overview.worst_layers(context())
    assert worst["imbalance_ratio"].is_monotonic_decreasing
    assert set(worst["layer"]) == {1, 2, 6}
    cards = {card.name: card for card in overview.cards(context())}
    assert cards["captured_layers"].value == "3 of 6"
    assert cards["captured_layers"].tone == "bad"


def test_health_tells_states_apart_and_never_invents_zeros(context: Make) -> None:
    table = health.layer_table(context()).set_index("layer")
    assert table["state"].to_dict() == {
        1: "captured",
        2: "captured",
        3: "silent",
        4: "unsupported",
        5: "idle",
        6: "captured",
    }
    assert table.loc[[3, 4, 5], ["tokens", "assignments", "invalid"]].isna().all(axis=None)
    ranks = health.ranks(context())
    assert ranks["problems"].tolist() == ["missed passes: 2"]
    assert ranks["own_cost"].tolist() == [pytest.approx(0.08)]


def test_text_of_the_recording_stays_text(context: Make) -> None:
    """Markup may only be in children, which the browser shows as text."""
    for view in VIEWS:
        content = view.fill(context(tag=HOSTILE, layer=2))
        for filled in content.panels.values():
            assert "<img" not in filled.figure.to_json()
        assert "dangerouslySetInnerHTML" not in text_of(list(content.body))


# -- drawing


def test_draw_sends_rows_only_of_unfolded_tables(context: Make) -> None:
    places = Places(["experts", "steps", "gone"], ["gone", "experts", "steps"], {"experts"})
    values = drawn(layer.VIEW, context(), places, ["ignored"])
    notices, cards, _, _, figures, captions, folds, columns, rows, links, _, _, hidden = values
    assert len(notices) == 1
    assert len(cards) == 7
    assert len(figures) == len(captions) == len(folds) == 3
    assert len(rows[1]) == EXPERTS
    assert columns[0] is rows[0] is rows[2] is figures[2] is folds[0]  # no update
    assert [link.href for link in links] == ["/csv/experts.csv", "/csv/layers.csv"]
    assert hidden is False


def test_draw_brings_a_grid_when_its_numbers_are_first_wanted(context: Make) -> None:
    places = Places(["experts", "steps"], ["steps"], {"experts", "steps"})
    *_, folds, columns, rows, _, _, _, _ = drawn(layer.VIEW, context(), places, [])
    fresh, there = folds
    assert there is no_update
    assert len(fresh.rowData) == EXPERTS
    assert fresh.columnDefs[0]["field"] == "expert"
    assert len(columns) == len(rows) == 1
    assert rows[0] is not no_update


def test_only_views_that_let_the_reader_choose_time_have_its_slider(context: Make) -> None:
    for item in VIEWS:
        *_, slider, said, _ = drawn(item, context(), NOWHERE, [])
        assert bool(slider) == bool(said) == ("between" in item.controls)  # of all of the time


def test_a_slider_that_its_reader_may_be_moving_is_left_alone(context: Make) -> None:
    """But for when it has to reach further."""
    ends = [time_stops(context().whole)[0], 0.5]
    sliders = [drawn(heatmap.VIEW, context(), Places([], [], [], end), [])[-3] for end in ends]
    assert sliders[0] is no_update
    assert len(sliders[1]) == 2


def test_draw_of_nothing_hides_the_content() -> None:
    values = drawn(
        overview.VIEW, None, Places(["imbalance"], [], set()), ["There is no recording."]
    )
    assert values[-1] is True
    assert "There is no recording." in text_of(values[0])


def test_an_empty_selection_is_said(context: Make) -> None:
    base = context()
    nothing = base.whole.select(phase="decode").select(tag="code")
    only = nothing.select(phase="decode")
    totals = only.totals.only(lambda key: False)
    empty = routeprof.profile.replace(only, totals=totals)
    view = Context(base.whole, empty, base.state, "light", base.activity, base.now)
    for item in VIEWS:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            values = drawn(item, view, Places([panel.name for panel in item.panels], [], set()), [])
        assert "Nothing was recorded" in text_of(values[0])


def test_the_zoom_survives_a_new_window_and_not_another_measure() -> None:
    view = heatmap.VIEW
    assert revision(view, ViewState()) == revision(view, ViewState(phase="decode"))
    assert revision(view, ViewState()) != revision(view, ViewState(measure="share"))


@pytest.mark.parametrize(
    ("leads", "point", "target"),
    [
        ("cell", {"x": 3, "y": "12", "z": 1.0, "text": 5}, ("/expert", "?layer=12&expert=5")),
        ("cell", {"x": 3, "y": "4 · silent", "z": None}, None),
        ("layer", {"x": 7, "y": 1.5}, ("/layer", "?layer=7")),
        ("layer", {"x": "8–15", "y": 3}, None),
        ("expert", {"x": 0, "customdata": 9}, ("/expert", "?layer=2&expert=9")),
        ("expert", {}, None),
        ("", {"x": 7, "y": 1.5}, None),
    ],
)
def test_click_target(leads: Any, point: dict[str, Any], target: tuple[str, str] | None) -> None:
    panel = Panel("name", "Title", "Label", leads=leads)
    assert click_target(panel, {"points": [point]}, ViewState(layer=2)) == target
    assert click_target(panel, {"points": []}, ViewState()) is None


@pytest.mark.parametrize(
    ("drag", "between"),
    [
        ({"range": {"x": [1.5, 4.25], "y": [0, 1]}}, (1.5, 4.25)),
        ({"range": {"x": [4, -2]}}, (0.0, 4.0)),
        ({"range": {"x": [3, 3]}}, None),
        ({"points": []}, None),
        (None, None),
    ],
)
def test_a_range_that_was_dragged_over(
    context: Make, drag: Any, between: tuple[float, float] | None
) -> None:
    assert picked_range(drag, context().whole) == between


def test_a_range_of_time_filters_every_view_but_the_timeline(context: Make) -> None:
    view, all_of_it = context(between=(1.0, 3.0)), context()
    assert sum(view.layers["steps"].dropna()) == 2 / 8 * sum(all_of_it.layers["steps"].dropna())
    assert "1 to 3 s" in heatmap.heatmap(view).caption
    shaded = timeline.fill(view).panels["tokens_time"]
    assert len(shaded.table) == 8
    assert [shape.x1 for shape in shaded.figure.layout.shapes] == [3.0]


def test_a_range_without_an_end_is_shaded_up_to_the_last_window(context: Make) -> None:
    view, with_end = context(between=(3.0, math.inf)), context(between=(3.0, 8.0))
    pd.testing.assert_frame_equal(view.layers, with_end.layers)
    assert "from 3 s on" in heatmap.heatmap(view).caption
    (shape,) = timeline.fill(view).panels["tokens_time"].figure.layout.shapes
    assert (shape.x0, shape.x1) == (3.0, 8.0)


def test_each_term_explains_itself() -> None:
    shown = text_of(term("imbalance_ratio"))
    assert DEFINITIONS["imbalance_ratio"].text in shown


def test_the_path_of_the_test_recording_is_in_no_view(context: Make, recorded: Path) -> None:
    for view in VIEWS:
        assert str(recorded) not in text_of(list(view.fill(context()).body))
