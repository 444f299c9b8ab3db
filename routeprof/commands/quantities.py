"""Sizes and durations on the command line."""

from __future__ import annotations

import math
import re

from routeprof.errors import UsageError
from routeprof.whatif.room import UNITS

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")

_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_BYTES = {unit: float(size) for unit, size in UNITS.items() if unit}


def parse_seconds(text: str) -> float:
    """A duration in seconds.

    Raises:
        UsageError: the text is none.

    >>> parse_seconds("30m"), parse_seconds("24h"), parse_seconds("7d")
    (1800.0, 86400.0, 604800.0)
    """
    return _parsed(text, _SECONDS, "a duration, such as 30m, 24h or 7d")


def parse_bytes(text: str) -> int:
    """A size in bytes: MB are 10^6 and MiB 2^20.

    Raises:
        UsageError: the text is none.

    >>> parse_bytes("500MB"), parse_bytes("1.5 GiB")
    (500000000, 1610612736)
    """
    return int(_parsed(text, _BYTES, "a size, such as 500MB or 10GB"))


def _parsed(text: str, units: dict[str, float], what: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    unit = units.get(match.group(2).lower()) if match else None
    value = float(match.group(1)) * unit if match and unit else 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"{text!r} is not {what}")
    return value


def bytes_text(size: int) -> str:
    """A size in the largest unit that it has one of.

    >>> bytes_text(999), bytes_text(12_340_000), bytes_text(10**10)
    ('999 bytes', '12.3 MB', '10.0 GB')
    """
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB")):
        if size >= 1000**power:
            return f"{size / 1000**power:.1f} {unit}"
    return f"{size} bytes"
