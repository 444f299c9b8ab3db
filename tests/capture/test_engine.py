"""EngineCapture: layers that count through the operator, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from routeprof.capture.counters import RoutingCounters
from routeprof.capture.engine import EngineCapture
from routeprof.capture.layout import Layout
from routeprof.capture.rings import StepRing, TokenRing
from routeprof.capture.snapshot import fetch_steps, fetch_tokens
from routeprof.topology import PHASES
from tests.capture.oracle import (
    CPU,
    Step,
    check,
    layers_of,
    random_step,
    rows_of,
    truth,
    windows_of,
)

LAYERS = layers_of((8, 2), (5, 3), (160, 8))


@pytest.fixture
def random():
    return np.random.default_rng(7)


def engine_of(layers=LAYERS, *, waits=True, gate=True, **rings) -> EngineCapture:
    counters = RoutingCounters(Layout(layers), CPU, gate=gate, **rings)
    return EngineCapture(counters, waits=waits)


@pytest.fixture(params=[True, False], ids=["host", "device"])
def engine(request) -> EngineCapture:
    """Both ways of counting: real rows cut out, and all rows masked as a GPU must."""
    return engine_of(waits=request.param)


def padded(values, before: int, after: int):
    """Rows of somebody else before, and garbage of a padded bucket behind."""
    if values is None:
        return None
    tensor = torch.from_numpy(np.asarray(values))
    filler = 3 if tensor.dtype == torch.int64 else torch.nan
    head = torch.full((before, tensor.shape[1]), filler, dtype=tensor.dtype)
    tail = torch.full((after, tensor.shape[1]), filler, dtype=tensor.dtype)
    return torch.cat([head, tensor, tail])


def call_layers(engine: EngineCapture, step: Step, before=0, after=0) -> None:
    for one in step.calls:
        values = (one.ids, one.logits, one.weights)
        ids, logits, weights = (padded(value, before, after) for value in values)
        engine.count(one.position, ids, logits, weights, before)


def runner(before=0, after=0):
    def run(engine: EngineCapture, step: Step) -> None:
        engine.set_base(step.tag * len(PHASES))
        engine.begin_pass(step.rows, step.phase, 1)
        call_layers(engine, step, before, after)
        engine.end_pass()

    return run


def steps_of(random, layers=LAYERS) -> list[Step]:
    """Small steps that share a stash, some that do not fit in it, several phases and tags."""
    sizes = [1, 7, 100, 3, 200, 300, 5, 256, 257, 2]
    phases = ["prefill", "decode", "mixed"]
    return [
        random_step(random, layers, 1, size, phase=phases[place % 3], tag=place // 7)
        for place, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 13), (4, 9)])
def test_only_real_rows_count(engine, random, before, after):
    steps = steps_of(random)
    rows = windows_of(engine, steps, runner(before, after), cuts=(2, 5))
    check(engine.counters.layout, rows, truth(engine.counters.layout, steps))


def test_invalid_ids_are_tallied(engine, random):
    step = random_step(random, LAYERS, 1, 9)
    for one in step.calls:
        one.ids[::3, 0] = -1
        one.ids[1::3, 0] = LAYERS[one.position].experts
    rows = windows_of(engine, [step], runner(2, 2))
    check(engine.counters.layout, rows, truth(engine.counters.layout, [step]))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_ids_of_any_width(engine, random, dtype):
    step = random_step(random, LAYERS, 1, 9)
    engine.begin_pass(9, "decode")
    for one in step.calls:
        engine.count(one.position, torch.from_numpy(one.ids).to(dtype))
    engine.end_pass()
    found = rows_of(engine.counters.layout, None, engine.snapshot(0.0))
    for row, one in zip(found, step.calls, strict=True):
        want = np.bincount(one.ids.reshape(-1), minlength=LAYERS[one.position].experts)
        np.testing.assert_array_equal(row["counts"], want)


def test_a_later_part_of_the_rows(engine, random):
    """Sequence parallelism: this rank sees rows 6 to 11 of a step that has 9 real ones."""
    ids = random.integers(0, 8, (6, 2))
    engine.begin_pass(9, "decode")
    engine.count(0, torch.from_numpy(ids), offset=-6)
    engine.end_pass()
    row = rows_of(engine.counters.layout, None, engine.snapshot(0.0))[0]
    np.testing.assert_array_equal(row["counts"], np.bincount(ids[:3].reshape(-1), minlength=8))
    assert row["tokens"] == 3


def test_a_part_that_holds_no_real_row(engine):
    engine.begin_pass(5, "decode")
    engine.count(0, torch.zeros(6, 2, dtype=torch.int64), offset=-6)
    engine.end_pass()
    row = rows_of(engine.counters.layout, None, engine.snapshot(0.0))[0]
    assert (row["calls"], row["tokens"], row["counts"].sum()) == (1, 0, 0)


def test_outside_a_pass_nothing_counts(engine, random):
    """Warm-up, profiling, dummy and capture runs."""
    step = random_step(random, LAYERS, 1, 6)
    call_layers(engine, step)
    rows = windows_of(engine, [step], runner(0, 3))
    call_layers(engine, step)
    rows += rows_of(engine.counters.layout, engine.snapshot(0.0), engine.snapshot(0.0))
    check(engine.counters.layout, rows, truth(engine.counters.layout, [step]))


def test_a_failed_pass_leaves_nothing(engine, random):
    kept, lost = random_step(random, LAYERS, 1, 6), random_step(random, LAYERS, 1, 6)
    runner()(engine, kept)
    engine.begin_pass(6, "decode")
    call_layers(engine, lost)
    engine.end_pass(failed=True)
    rows = windows_of(engine, [kept], runner())
    check(engine.counters.layout, rows, truth(engine.counters.layout, [kept, kept]))
    assert engine.aborted == 1


def test_nothing_counts_while_switched_off(engine, random):
    steps = [random_step(random, LAYERS, 1, 6) for _ in range(4)]
    for place, step in enumerate(steps):
        engine.switch(place % 2 == 0)
        runner(0, 2)(engine, step)
    rows = rows_of(engine.counters.layout, None, engine.snapshot(0.0))
    check(engine.counters.layout, rows, truth(engine.counters.layout, steps[::2]))


def test_a_running_pass_ends_as_it_began(engine, random):
    step = random_step(random, LAYERS, 1, 6)
    engine.begin_pass(6, "decode")
    engine.switch(False)
    call_layers(engine, step)
    engine.end_pass()
    rows = rows_of(engine.counters.layout, None, engine.snapshot(0.0))
    check(engine.counters.layout, rows, truth(engine.counters.layout, [step]))


def test_a_rank_that_sees_a_part_expects_nothing(random):
    counters = RoutingCounters(Layout(LAYERS), CPU, gate=False)
    engine = EngineCapture(counters, expects=False)
    runner()(engine, random_step(random, LAYERS, 1, 6))
    assert engine.snapshot(0.0).expected.tolist() == [[0, 1]]


def test_an_error_of_ours_stays_ours(engine):
    engine.begin_pass(3, "decode")
    engine.count(0, torch.zeros(3, dtype=torch.int64))  # one dimension too few
    engine.end_pass()
    assert engine.failures.by_layer == {0: 1}


def test_tokens_and_what_they_belong_to(random):
    for waits in (True, False):
        layout = Layout(LAYERS)
        rings = {"step_ring": StepRing(layout, CPU, 16), "token_ring": TokenRing(layout, CPU, 64)}
        engine = engine_of(waits=waits, **rings)
        steps = [random_step(random, LAYERS, 1, rows) for rows in (5, 3)]
        for number, step in enumerate(steps):
            engine.begin_pass(step.rows, "decode", 2)
            engine.note_rows(np.arange(step.rows) % 2, np.arange(step.rows) + 10 * number)
            call_layers(engine, step, 1, 4)
            engine.end_pass()
        engine.snapshot(0.0)
        detail = fetch_tokens(engine.counters.token_ring, [0] * len(LAYERS), 0)
        for position, layer in enumerate(LAYERS):
            ids = detail.ids[position]
            want = np.concatenate([step.calls[position].ids for step in steps])
            np.testing.assert_array_equal(ids[ids[:, 0] != -2], want)
            assert ids.shape[1] == layer.top_k
        assert detail.row_position.tolist() == [0, 1, 2, 3, 4, 10, 11, 12]
        assert detail.row_step.tolist() == [0] * 5 + [1] * 3
        assert fetch_steps(engine.counters.step_ring, 0).rows.shape[0] == 2


def test_compiled_layers_count_in_every_pass(engine, random):
    """The closure is traced once; the operator runs each time."""
    compiler = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=compiler, dynamic=True)
    def model(hidden, ids, logits, weights):
        engine.count(0, ids, logits, weights)
        return hidden + 1

    steps = [random_step(random, LAYERS[:1], 1, rows) for rows in (4, 4, 9, 300, 5)]
    for step in steps:
        values = (step.calls[0].ids, step.calls[0].logits, step.calls[0].weights)
        ids, logits, weights = (padded(value, 0, 3) for value in values)
        engine.begin_pass(step.rows, "decode")
        model(torch.ones(2), ids, logits, weights)
        engine.end_pass()
    row = rows_of(engine.counters.layout, None, engine.snapshot(0.0))[0]
    assert not engine.failures.count, engine.failures.first
    all_ids = np.concatenate([step.calls[0].ids.reshape(-1) for step in steps])
    np.testing.assert_array_equal(row["counts"], np.bincount(all_ids, minlength=8))
    assert row["tokens"] == row["gate_rows"] == sum(step.rows for step in steps)
    assert compiler.frame_count < len(steps)


def test_on_a_device_nothing_waits():
    """On fake tensors every look at a value raises."""
    with FakeTensorMode():
        engine = engine_of(waits=False)
        engine.begin_pass(5, "decode")
        for position, layer in enumerate(LAYERS):
            ids = torch.zeros(8, layer.top_k, dtype=torch.int32)
            logits = torch.zeros(8, layer.experts)
            engine.take(position, ids, logits, torch.zeros(8, layer.top_k), 0)
        engine.end_pass()
        assert not engine.failures.count, engine.failures.first
