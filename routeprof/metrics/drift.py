"""How far two load distributions lie apart, and how far chance alone would put them.

The distance is the Jensen–Shannon divergence between shares of load, to base 2: 0 is equal, 1 is
two loads that have no expert in common.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.metrics._arrays import (
    FloatArray,
    float_array,
    ratio,
    require_fraction,
    require_positive,
    require_shape,
    shares,
)


def jensen_shannon(p_counts: npt.ArrayLike, q_counts: npt.ArrayLike) -> FloatArray:
    """Divergence of the load shares, base 2, 0…1, over the last axis.

    Args:
        p_counts: assignments per expert, ``[..., experts]``.
        q_counts: the same; leading axes broadcast, so that windows can be held against their sum.

    Returns:
        ``[...]``, NaN where one of the two has no assignments.

    Raises:
        UsageError: different numbers of experts, or leading axes that do not broadcast.

    >>> float(jensen_shannon([5, 0], [0, 7]))
    1.0
    """
    p, q = float_array(p_counts, "p_counts"), float_array(q_counts, "q_counts")
    require_shape("q_counts", q.shape, (*q.shape[:-1], p.shape[-1]), "p_counts", p.shape)
    try:
        np.broadcast_shapes(p.shape, q.shape)
    except ValueError:
        raise UsageError(
            f"p_counts has shape {p.shape} and q_counts has shape {q.shape}: "
            "pass leading axes that are equal or broadcast"
        ) from None
    return _divergence(shares(p), shares(q))


def divergence_matrix(counts: npt.ArrayLike) -> FloatArray:
    """Divergence between every two groups (tags, windows, requests, recordings).

    Args:
        counts: assignments per group and expert, ``[groups, experts]``.

    Returns:
        ``[groups, groups]``, symmetric with a diagonal of 0; NaN for a group without assignments.

    Raises:
        UsageError: not two axes.
    """
    loads = shares(_matrix(counts, "counts"))
    matrix = np.empty((len(loads), len(loads)))
    for group, load in enumerate(loads):  # a whole cube of differences would not fit for requests
        matrix[group] = _divergence(load, loads)
    return matrix


def bootstrap_noise(
    step_counts: npt.ArrayLike,
    *,
    quantile: float = 0.95,
    resamples: int = 200,
    sizes: tuple[int, int] | None = None,
    seed: int | np.random.Generator = 0,
) -> float:
    """The divergence that two samples of the same steps stay below: less than that is noise.

    Each resample draws two groups of steps with replacement and compares their loads. Steps are
    drawn independently: where neighbouring steps are alike (one long request), pass windows.

    Args:
        step_counts: assignments per step (or window) and expert, ``[steps, experts]``.
        quantile: the share of resamples that lie at or below the bound, 0…1.
        resamples: number of resamples.
        sizes: steps in the two groups, as in the two recordings to be compared; two halves if not
            given, which overstates the noise between two samples as large as this one.
        seed: seed, or a generator; the same seed gives the same bound.

    Returns:
        The bound, NaN with fewer than two steps or without assignments.

    Raises:
        UsageError: not two axes, or a quantile, number or size that cannot be.
    """
    loads = _matrix(step_counts, "step_counts")
    require_fraction("quantile", quantile)
    first, second = sizes or (max(len(loads) // 2, 1),) * 2
    require_positive(resamples=resamples, first_size=first, second_size=second)
    if len(loads) < 2:
        return float("nan")
    generator = np.random.default_rng(seed)
    chance = np.full(len(loads), 1 / len(loads))
    p, q = (
        shares(generator.multinomial(size, chance, size=resamples) @ loads)
        for size in (first, second)
    )
    divergences = _divergence(p, q)
    seen = divergences[~np.isnan(divergences)]  # a group may draw nothing but empty steps
    return float(np.quantile(seen, quantile)) if seen.size else float("nan")


def _divergence(p: FloatArray, q: FloatArray) -> FloatArray:
    middle = (p + q) / 2
    halves = _relative_entropy(p, middle) + _relative_entropy(q, middle)
    return np.asarray(np.clip(halves / 2, 0.0, 1.0))


def _relative_entropy(p: FloatArray, middle: FloatArray) -> FloatArray:
    quotient = np.where(p > 0, ratio(p, middle), 1.0)
    return np.asarray((p * np.log2(quotient)).sum(axis=-1))


def _matrix(counts: npt.ArrayLike, name: str) -> FloatArray:
    loads = float_array(counts, name, minimum_axes=2)
    if loads.ndim != 2:
        raise UsageError(f"{name} has shape {loads.shape}: pass two axes, the last the experts")
    return loads
