"""Figures of which experts go together; arrays in, ``go.Figure`` out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from routeprof.dashboards.figures.common import line_at, new_figure, small
from routeprof.dashboards.figures.layers import layer_axis
from routeprof.dashboards.figures.palette import PALETTES, SEQUENTIAL, Scheme, diverging

MOST_DOUBLINGS = 3
"""The scale of lifts ends at eight times what is random and at an eighth of it."""


def lift_heatmap(lifts: NDArray[Any], random: float, scheme: Scheme) -> go.Figure:
    """How much more often than at random two experts serve a token together, in doublings.

    Args:
        lifts: [experts, experts]; NaN where there is no value, as on the diagonal.
        random: the lift of random routing, the middle of the scale.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        doublings = np.log2(lifts / random)
    finite = np.abs(doublings[np.isfinite(doublings)])
    reach = float(np.clip(np.ceil(finite.max(initial=1.0)), 1, MOST_DOUBLINGS))
    ticks = np.arange(-reach, reach + 1)
    figure = _square(
        # A pair that never met is the coldest colour, not a hole.
        np.clip(doublings, -reach, reach),
        lifts,
        scheme,
        "experts %{y} and %{x}<br>lift %{customdata:.2f}<extra></extra>",
    )
    figure.update_traces(
        colorscale=diverging(scheme),
        zmin=-reach,
        zmax=reach,
        colorbar={
            "tickvals": small(ticks),
            "ticktext": [f"{random * 2.0**tick:.2g}" for tick in ticks],
            "title": {"text": "lift", "side": "right", "font_size": 13},
        },
    )
    figure.update_xaxes(title_text="expert")
    figure.update_yaxes(title_text="expert")
    return figure


def transition_heatmap(
    chances: NDArray[Any], here: int, there: int, scheme: Scheme, most: float | None = None
) -> go.Figure:
    """Share of the tokens of each expert of one layer that choose each one of the next.

    Args:
        chances: [experts, experts of the next layer], 0…1; NaN for an expert without tokens.
        here, there: the layers' indices.
        most: where the scale ends; the largest share if not given.
    """
    hover = f"expert %{{y}} of layer {here}<br>expert %{{x}} of layer {there}<br>"
    figure = _square(chances, chances, scheme, f"{hover}%{{customdata:.2%}}<extra></extra>")
    figure.update_traces(
        colorscale=SEQUENTIAL,
        zmin=0,
        zmax=most,
        colorbar={
            "tickformat": ".1~%",
            "title": {"text": "share of tokens", "side": "right", "font_size": 13},
        },
    )
    figure.update_xaxes(title_text=f"expert of layer {there}")
    figure.update_yaxes(title_text=f"expert of layer {here}")
    return figure


def _square(z: NDArray[Any], shown: NDArray[Any], scheme: Scheme, hover: str) -> go.Figure:
    """A heatmap of experts by experts, both counted from the lower left."""
    figure = new_figure(scheme)
    figure.add_heatmap(
        z=small(z),
        customdata=small(shown),
        hoverongaps=False,
        hovertemplate=hover,
        colorbar={"thickness": 14, "outlinewidth": 0, "len": 1, "lenmode": "fraction"},
    )
    for axis, experts in ((figure.update_xaxes, z.shape[1]), (figure.update_yaxes, z.shape[0])):
        axis(
            showgrid=False,
            zeroline=False,
            ticklabelstandoff=4,
            dtick=2 ** max(0, int(np.log2(experts)) - 3),
        )
    # Holes show the page's "not captured" shade.
    figure.update_layout(plot_bgcolor=PALETTES[scheme].absent)
    return figure


def partner_bars(
    partners: NDArray[Any],
    lifts: NDArray[Any],
    together: NDArray[Any],
    random: float,
    scheme: Scheme,
) -> go.Figure:
    """Lift of an expert's partners, in the order given, with that of random routing as a line.

    Args:
        together: tokens that chose both.
    """
    colours = PALETTES[scheme]
    figure = new_figure(scheme)
    places = np.arange(len(partners))
    figure.add_bar(
        x=small(places),
        y=small(lifts),
        customdata=small(partners),
        hovertext=[f"{number:,} tokens together" for number in together.tolist()],
        marker={"color": np.where(lifts > random, colours.orange, colours.blue), "line_width": 0},
        hovertemplate="expert %{customdata}<br>lift %{y:.2f}<br>%{hovertext}<extra></extra>",
    )
    line_at(figure, random, "random", scheme)
    figure.update_layout(margin_r=62)
    figure.update_xaxes(
        title_text="partner",
        tickvals=small(places),
        ticktext=[str(partner) for partner in partners],
    )
    figure.update_yaxes(title_text="lift", rangemode="tozero")
    return figure


def repetition_by_layer(
    layers: NDArray[Any],
    measured: Mapping[str, NDArray[Any]],
    random: Mapping[str, NDArray[Any]],
    absent: Mapping[int, str],
    scheme: Scheme,
) -> go.Figure:
    """Shares (0…1) of each layer as lines, and dotted in the same colour what is random.

    Args:
        measured, random: by the same names, at most three.
    """
    colours = PALETTES[scheme]
    figure = new_figure(scheme)
    for (name, values), colour in zip(
        measured.items(), (colours.blue, colours.orange, colours.grey), strict=False
    ):
        figure.add_scatter(
            x=small(layers),
            y=small(values),
            name=name,
            mode="lines+markers",
            line={"width": 2, "color": colour},
            marker={"size": 6},
            hovertemplate="%{y:.1%}",
        )
        figure.add_scatter(
            x=small(layers),
            y=small(random[name]),
            name=f"{name}, random",
            mode="lines" if len(layers) > 1 else "markers",
            line={"width": 2, "color": colour, "dash": "dot"},
            marker={"symbol": "line-ew-open", "size": 12},
            hovertemplate="%{y:.1%}",
        )
    layer_axis(figure, layers, absent, scheme)
    figure.update_yaxes(title_text="share of tokens", tickformat=".3~%", rangemode="tozero")
    figure.update_layout(hovermode="x unified")
    return figure
