"""Local search of one layer's placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from routeprof.metrics._arrays import IntArray
from routeprof.whatif.solver.board import Board, Task
from routeprof.whatif.solver.moves import (
    Change,
    best_of_replacements,
    best_pair_swap,
    best_replacement,
    best_swap,
    mildest_swap,
)
from routeprof.whatif.solver.rules import may_replace, may_swap

CLOSE = 5e-5
"""Where the search ends: so near to the bound, relatively."""

RESHUFFLES = 0.5
"""Share of the kicks that change replica numbers."""

SMALL = 64
"""Slots of a layer that is shaken more often when it has fewer."""

MILD = 2e-4
"""Relative loss that keeping to the replica numbers is worth."""


@dataclass(frozen=True)
class Patience:
    """How long to look.

    Attributes:
        kicks: how often to shake a placement that no change makes better, and search on.
        gpus: of those that are the slowest in some row, how many to relieve in one go.
        gain: the least relative gain that is worth a change.
        pairs: whether to exchange pairs of replicas too.
    """

    kicks: int = 0
    gpus: int = 1
    gain: float = 1e-9
    pairs: bool = True


def search(task: Task, start: IntArray, bound: float, patience: Patience) -> IntArray:
    """Change a placement for the better until no single change helps.

    Args:
        start: the expert in every slot, ``[slots]``.
        bound: a score that no placement can be below, where the search may stop.

    Returns:
        ``[slots]``, a placement that keeps the rules, and no worse than ``start`` put in order.
    """
    board = Board(task, start)
    put_in_order(board)
    goal = bound * (1 + CLOSE)
    _descend(board, goal, patience)
    random = np.random.default_rng(0)
    # Small layers are cheap, and have more dead ends.
    for _ in range(patience.kicks * (1 + SMALL // len(start))):
        score = board.score
        if score <= goal:
            break
        best = board.expert.copy()
        _shake(board, random)
        _descend(board, goal, patience)
        if board.score >= score:
            board.restore(best)
    return board.expert


def put_in_order(board: Board) -> None:
    """Take away what a GPU holds too often, changing as little as can be."""
    while len(excess := _excess(board)):
        # Not all can be changed at once: what is there twice may be what a GPU must hold twice.
        changes = (_orderly(board, int(slot)) for slot in excess)
        change = next((change for change in changes if change is not None), None)
        if change is None:
            return
        change.apply()


def _orderly(board: Board, slot: int) -> Change | None:
    """An exchange with something alike, or where that costs, the slot given to another expert."""
    swap = None if board.crowded else mildest_swap(board, slot)
    if swap is not None and swap.score <= board.score * (1 + MILD):
        return swap
    experts = np.arange(len(board.count))
    slots = np.full(len(experts), slot)
    gpu = board.cluster.gpu_of_slot[slots]
    rarer = board.held[gpu, experts] <= board.held[gpu, board.expert[slots]] - 2
    put = best_of_replacements(board, slots[rarer], experts[rarer])
    if swap is None or put is None:
        return swap or put
    return min(swap, put, key=lambda change: change.score)


def obeys(task: Task, slots: IntArray) -> bool:
    """Whether no GPU holds an expert too often."""
    return not len(_excess(Board(task, slots)))


def gather_pairs(task: Task, start: IntArray) -> IntArray:
    """Bring experts together whose tokens they share, as far as it pays.

    Args:
        task: with ``together``.
        start: ``[slots]``, a placement that keeps the rules.
    """
    board = Board(task, start)
    changed = True
    while changed:
        changed = False
        for gpu in range(task.cluster.gpus):
            change = best_swap(board, gpu)
            score = board.score
            if change is not None and change.score < score - 1e-6 * abs(score):
                change.apply()
                changed = True
    return board.expert


def _excess(board: Board) -> IntArray:
    """Slots of experts that a GPU holds at least twice more often than another of its node."""
    gpu, node = board.cluster.gpu_of_slot, board.cluster.node_of_gpu
    elsewhere = board.home != node[:, np.newaxis]
    fewest = np.where(elsewhere, board.held.max(), board.held).min(axis=1)
    return np.flatnonzero(board.held[gpu, board.expert] > fewest[gpu] + 1)


def _descend(board: Board, goal: float, patience: Patience) -> None:
    """Make the best change of the first kind that helps, until none does."""
    while (score := board.score) > goal:
        change = next(_improvements(board, score * (1 - patience.gain), patience), None)
        if change is None:
            return
        change.apply()


def _improvements(board: Board, below: float, patience: Patience) -> Iterator[Change]:
    gpus = _slowest_gpus(board, patience.gpus)
    kinds = (best_swap, best_pair_swap, best_replacement)
    for kind in kinds if patience.pairs else (best_swap, best_replacement):
        for gpu in gpus:
            change = kind(board, gpu)
            if change is not None and change.score < below:
                yield change


def _slowest_gpus(board: Board, number: int) -> list[int]:
    """GPUs that are the slowest in some row; those first that are it for the longest."""
    slowest = board.time.argmax(axis=1)
    time = np.bincount(slowest, weights=board.time.max(axis=1))
    order = np.argsort(-time, kind="stable")[:number]
    return [int(gpu) for gpu in order if time[gpu] > 0]


def _shake(board: Board, random: np.random.Generator) -> None:
    """Swap two replicas of the slowest GPU with others, or give a spare slot away, at random."""
    if random.random() < RESHUFFLES and _give_away(board, random):
        return
    (gpu,) = _slowest_gpus(board, 1)
    mine = board.slots_of(gpu)
    for _ in range(2):
        one, other = np.nonzero(may_swap(board, gpu, mine))
        if not len(one):
            return
        choice = random.integers(len(one))
        board.swap(mine[one[choice]], other[choice])


def _give_away(board: Board, random: np.random.Generator) -> bool:
    """Put a random expert into a random spare slot; whether there is such a change."""
    spare = np.flatnonzero(board.count[board.expert] > 1)
    experts = np.arange(len(board.count))
    slots = np.repeat(spare, len(experts))
    allowed = np.flatnonzero(may_replace(board, slots, np.tile(experts, len(spare))))
    if not len(allowed):
        return False
    slot, expert = divmod(int(random.choice(allowed)), len(experts))
    board.put(int(spare[slot]), expert)
    return True
