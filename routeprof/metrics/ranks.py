"""Load of the ranks that hold a layer's experts.

A placement is an engine's ``physical_to_logical_map``: the logical expert in every slot. Slots are
dealt to ranks in order and as evenly as possible, the first ranks taking one more where the number
does not divide, as vLLM does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.metrics._arrays import (
    FloatArray,
    IntArray,
    float_array,
    int_array,
    require_positive,
    require_shape,
)


def contiguous(experts: int, ranks: int) -> IntArray:
    """The placement of an engine that does not balance: expert i in slot i, no replicas.

    Returns:
        int64 ``[experts]``.

    Raises:
        UsageError: fewer experts than ranks, or no ranks.
    """
    rank_of_slot(experts, ranks)
    return np.arange(experts)


def rank_of_slot(slots: int, ranks: int) -> IntArray:
    """The rank that holds each slot, int64 ``[slots]``.

    Raises:
        UsageError: fewer slots than ranks, or no ranks.

    >>> rank_of_slot(5, 2).tolist()
    [0, 0, 0, 1, 1]
    """
    require_positive(ranks=ranks)
    if slots < ranks:
        raise UsageError(f"{slots} slots on {ranks} ranks: pass at most {slots} ranks")
    size, larger = divmod(slots, ranks)
    return np.repeat(np.arange(ranks), [size + 1] * larger + [size] * (ranks - larger))


def rank_loads(counts: npt.ArrayLike, placement: npt.ArrayLike, ranks: int) -> FloatArray:
    """Load of every rank, an expert's load split evenly among its replicas.

    Args:
        counts: assignments per logical expert, ``[..., experts]``.
        placement: logical expert in every slot: ``[slots]``, or ``[layers, slots]`` for counts
            whose last axes are ``[layers, experts]``.
        ranks: number of ranks.

    Returns:
        float64 ``[..., ranks]``; the sum is that of the counts.

    Raises:
        UsageError: a slot that names no expert, an expert without a slot, fewer slots than ranks,
            or layers that do not fit the counts.

    >>> rank_loads([6, 2, 4], placement=[0, 1, 0, 2], ranks=2).tolist()
    [5.0, 7.0]
    """
    loads = float_array(counts, "counts")
    slots = int_array(placement, "placement", minimum_axes=1)
    layers = loads.shape[loads.ndim - slots.ndim : -1]
    require_shape("placement", slots.shape, (*layers, slots.shape[-1]), "counts", loads.shape)
    share = loads / _replicas(slots, loads.shape[-1])
    in_slots = np.take_along_axis(
        share, np.broadcast_to(slots, (*loads.shape[:-1], slots.shape[-1])), axis=-1
    )
    return sums_of_ranks(in_slots, rank_of_slot(slots.shape[-1], ranks), ranks)


def sums_of_ranks(in_slots: FloatArray, rank: IntArray, ranks: int) -> FloatArray:
    """What the slots of each rank have together, ``[..., ranks]``.

    Args:
        in_slots: ``[..., slots]``.
        rank: of each slot, ascending, every rank at least once, ``[slots]``.
    """
    return np.asarray(np.add.reduceat(in_slots, np.searchsorted(rank, np.arange(ranks)), axis=-1))


def _replicas(slots: IntArray, experts: int) -> IntArray:
    """Slots of each expert, ``[..., experts]``."""
    replicas = np.asarray((slots[..., np.newaxis] == np.arange(experts)).sum(axis=-2))
    if slots.max() >= experts or replicas.min() == 0:
        raise UsageError(
            f"placement of shape {slots.shape} must give each of {experts} experts a slot, and "
            f"name no other: pass the engine's physical_to_logical_map"
        )
    return replicas
