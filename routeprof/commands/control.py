"""``routeprof start``, ``pause`` and ``stop``: a live recording, from another terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from routeprof.commands.options import Directory

if TYPE_CHECKING:
    from routeprof.capture.control import Want

Wait = Annotated[
    float, typer.Option(help="Wait so long for the ranks to obey.", metavar="SECONDS", min=0)
]


def start(directory: Directory, wait: Wait = 5.0) -> None:
    """Count in all ranks of a live recording, from their next pass on.

    Exits with 1 if a rank does not answer.

    Example: routeprof start runs/mixtral
    """
    ask(directory, "recording", wait)


def pause(directory: Directory, wait: Wait = 5.0) -> None:
    """Stop counting in all ranks of a live recording; the hooks stay.

    Exits with 1 if a rank does not answer.

    Example: routeprof pause runs/mixtral
    """
    ask(directory, "paused", wait)


def stop(directory: Directory, wait: Wait = 15.0) -> None:
    """End a live recording: remove the hooks and write what is left. The program goes on.

    Exits with 1 if a rank does not answer.

    Example: routeprof stop runs/mixtral
    """
    ask(directory, "stopped", wait)


def ask(directory: Path, want: Want, wait: float) -> None:
    """Ask all ranks to be in a state, and say which are.

    Raises:
        NotARecordingError: there is no recording in the directory.
        Exit: with 1 where a rank does not obey.
    """
    from routeprof.capture.control import answered, request, silent, wait_for

    began = monotonic()
    number = request(directory, want)
    states = wait_for(directory, number, wait)
    good = [state for state in states.values() if answered(state, number)]
    for name in sorted({state.state for state in good}):
        ranks = sum(state.state == name for state in good)
        typer.echo(f"{name}: {ranks} of {len(states)} ranks, {monotonic() - began:.2f} s")
    lines = silent(states, number)
    if want == "recording" and any(state.state == "stopped" for state in good):
        lines.append("what was stopped cannot be started again; record into another directory")
    if not states:
        lines.append(f"no rank records into {directory} yet; it will find the request")
    for line in lines:
        print(f"routeprof: {line}", file=sys.stderr)
    if lines:
        raise typer.Exit(1)
