"""What the figures share, and the kinds that several views draw: bars, histograms, lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import wrap
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from routeprof.dashboards.figures.palette import PALETTES, Scheme, template

GRAPH_CONFIG: dict[str, Any] = {
    "displaylogo": False,
    "showSendToCloud": False,  # plotly 7 otherwise offers to send the chart to its cloud
    "responsive": True,
    "scrollZoom": False,
    "doubleClick": "autosize",
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "resetScale2d", "zoomIn2d", "zoomOut2d"],
}
"""The one configuration of every graph."""

UNDRAWN: dict[str, Any] = {
    "layout": {
        "xaxis": {"visible": False},
        "yaxis": {"visible": False},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }
}
"""What a graph is before its figure arrives: nothing at all."""


_WRAPPED = 46
"""Characters of a line that fit on a phone."""


def small(values: ArrayLike) -> NDArray[Any]:
    """The values in the smallest type that holds them: bytes go to the browser as they are."""
    array = np.asarray(values)
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    if array.dtype.kind in "iu" and array.size:
        lowest = np.promote_types(np.min_scalar_type(array.min()), np.min_scalar_type(array.max()))
        # The browser has no 64-bit integers.
        return array.astype(lowest if lowest.itemsize < 8 else np.float64)
    return array


def across(places: NDArray[Any], heights: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """A line over the width of each bar, with gaps between."""
    x = np.stack([places - 0.42, places + 0.42, np.full(len(places), np.nan)], axis=1)
    return x.ravel(), np.repeat(heights, 3)


def blank(text: str, scheme: Scheme) -> go.Figure:
    """What stands in for a figure without data: a sentence, not empty axes."""
    figure = new_figure(scheme)
    lines_of_text = "<br>".join(wrap(text, _WRAPPED))
    figure.add_annotation(
        text=lines_of_text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False
    )
    figure.update_layout(
        xaxis_visible=False, yaxis_visible=False, font_color=PALETTES[scheme].faint
    )
    return figure


def expert_bars(
    load_over_mean: NDArray[Any],
    experts: NDArray[Any],
    scheme: Scheme,
    *,
    ranked: bool = False,
    what: str = "expert",
) -> go.Figure:
    """Load ÷ mean of one layer's experts, or of what else shares it, with the mean as a line."""
    colours = PALETTES[scheme]
    figure = new_figure(scheme)
    hot = load_over_mean > 1
    figure.add_bar(
        x=small(np.arange(len(experts))),
        y=small(load_over_mean),
        customdata=small(experts),
        marker={"color": np.where(hot, colours.orange, colours.blue), "line_width": 0},
        hovertemplate=f"{what} %{{customdata}}<br>%{{y:.2f}} × mean<extra></extra>",
    )
    line_at(figure, 1.0, "mean", scheme)
    figure.update_xaxes(title_text=f"{what}s, most loaded first" if ranked else what)
    if len(experts) <= 32:
        figure.update_xaxes(
            tickvals=small(np.arange(len(experts))), ticktext=[str(item) for item in experts]
        )
    elif ranked:
        figure.update_xaxes(showticklabels=False)
    figure.update_yaxes(title_text="load / mean", rangemode="tozero")
    figure.update_layout(bargap=0.15 if len(experts) <= 128 else 0)
    return figure


def histogram(
    labels: NDArray[Any] | list[str],
    heights: NDArray[Any],
    scheme: Scheme,
    *,
    x: str,
    y: str,
    marks: Mapping[str, float] | None = None,
    width: NDArray[Any] | None = None,
) -> go.Figure:
    """Bars whose heights are known already, with named vertical lines."""
    figure = new_figure(scheme)
    figure.add_bar(
        x=labels if isinstance(labels, list) else small(labels),
        y=small(heights),
        width=None if width is None else small(width),
        marker={"color": PALETTES[scheme].blue, "line_width": 0},
        hovertemplate=f"{x} %{{x}}<br>%{{y:,}} {y}<extra></extra>",
    )
    middle = 0.0 if isinstance(labels, list) else float(labels[0] + labels[-1]) / 2
    for place, (name, value) in enumerate((marks or {}).items()):
        late = value > middle
        figure.add_vline(x=value, line={"color": PALETTES[scheme].orange, "dash": "dot"})
        figure.add_annotation(
            x=value,
            y=1 - 0.12 * place,
            yref="paper",
            text=f"{name} {value:.2f}",
            showarrow=False,
            xanchor="right" if late else "left",
            xshift=-5 if late else 5,
        )
    figure.update_xaxes(title_text=x)
    figure.update_yaxes(title_text=y, tickformat="~s", rangemode="tozero")
    figure.update_layout(bargap=0.08)
    return figure


def lines(
    x: NDArray[Any],
    series: Mapping[str, NDArray[Any]],
    scheme: Scheme,
    *,
    x_title: str,
    y_title: str,
    percent: bool = False,
    markers: bool = False,
    at: float | None = None,
) -> go.Figure:
    """Lines over one axis, told apart by colour and by dash.

    Args:
        at: where to put a vertical line.
    """
    figure = new_figure(scheme)
    number = ".2%" if percent else ".4~g"
    for (name, values), dash in zip(series.items(), ("solid", "dash", "dot"), strict=False):
        figure.add_scatter(
            x=small(x),
            y=small(values),
            name=name,
            mode="lines+markers" if markers or len(x) < 40 else "lines",
            line={"width": 2, "dash": dash},
            marker={"size": 6},
            hovertemplate=f"%{{y:{number}}}",
        )
    if at is not None:
        figure.add_vline(x=at, line={"color": PALETTES[scheme].faint, "width": 1})
    figure.update_xaxes(title_text=x_title)
    tick_format = ".3~%" if percent else _tick_format(series.values())
    figure.update_yaxes(title_text=y_title, rangemode="tozero", tickformat=tick_format)
    figure.update_layout(hovermode="x unified", showlegend=len(series) > 1)
    return figure


# -- what the figures share


def new_figure(scheme: Scheme) -> go.Figure:
    """An empty figure in the page's looks."""
    return go.Figure(layout={"template": template(scheme)})


def _tick_format(series: Iterable[NDArray[Any]]) -> str:
    """Thousands as k, M, …; small numbers as they are: the same format would write 0.5 as 500m."""
    largest = max(
        (float(np.nanmax(values)) for values in series if np.isfinite(values).any()), default=0
    )
    return "~s" if largest >= 1000 else ".3~r"


def line_at(figure: go.Figure, y: float, text: str, scheme: Scheme) -> None:
    """A named horizontal line to compare with."""
    colours = PALETTES[scheme]
    figure.add_hline(y=y, line={"color": colours.faint, "width": 1, "dash": "dash"})
    figure.add_annotation(
        x=1,
        xref="paper",
        xanchor="left",
        xshift=4,
        y=y,
        text=text,
        showarrow=False,
        font={"size": 11, "color": colours.faint},
    )
    figure.update_layout(margin_r=52)
