"""Run by gdb's own Python (``gdb --batch -x in_gdb.py``): have another Python run a statement.

It only queues the statement with ``Py_AddPendingCall``, which needs no GIL and may be called
anywhere: the main thread runs it between two bytecodes, when gdb has long let go. What cannot be
said in place of an argument is in the environment variable ROUTEPROF_GDB, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from collections.abc import Callable

import gdb  # type: ignore[import-untyped, import-not-found, unused-ignore]

GETREGSET, SETREGSET, PRSTATUS, XSTATE = 0x4204, 0x4205, 1, 0x202
READ_WRITE, PRIVATE_ANONYMOUS_FIXED_NOREPLACE = 3, 0x100022
QUIET = (
    "set pagination off",
    "set confirm off",
    # Reading the symbols of torch would stop the process for seconds.
    "set auto-solib-add off",
    "handle all nostop noprint pass",
)


class _Slice(ctypes.Structure):
    """The kernel's struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def keeping_registers(thread: int, do: Callable[[], None]) -> None:
    """Call ``do`` and give the thread all its registers back.

    gdb does that, too, but up to version 13 it fails on processors with AMX, whose state is
    larger than it knows: vector registers, and a system call to be restarted, would be lost.
    """
    if platform.machine() != "x86_64":
        do()
        return
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    kept = []
    for kind in (PRSTATUS, XSTATE):
        room = ctypes.create_string_buffer(1 << 16)
        slice_ = _Slice(ctypes.addressof(room), len(room))
        if ptrace(GETREGSET, thread, kind, ctypes.byref(slice_)) == 0:
            kept.append((kind, room, slice_))
    try:
        do()
    finally:
        for kind, _, slice_ in kept:
            ptrace(SETREGSET, thread, kind, ctypes.byref(slice_))


def call(function: int, *arguments: int) -> int | None:
    """Call a function at its address; None where gdb 13 fails, which it does after the call."""
    words = ", ".join(f"(void*){word}" for word in arguments)
    kinds = ", ".join(["void*"] * len(arguments))
    try:
        return int(gdb.parse_and_eval(f"((int(*)({kinds})){function})({words})"))
    except gdb.error as error:
        if "extended state" in str(error):
            return None
        raise


def queue(at: dict[str, int], address: int, statement: str) -> None:
    """Have the main thread run a statement, kept at an address that nothing uses."""
    text = statement.encode() + b"\0"
    call(at["mmap"], address, len(text), READ_WRITE, PRIVATE_ANONYMOUS_FIXED_NOREPLACE, -1, 0)
    gdb.selected_inferior().write_memory(address, text)
    call(at["Py_AddPendingCall"], at["PyRun_SimpleString"], address)


def run_queued(at: dict[str, int]) -> None:
    """Run what is queued, in a main thread that waits in a system call, without the GIL."""
    held = call(at["PyGILState_Ensure"])
    call(at["Py_MakePendingCalls"])
    # 1 says that the thread did not hold it, as none does that waits for long.
    call(at["PyGILState_Release"], 1 if held is None else held)


def main(pid: int, at: dict[str, int], statement: str, address: int) -> None:
    """Attach, do what is wanted, and let go.

    Args:
        at: addresses of functions.
        statement: what to queue at ``address``; empty: run what was queued.
    """
    for line in QUIET:
        gdb.execute(line, to_string=True)
    gdb.execute(f"attach {pid}", to_string=True)
    try:
        keeping_registers(
            gdb.selected_thread().ptid[1],
            lambda: queue(at, address, statement) if statement else run_queued(at),
        )
    finally:
        gdb.execute("detach", to_string=True)


try:
    main(**json.loads(os.environ["ROUTEPROF_GDB"]))
except Exception as error:
    print(f"failed: {error}", file=sys.stderr)
    gdb.execute("quit 1")
