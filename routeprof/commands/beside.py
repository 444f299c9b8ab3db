"""A server of metrics beside a program that ``routeprof run`` is about to become.

The server is no child of the program, which may wait for its children, and in a session of its
own: signals from the terminal are the program's. It ends when the program does.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import sleep

from routeprof.errors import UsageError

ANNOUNCED = "Metrics at "
_ORPHANED = '"$@" &'
"""For a shell, which ends at once: what it started has no parent in this launch."""


def serve_beside(directory: Path, host: str, port: int, *, detailed: bool) -> str:
    """Start ``serve-metrics`` for as long as this process lives, also as another program.

    Returns:
        Where the metrics are.

    Raises:
        UsageError: they cannot be served there.
    """
    with listening(host, port, "--metrics-port"):
        socket.create_server((host, port)).close()  # says so at once; the server takes seconds
    command = [sys.executable, "-m", "routeprof", "serve-metrics", str(directory.absolute())]
    command += ["--host", host, "--port", str(port), "--beside", str(os.getpid())]
    shell = subprocess.Popen(
        ["sh", "-c", _ORPHANED, "sh", *command, *(["--detailed"] if detailed else [])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    said = ""
    assert shell.stdout is not None
    with shell.stdout as lines:
        for line in lines:
            said = line.strip()
            if said.startswith(ANNOUNCED):
                break
    shell.wait()
    if not said.startswith(ANNOUNCED):
        raise UsageError(f"metrics cannot be served: {said.removeprefix('routeprof: ')}")
    return said.removeprefix(ANNOUNCED)


@contextmanager
def listening(host: str, port: int, option: str) -> Iterator[None]:
    """What listens at an address, and one line if that is taken.

    Raises:
        UsageError: it is taken, or none of this machine.
    """
    try:
        yield
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]  # socket adds the address again
        raise UsageError(
            f"cannot listen on {host}:{port} ({why}); choose another {option}"
        ) from error


# -- in the server


def ended(process: int) -> Event:
    """An event that comes when a process has ended."""
    event = Event()

    def wait() -> None:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            pass
        except (AttributeError, OSError):  # not Linux, or an old one
            with suppress(ProcessLookupError):
                while True:
                    os.kill(process, 0)
                    sleep(0.5)
        else:
            select.select([descriptor], [], [])
        event.set()

    Thread(target=wait, daemon=True).start()
    return event


def silence() -> None:
    """Let go of the streams: the program's reader waits until nobody holds them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(nothing, stream.fileno())
    os.close(nothing)
