"""How far a long job is, for who waits at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import TypeVar

Item = TypeVar("Item")

PATIENCE = 2.0
"""Seconds until who waits is told how far it is."""


def shown(items: Sequence[Item]) -> Iterable[Item]:
    """The same items, with a bar on stderr while they are gone through; none where nobody looks."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, "layers", console=Console(stderr=True), transient=True)


@contextmanager
def counted(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """A bar of bytes on stderr; to be told how many more are done. None where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def when_long(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr once it takes long; to be told how many are done, and of how many."""
    started, watched = monotonic(), sys.stderr.isatty()
    with ExitStack() as stack:
        bars: list[Callable[[int, int], None]] = []

        def told(done: int, total: int) -> None:
            if watched and not bars and monotonic() - started > PATIENCE:
                bars.append(_bar(stack, what))
            for bar in bars:
                bar(done, total)

        yield told


def _bar(stack: ExitStack, what: str) -> Callable[[int, int], None]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = bar.add_task(what, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)
