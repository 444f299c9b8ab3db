"""``routeprof report``: CSV, HTML and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeprof.commands.options import Between, Phase, Recordings, Tag
from routeprof.commands.reading import Dask, WorkerCount, loaded


def report(
    directories: Recordings,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Where the files go.", show_default=False)
    ],
    phase: Phase = None,
    tag: Tag = None,
    between: Between = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Expert-parallel ranks in ranks.csv; unset, the recording's or 8."
        ),
    ] = None,
    csv_only: Annotated[
        bool, typer.Option("--csv-only", help="Write the CSV files alone (needs no extra).")
    ] = False,
    html: Annotated[
        bool, typer.Option("--html", help="Also the whole dashboard as one offline file.")
    ] = False,
    png: Annotated[bool, typer.Option("--png", help="Figures as PNG, which is usual.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Figures as SVG.")] = False,
    pdf: Annotated[bool, typer.Option("--pdf", help="Figures as PDF.")] = False,
    workers: WorkerCount = 1,
    dask: Dask = None,
) -> None:
    """Write CSV files, one HTML page and figures; no browser is needed.

    Example: routeprof report runs/mixtral -o out --html --svg
    """

    profile = loaded(directories, workers, dask, phase=phase, tag=tag, between=between)
    files = profile.write_csv(out, ranks=ranks)
    if not csv_only:
        from routeprof.report.figures import write_figures
        from routeprof.report.html import write_html

        files.append(write_html(profile, out / "report.html"))
        formats = [name for name, on in (("png", png), ("svg", svg), ("pdf", pdf)) if on]
        files += write_figures(profile, out / "figures", formats or ["png"])
    if html:
        from routeprof.commands.extras import need

        need("plotly", "dashboard")
        from routeprof.dashboards.static import write_page

        files.append(write_page(profile, out / "dashboard.html"))
    for path in files:
        typer.echo(str(path))
