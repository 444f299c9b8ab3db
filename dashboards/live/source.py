"""Source: the newest state of a recording that may still be being written."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, monotonic_ns, time
from typing import Any

import routeprof
from routeprof.dashboards.live.activity import WAITING, Activity, activity
from routeprof.dashboards.live.follower import Follower
from routeprof.dashboards.live.spans import Span
from routeprof.dashboards.state import duration
from routeprof.errors import RouteprofError
from routeprof.profile import Profile
from routeprof.recording.merge import open_recordings
from routeprof.recording.places import is_remote, place
from routeprof.recording.reader import RecordingFiles
from routeprof.recording.schema import INFO_FILE, RANK_FILE

READ_SECONDS = 0.7
"""How long one look reads parts: the page comes at once and fills while the rest is read."""

KEPT = 8
"""Selections that are kept with all that was computed of them, the newest."""

_PAUSE, _TICK = 0.3, 0.1
_PAUSE_REMOTE = 5.0
"""Stores ask money for each listing."""


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

    Attributes:
        born: when it was made; another source of the same recording counts its versions anew.
    """

    def __init__(self, path: str | Path, *more: str | Path) -> None:
        self.paths = tuple(place(one) for one in (path, *more))
        self.born = monotonic_ns()
        self._lock = threading.Lock()
        self._folded: Follower | None = None
        self._kept: OrderedDict[tuple[Any, ...], Profile] = OrderedDict()
        self._reading = Reading(0, None, "Not read yet.", WAITING)
        self._shown: object = None
        self._seen: object = None
        self._files: RecordingFiles | None = None
        self._absent = False
        self._due = 0.0

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

    @property
    def behind(self) -> bool:
        """Whether there are parts that were not read yet."""
        return self._folded is not None and self._folded.waiting > 0

    def exact(
        self, between: tuple[float, float] | None = None, *, windows: bool = False
    ) -> Profile:
        """The profile with every part, also those that the page does without.

        Args:
            between: seconds since the first window's start.
            windows: with every window of the timeline, of which the page joins neighbours.

        Raises:
            RouteprofError: the recording cannot be read any more.
        """
        profile, folded = self.read().profile, self._folded
        if profile is None or folded is None or between is not None or folded.waiting:
            whole = routeprof.load(self.paths)
            return whole if between is None else whole.select(between=whole.since_start(between))
        return routeprof.load(self.paths) if windows and folded.thinned else profile

    def select(
        self,
        reading: Reading,
        phase: str | None,
        tag: str | None,
        between: tuple[float, float] | None,
    ) -> Profile | None:
        """Like ``Profile.select``, for a range in seconds since the first window's start.

        The same selection is the same object, with what was computed of it: many pages ask.
        """
        if reading.profile is None:
            return None
        key = (reading.version, phase, tag, between)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._timed(reading.profile, between).narrowed(phase, tag)
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return self._kept[key]

    def _timed(self, profile: Profile, between: tuple[float, float] | None) -> Profile:
        if between is None or self._folded is None:
            return profile
        absolute = profile.since_start(between)
        return replace(profile, totals=self._folded.between(absolute), between=absolute)

    def newest(self, reading: Reading, seconds: float) -> Profile:
        """The part of a reading whose windows ended in its last seconds."""
        assert reading.profile is not None
        last = duration(reading.profile)
        between = (max(last - seconds, 0.0), last)
        return self.select(reading, None, None, between) or reading.profile

    def spans(self) -> tuple[Span, ...]:
        """Sums of stretches of time that together are all that was read so far."""
        with self._lock:
            return self._folded.spans() if self._folded is not None else ()

    def _refresh(self) -> None:
        start = monotonic()
        profile, message = self._reading.profile, ""
        try:
            profile = self._load()
            message = self._progress()
        except (RouteprofError, OSError) as error:
            message = _sentence(str(error))
        except Exception as error:  # whatever is in that directory, the page must stay up
            where = ", ".join(map(str, self.paths))
            message = _sentence(f"{where} cannot be read ({type(error).__name__}: {error})")
        doing = _activity(profile)
        # A recording that is read for the first time: as fast as the page asks.
        shown = (_fingerprint(profile), message, doing.kind)
        version = self._reading.version + (shown != self._shown or self._reading.version == 0)
        if shown == self._shown and self._reading.profile is not None:
            profile = replace(self._reading.profile, files=profile.files if profile else None)
        self._shown = shown
        self._reading = Reading(version, profile, message, doing)
        # A huge directory on a slow disk must not be listed without end.
        end = monotonic()
        self._due = end if self.behind else end + max(self._pause, 5 * (end - start))

    @property
    def _pause(self) -> float:
        return _PAUSE_REMOTE if any(map(is_remote, self.paths)) else _PAUSE

    def _load(self) -> Profile:
        stamps = self._stamps()
        known = self._reading.profile
        if known is not None and self._settled and stamps == self._seen:
            return known  # listing ten thousand files takes as long as drawing a page
        # Of what is still being read, neither.
        same = known is not None and stamps == self._seen and not self._absent
        files = self._files if same else None
        if files is None or self._folded is None:
            files = open_recordings(self.paths)
            self._absent = any(rank.missing() for rank in files.ranks)
            if self._folded is None or not self._folded.belongs_to(files):
                self._folded = Follower(files.info)
        self._seen, self._files = stamps, files
        return Profile(files.info, self._folded.update(files, monotonic() + READ_SECONDS), files)

    @property
    def _settled(self) -> bool:
        """Whether all parts are in the sums; a listing that lacks some may be an old one."""
        folded = self._folded
        return folded is not None and not (folded.waiting or folded.damaged or self._absent)

    def _stamps(self) -> object:
        """What changes whenever a rank appears, writes a part, or says something of itself."""
        try:
            ranks = sorted(rank for path in self.paths for rank in path.glob("rank-*"))
            files = [path / INFO_FILE for path in self.paths] + [rank / RANK_FILE for rank in ranks]
            times = {str(path): path.stat().st_mtime for path in (*self.paths, *ranks, *files)}
        except OSError:
            return object()  # something is missing or changes just now: look
        # Clocks of file systems tick slowly: a second change in one tick would not be seen.
        return times if max(times.values()) < time() - _TICK else object()

    def _progress(self) -> str:
        if self._folded is None or not self._folded.waiting:
            return ""
        there = self._folded.read + self._folded.waiting
        share = self._folded.read / there
        return f"Still reading: the numbers are of {share:.0%} of {there:,} parts so far."


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
