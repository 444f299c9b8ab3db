"""What compaction does with a recording: which windows become one, and which detail goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from routeprof.recording.reader import Part

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0

TIERS = ((HOUR, MINUTE), (DAY, 10 * MINUTE), (7 * DAY, HOUR))
"""Windows older than the first are put together to windows of the second, in seconds."""

LADDER = (MINUTE, 10 * MINUTE, HOUR, DAY, math.inf)
"""How wide all windows become, one after the other, until a recording fits."""


@dataclass(frozen=True)
class Policy:
    """How wide windows are by age, and how long detail is kept.

    Attributes:
        keep: detail older than this many seconds goes, and windows older become an hour's.
        least: width that all windows have at least, in seconds.
        tiers: see ``TIERS``.
    """

    keep: float = math.inf
    least: float = 0.0
    tiers: tuple[tuple[float, float], ...] = TIERS

    def width(self, age: float) -> float:
        """Seconds of the window that one of this age goes into; 0 where it stays as it is."""
        widths = [width for old, width in self.tiers if age > old]
        return max(self.least, HOUR if age > self.keep else 0.0, *widths, 0.0)


@dataclass(frozen=True)
class Timed:
    """A window part.

    Attributes:
        first, last: the earliest and the latest end of its windows, seconds since the epoch; NaN
            where it must be left as it is.
        windows: their numbers.
        size: bytes.
        fault: why it cannot be read; empty if it can.
    """

    part: Part
    first: float
    last: float
    windows: tuple[int, ...]
    size: int
    fault: str = ""


@dataclass(frozen=True)
class Detail:
    """A part of steps, tokens or rows.

    Attributes:
        time: when the last of its steps ran, or a little later; NaN where nobody knows.
        size: bytes.
        fault: why it cannot be read; empty if it can.
    """

    part: Part
    time: float
    size: int
    fault: str = ""


def groups(timed: Sequence[Timed], policy: Policy, newest: float) -> Iterator[list[Timed]]:
    """Neighbouring parts of one rank that are to become one window each.

    Parts with a gap between them, which may be lost or damaged, never do, since the coarse one
    stands for all numbers from the first to the last. A part is never split.

    Args:
        timed: in the order of their numbers.
        newest: end of the recording's newest window.
    """
    keys = [_bin(one, policy, newest) for one in timed]
    starts = [
        place
        for place, one in enumerate(timed)
        if not place
        or keys[place] != keys[place - 1]
        or one.part.number != timed[place - 1].part.numbers.stop
    ]
    for start, stop in pairwise([*starts, len(timed)]):
        group = list(timed[start:stop])
        if keys[start] is not None and (len(group) > 1 or len(group[0].windows) > 1):
            yield group


def _bin(one: Timed, policy: Policy, newest: float) -> tuple[float, float] | None:
    """The coarse window that all of a part's windows lie in: its width and number."""
    if math.isnan(one.last) or not (width := policy.width(newest - one.last)):
        return None
    if math.isinf(width):
        return width, 0.0
    first, last = math.ceil(one.first / width), math.ceil(one.last / width)
    return (width, float(last)) if first == last else None


def older(details: Iterable[Detail], time: float) -> list[Detail]:
    """Detail whose steps all ran at this time or before."""
    return [detail for detail in details if detail.time <= time]


def oldest(details: Iterable[Detail], excess: int) -> list[Detail]:
    """The oldest detail that takes so many bytes, or all whose age is known."""
    known = sorted(
        (detail for detail in details if not math.isnan(detail.time)),
        key=lambda detail: detail.time,
    )
    total = 0
    for detail in known:
        total += detail.size
        if total >= excess:
            return older(known, detail.time)
    return known
