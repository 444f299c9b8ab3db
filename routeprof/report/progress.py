"""How far a long job is, for who waits at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def shown(items: Sequence[Item]) -> Iterable[Item]:
    """The same items, with a bar on stderr while they are gone through; none where nobody looks."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, "layers", console=Console(stderr=True), transient=True)
