from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeprof.dashboards.controls import control
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.panels import placements, stepwise
from routeprof.dashboards.panels.command_line import command_line
from routeprof.dashboards.state import ViewState
from routeprof.dashboards.view import Context, Filled
from routeprof.dashboards.views import ranks
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.comparison import compare
from tests.commands.conftest import recording
from tests.dashboards.made import CAPTURED, EXPERTS, HOSTILE
from tests.dashboards.tokens import context_of

Make = Callable[..., Context]

__all__ = ["recording"]


def panel(view: Context) -> Filled:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ranks.fill(view).panels["placements"]


def said(filled: Filled) -> str:
    assert not filled.figure.data
    return str(filled.figure.layout.annotations[0].text).replace("<br>", " ")


def body(view: Context) -> str:
    parts = list(ranks.fill(view).body)
    return json.dumps(parts, default=lambda item: item.to_plotly_json(), ensure_ascii=False)


def test_nothing_is_placed_unless_asked_for(context: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "compare", None)  # whose call would raise
    assert "Made where it is asked for" in said(panel(context()))
    assert "whatif placement RECORDING" not in body(context())


@pytest.mark.parametrize(
    ("number", "redundant", "slots"), [(4, 0, 16), (4, 1, 20), (8, 2, 32), (5, 1, 25)]
)
def test_sums_are_shown_as_fitted(context: Make, number: int, redundant: int, slots: int) -> None:
    view = context(ranks=number, redundant=redundant, phase="decode")
    filled = panel(view)
    made = compare(view.profile, Cluster.even(number, slots), effort="low")
    assert made.held_out is None
    assert filled.table["layer"].tolist() == list(made.layers) == list(CAPTURED)
    names = {
        "placement_today": ("today, in order", made.fitted.before),
        "placement_eplb": ("EPLB", made.fitted.eplb),
        "placement_routeprof": ("routeprof", made.fitted.routeprof),
        "placement_bound": ("lower bound", made.fitted.lower_bound),
    }
    drawn = {trace.name: trace for trace in filled.figure.data}
    for column, (name, values) in names.items():
        assert filled.table[column].tolist() == values.tolist()
        shown = np.asarray(drawn[name].y, dtype=float)
        if name == "lower bound":  # a line over the width of each layer's bars
            shown = shown[::3]
        np.testing.assert_allclose(shown, values, rtol=1e-6)
    assert filled.caption.count("Fitted:") == 1
    assert "Held out" not in filled.caption
    assert f"{slots} slots a layer, {slots - EXPERTS} of them redundant" in filled.caption
    assert f"routeprof {np.mean(made.fitted.routeprof):.3f}" in filled.caption
    assert f"--gpus {number} --slots {slots} --out placed --phase decode" in body(view)
    assert {"silent", "unsupported", "idle"} <= {
        note.text for note in filled.figure.layout.annotations
    }


def test_steps_are_judged_on_those_that_come_later(recording: Path) -> None:
    view = context_of(recording, ranks=2, redundant=1)
    filled = panel(view)
    made = compare(view.profile, Cluster.even(2, 10), effort="low")
    assert made.held_out is not None
    assert filled.table["placement_routeprof"].tolist() == made.held_out.routeprof.tolist()
    assert filled.table["placement_bound"].tolist() == made.held_out.lower_bound.tolist()
    assert f"Held out: fitted on the first {made.steps[0]} steps" in filled.caption
    assert "Fitted:" not in filled.caption
    worse = made.held_out.means()["routeprof"] > made.held_out.means()["before"]
    assert ("halves differ" in filled.caption) == worse


def test_more_ranks_than_experts_have_no_placement_today(context: Make) -> None:
    filled = panel(context(ranks=EXPERTS + 4, redundant=0))
    assert filled.table["placement_today"].isna().all()
    assert [trace.name for trace in filled.figure.data] == ["EPLB", "routeprof", "lower bound"]
    assert "fewer experts than ranks" in filled.caption
    assert "today" not in filled.caption
    assert "4 of them redundant" in filled.caption


def test_what_cannot_be_placed_is_one_line(context: Make) -> None:
    view = context(redundant=1)
    nothing = replace(view, profile=view.profile.narrowed("decode", "of nothing"))
    assert "no tokens" in said(panel(nothing))


def test_too_many_steps_are_left_to_the_command(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepwise, "MOST_CELLS", 10)
    view = context_of(recording, ranks=2, redundant=1)
    assert "more steps than a page" in said(panel(view))
    assert "routeprof whatif placement RECORDING --gpus 2 --slots 10" in body(view)


def test_the_command_keeps_hostile_text_one_word(context: Make) -> None:
    tag = f"{HOSTILE} '; rm -rf ~; echo"
    view = replace(context(), state=ViewState(tag=tag, between=(1.5, 4.0)))
    line = command_line(view, "placement", gpus=8, nodes=None)
    assert shlex.split(line) == [
        *"routeprof whatif placement RECORDING --gpus 8 --tag".split(),
        tag,
        *"--between 1.5-4".split(),
    ]


def test_the_control_offers_replicas_by_rank(recording: Path) -> None:
    opened = Library(recording).open("?redundant=3")
    assert not opened.ignored
    offered: Any = control("redundant", opened, [], ranks.VIEW.controls)
    assert [item["value"] for item in offered.data] == "all 0 1 2 3 4".split()
    assert offered.data[0]["label"] == "Not computed"
    assert offered.value == "3"
