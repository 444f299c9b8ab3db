"""StepCapture: which passes become steps, whatever the engine and its threads do."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from routeprof.capture.base import MAX_FAILURES
from routeprof.capture.rings import StepRing, TokenRing
from routeprof.capture.snapshot import fetch_tokens
from routeprof.capture.stash import STASH_ROWS
from routeprof.capture.steps import StepCapture
from routeprof.topology import PHASES
from tests.capture.oracle import (
    CPU,
    Call,
    Step,
    begin,
    call,
    capture_of,
    check,
    layers_of,
    random_step,
    rows_of,
    run,
    truth,
)

LAYERS = layers_of((8, 2), (6, 3))
SMALL, LARGE = 3, STASH_ROWS + 1
sizes = pytest.mark.parametrize("length", [SMALL, LARGE], ids=["stash", "direct"])


@pytest.fixture
def random():
    return np.random.default_rng(11)


@pytest.fixture
def capture() -> StepCapture:
    return capture_of(LAYERS)


def steps_of(random, number, length=SMALL, **facts) -> list[Step]:
    return [random_step(random, LAYERS, 1, length, **facts) for _ in range(number)]


def holds(capture: StepCapture, steps: list[Step]) -> None:
    """The capture holds these steps and nothing else."""
    layout = capture.counters.layout
    snapshot = capture.snapshot(0.0)
    assert snapshot is not None
    check(layout, rows_of(layout, None, snapshot), truth(layout, steps))
    assert not capture.failures.count, capture.failures.first


def elsewhere(work) -> None:
    """Run to the end on another thread."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# -- passes that fail


@sizes
def test_a_failed_pass_leaves_nothing(capture, random, length):
    one, failed, other = steps_of(random, 3, length)
    run(capture, one)
    begin(capture, failed)
    for step_call in failed.calls:
        call(capture, step_call)
    capture.end(failed=True)
    run(capture, other)
    assert capture.aborted == 1
    holds(capture, [one, other])


@sizes
def test_a_pass_that_fails_half_way_leaves_nothing(capture, random, length):
    one, failed, other = steps_of(random, 3, length)
    run(capture, one)
    begin(capture, failed)
    call(capture, failed.calls[0])
    call(capture, failed.calls[0])  # twice: the second call cannot go into the stash
    capture.end(failed=True)
    run(capture, other)
    holds(capture, [one, other])


def test_a_pass_that_begins_again_replaces_the_one_that_never_ended(capture, random):
    lost, kept = steps_of(random, 2)
    begin(capture, lost)
    call(capture, lost.calls[0])
    run(capture, kept)
    assert capture.aborted == 1
    holds(capture, [kept])


def test_the_end_of_an_outer_pass_after_its_inner_one_does_nothing(capture, random):
    outer, inner = steps_of(random, 2)
    begin(capture, outer)
    run(capture, inner)
    capture.end()
    holds(capture, [inner])


@sizes
def test_positions_and_requests_go_on_as_if_a_failed_pass_had_not_been(random, length):
    def rows(fail: bool):
        ring = TokenRing(capture_of(LAYERS).counters.layout, CPU, 4096)
        capture = capture_of(LAYERS, token_ring=ring)
        script = [(2, length, True), (2, 1, False), (2, 1, False), (3, length, True), (3, 1, False)]
        for batch, size, fresh in script:
            step = random_step(np.random.default_rng(5), LAYERS, batch, size)
            for failed in (True, False) if fail else (False,):
                capture.begin(batch, size, "decode", None, fresh=fresh)
                for one in step.calls:
                    call(capture, one)
                capture.end(failed=failed)
        return fetch_tokens(ring, [0, 0], 0)

    clean, retried = rows(False), rows(True)
    for name in ("row_step", "row_request", "row_position"):
        np.testing.assert_array_equal(getattr(clean, name), getattr(retried, name), name)
    for one, other in zip(clean.ids + clean.steps, retried.ids + retried.steps, strict=True):
        np.testing.assert_array_equal(one, other)


# -- layers outside any pass


def apart(capture: StepCapture, step: Step, order=("logits", "ids")) -> None:
    """Run a step's layers without its pass."""
    for one in step.calls:
        for name in order:
            if name == "logits":
                capture.logits(one.position, torch.from_numpy(one.logits))
            else:
                weights = torch.from_numpy(one.weights)
                capture.ids(one.position, torch.from_numpy(one.ids), weights)


@sizes
@pytest.mark.parametrize("order", [("logits", "ids"), ("ids", "logits")])
def test_layers_outside_a_pass_make_steps_of_their_own(capture, random, order, length):
    steps = steps_of(random, 4, length, phase="unknown")
    for step in steps:
        apart(capture, step, order)
    holds(capture, steps)


def test_layers_outside_a_pass_may_see_different_rows(capture, random):
    step = random_step(random, LAYERS, 1, 4, phase="unknown")
    step.calls[1] = random_step(random, LAYERS, 1, 7).calls[1]
    apart(capture, step)
    holds(capture, [step])


def test_a_pass_closes_the_steps_of_layers_outside_it(capture, random):
    (alone,), (inside,) = steps_of(random, 1, phase="unknown"), steps_of(random, 1)
    apart(capture, alone)
    run(capture, inside)
    holds(capture, [alone, inside])


def test_a_pass_on_another_thread_is_not_missed_for_layers_outside_a_pass(capture, random):
    (alone,), (inside,) = steps_of(random, 1, phase="unknown"), steps_of(random, 1)
    apart(capture, alone)
    elsewhere(lambda: run(capture, inside))
    assert capture.missed == 0
    holds(capture, [alone, inside])


def test_snapshots_beside_layers_outside_a_pass_lose_nothing(capture, random):
    step = random_step(random, LAYERS, 1, 2, phase="unknown")
    done = threading.Event()

    def drain():
        while not done.is_set():
            capture.snapshot(0.0)

    thread = threading.Thread(target=drain)
    thread.start()
    for _ in range(300):
        apart(capture, step)
    done.set()
    thread.join()
    totals = capture.snapshot(0.0).totals[0]
    assert not capture.failures.count, capture.failures.first
    calls = totals[:, capture.counters.layout.calls_column]
    assert calls.tolist() == [300, 300]
    assert totals[:, 1:9].sum(1).tolist() == [300 * 2 * 2, 300 * 2 * 3]


# -- other threads


def test_a_pass_beside_another_is_missed_as_a_whole(capture, random):
    (first, second), (beside,) = steps_of(random, 2), steps_of(random, 1)
    begin(capture, first)
    call(capture, first.calls[0])
    begun, over = threading.Event(), threading.Event()

    def other():
        begin(capture, beside)
        begun.set()
        over.wait()
        # The pass that was in the way is over: the rest of this one is still no step.
        for one in beside.calls:
            call(capture, one)
        capture.end()
        run(capture, second)

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    call(capture, first.calls[1])
    capture.end()
    over.set()
    thread.join()
    assert (capture.missed, capture.missed_tokens) == (1, beside.rows)
    holds(capture, [first, second])


def test_the_end_of_another_threads_pass_does_not_end_ours(capture, random):
    (step,) = steps_of(random, 1)
    begin(capture, step)
    call(capture, step.calls[0])
    elsewhere(capture.end)
    call(capture, step.calls[1])
    capture.end()
    holds(capture, [step])


# -- switching and tags


@sizes
def test_nothing_is_counted_while_switched_off(capture, random, length):
    on, off, again = steps_of(random, 3, length)
    run(capture, on)
    capture.switch(False)
    run(capture, off)
    apart(capture, off)
    capture.switch(True)
    run(capture, again)
    holds(capture, [on, again])


@sizes
@pytest.mark.parametrize("back", [False, True], ids=["off", "off and on"])
def test_a_running_step_ends_as_it_began(capture, random, length, back):
    running, later = steps_of(random, 2, length)
    begin(capture, running)
    call(capture, running.calls[0])
    capture.switch(False)
    if back:
        capture.switch(True)
    call(capture, running.calls[1])
    capture.end()
    run(capture, later)
    holds(capture, [running, later] if back else [running])


@sizes
def test_a_pass_that_runs_when_switched_on_is_left_out(capture, random, length):
    running, later = steps_of(random, 2, length)
    capture.switch(False)
    begin(capture, running)
    capture.switch(True)
    capture.end()
    run(capture, later)
    holds(capture, [later])


@sizes
def test_a_step_keeps_the_tag_it_began_with(capture, random, length):
    (running,), (later,) = steps_of(random, 1, length), steps_of(random, 1, length, tag=1)
    begin(capture, running)
    call(capture, running.calls[0])
    capture.set_base(len(PHASES))
    call(capture, running.calls[1])
    capture.end()
    run(capture, later)
    holds(capture, [running, later])


def test_switching_reaches_steps_inside_graphs(capture, random):
    ids = torch.zeros(4, 2, dtype=torch.int64)
    for on in (True, False, True):
        capture.switch(on)
        capture.counters.begin_traced("decode", 4, None)
        capture.counters.count(0, ids, None)
        weights = torch.full((4, 2), torch.nan if not on else 0.5)
        capture.counters.add_weights(0, weights, ids, None)
        capture.counters.end_traced()
    totals = capture.snapshot(0.0)
    assert totals.expected.tolist() == [[8, 2]]
    assert totals.totals[0, 0, 1] == 16
    weight = capture.counters.layout.gate_sections["weight"]
    assert totals.gate[0, 0][weight].tolist() == [8.0, *[0.0] * 7]


# -- snapshots beside a running step


def test_a_snapshot_waits_for_the_running_step(capture, random):
    step, later = steps_of(random, 2)
    begin(capture, step)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(capture.snapshot(60.0)))
    thread.start()
    while capture._wanted is None:
        threading.Event().wait(0.001)
    for one in step.calls:
        call(capture, one)
    capture.end()
    run(capture, later)
    thread.join()
    layout = capture.counters.layout
    check(layout, rows_of(layout, None, taken[0]), truth(layout, [step]))


def test_a_snapshot_that_waited_in_vain_changes_nothing(capture, random):
    (step,) = steps_of(random, 1)
    begin(capture, step)
    taken = []
    elsewhere(lambda: taken.append(capture.snapshot(0.0)))
    assert taken == [None]
    for one in step.calls:
        call(capture, one)
    capture.end()
    holds(capture, [step])


def test_a_forced_snapshot_gives_the_running_step_up(capture, random):
    done, running = steps_of(random, 2)
    run(capture, done)
    begin(capture, running)
    call(capture, running.calls[0])
    layout, taken = capture.counters.layout, []
    elsewhere(lambda: taken.append(capture.snapshot(0.0, force=True)))
    check(layout, rows_of(layout, None, taken[0]), truth(layout, [done]))
    assert capture.aborted == 1


def test_a_thread_does_not_wait_for_its_own_step(capture, random):
    (step,) = steps_of(random, 1)
    begin(capture, step)
    assert capture.snapshot(1e6) is None
    assert capture.snapshot(1e6, force=True) is not None


# -- our own failures


def test_a_failing_step_is_noted_and_does_not_reach_the_engine(capture, random):
    for _ in range(MAX_FAILURES):
        capture.begin(1, 4, "no such phase", None)
        capture.end()
    assert capture.failures.out(-1)
    assert capture.failures.first.startswith("ValueError: ")
    (step,) = steps_of(random, 1)
    run(capture, step)
    layout = capture.counters.layout
    check(layout, rows_of(layout, None, capture.snapshot(0.0)), truth(layout, [step]))


def test_notes_of_steps_stay_as_many_as_the_ring_holds(random):
    ring = StepRing(capture_of(LAYERS).counters.layout, CPU, 64)
    capture = capture_of(LAYERS, step_ring=ring)
    for step in steps_of(random, 200, 1):
        run(capture, step)
    assert len(capture.step_log) == 64
    snapshot = capture.snapshot(0.0)
    assert snapshot.noted == int(ring.cursor) == 200
    assert len(snapshot.steps) == 64


def test_a_call_with_another_top_k_is_counted_as_it_ran(capture, random):
    step = Step(1, 4, [Call(0, random.integers(0, 8, (4, 5)))])
    run(capture, step)
    assert capture.snapshot(0.0).totals[0, 0, 1:9].sum() == 20


def test_counters_follow_a_model_that_is_moved(random):
    capture = capture_of(LAYERS)
    steps = steps_of(random, 2)
    run(capture, steps[0])
    # The CPU under a second name: a device of another kind is not at hand everywhere.
    capture.follow(torch.device("cpu", 0))
    run(capture, steps[1])
    holds(capture, steps)


def test_a_move_takes_every_buffer():
    counters = capture_of(LAYERS).counters
    counters.move(torch.device("meta"))
    owners = (counters, counters.constants, counters.stash)
    buffers = [value for owner in owners for value in vars(owner).values()]
    devices = {value.device.type for value in buffers if isinstance(value, torch.Tensor)}
    assert devices == {"meta"}
