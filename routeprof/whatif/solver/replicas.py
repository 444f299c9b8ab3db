"""A first placement where EPLB has none: uneven GPUs, and groups dealt to nodes by search."""

from __future__ import annotations

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.solver.board import Task
from routeprof.whatif.solver.search import Patience, search


def first_placement(rows: FloatArray, cluster: Cluster, groups: int) -> IntArray:
    """Deal groups to nodes, spare slots to hot experts, and replicas to GPUs, the hottest first.

    Args:
        rows: ``[rows, experts]``.

    Returns:
        ``[slots]``; a GPU may hold an expert twice, which the search puts in order.
    """
    load = rows.sum(axis=0)
    experts_of = _experts_of_nodes(rows, cluster, groups)
    gpus = np.arange(cluster.gpus).reshape(cluster.nodes, -1)
    placed = [
        _on_node(load, experts_of[node], cluster, gpus[node]) for node in range(cluster.nodes)
    ]
    return np.concatenate(placed)


def _experts_of_nodes(rows: FloatArray, cluster: Cluster, groups: int) -> IntArray:
    """``[nodes, experts of a node]``."""
    experts = rows.shape[1]
    members = np.arange(experts).reshape(groups, -1)
    if cluster.nodes == 1:
        return members.reshape(1, -1)
    room = groups // cluster.nodes
    speed = cluster.pace.reshape(cluster.nodes, -1).sum(axis=1)
    nodes = Cluster((room,) * cluster.nodes, tuple(speed))
    loads = rows[:, members].sum(axis=2)
    start = _on_node(loads.sum(axis=0), np.arange(groups), nodes, np.arange(cluster.nodes))
    order = search(Task(loads, nodes), start, 0.0, Patience())
    return members[order].reshape(cluster.nodes, -1)


def _on_node(load: FloatArray, experts: IntArray, cluster: Cluster, gpus: IntArray) -> IntArray:
    """What is in the slots of these GPUs, one GPU after another."""
    room, pace = cluster.room[gpus].copy(), cluster.pace[gpus]
    count = _replicas(load[experts], int(room.sum()), len(gpus))
    share = load[experts] / count
    held = np.zeros((len(gpus), len(experts)), dtype=np.int64)
    time = np.zeros(len(gpus))
    order = np.argsort(-share, kind="stable")
    for expert in np.repeat(order, count[order]):
        full = room == 0
        gpu = np.lexsort((time + share[expert] / pace, held[:, expert], full))[0]
        held[gpu, expert] += 1
        time[gpu] += share[expert] / pace[gpu]
        room[gpu] -= 1
    return np.concatenate([np.repeat(experts, row) for row in held])


def _replicas(load: FloatArray, slots: int, gpus: int) -> IntArray:
    """Replicas of every expert: spare slots go to the largest load per replica.

    An expert gets more than one for each GPU only when all have as many.
    """
    count = np.ones(len(load), dtype=np.int64)
    for _ in range(slots - len(load)):
        full = count >= gpus * (1 + count.min() // gpus)
        count[np.lexsort((-load / count, full))[0]] += 1
    return count
