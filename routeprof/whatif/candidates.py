"""Placements of all layers to choose from: the trusted one, and what a search makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.whatif.board import Board, Task
from routeprof.whatif.bounds import lower_bound
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.eplb import rebalance_experts
from routeprof.whatif.replicas import first_placement
from routeprof.whatif.search import Patience, obeys, put_in_order, search
from routeprof.whatif.typical import typical_steps

RAW = "raw"

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

    @property
    def trusted(self) -> str:
        """What is kept unless something else is sure to be better."""
        if self.moves is not None:
            return "today"
        return "eplb" if self.cluster.is_even else "sums"


def candidates(
    problem: Problem, loads: FloatArray, depth: Depth, known: dict[str, IntArray]
) -> dict[str, IntArray]:
    """Placements ``[layers, slots]`` by what made them.

    The trusted one comes first as it is, as ``RAW``, and then put in order. Where there is none,
    for uneven GPUs, what was searched on sums is trusted.

    Args:
        loads: ``[steps, layers, experts]``.
        known: candidates made for a part of the loads, to start from.
    """
    found: dict[str, IntArray] = {}
    starts: list[IntArray] = []
    mean = loads.mean(axis=0, keepdims=True)
    if problem.trusted != "sums":
        found[RAW] = _trusted(problem, mean)
        starts.append(found[RAW])
        found[problem.trusted] = (
            found[RAW] if problem.repeats else in_order(problem, loads, found[RAW])
        )
    starts += [known[name] for name in ("sums",) if name in known]
    found["sums"] = _searched(problem, mean, depth.sums, starts)
    typical = min(depth.typical, len(loads) // STEPS_OF_ONE)
    if typical > 1:
        # The mean beside the steps: what is gained in steps shall not be lost in the sum.
        rows = np.concatenate((typical_steps(loads, typical), mean))
        starts = [found["sums"], *(known[name] for name in ("steps",) if name in known)]
        found["steps"] = _searched(problem, rows, depth.steps, starts)
    return found


def in_order(problem: Problem, loads: FloatArray, slots: IntArray) -> IntArray:
    """A placement after what its GPUs hold too often was given to other experts."""
    mean = loads.mean(axis=0, keepdims=True)
    rows = np.concatenate((typical_steps(loads, ALIKE_IN), mean)) if len(loads) > 1 else mean
    boards = [
        Board(problem.task(rows[:, layer], layer), placed) for layer, placed in enumerate(slots)
    ]
    for board in boards:
        put_in_order(board)
    return np.stack([board.expert for board in boards])


def _trusted(problem: Problem, mean: FloatArray) -> IntArray:
    if problem.today is not None and problem.moves is not None:
        return problem.today
    grounds = problem.grounds
    return rebalance_experts(mean[0], grounds.slots, problem.groups, grounds.nodes, grounds.gpus)[0]


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
