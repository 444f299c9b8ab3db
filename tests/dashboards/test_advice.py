from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeprof.dashboards.panels import advice as panel
from routeprof.dashboards.panels.advice import _between, advice, every_factor
from routeprof.dashboards.view import Context
from routeprof.dashboards.views import overflow
from routeprof.whatif.advice import recommend
from routeprof.whatif.capacity import curve
from tests.commands.conftest import recording
from tests.dashboards.test_factors import rates
from tests.dashboards.tokens import context_of

Make = Callable[..., Context]

__all__ = ["recording"]


def text_of(part: Any) -> str:
    return json.dumps(part, default=lambda item: item.to_plotly_json(), ensure_ascii=False)


@pytest.mark.parametrize("phase", [None, "decode"])
def test_the_table_is_what_is_recommended(recording: Path, phase: str | None) -> None:
    view = context_of(recording, phase=phase)
    table = panel._table(recommend(view.profile))
    assert table["goal"].tolist() == ["latency-bound serving", "quality-bound scoring"]
    for row, one in zip(table.itertuples(), recommend(view.profile), strict=True):
        assert row.factor_advised == f"{one.factor:g}"
        assert (row.advice_phase, row.certainty) == (one.phase, "exact")
        assert (row.overflow_most, row.padding_most) == (one.overflow_rate, one.padding_rate)
    assert f'"{table["factor_advised"][0]}"' in text_of(advice(view))


def test_from_windows_it_is_bounded(context: Make) -> None:
    assert '"bounded"' in text_of(advice(context()))


def test_many_windows_are_left_to_the_command(
    context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel, "MOST_SUMS", 3)
    monkeypatch.setattr(panel, "recommend", None)
    assert "routeprof whatif capacity RECORDING --phase decode" in text_of(
        advice(context(phase="decode"))
    )


def test_no_tokens_have_no_recommendation(context: Make) -> None:
    view = context()
    nothing = view.profile.narrowed("decode", "of nothing")
    assert advice(Context(nothing, nothing, view.state, "light", view.activity, 0.0)) is None


@pytest.mark.parametrize("phase", [None, "decode"])
def test_rates_at_any_factor_equal_counting_steps_one_by_one(
    recording: Path, phase: str | None
) -> None:
    view = context_of(recording, phase=phase)
    filled = overflow.fill(view).panels["factors"]
    recorded = view.profile.info.capacity_factors
    assert set(recorded) < set(filled.table["capacity_factor"])
    assert len(filled.table) > 3 * len(recorded)
    assert "between the recorded factors too" in filled.caption
    for row in filled.table.iloc[::7].itertuples():
        pairs = rates(view.profile, row.capacity_factor)
        over, routed = (sum(own) for own in zip(*pairs.values(), strict=True))
        assert row.overflow_rate == over / routed
        assert row.overflow_worst == max(over / routed for over, routed in pairs.values())
    padding = curve(view.profile, filled.table["capacity_factor"].tolist())
    padding = padding[padding["layer"] == "all"]
    np.testing.assert_array_equal(filled.table["padding_rate"], padding["padding_rate"])


def test_from_windows_only_recorded_factors_are_drawn(context: Make) -> None:
    filled = overflow.fill(context()).panels["factors"]
    assert filled.table["capacity_factor"].tolist() == list(context().profile.info.capacity_factors)
    assert "between them lines only join" in filled.caption


def test_a_curve_that_disagrees_with_the_sums_is_not_drawn(recording: Path) -> None:
    view = context_of(recording)
    every = overflow.over_factors(view, view.profile.overflow())
    assert every_factor(view, every) is not None
    every.loc[0, "overflow_rate"] += 0.01
    assert every_factor(view, every) is None


def test_the_more_steps_the_fewer_factors() -> None:
    recorded = [1.0, 1.25, 2.0]
    assert _between(recorded, 100) == [round(1 + 0.05 * place, 2) for place in range(21)]
    assert _between(recorded, 12) == [1.0, 1.25, 1.5, 1.75, 2.0]
    assert _between(recorded, 3) == []
    assert _between([1.25], 100) == []
