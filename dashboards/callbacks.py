"""The callbacks: thin, each calls plain functions that are tested without a browser."""

from __future__ import annotations

from typing import Any

from dash import ALL, ClientsideFunction, Dash, Input, Output, State, ctx, no_update
from dash.exceptions import PreventUpdate

from routeprof.dashboards import shell
from routeprof.dashboards.controls import phase_options, tag_options
from routeprof.dashboards.drawing import (
    Places,
    click_target,
    content_of,
    context_of,
    draw,
    messages_of,
    picked_range,
    version,
)
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.routing import contents, identity, menu
from routeprof.dashboards.state import control_value, reaching, with_controls
from routeprof.dashboards.views import VIEWS, view_at


def register(app: Dash, library: Library) -> None:
    """Add every callback to an app."""
    for add in (_tick, _options, _route, _controls, _clicks, _ranges, _draw):
        add(app, library)
    app.clientside_callback(
        ClientsideFunction("routeprof", "theme"), Output("theme", "data"), Input("scheme", "id")
    )
    app.clientside_callback(
        ClientsideFunction("routeprof", "keepZoom"),
        Output({"figure": ALL}, "figure"),
        Input({"drawn": ALL}, "data"),
        State({"figure": ALL}, "id"),
    )
    # Without an output: Dash would take it for a circle, and let a view wait for the one before.
    app.clientside_callback(
        ClientsideFunction("routeprof", "overtaken"),
        Input("shown", "data"),
        State("view", "data"),
        State("url", "search"),
        State("theme", "data"),
        State("version", "data"),
        prevent_initial_call=True,
    )
    for name, output, inputs in _CLIENTSIDE:
        app.clientside_callback(
            ClientsideFunction("routeprof", name), output, *inputs, prevent_initial_call=True
        )


_CLIENTSIDE: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    (
        "beat",
        Output("beat", "data"),
        (Input("tick", "n_intervals"), State("looking", "data"), State("drawing", "data")),
    ),
    ("openMenu", Output("shell", "navbar"), (Input("burger", "opened"), State("shell", "navbar"))),
    ("closeMenu", Output("burger", "opened"), (Input("url", "pathname"),)),
    (
        "pause",
        [Output("tick", "disabled"), Output("pause", "children")],
        (Input("pause", "n_clicks"),),
    ),
)


def _tick(app: Dash, library: Library) -> None:
    """What to draw anew: nothing, as long as nothing has changed."""

    def tick(
        _: Any, search: str | None, path: str | None, known: str | None, said: str | None
    ) -> tuple[Any, ...]:
        opened = library.open(search)
        now = opened.reading.activity
        badge = (shell.badge(now), now.text) if now.text != said else (no_update, no_update)
        newest = version(library, opened, view_at(path))
        return newest if newest != known else no_update, *badge

    app.callback(
        Output("version", "data"),
        Output("activity", "children"),
        Output("said", "data"),
        Input("beat", "data"),
        Input("url", "search"),
        State("url", "pathname"),
        State("version", "data"),
        State("said", "data"),
        prevent_initial_call=True,
        running=[(Output("looking", "data"), True, False)],
    )(tick)


def _options(app: Dash, library: Library) -> None:
    """Phases and tags that have turned up, and whether this is still the same recording."""

    def options(_: Any, search: str | None, known: str | None) -> tuple[Any, ...]:
        opened = library.open(search)
        profile = opened.reading.profile
        model = profile.info.model.name if profile else ""
        # The same value again would draw the whole page anew, and lose the reader's zoom.
        changed = identity(opened) if identity(opened) != known else no_update
        return phase_options(profile), tag_options(profile), opened.name, model, changed

    app.callback(
        Output({"control": "phase"}, "data"),
        Output({"control": "tag"}, "data"),
        Output("name", "children"),
        Output("model", "children"),
        Output("identity", "data"),
        Input("version", "data"),
        State("url", "search"),
        State("identity", "data"),
    )(options)


def _route(app: Dash, library: Library) -> None:
    """From the address to the view and the menu."""

    def route(pathname: str | None, _: Any, search: str | None) -> Any:
        return contents(library, pathname, library.open(search))

    app.callback(
        Output("page", "children"),
        Input("url", "pathname"),
        Input("identity", "data"),
        State("url", "search"),
        prevent_initial_call=True,
    )(route)

    def links(pathname: str | None, search: str | None) -> Any:
        return menu(library, pathname, library.open(search))

    app.callback(
        Output("menu", "children"),
        Input("url", "pathname"),
        Input("url", "search"),
        prevent_initial_call=True,
    )(links)


def _controls(app: Dash, library: Library) -> None:
    """The address and the controls say the same, whichever of them the reader used."""

    def controls(
        search: str | None, values: list[Any], ends: list[Any], own: str | None
    ) -> tuple[Any, list[Any], Any]:
        opened = library.open(search)
        profile, state = opened.reading.profile, opened.state
        names = [item["id"]["control"] for item in ctx.inputs_list[1]]
        still = [no_update] * len(names)
        used = {
            item["control"] for item in ctx.triggered_prop_ids.values() if isinstance(item, dict)
        }
        if used:
            shown = dict(zip(names, zip(values, ends, strict=True), strict=True))
            chosen = {name: value for name, (value, _) in shown.items() if name in used}
            if "between" in used:
                chosen["between"] = reaching(*shown["between"])
            query = with_controls(state, chosen, profile).query()
            changed = query != state.query()
            return (query, still, query) if changed else (no_update, still, no_update)
        if search == own:  # the controls said so, and may say something newer by now
            return no_update, still, None
        return no_update, [control_value(name, state, profile) for name in names], None

    app.callback(
        Output("url", "search"),
        Output({"control": ALL}, "value"),
        Output("own", "data"),
        Input("url", "search"),
        Input({"control": ALL}, "value"),
        State({"control": ALL}, "max"),
        State("own", "data"),
        prevent_initial_call=True,
    )(controls)


def _clicks(app: Dash, library: Library) -> None:
    """A click in a figure leads to what it shows: a layer, or an expert."""

    def clicked(clicks: list[Any], search: str | None, path: str | None) -> tuple[Any, Any]:
        state, view = library.open(search).state, view_at(path)
        panels = {panel.name: panel for panel in view.panels} if view else {}
        figures = [item["id"]["figure"] for item in ctx.inputs_list[0]]
        targets = (
            click_target(panels[name], click, state)
            for name, click in zip(figures, clicks, strict=True)
            if click and name in panels
        )
        return next((target for target in targets if target), (no_update, no_update))

    app.callback(
        Output("url", "pathname"),
        Output("url", "search", allow_duplicate=True),
        Input({"figure": ALL}, "clickData"),
        State("url", "search"),
        State("url", "pathname"),
        prevent_initial_call=True,
    )(clicked)


def _ranges(app: Dash, library: Library) -> None:
    """A range of time: dragged in a figure over time, and taken back with its button."""

    def chosen(drags: list[Any], search: str | None) -> Any:
        opened = library.open(search)
        drag = next((drag for drag in drags if drag), None)
        between = picked_range(drag, opened.reading.profile)
        return no_update if between is None else opened.state.query(between=between)

    app.callback(
        Output("url", "search", allow_duplicate=True),
        Input({"figure": ALL}, "selectedData"),
        State("url", "search"),
        prevent_initial_call=True,
    )(chosen)

    def cleared(clicks: list[Any], search: str | None) -> Any:
        return library.open(search).state.query(between=None) if any(clicks) else no_update

    app.callback(
        Output("url", "search", allow_duplicate=True),
        Input({"clear": ALL}, "n_clicks"),
        State("url", "search"),
        prevent_initial_call=True,
    )(cleared)


def _draw(app: Dash, library: Library) -> None:
    """The view's content, and what it was asked for: the answer may come after the question."""

    def refresh(
        known: str | None,
        path: str,
        search: str | None,
        scheme: str | None,
        tables: list[Any],
        _: Any,
        ends: list[Any],
        pathname: str | None,
    ) -> tuple[Any, ...]:
        asked = view_at(pathname)
        if asked is None or asked.path != path:  # the view that comes asks for itself
            raise PreventUpdate
        if scheme is None:  # not told yet: better nothing than the wrong colours
            raise PreventUpdate
        opened = library.open(search)
        view = next(view for view in VIEWS if view.path == path)
        context = context_of(library, opened, view, "dark" if scheme == "dark" else "light")
        names = [item["id"]["drawn"] for item in ctx.outputs_list[4]]
        folds = zip(ctx.inputs_list[4], tables, strict=True)
        unfolded = {item["id"]["table"] for item, value in folds if value}
        mounted = [item["id"]["grid"] for item in ctx.outputs_list[7]]
        reach = zip(ctx.states_list[0], ends, strict=True)
        end = next((end for item, end in reach if item["id"]["control"] == "between"), None)
        places = Places(names, mounted, unfolded, end)
        content = content_of(library, view, context)
        drawn = draw(view, context, content, places, messages_of(opened))
        return *drawn, [path, search, scheme, known]

    app.callback(
        Output("notices", "children"),
        Output("cards", "children"),
        Output("lead", "children"),
        Output("body", "children"),
        Output({"drawn": ALL}, "data"),
        Output({"caption": ALL}, "children"),
        Output({"fold": ALL}, "children"),
        Output({"grid": ALL}, "columnDefs"),
        Output({"grid": ALL}, "rowData"),
        Output("downloads", "children"),
        Output("scrubber", "children"),
        Output("time", "children"),
        Output("content", "hidden"),
        Output("shown", "data"),
        Input("version", "data"),
        Input("view", "data"),
        Input("url", "search"),
        Input("theme", "data"),
        Input({"table": ALL}, "value"),
        Input("again", "data"),
        State({"control": ALL}, "max"),
        State("url", "pathname"),
        running=[(Output("drawing", "data"), True, False)],
    )(refresh)
