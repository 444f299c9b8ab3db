"""What a change is said to lead to is what it leads to."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from routeprof.whatif.cluster import Cluster
from routeprof.whatif.solver.board import Board, Task
from routeprof.whatif.solver.moves import best_pair_swap, best_replacement, best_swap, mildest_swap
from routeprof.whatif.solver.search import put_in_order


@given(seed=st.integers(0, 2**20), traffic=st.booleans(), today=st.booleans())
def test_scores_are_those_of_the_board_after_the_change(seed, traffic, today):
    random = np.random.default_rng(seed)
    capacity = random.integers(1, 4, 5)
    experts = int(random.integers(max(capacity), capacity.sum() + 1))
    cluster = Cluster(tuple(capacity.tolist()), tuple(random.uniform(0.5, 2, 5).tolist()))
    spare = random.integers(0, experts, cluster.slots - experts)
    expert = random.permutation(np.concatenate((np.arange(experts), spare)))
    pairs = random.random((experts, experts))
    pairs = (pairs + pairs.T) * (1 - np.eye(experts))
    task = Task(
        random.random((int(random.integers(1, 4)), experts)),
        cluster,
        today=random.permutation(expert) if today else None,
        moves=100,
        together=pairs if traffic else None,
    )
    board = Board(task, expert)
    put_in_order(board)
    changes = [best_swap, best_pair_swap]
    if not traffic:
        changes += [best_replacement, lambda board, gpu: mildest_swap(board, gpu)]
    for gpu in range(5):
        for kind in changes:
            change = kind(board, gpu)
            if change is None:
                continue
            change.apply()
            np.testing.assert_allclose(board.score, change.score)
            fresh = Board(task, board.expert)
            np.testing.assert_allclose(board.time, fresh.time)
            np.testing.assert_array_equal(board.held, fresh.held)
            assert board.held.max() == 1
            assert board.count.min() >= 1
