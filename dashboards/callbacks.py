"""The callbacks: thin, each calls plain functions that are tested without a browser."""

from __future__ import annotations

from typing import Any

from dash import ALL, ClientsideFunction, Dash, Input, Output, State, ctx, no_update
from dash.exceptions import PreventUpdate

from routeprof.dashboards import shell
from routeprof.dashboards.controls import phase_options, tag_options
from routeprof.dashboards.drawing import click_target, context_of, draw
from routeprof.dashboards.source import Source
from routeprof.dashboards.state import control_value, parse_query, with_controls
from routeprof.dashboards.views import VIEWS, view_at


def register(app: Dash, source: Source) -> None:
    """Add every callback to an app."""
    for add in (_tick, _options, _route, _controls, _clicks, _draw):
        add(app, source)
    app.clientside_callback(
        ClientsideFunction("routeprof", "theme"), Output("theme", "data"), Input("scheme", "id")
    )
    app.clientside_callback(
        ClientsideFunction("routeprof", "keepZoom"),
        Output({"figure": ALL}, "figure"),
        Input({"drawn": ALL}, "data"),
        State({"figure": ALL}, "id"),
    )
    for name, output, inputs in _CLIENTSIDE:
        app.clientside_callback(
            ClientsideFunction("routeprof", name), output, *inputs, prevent_initial_call=True
        )


_CLIENTSIDE: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("openMenu", Output("shell", "navbar"), (Input("burger", "opened"), State("shell", "navbar"))),
    ("closeMenu", Output("burger", "opened"), (Input("url", "pathname"),)),
    (
        "pause",
        [Output("tick", "disabled"), Output("pause", "children")],
        (Input("pause", "n_clicks"),),
    ),
)


def _tick(app: Dash, source: Source) -> None:
    """What to draw anew: nothing, as long as nothing has changed."""

    def tick(_: Any, version: int | None, said: str | None) -> tuple[Any, ...]:
        reading = source.read()
        now = reading.activity
        badge = (shell.badge(now), now.text) if now.text != said else (no_update, no_update)
        return reading.version if reading.version != version else no_update, *badge

    app.callback(
        Output("version", "data"),
        Output("activity", "children"),
        Output("said", "data"),
        Input("tick", "n_intervals"),
        State("version", "data"),
        State("said", "data"),
        prevent_initial_call=True,
    )(tick)


def _options(app: Dash, source: Source) -> None:
    """Phases and tags that have turned up, and whether this is still the same recording."""

    def options(_: Any, known: str | None) -> tuple[Any, ...]:
        profile = source.read().profile
        model = profile.info.model.name if profile else ""
        identity = profile.info.id if profile else ""
        # The same value again would draw the whole page anew, and lose the reader's zoom.
        changed = identity if identity != known else no_update
        return phase_options(profile), tag_options(profile), model, changed

    app.callback(
        Output({"control": "phase"}, "data"),
        Output({"control": "tag"}, "data"),
        Output("model", "children"),
        Output("identity", "data"),
        Input("version", "data"),
        State("identity", "data"),
    )(options)


def _route(app: Dash, source: Source) -> None:
    """From the address to the view and the menu."""

    def route(pathname: str | None, _: Any, search: str | None) -> Any:
        view, profile = view_at(pathname), source.read().profile
        if view is None:
            return shell.not_found()
        return shell.page(view, parse_query(search, profile)[0], profile)

    app.callback(
        Output("page", "children"),
        Input("url", "pathname"),
        Input("identity", "data"),
        State("url", "search"),
        prevent_initial_call=True,
    )(route)

    def menu(pathname: str | None, search: str | None) -> Any:
        return shell.menu(view_at(pathname), parse_query(search, source.read().profile)[0])

    app.callback(Output("menu", "children"), Input("url", "pathname"), Input("url", "search"))(menu)


def _controls(app: Dash, source: Source) -> None:
    """The address and the controls say the same, whichever of them the reader used."""

    def controls(search: str | None, values: list[Any]) -> tuple[Any, list[Any]]:
        profile = source.read().profile
        state, _ = parse_query(search, profile)
        names = [item["id"]["control"] for item in ctx.inputs_list[1]]
        used = {
            item["control"] for item in ctx.triggered_prop_ids.values() if isinstance(item, dict)
        }
        if used:
            chosen = {n: value for n, value in zip(names, values, strict=True) if n in used}
            query = with_controls(state, chosen, profile).query()
            return (query if query != state.query() else no_update), [no_update] * len(names)
        return no_update, [control_value(name, state, profile) for name in names]

    app.callback(
        Output("url", "search"),
        Output({"control": ALL}, "value"),
        Input("url", "search"),
        Input({"control": ALL}, "value"),
        prevent_initial_call=True,
    )(controls)


def _clicks(app: Dash, source: Source) -> None:
    """A click on a layer in a figure opens the layer's view."""

    def clicked(clicks: list[Any], search: str | None) -> tuple[Any, Any]:
        state, _ = parse_query(search, source.read().profile)
        layer = next((click_target(click) for click in clicks if click), None)
        if layer is None:
            return no_update, no_update
        return "/layer", state.query(layer=layer)

    app.callback(
        Output("url", "pathname"),
        Output("url", "search", allow_duplicate=True),
        Input({"figure": ALL}, "clickData"),
        State("url", "search"),
        prevent_initial_call=True,
    )(clicked)


def _draw(app: Dash, source: Source) -> None:
    """The view's content."""

    def refresh(
        _: Any, path: str, search: str | None, scheme: str | None, tables: list[Any]
    ) -> tuple[Any, ...]:
        if scheme is None:  # not told yet: better nothing than the wrong colours
            raise PreventUpdate
        reading = source.read()
        state, ignored = parse_query(search, reading.profile)
        view = next(view for view in VIEWS if view.path == path)
        context = context_of(reading, state, "dark" if scheme == "dark" else "light")
        names = [item["id"]["drawn"] for item in ctx.outputs_list[4]]
        folds = zip(ctx.inputs_list[4], tables, strict=True)
        opened = {item["id"]["table"] for item, value in folds if value}
        return draw(view, context, names, opened, [*ignored, *filter(None, [reading.message])])

    app.callback(
        Output("notices", "children"),
        Output("cards", "children"),
        Output("lead", "children"),
        Output("body", "children"),
        Output({"drawn": ALL}, "data"),
        Output({"caption": ALL}, "children"),
        Output({"grid": ALL}, "columnDefs"),
        Output({"grid": ALL}, "rowData"),
        Output("downloads", "children"),
        Output("content", "hidden"),
        Input("version", "data"),
        Input("view", "data"),
        Input("url", "search"),
        Input("theme", "data"),
        Input({"table": ALL}, "value"),
    )(refresh)
