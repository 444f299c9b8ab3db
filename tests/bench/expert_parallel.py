"""Predicted and measured gain of a placement: part of ``python -m tests.bench placement``.

A MoE layer with skewed routing runs on 2 and 4 real processes (gloo, one thread each) with its
experts in order and placed by routeprof. The loads are counted, the experts' processor time is
measured, so that more processes than cores do not matter; medians of several runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from routeprof.whatif.cluster import Cluster
from routeprof.whatif.judge import judge
from routeprof.whatif.placement import place
from tests.bench.kept import Figure, figure
from tests.whatif.expert_parallel import Weights, Work, run

EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS, STEPS, RUNS = 16, 2, 256, 512, 1024, 8, 5


def measure() -> Iterator[Figure]:
    """The slowest process's load and time, in order ÷ placed."""
    torch.manual_seed(0)
    favour = torch.randn(HIDDEN)
    router = torch.randn(EXPERTS, HIDDEN) / HIDDEN**0.5
    router += torch.linspace(0.15, -0.15, EXPERTS)[:, None] * favour
    weights = Weights(
        router,
        torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5,
        torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5,
        TOP_K,
    )
    hidden = torch.randn(STEPS, TOKENS, HIDDEN) + 0.3 * favour
    chosen = torch.topk(hidden @ router.T, TOP_K).indices.reshape(STEPS, -1)
    loads = np.stack([np.bincount(ids, minlength=EXPERTS) for ids in chosen.numpy()])[:, None]
    for processes in (2, 4):
        slots = place(loads, Cluster.even(processes, EXPERTS + processes)).slots[0]
        predicted = _slowest(np.arange(EXPERTS), loads, processes) / _slowest(
            slots, loads, processes
        )
        before, after = _runs(weights, hidden, [np.arange(EXPERTS), slots], processes)
        counted = before[0][0] / after[0][0]
        # Of placements in turns: neighbours make a ratio.
        times = [old[1] / new[1] for old, new in zip(before, after, strict=True)]
        row = f"{processes} processes"
        options: dict[str, Any] = {"better": "higher", "digits": 4, "exact": True}
        yield figure("gain", row, "load, predicted", predicted, **options)
        yield figure("gain", row, "load, counted", counted, **options)
        yield figure("gain", row, "time, measured", times, better="higher")


def _slowest(slots: np.ndarray, loads: np.ndarray, processes: int) -> float:
    """Load of the slowest rank, added up over the steps; replicas share evenly."""
    cluster = Cluster.even(processes, len(slots))
    return float(judge(slots[None], loads, cluster).slowest[0]) * len(loads)


def _runs(
    weights: Weights, hidden: torch.Tensor, placements: list[np.ndarray], processes: int
) -> list[list[tuple[int, float]]]:
    """For each placement and run: Σ over steps of the slowest load, and the slowest's seconds."""
    rows = [list(torch.arange(TOKENS).chunk(processes)) for _ in hidden]
    steps = [[step[own] for own in mine] for step, mine in zip(hidden, rows, strict=True)]
    works = [Work(weights, steps, rows, slots, 1) for _ in range(RUNS) for slots in placements]
    seen = [
        (
            int(np.array([one.assignments for one in done]).max(axis=0).sum()),
            max(one.seconds for one in done),
        )
        for done in run(works, processes)
    ]
    return [seen[number :: len(placements)] for number in range(len(placements))]
