"""From a capacity factor to slots per expert, and back. All arithmetic is exact.

The capacity of an expert for one step with T tokens is C(f) = ceil(f · T · k / E) (GShard, Switch,
ST-MoE; some implementations round down, DeepSpeed sets a minimum). In floats this is a trap:
ceil(1.1 · 100) is 111. A capacity factor is therefore a fraction, and the smallest sufficient one
is looked for among the multiples of 1/10000.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.metrics._arrays import (
    FloatArray,
    IntArray,
    int_array,
    require_positive,
    require_shape,
)

Rule = Literal["ceil", "floor"]

FACTOR_GRID = 10_000
"""Capacity factors have denominators up to this, and searches step by its inverse."""


def parse_factor(factor: float | str | Fraction) -> Fraction:
    """The fraction with a denominator up to 10000 that was meant: 1.1 is 11/10.

    Raises:
        UsageError: not a number, not finite, not positive, or nearer to 0 than to 1/10000.

    >>> parse_factor(1.1)
    Fraction(11, 10)
    """
    try:
        fraction = Fraction(factor).limit_denominator(FACTOR_GRID)
    except (ArithmeticError, TypeError, ValueError):
        fraction = Fraction(0)
    if fraction <= 0:
        raise UsageError(f"capacity factor {factor!r}: pass a positive number such as 1.25")
    return fraction


def capacity(
    tokens: npt.ArrayLike,
    top_k: int,
    experts: int,
    factor: float | str | Fraction,
    *,
    rule: Rule = "ceil",
    minimum: int = 0,
) -> IntArray:
    """Slots per expert in a step: round(factor · tokens · top_k ÷ experts), exactly.

    Args:
        tokens: tokens of each step, ``[...]``.
        top_k: experts per token.
        experts: experts of the layer.
        factor: the capacity factor, see `parse_factor`.
        rule: ``ceil`` (GShard) or ``floor``.
        minimum: the least capacity (DeepSpeed's ``min_capacity``).

    Returns:
        int64 ``[...]``.

    Raises:
        UsageError: an impossible factor, size or rule, or tokens too large for exact arithmetic.

    >>> int(capacity(100, top_k=1, experts=1, factor=1.1))
    110
    """
    _require_rule(rule)
    require_positive(top_k=top_k, experts=experts)
    slope = parse_factor(factor) * Fraction(top_k, experts)
    scaled = _times(int_array(tokens, "tokens"), slope.numerator)
    if rule == "floor":
        return np.maximum(scaled // slope.denominator, minimum)
    return np.maximum(_ceil_divide(scaled, slope.denominator), minimum)


def required_capacity_factor(
    counts: npt.ArrayLike, tokens: npt.ArrayLike, top_k: int, rule: Rule = "ceil"
) -> FloatArray:
    """Smallest multiple of 1/10000 at which no assignment of the step overflows.

    Args:
        counts: assignments per expert in each step, ``[..., experts]``.
        tokens: tokens of each step, ``[...]``.
        top_k: experts per token.
        rule: how the capacity is rounded.

    Returns:
        ``[...]``, NaN for a step without assignments. ``ceil`` grants every expert one slot at any
        factor, so a step in which no expert gets two tokens needs only 0.0001.

    Raises:
        UsageError: the shapes do not fit, a step has assignments but no tokens, or an unknown rule.
    """
    _require_rule(rule)
    require_positive(top_k=top_k)
    loads, rows = int_array(counts, "counts", minimum_axes=1), int_array(tokens, "tokens")
    require_shape("tokens", rows.shape, loads.shape[:-1], "counts", loads.shape)
    if np.any(loads.any(axis=-1) & (rows == 0)):
        raise UsageError("a step has assignments but no tokens: pass the tokens of the same steps")
    grid = _required_grid(loads, rows, top_k, rule)
    return np.where(loads.any(axis=-1), grid / FACTOR_GRID, np.nan)


def _required_grid(loads: IntArray, rows: IntArray, top_k: int, rule: Rule) -> IntArray:
    """Smallest g ≥ 1 for which rounding g/10000 · tokens · k / experts gives the largest load."""
    unit, largest = loads.shape[-1] * FACTOR_GRID, loads.max(axis=-1)
    slots = np.maximum(rows * top_k, 1)
    if rule == "ceil":  # ceil(x) ≥ m exactly when x > m − 1
        return _times(np.maximum(largest - 1, 0), unit) // slots + 1
    return np.maximum(_ceil_divide(_times(largest, unit), slots), 1)


def _times(values: IntArray, factor: int) -> IntArray:
    if int(values.max(initial=0)) * factor > np.iinfo(np.int64).max:
        raise UsageError(
            f"a step of {values.max()} is too large for exact arithmetic: pass single steps"
        )
    return values * factor


def _ceil_divide(numerator: IntArray, denominator: IntArray | int) -> IntArray:
    return -(-numerator // denominator)


def _require_rule(rule: str) -> None:
    if rule not in ("ceil", "floor"):
        raise UsageError(f"rule is {rule!r}: pass 'ceil' or 'floor'")
