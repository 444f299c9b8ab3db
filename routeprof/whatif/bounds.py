"""What no placement can be better than."""

from __future__ import annotations

import numpy as np

from routeprof.metrics._arrays import FloatArray
from routeprof.whatif.cluster import Cluster

PIECES = 128
"""Steps are averaged to so many before each gets a bound of its own."""


def lower_bound(
    loads: FloatArray, cluster: Cluster, groups: int = 1, *, repeats: bool = True
) -> FloatArray:
    """A time below which no placement can bring the slowest GPU, mean over the steps.

    It holds for every placement that splits an expert's load evenly over its replicas. For each
    step it is the largest of

    * Σ load ÷ Σ speed;
    * the largest load per replica, were all spare slots given out to make it small (which is what
      giving them one by one to the hottest achieves), and what the other slots of its GPU hold at
      the least: the coldest experts, replicated with all spare slots once more; by the speed of the
      GPU where this is least. As many of those slots as there are spare ones may hold an expert
      twice, and are taken for empty;
    * the largest group and the smallest groups beside it, by the speed of the fastest node.

    The mean over steps of a maximum is at least the bound of their mean, so steps may be averaged
    (Jensen); the bound of all steps' mean is one of those compared.

    Args:
        loads: ``[steps, layers, experts]``.
        groups: expert groups that are kept on a node; 1 for none.
        repeats: False for what holds of placements alone that keep two replicas of an expert off
            one GPU, which is more.

    Returns:
        ``[layers]``, in the unit of loads by speed.
    """
    pieces = np.stack(
        [part.mean(axis=0) for part in np.array_split(loads, min(len(loads), PIECES))]
    )
    sizes = np.array([len(part) for part in np.array_split(np.arange(len(loads)), len(pieces))])
    by_step = np.average(_of_steps(pieces, cluster, groups, repeats), axis=0, weights=sizes)
    whole = _of_steps(loads.mean(axis=0, keepdims=True), cluster, groups, repeats)[0]
    return np.asarray(np.maximum(by_step, whole))


def _of_steps(loads: FloatArray, cluster: Cluster, groups: int, repeats: bool) -> FloatArray:
    """``[steps, layers]``."""
    even = loads.sum(axis=2) / cluster.pace.sum()
    bound = np.maximum(even, _of_hottest(loads, cluster, repeats))
    if groups > 1:
        bound = np.maximum(bound, _of_groups(loads, cluster, groups))
    return np.asarray(bound)


def _of_hottest(loads: FloatArray, cluster: Cluster, repeats: bool) -> FloatArray:
    experts = loads.shape[2]
    spare = cluster.slots - experts
    twice = spare if repeats else 0
    in_order = np.sort(loads, axis=2)
    reachable = cluster.gpus // cluster.nodes
    crowded = cluster.room.max() * cluster.nodes > experts
    hottest = _largest_share(in_order[..., -(spare + 1) :], spare)
    if not crowded:
        hottest = np.maximum(hottest, in_order[..., -1] / reachable)
    bounds = []
    for room, speed in set(zip(cluster.capacity, cluster.speed, strict=True)):
        beside = 0 if crowded else max(0, room - 1 - twice)
        fill = _smallest_sum(in_order[..., :beside], spare)
        bounds.append((hottest + fill) / speed)
    return np.asarray(np.min(bounds, axis=0))


def _largest_share(loads: FloatArray, spare: int) -> FloatArray:
    """The smallest largest load per replica that spare slots can bring about, ``[...]``."""
    count = np.ones_like(loads)
    for _ in range(spare):
        hottest = (loads / count).argmax(axis=-1)[..., np.newaxis]
        np.put_along_axis(count, hottest, np.take_along_axis(count, hottest, axis=-1) + 1, axis=-1)
    return np.asarray((loads / count).max(axis=-1))


def _smallest_sum(loads: FloatArray, spare: int) -> FloatArray:
    """The smallest Σ load per replica that spare slots can bring about, ``[...]``.

    Another replica takes x/r - x/(r+1) away, less each time: the largest first is best.
    """
    if not loads.shape[-1]:
        return np.zeros(loads.shape[:-1])
    count = np.ones_like(loads)
    for _ in range(spare):
        best = (loads / (count * (count + 1))).argmax(axis=-1)[..., np.newaxis]
        np.put_along_axis(count, best, np.take_along_axis(count, best, axis=-1) + 1, axis=-1)
    return np.asarray((loads / count).sum(axis=-1))


def _of_groups(loads: FloatArray, cluster: Cluster, groups: int) -> FloatArray:
    steps, layers, _ = loads.shape
    sums = np.sort(loads.reshape(steps, layers, groups, -1).sum(axis=3), axis=2)
    beside = groups // cluster.nodes - 1
    speed = cluster.pace.reshape(cluster.nodes, -1).sum(axis=1).max()
    return np.asarray((sums[..., -1] + sums[..., :beside].sum(axis=2)) / speed)
