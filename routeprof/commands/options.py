"""Options that several verbs share."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from routeprof.profile import Profile

    Place = Path
else:

    class Place:
        """A path that typer leaves as ``place`` made it; it would make a ``Path`` of a path."""


from routeprof.commands.completion import levels, phases
from routeprof.errors import UsageError
from routeprof.recording.places import place
from routeprof.timerange import parse_range
from routeprof.topology import LEVELS

Recordings = Annotated[
    list[Place],
    typer.Argument(
        parser=place,
        help="The recording, or another tool's file; several are added up.",
        metavar="DIR...",
        show_default=False,
    ),
]
Directory = Annotated[
    Place, typer.Argument(parser=place, help="The recording.", metavar="DIR", show_default=False)
]
Out = Annotated[
    Path,
    typer.Option(
        "-o", "--out", help="Where the recording goes.", metavar="DIR", show_default=False
    ),
]
Phase = Annotated[
    str | None, typer.Option(help="Only this phase, such as decode.", autocompletion=phases)
]
Tag = Annotated[str | None, typer.Option(help="Only this tag.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Between = Annotated[
    str | None,
    typer.Option(
        help="Only windows that end in these seconds since the start, such as 10-60 or 10-.",
        metavar="RANGE",
    ),
]
Layers = Annotated[bool, typer.Option("--layers", help="Rows for each layer, too.")]
Level = Annotated[str, typer.Option(help="windows, steps or tokens.", autocompletion=levels)]
Gate = Annotated[bool, typer.Option(help="Keep the router's outputs too.")]
Window = Annotated[float, typer.Option(help="Seconds that a window lasts.", metavar="SECONDS")]


def check_options(level: str, window: float) -> None:
    """Say what is wrong here, where the user sees it, and not inside the program.

    Raises:
        UsageError: a value that cannot be right.
    """
    if level not in LEVELS:
        raise UsageError(f"level {level!r} is not one of {', '.join(LEVELS)}")
    if not 0.05 <= window <= 3600:
        raise UsageError(f"window {window:g} is not between 0.05 and 3600 seconds")


def selected(
    profile: Profile,
    phase: str | None,
    tag: str | None,
    between: str | None,
    executor: Executor | None = None,
) -> Profile:
    """The part of a recording that the user asked for.

    Raises:
        UsageError: the phase or the tag does not occur, or the range is none.
    """
    absolute = None if between is None else profile.since_start(parse_range(between))
    return profile.select(phase=phase, tag=tag, between=absolute, executor=executor)
