"""Figures of tags, phases and requests; arrays in, ``go.Figure`` out.

Tags are the user's: they may hold markup, and be of any length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from routeprof.dashboards.figures.common import line_at, new_figure, small
from routeprof.dashboards.figures.palette import PALETTES, SEQUENTIAL, Scheme

LONGEST = 18
"""Characters of a name that fit beside an axis, also on a phone."""

_SLANTED: dict[str, Any] = {
    "autotickangles": [0, -35, -90],  # up to the tick: there is no room on the right
    "ticklabeloverflow": "allow",
    "ticklabelstandoff": 4,
}

_NUMBERED = 8
"""Groups up to which a matrix has room for its numbers."""


def label(text: str, longest: int = LONGEST) -> str:
    """A name on an axis: one line, shortened, and without markup that plotly would obey."""
    line = " ".join(text.split())
    return escape(line if len(line) <= longest else f"{line[: longest - 1]}…", quote=False)


def group_bars(names: Sequence[str], load_over_mean: NDArray[Any], scheme: Scheme) -> go.Figure:
    """Load ÷ mean by group, with the mean as a line."""
    colours = PALETTES[scheme]
    figure = new_figure(scheme)
    hot = load_over_mean > 1
    figure.add_bar(
        x=small(np.arange(len(names))),
        y=small(load_over_mean),
        hovertext=[label(name, 60) for name in names],
        marker={"color": np.where(hot, colours.orange, colours.blue), "line_width": 0},
        hovertemplate="%{hovertext}<br>%{y:.2f} × mean<extra></extra>",
    )
    line_at(figure, 1.0, "mean", scheme)
    _name_axis(figure, names)
    figure.update_yaxes(title_text="load / mean", rangemode="tozero")
    return figure


def imbalance_by_group(
    names: Sequence[str], series: Mapping[str, NDArray[Any]], scheme: Scheme
) -> go.Figure:
    """Max ÷ mean by group, one bar for each series."""
    figure = new_figure(scheme)
    for name, values in series.items():
        figure.add_bar(
            x=small(np.arange(len(names))),
            y=small(values),
            name=name,
            hovertext=[label(group, 60) for group in names],
            marker_line_width=0,
            hovertemplate=f"%{{hovertext}}<br>{name} %{{y:.2f}}<extra></extra>",
        )
    line_at(figure, 1.0, "perfect", scheme)
    _name_axis(figure, names)
    figure.update_yaxes(title_text="max / mean load", rangemode="tozero")
    figure.update_layout(showlegend=len(series) > 1, margin_r=60)
    return figure


def _name_axis(figure: go.Figure, names: Sequence[str]) -> None:
    # By place, not by name: two shortened names may be the same.
    figure.update_xaxes(
        tickvals=small(np.arange(len(names))),
        ticktext=[label(name) for name in names],
        showgrid=False,
        **_SLANTED,
    )
    if len(names) < 4:
        figure.update_layout(bargap=0.5)


def divergence_heatmap(
    names: Sequence[str], divergences: NDArray[Any], scheme: Scheme
) -> go.Figure:
    """Divergence (0…1) between every two groups, the first group at the top.

    Args:
        divergences: [groups, groups], NaN where there is no value.
    """
    places = small(np.arange(len(names)))
    figure = new_figure(scheme)
    # From the bottom up: a reversed axis would be turned round by a double click.
    z = divergences[::-1]
    pairs = [[f"{label(one, 40)}<br>{label(two, 40)}" for two in names] for one in names[::-1]]
    numbered = len(names) <= _NUMBERED
    figure.add_heatmap(
        x=places,
        y=places,
        z=small(z),
        hovertext=pairs,
        hoverongaps=False,
        hovertemplate="%{hovertext}<br>divergence %{z:.3f}<extra></extra>",
        colorscale=SEQUENTIAL,
        zmin=0,
        zmax=float(np.clip(np.nanmax(z, initial=0), 0.05, 1)),
        colorbar={
            "thickness": 14,
            "outlinewidth": 0,
            "title": {"text": "divergence", "side": "right", "font_size": 13},
        },
        texttemplate="%{z:.2f}" if numbered else None,
        showscale=not numbered,
    )
    texts = [label(name) for name in names]
    figure.update_xaxes(tickvals=places, ticktext=texts, showgrid=False, **_SLANTED)
    figure.update_yaxes(tickvals=places, ticktext=texts[::-1], showgrid=False, ticklabelstandoff=6)
    figure.update_layout(plot_bgcolor=PALETTES[scheme].absent)
    return figure


def request_scatter(
    tokens: NDArray[Any],
    divergences: NDArray[Any],
    names: Sequence[str],
    chance: tuple[NDArray[Any], NDArray[Any]],
    scheme: Scheme,
) -> go.Figure:
    """Each request's divergence from all of them against its length.

    Args:
        chance: lengths, and the divergence that a request of that length has by chance.
    """
    colours = PALETTES[scheme]
    figure = new_figure(scheme)
    figure.add_scatter(
        x=small(tokens),
        y=small(divergences),
        name="requests",
        mode="markers",
        hovertext=[label(name, 40) for name in names],
        marker={"color": colours.blue, "size": 7, "opacity": 0.7},
        hovertemplate="request %{hovertext}<br>%{x:,} tokens<br>divergence %{y:.3f}<extra></extra>",
    )
    figure.add_scatter(
        x=small(chance[0]),
        y=small(chance[1]),
        name="by chance, about",
        mode="lines",
        line={"color": colours.faint, "width": 1, "dash": "dash"},
        hoverinfo="skip",
    )
    wide = len(tokens) and tokens.max() > 20 * max(int(tokens.min()), 1)
    figure.update_xaxes(
        title_text="tokens of the request", type="log" if wide else "linear", tickformat="~s"
    )
    figure.update_yaxes(title_text="divergence from all", rangemode="tozero", ticklabelstandoff=4)
    return figure
