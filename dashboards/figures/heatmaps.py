"""Heatmaps of layers and experts; arrays in, ``go.Figure`` out."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from routeprof.dashboards.figures.common import new_figure, small
from routeprof.dashboards.figures.palette import PALETTES, SEQUENTIAL, Scheme, diverging

MOST_DOUBLINGS = 3
"""The load scale ends at eight times the mean and at an eighth of it."""


def load_heatmap(
    load_over_mean: NDArray[Any],
    rows: list[str],
    experts: NDArray[Any],
    scheme: Scheme,
    axis: str = "expert",
    cell: str = "expert",
) -> go.Figure:
    """Load ÷ mean by layer and expert, on a scale of doublings around 1.

    Args:
        load_over_mean: [layers, places]; NaN where there is no value.
        rows: what the layers are called.
        experts: [layers, places], which expert is at each place.
        axis: what the places are.
        cell: what a place holds: an expert, or a rank of experts.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        doublings = np.log2(load_over_mean)
    finite = np.abs(doublings[np.isfinite(doublings)])
    reach = float(np.clip(np.ceil(finite.max(initial=1.0)), 1, MOST_DOUBLINGS))
    # An expert without tokens is the coldest colour, not a hole: holes are "not captured".
    z = np.clip(doublings, -reach, reach)
    ticks = np.arange(-reach, reach + 1)
    value = "%{customdata:.2f} × mean"
    figure = _heatmap(z, load_over_mean, rows, experts, scheme, value, axis, cell)
    figure.update_traces(
        colorscale=diverging(scheme),
        zmin=-reach,
        zmax=reach,
        colorbar={
            "tickvals": small(ticks),
            "ticktext": [_doubling(int(tick)) for tick in ticks],
            "title": {"text": "load / mean", "side": "right", "font_size": 13},
        },
    )
    return figure


def _doubling(tick: int) -> str:
    return f"{2**tick} ×" if tick >= 0 else f"1/{2**-tick} ×"


def share_heatmap(
    shares: NDArray[Any],
    rows: list[str],
    experts: NDArray[Any],
    scheme: Scheme,
    title: str,
    axis: str = "expert",
) -> go.Figure:
    """A share (0…1) by layer and expert; arguments as of ``load_heatmap``."""
    figure = _heatmap(shares, shares, rows, experts, scheme, "%{customdata:.2%}", axis)
    figure.update_traces(
        colorscale=SEQUENTIAL,
        zmin=0,
        colorbar={"tickformat": ".1~%", "title": {"text": title, "side": "right", "font_size": 13}},
    )
    return figure


def _heatmap(
    z: NDArray[Any],
    shown: NDArray[Any],
    rows: list[str],
    experts: NDArray[Any],
    scheme: Scheme,
    value: str,
    axis: str,
    cell: str = "expert",
) -> go.Figure:
    figure = new_figure(scheme)
    # From the bottom up: a reversed axis would be turned round by a double click.
    figure.add_heatmap(
        z=small(z[::-1]),
        y=rows[::-1],
        customdata=small(shown[::-1]),
        text=small(experts[::-1]),
        hoverongaps=False,
        hovertemplate=f"layer %{{y}}<br>{cell} %{{text}}<br>{value}<extra></extra>",
        colorbar={"thickness": 14, "outlinewidth": 0, "len": 1, "lenmode": "fraction"},
    )
    figure.update_xaxes(title_text=axis, showgrid=False)
    figure.update_yaxes(title_text="layer", type="category", showgrid=False)
    # Holes show the page's "not captured" shade.
    figure.update_layout(plot_bgcolor=PALETTES[scheme].absent)
    return figure


def label_columns(figure: go.Figure, experts: NDArray[np.int64]) -> None:
    """Write the experts' numbers below a heatmap whose columns are in another order."""
    every = max(1, len(experts) // 24)
    places = np.arange(0, len(experts), every)
    figure.update_xaxes(tickvals=small(places), ticktext=[str(experts[n]) for n in places])
