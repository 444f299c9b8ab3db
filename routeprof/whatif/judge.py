"""How a placement does on loads, best on others than it was made for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.metrics._arrays import (
    FloatArray,
    IntArray,
    float_array,
    int_array,
    ratio,
    require_shape,
)
from routeprof.whatif.cluster import Cluster


@dataclass(frozen=True)
class Judgement:
    """Figures of a placement by layer, ``[layers]`` each; NaN where a layer has no load.

    Attributes:
        slowest_over_mean: time of the slowest rank over the mean rank's, loads of all steps added
            up: 1 is perfect.
        straggler_factor: Σ over steps of the slowest rank's time ÷ Σ of the mean rank's.
        slowest: time of the slowest rank, mean over the steps, in the unit of loads by speed.
    """

    slowest_over_mean: FloatArray
    straggler_factor: FloatArray
    slowest: FloatArray


def judge(slots: npt.ArrayLike, loads: npt.ArrayLike, cluster: Cluster) -> Judgement:
    """Times of the ranks that a placement makes of loads.

    Replicas of an expert share its load evenly, as EPLB and the engines' dispatch suppose. The mean
    rank's time is the whole load by the speed of all ranks.

    Args:
        slots: the expert in every slot, ``[layers, slots]``.
        loads: ``[steps, layers, experts]``, or ``[layers, experts]`` for one step of sums.

    Raises:
        UsageError: shapes that do not fit, or an expert without a slot.
    """
    steps = step_loads(loads)
    placed = int_array(slots, "slots", minimum_axes=2)
    require_shape(
        "slots",
        placed.shape,
        (steps.shape[1], cluster.slots),
        "loads with the cluster",
        steps.shape,
    )
    time = rank_times(placed, steps, cluster)
    mean = steps.sum(axis=2) / cluster.pace.sum()
    slowest = time.max(axis=2)
    return Judgement(
        ratio(time.mean(axis=0).max(axis=1), mean.mean(axis=0)),
        ratio(slowest.sum(axis=0), mean.sum(axis=0)),
        slowest.mean(axis=0),
    )


def step_loads(loads: npt.ArrayLike) -> FloatArray:
    """Loads as float64 ``[steps, layers, experts]``.

    Raises:
        UsageError: neither two nor three axes, no steps, or numbers that are not finite.
    """
    array = float_array(loads, "loads", minimum_axes=2)
    array = array[np.newaxis] if array.ndim == 2 else array
    if array.ndim != 3 or not len(array) or not np.isfinite(array).all():
        raise UsageError(
            f"loads have shape {array.shape}: pass finite numbers [steps, layers, experts], or "
            f"sums [layers, experts]"
        )
    return array


def rank_times(slots: IntArray, loads: FloatArray, cluster: Cluster) -> FloatArray:
    """Load by speed of every rank, ``[steps, layers, gpus]``.

    Raises:
        UsageError: an expert without a slot, or a slot that names none.
    """
    layers, experts = loads.shape[1:]
    if slots.max() >= experts:
        raise UsageError(f"slots name expert {slots.max()} of {experts}: pass numbers below it")
    count = np.stack([np.bincount(placed, minlength=experts) for placed in slots])
    if not count.all():
        raise UsageError("an expert has no slot: pass a placement that holds each at least once")
    load = np.empty((len(loads), layers, cluster.gpus))
    for layer, placed in enumerate(slots):
        item = (loads[:, layer] / count[layer])[:, placed]
        load[:, layer] = np.add.reduceat(item, cluster.first_slot, axis=1)
    return np.asarray(load / cluster.pace)
