"""``routeprof status``: what the ranks of a recording do now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from time import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from routeprof.commands.options import Directory

if TYPE_CHECKING:
    from routeprof.recording.schema import RankState


def status(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what each rank of a recording is doing, and exit with 1 if one is not responding.

    Example: routeprof status runs/mixtral
    """
    from routeprof.capture.control import rank_states

    rows = status_rows(rank_states(directory), time())
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        _print(rows)
    if any(row["state"] in ("dead", "not responding") for row in rows):
        raise typer.Exit(1)


def status_rows(states: Mapping[int, RankState], now: float) -> list[dict[str, Any]]:
    """One row for each rank; now: seconds since the epoch."""
    from routeprof.capture.control import health

    return [
        {
            "rank": rank,
            "state": health(state, now),
            "pid": state.pid,
            "host": state.host,
            "age_seconds": round(now - state.updated, 3),
            "windows": state.parts.get("part", 0),
            "problems": state.problems,
            "role": asdict(state.role),
        }
        for rank, state in states.items()
    ]


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("rank", "state", "pid", "host", "last write", "windows", "problems")
    for row in rows:
        problems = ", ".join(f"{name} {value}" for name, value in row["problems"].items())
        table.add_row(
            str(row["rank"]),
            row["state"],
            str(row["pid"]),
            escape(row["host"]),
            f"{row['age_seconds']:.1f} s ago",
            f"{row['windows']:,}",
            escape(problems) or "none",
        )
    Console().print(table)
