"""DeepSeek's expert-parallelism load balancer, as the baseline to compare with.

Written anew from the published description and outputs of https://github.com/deepseek-ai/EPLB. It
computes in float32, as the original does, so that ties fall to the same expert and the same GPU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routeprof.errors import UsageError
from routeprof.metrics._arrays import IntArray, float_array, require_positive

Float32Array = npt.NDArray[np.float32]


def rebalance_experts(
    weight: npt.ArrayLike, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Replicate hot experts and pack the replicas: EPLB's entry point.

    Where the nodes divide the groups, groups are packed to nodes first and experts are replicated
    within a node (hierarchical); elsewhere groups and nodes are ignored (global).

    Args:
        weight: load of every logical expert, ``[layers, experts]``.
        num_replicas: slots over all GPUs, a multiple of ``num_gpus``.

    Returns:
        phy2log: logical expert in every slot, int64 ``[layers, num_replicas]``.
        log2phy: slots of every expert, ``[layers, experts, most replicas]``, -1 where it has fewer.
        logcnt: replicas of every expert, ``[layers, experts]``.

    Raises:
        UsageError: numbers that do not divide, or fewer slots than experts.
    """
    loads = float_array(weight, "weight", minimum_axes=2).astype(np.float32)
    require_positive(num_groups=num_groups, num_nodes=num_nodes, num_gpus=num_gpus)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    layers, experts = loads.shape
    _require_multiple("weight's experts", experts, "num_groups", num_groups)
    _require_multiple("num_gpus", num_gpus, "num_nodes", num_nodes)
    _require_multiple("num_replicas", num_replicas, "num_gpus", num_gpus)

    by_node = _pack_groups(loads, num_groups, num_nodes)
    ordered = np.take_along_axis(loads, by_node, axis=1).reshape(layers * num_nodes, -1)
    replicated, replica, count = replicate_experts(ordered, num_replicas // num_nodes)
    share = np.take_along_axis(_per_replica(ordered, count), replicated, axis=1)
    slot_order = _slot_order(*balanced_packing(share, num_gpus // num_nodes))

    first = np.tile(np.arange(0, experts, experts // num_nodes), layers)[:, np.newaxis]
    in_slots = np.take_along_axis(replicated, slot_order, axis=1) + first
    phy2log = np.take_along_axis(by_node, in_slots.reshape(layers, -1), axis=1)
    rank = np.take_along_axis(replica, slot_order, axis=1).reshape(layers, -1)
    logcnt = np.empty((layers, experts), dtype=np.int64)
    np.put_along_axis(logcnt, by_node, count.reshape(layers, -1), axis=1)
    return phy2log, _slots_of_experts(phy2log, rank, logcnt), logcnt


def replicate_experts(weight: npt.ArrayLike, num_phy: int) -> tuple[IntArray, IntArray, IntArray]:
    """Give spare slots one after another to the expert with the largest load per replica.

    Args:
        weight: ``[rows, experts]``.
        num_phy: slots of each row.

    Returns:
        phy2log: expert in every slot, ``[rows, num_phy]``; the experts in order come first.
        rank: number of that replica among its expert's, ``[rows, num_phy]``.
        logcnt: replicas of every expert, ``[rows, experts]``.

    Raises:
        UsageError: fewer slots than experts.
    """
    loads = float_array(weight, "weight", minimum_axes=2).astype(np.float32)
    rows, experts = loads.shape
    if num_phy < experts:
        raise UsageError(f"{num_phy} slots for {experts} experts: pass {experts} slots or more")
    phy2log = np.tile(np.arange(num_phy), (rows, 1))
    rank = np.zeros((rows, num_phy), dtype=np.int64)
    count = np.ones((rows, experts), dtype=np.int64)
    every = np.arange(rows)
    for slot in range(experts, num_phy):
        hottest = _per_replica(loads, count).argmax(axis=1)
        phy2log[:, slot] = hottest
        rank[:, slot] = count[every, hottest]
        count[every, hottest] += 1
    return phy2log, rank, count


def balanced_packing(weight: npt.ArrayLike, num_packs: int) -> tuple[IntArray, IntArray]:
    """Put items, the heaviest first, each into the lightest pack that has room.

    Args:
        weight: ``[rows, items]``; every pack takes ``items / num_packs``.

    Returns:
        pack_index: pack of every item, ``[rows, items]``.
        rank_in_pack: place of every item in its pack, ``[rows, items]``.

    Raises:
        UsageError: the packs do not divide the items.
    """
    loads = float_array(weight, "weight", minimum_axes=2).astype(np.float32)
    rows, items = loads.shape
    require_positive(num_packs=num_packs)
    _require_multiple("weight's items", items, "num_packs", num_packs)
    room = items // num_packs
    if room == 1:
        return np.tile(np.arange(items), (rows, 1)), np.zeros((rows, items), dtype=np.int64)
    pack_index = np.empty((rows, items), dtype=np.int64)
    rank_in_pack = np.empty((rows, items), dtype=np.int64)
    filled = np.zeros((rows, num_packs), dtype=np.float32)
    inside = np.zeros((rows, num_packs), dtype=np.int64)
    every = np.arange(rows)
    for item in np.argsort(-loads, axis=1, kind="stable").T:
        pack = np.where(inside < room, filled, np.float32(np.inf)).argmin(axis=1)
        pack_index[every, item] = pack
        rank_in_pack[every, item] = inside[every, pack]
        filled[every, pack] += loads[every, item]
        inside[every, pack] += 1
    return pack_index, rank_in_pack


def _pack_groups(loads: Float32Array, groups: int, nodes: int) -> IntArray:
    """Experts in the order of their nodes, ``[layers, experts]``."""
    layers, experts = loads.shape
    size = experts // groups
    group_loads = loads.reshape(layers, groups, size).sum(axis=2)
    order = _slot_order(*balanced_packing(group_loads, nodes))
    in_order = order[:, :, np.newaxis] * size + np.arange(size)
    return np.asarray(in_order.reshape(layers, experts))


def _slot_order(pack_index: IntArray, rank_in_pack: IntArray) -> IntArray:
    """The item in every slot, packs one after another, ``[rows, items]``."""
    room = rank_in_pack.max() + 1
    return np.argsort(pack_index * room + rank_in_pack, axis=1)


def _per_replica(loads: Float32Array, count: IntArray) -> Float32Array:
    return np.asarray(loads / count.astype(np.float32), dtype=np.float32)


def _slots_of_experts(phy2log: IntArray, rank: IntArray, logcnt: IntArray) -> IntArray:
    layers, slots = phy2log.shape
    log2phy = np.full((*logcnt.shape, logcnt.max()), -1, dtype=np.int64)
    log2phy[np.arange(layers)[:, np.newaxis], phy2log, rank] = np.arange(slots)
    return log2phy


def _require_multiple(name: str, value: int, other: str, divisor: int) -> None:
    if value % divisor:
        raise UsageError(
            f"{name} ({value}) must be a multiple of {other} ({divisor}): change one of them"
        )
