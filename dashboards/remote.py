"""Start, pause and stop the live recording from the page; only with ``--control``."""

from __future__ import annotations

from typing import Any, get_args

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update

from routeprof.capture.control import Want, request, silent, wait_for
from routeprof.dashboards.components import notice
from routeprof.dashboards.live.library import Library
from routeprof.errors import RouteprofError

PATIENCE_SECONDS = 2.0
"""How long a press of a button waits for the ranks' answers."""

_BUTTONS: tuple[tuple[Want, str, str], ...] = (
    ("recording", "Record", "Count from the next pass on"),
    ("paused", "Hold", "Count nothing until it is started again; the hooks stay"),
    ("stopped", "Stop", "End the recording for good; the engine goes on"),
)


def buttons() -> Any:
    """The three buttons. The page is drawn without them where control is off."""
    made = [
        html.Button(label, id={"want": want}, className="button", type="button", title=title)
        for want, label, title in _BUTTONS
    ]
    sure = dcc.ConfirmDialog(
        id="sure", message="End this recording? It cannot be started again; the engine goes on."
    )
    return html.Div([*made, sure], id="remote", role="group", **{"aria-label": "Recording"})


def register_remote(app: Dash, library: Library) -> None:
    """Add the callbacks of the buttons."""

    def pressed(clicks: list[Any], search: str | None) -> tuple[Any, Any]:
        trigger = ctx.triggered_id
        want: Want | None = trigger["want"] if trigger else None
        if want is None or want not in get_args(Want) or not any(clicks):
            return no_update, no_update
        if want == "stopped":
            return no_update, True
        return [notice(line) for line in ask(library, search, want)], no_update

    app.callback(
        Output("notices", "children", allow_duplicate=True),
        Output("sure", "displayed"),
        Input({"want": ALL}, "n_clicks"),
        State("url", "search"),
        prevent_initial_call=True,
    )(pressed)

    def sure(_: Any, search: str | None) -> Any:
        return [notice(line) for line in ask(library, search, "stopped")]

    app.callback(
        Output("notices", "children", allow_duplicate=True),
        Input("sure", "submit_n_clicks"),
        State("url", "search"),
        prevent_initial_call=True,
    )(sure)


def ask(library: Library, search: str | None, want: Want) -> list[str]:
    """Ask all ranks of the recording that is shown; a line for each that does not obey."""
    source = library.open(search).source
    if source is None:
        return ["Choose a recording first."]
    try:
        numbers = [(path, request(path, want)) for path in source.paths]
        return [
            line
            for path, number in numbers
            for line in silent(wait_for(path, number, PATIENCE_SECONDS), number)
        ]
    except RouteprofError as error:
        return [str(error)]
