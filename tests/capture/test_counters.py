"""Three ways into the same sums, each against counting by hand."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routeprof.capture import steps as steps_module
from routeprof.capture.counters import MAX_PENDING_STEPS
from routeprof.capture.layout import Layout
from routeprof.capture.stash import STASH_ROWS
from routeprof.topology import PHASES, Layer
from tests.capture.oracle import (
    Call,
    Step,
    capture_of,
    check,
    layers_of,
    random_step,
    run,
    run_traced,
    truth,
    windows_of,
)

GATES = [
    ("softmax", "logits"),
    ("sigmoid", "logits"),
    ("sqrtsoftplus", "logits"),
    ("softmax", "probabilities"),
    ("hash", "none"),
]


@st.composite
def some_layers(draw) -> tuple[Layer, ...]:
    layers = []
    for place in range(draw(st.integers(1, 4))):
        experts = draw(st.integers(1, 9))
        router, gate = draw(st.sampled_from(GATES))
        layers.append(
            Layer(
                index=3 * place + 1,
                name=f"layers.{place}",
                experts=experts,
                top_k=draw(st.integers(1, min(experts, 4))),
                router=router,
                gate=gate,
            )
        )
    return tuple(layers)


@st.composite
def some_steps(draw, layers: tuple[Layer, ...]) -> list[Step]:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weighted = [draw(st.booleans()) for _ in layers]
    dtype = draw(st.sampled_from([np.int16, np.int32, np.int64]))
    return [
        _some_step(draw, random, layers, weighted, dtype) for _ in range(draw(st.integers(1, 6)))
    ]


def _some_step(draw, random, layers, weighted, dtype) -> Step:
    batch, length = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    mask = draw(st.sampled_from(["none", "random", "all padding"]))
    valid = None
    if mask != "none":
        valid = (random.random(batch * length) < (0.6 if mask == "random" else 0)).astype(int)
    phase, tag = draw(st.sampled_from(PHASES[:3])), draw(st.integers(0, 2))
    step = Step(batch, length, phase=phase, tag=tag, valid=valid)
    for position, layer in enumerate(layers):
        kind = draw(st.sampled_from(["once", "once", "never", "twice", "odd rows"]))
        rows = step.rows + 1 if kind == "odd rows" else step.rows
        for _ in range({"never": 0, "twice": 2}.get(kind, 1)):
            step.calls.append(
                _some_call(random, position, layer, step.real(rows), weighted[position], dtype)
            )
    return step


def _some_call(random, position, layer, real, weighted, dtype) -> Call:
    rows = len(real)
    ids = random.integers(-2, layer.experts + 2, (rows, layer.top_k)).astype(dtype)
    wild = random.random(ids.shape) < 0.05
    ids[wild] = random.choice([np.iinfo(dtype).min, np.iinfo(dtype).max, -1, layer.experts])
    logits = None
    if layer.gate != "none":
        logits = random.normal(size=(rows, layer.experts)).astype(np.float32)
    if layer.gate == "probabilities":
        logits = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    weights = random.uniform(0.1, 1, ids.shape).astype(np.float32) if weighted else None
    for padded in (logits, weights):
        if padded is not None:
            padded[~real] = np.nan  # padding may hold anything
    return Call(position, ids, logits, weights)


def direct():
    """No step is small enough for the stash."""
    return patch.object(steps_module, "STASH_ROWS", -1)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
@pytest.mark.parametrize("way", ["stash", "direct", "traced"])
def test_sums_are_what_counting_by_hand_gives(way, data):
    layers = data.draw(some_layers())
    steps = data.draw(some_steps(layers))
    cuts = data.draw(st.sets(st.integers(0, len(steps) - 1)))
    capture = capture_of(layers)
    if way == "direct":
        with direct():
            rows = windows_of(capture, steps, cuts=cuts)
    else:
        runner = run if way == "stash" else run_traced
        rows = windows_of(capture, steps, runner, cuts)
    check(capture.counters.layout, rows, truth(capture.counters.layout, steps))
    assert not capture.failures.count


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_assignment_is_counted_or_invalid(data):
    layers = data.draw(some_layers())
    capture = capture_of(layers)
    for row in windows_of(capture, data.draw(some_steps(layers))):
        if row["calls"]:
            top_k = next(layer.top_k for layer in layers if layer.index == row["layer"])
            assert row["counts"].sum() + row["invalid"] == row["tokens"] * top_k


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_stash_and_the_direct_way_agree_to_the_bit(data):
    layers = data.draw(some_layers())
    steps = data.draw(some_steps(layers))
    one, other = capture_of(layers), capture_of(layers)
    windows_of(one, steps)
    with direct():
        windows_of(other, steps)
    for name in ("totals", "imbalance_max", "expected"):
        assert torch.equal(getattr(one.counters, name), getattr(other.counters, name)), name


def test_many_small_steps_are_folded_on_the_way():
    random, layers = np.random.default_rng(0), layers_of((8, 2), (4, 1))
    capture = capture_of(layers)
    steps = [random_step(random, layers, 1, 1) for _ in range(3 * MAX_PENDING_STEPS + 5)]
    steps += [random_step(random, layers, 1, STASH_ROWS // 2 + 1) for _ in range(3)]
    steps += [random_step(random, layers, 1, STASH_ROWS + 1), random_step(random, layers, 1, 1)]
    rows = windows_of(capture, steps)
    check(capture.counters.layout, rows, truth(capture.counters.layout, steps))


def test_steps_without_rows_leave_nothing_behind():
    random, layers = np.random.default_rng(1), layers_of((8, 2))
    capture = capture_of(layers)
    steps = [random_step(random, layers, 0, 5) for _ in range(3)]
    rows = windows_of(capture, steps)
    assert rows[0]["calls"] == 3
    assert rows[0]["tokens"] == 0
    more = [random_step(random, layers, 1, 2)]
    before = capture.snapshot(0.0)
    run(capture, more[0])
    after = capture.snapshot(0.0)
    assert int((after.totals - before.totals)[0, 0, capture.counters.layout.calls_column]) == 1


def test_a_window_without_steps_has_no_rows():
    layers = layers_of((8, 2))
    capture = capture_of(layers)
    assert windows_of(capture, []) == []
    step = random_step(np.random.default_rng(2), layers)
    assert len(windows_of(capture, [step])) == 1
    rows = windows_of(capture, [])
    assert rows == []


def test_without_gate_outputs_nothing_is_kept_of_them():
    layers = layers_of((8, 2))
    capture = capture_of(layers, gate=False)
    random = np.random.default_rng(3)
    step = Step(1, 4, [Call(0, random.integers(0, 8, (4, 2)), None, None)])
    (row,) = windows_of(capture, [step])
    assert row["probability_mass"] is row["gate_rows"] is row["weight_sum"] is None


def test_weights_that_were_not_seen_make_the_sum_unknown():
    layers, random = layers_of((8, 2)), np.random.default_rng(4)
    for rows in (4, STASH_ROWS + 1):
        capture = capture_of(layers)
        seen, unseen = (random_step(random, layers, 1, rows) for _ in range(2))
        unseen.calls[0].weights = None
        (row,) = windows_of(capture, [seen, unseen])
        assert row["weight_sum"] is None
        assert row["counts"].sum() == 4 * rows


def test_capacities_are_exact_fractions():
    # 1.1 · 1000 · 1 / 10 is 110 slots; in floating point it is 110.00000000000001.
    layers = layers_of((10, 1))
    capture = capture_of(layers)
    ids = np.repeat(np.arange(10), 100)[:, None]
    (row,) = windows_of(capture, [Step(1, 1000, [Call(0, ids)])])
    factors = capture.counters.layout.capacity_factors
    assert dict(zip(factors, row["capacity_slots"].tolist(), strict=True))[1.1] == 1100


def test_layout_sections_do_not_overlap():
    layout = Layout(layers_of((8, 2), (60, 6)))
    for sections, width in (
        (layout.sections, layout.int_width),
        (layout.gate_sections, layout.gate_width),
    ):
        covered = [column for part in sections.values() for column in range(width)[part]]
        assert covered == list(range(width))
