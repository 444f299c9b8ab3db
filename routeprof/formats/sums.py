"""What a window says of a layer, from the counts of its steps: the columns of a part."""

from __future__ import annotations

from typing import Any

import numpy as np

from routeprof.metrics._arrays import IntArray
from routeprof.metrics.balance import imbalance_ratio
from routeprof.metrics.capacity import capacity
from routeprof.metrics.gemm import gemm_bucket
from routeprof.metrics.overflow import overflow_assignments
from routeprof.metrics.quantiles import histogram_bin
from routeprof.topology import Layer


def summed(counts: IntArray, tokens: IntArray | None) -> dict[str, Any]:
    """Of sums over steps that nobody counted.

    Args:
        counts: int64 [sums, experts]; tokens: int64 [sums], None where they are not known.
    """
    return {
        "counts": counts.sum(axis=0),
        "tokens": None if tokens is None else int(tokens.sum()),
    }


def stepped(
    counts: IntArray, tokens: IntArray | None, layer: Layer, factors: tuple[float, ...]
) -> dict[str, Any]:
    """Of steps: sums, and what only steps can tell.

    Args:
        counts: int64 [steps, experts]; tokens: int64 [steps], None where they are not known: the
            imbalance is then weighted with assignments, which are in proportion.
        factors: capacity factors; without tokens there is no capacity, and nothing of it.
    """
    total, largest = counts.sum(axis=1), counts.max(axis=1, initial=0)
    busy = total > 0
    ratios = imbalance_ratio(counts[busy])
    weights = total if tokens is None else tokens
    row = summed(counts, tokens) | {
        "steps": len(counts),
        "calls": len(counts),
        "max_load_sum": int(largest.sum()),
        "imbalance_histogram": _histogram(histogram_bin(ratios), weights[busy]),
        "imbalance_max": float(ratios.max()) if busy.any() else None,
        "gemm_histogram": np.bincount(np.asarray(gemm_bucket(counts)).reshape(-1)),
    }
    if tokens is None:
        return row
    slots = [capacity(tokens, layer.choices, layer.experts, factor) for factor in factors]
    over = [overflow_assignments(counts, each) for each in slots]
    return row | {
        "overflow": [int(one.sum()) for one in over],
        "overflow_steps": [int((one > 0).sum()) for one in over],
        "capacity_slots": [int(each.sum()) * layer.experts for each in slots],
    }


def _histogram(bins: IntArray, weights: IntArray) -> IntArray:
    histogram = np.zeros(int(bins.max(initial=-1)) + 1, dtype=np.int64)
    np.add.at(histogram, bins, weights)
    return histogram
