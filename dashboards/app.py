"""create_app: the dashboard of one recording as a Dash app. Callbacks are thin."""

from __future__ import annotations

import logging
from pathlib import Path

import dash
from dash import Dash

from routeprof.converted import as_recording
from routeprof.dashboards.auth import HEALTH, add_headers
from routeprof.dashboards.callbacks import register
from routeprof.dashboards.components import notice
from routeprof.dashboards.downloads import add_downloads
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.remote import register_remote
from routeprof.dashboards.routing import layout

_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<title>{%title%}</title>
<link rel="icon" type="image/svg+xml" href="assets/icon.svg">
<script>
(function () {  // before anything is painted: no flash of the wrong scheme
  var scheme = "auto";
  try { scheme = localStorage.getItem("mantine-color-scheme-value") || scheme; } catch (e) {}
  if (scheme === "auto") {
    scheme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }
  document.documentElement.setAttribute("data-mantine-color-scheme", scheme);
})();
</script>
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>"""

_logger = logging.getLogger(__name__)


def create_app(*paths: str | Path, title: str = "routeprof", control: bool = False) -> Dash:
    """The dashboard of recordings, finished or still being written.

    Args:
        paths: a recording's directory; several, to see their sum and to compare them; or a
            directory below which there are recordings.
        title: shown in the header and in the browser's tab.
        control: whether the page may start, pause and stop the recording.
    """
    library = Library(*(as_recording(path) for path in paths))
    app = Dash(
        "routeprof.dashboards",
        assets_folder=str(Path(__file__).parent / "assets"),
        title=f"{library.title} · {title}",
        update_title="",
        index_string=_INDEX,
        serve_locally=True,
        suppress_callback_exceptions=True,
        enable_mcp=False,
        health_endpoint=HEALTH,
        add_log_handler=False,
        on_error=_on_error,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    app.layout = lambda: layout(library, title, control=control)
    add_headers(app.server)
    add_downloads(app.server, library)
    register(app, library)
    if control:
        register_remote(app, library)
    return app


def _on_error(error: Exception) -> None:
    _logger.error("the dashboard could not draw", exc_info=error)
    text = f"This could not be drawn ({type(error).__name__}); the log of the server says why."
    dash.set_props("notices", {"children": notice(text, "red")})
