"""How alike neighbouring stretches of time are, and how long stretches must be for that."""

from __future__ import annotations

import numpy as np

from routeprof.metrics._arrays import FloatArray

FEWEST, USUAL, MOST = 8, 32, 128
"""Stretches of the side with less: where neighbours stay alike, and else; and of the other."""

ALIKE = 0.05
"""Correlation of neighbouring stretches above which they are put together."""

HIGHEST = 0.9


def regrouped(one: FloatArray, other: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The loads of both sides in longer stretches, as long as it takes.

    Stretches of both sides hold about as many assignments, so that they can change places.

    Args:
        one, other: ``[stretches, layers, experts]``, in the order of time.
    """
    number = USUAL
    pair = _cut(one, other, number)
    while number // 2 >= FEWEST and dependence(*pair) > ALIKE:
        number //= 2
        pair = _cut(one, other, number)
    return pair


def dependence(one: FloatArray, other: FloatArray) -> float:
    """Correlation of neighbouring stretches within a side, over all layers and experts, 0…0.9.

    Deviations from a mean of n correlate by about −1/n by themselves; that is taken out.
    """
    sides = [_deviations(side) for side in (one, other)]
    squares = sum(float((side**2).sum()) for side in sides)
    number = (len(one) + len(other)) / 2
    if not squares or number <= 3:
        return 0.0
    raw = sum(float((side[1:] * side[:-1]).sum()) for side in sides) / squares
    return float(np.clip((number * raw + 1) / (number - 3), 0.0, HIGHEST))


def inflation(correlation: float) -> float:
    """Factor of a mean's variance where each stretch is like the last (AR(1)) rather than new."""
    return (1 + correlation) / (1 - correlation)


def _deviations(side: FloatArray) -> FloatArray:
    """From the mean shares, each expert's in units of its own spread."""
    tokens = side.sum(axis=2, keepdims=True)
    shares = side.sum(axis=0) / np.maximum(tokens.sum(axis=0), 1)
    deviations = side - shares * tokens
    spread = np.sqrt((deviations**2).sum(axis=0))
    return np.asarray(deviations / np.where(spread > 0, spread, 1))


def _cut(one: FloatArray, other: FloatArray, number: int) -> tuple[FloatArray, FloatArray]:
    """So many stretches of the side with less, fewer where the other has none so short."""
    if one.sum() > other.sum():
        second, first = _cut(other, one, number)
        return first, second
    times = float(other.sum()) / max(float(one.sum()), 1.0)
    most = min(MOST, len(other))
    number = min(number, len(one), max(FEWEST, int(most / times)))
    others = min(max(round(number * times), number), most)
    return _together(one, number), _together(other, others)


def _together(side: FloatArray, number: int) -> FloatArray:
    starts = -(-np.arange(number) * len(side) // number)
    return np.asarray(np.add.reduceat(side, starts, axis=0))
