"""Recorder: windows, a drain thread that is held up, on and off."""

from __future__ import annotations

import threading
from time import time

import numpy as np
import pyarrow.parquet as pq

import routeprof
from routeprof.capture.recorder import Recording
from routeprof.recording.reader import open_recording
from tests.capture.oracle import Call, Step, begin, call, layers_of
from tests.capture.recordings import LAYERS, flush, problems, recorder_of, same_loads, serve, some

# -- windows


def test_windows_follow_one_another_and_add_up(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    began, steps = time(), []
    for number in range(5):
        for _ in range(number):
            steps.append(some(random))
            serve(capture, steps[-1])
        flush(recorder)
    recorder.close()
    profile = routeprof.load(path)
    same_loads(profile, LAYERS, steps)
    table = profile.windows()
    assert table["steps"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert (table["start"] >= began).all()
    assert (table["end"] <= time()).all()
    first = table[table["layer"] == 0]
    assert (first["start"].to_numpy()[1:] == first["end"].to_numpy()[:-1]).all()


def test_a_recording_is_written_while_it_goes_on(path, random):
    recorder, capture = recorder_of(path, LAYERS, window=0.05)
    written, write = threading.Event(), recorder.writer.write
    recorder.writer.write = lambda *args: (write(*args), written.set())
    steps = [some(random)]
    serve(capture, steps[0])
    assert written.wait(60)
    same_loads(routeprof.load(path), LAYERS, steps)
    recorder.close()
    assert open_recording(path).ranks[0].state.state == "stopped"


def test_closing_twice_writes_once(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    serve(capture, some(random))
    recorder.close()
    before = sorted(path.rglob("*"))
    recorder.close()
    assert sorted(path.rglob("*")) == before


def test_a_drain_thread_that_is_held_up_makes_a_longer_window_and_loses_nothing(path, random):
    recorder, capture = recorder_of(path, LAYERS, level="steps", window=0.05)
    held, go_on, write = threading.Event(), threading.Event(), recorder.writer.write

    def slow(*args):
        held.set()
        assert go_on.wait(60)
        write(*args)

    recorder.writer.write = slow
    steps = [some(random)]
    serve(capture, steps[0])
    assert held.wait(60)
    blocked = time()
    for _ in range(100):  # the engine goes on: nothing that it calls waits for the disk
        steps.append(some(random))
        serve(capture, steps[-1])
    while time() < blocked + 0.2:
        serve(capture, steps[0])
        steps.append(steps[0])
    released = time()
    go_on.set()
    recorder.close()
    profile = routeprof.load(path)
    same_loads(profile, LAYERS, steps)
    table = profile.windows().query("layer == 0")
    assert table["steps"].tolist()[0] == 1
    late = table.iloc[1]
    assert late["steps"] == len(steps) - 1
    assert late["end"] - late["start"] > released - blocked
    lost = problems(path).get("lost_step_rows", 0)
    assert len(profile.steps()) == 2 * (len(steps) - lost)


def test_a_step_that_runs_on_makes_the_window_late_and_is_counted_in_the_next(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    done, running = some(random), some(random)
    serve(capture, done)
    begin(capture, running)
    thread = threading.Thread(target=lambda: flush(recorder))
    thread.start()
    thread.join()
    assert routeprof.load(path).totals.keys == ()
    for one in running.calls:
        call(capture, one)
    capture.end()
    recorder.close()
    assert problems(path) == {"late_windows": 1}
    same_loads(routeprof.load(path), LAYERS, [done, running])


def test_the_largest_imbalance_of_a_window_is_that_of_all_steps_so_far(path, random):
    layers = layers_of((4, 1))
    recorder, capture = recorder_of(path, layers)
    even = np.array([[0], [1], [2], [3]])
    for ids in (np.zeros((4, 1), int), even):
        serve(capture, Step(1, 4, [Call(0, ids)]))
        flush(recorder)
    recorder.close()
    files = sorted((path / "rank-00000").glob("part-*"))
    assert [pq.read_table(file)["imbalance_max"].to_pylist() for file in files] == [[4.0], [4.0]]


# -- on and off


def test_paused_and_started_again(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    recording = Recording(recorder, lambda: None)
    steps = [some(random) for _ in range(3)]
    serve(capture, steps[0])
    recording.pause()
    assert open_recording(path).ranks[0].state.state == "paused"
    serve(capture, steps[1])
    recording.start()
    serve(capture, steps[2])
    recording.stop()
    same_loads(routeprof.load(path), LAYERS, [steps[0], steps[2]])
    assert open_recording(path).ranks[0].state.state == "stopped"


def test_pausing_and_writing_at_the_same_time(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    done = threading.Event()

    def drain():
        while not done.is_set():
            flush(recorder)

    thread = threading.Thread(target=drain)
    thread.start()
    for _ in range(100):
        recorder.switch(False)
        assert open_recording(path).ranks[0].state.state == "paused"
        recorder.switch(True)
        serve(capture, some(random))
    done.set()
    thread.join()
    recorder.close()
    assert problems(path).keys() <= {"late_windows"}
