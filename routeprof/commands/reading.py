"""How verbs read recordings: with which processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routeprof.commands.extras import need

if TYPE_CHECKING:
    from routeprof.profile import Profile

WorkerCount = Annotated[
    int, typer.Option("--workers", min=1, help="Processes that read the recording.", metavar="N")
]
Dask = Annotated[
    str | None,
    typer.Option(
        "--dask", help="Read with the workers of this Dask scheduler.", metavar="tcp://HOST:PORT"
    ),
]


@contextmanager
def readers(workers: int, dask: str | None) -> Iterator[Executor | None]:
    """What to read with: None for this process alone.

    Raises:
        MissingExtraError: Dask is not installed.
        WorkersError: its scheduler cannot be reached, or workers die again and again.
    """
    if dask is not None:
        need("distributed", "cluster")
        from routeprof.recording.workers import dask_workers

        with dask_workers(dask) as executor:
            yield executor
    elif workers > 1:
        from routeprof.recording.workers import Workers

        with Workers(workers) as pool:
            yield pool
    else:
        yield None


def loaded(
    directories: Sequence[Path],
    workers: int,
    dask: str | None,
    *,
    phase: str | None = None,
    tag: str | None = None,
    between: str | None = None,
) -> Profile:
    """The recording, or the part of it that the user asked for.

    Raises:
        UsageError: the phase or the tag does not occur, or the range is none.
    """
    from routeprof.commands.options import selected
    from routeprof.profile import load
    from routeprof.report.progress import when_long

    with readers(workers, dask) as executor, when_long("parts read") as progress:
        profile = load(directories, executor=executor, progress=progress)
        return selected(profile, phase, tag, between, executor)
