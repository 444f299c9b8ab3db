"""What the router's own outputs say, from sums that add up over steps.

The probability of an expert is the router's own: softmax of the logits, or sigmoid (or square root
of softplus) scores normalised over the experts; never the softmax of something that is one already.
Layers that route by hash have no gate statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.metrics._arrays import (
    FloatArray,
    entropy,
    float_array,
    ratio,
    require_shape,
    shares,
)

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus", "probabilities"]


@dataclass(frozen=True)
class GateSums:
    """Sums over the rows (tokens) of a layer; all of them add up over steps.

    Attributes:
        mass: probability per expert, ``[experts]``.
        entropy: entropy of each row's probabilities, in nats.
        top1: largest probability of each row.
        margin: k-th minus (k+1)-th largest probability of each row.
        z: squared logsumexp of each row's logits.
        rows: rows that are in the sums.
        margin_rows: rows that are in ``margin``: none where every expert is chosen (k = experts).
        z_rows: rows that are in ``z``: none where the router hands out probabilities.
    """

    mass: FloatArray
    entropy: float
    top1: float
    margin: float
    z: float
    rows: int
    margin_rows: int
    z_rows: int


def mean(total: npt.ArrayLike, rows: npt.ArrayLike) -> FloatArray:
    """Sum ÷ number of rows, ``[...]`` each; NaN where there are no rows.

    Raises:
        UsageError: the two shapes differ.
    """
    sums, numbers = np.asarray(total, dtype=np.float64), float_array(rows, "rows", minimum_axes=0)
    require_shape("rows", numbers.shape, sums.shape, "the sum", sums.shape)
    return _per(sums, numbers)


def mean_probability(probability_mass: npt.ArrayLike, rows: npt.ArrayLike) -> FloatArray:
    """The router's mean probability of each expert, ``[..., experts]``: the P of `aux_loss`.

    Args:
        probability_mass: probability per expert, summed over tokens, ``[..., experts]``.
        rows: tokens in that sum, ``[...]``.

    Raises:
        UsageError: the shapes do not fit.
    """
    mass = float_array(probability_mass, "probability_mass")
    tokens = float_array(rows, "rows", minimum_axes=0)
    require_shape("rows", tokens.shape, mass.shape[:-1], "probability_mass", mass.shape)
    return _per(mass, tokens[..., np.newaxis])


def aux_loss(
    counts: npt.ArrayLike, probability_mass: npt.ArrayLike, rows: npt.ArrayLike
) -> FloatArray:
    """Load-balancing loss of GShard and Switch: experts · Σ f · P; 1 is balanced.

    Args:
        counts: assignments per expert, ``[..., experts]``; f is their share of all assignments.
        probability_mass: the router's probability per expert, summed over tokens, same shape;
            P is its mean, see `mean_probability`.
        rows: tokens in that sum, ``[...]``.

    Returns:
        ``[...]``, NaN where there are no assignments or no tokens.

    Raises:
        UsageError: the shapes do not fit.
    """
    loads = float_array(counts, "counts")
    mass = float_array(probability_mass, "probability_mass")
    require_shape("probability_mass", mass.shape, loads.shape, "counts", loads.shape)
    probability = mean_probability(mass, rows)
    return np.asarray(loads.shape[-1] * (shares(loads) * probability).sum(axis=-1))


def router_z_loss(z_sum: npt.ArrayLike, rows: npt.ArrayLike) -> FloatArray:
    """Mean squared logsumexp of the logits (ST-MoE); large where logits drift away. See `mean`."""
    return mean(z_sum, rows)


def gate_entropy(entropy_sum: npt.ArrayLike, rows: npt.ArrayLike) -> FloatArray:
    """Mean entropy of a token's probabilities in nats: ln experts where the router is undecided."""
    return mean(entropy_sum, rows)


def top1_probability(top1_sum: npt.ArrayLike, rows: npt.ArrayLike) -> FloatArray:
    """Mean of a token's largest probability: 1/experts where the router is undecided."""
    return mean(top1_sum, rows)


def margin(margin_sum: npt.ArrayLike, rows: npt.ArrayLike) -> FloatArray:
    """Mean distance p(k) − p(k+1): how near the choice of experts is to flipping."""
    return mean(margin_sum, rows)


def mean_weight(weight_sum: npt.ArrayLike, counts: npt.ArrayLike) -> FloatArray:
    """Mean combine weight of each expert when chosen, ``[..., experts]``; NaN if it never was.

    Raises:
        UsageError: the two shapes differ.
    """
    weights, loads = float_array(weight_sum, "weight_sum"), float_array(counts, "counts")
    require_shape("weight_sum", weights.shape, loads.shape, "counts", loads.shape)
    return _per(weights, loads)


def gate_sums(logits: npt.ArrayLike, top_k: int, scoring: Scoring) -> GateSums:
    """`GateSums` of a router's output, in float64: the reference for what is recorded.

    Args:
        logits: ``[tokens, experts]``; probabilities, for that scoring.
        top_k: experts per token, for the margin.
        scoring: how the router makes scores of logits; scores are normalised over the experts.

    Raises:
        UsageError: logits without two axes, top_k outside 1…experts, or an unknown scoring.
    """
    values = np.asarray(logits, dtype=np.float64)
    if values.ndim != 2 or not 1 <= top_k <= values.shape[1]:
        raise UsageError(
            f"logits have shape {values.shape} and top_k is {top_k}: "
            "pass [tokens, experts] with top_k from 1 to experts"
        )
    probabilities = shares(_scores(values, scoring))
    descending = np.sort(probabilities, axis=1)[:, ::-1]
    has_margin, has_logits = top_k < values.shape[1], scoring != "probabilities"
    gaps = descending[:, top_k - 1] - descending[:, top_k] if has_margin else np.zeros(0)
    peaks = _logsumexp(values) if has_logits else np.zeros(0)
    return GateSums(
        mass=probabilities.sum(axis=0),
        entropy=float(entropy(probabilities).sum()),
        top1=float(descending[:, 0].sum()),
        margin=float(gaps.sum()),
        z=float(np.square(peaks).sum()),
        rows=len(values),
        margin_rows=len(gaps),
        z_rows=len(peaks),
    )


def _per(total: FloatArray, number: FloatArray) -> FloatArray:
    # NaN and not infinity, should rounding leave something in a sum over nothing.
    return ratio(total, np.where(number > 0, number, np.nan))


def _scores(logits: FloatArray, scoring: Scoring) -> FloatArray:
    if scoring == "softmax":
        return np.asarray(np.exp(logits - logits.max(axis=1, keepdims=True)))
    if scoring == "sigmoid":
        return np.asarray(np.exp(-np.logaddexp(0.0, -logits)))
    if scoring == "sqrtsoftplus":
        return np.asarray(np.sqrt(np.logaddexp(0.0, logits)))
    if scoring == "probabilities":
        return logits
    raise UsageError(
        f"scoring is {scoring!r}: pass softmax, sigmoid, sqrtsoftplus or probabilities"
    )


def _logsumexp(logits: FloatArray) -> FloatArray:
    return np.asarray(np.logaddexp.reduce(logits, axis=1))
