"""``routeprof fold``: add a recording up, and count it again from its detail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from routeprof.commands.completion import levels
from routeprof.commands.options import AsJson, Recordings
from routeprof.commands.reading import Dask, WorkerCount, readers
from routeprof.errors import LevelRequiredError, UsageError
from routeprof.topology import LEVELS

if TYPE_CHECKING:
    from routeprof.profile import Profile


def fold(
    directories: Recordings,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write the JSON to this file, too.", metavar="FILE"),
    ] = None,
    level: Annotated[
        str,
        typer.Option(
            help="Count again from steps or tokens, and compare with the windows.",
            autocompletion=levels,
        ),
    ] = "windows",
    workers: WorkerCount = 1,
    dask: Dask = None,
    as_json: AsJson = False,
) -> None:
    """Add up all parts of a recording, and say what was added up and how fast.

    With --level steps or tokens also counts every assignment again from that detail, and exits
    with 1 if it is not what the windows say, layer by layer, in a recording that is whole.

    Example: routeprof fold runs/mixtral --workers 8 --level tokens
    """
    from rich.console import Console

    from routeprof.report.files import write_text
    from routeprof.report.fold import print_fold

    if level not in LEVELS:
        raise UsageError(f"level {level!r} is not one of {', '.join(LEVELS)}")
    found = folded(directories, level, workers, dask)
    text = json.dumps(found, indent=1)
    if out is not None:
        try:
            write_text(out, text + "\n")
        except OSError as error:
            raise UsageError(
                f"cannot write {out} ({error.strerror or error}); name another file for --out"
            ) from error
    if as_json:
        typer.echo(text)
    else:
        print_fold(found, Console())
    if found["equal"] is False and not found["gaps"]:
        raise typer.Exit(1)


def folded(directories: list[Path], level: str, workers: int, dask: str | None) -> dict[str, Any]:
    """What was added up: counts, seconds, and for each layer what the detail says.

    Raises:
        LevelRequiredError: the recording has no such detail.
    """
    from time import perf_counter

    from routeprof.profile import load
    from routeprof.recording.recount import recounted
    from routeprof.report.progress import when_long

    started = perf_counter()
    with readers(workers, dask) as executor, when_long("parts read") as progress:
        profile = load(directories, executor=executor, progress=progress)
        found = _sums(profile)
        if level != "windows":
            _require(profile, level)
            assert profile.files is not None
            found |= recounted(profile.totals, profile.files, level, executor)
    seconds = perf_counter() - started
    rate = found["assignments"] / seconds
    return found | {"level": level, "seconds": seconds, "assignments_per_second": rate}


def _sums(profile: Profile) -> dict[str, Any]:
    import numpy as np

    totals, windows = profile.totals, profile.totals.windows
    counts = totals.lists["counts"].sum((0, 2))
    parts = len(profile.files.parts("part")) if profile.files else 0
    return {
        "parts": parts,
        "parts_read": parts - len(totals.unread),
        "unread": list(totals.unread),
        "windows": len(np.unique(np.stack([windows.rank, windows.window]), axis=1).T),
        "rows": len(windows.window),
        "assignments": int(counts.sum()),
        "layers": [
            {"layer": profile.info.layers[place].index, "assignments": int(counts[place])}
            for place in profile.captured
        ],
        "equal": None,
        "gaps": [],
    }


def _require(profile: Profile, level: str) -> None:
    if LEVELS.index(profile.info.level) < LEVELS.index(level):
        raise LevelRequiredError(
            f"this needs a recording of level {level}, this one has {profile.info.level}; "
            f"record with level={level!r}"
        )
