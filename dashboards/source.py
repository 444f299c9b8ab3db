"""Source: the newest state of a recording that may still be being written."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, time

import routeprof
from routeprof.dashboards.activity import WAITING, Activity, activity
from routeprof.dashboards.thinning import thinned
from routeprof.errors import RouteprofError
from routeprof.profile import Profile
from routeprof.recording.fold import Totals, fold_part, merge, repeated
from routeprof.recording.merge import open_recordings
from routeprof.recording.reader import Part, RecordingFiles
from routeprof.recording.schema import RecordingInfo

TIMELINE_ROWS = 400_000
"""Rows of the timeline to keep; beyond, neighbouring windows are put together."""

_PAUSE = 0.3


@dataclass(frozen=True)
class Reading:
    """A recording at one moment.

    Attributes:
        version: grows whenever anything that is shown has changed.
        profile: None while there is nothing to show.
        message: one line for the reader; empty when all is well.
    """

    version: int
    profile: Profile | None
    message: str
    activity: Activity


class Source:
    """Follows a recording, or the sum of several; any number of threads may read.

    Each part is read once: parts are whole when they appear and never change.
    """

    def __init__(self, path: str | Path, *more: str | Path) -> None:
        self.paths = tuple(Path(one) for one in (path, *more))
        self._lock = threading.Lock()
        self._folded: _Folded | None = None
        self._reading = Reading(0, None, "Not read yet.", WAITING)
        self._shown: object = None
        self._due = 0.0

    @property
    def name(self) -> str:
        """What to call the recording."""
        return " + ".join(path.resolve().name for path in self.paths)

    def read(self) -> Reading:
        """The newest state. Never raises; never waits for another thread that is reading."""
        first = self._reading.version == 0
        if self._lock.acquire(blocking=first):
            try:
                if monotonic() >= self._due:
                    self._refresh()
            finally:
                self._lock.release()
        return self._reading

    def exact(self) -> Profile | None:
        """The profile with every window, also those that were put together to save memory."""
        profile = self.read().profile
        if profile is None or self._folded is None or not self._folded.thinned:
            return profile
        return routeprof.load(self.paths)

    def _refresh(self) -> None:
        start = monotonic()
        profile, message = self._reading.profile, ""
        try:
            profile = self._load()
        except (RouteprofError, OSError) as error:
            message = _sentence(str(error))
        except Exception as error:  # whatever is in that directory, the page must stay up
            where = ", ".join(map(str, self.paths))
            message = _sentence(f"{where} cannot be read ({type(error).__name__}: {error})")
        doing = _activity(profile)
        shown = (_fingerprint(profile), message, doing.kind)
        version = self._reading.version + (shown != self._shown or self._reading.version == 0)
        if shown == self._shown and self._reading.profile is not None:
            profile = replace(self._reading.profile, files=profile.files if profile else None)
        self._shown = shown
        self._reading = Reading(version, profile, message, doing)
        # A huge directory on a slow disk must not be listed without end.
        end = monotonic()
        self._due = end + max(_PAUSE, 5 * (end - start))

    def _load(self) -> Profile:
        files = open_recordings(self.paths)
        if self._folded is None or not self._folded.belongs_to(files):
            self._folded = _Folded(files.info)
        return Profile(files.info, self._folded.update(files), files)


class _Folded:
    """Totals of the parts seen so far."""

    def __init__(self, info: RecordingInfo) -> None:
        self._info = info
        self._parts: set[Path] = set()
        self._windows: dict[tuple[int, int], Part] = {}
        self._unread: dict[Path, tuple[object, str]] = {}
        self._totals = merge([], info)
        self.thinned = False

    def belongs_to(self, files: RecordingFiles) -> bool:
        """Whether the sums are of these files: not after a part or its rank was taken out."""
        present = {part.path for part in files.parts("part")}
        return files.info == self._info and self._parts <= present

    def update(self, files: RecordingFiles) -> Totals:
        """Add what is new."""
        parts = files.parts("part")
        fresh = [part for part in parts if part.path not in self._parts]
        whole = [totals for part in fresh if (totals := self._fold(part, files)) is not None]
        if whole:
            summed = merge([self._totals, *whole], files.info)
            windows, changed = thinned(summed.windows, TIMELINE_ROWS)
            self.thinned = self.thinned or changed
            self._totals = replace(summed, windows=windows)
        lines = [self._unread[part.path][1] for part in parts if part.path in self._unread]
        return replace(self._totals, unread=tuple(lines))

    def _fold(self, part: Part, files: RecordingFiles) -> Totals | None:
        """Totals of a new part; a damaged one is tried again when its file has changed."""
        stamp = _stamp(part.path)
        if part.path in self._unread and self._unread[part.path][0] == stamp:
            return None
        try:
            totals = fold_part(part, files.info, None)
            line = totals.unread[0] if totals.unread else repeated(part, totals, self._windows)
        except Exception as error:  # columns of the right names with nonsense in them
            line = f"{part.label} cannot be read: {type(error).__name__}: {error}"
        if line:
            self._unread[part.path] = (stamp, line)
            return None
        self._unread.pop(part.path, None)
        self._parts.add(part.path)
        return totals


def _stamp(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _fingerprint(profile: Profile | None) -> object:
    """What must change for the page to be drawn again."""
    if profile is None or profile.files is None:
        return None
    ranks = [
        (rank.rank, rank.state and (rank.state.state, str(rank.state.problems)))
        for rank in profile.files.ranks
    ]
    windows = profile.totals.windows
    newest = float(windows.end.max()) if len(windows.end) else None
    counted = int(profile.totals.lists["counts"].sum())
    return profile.info, ranks, newest, counted, profile.totals.unread


def _activity(profile: Profile | None) -> Activity:
    if profile is None or profile.files is None:
        return WAITING
    end = profile.totals.windows.end
    return activity(profile.files.ranks, float(end.max()) if len(end) else None, time())


def _sentence(text: str) -> str:
    line = " ".join(text.split())
    return line[:1].upper() + line[1:]
