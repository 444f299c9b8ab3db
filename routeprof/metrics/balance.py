"""How evenly a layer's assignments spread over its experts, or over the ranks that hold them.

Every function takes counts ``[..., experts]`` (assignments per expert, or load per rank) and
returns ``[...]``. Experts without tokens are part of every mean. A ratio over nothing, where all
counts are 0, is NaN. All of them raise `UsageError` for counts that have no axis, an empty last
axis, something negative, or a type that is not a number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routeprof.metrics._arrays import FloatArray, IntArray, entropy, float_array, ratio, shares

_SGLANG_EPSILON = 1e-5


def imbalance_ratio(counts: npt.ArrayLike) -> FloatArray:
    """Max ÷ mean: 1 is perfect, the number of experts is collapse (Megatron, most papers).

    >>> float(imbalance_ratio([6, 2, 0, 0]))
    3.0
    """
    loads = float_array(counts, "counts")
    return ratio(loads.max(axis=-1), loads.mean(axis=-1))


def balancedness(counts: npt.ArrayLike) -> FloatArray:
    """Mean ÷ max of one layer: 1 is perfect, 1/experts is collapse (as in vLLM, SGLang)."""
    loads = float_array(counts, "counts")
    return ratio(loads.mean(axis=-1), loads.max(axis=-1))


def max_violation(counts: npt.ArrayLike) -> FloatArray:
    """(Max − mean) ÷ mean: 0 is perfect. DeepSeek's MaxVio, TensorRT-LLM's "imbalance ratio"."""
    loads = float_array(counts, "counts")
    mean = loads.mean(axis=-1)
    return ratio(loads.max(axis=-1) - mean, mean)


def hot_cold_ratio(counts: npt.ArrayLike) -> FloatArray:
    """Max ÷ min, infinity where an expert got none: the figure of the 3 : 1 rule of thumb."""
    loads = float_array(counts, "counts")
    return ratio(loads.max(axis=-1), loads.min(axis=-1))


def hot_cold_ratio_alive(counts: npt.ArrayLike) -> FloatArray:
    """Max ÷ min among the experts that got tokens."""
    loads = float_array(counts, "counts")
    hottest = loads.max(axis=-1, keepdims=True)
    return ratio(hottest[..., 0], np.where(loads > 0, loads, hottest).min(axis=-1))


def cv(counts: npt.ArrayLike) -> FloatArray:
    """Coefficient of variation: population standard deviation ÷ mean."""
    loads = float_array(counts, "counts")
    return ratio(loads.std(axis=-1), loads.mean(axis=-1))


def gini(counts: npt.ArrayLike) -> FloatArray:
    """Gini coefficient: 0 is equal, (experts − 1) ÷ experts is everything on one expert.

    >>> float(gini([0, 0, 0, 8]))
    0.75
    """
    loads = np.sort(float_array(counts, "counts"), axis=-1)
    experts = loads.shape[-1]
    weights = 2.0 * np.arange(experts) + 1 - experts
    return ratio((loads * weights).sum(axis=-1), experts * loads.sum(axis=-1))


def entropy_normalized(counts: npt.ArrayLike) -> FloatArray:
    """Entropy of the load shares ÷ ln experts: 1 is equal, 0 is collapse; NaN for one expert."""
    loads = float_array(counts, "counts")
    return ratio(entropy(shares(loads)), np.log(loads.shape[-1]))


def effective_experts(counts: npt.ArrayLike) -> FloatArray:
    """exp(entropy in nats): how many equally used experts would be as diverse."""
    return np.asarray(np.exp(entropy(shares(float_array(counts, "counts")))))


def dead_experts(counts: npt.ArrayLike) -> FloatArray:
    """Number of experts without a token, as float: NaN, not all of them, where nothing was seen."""
    loads = float_array(counts, "counts")
    return np.where(loads.any(axis=-1), (loads == 0).sum(axis=-1), np.nan)


def top2_share(counts: npt.ArrayLike) -> FloatArray:
    """Share of the assignments that the two hottest experts take."""
    loads = np.sort(float_array(counts, "counts"), axis=-1)
    return ratio(loads[..., -2:].sum(axis=-1), loads.sum(axis=-1))


def hottest_expert(counts: npt.ArrayLike) -> IntArray:
    """Index of the largest count, the lowest among equals; -1 where all counts are 0."""
    loads = float_array(counts, "counts")
    return np.where(loads.any(axis=-1), loads.argmax(axis=-1), -1)


def coldest_expert(counts: npt.ArrayLike) -> IntArray:
    """Index of the smallest count, the lowest among equals; -1 where all counts are 0."""
    loads = float_array(counts, "counts")
    return np.where(loads.any(axis=-1), loads.argmin(axis=-1), -1)


def vllm_balancedness(rank_loads: npt.ArrayLike) -> FloatArray:
    """The "balancedness" of vLLM's EPLB log line: Σ layers mean rank ÷ Σ layers max rank.

    Takes one step's loads ``[..., layers, ranks]`` and returns ``[...]``. Logs of a vLLM that
    takes mean and max over layers instead of ranks (its pull request 36305) differ.

    Raises:
        UsageError: fewer than two axes.
    """
    loads = float_array(rank_loads, "rank_loads", minimum_axes=2)
    return ratio(loads.mean(axis=-1).sum(axis=-1), loads.max(axis=-1).sum(axis=-1))


def sglang_balancedness(rank_loads: npt.ArrayLike) -> FloatArray:
    """SGLang's balancedness: mean over layers of (mean rank + 1e-5) ÷ (max rank + 1e-5).

    Takes ``[..., layers, ranks]`` and returns ``[...]``. As in SGLang, a layer without load (a
    dense one) counts as 1: leave such layers out for the figure of the MoE layers alone.

    Raises:
        UsageError: fewer than two axes.
    """
    loads = float_array(rank_loads, "rank_loads", minimum_axes=2)
    layers = (loads.mean(axis=-1) + _SGLANG_EPSILON) / (loads.max(axis=-1) + _SGLANG_EPSILON)
    return np.where(loads.any(axis=(-2, -1)), layers.mean(axis=-1), np.nan)


def straggler_factor(step_rank_loads: npt.ArrayLike) -> FloatArray:
    """Σ steps max rank ÷ Σ steps mean rank: how much longer expert parallelism waits.

    Takes ``[steps, ..., ranks]`` and returns ``[...]``. At least the imbalance ratio of the sum
    over steps: ranks that take turns at being hot look balanced in the sum, and wait all the same.

    Raises:
        UsageError: fewer than two axes.

    >>> float(straggler_factor([[4, 0], [0, 4]]))
    2.0
    """
    loads = float_array(step_rank_loads, "step_rank_loads", minimum_axes=2)
    return ratio(loads.max(axis=-1).sum(axis=0), loads.mean(axis=-1).sum(axis=0))
