"""``routeprof attach`` and ``detach``: a process that was started without routeprof."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routeprof.commands.completion import METHODS, one_of
from routeprof.commands.options import Gate, Level, Out, Window, check_options

if TYPE_CHECKING:
    from routeprof.hooks.process import Attached


def attach(
    pid: Annotated[
        int, typer.Argument(help="Process id.", metavar="PID", min=1, show_default=False)
    ],
    out: Out,
    level: Level = "windows",
    gate: Gate = True,
    window: Window = 1.0,
    duration: Annotated[
        float | None,
        typer.Option(help="Stop by itself after so many seconds.", metavar="SECONDS", min=0.1),
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="auto, remote_exec, gdb or lldb.", autocompletion=one_of(METHODS)),
    ] = "auto",
) -> None:
    """Record the MoE models of a running process, from their next pass on.

    The process stops for a moment and then goes on. It must be able to import routeprof. Where
    its model is compiled or captured in CUDA graphs this says so, and changes nothing.

    Example: routeprof attach 4242 -o runs/live --duration 60
    """
    from routeprof.commands.control import ask
    from routeprof.commands.detach import forget, remember
    from routeprof.errors import UsageError
    from routeprof.hooks.process import AttachSettings
    from routeprof.hooks.process import attach as attach_to

    check_options(level, window)
    if method not in METHODS:
        raise UsageError(f"method {method!r} is not one of {', '.join(METHODS)}")
    settings = AttachSettings(str(out.absolute()), level, gate, window, duration)
    attached = attach_to(pid, settings, method=method)
    noted = remember(pid, attached.directories)
    _say(pid, attached)
    if duration is None:
        end = f"detach {pid}" if noted else f"stop {out}"
        typer.echo(f"end it with: routeprof {end}")
        return
    try:
        _wait(attached.directories, duration)
    except KeyboardInterrupt:
        for directory in attached.directories:
            ask(directory, "stopped", 15.0)
    finally:
        forget(pid)


def _say(pid: int, attached: Attached) -> None:
    for message in attached.messages:
        print(f"routeprof: {message}", file=sys.stderr)
    for (name, layers), directory in zip(attached.models, attached.directories, strict=True):
        typer.echo(
            f"attached to {pid} in {attached.seconds:.1f} s: {name}, {layers} MoE layers, "
            f"recorded in {directory}"
        )


def _wait(directories: tuple[Path, ...], duration: float) -> None:
    """Wait until the process has stopped recording.

    Raises:
        Exit: with 1 where it ends before, or does not answer.
    """
    from time import sleep, time

    from routeprof.capture.control import health, rank_states

    late = time() + duration + 15
    while True:
        ranks = [state for path in directories for state in rank_states(path).values()]
        states = {health(state, time()) for state in ranks}
        if states <= {"stopped"}:
            break
        if "dead" in states or time() > late:
            print("routeprof: the process is gone, or not responding", file=sys.stderr)
            raise typer.Exit(1)
        sleep(0.1)
    typer.echo(f"stopped after {duration:g} s")
