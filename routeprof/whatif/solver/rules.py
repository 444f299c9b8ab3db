"""Which changes of a placement are allowed.

Replicas of one expert stand on different GPUs unless a GPU has more slots than there are experts
for it, experts stay on their node, and no more experts change their GPU than the task allows.
"""

from __future__ import annotations

import numpy as np

from routeprof.metrics._arrays import IntArray
from routeprof.whatif.solver.board import Board, BoolArray


def may_go(board: Board, gpu: int, experts: IntArray) -> BoolArray:
    """GPUs on which experts of ``gpu`` would have room, ``[..., gpus]``."""
    node = board.cluster.node_of_gpu
    room = np.where(node == node[gpu], board.most, 0)
    return np.asarray(room > board.held.T[experts])


def may_come(board: Board, gpu: int) -> BoolArray:
    """Slots whose expert would have room on ``gpu``, ``[slots]``."""
    return np.asarray(board.held[gpu, board.expert] < board.most[gpu])


def may_swap(board: Board, gpu: int, mine: IntArray) -> BoolArray:
    """Exchanges of slots on ``gpu`` with all slots, ``[mine, slots]``."""
    ours, theirs, their_gpu = board.expert[mine], board.expert, board.cluster.gpu_of_slot
    allowed = may_go(board, gpu, ours)[:, their_gpu] & may_come(board, gpu)
    if board.crowded:
        allowed &= (board.held[gpu, ours] > board.fewest[gpu])[:, np.newaxis]
        allowed &= board.held[their_gpu, theirs] > board.fewest[their_gpu]
    if board.held_today is not None:
        enters, leaves = _moves(board, board.held_today)
        back = enters[gpu, theirs] - leaves[their_gpu, theirs]
        moves = enters[their_gpu][:, ours].T - leaves[gpu, ours][:, np.newaxis] + back
        allowed &= board.moved + moves <= board.task.moves
    return np.asarray(allowed)


def may_replace(board: Board, slots: IntArray, experts: IntArray) -> BoolArray:
    """Whether ``experts[i]`` may go into ``slots[i]`` in place of what is there, ``[changes]``."""
    gpu, old = board.cluster.gpu_of_slot[slots], board.expert[slots]
    allowed = (board.count[old] > 1) & (old != experts)
    allowed &= board.held[gpu, experts] < board.most[gpu]
    allowed &= board.held[gpu, old] > board.fewest[gpu]
    allowed &= board.home[experts] == board.home[old]
    if board.held_today is not None:
        enters, leaves = _moves(board, board.held_today)
        moves = enters[gpu, experts] - leaves[gpu, old]
        allowed &= board.moved + moves <= board.task.moves
    return np.asarray(allowed)


def _moves(board: Board, today: IntArray) -> tuple[IntArray, IntArray]:
    """Moves that coming to a GPU adds, and that leaving it takes back, ``[gpus, experts]``."""
    return (board.held >= today).astype(np.int64), (board.held > today).astype(np.int64)
