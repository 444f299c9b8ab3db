"""``routeprof dashboard``: the browser view."""

from __future__ import annotations

from typing import Annotated

import typer

from routeprof.commands.options import Place
from routeprof.recording.places import place


def dashboard(
    directories: Annotated[
        list[Place],
        typer.Argument(
            parser=place,
            help="A recording, several (added up, each alone, compared), or a directory of them.",
            metavar="DIR...",
            show_default=False,
        ),
    ],
    port: Annotated[
        int, typer.Option(help="Port; 0 takes a free one.", metavar="PORT", min=0, max=65535)
    ] = 8050,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    auth_token: Annotated[
        str | None, typer.Option(help="Ask for this token; needed for another host.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve to other hosts without a token.")
    ] = False,
    control: Annotated[
        bool, typer.Option("--control", help="Let the page start, pause and stop the recording.")
    ] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
) -> None:
    """Serve the dashboard; it is live while the recording is being written.

    Example: routeprof dashboard runs/mixtral --port 8050
    """
    from routeprof.commands.extras import make_way, need

    need("dash", "dashboard")
    from routeprof.dashboards import create_app
    from routeprof.dashboards.serve import serve

    make_way()
    app = create_app(*directories, control=control)
    serve(
        app,
        host=host,
        port=port,
        auth_token=auth_token,
        insecure=insecure,
        open_browser=open_browser,
    )
