"""Whether so many slots fit in the GPUs' memory."""

from __future__ import annotations

import re

from routeprof.errors import UsageError

UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
LEAST = 1 << 10
"""Below it a bare number is no size, but one whose unit was forgotten."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_bytes(text: str, name: str) -> int:
    """A size such as ``80GiB``, ``84 MB`` or a number of bytes.

    Raises:
        UsageError: it is none, 0, or a small number without a unit.

    >>> parse_bytes("1.5KiB", "memory")
    1536
    """
    match = _SIZE.fullmatch(text.strip())
    unit = UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if not size:
        raise UsageError(f"{name} {text!r} is no size: pass one such as 80GiB or 84MB")
    if match and not match[2] and size < LEAST:
        raise UsageError(f"{name} {text!r} has no unit: pass one such as {text.strip()}GiB")
    return size


def most_slots(gpus: int, layers: int, memory: int, expert: int) -> int:
    """Slots of one layer that fit on all GPUs, as many on each.

    Every GPU holds its slots of all layers.

    Args:
        memory: bytes for experts on each GPU; expert: bytes of one expert in one layer.

    >>> most_slots(gpus=8, layers=4, memory=100, expert=10)
    16
    """
    return memory // (layers * expert) * gpus


def require_room(
    slots: int, experts: int, gpus: int, layers: int, memory: int, expert: int
) -> None:
    """Check that the slots fit.

    Raises:
        UsageError: they do not; the message says how many do.
    """
    most = most_slots(gpus, layers, memory, expert)
    if slots <= most:
        return
    needed = -(-slots // gpus) * layers * expert
    says = (
        f"{slots} slots of {layers} layers need {needed / 2**30:,.2f} GiB on each of {gpus} GPUs, "
        f"which have {memory / 2**30:,.2f}"
    )
    if most < experts:
        raise UsageError(
            f"{says}: at most {most} slots fit, and {experts} experts need one each; pass more GPUs"
        )
    raise UsageError(f"{says}: at most {most} slots fit, pass --slots {most}")
