"""Figures with parallel layouts as their y axis; arrays in, ``go.Figure`` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from routeprof.dashboards.figures.common import new_figure, small
from routeprof.dashboards.figures.palette import PALETTES, Scheme


def layout_bars(
    names: Sequence[str], parts: Mapping[str, NDArray[Any]], scheme: Scheme
) -> go.Figure:
    """Time of a step in each layout, the parts one after another; the first layout on top.

    Args:
        parts: milliseconds of every layout by ``attention``, ``dispatch``, ``experts`` and
            ``combine``, or some of these.
    """
    colours = PALETTES[scheme]
    longest = float(np.sum(list(parts.values()), axis=0).max(initial=0.0))
    unit, scale = ("ms", 1.0) if longest >= 0.1 else ("µs", 1e3)
    # The way there and the way back are of one kind, told apart by a pattern.
    looks = {
        "attention": (colours.grey, ""),
        "dispatch": (colours.blue, ""),
        "experts": (colours.orange, ""),
        "combine": (colours.blue, "/"),
    }
    figure = new_figure(scheme)
    for name, values in parts.items():
        colour, shape = looks[name]
        figure.add_bar(
            x=small(values * scale),
            y=list(names),
            name=name,
            orientation="h",
            marker={"color": colour, "line_width": 0, "pattern_shape": shape},
            hovertemplate=f"%{{x:.3~r}} {unit}",
        )
    figure.update_xaxes(title_text=f"{unit} of a step", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=6)
    figure.update_layout(barmode="stack", hovermode="y unified", showlegend=True)
    figure.update_layout(legend_traceorder="normal")
    return figure
