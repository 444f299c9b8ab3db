from __future__ import annotations

from typing import Any, get_args

import numpy as np
import plotly.graph_objects as go
import pytest

from routeprof.dashboards.figures.common import (
    GRAPH_CONFIG,
    blank,
    expert_bars,
    histogram,
    lines,
    small,
)
from routeprof.dashboards.figures.heatmaps import load_heatmap, share_heatmap
from routeprof.dashboards.figures.layers import bars_by_layer, imbalance_by_layer
from routeprof.dashboards.figures.palette import PALETTES, Scheme

LOADS = np.array([[2.0, 0.0, 1.0], [np.nan, np.nan, np.nan]])
ORDER = np.array([[0, 1, 2], [0, 1, 2]])
LAYERS = np.array([1, 4])
ONES = np.array([1.0, 2.0])

FIGURES = {
    "load": lambda scheme: load_heatmap(LOADS, ["1", "2 · silent"], ORDER, scheme),
    "share": lambda scheme: share_heatmap(LOADS / 3, ["1", "2"], ORDER, scheme, "share"),
    "experts": lambda scheme: expert_bars(LOADS[0], ORDER[0], scheme),
    "imbalance": lambda scheme: imbalance_by_layer(
        LAYERS, ONES, ONES, ONES, {2: "silent", 3: "silent"}, scheme
    ),
    "bars": lambda scheme: bars_by_layer(LAYERS, {"a": ONES}, {}, "rate", scheme),
    "histogram": lambda scheme: histogram(["1", "2–3"], LAYERS, scheme, x="x", y="y"),
    "lines": lambda scheme: lines(ONES, {"a": ONES}, scheme, x_title="x", y_title="y"),
}


def test_no_chart_leaves_for_a_cloud() -> None:
    assert GRAPH_CONFIG["showSendToCloud"] is False
    assert GRAPH_CONFIG["displaylogo"] is False


@pytest.mark.parametrize("scheme", get_args(Scheme))
@pytest.mark.parametrize("name", FIGURES)
def test_figures_carry_narrow_arrays_and_their_scheme(name: str, scheme: Scheme) -> None:
    figure = FIGURES[name](scheme)
    assert figure.layout.template.layout.font.color == PALETTES[scheme].ink
    assert figure.layout.xaxis.title.text
    assert figure.layout.yaxis.title.text
    arrays = [value for trace in figure.data for value in _arrays(trace)]
    assert arrays
    assert {array.dtype.itemsize for array in arrays} <= {1, 2, 4}


def _arrays(trace: Any) -> list[Any]:
    return [
        trace[name]
        for name in ("x", "y", "z", "customdata", "text", "base", "width")
        if name in trace and isinstance(trace[name], np.ndarray) and trace[name].dtype.kind in "iuf"
    ]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0, 255], np.uint8),
        ([0, 256], np.uint16),
        ([-1, 200], np.int16),
        ([0, 2**40], np.float64),
        ([0.5], np.float32),
    ],
)
def test_small(values: list[float], dtype: type) -> None:
    narrow = small(np.array(values))
    assert narrow.dtype == dtype
    assert narrow.tolist() == values


def test_an_expert_without_tokens_is_the_coldest_and_no_value_is_a_hole() -> None:
    trace = FIGURES["load"]("light").data[0]
    assert trace.y == ("2 · silent", "1")  # from the bottom up
    assert trace.z[1].tolist() == [1.0, trace.zmin, 0.0]
    assert trace.zmin == -trace.zmax
    assert np.isnan(trace.z[0]).all()
    assert trace.hoverongaps is False
    assert trace.customdata[1].tolist() == [2.0, 0.0, 1.0]


def test_scales_are_even_around_the_mean() -> None:
    scale = load_heatmap(LOADS, ["1", "2"], ORDER, "dark").data[0].colorscale
    assert len(scale) % 2 == 1
    assert scale[len(scale) // 2][0] == 0.5


def test_absent_layers_are_shaded_once_for_each_run_and_named() -> None:
    figure = FIGURES["imbalance"]("light")
    assert [(shape.x0, shape.x1) for shape in figure.layout.shapes if shape.type == "rect"] == [
        (1.5, 3.5)
    ]
    assert "silent" in [note.text for note in figure.layout.annotations]


@pytest.mark.parametrize(("largest", "shown"), [(2.0, ".3~r"), (2000.0, "~s"), (np.nan, ".3~r")])
def test_ticks_of_ratios_are_not_in_thousandths(largest: float, shown: str) -> None:
    values = {"a": np.array([0.5, largest])}
    figure = lines(ONES, values, "light", x_title="x", y_title="y")
    assert figure.layout.yaxis.tickformat == shown


def test_blank_says_why() -> None:
    figure = blank("No steps yet.", "dark")
    assert isinstance(figure, go.Figure)
    assert figure.layout.annotations[0].text == "No steps yet."
    assert figure.layout.xaxis.visible is False
