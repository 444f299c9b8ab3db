"""Recordings on a bad file system and under a bad clock: a program that preloads the shim.

``python -m tests.trouble.shimmed DIRECTORY`` records in folders named like the functions here,
and prints a JSON line of what it did for each.
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from time import time

import routeprof
from routeprof.capture.recorder import Recorder
from routeprof.dashboards.live.library import Library
from routeprof.dashboards.live.source import Source
from routeprof.errors import RouteprofError
from routeprof.recording.reader import open_recording
from tests.capture.recordings import LAYERS, flush, recorder_of
from tests.trouble.engine import Engine, end_window, turn
from tests.trouble.shim import Faults

HOUR = 3600
Said = dict[str, object]


def slow_renames(directory: Path, faults: Faults) -> Said:
    engine, during = Engine(directory), []

    def work(recorder: Recorder) -> None:
        for _ in range(6):
            before = len(engine.steps)
            end_window(recorder)
            during.append(len(engine.steps) - before)

    with faults.having(rename_milliseconds=100):
        engine.beside(work)
    return engine.said(during=during)


def lost_answers(directory: Path, faults: Faults) -> Said:
    engine = Engine(directory)
    for lost in range(4):  # of the part, the steps and rank.json
        engine.serve()
        with faults.having(rename_lost=lost):
            turn(engine.recorder)
    return engine.said()


def failing_renames(directory: Path, faults: Faults) -> Said:
    engine = Engine(directory)
    engine.serve()
    flush(engine.recorder)
    with faults.having(rename_error=errno.EIO):
        for _ in range(3):
            engine.serve()
            turn(engine.recorder)
    left = [path.name for path in directory.rglob("*.tmp")]
    engine.serve()
    return engine.said(left=left)


def quota(directory: Path, faults: Faults) -> Said:
    engine = Engine(directory, window=0.05)
    engine.serve()
    with faults.having(create_error=errno.EDQUOT):
        while not engine.recorder.problems.get("write_failures", 0) > 2:
            engine.serve()
    engine.serve()
    return engine.said()


def no_links(directory: Path, faults: Faults) -> Said:
    with faults.having(link_error=errno.EPERM):
        engine = Engine(directory)
    engine.serve()
    return engine.said()


def late_listings(directory: Path, faults: Faults) -> Said:
    engine, source = Engine(directory), Source(directory)
    for _ in range(3):
        engine.serve()
        flush(engine.recorder)
    before = _looked(source)
    with faults.having(list_error=errno.ESTALE):
        unlisted = _looked(source)
        try:
            routeprof.load(directory)
        except RouteprofError as error:
            line = str(error)
    with faults.having(hide_seconds=HOUR):
        missing = open_recording(directory).ranks[0].missing()
        hidden = _looked(source)
    shown = _looked(source)
    looks = {"before": before, "unlisted": unlisted, "hidden": hidden, "shown": shown}
    return engine.said(missing=missing, line=line, **looks)


def _looked(source: Source) -> list[object]:
    """What a page shows after another look: how many assignments, and the message."""
    source._due = 0.0
    reading = source.read()
    counted = reading.profile and int(reading.profile.totals.lists["counts"].sum())
    return [counted, reading.message]


def listed_library(directory: Path, faults: Faults) -> Said:
    for name in ("a", "b"):
        recorder_of(directory / name, LAYERS)[0].close()
    library = Library(directory)
    names = [sorted(library.names())]
    with faults.having(list_error=errno.EIO):
        library._looked = -1e9
        names.append(sorted(library.names()))
        first = library.open(None).reading.message
    return {"names": names, "message": first}


def clock_set(directory: Path, faults: Faults) -> Said:
    """Set back by an hour, forward by two, and back to what it was."""
    engine, told = Engine(directory), []
    start = time()
    for shift in (0, -HOUR, HOUR, 0):
        faults["clock_seconds"] = shift
        engine.beside(lambda recorder: [end_window(recorder) for _ in range(3)])
        told.append(open_recording(directory).ranks[0].state.updated - time())
    return engine.said(start=start, told=told)


def main(base: Path) -> None:
    faults = Faults()
    for work in (
        slow_renames,
        lost_answers,
        failing_renames,
        quota,
        no_links,
        late_listings,
        listed_library,
        clock_set,
    ):
        said = work(base / work.__name__, faults)
        print(json.dumps({"name": work.__name__, **said}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
