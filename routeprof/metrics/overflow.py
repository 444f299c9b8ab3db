"""What a capacity limit would drop, or pad, in a step.

Overflow is a quantity of a step: compare counts with a capacity step by step and add up the
results; counts that were added up first hide it. Engines without capacity drop nothing: their
figures say what would overflow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.metrics._arrays import (
    FloatArray,
    IntArray,
    id_array,
    int_array,
    ratio,
    require_fraction,
    require_positive,
    require_shape,
)
from routeprof.metrics.capacity import FACTOR_GRID, Rule, capacity, required_capacity_factor

Order = Literal["choice", "token"]

_RATE_DENOMINATOR = 1_000_000


def overflow_assignments(counts: npt.ArrayLike, capacity: npt.ArrayLike) -> IntArray:
    """Assignments above capacity, Σ experts max(0, c − C); additive over steps.

    Args:
        counts: assignments per expert in each step, ``[..., experts]``.
        capacity: slots per expert in each step, ``[...]``.

    Returns:
        int64 ``[...]``.

    Raises:
        UsageError: the shapes do not fit, or the values are not integers.
    """
    return np.asarray(np.maximum(_above(counts, capacity), 0).sum(axis=-1))


def padding_slots(counts: npt.ArrayLike, capacity: npt.ArrayLike) -> IntArray:
    """Slots that stay empty, Σ experts max(0, C − c); additive, shapes as `overflow_assignments`.

    Equals slots − assignments + overflow with slots = experts · C, also for sums over steps: who
    has those three sums need not have counted it.
    """
    return np.asarray(np.maximum(-_above(counts, capacity), 0).sum(axis=-1))


def overflow_rate(overflow: npt.ArrayLike, tokens: npt.ArrayLike, top_k: int) -> FloatArray:
    """Overflow ÷ (tokens · top_k), for one step or from sums over steps; NaN without tokens.

    Raises:
        UsageError: the shapes of the overflow and the tokens (``[...]``) differ.
    """
    require_positive(top_k=top_k)
    above, rows = int_array(overflow, "overflow"), int_array(tokens, "tokens")
    require_shape("tokens", rows.shape, above.shape, "overflow", above.shape)
    return ratio(above, rows * float(top_k))


def padding_rate(padding: npt.ArrayLike, slots: npt.ArrayLike) -> FloatArray:
    """Padding ÷ slots (experts · C): the slots paid for and empty; NaN without slots.

    Takes both for one step, or their sums over steps, ``[...]`` each.

    Raises:
        UsageError: the two shapes differ.
    """
    empty, paid = int_array(padding, "padding"), int_array(slots, "slots")
    require_shape("slots", paid.shape, empty.shape, "padding", empty.shape)
    return ratio(empty, paid)


def dropped_token_rate(
    ids: npt.ArrayLike, capacity: int, experts: int, *, order: Order = "choice"
) -> float:
    """Share of one step's tokens that lose all of their choices, when slots go in token order.

    Args:
        ids: chosen experts ``[tokens, k]``, best first; ids outside 0…experts − 1 are ignored, and
            a row without any other is no token.
        capacity: slots per expert in this step.
        experts: experts of the layer.
        order: ``choice`` admits the first choices of all tokens, then the second ones (GShard);
            ``token`` admits all choices of a token before the next token's.

    Returns:
        The share, NaN without tokens.

    Raises:
        UsageError: ids without two axes, or an unknown order.
    """
    chosen = id_array(ids, "ids", experts)
    valid = chosen >= 0
    served = (valid & ~beyond_capacity(chosen, capacity, experts, order=order)).any(axis=1)
    present = valid.any(axis=1)
    return float(ratio((present & ~served).sum(), present.sum()))


def beyond_capacity(
    ids: npt.ArrayLike, capacity: int, experts: int, *, order: Order = "choice"
) -> npt.NDArray[np.bool_]:
    """The assignments of one step that find their expert's slots taken.

    Args:
        ids, capacity, experts, order: as for `dropped_token_rate`.

    Returns:
        bool ``[tokens, k]``, False for ids outside 0…experts − 1.

    Raises:
        UsageError: ids without two axes, or an unknown order.

    >>> beyond_capacity([[0], [1], [0], [0]], capacity=1, experts=2).ravel().tolist()
    [False, False, True, True]
    """
    chosen = id_array(ids, "ids", experts)
    if order not in ("choice", "token"):
        raise UsageError(f"order is {order!r}: pass 'choice' or 'token'")
    queue = _queue_positions(chosen.T).T if order == "choice" else _queue_positions(chosen)
    return np.asarray((chosen >= 0) & (queue >= capacity))


@dataclass(frozen=True)
class RoutedSteps:
    """Steps of one layer.

    Attributes:
        counts: assignments per expert, int64 ``[steps, experts]``.
        tokens: int64 ``[steps]``.
        top_k: experts per token.
    """

    counts: IntArray
    tokens: IntArray
    top_k: int

    @property
    def experts(self) -> int:
        return int(self.counts.shape[1])


def smallest_factor_for(
    step_counts: npt.ArrayLike,
    step_tokens: npt.ArrayLike,
    top_k: int,
    rate: float,
    rule: Rule = "ceil",
    minimum: int = 0,
) -> float:
    """Smallest multiple of 1/10000 at which the overflow rate over all steps is at most ``rate``.

    Args:
        step_counts: ``[steps, experts]``.
        step_tokens: ``[steps]``.
        top_k: experts per token.
        rate: the overflow that is accepted, 0…1 (rounded to a denominator of at most 10⁶).
        rule: how the capacity is rounded.
        minimum: the least capacity.

    Returns:
        The factor, NaN without assignments.

    Raises:
        UsageError: the shapes do not fit, a step has assignments but no tokens, or an impossible
            rate.
    """
    loads = int_array(step_counts, "step_counts", minimum_axes=1)
    rows = int_array(step_tokens, "step_tokens")
    if loads.ndim != 2:
        raise UsageError(f"step_counts has shape {loads.shape}: pass [steps, experts]")
    return smallest_common_factor([RoutedSteps(loads, rows, top_k)], rate, rule, minimum)


def smallest_common_factor(
    layers: Sequence[RoutedSteps], rate: float, rule: Rule = "ceil", minimum: int = 0
) -> float:
    """Like `smallest_factor_for`, for layers of any size together: one factor, one rate."""
    accepted = accepted_overflow(
        rate, sum(int(layer.tokens.sum()) * layer.top_k for layer in layers)
    )
    required = [
        float(np.fmax.reduce(one, initial=np.nan))
        for one in (
            required_capacity_factor(layer.counts, layer.tokens, layer.top_k, rule)
            for layer in layers
        )
    ]
    if np.isnan(required).all():
        return float("nan")

    hottest = [layer.counts.max(axis=1) for layer in layers]

    def fits(grid: int) -> bool:
        factor, over = Fraction(grid, FACTOR_GRID), 0
        for layer, largest in zip(layers, hottest, strict=True):
            slots = capacity(
                layer.tokens, layer.top_k, layer.experts, factor, rule=rule, minimum=minimum
            )
            # Near the factor that is looked for, few steps overflow at all.
            full = largest > slots
            over += int(overflow_assignments(layer.counts[full], slots[full]).sum())
            if over > accepted:
                return False
        return True

    enough = round(float(np.nanmax(required)) * FACTOR_GRID)
    return (1 + bisect_left(range(1, enough), True, key=fits)) / FACTOR_GRID


def accepted_overflow(rate: float, routed: int) -> Fraction:
    """Assignments that a rate allows to overflow, exactly: 0.07 of 100 is 7.

    Args:
        rate: 0…1, rounded to a denominator of at most 10⁶.
        routed: tokens · top_k.

    Raises:
        UsageError: the rate is outside 0…1.
    """
    require_fraction("rate", rate)
    return Fraction(rate).limit_denominator(_RATE_DENOMINATOR) * routed


def _above(counts: npt.ArrayLike, capacity: npt.ArrayLike) -> IntArray:
    loads, slots = int_array(counts, "counts", minimum_axes=1), int_array(capacity, "capacity")
    require_shape("capacity", slots.shape, loads.shape[:-1], "counts", loads.shape)
    return loads - slots[..., np.newaxis]


def _queue_positions(ids: IntArray) -> IntArray:
    """For each id in reading order, how many equal ids come before it."""
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    grouped = flat[order]
    positions = np.empty_like(flat)
    positions[order] = np.arange(flat.size) - np.searchsorted(grouped, grouped)
    return positions.reshape(ids.shape)
