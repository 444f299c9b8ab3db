"""Attach to a process that was started without routeprof, by its process id.

A statement is injected that opens a connection to us and, on a thread of its own, asks
``routeprof.hooks.inside`` to hook the models that it finds. The process pays one short stop, and
goes on whatever comes of it.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
import socket
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from routeprof.errors import AttachError
from routeprof.hooks.inject import choose, inject, wake
from routeprof.hooks.proc import RIGHTS, maps, python_version

TIMEOUT_SECONDS = 10.0
PATIENCE_SECONDS = 2.0
"""How long the main thread has to come to a bytecode before it is taken to be waiting."""

# Plain standard library: where routeprof is missing, this says so.
BOOTSTRAP = """
import contextlib, importlib, json, socket, sys
def ask(lines, **words):
    print(json.dumps(words), file=lines, flush=True)
    return json.loads(lines.readline() or "null")
with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", {port}), 30) as channel:
    with channel.makefile("rw", encoding="utf-8") as lines:
        settings = ask(lines, token="{token}")
        try:
            importlib.invalidate_caches()
            from routeprof.hooks.inside import attach
        except ImportError as error:
            ask(lines, missing=str(error), python=sys.executable)
        else:
            attach(settings, lambda **words: ask(lines, **words))
"""
# A pending call that fails would raise in the program, so it must not; nor leave a name behind.
STATEMENT = """
try:
    import _thread
    _thread.start_new_thread(exec, ({program!r}, {{}}))
except BaseException:
    pass
"""


@dataclass(frozen=True)
class AttachSettings:
    """How to record.

    Attributes:
        out: directory of the recording, absolute.
        duration: seconds after which the process stops recording by itself; None: never.
    """

    out: str
    level: str = "windows"
    gate: bool = True
    window: float = 1.0
    duration: float | None = None


@dataclass(frozen=True)
class Attached:
    """What was hooked.

    Attributes:
        directories: one recording for each model, in the order of ``models``.
        models: what each is called, and how many of its MoE layers are hooked.
        messages: what the user should know, one line each.
        seconds: from the call to the answer.
    """

    directories: tuple[Path, ...]
    models: tuple[tuple[str, int], ...]
    messages: tuple[str, ...]
    seconds: float


def attach(
    pid: int,
    settings: AttachSettings,
    *,
    method: str = "auto",
    timeout: float = TIMEOUT_SECONDS,
) -> Attached:
    """Record the MoE models of a running process.

    Args:
        method: ``auto``, ``remote_exec``, ``gdb`` or ``lldb``.
        timeout: seconds that the process has to answer.

    Raises:
        AttachError: it cannot be done; says why, and what would help.
    """
    began = monotonic()
    _check(pid)
    method, token = choose(pid, method), secrets.token_hex(16)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        tempfile.TemporaryDirectory(prefix="routeprof-") as folder,
    ):
        inject(pid, statement(server.getsockname()[1], token), method, Path(folder))
        deadline = monotonic() + timeout
        channel = _accept(server, token, monotonic() + min(PATIENCE_SECONDS, timeout))
        if channel is None:
            wake(pid, method)
            deadline = monotonic() + timeout
            channel = _accept(server, token, deadline)
        if channel is None:
            raise _no_answer(pid, timeout)
        with channel:
            answer = _converse(channel, settings, pid, deadline)
    return Attached(
        tuple(map(Path, answer["directories"])),
        tuple((name, layers) for name, layers in answer["models"]),
        tuple(answer["messages"]),
        monotonic() - began,
    )


def statement(port: int, token: str) -> str:
    """The statement to inject: one line without anything that a debugger would have to quote."""
    program = BOOTSTRAP.format(port=port, token=token)
    packed = base64.b64encode(STATEMENT.format(program=program).encode()).decode()
    return f"exec(__import__('base64').b64decode('{packed}'),{{}})"


def _check(pid: int) -> None:
    """Find out from outside what cannot work, before the process is touched."""
    if python_version(pid) is None and "python" not in maps(pid):
        raise AttachError(f"process {pid} is no Python process; name the one that runs the model")
    try:
        theirs, ours = _namespaces(str(pid)), _namespaces("self")
    except PermissionError:
        raise AttachError(f"no right to attach to {pid}; {RIGHTS}") from None
    if theirs != ours:
        raise AttachError(f"process {pid} runs in a container; run routeprof attach inside it")


def _namespaces(process: str) -> list[Path]:
    """Which file system and network a process sees."""
    return [Path(f"/proc/{process}/ns/{kind}").readlink() for kind in ("mnt", "net")]


def _accept(server: socket.socket, token: str, deadline: float) -> socket.socket | None:
    """The connection of the process; None if there is none by then."""
    while (left := deadline - monotonic()) > 0:
        server.settimeout(left)
        with suppress(TimeoutError):
            channel, _ = server.accept()
            channel.settimeout(left)
            with suppress(OSError, ValueError, AttributeError):
                said = json.loads(_line(channel)).get("token")
                if hmac.compare_digest(str(said), token):
                    return channel
            channel.close()
    return None


def _converse(
    channel: socket.socket, settings: AttachSettings, pid: int, deadline: float
) -> dict[str, Any]:
    """Say what is wanted, hear what came of it, and confirm: the process undoes what we missed."""
    try:
        channel.settimeout(max(0.1, deadline - monotonic()))
        channel.sendall(json.dumps(asdict(settings)).encode() + b"\n")
        answer: dict[str, Any] = json.loads(_line(channel))
        channel.sendall(b"true\n")
    except (OSError, ValueError):
        raise _no_answer(pid, TIMEOUT_SECONDS) from None
    if "missing" in answer:
        raise AttachError(
            f"process {pid} cannot import routeprof ({answer['missing']}); run: "
            f"{answer['python']} -m pip install routeprof"
        )
    if "error" in answer:
        raise AttachError(f"process {pid}: {answer['error']}")
    return answer


def _line(channel: socket.socket) -> bytes:
    """One line; what comes after it is not read."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = channel.recv(1)
        if not piece:
            raise ConnectionError
        line += piece
    return bytes(line)


def _no_answer(pid: int, timeout: float) -> AttachError:
    return AttachError(
        f"process {pid} gave no answer within {timeout:g} s; nothing was hooked: its main thread "
        "may be in one long call, so try again later"
    )
