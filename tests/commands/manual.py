"""What the manual says that commands print."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_EXAMPLE = re.compile(r"^```\n\$ routeprof (.+?)\n(.+?)^```", re.M | re.S)


def examples(pages: Iterable[Path]) -> list[tuple[str, str]]:
    """Commands in blocks of these pages, and their output.

    Blocks that are marked as text are left out: times, process ids, what is a choice of a solver.
    """
    blocks = _EXAMPLE.findall("\n".join(page.read_text() for page in pages))
    return [(command, output) for command, output in blocks]


def same(printed: str, shown: str) -> bool:
    """Whether two outputs have the same lines, but for spaces at their ends."""
    return [line.rstrip() for line in printed.splitlines()] == [
        line.rstrip() for line in shown.splitlines()
    ]
