"""``routeprof top``: the live view in a terminal."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from routeprof.commands.options import Recordings


def top(
    directories: Recordings,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.2, max=3600)
    ] = 1.0,
    seconds: Annotated[
        float, typer.Option(help="Length of the newest stretch, which is shown.", min=1)
    ] = 60.0,
    ranks: Annotated[
        int | None, typer.Option(help="Expert-parallel ranks; unset, the recording's or 8.", min=1)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
) -> None:
    """Watch a recording in the terminal, also over SSH, while it is written.

    Example: routeprof top runs/mixtral
    """
    from threading import Event

    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

    from routeprof.commands.extras import make_way
    from routeprof.converted import as_recording
    from routeprof.dashboards.live.source import Source
    from routeprof.errors import NotARecordingError
    from routeprof.report.top import Moment, frame

    for path in directories:
        if not path.exists():
            raise NotARecordingError(f"{path} does not exist; name a recording's directory")
    console, source = Console(), Source(*map(as_recording, directories))

    def look(height: int) -> RenderableType:
        reading = source.read()
        if reading.profile is None:
            return Text(reading.message or reading.activity.text)
        whole, doing = reading.profile, reading.activity
        timed = len(whole.totals.windows.window) > 0
        recent = source.newest(reading, seconds) if timed else whole
        known = seconds if timed else None
        moment = Moment(whole, recent, known, doing.kind, doing.text, reading.message)
        return frame(moment, console.width, height, ranks)

    if once or not console.is_terminal:
        console.print(look(height=1000))
        return
    make_way()
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(look(console.height), refresh=True)
            Event().wait(interval)
