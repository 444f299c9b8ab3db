"""Recorded steps, and what a profile says of them counted by hand."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest

import routeprof
from routeprof.topology import Layer
from tests.capture.oracle import Step, random_step
from tests.capture.recordings import flush, recorder_of, serve

MOE = {"router": "softmax", "gate": "logits"}
LAYERS = (
    Layer(0, "layers.0", kind="dense"),
    Layer(1, "layers.1.mlp", experts=8, top_k=2, **MOE),
    Layer(2, "layers.2.mlp", experts=6, top_k=3, **MOE),
    Layer(3, "layers.3.mlp", unsupported="nobody knows"),
    Layer(4, "layers.4.mlp", experts=8, top_k=2, **MOE),
    Layer(5, "layers.5.mlp", experts=8, top_k=2, sees_all_tokens=False, **MOE),
)
SEEN = (LAYERS[1], LAYERS[2])
"""What runs; layers 4 and 5 have hooks that never do."""

KEYS = [
    ("prefill", None),
    ("decode", None),
    ("prefill", "code"),
    ("decode", "code"),
    ("mixed", "b"),
]


def some_steps(number: int = 40) -> list[Step]:
    random = np.random.default_rng(51)
    steps = []
    for count in range(number):
        phase, tag = KEYS[count % len(KEYS)]
        length = 1 if phase == "decode" else int(random.integers(2, 9))
        steps.append(random_step(random, SEEN, 3, length, phase=phase, tag=tag))
        if count % 7 == 0:
            steps[-1].calls.pop()  # layer 2 does not run in some steps
        if count % 11 == 0:
            steps[-1].calls[0].ids[0, 0] = -1
    return steps


def record(directory, steps, *, level="windows", layers=LAYERS, every=9, **facts):
    recorder, capture = recorder_of(directory, layers, level=level, **facts)
    for count, step in enumerate(steps):
        if not step.tag:
            serve(capture, step)
        else:
            with recorder.tag(step.tag):
                serve(capture, step)
        if count % every == every - 1:
            flush(recorder)
    recorder.close()
    return routeprof.load(directory)


# -- by hand


def of(steps, phase="all", tag="all") -> list[Step]:
    return [
        step
        for step in steps
        if phase in ("all", step.phase) and tag in ("all", step.tag or "untagged")
    ]


def counts_of(steps, position) -> tuple[np.ndarray, np.ndarray]:
    """Assignments [steps, experts] and tokens [steps] of the steps in which the layer ran."""
    experts = SEEN[position].experts
    calls = [one for step in steps for one in step.calls if one.position == position]
    counts = [[int((one.ids == expert).sum()) for expert in range(experts)] for one in calls]
    tokens = np.array([len(one.ids) for one in calls], dtype=int)
    return np.array(counts, dtype=int).reshape(len(calls), experts), tokens


def slots(factor, tokens, layer) -> np.ndarray:
    factor = Fraction(factor).limit_denominator(1000)
    capacities = [ceil(factor * int(count) * layer.top_k / layer.experts) for count in tokens]
    return np.array(capacities, dtype=int)


def quantile(ratios, weights, q) -> float:
    """Smallest ratio at which the tokens of all steps up to it are q of all."""
    order = np.argsort(ratios)
    reached = np.cumsum(weights[order]) >= q * weights.sum() - 1e-9
    return float(ratios[order][np.argmax(reached)])


def assert_quantiles(table, steps, *, exact: bool) -> None:
    for row in table[table["layer"].isin([1, 2])].itertuples():
        counts, tokens = counts_of(of(steps, row.phase, row.tag), row.layer - 1)
        ratios = counts.max(1) / counts.mean(1)
        rel = 1e-12 if exact else 0.011
        assert row.step_imbalance_p50 == pytest.approx(quantile(ratios, tokens, 0.5), rel=rel)
        assert row.step_imbalance_p95 == pytest.approx(quantile(ratios, tokens, 0.95), rel=rel)
        assert row.step_imbalance_max == pytest.approx(ratios.max(), rel=1e-12)
