"""Which findings are news: what a watcher must tell, and how often it may."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING

from routeprof.diagnose import completeness
from routeprof.diagnose.examine import examine
from routeprof.diagnose.finding import Finding, gravest_first
from routeprof.diagnose.question import Question

if TYPE_CHECKING:
    from routeprof.profile import Profile

Key = tuple[str, str, str]
"""Code, severity and phase: what makes a finding the same as one of an earlier look."""

PERIOD_SECONDS = 300.0
"""A code is told of at most once in so long."""


class News:
    """Remembers what was told.

    A finding is news when it is there and was not at the look before. If its code was told of too
    short a time ago, it is told as soon as it may be, should it still be there.

    Args:
        period: seconds between two tellings of one code.
        clock: seconds that only grow.
    """

    def __init__(self, period: float, clock: Callable[[], float]) -> None:
        self._period, self._clock, self._lock = period, clock, Lock()
        self._told: set[Key] = set()
        self._last: dict[str, float] = {}

    def of(self, found: Iterable[Finding]) -> list[Finding]:
        """What of all that is found now is to be told, the gravest first; it counts as told."""
        present: dict[Key, Finding] = {}
        for finding in found:
            present.setdefault(key(finding), finding)
        with self._lock:
            self._told.intersection_update(present)
            return [finding for finding in gravest_first(present.values()) if self._tell(finding)]

    def failed(self, finding: Finding) -> None:
        """It could not be told: it is news again when its code may be told of. Any thread may."""
        with self._lock:
            self._told.discard(key(finding))

    def _tell(self, finding: Finding) -> bool:
        now, last = self._clock(), self._last.get(finding.code)
        if key(finding) in self._told or (last is not None and now - last < self._period):
            return False
        self._told.add(key(finding))
        self._last[finding.code] = now
        return True


def key(finding: Finding) -> Key:
    """What stays the same while figures change."""
    return finding.code, finding.severity, finding.phase


def found_now(whole: Profile, question: Question) -> list[Finding]:
    """Findings on how complete a recording is, and on the routing of its newest stretch.

    Args:
        whole: the recording.
        question: on the newest stretch.
    """
    partly = completeness(question.profile, question.now)
    routing = examine(question, gains=False).findings
    found = [*completeness(whole, question.now), *(one for one in routing if one not in partly)]
    return gravest_first(found)
