"""The frame around the views: header, menu, controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from routeprof.dashboards.components import panel
from routeprof.dashboards.controls import control, phase_options, select_control, tag_options
from routeprof.dashboards.drawing import Numbers
from routeprof.dashboards.live.activity import Activity
from routeprof.dashboards.live.library import Opened
from routeprof.dashboards.remote import buttons
from routeprof.dashboards.state import ViewState
from routeprof.dashboards.view import View
from routeprof.dashboards.views import VIEWS, view_at

NAVBAR: dict[str, Any] = {"width": 208, "breakpoint": "sm", "collapsed": {"mobile": True}}
TICK_MS = 1000

_COLOURS = {
    "waiting": "gray",
    "live": "teal",
    "idle": "blue",
    "paused": "yellow",
    "quiet": "red",
    "stopped": "gray",
}


@dataclass(frozen=True)
class Frame:
    """What the page has whatever is open.

    Attributes:
        pathname: of the address; None where the browser has not told it.
        control: whether there are buttons that control the recording.
    """

    title: str
    pathname: str | None
    search: str
    control: bool


@dataclass(frozen=True)
class Start:
    """What the page begins with; by default nothing, which callbacks fill.

    Attributes:
        version: of the content.
        identity: of the recording that the content is of.
    """

    version: str = ""
    identity: str | None = None
    content: Sequence[Any] = ()
    menu: Sequence[Any] = ()


def shell(frame: Frame, opened: Opened, start: Start) -> Any:
    """The whole page."""
    reading = opened.reading
    known = {} if frame.pathname is None else {"pathname": frame.pathname, "search": frame.search}
    return dmc.MantineProvider(
        [
            dcc.Location(id="url", refresh=False, **known),
            dcc.Store(id="version", data=start.version),
            dcc.Store(id="identity", data=start.identity),
            dcc.Store(id="own"),
            dcc.Store(id="theme"),
            dcc.Store(id="said", data=reading.activity.text),
            dcc.Interval(id="tick", interval=TICK_MS),
            dcc.Store(id="beat"),
            dcc.Store(id="looking", data=False),
            dcc.Store(id="drawing", data=False),
            dmc.AppShell(
                [
                    dmc.AppShellHeader(_header(frame, opened)),
                    dmc.AppShellNavbar(
                        html.Nav(list(start.menu), id="menu"), p="xs", **{"aria-label": "Views"}
                    ),
                    dmc.AppShellMain(html.Div(list(start.content), id="page")),
                ],
                id="shell",
                header={"height": {"base": 104, "md": 60}},
                navbar=NAVBAR,
                padding="md",
            ),
        ],
        defaultColorScheme="auto",
        theme={"primaryColor": "blue", "defaultRadius": "sm"},
    )


def _header(frame: Frame, opened: Opened) -> Any:
    reading, state = opened.reading, opened.state
    profile = reading.profile
    model = profile.info.model.name if profile else ""
    brand = html.Div(
        [
            dmc.Burger(id="burger", hiddenFrom="sm", size="sm", **{"aria-label": "Menu"}),
            html.Img(src="assets/icon.svg", alt="", width=28, height=28),
            html.Div(
                [
                    html.Div(frame.title, className="brand-title"),
                    html.Div(
                        [html.Span(opened.name, id="name"), html.Span(model, id="model")],
                        className="brand-name",
                    ),
                ],
                className="brand-text",
            ),
        ],
        className="brand",
    )
    tools = html.Div(
        [
            select_control("phase", "Phase", phase_options(profile), state, 132),
            select_control("tag", "Tag", tag_options(profile), state, 168),
            html.Div(badge(reading.activity), id="activity", **{"aria-live": "polite"}),
            *([buttons()] if frame.control else []),
            html.Button("Pause", id="pause", className="button", type="button"),
            dmc.ColorSchemeToggle(
                id="scheme",
                lightIcon=html.Span(className="icon sun"),
                darkIcon=html.Span(className="icon moon"),
                variant="default",
                size="lg",
                **{"aria-label": "Light or dark"},
            ),
        ],
        className="tools",
    )
    return html.Div([brand, tools], className="header")


def badge(activity: Activity) -> Any:
    """What the engine is doing, in a word, with the explanation behind it."""
    return dmc.Tooltip(
        dmc.Badge(
            activity.kind,
            color=_COLOURS[activity.kind],
            variant="dot" if activity.kind in ("live", "idle") else "light",
            size="lg",
            tabIndex=0,
            **{"data-kind": activity.kind},
        ),
        label=activity.text,
        multiline=True,
        w=280,
        events={"hover": True, "focus": True, "touch": True},
    )


LIST = "recordings"
"""Path of the list of recordings."""


def wants_list(pathname: str | None) -> bool:
    """Whether an address is that of the list of recordings."""
    return (pathname or "").strip("/") == LIST


def menu(pathname: str | None, state: ViewState, *, several: bool) -> list[Any]:
    """Links to the views that keep the selection.

    Args:
        several: there is more than one recording to choose from.
    """
    active = None if wants_list(pathname) else view_at(pathname)
    query = replace(state.selection, layer=state.layer, expert=state.expert).query()
    links = [
        dmc.NavLink(label=view.title, href=f"/{view.path}{query}", active=view is active)
        for view in VIEWS
        if several or "against" not in view.controls
    ]
    if not several:
        return links
    chosen = dmc.NavLink(label="Recordings", href=f"/{LIST}", active=wants_list(pathname))
    return [chosen, dmc.Divider(my="xs"), *links]


def page(view: View, opened: Opened, names: Sequence[str], numbers: Numbers) -> list[Any]:
    """A view before its figures.

    Args:
        names: the recordings that there are.
    """
    controls = [name for name in view.controls if name != "between"]
    return [
        dcc.Store(id="view", data=view.path),
        dcc.Store(id="shown"),
        dcc.Store(id="again"),
        html.Div(
            [
                html.Div(
                    [html.H1(view.title), html.P(view.question, className="question")],
                ),
                html.Div(numbers.downloads, id="downloads", className="downloads"),
            ],
            className="page-head",
        ),
        html.Div(numbers.notices, id="notices", **{"aria-live": "polite"}),
        html.Div(
            [
                html.Div(
                    [control(name, opened, names, controls) for name in controls],
                    className="controls",
                ),
                html.Div(
                    [
                        html.Div(numbers.scrubber, id="scrubber"),
                        html.Div(numbers.time, id="time"),
                    ],
                    className="scrubber",
                ),
                html.Div(numbers.cards, id="cards", className="cards"),
                html.Div(numbers.lead, id="lead", className="panels"),
                html.Div([panel(item) for item in view.panels], className="panels"),
                html.Div(numbers.body, id="body", className="panels"),
            ],
            id="content",
            hidden=numbers.hidden,
        ),
    ]


def not_found() -> list[Any]:
    """What an unknown address shows."""
    return [
        html.Div([html.H1("No such view"), html.P("Choose one from the menu.")], role="alert"),
    ]
