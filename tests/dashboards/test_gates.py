from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from routeprof.dashboards.panels.gates import expert_rows, gate_outputs
from routeprof.dashboards.view import Context
from routeprof.dashboards.views import layer
from tests.dashboards.made import EXPERTS

Make = Callable[..., Context]


@pytest.mark.parametrize("phase", [None, "decode"])
def test_gate_outputs_are_means_over_tokens(context: Make, phase: str | None) -> None:
    view = context(layer=2, phase=phase)
    assert view.layer is not None
    table = gate_outputs(view, view.layer)
    assert len(table) == 1
    # What made.py put in for every token.
    expected = {
        "gate_entropy": 2.0,
        "top1_probability": 0.4,
        "margin": 0.1,
        "router_z_loss": 1.0,
        "mean_weight": 0.5,
    }
    assert table.iloc[0].to_dict() == pytest.approx(expected)
    row = view.row(view.layer)
    assert row["gate_entropy"] == pytest.approx(table["gate_entropy"].iloc[0])


def test_mass_and_load_of_each_expert(context: Make) -> None:
    filled = layer.fill(context(layer=6)).panels["gate"]
    line, dots = filled.figure.data
    assert line.x.tolist() == line.y.tolist()
    skew = np.arange(EXPERTS, 0, -1.0) ** 2
    np.testing.assert_allclose(dots.x, skew / skew.sum(), rtol=1e-6)
    experts = context().profile.experts().query("layer == 6")
    np.testing.assert_allclose(dots.y, experts["tokens"] / experts["tokens"].sum(), rtol=1e-6)
    assert dots.customdata.tolist() == list(range(EXPERTS))


def test_router_outputs_that_were_not_recorded_are_no_zeros(context: Make) -> None:
    view = context(layer=6)
    totals = view.profile.totals
    lists, sums = dict(totals.lists), dict(totals.sums)
    for name in ("probability_mass", "weight_sum"):
        lists[name] = np.full_like(lists[name], np.nan)
    for name in ("entropy_sum", "top1_sum", "margin_sum", "z_sum"):
        sums[name] = np.full_like(sums[name], np.nan)
    profile = replace(view.profile, totals=replace(totals, lists=lists, sums=sums))
    content = layer.fill(replace(view, profile=profile))
    assert "No probabilities" in content.panels["gate"].figure.layout.annotations[0].text
    assert list(content.body) == [None]
    without = replace(profile, info=replace(profile.info, gate=False))
    text = layer.fill(replace(view, profile=without)).panels["gate"].figure.layout.annotations[0]
    assert "gate=False" in text.text


def test_a_part_of_the_outputs(context: Make) -> None:
    """Routers that hand out probabilities have no logits to square."""
    view = context(layer=6)
    totals = view.profile.totals
    sums = totals.sums | {"z_sum": np.full_like(totals.sums["z_sum"], np.nan)}
    profile = replace(view.profile, totals=replace(totals, sums=sums))
    assert view.layer is not None
    table = gate_outputs(replace(view, profile=profile), view.layer)
    assert table["router_z_loss"].isna().all()
    assert table["margin"].iloc[0] == pytest.approx(0.1)


@pytest.mark.parametrize("selection", [{}, {"phase": "decode"}, {"tag": "code"}])
@pytest.mark.parametrize("number", [1, 2, 6])
def test_rows_of_one_layer_are_those_of_the_report(
    context: Make, selection: dict[str, str], number: int
) -> None:
    view = context(layer=number, **selection)
    assert view.layer is not None
    expected = view.profile.experts().query("layer == @number").reset_index(drop=True)
    found = expert_rows(view.profile, view.layer)
    for name in found.columns:
        np.testing.assert_allclose(found[name], expected[name].astype(float), rtol=1e-12)
