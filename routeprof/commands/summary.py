"""``routeprof summary``: the terminal table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from routeprof.commands.options import Between, selected


def summary(
    directories: Annotated[
        list[Path],
        typer.Argument(
            help="The recording; several are added up.", metavar="DIR...", show_default=False
        ),
    ],
    phase: Annotated[str | None, typer.Option(help="Only this phase, such as decode.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only this tag.")] = None,
    between: Between = None,
    all_layers: Annotated[bool, typer.Option("--all", help="Every layer, not the worst.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a recording says, what was not captured first.

    Example: routeprof summary runs/mixtral --phase decode

    Two nodes of one run: routeprof summary runs/node-0 runs/node-1
    """
    from time import time

    from rich.console import Console

    from routeprof.profile import load
    from routeprof.report.summary import summary_json
    from routeprof.report.text import print_summary

    profile = selected(load(directories), phase, tag, between)
    if as_json:
        typer.echo(json.dumps(summary_json(profile, now=time()), indent=1))
    else:
        print_summary(profile, Console(), all_layers=all_layers, now=time())
