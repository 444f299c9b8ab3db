"""Token-weighted quantiles of per-step figures, from a histogram that adds up or from the steps.

Aggregate balance hides step imbalance: a layer can be even over an hour and skewed in every step.
So a recording keeps, beside the sum, how the per-step imbalance ratio was distributed. Its
histogram has `BINS_PER_OCTAVE` bins per power of two, bin b holding the ratios from 2^(b/32) up to
2^((b+1)/32): 2.2 % wide, so that a bin's geometric centre is within 1.1 % of anything in it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.metrics._arrays import (
    FloatArray,
    IntArray,
    float_array,
    require_fraction,
    require_shape,
)

BINS_PER_OCTAVE = 32
"""Bins per doubling of the imbalance ratio."""

# q · total is rounded twice: without this, 0.07 · 100 = 7.000000000000001 skips the 7th of 100.
_ROUNDING = 1.0 - 4 * np.finfo(np.float64).eps


def histogram_bin(ratios: npt.ArrayLike) -> IntArray:
    """Bin of each imbalance ratio (1 or more): floor(32 · log2 r), same shape as the input.

    Raises:
        UsageError: a ratio below 1, or NaN.

    >>> int(histogram_bin(4.0))
    64
    """
    values = np.asarray(ratios, dtype=np.float64)
    if not np.all(values >= 1.0):
        raise UsageError("an imbalance ratio is NaN or below 1: leave out steps without tokens")
    return np.asarray(np.floor(BINS_PER_OCTAVE * np.log2(values)), dtype=np.int64)


def histogram_quantile(hist: npt.ArrayLike, q: float, maximum: npt.ArrayLike) -> FloatArray:
    """Quantile of the per-step imbalance ratio from its histogram, within 1.1 %.

    Args:
        hist: weight (tokens) per bin, ``[..., bins]``.
        q: the quantile, 0…1.
        maximum: the largest ratio seen, ``[...]``; exact, and never exceeded by the result.

    Returns:
        ``[...]``, at least 1; NaN for an empty histogram.

    Raises:
        UsageError: ``maximum`` does not have the leading shape of ``hist``, or q is not in 0…1.
    """
    weights = float_array(hist, "hist")
    largest = np.asarray(maximum, dtype=np.float64)
    require_shape("maximum", largest.shape, weights.shape[:-1], "hist", weights.shape)
    centre = 2.0 ** ((_first_reaching(weights, q) + 0.5) / BINS_PER_OCTAVE)
    return np.where(weights.any(axis=-1), np.maximum(np.minimum(centre, largest), 1.0), np.nan)


def weighted_quantile(values: npt.ArrayLike, weights: npt.ArrayLike, q: float) -> FloatArray:
    """Smallest value whose cumulative weight reaches q of the total, along the last axis; exact.

    Args:
        values: ``[..., n]``; a NaN (a step without tokens) carries no weight.
        weights: ``[..., n]``, for example tokens per step; not negative.
        q: the quantile, 0…1.

    Returns:
        ``[...]``; NaN where nothing carries weight.

    Raises:
        UsageError: the two shapes differ, a weight is negative, or q is not in 0…1.

    >>> float(weighted_quantile([1.0, 2.0, 9.0], [50, 45, 5], 0.95))
    2.0
    """
    numbers = np.atleast_1d(float_array(weights, "weights", minimum_axes=0))
    points = np.atleast_1d(np.asarray(values, dtype=np.float64))
    require_shape("weights", numbers.shape, points.shape, "values", points.shape)
    if points.size == 0:
        return np.full(points.shape[:-1], np.nan)
    order = np.argsort(points, axis=-1)
    points = np.take_along_axis(points, order, axis=-1)
    numbers = np.where(np.isnan(points), 0.0, np.take_along_axis(numbers, order, axis=-1))
    index = _first_reaching(numbers, q)[..., np.newaxis]
    chosen = np.take_along_axis(points, index, axis=-1)[..., 0]
    return np.where(numbers.any(axis=-1), chosen, np.nan)


def _first_reaching(weights: FloatArray, q: float) -> IntArray:
    """First index on the last axis whose cumulative weight is positive and reaches q · total."""
    require_fraction("q", q)
    cumulative = weights.cumsum(axis=-1)
    reached = cumulative >= q * cumulative[..., -1:] * _ROUNDING
    return np.asarray(np.argmax(reached & (cumulative > 0), axis=-1))
