"""Traces of an object a line, one line at a time: memory is that of the longest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from routeprof.errors import UsageError
from routeprof.formats.documents import an_object, parsed

MOST_BYTES = 8 << 20
"""Of a line: that of 80,000 tokens with 22 experts each."""


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's object, and where it stands, for messages.

    Raises:
        UsageError: a line holds something else, or is longer than any that a tool writes.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_BYTES + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MOST_BYTES:
                raise UsageError(f"{where} is longer than {MOST_BYTES >> 20} MiB: pass a trace")
            if line.isspace():
                continue
            yield where, an_object(where, parsed(line, where))
