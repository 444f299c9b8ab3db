"""Having another Python process run a statement: by sys.remote_exec, gdb or lldb."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from routeprof.errors import AttachError
from routeprof.hooks.symbols import addresses

METHODS = ("remote_exec", "gdb", "lldb")
FUNCTIONS = (
    "mmap",
    "PyRun_SimpleString",
    "Py_AddPendingCall",
    "Py_MakePendingCalls",
    "PyGILState_Ensure",
    "PyGILState_Release",
)
ROOM = 1 << 16
DEBUGGER_SECONDS = 60
"""A debugger that takes longer is stopped."""

RIGHTS = (
    "run this with sudo, or allow it: sysctl kernel.yama.ptrace_scope=0 on the host, "
    "--cap-add=SYS_PTRACE for a container"
)
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


def is_waiting(pid: int) -> bool:
    """Whether the main thread waits in a system call."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] == "S"
    except OSError:
        return False


def python_version(pid: int) -> tuple[int, int] | None:
    """Version of the Python that a process runs, by the names of what it has loaded; or None."""
    for pattern in (r"/libpython(\d)\.(\d+)", r"/python(\d)\.(\d+)\n", r"/python(\d)\.(\d+)/"):
        found = re.search(pattern, maps(pid))
        if found:
            return int(found[1]), int(found[2])
    return None


def maps(pid: int) -> str:
    """What a process has mapped, one line each.

    Raises:
        AttachError: there is no such process, or it may not be looked at.
    """
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except PermissionError:
        raise AttachError(f"no right to attach to {pid}; {RIGHTS}") from None
    except OSError:
        raise AttachError(f"there is no process {pid} here; see ps, or nvidia-smi") from None


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
    try:
        done = subprocess.run(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEBUGGER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AttachError(f"{command[0]} did not come to an end with process {pid}") from None
    said = done.stderr
    if _DENIED.search(said):
        raise AttachError(f"no right to attach to {pid}; {RIGHTS}")
    faults = [line for line in said.splitlines() if line.startswith(("failed: ", "error: "))]
    if faults or done.returncode:
        why = " ".join((faults or said.strip().splitlines() or ["no reason given"])[-1].split())
        raise AttachError(f"{command[0]} cannot hook process {pid} ({why}); try another --method")


def functions(pid: int) -> dict[str, int]:
    """Addresses of what is to be called in a process.

    Raises:
        AttachError: the process has no such functions.
    """
    at = addresses(pid, maps(pid), FUNCTIONS)
    missing = [name for name in FUNCTIONS if name not in at]
    if missing:
        raise AttachError(f"process {pid} has no {missing[0]}: it is no Python of a kind we know")
    return at


def free_address(pid: int) -> int:
    """Where a process has nothing mapped, below 2^37, which any 64-bit system can map.

    Raises:
        AttachError: there is no room.
    """
    used = [
        tuple(int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
        for line in maps(pid).splitlines()
    ]
    for _ in range(1000):
        address = random.randrange(1 << 36, 1 << 37, ROOM)
        if all(end <= address or address + ROOM <= start for start, end in used):
            return address
    raise AttachError(
        f"process {pid} has no room left in its memory; start it again under routeprof run"
    )
