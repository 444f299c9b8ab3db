"""A figure of findings: codes by layers; arrays in, ``go.Figure`` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from routeprof.dashboards.figures.common import new_figure, small
from routeprof.dashboards.figures.layers import layer_axis
from routeprof.dashboards.figures.palette import PALETTES, Scheme


def findings_by_layer(
    found: Sequence[tuple[str, str, Sequence[int]]], absent: Mapping[int, str], scheme: Scheme
) -> go.Figure:
    """A mark for each layer that a finding names; severities differ in colour and in shape.

    Args:
        found: code, severity and layers of each, the first on top.
    """
    colours = PALETTES[scheme]
    looks = {
        "error": (colours.ink, "x"),
        "warning": (colours.orange, "square"),
        "info": (colours.blue, "circle"),
    }
    figure = new_figure(scheme)
    for severity, (colour, symbol) in looks.items():
        marks = [(code, at) for code, own, layers in found if own == severity for at in layers]
        if not marks:
            continue
        figure.add_scatter(
            x=small(np.array([at for _, at in marks])),
            y=[code for code, _ in marks],
            name=severity,
            mode="markers",
            marker={"color": colour, "symbol": symbol, "size": 10},
            hovertemplate=f"layer %{{x}}<br>%{{y}}<extra>{severity}</extra>",
        )
    every = np.array(sorted({at for _, _, layers in found for at in layers}))
    layer_axis(figure, every, absent, scheme)
    figure.update_xaxes(zeroline=False)
    codes = list(dict.fromkeys(code for code, _, _ in found))
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=codes,
        autorange="reversed",
        ticklabelstandoff=6,
    )
    figure.update_layout(showlegend=True)
    return figure
