"""A few typical steps that stand for many."""

from __future__ import annotations

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray, ratio

FEATURES = 128
ROUNDS = 8


def typical_steps(loads: FloatArray, number: int) -> FloatArray:
    """Group steps that load the experts alike, and average each group.

    The mean of a group is freer of chance than a step is, and still shows what sums hide: that
    one expert is hot when another is cold. Groups are those of k-means on the experts' shares of
    all layers, added up with random signs to a few features.

    Args:
        loads: ``[steps, layers, experts]``.
        number: of groups, at most.

    Returns:
        ``[groups, layers, experts]``, each weighted by its share of the steps: the sum over the
        groups is the mean over the steps.
    """
    steps = len(loads)
    if number <= 1 or steps <= 1:
        return np.asarray(loads.mean(axis=0, keepdims=True))
    group = _groups(_features(loads), min(number, steps))
    return np.stack([loads[group == one].sum(axis=0) for one in np.unique(group)]) / steps


def _features(loads: FloatArray) -> FloatArray:
    """``[steps, FEATURES]``."""
    shares = np.nan_to_num(ratio(loads, loads.sum(axis=2, keepdims=True)))
    flat = shares.reshape(len(loads), -1)
    random, number = np.random.default_rng(0), flat.shape[1]
    width = -(-number // FEATURES) * FEATURES
    spread = np.zeros((len(flat), width))
    spread[:, random.permutation(width)[:number]] = flat * random.choice([-1.0, 1.0], number)
    return np.asarray(spread.reshape(len(flat), -1, FEATURES).sum(axis=1))


def _groups(points: FloatArray, number: int) -> IntArray:
    """k-means from points far apart, ``[points]``."""
    centres = points[_far_apart(points, number)]
    for _ in range(ROUNDS):
        group = _distances(points, centres).argmin(axis=1)
        member = (group == np.arange(number)[:, np.newaxis]).astype(np.float64)
        size = member.sum(axis=1, keepdims=True)
        centres = np.where(size > 0, member @ points / np.maximum(size, 1), centres)
    return np.asarray(group)


def _far_apart(points: FloatArray, number: int) -> list[int]:
    chosen = [0]
    nearest = _distances(points, points[:1])[:, 0]
    while len(chosen) < number:
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, _distances(points, points[chosen[-1:]])[:, 0])
    return chosen


def _distances(points: FloatArray, centres: FloatArray) -> FloatArray:
    """Squared, ``[points, centres]``."""
    difference = points[:, np.newaxis, :] - centres[np.newaxis, :, :]
    return np.asarray((difference**2).sum(axis=2))
