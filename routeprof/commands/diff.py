"""``routeprof diff``: what changed between two recordings, by more than chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from routeprof.commands.options import AsJson, Between, Phase, Place, Tag, selected
from routeprof.recording.places import place

First = Annotated[
    Place,
    typer.Argument(
        parser=place, help="The recording from before.", metavar="A", show_default=False
    ),
]
Second = Annotated[
    Place,
    typer.Argument(parser=place, help="The recording from after.", metavar="B", show_default=False),
]


def diff(
    one: First,
    other: Second,
    phase: Phase = None,
    tag: Tag = None,
    between: Between = None,
    between_b: Annotated[
        str | None, typer.Option(help="The same of B; unset, as for A.", metavar="RANGE")
    ] = None,
    alpha: Annotated[
        float, typer.Option(help="Chance of a false alarm anywhere, where nothing changed.")
    ] = 0.05,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="Also write every expert's change here.", metavar="FILE"),
    ] = None,
    fail: Annotated[bool, typer.Option("--fail", help="Exit with 1 if anything changed.")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="Every layer and expert.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what changed from recording A to recording B, and what is only noise.

    Compares each phase and tag by itself. Exits with 0 whatever changed; with --fail, with 1 if
    anything did, and with 2 if no phase and tag could be judged.

    Example: routeprof diff runs/monday runs/tuesday --phase decode

    Two parts of one recording: routeprof diff runs/a runs/a --between 0-60 --between-b 60-120
    """
    from rich.console import Console

    from routeprof.compare.difference import compare
    from routeprof.errors import UsageError
    from routeprof.profile import load
    from routeprof.report.csv import to_csv
    from routeprof.report.diff import difference_json, print_difference
    from routeprof.report.files import write_text

    difference = compare(
        selected(load(one), phase, tag, between),
        selected(load(other), phase, tag, between_b or between),
        alpha=alpha,
    )
    if csv is not None:
        write_text(csv, to_csv(difference.experts))
    if as_json:
        typer.echo(json.dumps(difference_json(difference), indent=1))
    else:
        print_difference(difference, Console(), all_rows=all_rows)
    if fail and not difference.judged:
        raise UsageError(f"--fail cannot be judged: {difference.groups[0].reason}")
    if fail and difference.significant:
        raise typer.Exit(1)
