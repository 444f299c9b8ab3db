"""JSON files of any layout: one object a line, an array of objects, or a single one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from routeprof.errors import UsageError

HEAD = 1 << 20
"""Bytes in which a file must name what it holds; texts and token ids may stand before."""


def mentions(path: Path, *names: str) -> bool:
    """Whether a JSON file has all these keys near its beginning."""
    if path.suffix.lower() not in (".json", ".jsonl", ".ndjson") or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(HEAD)
    return all(f'"{name}"'.encode() in head for name in names)


def documents(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with the place to name in a message.

    Raises:
        UsageError: something is no JSON, or no object.
    """
    with path.open("rb") as file:
        first = file.readline().strip()
    if not first.startswith(b"[") and _is_object(first):
        yield from _lines(path)
        return
    whole = parsed(path.read_bytes(), str(path))
    for number, one in enumerate(whole if isinstance(whole, list) else [whole], 1):
        where = f"{path}, object {number}"
        yield where, an_object(where, one)


def parsed(text: bytes, where: str) -> Any:
    """What a JSON text holds.

    Raises:
        UsageError: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no JSON ({error}): pass another copy"[:300]) from None


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, an_object(where, parsed(line, where))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def an_object(where: str, found: Any) -> dict[str, Any]:
    """What was parsed.

    Raises:
        UsageError: it is no object.
    """
    if not isinstance(found, dict):
        raise UsageError(f"{where} is no JSON object: pass another file")
    return found
