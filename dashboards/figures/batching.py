"""Figure of what another composition of batches gains; arrays in, ``go.Figure`` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from routeprof.dashboards.figures.common import line_at, new_figure, small
from routeprof.dashboards.figures.palette import PALETTES, Scheme

_APART = 0.17
_SYMBOLS = ("circle", "diamond")
_LEAST = 0.1
"""Gain and loss that the axis shows at least."""


@dataclass(frozen=True)
class Intervals:
    """Values with the intervals that they lie in, ``[policies]`` each; NaN where one is not known.

    Attributes:
        text: of each, for a reader that points at it.
    """

    value: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    text: Sequence[str]


def gain_points(
    policies: Sequence[str], series: Mapping[str, Intervals], scheme: Scheme
) -> go.Figure:
    """Gain of each policy over FIFO with its interval; a line where there is none.

    Args:
        series: for each figure that may gain, its gains by policy; two at most.
    """
    figure = new_figure(scheme)
    places = np.arange(len(policies), dtype=float)
    for number, (name, gains) in enumerate(series.items()):
        figure.add_scatter(
            x=small(places + _APART * (2 * number - len(series) + 1)),
            y=small(gains.value),
            name=name,
            mode="markers+text",
            marker={"size": 10, "symbol": _SYMBOLS[number]},
            text=[f"{value:.2f}" if np.isfinite(value) else "" for value in gains.value],
            textposition="middle right",
            error_y=_whisker(gains, PALETTES[scheme].faint),
            hovertext=list(gains.text),
            hovertemplate="%{hovertext}<extra></extra>",
        )
    line_at(figure, 1.0, "FIFO", scheme)
    figure.update_xaxes(
        title_text="how batches are composed",
        tickvals=small(places),
        ticktext=list(policies),
        range=[-0.5, len(policies) - 0.5],
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(title_text="gain over FIFO", tickformat=".2f", range=_reach(series))
    return figure.update_layout(showlegend=len(series) > 1)


def _reach(series: Mapping[str, Intervals]) -> list[float]:
    """Range of the axis: 1 is in it, and a gain of next to nothing does not fill it."""
    ends = [
        values for gains in series.values() for values in (gains.value, gains.lower, gains.upper)
    ]
    known = np.concatenate([*ends, [1 - _LEAST, 1 + _LEAST]])
    low, high = float(np.nanmin(known)), float(np.nanmax(known))
    return [low - 0.05 * (high - low), high + 0.05 * (high - low)]


def _whisker(gains: Intervals, colour: str) -> dict[str, Any] | None:
    """None where no interval is known: one of no length would look like certainty."""
    lengths = gains.upper - gains.value, gains.value - gains.lower
    if not np.isfinite(lengths).any():
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": small(lengths[0]),
        "arrayminus": small(lengths[1]),
        "color": colour,
        "thickness": 1.5,
        "width": 5,
    }
