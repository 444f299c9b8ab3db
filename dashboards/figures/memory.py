"""Figures of memory by layout; arrays in, ``go.Figure`` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from routeprof.dashboards.figures.common import new_figure, small
from routeprof.dashboards.figures.palette import PALETTES, Palette, Scheme

Look = tuple[str, str]


def memory_bars(
    names: Sequence[str], parts: Mapping[str, NDArray[Any]], memory: float, scheme: Scheme
) -> go.Figure:
    """What a GPU holds in each layout, the parts one after another; the first layout on top.

    Args:
        parts: GiB of every layout by the names in ``_looks``; NaN where there is none to draw.
        memory: GiB of the GPU, drawn as a line.
    """
    colours = PALETTES[scheme]
    looks = _looks(colours)
    figure = new_figure(scheme)
    for name, values in parts.items():
        colour, shape = looks[name]
        figure.add_bar(
            x=small(values),
            y=list(names),
            name=name,
            orientation="h",
            marker={"color": colour, "line_width": 0, "pattern_shape": shape},
            hovertemplate="%{x:.3~r} GiB",
        )
    figure.add_vline(x=memory, line={"color": colours.ink, "width": 2, "dash": "dash"})
    figure.add_annotation(
        x=memory, y=1, yref="paper", yanchor="bottom", text=f"{memory:g} GiB", showarrow=False
    )
    total = np.nansum(list(parts.values()), axis=0).max(initial=memory)
    figure.update_xaxes(
        title_text="GiB of the fullest GPU", autorangeoptions={"include": [0, 1.02 * total]}
    )
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=6)
    figure.update_layout(barmode="stack", hovermode="y unified", showlegend=True)
    figure.update_layout(legend_traceorder="normal", legend_y=1.08)
    return figure


def _looks(colours: Palette) -> dict[str, Look]:
    """Colour and pattern: weights are orange and grey, the cache is blue, the rest is faint."""
    return {
        "routed experts": (colours.orange, ""),
        "shared experts": (colours.orange, "/"),
        "attention": (colours.grey, ""),
        "Mamba and linear attention": (colours.grey, "/"),
        "embeddings": (colours.grey, "x"),
        "other": (colours.grey, "."),
        "KV cache": (colours.blue, ""),
        "fixed state": (colours.blue, "/"),
        "held back": (colours.absent, "/"),
        "free": (colours.absent, ""),
        "left for the cache": (colours.absent, ""),
    }
