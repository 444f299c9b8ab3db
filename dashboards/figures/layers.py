"""Figures with the layers as their x axis; those without counts say why.

Arrays in, ``go.Figure`` out. ``absent`` names the state of each layer that was not captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from routeprof.dashboards.figures.common import line_at, new_figure, small
from routeprof.dashboards.figures.palette import PALETTES, Scheme


def imbalance_by_layer(
    layers: NDArray[Any],
    overall: NDArray[Any],
    p50: NDArray[Any],
    p95: NDArray[Any],
    absent: Mapping[int, str],
    scheme: Scheme,
) -> go.Figure:
    """Each layer's max / mean over all steps, and from p50 to p95 of its steps."""
    colours = PALETTES[scheme]
    figure = new_figure(scheme)
    figure.add_bar(
        x=small(layers),
        base=small(p50),
        y=small(p95 - p50),
        customdata=small(np.stack([p50, p95], axis=1)),
        name="per step, p50 to p95",
        marker={"color": colours.blue, "opacity": 0.45, "line_width": 0},
        hovertemplate="steps p50 %{customdata[0]:.2f}, p95 %{customdata[1]:.2f}<extra></extra>",
    )
    figure.add_scatter(
        x=small(layers),
        y=small(overall),
        name="all steps together",
        mode="markers",
        marker={"color": colours.orange, "size": 8},
        hovertemplate="all steps %{y:.2f}<extra></extra>",
    )
    line_at(figure, 1.0, "perfect", scheme)
    layer_axis(figure, layers, absent, scheme)
    figure.update_yaxes(title_text="max / mean load", rangemode="tozero")
    figure.update_layout(hovermode="x unified")
    return figure


def bars_by_layer(
    layers: NDArray[Any],
    series: Mapping[str, NDArray[Any]],
    absent: Mapping[int, str],
    title: str,
    scheme: Scheme,
) -> go.Figure:
    """Shares (0…1) of each layer, one bar for each series."""
    figure = new_figure(scheme)
    for name, values in series.items():
        figure.add_bar(
            x=small(layers),
            y=small(values),
            name=name,
            marker_line_width=0,
            hovertemplate="%{y:.2%}",
        )
    layer_axis(figure, layers, absent, scheme)
    figure.update_yaxes(title_text=title, tickformat=".3~%", rangemode="tozero")
    figure.update_layout(hovermode="x unified", showlegend=len(series) > 1)
    return figure


def layer_axis(
    figure: go.Figure, layers: NDArray[Any], absent: Mapping[int, str], scheme: Scheme
) -> None:
    """Layers as the x axis; those without counts are shaded and say why."""
    everything = [*(int(layer) for layer in layers), *absent]
    figure.update_xaxes(
        title_text="layer",
        # Not a fixed range: that is how the page knows a reader's zoom.
        autorangeoptions={
            "include": [min(everything, default=0) - 0.5, max(everything, default=0) + 0.5]
        },
        showgrid=False,
        tickformat="d",
        tickvals=small(np.array(sorted(everything))) if len(everything) <= 32 else None,
    )
    for first, last, text in _runs(absent):
        figure.add_vrect(
            x0=first - 0.5,
            x1=last + 0.5,
            fillcolor=PALETTES[scheme].absent,
            line_width=0,
            layer="below",
        )
        figure.add_annotation(
            x=(first + last) / 2,
            y=0.5,
            yref="paper",
            text=text,
            textangle=-90 if last - first < 8 else 0,
            showarrow=False,
            font={"color": PALETTES[scheme].faint},
        )


def _runs(absent: Mapping[int, str]) -> list[tuple[int, int, str]]:
    runs: list[tuple[int, int, str]] = []
    for layer in sorted(absent):
        if runs and runs[-1][1] == layer - 1 and runs[-1][2] == absent[layer]:
            runs[-1] = (runs[-1][0], layer, absent[layer])
        else:
            runs.append((layer, layer, absent[layer]))
    return runs
