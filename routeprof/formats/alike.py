"""Rows that all chose the same experts: dummy tokens, as engines warm up with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from routeprof.formats.source import Step
from routeprof.metrics._arrays import IntArray
from routeprof.metrics.balance import imbalance_ratio

MOST_ALIKE = 64
"""Rows of one pass with the same experts in every layer; fewer may be chance."""

TAG = "identical-rows"


def all_alike(ids: Mapping[int, IntArray]) -> bool:
    """Whether a pass is of dummy tokens: many rows, all with the same experts in every layer."""
    return bool(ids) and all(
        len(rows) >= MOST_ALIKE and bool((rows == rows[:1]).all()) for rows in ids.values()
    )


def note_of(steps: Iterable[Step], experts: int) -> tuple[str, ...]:
    """What to say of passes with ``TAG``, and what they do to the layer's max/mean.

    Args:
        steps: all of one file, with ids.
    """
    rows = dummies = 0
    counts: dict[int, IntArray] = {}
    without: dict[int, IntArray] = {}
    for step in steps:
        alike = step.tag == TAG
        for layer, ids in step.ids.items():
            rows, dummies = rows + len(ids), dummies + len(ids) * alike
            own = np.bincount(ids[ids >= 0], minlength=experts)
            counts[layer] = counts.get(layer, 0) + own
            without[layer] = without.get(layer, 0) + own * (not alike)
    if not dummies:
        return ()
    worst = max(counts, key=lambda layer: float(imbalance_ratio(counts[layer])))
    both, real = float(imbalance_ratio(counts[worst])), float(imbalance_ratio(without[worst]))
    left = f"{real:.2f} without" if without[worst].any() else "nothing is left without"
    return (
        f"{dummies:,} of {rows:,} rows are in passes whose rows all have the same experts, as the "
        f"dummy tokens of a warm-up have: max/mean of layer {worst} is {both:.2f} with them and "
        f"{left}; they have the tag {TAG}, the others are --tag untagged",
    )
