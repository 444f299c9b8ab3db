"""Work on many parts, a few at a time, in this process or by an executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import replace
from typing import TypeVar

from routeprof.recording.reader import Part

T = TypeVar("T")
R = TypeVar("R")

BATCH = 16
"""Parts of one task, and sums that are merged at once."""


def found_anywhere(parts: Sequence[Part], executor: Executor | None) -> list[Part]:
    """The parts by paths that hold in any directory, where others are to read them."""
    if executor is None:
        return list(parts)
    return [replace(part, path=part.path.absolute()) for part in parts]


def batches(parts: Sequence[T], executor: Executor | None) -> list[Sequence[T]]:
    """Neighbouring parts: few enough for their sums to be in memory, and for all to have work."""
    size = BATCH if executor is None else min(BATCH, len(parts) // (2 * _workers(executor)) + 1)
    return [parts[start : start + size] for start in range(0, len(parts), size)]


def spread(
    tasks: Sequence[T], call: Callable[[T], R], executor: Executor | None
) -> Iterator[tuple[T, R]]:
    """Each task with what ``call`` says of it, in the order in which they get done.

    No more tasks are under way than keep the workers busy, and no result is kept.

    Args:
        executor: any ``concurrent.futures`` executor; where it breaks, the rest is done here.
    """
    if executor is None or len(tasks) < 2:
        yield from ((task, call(task)) for task in tasks)
        return
    room = 2 * _workers(executor) + 2
    waiting, running = list(reversed(tasks)), dict[Future[R], T]()
    try:
        while waiting or running:
            while waiting and len(running) < room:
                future = executor.submit(call, waiting[-1])
                running[future] = waiting.pop()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                result = future.result()
                yield running.pop(future), result
    except BrokenExecutor:
        for task in (*running.values(), *reversed(waiting)):
            yield task, call(task)
    finally:
        for future in running:
            future.cancel()


def _workers(executor: Executor) -> int:
    return int(getattr(executor, "_max_workers", os.cpu_count() or 1))
