"""CSV files: the same bytes as ``routeprof report`` writes, at /csv/<report>.csv."""

from __future__ import annotations

from dataclasses import replace

from flask import Flask, Response, abort, request

from routeprof.dashboards.live.library import Library
from routeprof.dashboards.state import ViewState
from routeprof.errors import RouteprofError
from routeprof.report.csv import available, csv_text


def csv_href(report: str, state: ViewState) -> str:
    """Where a report of the selection is."""
    chosen = replace(state.selection, ranks=state.ranks) if report == "ranks" else state.selection
    return f"/csv/{report}.csv{chosen.query()}"


def add_downloads(server: Flask, library: Library) -> None:
    """Serve the reports; the address chooses among their names and can name no file."""

    def download(report: str) -> Response:
        opened = library.open(request.query_string.decode("utf-8", "replace"))
        if opened.source is None or opened.reading.profile is None:
            abort(404)
        if report not in available(opened.reading.profile):
            abort(404)
        if opened.ignored:
            return Response("\n".join([*opened.ignored, ""]), 400, mimetype="text/plain")
        state = opened.state
        try:
            profile = opened.source.exact(state.between, windows=report == "windows")
            selected = profile.narrowed(state.phase, state.tag)
            text = csv_text(selected, report, ranks=state.ranks)
        except RouteprofError as error:
            return Response(f"{error}\n", 409, mimetype="text/plain")
        return Response(
            text.encode("utf-8"),
            content_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="{report}.csv"'},
        )

    server.add_url_rule("/csv/<report>.csv", "csv", download)
