"""Having another Python process run a statement: by sys.remote_exec, gdb or lldb."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from routeprof.errors import AttachError
from routeprof.hooks.proc import RIGHTS, free_address, functions, is_waiting, python_version

METHODS = ("remote_exec", "gdb", "lldb")
DEBUGGER_SECONDS = 60
"""A debugger that takes longer is stopped."""

_DENIED = re.compile(r"not permitted|permission denied|access denied", re.IGNORECASE)
_SCRIPT = Path(__file__).with_name("in_gdb.py")


def choose(pid: int, method: str) -> str:
    """The method to use.

    Args:
        method: one of ``METHODS``, or ``auto``.

    Raises:
        AttachError: it cannot be used here.
    """
    same = hasattr(sys, "remote_exec") and python_version(pid) == sys.version_info[:2]
    usable = {
        "remote_exec": same,
        "gdb": shutil.which("gdb") is not None,
        "lldb": shutil.which("lldb") is not None,
    }
    if method == "auto":
        found = next((name for name in METHODS if usable[name]), "")
        if not found:
            raise AttachError(
                "attaching needs gdb or lldb; run: apt-get install gdb (or dnf install gdb)"
            )
        return found
    if not usable[method]:
        remedy = (
            "both sides need the same Python, 3.14 or later; use --method gdb"
            if method == "remote_exec"
            else f"install {method}"
        )
        raise AttachError(f"{method} cannot be used: {remedy}")
    return method


def inject(pid: int, source: str, method: str, folder: Path) -> None:
    """Have a process run a statement on its main thread, as soon as that runs bytecode.

    Args:
        source: one line that cannot fail.
        folder: an empty directory, to be kept until the statement has run.

    Raises:
        AttachError: it is not allowed, or does not work; the process goes on.
    """
    {"remote_exec": _by_remote_exec, "gdb": _by_gdb, "lldb": _by_lldb}[method](pid, source, folder)


def wake(pid: int, method: str) -> None:
    """Run what was injected in a main thread that waits for something, if it does.

    Raises:
        AttachError: it does not work.
    """
    if not is_waiting(pid):
        return
    if method == "gdb":
        _gdb(pid, "", 0)
    elif method == "lldb":
        at = functions(pid)
        _lldb(
            pid,
            f"expression -l c -- int $held = ((int(*)(void)){at['PyGILState_Ensure']})()",
            f"expression -l c -- ((int(*)(void)){at['Py_MakePendingCalls']})()",
            f"expression -l c -- ((void(*)(int)){at['PyGILState_Release']})($held)",
        )


# -- the methods


def _by_remote_exec(pid: int, source: str, folder: Path) -> None:
    script = folder / "attach.py"
    # It says how to answer us: only the process may read it, which need not be our user's.
    script.touch(0o600)
    script.write_text(source)
    with suppress(OSError):
        for path in (script, folder):
            os.chown(path, Path(f"/proc/{pid}").stat().st_uid, -1)
    remote_exec: Callable[[int, str], None] = sys.remote_exec  # type: ignore[attr-defined]
    try:
        remote_exec(pid, str(script))
    except PermissionError:
        raise AttachError(f"no right to attach to {pid}; {RIGHTS}") from None
    except (OSError, RuntimeError) as error:
        raise AttachError(
            f"sys.remote_exec does not reach {pid} ({error}); use --method gdb"
        ) from None


def _by_gdb(pid: int, source: str, folder: Path) -> None:
    del folder
    _gdb(pid, source, free_address(pid))


def _gdb(pid: int, statement: str, address: int) -> None:
    options = ["--batch", "-nx", "-iex", "set auto-load no", "-iex", "set debuginfod enabled off"]
    parameters = json.dumps(
        {"pid": pid, "at": functions(pid), "statement": statement, "address": address}
    )
    _debug(pid, ["gdb", *options, "-x", str(_SCRIPT)], {"ROUTEPROF_GDB": parameters})


def _by_lldb(pid: int, source: str, folder: Path) -> None:
    address, text, at = free_address(pid), source.encode() + b"\0", functions(pid)
    statement = folder / "statement"
    statement.write_bytes(text)
    _lldb(
        pid,
        "expression -l c -- (long)((void*(*)(void*,unsigned long,int,int,int,long))"
        f"{at['mmap']})((void*){address}, {len(text)}, 3, 0x100022, -1, 0)",
        f"memory write --infile {statement} {address}",
        f"expression -l c -- ((int(*)(void*,void*)){at['Py_AddPendingCall']})"
        f"((void*){at['PyRun_SimpleString']}, (void*){address})",
    )


def _lldb(pid: int, *commands: str) -> None:
    quick = "settings set target.preload-symbols false"
    commands = (quick, f"process attach --pid {pid}", *commands, "process detach")
    words = [word for command in commands for word in ("-o", command)]
    _debug(pid, ["lldb", "--batch", "--no-lldbinit", *words], {})


def _debug(pid: int, command: list[str], environment: dict[str, str]) -> None:
    with (
        _undisturbed(),
        subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as debugger,
    ):
        try:
            _, said = debugger.communicate(timeout=DEBUGGER_SECONDS)
        except subprocess.TimeoutExpired:
            debugger.terminate()  # not killed: it has to let the process go
            with suppress(subprocess.TimeoutExpired):
                debugger.wait(10)
            debugger.kill()
            raise AttachError(
                f"{command[0]} did not come to an end with process {pid}; try again later"
            ) from None
    if _DENIED.search(said):
        raise AttachError(f"no right to attach to {pid}; {RIGHTS}")
    faults = [line for line in said.splitlines() if line.startswith(("failed: ", "error: "))]
    if faults or debugger.returncode:
        why = " ".join((faults or said.strip().splitlines() or ["no reason given"])[-1].split())
        raise AttachError(f"{command[0]} cannot hook process {pid} ({why}); try another --method")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C has to wait: a debugger that is interrupted may leave the process in mid-call."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
