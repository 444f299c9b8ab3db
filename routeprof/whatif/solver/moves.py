"""Changes of a placement that make its slowest GPU faster: the best of each kind.

Each function looks at all changes of one kind that involve a given GPU, and returns the best that
keeps the rules (nodes, replicas on different GPUs, moves) with the score that it leads to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from routeprof.metrics._arrays import FloatArray, IntArray
from routeprof.whatif.cluster import Cluster
from routeprof.whatif.solver.board import Board
from routeprof.whatif.solver.rules import may_come, may_go, may_replace, may_swap

MOST_CELLS = 400_000
"""Changes × rows that are weighed in one go; above it a kind of change is left out."""

MOST_SWAPS = 30_000
"""Exchanges × rows that are weighed in one go."""

EVENNESS = 0.1
"""What the load of the two GPUs of an exchange counts beside that of the slowest GPU."""

PARTNERS = 16
"""GPUs that an exchange of pairs is tried with."""


@dataclass(frozen=True)
class Change:
    """A change of the board and the score after it."""

    score: float
    apply: Callable[[], None]


def best_swap(board: Board, gpu: int) -> Change | None:
    """Exchange a replica on ``gpu`` with one on another GPU.

    Where there are many, only some of those on ``gpu`` are looked at, others each time.
    """
    mine = board.slots_of(gpu)
    stride = -(-len(mine) * board.item.size // MOST_SWAPS)
    mine = mine[board.changes % min(stride, len(mine)) :: stride]
    score, order = _after_exchange(
        board, gpu, board.item[:, mine], board.item, board.cluster.gpu_of_slot
    )
    if board.task.together is not None:
        score -= _saved_by_swaps(board, gpu, mine)
        order = score
    order[~may_swap(board, gpu, mine)] = np.inf
    one, other = np.unravel_index(order.argmin(), order.shape)
    if order[one, other] == np.inf:
        return None
    return Change(float(score[one, other]), lambda: board.swap(mine[one], other))


def mildest_swap(board: Board, slot: int) -> Change | None:
    """Exchange what is in ``slot`` with something elsewhere of about the same load."""
    gpu, mine = int(board.cluster.gpu_of_slot[slot]), np.array([slot])
    leaving = board.item[:, mine]
    score, _ = _after_exchange(board, gpu, leaving, board.item, board.cluster.gpu_of_slot)
    order = np.maximum(score, board.score) + np.abs(leaving - board.item).sum(axis=0)
    order[~may_swap(board, gpu, mine)] = np.inf
    other = int(order.argmin())
    if order[0, other] == np.inf:
        return None
    return Change(float(score[0, other]), lambda: board.swap(slot, other))


def best_pair_swap(board: Board, gpu: int) -> Change | None:
    """Exchange two replicas on ``gpu`` with two on one of the GPUs with the least to do."""
    pairs, their_gpu = _pairs(board.cluster)
    mine = pairs[their_gpu == gpu]
    idle = np.zeros(board.cluster.gpus, dtype=bool)
    idle[board.time.sum(axis=0).argsort(kind="stable")[:PARTNERS]] = True
    idle = idle[their_gpu]
    pairs, their_gpu = pairs[idle], their_gpu[idle]
    too_many = len(mine) * len(pairs) * len(board.item) > MOST_CELLS
    bound = board.held_today is not None or board.task.together is not None
    if too_many or not len(mine) or board.crowded or bound:
        return None
    leaving, coming = (board.item[:, part].sum(axis=2) for part in (mine, pairs))
    score, order = _after_exchange(board, gpu, leaving, coming, their_gpu)
    goes = np.all(may_go(board, gpu, board.expert[mine.T]), axis=0)
    order[~(goes[:, their_gpu] & may_come(board, gpu)[pairs].all(axis=1))] = np.inf
    one, other = np.unravel_index(order.argmin(), order.shape)
    if order[one, other] == np.inf:
        return None
    return Change(float(score[one, other]), lambda: board.swap(mine[one], pairs[other]))


def best_replacement(board: Board, gpu: int) -> Change | None:
    """Turn a spare replica of one expert into a replica of another.

    Either an expert on ``gpu`` gets a replica elsewhere, or a spare replica on ``gpu`` gives way.
    """
    spare = np.flatnonzero(board.count[board.expert] > 1)
    if not len(spare):
        return None
    elsewhere = spare[board.cluster.gpu_of_slot[spare] != gpu]
    here = spare[board.cluster.gpu_of_slot[spare] == gpu]
    hot = np.unique(board.expert[board.slots_of(gpu)])
    every = np.arange(board.task.rows.shape[1])
    slots = np.concatenate((np.repeat(elsewhere, len(hot)), np.repeat(here, len(every))))
    experts = np.concatenate((np.tile(hot, len(elsewhere)), np.tile(every, len(here))))
    return best_of_replacements(board, slots, experts)


def best_of_replacements(board: Board, slots: IntArray, experts: IntArray) -> Change | None:
    """The best of putting ``experts[i]`` into ``slots[i]``."""
    allowed = may_replace(board, slots, experts)
    slots, experts = slots[allowed], experts[allowed]
    size = max(1, MOST_CELLS // board.time.size)
    best: tuple[float, int] | None = None
    for start in range(0, len(slots), size):
        part = slice(start, start + size)
        score = _after_replacements(board, slots[part], experts[part])
        index = int(score.argmin())
        if best is None or score[index] < best[0]:
            best = float(score[index]), start + index
    if best is None:
        return None
    slot, expert = int(slots[best[1]]), int(experts[best[1]])
    return Change(best[0], lambda: board.put(slot, expert))


# -- scores


def _after_exchange(
    board: Board, gpu: int, leaving: FloatArray, coming: FloatArray, their_gpu: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Scores if ``gpu`` exchanges loads with another, and what to choose the best change by.

    Where a third GPU is the slowest, the score doesn't tell the exchanges apart; the more even the
    two GPUs get, the better for the changes that follow.

    Args:
        leaving: loads that ``gpu`` may give, ``[rows, mine]``.
        coming: loads that it may take for them, ``[rows, theirs]``.
        their_gpu: where these are, ``[theirs]``.

    Returns:
        Two arrays ``[mine, theirs]``.
    """
    slowness = 1 / board.cluster.pace
    keeping = board.time[:, gpu, np.newaxis] - leaving * slowness[gpu]
    after = keeping[:, :, np.newaxis] + (coming * slowness[gpu])[:, np.newaxis, :]
    without = board.time[:, their_gpu] - coming * slowness[their_gpu]
    theirs = leaving[:, :, np.newaxis] * slowness[their_gpu]
    theirs += without[:, np.newaxis, :]
    np.maximum(after, theirs, out=after)
    two = after.sum(axis=0)
    np.maximum(after, _slowest_other(board, gpu)[:, np.newaxis, their_gpu], out=after)
    score = np.asarray(after.sum(axis=0))
    return score, score + EVENNESS * two


def _slowest_other(board: Board, gpu: int) -> FloatArray:
    """The slowest of all GPUs but ``gpu`` and one more, for each as that one, ``[rows, gpus]``."""
    time = board.time.copy()
    rows = np.arange(len(time))
    time[:, gpu] = -np.inf
    slowest = time.argmax(axis=1)
    first = time[rows, slowest]
    time[rows, slowest] = -np.inf
    others = np.repeat(first[:, np.newaxis], time.shape[1], axis=1)
    others[rows, slowest] = time.max(axis=1)
    return others


def _after_replacements(board: Board, slots: IntArray, experts: IntArray) -> FloatArray:
    """Scores, ``[changes]``."""
    rows, count, pace = board.task.rows, board.count, board.cluster.pace
    old = board.expert[slots]
    gain = rows[:, experts] / (count[experts] + 1)
    loss = rows[:, old] / (count[old] - 1)
    less = rows[:, experts] / count[experts] - gain
    more = loss - rows[:, old] / count[old]
    held = board.held / pace[:, np.newaxis]
    time = board.time[:, np.newaxis, :] - less[:, :, np.newaxis] * held.T[experts]
    time += more[:, :, np.newaxis] * held.T[old]
    gpu = board.cluster.gpu_of_slot[slots]
    time[:, np.arange(len(slots)), gpu] += (gain - loss) / pace[gpu]
    return np.asarray(time.max(axis=2).sum(axis=0))


def _saved_by_swaps(board: Board, gpu: int, mine: IntArray) -> FloatArray:
    """What every swap would save in traffic, ``[mine, slots]``.

    With p_g the share of each expert's tokens that GPU g serves and N the pairs, Σ_g p_g N p_g / 2
    is saved; a swap adds some d to p of one GPU and takes it from the other's.
    """
    pairs = board.task.together
    assert pairs is not None
    share = 1.0 / board.count
    met = (board.held * share) @ pairs
    ours, theirs, their_gpu = board.expert[mine], board.expert, board.cluster.gpu_of_slot
    going = share[ours] * (met[their_gpu][:, ours] - met[gpu, ours])
    coming = share[theirs] * (met[gpu, theirs] - met[their_gpu, theirs])
    both = 2 * share[ours][:, np.newaxis] * share[theirs] * pairs[np.ix_(ours, theirs)]
    return np.asarray(board.saved() + going.T + coming - both)


@lru_cache(maxsize=8)
def _pairs(cluster: Cluster) -> tuple[IntArray, IntArray]:
    """All pairs of slots on one GPU, ``[pairs, 2]``, and their GPU, ``[pairs]``."""
    pairs = [
        np.stack(np.triu_indices(room, 1), axis=1) + first
        for first, room in zip(cluster.first_slot, cluster.room, strict=True)
    ]
    return np.concatenate(pairs), np.repeat(np.arange(cluster.gpus), [len(pair) for pair in pairs])
