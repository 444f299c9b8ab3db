"""The list of recordings, where there are several to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from dash import dcc, html

from routeprof.dashboards import formats
from routeprof.dashboards.live.library import Run
from routeprof.dashboards.state import ViewState

HEADS = ("Recording", "Model", "Started (UTC)", "Level", "Layers", "Ranks", "State")


def recordings_page(runs: Sequence[Run], state: ViewState) -> list[Any]:
    """The page: one line a recording, which leads to its overview."""
    head = html.Div(
        [
            html.Div(
                [
                    html.H1("Recordings"),
                    html.P("Which recording do you want to look at?", className="question"),
                ]
            )
        ],
        className="page-head",
    )
    if not runs:
        return [head, html.P("There is no recording here yet.", role="alert")]
    table = html.Table(
        [
            html.Thead(html.Tr([html.Th(name) for name in HEADS])),
            html.Tbody([_line(run, state) for run in runs]),
        ]
    )
    section = html.Section(
        [html.Div(table, className="scroll", tabIndex=0)],
        className="panel wide",
        **{"aria-label": "Recordings"},
    )
    return [head, html.Div(section, className="panels")]


def _line(run: Run, state: ViewState) -> Any:
    link = dcc.Link(run.name, href=f"/overview{ViewState(run=run.name).query()}")
    current = {"aria-current": "true"} if run.name == state.run else {}
    if run.info is None:
        return html.Tr([html.Td(link), html.Td(run.problem, colSpan=len(HEADS) - 1)], **current)
    info = run.info
    moe = sum(layer.kind == "moe" for layer in info.layers)
    cells = [
        link,
        info.model.name,
        datetime.fromtimestamp(info.started, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        info.level,
        formats.count(moe),
        formats.count(run.ranks),
        run.activity.kind,
    ]
    return html.Tr([html.Td(cell) for cell in cells], **current)
