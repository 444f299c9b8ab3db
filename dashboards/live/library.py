"""Library: the recordings that a dashboard can show, and the one that an address asks for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import Any

from routeprof.dashboards.live.activity import WAITING, Activity, activity
from routeprof.dashboards.live.memo import Memo
from routeprof.dashboards.live.source import Reading, Source
from routeprof.dashboards.state import ViewState, parse_query
from routeprof.dashboards.view import Content
from routeprof.errors import RouteprofError
from routeprof.recording.places import place
from routeprof.recording.reader import open_recording
from routeprof.recording.schema import INFO_FILE, RecordingInfo

OPEN = 4
"""Recordings of a directory of many that are kept in memory; the last used stay."""

DEPTH = 2
"""Levels below a directory in which recordings are looked for."""

CONTENTS = 16
"""Contents of views that are kept, the last used."""

_LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class Run:
    """A recording of the list; ``problem`` says why it cannot be read."""

    name: str
    path: Path
    info: RecordingInfo | None
    ranks: int
    activity: Activity
    problem: str = ""


@dataclass(frozen=True)
class Opened:
    """What an address shows.

    Attributes:
        name: of the recording; empty for none.
        ignored: a line for each part of the address that says nothing.
    """

    name: str
    source: Source | None
    reading: Reading
    state: ViewState
    ignored: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """Another one whenever something else is to be seen."""
        born = self.source.born if self.source else 0
        return f"{self.reading.version}/{born}/{self.name}"


class Library:
    """One recording, several and their sum, or all that are below a directory.

    Only names that this object gave out open anything: no path comes from an address.

    Attributes:
        contents: what views show, for the other pages that show the same.
        answers: what takes longer to compute, for other views of the same selection.
    """

    def __init__(self, *paths: str | Path) -> None:
        self.paths = tuple(place(path) for path in paths)
        self._lock = threading.Lock()
        self._found: dict[str, tuple[Path, ...]] = {}
        self._looked = -_LOOK_SECONDS
        self._sources: OrderedDict[str, Source] = OrderedDict()
        self.contents: Memo[Content | None] = Memo(CONTENTS)
        self.answers: Memo[Any] = Memo(CONTENTS)

    @property
    def title(self) -> str:
        """What to call all of it."""
        return " + ".join(path.resolve().name for path in self.paths)

    def names(self) -> list[str]:
        """Names of the recordings there are now; the first is shown unless another is chosen."""
        with self._lock:
            return list(self._look())

    def singles(self) -> list[str]:
        """Names of recordings that are no sum of others."""
        with self._lock:
            return [name for name, paths in self._look().items() if len(paths) == 1]

    @property
    def is_list(self) -> bool:
        """Whether it is a directory of recordings, none of which comes first."""
        return len(self.paths) == 1 and self.names() != [self.title]

    def open(self, search: str | None) -> Opened:
        """What the query of an address asks for; never raises."""
        wanted = parse_query(search, None)[0].run
        names = self.names()
        name = wanted or ("" if self.is_list else names[0])
        source = self.source(name)
        if source is None:
            message = f"There is no recording {name!r} here." if name else "Choose a recording."
            reading = Reading(0, None, message, WAITING)
        else:
            reading = source.read()
        state, ignored = parse_query(search, reading.profile)
        return Opened(name if source else "", source, reading, state, tuple(ignored))

    def source(self, name: str) -> Source | None:
        """What follows the recording of that name; None if there is none."""
        with self._lock:
            paths = self._look().get(name)
            if paths is None:
                return None
            source = self._sources.pop(name, None) or Source(*paths)
            self._sources[name] = source
            while len(self._sources) > max(OPEN, len(self.paths) + 1):
                self._sources.popitem(last=False)
            return source

    def runs(self) -> list[Run]:
        """The recordings with what can be told without reading their counts; newest first."""
        with self._lock:
            found = dict(self._look())
        single = [_run(name, paths[0]) for name, paths in found.items() if len(paths) == 1]
        return sorted(single, key=lambda run: -(run.info.started if run.info else 0.0))

    def _look(self) -> dict[str, tuple[Path, ...]]:
        if monotonic() >= self._looked + _LOOK_SECONDS:
            self._found = self._list()
            self._looked = monotonic()
        return self._found

    def _list(self) -> dict[str, tuple[Path, ...]]:
        if len(self.paths) == 1:
            path = self.paths[0]
            below: dict[str, tuple[Path, ...]] = {}
            try:
                if not (path / INFO_FILE).is_file():
                    for found in _below(path):
                        below[str(found.relative_to(path))] = (found,)
            except (RouteprofError, OSError):  # not just now: what was there is kept
                known = {name: at for name, at in self._found.items() if at != (path,)}
                below = known | below
            return below or {self.title: (path,)}
        names = [path.resolve().name for path in self.paths]
        if len(set(names)) < len(names):
            names = [str(path) for path in self.paths]
        singles = {name: (path,) for name, path in zip(names, self.paths, strict=True)}
        return {self.title: self.paths} | singles


def _below(path: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Recordings in the directories below.

    Raises:
        OSError, UnreachableError: one of them cannot be listed.
    """
    for child in sorted(path.iterdir()):
        if child.is_dir():
            if (child / INFO_FILE).is_file():
                yield child
            if depth > 1:
                with suppress(PermissionError):  # somebody else's
                    yield from _below(child, depth - 1)


def _run(name: str, path: Path) -> Run:
    entry = partial(Run, name, path)
    try:
        files = open_recording(path)
    except (RouteprofError, OSError) as error:
        return entry(None, 0, WAITING, str(error))
    except Exception as error:
        return entry(None, 0, WAITING, f"{type(error).__name__}: {error}")
    newest = max((rank.state.updated for rank in files.ranks if rank.state), default=None)
    return entry(files.info, len(files.ranks), activity(files.ranks, newest, time()))
