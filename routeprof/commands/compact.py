"""``routeprof compact``: fewer and coarser windows, less detail, the same sums."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from routeprof.commands.options import Directory
from routeprof.commands.quantities import bytes_text, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from routeprof.recording.compact import Outcome


def compact(
    directory: Directory,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Delete steps and tokens older than this, such as 30m, 24h or 7d.",
            metavar="TIME",
            show_default=False,
        ),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            help="Go on until the recording is no larger, such as 500MB or 10GB.",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
) -> None:
    """Make old windows coarser, and delete old detail where asked to; totals stay as they are.

    Windows older than 1 h become windows of 1 min, older than 24 h of 10 min, older than 7 days of
    1 h. Ages count from the recording's newest window. A recording may be compacted while it grows.

    Exits with 1 if the recording is larger than --max-size in the end.

    Example: routeprof compact runs/mixtral --keep 24h --max-size 10GB
    """
    from routeprof.recording.compact import compact as compacted
    from routeprof.recording.retention import Policy

    policy = Policy() if keep is None else Policy(keep=parse_seconds(keep))
    most = None if max_size is None else parse_bytes(max_size)
    outcome = compacted(directory, policy, most=most, dry_run=dry_run)
    typer.echo(_said(outcome, dry_run))
    for line in outcome.remarks:
        print(f"routeprof: {line}", file=sys.stderr)
    if most is not None and outcome.after.bytes > most:
        print(
            f"routeprof: {directory} cannot be made to fit {bytes_text(most)}: it takes "
            f"{outcome.after.bytes:,} bytes with all detail gone that may go and one window a rank",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _said(outcome: Outcome, dry_run: bool) -> str:
    before, after = outcome.before, outcome.after
    line = (
        f"{before.parts:,} -> {after.parts:,} parts, {bytes_text(before.bytes)} -> "
        f"{bytes_text(after.bytes)}"
    )
    if outcome.dropped:
        line += f"; {outcome.dropped:,} parts of detail deleted"
    return f"would be {line}; nothing was changed, sizes are estimates" if dry_run else line
