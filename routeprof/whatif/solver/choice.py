"""Which placement every layer gets: the trusted one, unless another is sure to be better."""

from __future__ import annotations

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.whatif.solver.candidates import Candidates, Depth, Problem, candidates, trusted
from routeprof.whatif.solver.validation import TOLERANCE, Outlook, in_scenarios, on_later_steps


def chosen(problem: Problem, loads: FloatArray, depth: Depth) -> tuple[IntArray, tuple[str, ...]]:
    """The placement of every layer, ``[layers, slots]``, and what made it.

    Candidates are made for the first half of the steps and tried on the second. Only where one of
    them is sure to be better there, candidates are made for all steps.

    Args:
        loads: ``[steps, layers, experts]``.
    """
    first, later = np.array_split(loads, 2)
    kept = trusted(problem, loads)
    if len(later) < 2:
        fitted = candidates(problem, loads, depth, kept)
        return _best(fitted, in_scenarios(fitted.slots, fitted.raw, loads, problem.cluster))
    half = candidates(problem, first, depth.without_kicks(), trusted(problem, first))
    tried = on_later_steps(half.slots, half.raw, later, problem.cluster)
    if kept is None:
        return _refitted(problem, loads, depth, None, half, tried)
    worth = tried.sure[1:].any(axis=0) | half.out_of_order | kept.out_of_order
    slots, origin = kept.slots[0].copy(), np.full(len(worth), problem.trusted, dtype=object)
    if worth.any():
        slots[worth], origin[worth] = _refitted(
            problem.of(worth),
            loads[:, worth],
            depth,
            kept.of(worth),
            half.of(worth),
            tried.of(worth),
        )
    return slots, tuple(origin)


def _refitted(
    problem: Problem,
    loads: FloatArray,
    depth: Depth,
    kept: Candidates | None,
    half: Candidates,
    tried: Outlook,
) -> tuple[IntArray, tuple[str, ...]]:
    """The best of what is made for all steps, starting from what was made for the first half."""
    fitted = candidates(problem, loads, depth, kept, half)
    outlook = in_scenarios(fitted.slots, fitted.raw, loads, problem.cluster)
    return _best(fitted, tried.and_also(outlook))


def _best(fitted: Candidates, outlook: Outlook) -> tuple[IntArray, tuple[str, ...]]:
    """The first one unless another is quicker and sure to be better.

    Where the first bears a risk itself, having been put in order, what is likely the quickest.
    """
    every = np.arange(fitted.slots.shape[1])
    best = np.zeros(len(every), dtype=np.int64)
    for number in range(1, len(fitted.names)):
        better = outlook.sure[number] & (outlook.time[number] < outlook.time[best, every])
        risky = np.minimum(outlook.expected, outlook.risk)[best, every] > 1 + TOLERANCE
        likely = outlook.expected[number] < outlook.expected[best, every] - TOLERANCE
        best[better | (risky & likely)] = number
    return fitted.slots[best, every], tuple(fitted.names[number] for number in best)
