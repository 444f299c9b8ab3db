"""What other batches would bring: larger ones for expert GEMMs, mixed ones for skew."""

from __future__ import annotations

from math import ceil

import numpy as np

from routeprof.diagnose.question import Question
from routeprof.errors import UsageError
from routeprof.metrics._arrays import FloatArray, ratio
from routeprof.metrics.gemm import TILE_TOKENS
from routeprof.tables import moe_layers

MOST = 4096
"""Times the batch that are tried."""

MIXED = 16
"""Requests in a batch of a mix that is tried."""


def batch_gain(question: Question) -> str:
    """The smallest whole multiple of the batch, and the share of small GEMMs at it.

    An expert's tokens in a step are taken to be Poisson about its mean in decode, by tag.
    """
    means, steps = _means(question)
    limit = question.limits.small_gemm_share
    if not len(means):
        return ""
    low, high = 1, MOST
    if _small(means * high, steps) > limit:
        return f"even {MOST:,} times the batch would leave more than {limit:.0%} of them small"
    while low < high:  # the share falls with the batch, but for experts that nobody chose before
        middle = (low + high) // 2
        low, high = (low, middle) if _small(means * middle, steps) <= limit else (middle + 1, high)
    tokens = _tokens(question)
    return (
        f"{low} times the batch (about {ceil(tokens * low):,} tokens a step instead of "
        f"{tokens:,.0f}) would leave {_small(means * low, steps):.0%} of them small, if the new "
        "requests route alike"
    )


def _means(question: Question) -> tuple[FloatArray, FloatArray]:
    """Mean tokens of every expert in a decode step, and how many steps, by layer and tag, flat."""
    sums, means, steps = question.profile.totals.sums["steps"], [], []
    for position, _ in moe_layers(question.profile):
        loads = question.loads(position)
        for number, key in enumerate(question.profile.totals.keys):
            ran = int(sums[number, position])
            if key[0] == "decode" and key in loads and ran:
                means.append(loads[key] / ran)
                steps.append(np.full(len(loads[key]), float(ran)))
    empty = [np.zeros(0)]
    return np.concatenate(means or empty), np.concatenate(steps or empty)


def _small(means: FloatArray, steps: FloatArray) -> float:
    """Share of (expert, step) pairs with tokens that have fewer than a tile."""
    none = term = np.exp(-means)
    below = np.zeros_like(means)
    for count in range(1, TILE_TOKENS):
        term = term * means / count
        below += term
    return float(ratio((steps * below).sum(), (steps * (1 - none)).sum()))


def _tokens(question: Question) -> float:
    """Mean tokens of a decode step, in the layer that ran most."""
    totals = question.profile.totals
    decode = [number for number, key in enumerate(totals.keys) if key[0] == "decode"]
    steps, tokens = (totals.sums[name][decode].sum(0) for name in ("steps", "tokens"))
    return float(ratio(tokens, steps)[np.argmax(steps)])


def mixing_gain(question: Question) -> str:
    """How much less decode would wait if batches were mixed at random (level tokens)."""
    from routeprof.rank_loads import usual_ranks
    from routeprof.whatif.batching import compare_batching

    profile = question.profile
    if not profile.has("tokens") or profile.phase is not None:
        return ""
    ranks = question.ranks or usual_ranks(profile)[0]
    try:
        made = compare_batching(profile, [MIXED], ranks=ranks)
    except UsageError:
        return ""
    (mixed,) = [one for one in made.policies if one.policy == "random"]
    if mixed.gains is None:
        return ""
    gain = mixed.gains["straggler_factor"]
    sure = f" (95 % interval {gain.lower:.2f} to {gain.upper:.2f})" if gain.lower > 0 else ""
    return (
        f"decode in batches of {MIXED} mixed at random would wait {gain.value:.2f} times less for "
        f"the slowest of {ranks} ranks{sure}"
    )
