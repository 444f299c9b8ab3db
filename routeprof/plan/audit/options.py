"""What can be asked of an audit, checked before anything heavy is imported."""

from __future__ import annotations

from routeprof.errors import UsageError

MAX_RATIO = 4.0
"""An outlier's absolute maximum ÷ the median expert's.

Maxima of normally distributed weights of one size differ by a few tens of per cent.
"""

SCHEME_OF = {"fp8": "fp8-block", "int8": "int8-group", "int4": "int4-group"}
"""The scheme whose error an expert has in each precision."""

PRECISIONS = ("source", *SCHEME_OF)


def check_ratio(max_ratio: float) -> None:
    """Say if no expert could be an outlier by that ratio, or every one.

    Raises:
        UsageError: it is not above 1.
    """
    if not max_ratio > 1:
        raise UsageError(f"max-ratio is {max_ratio:g}; pass more than 1")


def check_numbers(sample: int | None, threads: int | None) -> None:
    """Say what is wrong with the numbers of ``audit``; None is for those that it chooses.

    Raises:
        UsageError: as there.
    """
    for name, number in (("sample", sample), ("threads", threads)):
        if number is not None and number < 1:
            raise UsageError(f"{name} is {number}; pass 1 or more")


def check_plan(hot: str, cold: str, hot_share: float | None, budget: float | None) -> None:
    """Say what is wrong with the options of ``mixed``.

    Raises:
        UsageError: as there.
    """
    for name, option in ((hot, "hot"), (cold, "cold")):
        if name not in PRECISIONS:
            raise UsageError(f"{option} {name!r} is not one of {', '.join(PRECISIONS)}")
    if PRECISIONS.index(hot) >= PRECISIONS.index(cold):
        raise UsageError(f"hot {hot} is no higher precision than cold {cold}; pass a higher one")
    if hot_share is not None and budget is not None:
        raise UsageError("hot-share and budget are two limits; pass one of them")
    if hot_share is not None and not 0 <= hot_share <= 1:
        raise UsageError(f"hot-share is {hot_share:g}; pass a share from 0 to 1")
