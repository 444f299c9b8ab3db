"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeprof.errors import UsageError
from routeprof.topology import LEVELS

Directory = Annotated[Path, typer.Argument(help="The recording.", show_default=False)]
Out = Annotated[
    Path, typer.Option("-o", "--out", help="Where the recording goes.", show_default=False)
]
Level = Annotated[str, typer.Option(help="windows, steps or tokens.")]
Gate = Annotated[bool, typer.Option(help="Keep the router's outputs too.")]
Window = Annotated[float, typer.Option(help="Seconds that a window lasts.")]


def check_options(level: str, window: float) -> None:
    """Say what is wrong here, where the user sees it, and not inside the program.

    Raises:
        UsageError: a value that cannot be right.
    """
    if level not in LEVELS:
        raise UsageError(f"level {level!r} is not one of {', '.join(LEVELS)}")
    if not 0.05 <= window <= 3600:
        raise UsageError(f"window {window:g} is not between 0.05 and 3600 seconds")
