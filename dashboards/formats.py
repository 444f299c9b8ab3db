"""Numbers as people read them. No value is a dash, never a zero."""

from __future__ import annotations

import math
from typing import Any

NOTHING = "–"

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def known(value: Any) -> bool:
    """Whether there is a value at all."""
    try:
        return value is not None and not math.isnan(value)
    except TypeError:  # pandas.NA has no truth
        return False


def count(value: Any) -> str:
    """A whole number with thousands separators: ``12,345``."""
    return f"{int(value):,}" if known(value) else NOTHING


def large(value: Any) -> str:
    """A whole number in three digits where it is long: ``12.3 M``."""
    if not known(value):
        return NOTHING
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            scaled = value / (1e3 if prefix == "k" else size)
            return f"{scaled:.{max(0, 2 - int(math.log10(abs(scaled))))}f} {prefix}"
    return count(value)


def number(value: Any) -> str:
    """A real number in three digits: ``38.9``."""
    if not known(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def ratio(value: Any) -> str:
    """A ratio in two decimals: ``3.21``."""
    if not known(value):
        return NOTHING
    return "∞" if math.isinf(value) else f"{value:,.2f}"


def times(value: Any) -> str:
    """A multiple of the mean: ``3.21 ×``."""
    return f"{ratio(value)} ×" if known(value) else NOTHING


def times_as(value: Any) -> str:
    """How many times as long: ``1.32 times``."""
    return f"{ratio(value)} times" if known(value) else NOTHING


def size(value: Any) -> str:
    """Bytes in three digits: ``20.4 MiB``."""
    if not known(value):
        return NOTHING
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            return f"{number(value / 1024**power)} {unit}"
    return f"{value:,.0f} bytes"


def percent(value: Any) -> str:
    """A share; only what is exactly all or nothing says so: ``99.99 %`` is not ``100 %``."""
    if not known(value):
        return NOTHING
    if 0 < value < 0.0001:
        return "< 0.01 %"
    if 0.9999 < value < 1:
        return "> 99.99 %"
    shown = f"{100 * value:.2f}" if abs(value) < 0.0995 else f"{100 * value:.1f}"
    if value < 1 and shown == "100.0":
        shown = f"{100 * value:.2f}"
    return f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown} %"


def seconds(value: Any) -> str:
    """A length of time: ``850 µs``, ``12.3 s``, ``3 min 5 s``, ``2 h 10 min``."""
    if not known(value):
        return NOTHING
    if value and abs(value) < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value and abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    if abs(value) < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def time_range(low: float, high: float) -> str:
    """A range of seconds: ``12.5 to 40 s``, or ``from 12.5 s on`` where it has no end."""
    if math.isinf(high):
        return f"from {low:,.10g} s on"
    return f"{low:,.10g} to {high:,.10g} s"


def clock(longest: float) -> tuple[float, str]:
    """Seconds in the unit of a time axis, and the unit: seconds, minutes or hours."""
    return (1.0, "s") if longest < 600 else (60.0, "min") if longest < 36_000 else (3600.0, "h")


def plural(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
