"""``routeprof summary``: the terminal table."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from routeprof.commands.options import AsJson, Between, Phase, Recordings, Tag
from routeprof.commands.reading import Dask, WorkerCount, loaded


def summary(
    directories: Recordings,
    phase: Phase = None,
    tag: Tag = None,
    between: Between = None,
    all_layers: Annotated[
        bool, typer.Option("--all", help="Every layer, not only the worst.")
    ] = False,
    as_json: AsJson = False,
    workers: WorkerCount = 1,
    dask: Dask = None,
) -> None:
    """Print what a recording says, what was not captured first.

    Example: routeprof summary runs/mixtral --phase decode

    Two nodes of one run: routeprof summary runs/node-0 runs/node-1
    """
    from time import time

    from rich.console import Console

    from routeprof.report.summary import summary_json
    from routeprof.report.text import print_summary

    profile = loaded(directories, workers, dask, phase=phase, tag=tag, between=between)
    if as_json:
        typer.echo(json.dumps(summary_json(profile, now=time()), indent=1))
    else:
        print_summary(profile, Console(), all_layers=all_layers, now=time())
