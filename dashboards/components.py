"""Building blocks of a page. Text always goes in as text: names may hold anything."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
import pandas as pd
from dash import dcc, html

from routeprof.dashboards import formats
from routeprof.dashboards.definitions import Kind, definition
from routeprof.dashboards.figures.common import GRAPH_CONFIG, UNDRAWN
from routeprof.dashboards.state import ViewState
from routeprof.dashboards.view import Card, Panel

_WRITE: dict[Kind, Any] = {
    "count": formats.count,
    "ratio": formats.ratio,
    "number": formats.number,
    "seconds": formats.seconds,
    "share": formats.percent,
    "text": lambda value: str(value) if isinstance(value, str) else formats.NOTHING,
}


def term(name: str) -> Any:
    """A metric's name with its definition behind a question mark; for mouse, touch and keys."""
    meaning = definition(name)
    mark = html.Button(
        "?", className="why", type="button", **{"aria-label": f"{meaning.label}: {meaning.text}"}
    )
    tip = dmc.Tooltip(
        mark,
        label=meaning.text,
        multiline=True,
        w=280,
        withArrow=True,
        events={"hover": True, "focus": True, "touch": True},
    )
    if not meaning.text:
        return html.Span(meaning.label, className="term")
    # The mark stays with the last word, where the line is too short for all of them.
    *words, last = meaning.label.split(" ")
    return html.Span(
        [" ".join([*words, ""]), html.Span([last, tip], className="together")], className="term"
    )


def card(item: Card) -> Any:
    """A key figure."""
    return html.Div(
        [
            html.Div(term(item.name), className="card-name"),
            html.Div(item.value, className=f"card-value {item.tone}"),
            html.Div(item.note, className="card-note"),
        ],
        className="card",
    )


def panel(item: Panel) -> Any:
    """A figure with its caption and, folded away, its numbers."""
    # The grid comes when it is wanted: its scripts and its setting up cost the first paint.
    fold = dmc.AccordionPanel(html.Div(id={"fold": item.name}, className="fold"))
    table = dmc.Accordion(
        dmc.AccordionItem([dmc.AccordionControl("Numbers"), fold], value="open"),
        id={"table": item.name},
        variant="default",
        className="numbers-fold",
    )
    graph = dcc.Graph(
        id={"figure": item.name},
        figure=UNDRAWN,
        config=GRAPH_CONFIG,
        style={"height": f"{item.height}px"},
        responsive=True,
    )
    return html.Section(
        [
            html.H2(item.title),
            html.Div(graph, role="img", className="figure", **{"aria-label": item.label}),
            dcc.Store(id={"drawn": item.name}),
            html.P(id={"caption": item.name}, className="caption"),
            table,
        ],
        className="panel wide" if item.wide else "panel",
        **{"aria-label": item.title},
    )


def plain_table(title: str, frame: pd.DataFrame) -> Any:
    """A short table that is always open."""
    return _table(title, frame, lambda name, value: _written(name, value))


def linked_table(title: str, frame: pd.DataFrame, state: ViewState) -> Any:
    """A short table whose layers lead to their view."""

    def cell(name: str, value: Any) -> Any:
        if name != "layer":
            return _written(name, value)
        return layer_link(int(value), state)

    return _table(title, frame, cell)


def _table(title: str, frame: pd.DataFrame, cell: Any) -> Any:
    if not len(frame):
        return None
    numeric = {str(name): definition(str(name)).kind != "text" for name in frame.columns}
    head = [
        html.Th(term(name), className="number" if is_number else "")
        for name, is_number in numeric.items()
    ]
    body = [
        html.Tr(
            [
                html.Td(cell(name, row[name]), className="number" if numeric[name] else "")
                for name in numeric
            ]
        )
        for row in frame.to_dict("records")
    ]
    table = html.Table([html.Thead(html.Tr(head)), html.Tbody(body)])
    return html.Section(
        [html.H2(title), html.Div(table, className="scroll", tabIndex=0)],
        className="panel wide",
        **{"aria-label": title},
    )


def _written(name: str, value: Any) -> str:
    return str(_WRITE[definition(name).kind](value))


def layer_link(layer: int, state: ViewState) -> Any:
    """A link to the layer's view that keeps the selection."""
    return dcc.Link(str(layer), href=f"/layer{state.query(layer=layer)}")


def told(title: str, text: str, command: str = "") -> Any:
    """A short text with, where there is one, the command line that does it."""
    parts = [html.H2(title), html.P(text, className="caption")]
    parts += [html.Pre(html.Code(command), className="command", tabIndex=0)] if command else []
    return html.Section(parts, className="panel wide", **{"aria-label": title})


def notice(text: str, color: str = "yellow") -> Any:
    """A line across the top of the page."""
    return dmc.Alert(text, color=color, variant="light", p="xs", mb="sm")
