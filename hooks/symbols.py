"""Where the functions of a running process are: read from its files, while it runs on."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from pathlib import Path

SYMBOL_TABLES = (2, 11)
"""Section types: all symbols, and those for the dynamic linker."""

LOADED = 1
"""Type of a segment that is mapped."""

_WHERE_FUNCTIONS_ARE = re.compile(r"/(libpython|libc[.-]|ld-musl|libmusl)[^/]*$")


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
