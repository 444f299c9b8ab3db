"""``routeprof report``: CSV, HTML and figures."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class FigureFormat(StrEnum):
    """Formats that figures can be written in."""

    png = "png"
    svg = "svg"
    pdf = "pdf"


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(
            help="The recording; several are added up.", metavar="DIR...", show_default=False
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Where the files go.", show_default=False)
    ],
    phase: Annotated[str | None, typer.Option(help="Only this phase, such as decode.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only this tag.")] = None,
    csv_only: Annotated[
        bool, typer.Option("--csv-only", help="Write the CSV files alone (needs no extra).")
    ] = False,
    figures: Annotated[
        list[FigureFormat] | None, typer.Option("--figures", help="Figure formats; repeatable.")
    ] = None,
) -> None:
    """Write CSV files, one HTML page and figures.

    Example: routeprof report runs/mixtral -o out
    """
    from routeprof.profile import load

    profile = load(directories).select(phase=phase, tag=tag)
    files = profile.write_csv(out)
    if not csv_only:
        from routeprof.report.figures import write_figures
        from routeprof.report.html import write_html

        files.append(write_html(profile, out / "report.html"))
        formats = [choice.value for choice in figures or [FigureFormat.png]]
        files += write_figures(profile, out / "figures", formats)
    for path in files:
        typer.echo(str(path))
