"""Where to put experts and their replicas so that the slowest GPU is as fast as it can be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

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
from routeprof.whatif.bounds import lower_bound
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.judge import rank_times, step_loads
from routeprof.whatif.solver.board import Board, Task
from routeprof.whatif.solver.candidates import Depth, Problem
from routeprof.whatif.solver.choice import chosen
from routeprof.whatif.solver.search import Patience, gather_pairs

Effort = Literal["low", "normal", "high"]

EFFORTS: dict[Effort, Depth] = {
    "low": Depth(Patience(), Patience(), 1),
    "normal": Depth(Patience(kicks=3), Patience(gpus=8, gain=1e-4, pairs=False), 4),
    "high": Depth(Patience(kicks=10), Patience(gpus=20, gain=1e-5), 12),
}


@dataclass(frozen=True)
class Placement:
    """Experts in slots, and how good that is on the loads it was made for.

    Attributes:
        slots: the expert in every slot, int64 ``[layers, slots]``, GPU by GPU: an engine's
            ``physical_to_logical_map``.
        replicas: of every expert, int64 ``[layers, experts]``; they share its load evenly.
        slowest: time of the slowest GPU, mean over the steps, ``[layers]``, load by speed.
        bound: a time that no placement can be below, ``[layers]``, see `lower_bound`.
        moved: experts on GPUs that do not hold them today, int64 ``[layers]``; 0 where today's
            placement was not given.
        origin: for each layer what it was made by: ``eplb`` or ``today`` where nothing else is
            sure to be better, ``sums`` or ``steps`` by what was searched on.
    """

    slots: IntArray
    replicas: IntArray
    slowest: FloatArray
    bound: FloatArray
    moved: IntArray
    origin: tuple[str, ...]


def place(
    loads: npt.ArrayLike,
    cluster: Cluster,
    *,
    groups: int = 1,
    effort: Effort = "normal",
    today: npt.ArrayLike | None = None,
    moves: int | None = None,
    repeats: bool = True,
    together: npt.ArrayLike | None = None,
    traffic: float = 0.0,
) -> Placement:
    """Choose replica numbers and GPUs for the experts of every layer.

    The slowest GPU's time, mean over the steps, shall be small; replicas of an expert share its
    load evenly, as EPLB supposes. The search starts from EPLB's placement. With two steps or more a
    layer keeps it unless another is sure to be better on later steps: one that was made for the
    first half of the steps and held on the second, see `validation`. With sums alone nothing can be
    told of later loads, and the one that fits them best is taken.

    Args:
        loads: ``[steps, layers, experts]``, or sums ``[layers, experts]``; steps may be windows.
        groups: expert groups, each of which is kept on one node, as node-limited routing wants; 1
            where experts may go anywhere.
        effort: ``low`` searches on sums only; ``high`` shakes the placement more often.
        today: the expert in every slot now, ``[layers, slots]``; what stays on its GPU stays in
            its slot.
        moves: how many experts of a layer may come to a GPU that does not hold them today. The
            search then starts from today's placement, which is kept where nothing is sure to be
            better.
        repeats: a GPU may hold an expert twice where EPLB (or today's placement) wants it so and
            nothing else is sure to be better. It wastes memory, but splits a hot expert unevenly,
            which can make the slowest GPU faster than any placement without. False: no GPU does
            unless it has more slots than there are experts for it, and what EPLB repeats is
            exchanged for something alike; EPLB can then be faster by a percent.
        together: tokens that chose both of two experts, ``[layers, experts, experts]``.
        traffic: what it is worth, as a share of the slowest GPU's time, that all those pairs are
            served on one GPU rather than none. The search then goes on from what was chosen.

    Raises:
        UsageError: fewer slots than experts, groups that do not divide, an argument that lacks its
            companion, or shapes that do not fit.
    """
    steps = step_loads(loads)
    problem = _problem(steps, cluster, groups, today, moves, repeats)
    pairs = _pairs(steps, together, traffic)
    if effort not in EFFORTS:
        raise UsageError(f"effort is {effort!r}: pass one of {', '.join(EFFORTS)}")
    slots, origin = chosen(problem, steps, EFFORTS[effort])
    if pairs is not None:
        slots = _gathered(problem, steps, slots, pairs * traffic)
    if problem.today is not None:
        slots = _kept_in_place(slots, problem.today, cluster)
    return _described(problem, steps, slots, origin)


# -- what was asked


def _problem(
    loads: FloatArray,
    cluster: Cluster,
    groups: int,
    today: npt.ArrayLike | None,
    moves: int | None,
    repeats: bool,
) -> Problem:
    layers, experts = loads.shape[1:]
    require_positive(groups=groups)
    if cluster.slots < experts:
        raise UsageError(
            f"{cluster.slots} slots for {experts} experts: pass GPUs with {experts} slots or more"
        )
    if groups > 1:
        _require_nodes(cluster, groups, experts)
    if moves is not None and (today is None or moves < 0):
        raise UsageError("moves bounds the way from today's placement: pass today, and moves >= 0")
    now = None
    if today is not None:
        now = int_array(today, "today", minimum_axes=2)
        require_shape("today", now.shape, (layers, cluster.slots), "loads", loads.shape)
        rank_times(now, loads[:1], cluster)  # raises where it is no placement
    if now is not None and moves is not None and groups > 1:
        _require_at_home(now, cluster, experts)
    return Problem(cluster, groups, now, moves, repeats)


def _require_nodes(cluster: Cluster, groups: int, experts: int) -> None:
    if experts % groups or groups % cluster.nodes:
        raise UsageError(
            f"{groups} groups of {experts} experts on {cluster.nodes} nodes: pass groups that "
            f"divide the experts and a multiple of the nodes, or 1 to place experts anywhere"
        )
    room = int(cluster.room.reshape(cluster.nodes, -1).sum(axis=1).min())
    if room < experts // cluster.nodes:
        raise UsageError(
            f"a node has {room} slots for {experts // cluster.nodes} experts: give it more, or "
            f"pass groups=1 to place experts anywhere"
        )


def _require_at_home(today: IntArray, cluster: Cluster, experts: int) -> None:
    """Every expert on one node, as many experts on each."""
    for slots in today:
        homes = np.unique(np.stack((slots, cluster.node_of_slot)), axis=1)
        sizes = np.bincount(homes[1], minlength=cluster.nodes)
        if homes.shape[1] != experts or len(set(sizes)) > 1:
            raise UsageError(
                "today's placement spreads groups over nodes: pass no moves, or groups=1"
            )


def _pairs(loads: FloatArray, together: npt.ArrayLike | None, traffic: float) -> FloatArray | None:
    """Shares of all pairs, ``[layers, experts, experts]``, symmetric, summing to 2 per layer."""
    if traffic < 0 or (traffic > 0 and together is None):
        raise UsageError("traffic is the worth of pairs that meet: pass 0 or more, and together")
    if together is None or not traffic:
        return None
    pairs = float_array(together, "together", minimum_axes=3)
    experts = loads.shape[2]
    require_shape("together", pairs.shape, (*loads.shape[1:], experts), "loads", loads.shape)
    pairs = (pairs + pairs.transpose(0, 2, 1)) * (1 - np.eye(experts))
    total = pairs.sum(axis=(1, 2), keepdims=True)
    return np.asarray(2 * np.divide(pairs, total, out=np.zeros_like(pairs), where=total > 0))


# -- what follows the choice


def _slowest(slots: IntArray, loads: FloatArray, cluster: Cluster) -> FloatArray:
    """Time of the slowest GPU, mean over the steps, ``[layers]``."""
    return np.asarray(rank_times(slots, loads, cluster).max(axis=2).mean(axis=0))


def _gathered(problem: Problem, loads: FloatArray, slots: IntArray, worth: FloatArray) -> IntArray:
    """Pairs brought together, their worth being a share of the slowest GPU's time."""
    mean = loads.mean(axis=0, keepdims=True)
    times = _slowest(slots, mean, problem.cluster)
    placed = []
    for layer, time in enumerate(times):
        task = replace(problem.task(mean[:, layer], layer), together=worth[layer] * time)
        placed.append(gather_pairs(task, slots[layer]))
    return np.stack(placed)


def _kept_in_place(slots: IntArray, today: IntArray, cluster: Cluster) -> IntArray:
    """The same experts on every GPU, those that were there in the slots that they have today."""
    placed = slots.copy()
    for layer in range(len(slots)):
        for first, room in zip(cluster.first_slot, cluster.room, strict=True):
            part = slice(first, first + room)
            placed[layer, part] = _aligned(slots[layer, part], today[layer, part])
    return placed


def _aligned(new: IntArray, old: IntArray) -> IntArray:
    rest = new.tolist()
    stays = np.zeros(len(old), dtype=bool)
    for slot, expert in enumerate(old.tolist()):
        if expert in rest:
            rest.remove(expert)
            stays[slot] = True
    aligned = old.copy()
    aligned[~stays] = rest
    return aligned


def _described(
    problem: Problem, loads: FloatArray, slots: IntArray, origin: tuple[str, ...]
) -> Placement:
    layers, experts = loads.shape[1:]
    replicas = np.stack([np.bincount(placed, minlength=experts) for placed in slots])
    moved = np.zeros(layers, dtype=np.int64)
    if problem.today is not None:
        boards = (
            Board(Task(loads[:1, layer], problem.grounds, problem.today[layer]), slots[layer])
            for layer in range(layers)
        )
        moved = np.array([board.moved for board in boards])
    return Placement(
        slots=slots,
        replicas=replicas,
        slowest=_slowest(slots, loads, problem.cluster),
        bound=lower_bound(loads, problem.grounds, problem.groups, repeats=problem.repeats),
        moved=moved,
        origin=origin,
    )
