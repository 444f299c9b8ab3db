"""The drain thread leaves the engine its cores."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from routeprof.capture.threads import stay_single

TASKS = Path("/proc/self/task")


def on_a_thread(work: Callable[[], int]) -> int:
    """What ``work`` returns on a thread of its own."""
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.skipif(not TASKS.exists(), reason="counts threads through /proc")
def test_operators_of_a_single_thread_start_no_pool():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    big = torch.ones(2_000_000)

    def pool() -> int:
        before = len(list(TASKS.iterdir()))
        big.add(1)
        return len(list(TASKS.iterdir())) - before

    def single() -> int:
        stay_single()
        return pool()

    try:
        pool()  # this thread's own, so that nobody else's is taken for it
        assert on_a_thread(single) == 0
        assert on_a_thread(pool) == 1  # what happens without
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
