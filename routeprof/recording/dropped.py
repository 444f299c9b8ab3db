"""What ``routeprof compact`` has deleted of a rank's detail: ``compacted.json``.

It is written before anything is deleted: a part that it names is gone, whether its file is still
there or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

DROPPED_FILE = "compacted.json"

Runs = tuple[tuple[int, int], ...]
"""First and last of numbers that follow one another, the lowest first."""


@dataclass(frozen=True)
class Dropped:
    """Detail of one rank that retention deleted.

    Attributes:
        runs: numbers of the parts, by kind.
        before: no step that was dropped ran later, seconds since the epoch.
    """

    runs: Mapping[str, Runs] = field(default_factory=dict)
    before: float = float("-inf")

    def __bool__(self) -> bool:
        return any(self.runs.values())

    @property
    def text(self) -> str:
        """What to say of it: ``rows, steps dropped before 2026-01-01T00:00:00Z by compact``."""
        kinds = ", ".join(kind for kind, runs in sorted(self.runs.items()) if runs)
        return f"{kinds} dropped before {_moment(self.before)} by compact"

    @property
    def count(self) -> int:
        """Number of parts."""
        return sum(high - low + 1 for runs in self.runs.values() for low, high in runs)

    def numbers(self, kind: str) -> set[int]:
        """Numbers of the parts of a kind."""
        return {number for low, high in self.runs.get(kind, ()) for number in range(low, high + 1)}

    def more(self, parts: Iterable[tuple[str, int]], before: float) -> Dropped:
        """With some more parts, by kind and number."""
        numbers = {kind: self.numbers(kind) for kind in self.runs}
        for kind, number in parts:
            numbers.setdefault(kind, set()).add(number)
        runs = {kind: runs_of(own) for kind, own in sorted(numbers.items())}
        return Dropped(runs, max(before, self.before))

    def to_json(self) -> str:
        """The text of ``compacted.json``."""
        return json.dumps({"dropped": dict(self.runs), "before": self.before}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Dropped:
        """Parse ``compacted.json``; raises ValueError, TypeError or KeyError if it is damaged."""
        data = json.loads(text)
        runs = {
            str(kind): tuple((int(low), int(high)) for low, high in own)
            for kind, own in data["dropped"].items()
        }
        return cls(runs, float(data["before"]))

    @classmethod
    def of(cls, directory: Path) -> Dropped:
        """Of a rank's directory; nothing where no file says so, or a damaged one."""
        try:
            return cls.from_json((directory / DROPPED_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return cls()


def _moment(time: float) -> str:
    try:
        moment = datetime.fromtimestamp(time, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{time:g} s"
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def runs_of(numbers: Iterable[int]) -> Runs:
    """Numbers as runs."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return tuple((low, high) for low, high in runs)
