"""Figures that hold layers against each other or against chance; arrays in, ``go.Figure`` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from routeprof.dashboards.figures.common import across, line_at, new_figure, small
from routeprof.dashboards.figures.layers import layer_axis
from routeprof.dashboards.figures.palette import PALETTES, Scheme
from routeprof.dashboards.figures.tags import label

VERDICT_COLOURS = {"changed": "orange", "within the noise": "blue", "noise not known": "grey"}


def ratios_by_layer(
    layers: NDArray[Any],
    series: Mapping[str, NDArray[Any]],
    absent: Mapping[int, str],
    title: str,
    scheme: Scheme,
    *,
    steps: Mapping[str, NDArray[Any]] | None = None,
) -> go.Figure:
    """Ratios of each layer (1 is perfect), one bar for each series.

    Args:
        steps: for some series, the same ratio over steps: a whisker from the bar up to it.
    """
    figure = new_figure(scheme)
    for name, values in series.items():
        over = (steps or {}).get(name, np.full(len(layers), np.nan))
        known = bool(np.isfinite(over).any())
        figure.add_bar(
            x=small(layers),
            y=small(values),
            name=name,
            marker_line_width=0,
            customdata=small(over) if known else None,
            error_y=_whisker(over - values, scheme) if known else None,
            hovertemplate="%{y:.2f}" + (", over steps %{customdata:.2f}" if known else ""),
        )
    line_at(figure, 1.0, "perfect", scheme)
    layer_axis(figure, layers, absent, scheme)
    figure.update_yaxes(title_text=title, rangemode="tozero")
    figure.update_layout(hovermode="x unified", showlegend=len(series) > 1)
    return figure


def _whisker(lengths: NDArray[Any], scheme: Scheme) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": small(np.nan_to_num(np.maximum(lengths, 0))),
        "arrayminus": small(np.zeros(len(lengths))),
        "color": PALETTES[scheme].faint,
        "thickness": 1.5,
        "width": 3,
    }


def divergence_by_layer(
    layers: NDArray[Any],
    divergence: NDArray[Any],
    noise: NDArray[Any],
    verdicts: Sequence[str],
    notes: Sequence[str],
    absent: Mapping[int, str],
    scheme: Scheme,
) -> go.Figure:
    """Divergence of each layer as bars, in a colour for each verdict, and noise bounds as lines.

    Args:
        noise: the bounds, NaN where one is not known.
        verdicts: keys of ``VERDICT_COLOURS``; a layer may have changed below its bound, if an
            expert's share did.
        notes: shown of each layer.
    """
    colours = PALETTES[scheme]
    figure = new_figure(scheme)
    for name, colour in VERDICT_COLOURS.items():
        chosen = np.array([verdict == name for verdict in verdicts])
        if chosen.any():
            figure.add_bar(
                x=small(layers[chosen]),
                y=small(divergence[chosen]),
                name=name,
                marker={"color": getattr(colours, colour), "line_width": 0},
                customdata=small(noise[chosen]),
                hovertext=[label(notes[place], 80) for place in np.flatnonzero(chosen).tolist()],
                hovertemplate="%{y:.3~g}"
                + ("" if np.isnan(noise[chosen]).any() else ", noise bound %{customdata:.3~g}")
                + ", %{hovertext}",
            )
    if np.isfinite(noise).any():
        x, y = across(layers, noise)
        figure.add_scatter(
            x=small(x),
            y=small(y),
            name="noise bound",
            mode="lines",
            line={"width": 2, "color": colours.ink},
            hoverinfo="skip",
        )
    layer_axis(figure, layers, absent, scheme)
    figure.update_yaxes(title_text="divergence, 0 to 1", rangemode="tozero", tickformat=".3~g")
    figure.update_layout(hovermode="x unified", barmode="overlay", showlegend=True)
    return figure


def placements_by_layer(
    layers: NDArray[Any],
    series: Mapping[str, NDArray[Any]],
    bound: NDArray[Any],
    absent: Mapping[int, str],
    scheme: Scheme,
) -> go.Figure:
    """Slowest ÷ mean rank of each layer, one bar for each placement.

    Args:
        bound: what no placement is below, drawn as a line.
    """
    figure = ratios_by_layer(layers, series, absent, "slowest / mean rank", scheme)
    x, y = across(layers, bound)
    figure.add_scatter(
        x=small(x),
        y=small(y),
        name="lower bound",
        mode="lines",
        line={"width": 2, "color": PALETTES[scheme].ink},
        hoverinfo="skip",
    )
    return figure.update_layout(showlegend=True)
