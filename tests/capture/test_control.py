"""A live recording obeys requests from other processes, and says whether it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic, time

import pytest

import routeprof
from routeprof.capture import control
from routeprof.capture.control import Listener, Request, health, rank_states, request, wait_for
from routeprof.capture.recorder import Recording
from routeprof.errors import NotARecordingError
from routeprof.recording.schema import RankState
from routeprof.topology import RankRole
from tests.capture.oracle import begin, call
from tests.capture.recordings import LAYERS, recorder_of, same_loads, serve, some

PATIENCE = 60.0


def until(true: Callable[[], bool]) -> None:
    late = monotonic() + PATIENCE
    while not true():
        assert monotonic() < late
        os.sched_yield()


def ask(path: Path, want: control.Want) -> dict[int, RankState]:
    states = wait_for(path, request(path, want), PATIENCE)
    assert all(state.state == want for state in states.values())
    return states


# -- the file


def test_a_request_is_told_once(tmp_path):
    listener = Listener(tmp_path)
    assert listener.poll() is None
    wanted = Request(3, "paused", 1.5)
    tmp_path.joinpath(control.CONTROL_FILE).write_text(json.dumps(vars(wanted)))
    assert listener.poll() == wanted
    assert listener.poll() is None
    # As when two people ask at the same moment: the number is the same, the later one counts.
    tmp_path.joinpath(control.CONTROL_FILE).write_text(json.dumps(vars(wanted) | {"time": 2.5}))
    assert listener.poll() == replace(wanted, time=2.5)


def test_numbers_grow_whatever_becomes_of_the_file(path):
    recorder, _ = recorder_of(path, LAYERS)
    assert [request(path, "paused"), request(path, "recording")] == [1, 2]
    until(lambda: rank_states(path)[0].control == 2)
    for damage in ("", "{", "[]", '{"number": 1}', '{"number": 9, "want": "x", "time": 0}'):
        (path / control.CONTROL_FILE).write_text(damage)
        assert request(path, "paused") == 3
    (path / control.CONTROL_FILE).unlink()
    assert request(path, "paused") == 3
    recorder.close()


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_what_is_no_recording_cannot_be_asked(path, kind):
    if kind == "empty":
        path.mkdir()
    if kind == "file":
        path.write_text("")
    with pytest.raises(NotARecordingError, match="name the directory"):
        request(path, "paused")


# -- the rank


def test_counts_move_only_while_on(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    counted = []
    for want in ("paused", "recording", "paused", "paused", "recording"):
        (state,) = ask(path, want).values()
        assert state.state == want
        for _ in range(5):
            step = some(random)
            serve(capture, step)
            counted += [step] * (want == "recording")
    recorder.close()
    same_loads(routeprof.load(path), LAYERS, counted)


def test_counting_begins_and_ends_between_passes(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    steps = [some(random) for _ in range(4)]
    for step, want in zip(steps, ("paused", "recording", "paused", "recording"), strict=True):
        begin(capture, step)
        call(capture, step.calls[0])
        ask(path, want)
        for one in step.calls[1:]:
            call(capture, one)
        capture.end()
    recorder.close()
    # Those during which it was paused had begun before, when it was on.
    same_loads(routeprof.load(path), LAYERS, [steps[0], steps[2]])


def test_a_request_does_not_end_a_window(path, random):
    recorder, capture = recorder_of(path, LAYERS)  # the window would end in an hour
    serve(capture, some(random))
    for want in ("paused", "recording"):
        ask(path, want)
    assert rank_states(path)[0].parts == {}
    recorder.close()


def test_requests_are_obeyed_while_a_pass_and_the_disk_hold_the_drain_thread_up(path, random):
    recorder, capture = recorder_of(path, LAYERS, window=0.05)
    held, go_on, write = threading.Event(), threading.Event(), recorder.writer.write

    def slow(*args):
        held.set()
        assert go_on.wait(PATIENCE)
        write(*args)

    recorder.writer.write = slow
    serve(capture, some(random))
    assert held.wait(PATIENCE)
    ask(path, "paused")
    assert not capture.enabled
    go_on.set()
    recorder.close()


def test_stop_removes_the_hooks_and_writes_what_is_left(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    removed = []
    Recording(recorder, lambda: removed.append(rank_states(path)[0].state))
    step = some(random)
    serve(capture, step)
    ask(path, "stopped")
    assert removed == ["recording"]
    serve(capture, some(random))
    same_loads(routeprof.load(path), LAYERS, [step])
    # Nothing brings it back.
    request(path, "recording")
    recorder.switch(True)
    with recorder.tag("late"):
        serve(capture, some(random))
    recorder.close()
    assert rank_states(path)[0].state == "stopped"
    same_loads(routeprof.load(path), LAYERS, [step])
    assert removed == ["recording"]


def test_stop_waits_for_the_pass_that_runs(path, random):
    """The hooks stay until it ends, or it never would."""
    recorder, capture = recorder_of(path, LAYERS)
    hooks = threading.Event()
    Recording(recorder, hooks.set)
    step = some(random)
    begin(capture, step)
    number = request(path, "stopped")
    until(lambda: not capture.enabled)
    for one in step.calls:
        assert not hooks.is_set()
        call(capture, one)
    capture.end()
    wait_for(path, number, PATIENCE)
    assert hooks.is_set()
    same_loads(routeprof.load(path), LAYERS, [step])
    assert "aborted_passes" not in rank_states(path)[0].problems


def test_who_stops_second_waits_for_the_first(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    entered, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert go_on.wait(PATIENCE)

    recorder.on_stop(slow)
    step = some(random)
    serve(capture, step)
    request(path, "stopped")
    assert entered.wait(PATIENCE)
    seen = []
    second = threading.Thread(
        target=lambda: (recorder.close(), seen.append(rank_states(path)[0].state))
    )
    second.start()
    second.join(0.1)
    go_on.set()
    second.join(PATIENCE)
    assert seen == ["stopped"]
    same_loads(routeprof.load(path), LAYERS, [step])


def test_python_and_other_processes_may_take_turns(path, random):
    recorder, _ = recorder_of(path, LAYERS)
    recording = Recording(recorder, lambda: None)
    recording.pause()
    assert rank_states(path)[0].state == "paused"
    ask(path, "recording")
    recording.pause()
    (state,) = rank_states(path).values()
    assert (state.state, state.control) == ("paused", 1)
    ask(path, "recording")
    recording.stop()


def test_a_rank_that_comes_late_is_as_the_others_are(path):
    first, _ = recorder_of(path, LAYERS, role=RankRole(0, 2))
    ask(path, "paused")
    second, capture = recorder_of(path, LAYERS, role=RankRole(1, 2))
    assert not capture.enabled
    assert {state.state for state in rank_states(path).values()} == {"paused"}
    ask(path, "stopped")
    third, capture = recorder_of(path, LAYERS, role=RankRole(2, 3))
    assert rank_states(path)[2].state == "stopped"
    removed = []
    Recording(third, lambda: removed.append(1))
    assert removed == [1]
    for recorder in (first, second, third):
        recorder.close()


def test_a_request_that_cannot_be_read_is_noted_once(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    (path / control.CONTROL_FILE).write_text("{")
    until(lambda: "control_failures" in recorder.problems)
    step = some(random)
    serve(capture, step)
    ask(path, "paused")
    recorder.close()
    (state,) = rank_states(path).values()
    assert state.problems["control_failures"] == 1
    assert state.problems["last_control_failure"].startswith("JSONDecodeError")
    same_loads(routeprof.load(path), LAYERS, [step])


def test_a_rank_that_has_nothing_to_write_shows_that_it_lives(path, monkeypatch):
    monkeypatch.setattr(control, "HEARTBEAT_SECONDS", 0.01)
    recorder, _ = recorder_of(path, LAYERS)
    before = rank_states(path)[0].updated
    until(lambda: rank_states(path)[0].updated > before)
    recorder.close()


# -- ranks that do not answer


def child(path: Path, rank: int, world: int) -> subprocess.Popen[str]:
    """Another process that records, until its standard input ends."""
    code = (
        "import sys; from pathlib import Path; from routeprof.topology import RankRole\n"
        "from tests.capture.recordings import recorder_of\n"
        "from tests.capture.test_control import LAYERS\n"
        f"recorder_of(Path({str(path)!r}), LAYERS, role=RankRole({rank}, {world}))\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_a_killed_rank_is_named_and_not_waited_for(path):
    recorder, _ = recorder_of(path, LAYERS, role=RankRole(0, 2))
    process = child(path, 1, 2)
    ask(path, "paused")
    process.kill()
    until(lambda: health(rank_states(path)[1], time()) == "dead")
    process.communicate()
    began = monotonic()
    number = request(path, "recording")
    states = wait_for(path, number, PATIENCE)
    assert monotonic() - began < PATIENCE / 2
    assert [state.state for state in states.values()] == ["recording", "paused"]
    assert [health(state, time()) for state in states.values()] == ["recording", "dead"]
    (line,) = control.silent(states, number)
    assert line.startswith(f"rank 1 (pid {process.pid} on ")
    assert line.endswith("is not responding: its process is gone")
    recorder.close()


def test_a_rank_elsewhere_that_is_silent_does_not_respond(path):
    recorder, _ = recorder_of(path, LAYERS)
    recorder.close()
    state = replace(rank_states(path)[0], state="recording", updated=1000.0, pid=2**22 + 1)
    assert health(state, 1001.0) == "dead"
    for elsewhere in ({"host": "node7"}, {"pid_namespace": "pid:[1]"}):
        there = replace(state, **elsewhere)
        assert health(there, 1001.0) == "recording"
        assert health(there, 1000.1 + control.SILENT_SECONDS) == "not responding"
    rank = path / "rank-00000" / "rank.json"
    rank.write_text(there.to_json())
    began = monotonic()
    states = wait_for(path, request(path, "paused"), 0.3)
    assert 0.3 <= monotonic() - began < PATIENCE
    assert "it gave no answer" in control.silent(states, 1)[0]


# -- forks


def test_a_forked_child_neither_writes_nor_hangs(path):
    """In a program of its own, with other threads holding locks at the moment of the fork."""
    code = f"""
import os, sys, threading
from pathlib import Path
import numpy as np
from routeprof.capture.recorder import Recording
from tests.capture.recordings import flush, recorder_of, serve
from tests.capture.test_control import LAYERS, some
path = Path({str(path)!r})
random = np.random.default_rng(0)
recorder, capture = recorder_of(path, LAYERS)
removed = []
recording = Recording(recorder, lambda: removed.append(os.getpid()))
serve(capture, some(random))
flush(recorder)

def files():
    return {{file: file.stat().st_mtime_ns for file in path.rglob("*.parquet")}}

held, forked = threading.Event(), threading.Event()
def hold():
    with capture._lock, recorder._state_lock:
        held.set()
        assert forked.wait(60)
holder = threading.Thread(target=hold)
holder.start()
assert held.wait(60)
before = files()
child = os.fork()
if not child:
    serve(capture, some(random))
    with recording.tag("child"):
        serve(capture, some(random))
    recording.pause()
    recording.stop()
    assert removed == [os.getpid()]
    sys.exit(3)  # with all that is registered to run at the end
forked.set()
holder.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert files() == before
assert '"state": "recording"' in (path / "rank-00000" / "rank.json").read_text()
serve(capture, some(random))
recording.stop()
assert removed == [os.getpid()]
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=60, check=False)
    assert done.returncode == 0
    assert routeprof.load(path).layers()["steps"].tolist() == [2, 2]
    (state,) = rank_states(path).values()
    assert (state.state, state.problems) == ("stopped", {})
