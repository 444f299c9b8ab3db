"""Figures of one layer's experts beyond their load; arrays in, ``go.Figure`` out."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from routeprof.dashboards.figures.common import across, new_figure, small
from routeprof.dashboards.figures.palette import PALETTES, Scheme


def change_bars(
    points: NDArray[Any],
    noise: NDArray[Any],
    changed: NDArray[np.bool_],
    experts: NDArray[Any],
    scheme: Scheme,
) -> go.Figure:
    """Change of each expert's share, in the order given; grey where it is not called a change.

    Args:
        points: percentage points.
        noise: what chance stays below, up and down; NaN where that is not known.
        changed: by more than noise.
    """
    colours = PALETTES[scheme]
    figure = new_figure(scheme)
    places = np.arange(len(experts))
    figure.add_bar(
        x=small(places),
        y=small(points),
        customdata=small(experts),
        marker={
            "color": np.where(
                changed, np.where(points > 0, colours.orange, colours.blue), colours.grey
            ),
            "line_width": 0,
        },
        hovertemplate="expert %{customdata}<br>%{y:+.3~f} points<extra></extra>",
    )
    if np.isfinite(noise).any():
        x, above = across(places, noise)
        figure.add_scatter(
            x=small(np.concatenate([x, x])),
            y=small(np.concatenate([above, -above])),
            mode="lines",
            line={"width": 1.5, "color": colours.ink},
            hoverinfo="skip",
        )
        figure.update_layout(showlegend=False)
    figure.update_xaxes(title_text="experts, most changed first")
    if len(experts) <= 32:
        figure.update_xaxes(tickvals=small(places), ticktext=[str(item) for item in experts])
    else:
        figure.update_xaxes(showticklabels=False)
    figure.update_yaxes(title_text="change of share, points", tickformat=".3~f")
    figure.update_layout(bargap=0.15 if len(experts) <= 128 else 0)
    return figure


def mass_scatter(
    mass: NDArray[Any], share: NDArray[Any], experts: NDArray[Any], scheme: Scheme
) -> go.Figure:
    """Load share of each expert against the router's mean probability of it (0…1 both)."""
    colours = PALETTES[scheme]
    figure = new_figure(scheme)
    end = float(np.nanmax(np.concatenate([mass, share])))
    figure.add_scatter(
        x=small([0.0, end]),
        y=small([0.0, end]),
        mode="lines",
        line={"color": colours.faint, "width": 1, "dash": "dash"},
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=small(mass),
        y=small(share),
        customdata=small(experts),
        mode="markers",
        marker={
            "color": np.where(share > mass, colours.orange, colours.blue),
            "size": 9 if len(experts) <= 64 else 6,
            "opacity": 0.85,
        },
        hovertemplate="expert %{customdata}<br>mass %{x:.2%}<br>load %{y:.2%}<extra></extra>",
    )
    figure.update_xaxes(
        title_text="gate mass", tickformat=".3~%", rangemode="tozero", ticklabelstandoff=6
    )
    figure.update_yaxes(title_text="share of the load", tickformat=".3~%", rangemode="tozero")
    figure.update_layout(showlegend=False)
    return figure
