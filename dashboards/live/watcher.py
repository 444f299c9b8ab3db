"""Watcher: looks at a live recording again and again, and tells what is news."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import time

from routeprof.dashboards.live.source import Reading, Source
from routeprof.diagnose.finding import Finding
from routeprof.diagnose.news import News, found_now
from routeprof.diagnose.question import Question
from routeprof.diagnose.thresholds import Thresholds
from routeprof.profile import Profile
from routeprof.report.alerts import payload


@dataclass
class Watcher:
    """Judges how complete the recording is, and the routing of its newest stretch.

    Attributes:
        grave: severities that are told of.
        gpus: expert-parallel ranks to judge; None for those that the recording tells of.
        seconds: length of that stretch.
        tell: is handed a finding and what to send of it.
        say: takes one line on what is wrong with watching itself.
    """

    source: Source
    news: News
    limits: Thresholds
    grave: Collection[str]
    gpus: int | None
    seconds: float
    tell: Callable[[Finding, bytes], None]
    say: Callable[[str], None]
    _said: str = field(default="", init=False)

    def look(self) -> bool:
        """Look once, unless parts wait to be read; whether there may be more to see."""
        reading = self.source.read()
        if self.source.behind:
            return True
        message, found = reading.message, list[Finding]()
        if reading.profile is not None:
            try:
                found = self._found(reading, reading.profile)
            except Exception as error:  # whatever is in a recording, watching goes on
                message = f"cannot judge the recording ({type(error).__name__}: {error})"
            self._tell(found, reading.profile)
        self._complain(message)
        return reading.activity.kind != "stopped"

    def _found(self, reading: Reading, whole: Profile) -> list[Finding]:
        timed = len(whole.totals.windows.window) > 0
        recent = self.source.newest(reading, self.seconds) if timed else whole
        return found_now(whole, Question(recent, self.limits, gpus=self.gpus, now=time()))

    def _tell(self, found: list[Finding], whole: Profile) -> None:
        names = [str(path) for path in self.source.paths]
        for finding in self.news.of(one for one in found if one.severity in self.grave):
            self.tell(finding, payload(finding, whole, names, time()))

    def _complain(self, message: str) -> None:
        """Say it once, until it is something else."""
        line = " ".join(message.split())
        if line and line != self._said:
            self.say(line)
        self._said = line
