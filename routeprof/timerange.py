"""A range of time as text: of ``--between``, and of the dashboard's address."""

from __future__ import annotations

import math

from routeprof.errors import UsageError

RANGE_TEXT = "two numbers of seconds, such as 10-60, or a start without an end, such as 10-"
"""How a range is written, for messages."""


def parse_range(text: str) -> tuple[float, float]:
    """The range ``(from, to]`` in seconds since the start; without an end it goes on for ever.

    Raises:
        UsageError: the text is no range.

    >>> parse_range("10-60"), parse_range("2.5-")
    ((10.0, 60.0), (2.5, inf))
    """
    start, dash, end = text.partition("-")
    low, high = _seconds(start), _seconds(end) if end else math.inf
    if not dash or not 0 <= low < high:
        raise UsageError(f"{text!r} is no range; write {RANGE_TEXT}")
    return low, high


def range_text(between: tuple[float, float]) -> str:
    """What ``parse_range`` reads, to the millisecond.

    >>> range_text((10.0, 60.5)), range_text((2.5, math.inf))
    ('10-60.5', '2.5-')
    """
    low, high = (f"{round(item, 3):.12g}" if item < math.inf else "" for item in between)
    return f"{low}-{high}"


def _seconds(text: str) -> float:
    """The number; NaN, which is in no order with others, where it is none or not finite."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan
