"""Rings: what is overwritten is told, what is told is right, and nothing comes twice."""

from __future__ import annotations

import numpy as np
import pytest

import routeprof
from routeprof.capture.counters import MAX_PENDING_STEPS
from routeprof.topology import PHASES
from tests.capture.oracle import layers_of, random_step
from tests.capture.recordings import flush, recorder_of, same_loads, serve

LAYERS = layers_of((8, 2), (6, 3))


@pytest.fixture
def random():
    return np.random.default_rng(21)


def problems(profile) -> dict:
    return profile.files.ranks[0].state.problems


def test_steps_come_whole_and_in_order(tmp_path, random):
    recorder, capture = recorder_of(tmp_path / "r", LAYERS, level="steps")
    steps = []
    for number in range(200):
        steps.append(random_step(random, LAYERS, 1 + number % 3, 1, phase=PHASES[number % 2]))
        serve(capture, steps[-1])
        if number % 37 == 0:
            flush(recorder)
    recorder.close()
    table = routeprof.load(tmp_path / "r").step_counts()
    assert table.step.tolist() == sorted([*range(200)] * 2)
    assert table.layer.tolist() == [0, 10] * 200
    for entry, (step, layer) in enumerate(zip(table.step, table.layer, strict=True)):
        one = steps[step].calls[layer // 10]
        assert table.requests[entry] == steps[step].batch
        assert table.phase[entry] == steps[step].phase
        np.testing.assert_array_equal(
            table.counts[entry], np.bincount(one.ids.ravel(), minlength=8)
        )
    assert (np.diff(table.time) >= 0).all()


def test_overwritten_steps_are_reported_and_sums_stay_exact(tmp_path, random):
    ring = 2 * MAX_PENDING_STEPS
    recorder, capture = recorder_of(tmp_path / "r", LAYERS, level="steps", ring=ring)
    steps = [random_step(random, LAYERS, 1, 1) for _ in range(ring + 50)]
    for step in steps:
        serve(capture, step)
    recorder.close()
    profile = routeprof.load(tmp_path / "r")
    assert problems(profile)["lost_step_rows"] == 50
    assert "lost-step-rows" in {finding.code for finding in profile.findings()}
    same_loads(profile, LAYERS, steps)
    table = profile.step_counts()
    assert table.step.tolist() == sorted([*range(50, ring + 50)] * 2)
    for step, layer, counts in zip(table.step, table.layer, table.counts, strict=True):
        ids = steps[step].calls[layer // 10].ids.ravel()
        np.testing.assert_array_equal(counts, np.bincount(ids, minlength=8))


def test_steps_that_end_while_a_window_is_written_come_with_the_next(tmp_path, random):
    recorder, capture = recorder_of(tmp_path / "r", LAYERS, level="steps")
    write, later = recorder.writer.write, []

    def busy(kind, schema, columns):
        write(kind, schema, columns)
        if kind == "part" and not later:  # the engine goes on, and folds
            for _ in range(MAX_PENDING_STEPS + 9):
                later.append(random_step(random, LAYERS, 1, 1))
                serve(capture, later[-1])

    recorder.writer.write = busy
    first = random_step(random, LAYERS, 1, 1)
    serve(capture, first)
    flush(recorder)
    recorder.close()
    profile = routeprof.load(tmp_path / "r")
    assert "write_failures" not in problems(profile)
    same_loads(profile, LAYERS, [first, *later])
    assert profile.step_counts().step.tolist() == sorted([*range(len(later) + 1)] * 2)


def test_notes_do_not_pile_up(tmp_path, random):
    recorder, capture = recorder_of(tmp_path / "r", LAYERS, level="steps", ring=64)
    step = random_step(random, LAYERS, 1, 1)
    for number in range(500):
        serve(capture, step)
        if number % 100 == 0:
            flush(recorder)
    assert len(recorder.streams[0].notes) <= 64
    recorder.close()


def tokens_of(steps, position):
    return np.concatenate([step.calls[position].ids for step in steps])


def test_tokens_come_whole_and_in_order(tmp_path, random):
    recorder, capture = recorder_of(tmp_path / "r", LAYERS, level="tokens")
    steps = []
    for number in range(30):
        prompt = number % 10 == 0
        steps.append(random_step(random, LAYERS, 3, 5 if prompt else 1))
        serve(capture, steps[-1], fresh=prompt)
        if number % 7 == 0:
            flush(recorder)
    recorder.close()
    profile = routeprof.load(tmp_path / "r")
    for position, layer in enumerate(LAYERS):
        table = profile.tokens(layer.index)
        np.testing.assert_array_equal(table.ids, tokens_of(steps, position))
        assert table.step.tolist() == [n for n, step in enumerate(steps) for _ in range(step.rows)]
        places = [
            (3 * (number // 10) + request, place if number % 10 == 0 else 4 + number % 10)
            for number, step in enumerate(steps)
            for request in range(3)
            for place in range(step.length)
        ]
        assert list(zip(table.request, table.position, strict=True)) == places


def test_padding_and_invalid_ids_at_level_tokens(tmp_path, random):
    recorder, capture = recorder_of(tmp_path / "r", LAYERS, level="tokens")
    step = random_step(random, LAYERS, 2, 3, valid=np.array([0, 1, 1, 1, 1, 1]))
    step.calls[0].ids[2, 0] = 99
    serve(capture, step)
    recorder.close()
    table = routeprof.load(tmp_path / "r").tokens(0)
    expected = step.calls[0].ids[1:].copy()
    expected[expected == 99] = -1
    np.testing.assert_array_equal(table.ids, expected)
    assert table.request.tolist() == [0, 0, 1, 1, 1]
    assert table.position.tolist() == [0, 1, 0, 1, 2]


def test_overwritten_tokens_are_reported_once_and_never_doubled(tmp_path, random):
    recorder, capture = recorder_of(tmp_path / "r", LAYERS, level="tokens", token_ring=50)
    steps = [random_step(random, LAYERS, 1, 1) for _ in range(200)]
    for number, step in enumerate(steps):
        serve(capture, step)
        if number in (119, 129):  # 70 rows too many, then none
            flush(recorder)
    recorder.close()  # 20 too many
    profile = routeprof.load(tmp_path / "r")
    assert problems(profile)["lost_token_rows"] == 90 * len(LAYERS)
    same_loads(profile, LAYERS, steps)
    kept = [*range(70, 130), *range(150, 200)]
    for position, layer in enumerate(LAYERS):
        table = profile.tokens(layer.index)
        assert table.step.tolist() == kept
        np.testing.assert_array_equal(table.ids, tokens_of(steps, position)[kept])
        # Every step has one request and one row: both are known where the row was kept.
        assert (table.request == 0).all()
    import pyarrow.parquet as pq

    files = sorted((tmp_path / "r/rank-00000").glob("rows-*.parquet"))
    rows = [step for file in files for step in pq.read_table(file)["step"].to_pylist()]
    assert rows == kept


def test_a_pass_longer_than_the_ring_keeps_its_end(tmp_path, random):
    recorder, capture = recorder_of(tmp_path / "r", LAYERS, level="tokens", token_ring=50)
    step = random_step(random, LAYERS, 1, 80)
    serve(capture, step)
    recorder.close()
    profile = routeprof.load(tmp_path / "r")
    same_loads(profile, LAYERS, [step])
    np.testing.assert_array_equal(profile.tokens(0).ids, step.calls[0].ids[30:])
    assert problems(profile)["lost_token_rows"] == 30 * len(LAYERS)


def test_what_a_failed_pass_overwrote_is_lost_and_not_its_ids_kept(tmp_path, random):
    recorder, capture = recorder_of(tmp_path / "r", LAYERS, level="tokens", token_ring=50)
    served = random_step(random, LAYERS, 1, 50)
    failed = random_step(random, LAYERS, 1, 20)
    serve(capture, served)
    capture.begin(1, 20, "decode", None)
    for one in failed.calls:
        capture.ids(one.position, *_tensors(one.ids), None)
    capture.end(failed=True)
    recorder.close()
    profile = routeprof.load(tmp_path / "r")
    same_loads(profile, LAYERS, [served])
    np.testing.assert_array_equal(profile.tokens(0).ids, served.calls[0].ids[20:])
    assert problems(profile)["lost_token_rows"] == 20 * len(LAYERS)


def _tensors(*arrays):
    import torch

    return [torch.from_numpy(array) for array in arrays]
