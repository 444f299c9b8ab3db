from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import pandas as pd
import pytest

import routeprof
from routeprof.dashboards.live.source import Source
from routeprof.dashboards.panels import stepwise
from routeprof.dashboards.panels.factors import among_recorded, exact
from routeprof.dashboards.panels.stepwise import LayerSteps
from routeprof.dashboards.state import ViewState
from routeprof.dashboards.view import Context
from routeprof.dashboards.views import overflow
from routeprof.profile import Profile
from tests.commands.conftest import recording
from tests.dashboards.made import FACTORS

Make = Callable[..., Context]

__all__ = ["recording"]


def look(path: Path, phase: str | None = None) -> Context:
    profile, reading = routeprof.load(path), Source(path).read()
    return Context(
        profile,
        profile.narrowed(phase, None),
        ViewState(phase=phase),
        "light",
        reading.activity,
        time(),
    )


def rates(profile: Profile, factor: Fraction) -> dict[int, tuple[int, int]]:
    """By layer: assignments above capacity and all of them, one step and expert at a time."""
    table = profile.step_counts()
    found: dict[int, tuple[int, int]] = {}
    for index, tokens, counts in zip(table.layer, table.tokens, table.counts, strict=True):
        layer = profile.layer(int(index))
        slots = math.ceil(factor * int(tokens) * layer.top_k / layer.experts)
        over, routed = found.get(int(index), (0, 0))
        over += sum(max(0, int(count) - slots) for count in counts)
        found[int(index)] = (over, routed + int(tokens) * layer.top_k)
    return found


@pytest.mark.parametrize("phase", [None, "prefill", "decode"])
def test_factors_from_steps_are_the_smallest(recording: Path, phase: str | None) -> None:
    view = look(recording, phase)
    title, table = overflow.factors_needed(view, view.profile.overflow())
    assert "exact" in title
    assert table["accepted_rate"].tolist() == [0.0, 0.001, 0.01]
    for row in table.itertuples():
        rate = Fraction(str(row.accepted_rate))

        def all_fit(factor: Fraction, rate: Fraction = rate) -> bool:
            pairs = rates(view.profile, factor).values()
            return sum(over for over, _ in pairs) <= rate * sum(routed for _, routed in pairs)

        def each_fits(factor: Fraction, rate: Fraction = rate) -> bool:
            return all(
                over <= rate * routed for over, routed in rates(view.profile, factor).values()
            )

        for text, fits in ((row.factor_needed, all_fit), (row.factor_needed_worst, each_fits)):
            assert fits(Fraction(text))
            assert not fits(Fraction(text) - Fraction(1, 10_000))
        over, routed = rates(view.profile, Fraction(row.factor_needed_worst) - Fraction(1, 10_000))[
            row.worst_layer
        ]
        assert over > rate * routed  # this layer is the one that needs it


def test_too_many_steps_are_answered_from_the_recorded_factors(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepwise, "MOST_CELLS", 10)
    view = look(recording)
    title, table = overflow.factors_needed(view, view.profile.overflow())
    assert "recorded" in title
    assert table["factor_needed"].str.contains("between|above|at most").all()


def test_factors_at_level_windows_lie_between_those_recorded(context: Make) -> None:
    view = context()
    report = view.profile.overflow()
    _, table = overflow.factors_needed(view, report)
    routed = view.layers["assignments"].sum()
    for row in table.itertuples():
        together = [
            report.loc[report["capacity_factor"] == factor, "overflow_assignments"].sum() / routed
            <= row.accepted_rate
            for factor in FACTORS
        ]
        worst = [
            (
                report.loc[report["capacity_factor"] == factor, "overflow_rate"]
                <= row.accepted_rate
            ).all()
            for factor in FACTORS
        ]
        assert row.factor_needed == words(together)
        assert row.factor_needed_worst == words(worst)


def words(enough: list[bool]) -> str:
    for place, yes in enumerate(enough):
        if yes and not place:
            return f"at most {FACTORS[0]:g}"
        if yes:
            return f"between {FACTORS[place - 1]:g} and {FACTORS[place]:g}"
    return f"above {FACTORS[-1]:g}"


def test_each_answer_among_recorded_factors() -> None:
    every = pd.DataFrame(
        {
            "capacity_factor": [1.0, 1.5, 2.0],
            "overflow_rate": [0.01, 0.0005, 0.0],
            "overflow_worst": [0.03, 0.004, 0.002],
        }
    )
    table = pd.DataFrame(
        {
            "layer": [1, 2] * 3,
            "capacity_factor": [1.0, 1.0, 1.5, 1.5, 2.0, 2.0],
            "overflow_rate": [0.03, 0.0, 0.001, 0.004, 0.001, 0.002],
        }
    )
    found = among_recorded(every, table)
    assert found["factor_needed"].tolist() == [
        "between 1.5 and 2",
        "between 1 and 1.5",
        "at most 1",
    ]
    assert found["factor_needed_worst"].tolist() == ["above 2", "above 2", "between 1 and 1.5"]
    assert found["worst_layer"].tolist() == [2, 2, 1]


def test_a_rate_that_is_just_reached_is_accepted() -> None:
    """10 of 1000 assignments are above 500 slots, and 500 slots are more than 0.998 × 500."""
    steps = {3: LayerSteps(np.array([[510, 490]]), np.array([500]))}
    found = exact(steps, {3: 2}).set_index("accepted_rate")
    assert found["factor_needed"].to_dict() == {0.0: "1.0181", 0.001: "1.0161", 0.01: "0.9981"}
    assert found["factor_needed_worst"].tolist() == found["factor_needed"].tolist()


def test_a_recording_without_factors(context: Make) -> None:
    view: Any = context()
    info = replace(view.profile.info, capacity_factors=())
    nothing = np.zeros((*view.profile.totals.lists["overflow"].shape[:2], 0), dtype=np.int64)
    lists = view.profile.totals.lists | dict.fromkeys(
        ("overflow", "overflow_steps", "capacity_slots"), nothing
    )
    profile = replace(view.profile, info=info, totals=replace(view.profile.totals, lists=lists))
    content = overflow.fill(replace(view, whole=profile, profile=profile))
    assert all(not len(filled.figure.data) for filled in content.panels.values())
