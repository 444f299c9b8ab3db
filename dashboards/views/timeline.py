"""Timeline: when is it imbalanced, and under what load?"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from routeprof.dashboards import formats
from routeprof.dashboards.figures.common import blank, lines
from routeprof.dashboards.figures.palette import PALETTES
from routeprof.dashboards.formats import clock
from routeprof.dashboards.state import duration
from routeprof.dashboards.view import Content, Context, Filled, Panel, View
from routeprof.profile import Profile
from routeprof.recording.fold import Windows

MOST_POINTS = 600


def fill(context: Context) -> Content:
    """The page's content."""
    table = series(context.all_time, None if context.layer is None else context.layer.index)
    if not len(table):
        empty = blank("No windows in this selection yet.", context.scheme)
        return Content(
            panels={
                "imbalance_time": Filled(empty, "", table[IMBALANCE]),
                "tokens_time": Filled(empty, "", table[TOKENS]),
            }
        )
    return Content(
        panels={"imbalance_time": imbalance(context, table), "tokens_time": rate(context, table)}
    )


IMBALANCE = ["time", "imbalance_worst", "imbalance_median", "imbalance_layer"]
TOKENS = ["time", "token_rate", "steps"]


def series(profile: Profile, layer: int | None) -> pd.DataFrame:
    """Imbalance and token rate over time, one row for each interval with tokens.

    An interval holds whole windows. Its imbalance is the mean of those of its windows, phases,
    tags and ranks, weighted by assignments.
    """
    windows, layers = profile.totals.windows, profile.info.layers
    if not len(windows.window):
        return pd.DataFrame(columns=[*IMBALANCE, *TOKENS[1:]], dtype=float)
    place = (windows.end - windows.start.min()) // interval(profile)
    times, row = np.unique(place, return_inverse=True)
    sums = {name: np.zeros((len(times), len(layers))) for name in _SUMS}
    for name, total in sums.items():
        np.add.at(total, (row, windows.layer), getattr(windows, name))
    experts = np.array([item.experts for item in layers])
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an interval may have no tokens at all
        ratios = sums["max_count"] * experts / sums["assignments"]
        worst, median = np.nanmax(ratios, axis=1), np.nanmedian(ratios, axis=1)
        rate = sums["tokens"].max(1) / _covered(windows, row)
    position = [place for place, item in enumerate(layers) if item.index == layer]
    chosen = ratios[:, position[0]] if position else np.full(len(times), np.nan)
    time = pd.Series(windows.end - windows.start.min()).groupby(row).max().to_numpy()
    columns = [time, worst, median, chosen, rate, sums["steps"].max(1)]
    return pd.DataFrame(dict(zip([*IMBALANCE, *TOKENS[1:]], columns, strict=True)))


_SUMS = ("max_count", "assignments", "tokens", "steps")


def interval(profile: Profile) -> float:
    """Length of an interval in seconds: a window, or what keeps the points few."""
    return max(profile.info.window_seconds, profile.seconds / MOST_POINTS, 1e-3)


def _covered(windows: Windows, row: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds that the windows of each interval cover; ranks run side by side."""
    one = pd.DataFrame(
        {"row": row, "rank": windows.rank, "start": windows.start, "end": windows.end}
    ).drop_duplicates()
    each = (one["end"] - one["start"]).groupby([one["row"], one["rank"]]).sum()
    return each.groupby(level=0).max().to_numpy(dtype=float)


def with_gaps(table: pd.DataFrame, width: float) -> pd.DataFrame:
    """The table with an empty row wherever nothing was routed for a while: lines end there."""
    time = table["time"].to_numpy()
    before = np.flatnonzero(np.diff(time) > 4 * width)
    if not len(before):
        return table
    gaps = pd.DataFrame({"time": (time[before] + time[before + 1]) / 2}, columns=table.columns)
    joined = pd.concat([table, gaps.astype(float)], ignore_index=True)
    return joined.sort_values("time", ignore_index=True)


def imbalance(context: Context, table: pd.DataFrame) -> Filled:
    """Worst, median and chosen layer over time."""
    layer = context.layer
    scale, unit = clock(duration(context.whole))
    drawn = with_gaps(table, interval(context.all_time))
    figure = lines(
        drawn["time"].to_numpy() / scale,
        {
            "worst layer": drawn["imbalance_worst"].to_numpy(),
            "median layer": drawn["imbalance_median"].to_numpy(),
            f"layer {layer.index if layer else ''}": drawn["imbalance_layer"].to_numpy(),
        },
        context.scheme,
        x_title=f"time since start, {unit}",
        y_title="max / mean load",
    )
    caption = (
        f"Imbalance of each interval, {context.selection}; 1 is perfect. Where an interval holds "
        "several windows, phases or tags: their mean, weighted by assignments. Drag over a range "
        "of time to see it on all views."
    )
    return Filled(with_range(figure, context, scale), caption, table[IMBALANCE])


def rate(context: Context, table: pd.DataFrame) -> Filled:
    """Tokens per second over time."""
    scale, unit = clock(duration(context.whole))
    drawn = with_gaps(table, interval(context.all_time))
    figure = lines(
        drawn["time"].to_numpy() / scale,
        {"tokens/s": drawn["token_rate"].to_numpy()},
        context.scheme,
        x_title=f"time since start, {unit}",
        y_title="tokens/s",
    )
    span = formats.seconds(round(context.all_time.seconds))
    caption = f"Tokens that a layer routed per second, {context.selection}; {span} in all."
    return Filled(with_range(figure, context, scale), caption, table[TOKENS])


def with_range(figure: go.Figure, context: Context, scale: float) -> go.Figure:
    """Let the reader drag over a range of time, and shade the one that is selected."""
    figure.update_layout(dragmode="select", selectdirection="h")
    if context.state.between is not None:
        low, high = context.state.between
        if math.isinf(high):
            high = max(low, duration(context.whole))
        colours = PALETTES[context.scheme]
        figure.add_vrect(
            x0=low / scale, x1=high / scale, fillcolor=colours.blue, opacity=0.14, line_width=0
        )
    return figure


VIEW = View(
    path="timeline",
    title="Timeline",
    question="When is it imbalanced, and under what load?",
    reports=("windows", "steps"),
    panels=(
        Panel(
            "imbalance_time",
            "Imbalance over time",
            "Line chart: imbalance of the worst, the median and the chosen layer over time",
            drags=True,
        ),
        Panel(
            "tokens_time",
            "Tokens over time",
            "Line chart: tokens per second over time",
            height=260,
            drags=True,
        ),
    ),
    fill=fill,
    controls=("between", "layer"),
)
