"""Placements of all layers to choose from: the trusted one, and what a search makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.whatif.bounds import lower_bound
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.eplb import rebalance_experts
from routeprof.whatif.solver.board import Board, BoolArray, Task
from routeprof.whatif.solver.replicas import first_placement
from routeprof.whatif.solver.search import Patience, obeys, put_in_order, search
from routeprof.whatif.solver.typical import typical_steps

STEPS_OF_ONE = 8
"""Steps that a typical step stands for, at least, or it would show chance."""

ALIKE_IN = 16
"""Typical steps in which two experts are compared before one takes the other's place."""


@dataclass(frozen=True)
class Depth:
    """How deep to search.

    Attributes:
        sums: on the loads added up.
        steps: on typical steps.
        typical: number of those; 1 for none.
    """

    sums: Patience
    steps: Patience
    typical: int

    def without_kicks(self) -> Depth:
        return Depth(replace(self.sums, kicks=0), replace(self.steps, kicks=0), self.typical)


@dataclass(frozen=True)
class Problem:
    """Where to place, and what to keep to; the loads are apart.

    Attributes:
        groups: of experts that are kept on a node; 1 for none.
        today: the expert in every slot now, ``[layers, slots]``, None where that is not known.
        moves: experts of a layer that may come to another GPU; None for any number.
        repeats: leave the trusted placement as it is where a GPU holds an expert twice.
    """

    cluster: Cluster
    groups: int
    today: IntArray | None
    moves: int | None
    repeats: bool

    @property
    def grounds(self) -> Cluster:
        """The cluster as the search sees it: nodes matter only where groups are kept on them."""
        return self.cluster if self.groups > 1 else self.cluster.as_one_node()

    def task(self, rows: FloatArray, layer: int) -> Task:
        if self.today is None or self.moves is None:
            return Task(rows, self.grounds)
        return Task(rows, self.grounds, self.today[layer], self.moves)

    def of(self, layers: BoolArray) -> Problem:
        """The same for some of the layers."""
        return self if self.today is None else replace(self, today=self.today[layers])

    @property
    def trusted(self) -> str:
        """What is kept unless something else is sure to be better."""
        if self.moves is not None:
            return "today"
        return "eplb" if self.cluster.is_even else "sums"


@dataclass(frozen=True)
class Candidates:
    """Placements of all layers to choose from.

    Attributes:
        names: what made them; the first is trusted.
        slots: ``[candidates, layers, slots]``.
        raw: the trusted one before it was put in order, ``[layers, slots]``.
    """

    names: tuple[str, ...]
    slots: IntArray
    raw: IntArray

    def of(self, layers: BoolArray) -> Candidates:
        """The same for some of the layers."""
        return Candidates(self.names, self.slots[:, layers], self.raw[layers])

    @property
    def out_of_order(self) -> BoolArray:
        """Where order changed the trusted one, ``[layers]``."""
        return np.asarray((self.raw != self.slots[0]).any(axis=1))


def trusted(problem: Problem, loads: FloatArray) -> Candidates | None:
    """The trusted placement alone; None where it must be searched for, as for uneven GPUs."""
    if problem.trusted == "sums":
        return None
    grounds, raw = problem.grounds, problem.today
    if raw is None or problem.moves is None:
        sums, nodes = loads.sum(axis=0), grounds.nodes
        raw = rebalance_experts(sums, grounds.slots, problem.groups, nodes, grounds.gpus)[0]
    ordered = raw if problem.repeats else _in_order(problem, loads, raw)
    return Candidates((problem.trusted,), ordered[np.newaxis], raw)


def candidates(
    problem: Problem,
    loads: FloatArray,
    depth: Depth,
    kept: Candidates | None,
    known: Candidates | None = None,
) -> Candidates:
    """What there is to choose from; what was searched on sums is trusted where nothing else is.

    Args:
        loads: ``[steps, layers, experts]``.
        kept: the trusted placement.
        known: candidates made for a part of the loads, to start from; nothing else is made.
    """
    earlier = {} if known is None else dict(zip(known.names, known.slots, strict=True))
    found = {} if kept is None else {kept.names[0]: kept.slots[0]}
    starts = [] if kept is None else [kept.raw]
    mean = loads.mean(axis=0, keepdims=True)
    starts += [earlier[name] for name in ("sums",) if name in earlier]
    found["sums"] = _searched(problem, mean, depth.sums, starts)
    typical = min(depth.typical, len(loads) // STEPS_OF_ONE)
    if typical > 1 and (known is None or "steps" in earlier):
        rows = typical_steps(loads, typical)
        starts = [found["sums"], *(earlier[name] for name in ("steps",) if name in earlier)]
        found["steps"] = _searched(problem, rows, depth.steps, starts)
    raw = found["sums"] if kept is None else kept.raw
    return Candidates(tuple(found), np.stack(list(found.values())), raw)


def _in_order(problem: Problem, loads: FloatArray, slots: IntArray) -> IntArray:
    """A placement after what its GPUs hold too often was given to other experts."""
    mean = loads.mean(axis=0, keepdims=True)
    rows = np.concatenate((typical_steps(loads, ALIKE_IN), mean)) if len(loads) > 1 else mean
    boards = [
        Board(problem.task(rows[:, layer], layer), placed) for layer, placed in enumerate(slots)
    ]
    for board in boards:
        put_in_order(board)
    return np.stack([board.expert for board in boards])


def _searched(
    problem: Problem, rows: FloatArray, patience: Patience, starts: Sequence[IntArray]
) -> IntArray:
    """The best start of each layer, searched on."""
    bounds = lower_bound(rows, problem.grounds, problem.groups, repeats=False) * len(rows)
    placed = []
    for layer, bound in enumerate(bounds):
        task = problem.task(rows[:, layer], layer)
        tries = [start[layer] for start in starts]
        if problem.moves is None and (problem.groups > 1 or not tries or not obeys(task, tries[0])):
            tries.append(first_placement(task.rows, problem.grounds, problem.groups))
        best = min(tries, key=lambda start: _score_in_order(task, start))
        placed.append(search(task, best, float(bound), patience))
    return np.stack(placed)


def _score_in_order(task: Task, start: IntArray) -> float:
    board = Board(task, start)
    put_in_order(board)
    return board.score
