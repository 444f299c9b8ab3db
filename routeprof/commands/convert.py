"""``routeprof convert``: other tools' files as a recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from routeprof.commands.options import AsJson


def convert(
    files: Annotated[list[Path], typer.Argument(help="Files of one run, or a directory.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Directory of the recording; must be new or empty.")
    ],
    name: Annotated[
        str | None, typer.Option("--format", help="Kind of the files; unset, by their content.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Experts of a token, where the file does not say it.")
    ] = None,
    phase: Annotated[
        str | None, typer.Option(help="Phase, where the file does not say it.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Tag for what has none.")] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the model, dense ones too, likewise.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="Experts of a layer, where the file has only chosen ones.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a recording of files that another tool wrote.

    Other verbs read such files directly; this keeps the result, and adds what you know.

    Example: routeprof convert expert_distribution_recorder_1.pt --top-k 8 -o runs/sglang
    """
    from routeprof.formats import FORMATS, Told
    from routeprof.formats import convert as converted
    from routeprof.profile import load

    profile = load(converted(files, out, name, Told(top_k, phase, tag, layers, experts)))
    routed = int(profile.counts.sum())
    facts = {
        "recording": str(out),
        "format": profile.info.source,
        "level": profile.info.level,
        "layers": len(profile.captured),
        "assignments": routed,
        "notes": list(profile.info.notes),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    about = FORMATS[profile.info.source].about
    found = f"{len(profile.captured)} MoE layers"
    typer.echo(f"{about}: {found}, {routed:,} assignments, level {profile.info.level}")
    for note in profile.info.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"wrote {out}; next: routeprof summary {out}")
