"""CSV files: the same bytes as ``routeprof report`` writes, at /csv/<report>.csv."""

from __future__ import annotations

from flask import Flask, Response, abort, request

from routeprof.dashboards.source import Source
from routeprof.dashboards.state import ViewState, parse_query
from routeprof.errors import RouteprofError
from routeprof.profile import Profile
from routeprof.report.csv import available, csv_text


def select(profile: Profile, state: ViewState) -> Profile:
    """The phase and tag of a profile that a view shows."""
    return profile.select(phase=state.phase, tag=state.tag)


def csv_href(report: str, state: ViewState) -> str:
    """Where a report of the selection is."""
    selection = ViewState(phase=state.phase, tag=state.tag)
    return f"/csv/{report}.csv{selection.query()}"


def add_downloads(server: Flask, source: Source) -> None:
    """Serve the reports; the address chooses among their names and can name no file."""

    def download(report: str) -> Response:
        profile = source.exact() if report == "windows" else source.read().profile
        if profile is None or report not in available(profile):
            abort(404)
        state, ignored = parse_query(request.query_string.decode("utf-8", "replace"), profile)
        if ignored:
            return Response("\n".join([*ignored, ""]), 400, mimetype="text/plain")
        try:
            text = csv_text(select(profile, state), report)
        except RouteprofError as error:
            return Response(f"{error}\n", 409, mimetype="text/plain")
        return Response(
            text.encode("utf-8"),
            content_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="{report}.csv"'},
        )

    server.add_url_rule("/csv/<report>.csv", "csv", download)
