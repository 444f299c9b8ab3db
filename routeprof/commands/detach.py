"""``routeprof detach``: end what ``routeprof attach`` began, by process id or directory."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from routeprof.commands.completion import attached
from routeprof.errors import AttachError


def detach(
    target: Annotated[
        str,
        typer.Argument(
            metavar="PID|DIR",
            help="The process, or the recording that is made of it.",
            show_default=False,
            autocompletion=attached,
        ),
    ],
) -> None:
    """Remove the hooks from a process and write what is left. The process goes on.

    Example: routeprof detach 4242
    """
    from routeprof.commands.control import ask

    if not target.isdecimal() or Path(target).is_dir():
        ask(Path(target), "stopped", 15.0)
        return
    for directory in recordings_of(int(target)):
        ask(directory, "stopped", 15.0)
    forget(int(target))


def remember(pid: int, directories: Sequence[Path]) -> bool:
    """Note where a process is being recorded, if there is a place to note it."""
    with suppress(OSError, AttachError):
        _note(pid).write_text(json.dumps([str(path) for path in directories]))
        return True
    return False


def forget(pid: int) -> None:
    """Forget the process."""
    with suppress(OSError, AttachError):
        _note(pid).unlink()


def recordings_of(pid: int) -> list[Path]:
    """Where a process that was attached to is being recorded.

    Raises:
        AttachError: nobody attached to it, as far as this user knows.
    """
    from routeprof.capture.control import rank_states

    with suppress(OSError, ValueError, TypeError):
        noted = [Path(path) for path in json.loads(_note(pid).read_text())]
        # The number may have been given to another process since.
        found = [path for path in noted if path.is_dir()]
        if any(state.pid == pid for path in found for state in rank_states(path).values()):
            return found
    raise AttachError(f"process {pid} was not attached to; name the recording: routeprof stop DIR")


def _note(pid: int) -> Path:
    """A file in a folder of this user's alone."""
    folder = Path(tempfile.gettempdir()) / f"routeprof-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise AttachError(f"{folder} belongs to another user; remove it")
    return folder / f"{pid}.json"
