"""A running process, seen from outside while it runs on: what it has loaded, and where."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Collection
from pathlib import Path

from routeprof.errors import AttachError

RIGHTS = (
    "run this with sudo, or allow it: sysctl kernel.yama.ptrace_scope=0 on the host, "
    "--cap-add=SYS_PTRACE for a container"
)
FUNCTIONS = (
    "mmap",
    "PyRun_SimpleString",
    "Py_AddPendingCall",
    "Py_MakePendingCalls",
    "PyGILState_Ensure",
    "PyGILState_Release",
)
"""What a debugger calls in the process."""

ROOM = 1 << 16
"""Bytes that are looked for."""

SYMBOL_TABLES = (2, 11)
"""Section types: all symbols, and those for the dynamic linker."""

LOADED = 1
"""Type of a segment that is mapped."""

_WHERE_FUNCTIONS_ARE = re.compile(r"/(libpython|libc[.-]|ld-musl|libmusl)[^/]*$")


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


def python_version(pid: int) -> tuple[int, int] | None:
    """Version of the Python that a process runs, by the names of what it has loaded; or None."""
    for pattern in (r"/libpython(\d)\.(\d+)", r"/python(\d)\.(\d+)\n", r"/python(\d)\.(\d+)/"):
        found = re.search(pattern, maps(pid))
        if found:
            return int(found[1]), int(found[2])
    return None


def is_waiting(pid: int) -> bool:
    """Whether the main thread waits in a system call."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] == "S"
    except OSError:
        return False


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


# -- symbols


def addresses(pid: int, maps: str, names: Collection[str]) -> dict[str, int]:
    """Addresses of functions of Python and of the C library, of those that are found.

    Args:
        maps: the text of /proc/PID/maps.
    """
    found: dict[str, int] = {}
    program = str(Path(f"/proc/{pid}/exe").readlink())
    for start, path in _files(maps, program):
        # The file as the process sees it, whatever became of the path since.
        data = Path(f"/proc/{pid}/root{path}")
        try:
            base, values = read_elf(data.read_bytes(), names)
        except (OSError, struct.error, ValueError):
            continue
        for name, value in values.items():
            found.setdefault(name, start - base + value)
    return found


def _files(maps: str, program: str) -> list[tuple[int, str]]:
    """Start address and path of each file that may hold such functions, mapped from its begin."""
    files = []
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        if len(words) < 6 or int(words[2], 16):
            continue
        if words[5] == program or _WHERE_FUNCTIONS_ARE.search(words[5]):
            files.append((int(words[0].partition("-")[0], 16), words[5]))
    return files


def read_elf(data: bytes, names: Collection[str]) -> tuple[int, dict[str, int]]:
    """Lowest address that a 64-bit little-endian ELF file is linked for, and its symbols' values.

    Raises:
        ValueError: it is another kind of file.
        struct.error: it is damaged.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    segments, sections = struct.unpack_from("<QQ", data, 32)
    segment_size, segment_count, section_size, section_count = struct.unpack_from("<4H", data, 54)
    heads = [
        struct.unpack_from("<IIQQ", data, segments + number * segment_size)
        for number in range(segment_count)
    ]
    base = min(address for kind, _, _, address in heads if kind == LOADED) & ~0xFFF
    tables = [
        struct.unpack_from("<IIQQQQIIQQ", data, sections + number * section_size)
        for number in range(section_count)
    ]
    values: dict[str, int] = {}
    for _, kind, _, _, offset, size, link, _, _, _ in tables:
        if kind in SYMBOL_TABLES:
            texts = tables[link][4]
            for name, _, _, section, value, _ in struct.iter_unpack(
                "<IBBHQQ", data[offset : offset + size]
            ):
                text = data[texts + name : data.index(b"\0", texts + name)].decode(errors="replace")
                if section and text in names:
                    values[text] = value
    return base, values
