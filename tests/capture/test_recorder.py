"""Recorder: windows, tags, a drain thread that is held up, a disk that is full."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from time import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import routeprof
from routeprof.capture.recorder import MAX_UNWRITTEN, Recording
from routeprof.capture.tags import check_tag
from routeprof.errors import InvalidTagError
from routeprof.recording.reader import open_recording
from tests.capture.oracle import Call, Step, begin, call, layers_of, random_step
from tests.capture.recordings import flush, loads, recorder_of, same_loads, serve

LAYERS = layers_of((8, 2), (6, 3))


@pytest.fixture
def random():
    return np.random.default_rng(31)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "recording"


def problems(path: Path) -> dict:
    return open_recording(path).ranks[0].state.problems


def some(random, **facts) -> Step:
    return random_step(random, LAYERS, 2, 2, **facts)


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


# -- tags


@pytest.mark.parametrize(
    "tag",
    [
        "",
        "  ",
        "a\nb",
        "a\rb",
        "\ta",
        "a\x00",
        "\x1b[31m",
        "a\u2028b",
        "=1+1",
        "+1",
        "-1",
        "@x",
        "all",
        "untagged",
        "x" * 201,
        "\ud800",
        None,
        3,
    ],
)
def test_tags_that_cannot_be_written_everywhere(tag):
    with pytest.raises(InvalidTagError, match="tag"):
        check_tag(tag)


@pytest.mark.parametrize("tag", ["code", "客户 7", "x" * 200, "a,b", 'say "hi"', "a=b", "'"])
def test_other_tags(path, random, tag):
    recorder, capture = recorder_of(path, LAYERS)
    with recorder.tag(tag):
        serve(capture, some(random))
    recorder.close()
    assert routeprof.load(path).tags == (tag,)


def test_a_refused_tag_leaves_the_one_before(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    with recorder.tag("outer"):
        with pytest.raises(InvalidTagError), recorder.tag("all"):
            pass
        serve(capture, some(random))
    recorder.close()
    assert routeprof.load(path).tags == ("outer",)


def test_tags_nest_and_come_back(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    steps = {name: [] for name in (None, "a", "b")}

    def one(name):
        steps[name].append(some(random))
        serve(capture, steps[name][-1])

    one(None)
    with recorder.tag("a"):
        one("a")
        with recorder.tag("b"):
            one("b")
            with recorder.tag("a"):
                one("a")
            one("b")
        one("a")
    one(None)
    with recorder.tag("b"):
        one("b")
    recorder.close()
    profile = routeprof.load(path)
    assert profile.tags == (None, "a", "b")
    for name, own in steps.items():
        same_loads(profile.select(tag=name or "untagged"), LAYERS, own)


@pytest.mark.parametrize("level", ["windows", "steps"])
def test_more_tags_than_there_are_slots(path, random, level):
    recorder, capture = recorder_of(path, LAYERS, level=level)
    steps = {f"tag {number}": [] for number in range(30)}
    for turn in range(3):
        for name, own in steps.items():
            with recorder.tag(name):
                for _ in range(1 + turn):
                    own.append(some(random))
                    serve(capture, own[-1])
    recorder.close()
    profile = routeprof.load(path)
    assert set(profile.tags) == steps.keys()
    for name, own in steps.items():
        selected = profile.select(tag=name)
        same_loads(selected, LAYERS, own)
        assert selected.layers()["steps"].tolist() == [6, 6]
        if level == "steps":
            assert len(selected.steps()) == 12
    same_loads(profile, LAYERS, [step for own in steps.values() for step in own])


def test_too_many_tags_open_at_once(path):
    recorder, _ = recorder_of(path, LAYERS)
    room = recorder.streams[0].layout.tags - 1
    with pytest.raises(InvalidTagError, match="close one"):
        _nested(recorder, [f"tag {number}" for number in range(room + 1)])
    _nested(recorder, [f"again {number}" for number in range(room)])
    recorder.close()


def _nested(recorder, names) -> None:
    if names:
        with recorder.tag(names[0]):
            _nested(recorder, names[1:])


def test_a_tag_that_finds_no_room_during_a_pass_is_refused_at_once(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    steps = {}
    for number in range(recorder.streams[0].layout.tags - 1):
        with recorder.tag(f"tag {number}"):
            steps[f"tag {number}"] = some(random)
            serve(capture, steps[f"tag {number}"])
    running = steps["untagged"] = some(random)
    begin(capture, running)
    with pytest.raises(InvalidTagError, match="between passes"), recorder.tag("one more"):
        pass
    for one in running.calls:
        call(capture, one)
    capture.end()
    recorder.close()
    profile = routeprof.load(path)
    for name, step in steps.items():
        same_loads(profile.select(tag=name), LAYERS, [step])


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


# -- a disk that takes nothing


class FullDisk:
    """A writer that fails as a full disk does while ``full`` is set."""

    def __init__(self, recorder):
        self.full, self.attempts = False, threading.Semaphore(0)
        for name in ("write", "write_state"):
            setattr(recorder.writer, name, self._or_full(getattr(recorder.writer, name)))

    def _or_full(self, write):
        def wrapped(*args, **kwargs):
            if self.full:
                self.attempts.release()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args, **kwargs)

        return wrapped


def test_what_a_full_disk_refused_is_written_when_there_is_room(path, random):
    recorder, capture = recorder_of(path, LAYERS, level="tokens", window=0.05)
    disk, steps = FullDisk(recorder), []
    disk.full = True
    for _ in range(10):
        steps.append(some(random))
        serve(capture, steps[-1])
    for _ in range(3):
        assert disk.attempts.acquire(timeout=60)
    disk.full = False
    steps.append(some(random))
    serve(capture, steps[-1])
    recorder.close()
    profile = routeprof.load(path)
    same_loads(profile, LAYERS, steps)
    assert len(profile.steps()) == 2 * len(steps)
    assert len(profile.tokens(0).ids) == 4 * len(steps)
    assert problems(path)["write_failures"] >= 3
    assert "No space left" in problems(path)["last_write_failure"]
    assert "write-failures" in {finding.code for finding in profile.findings()}


@pytest.mark.parametrize("refused", range(6))
def test_a_disk_that_fills_in_the_middle_of_a_flush(path, random, refused):
    """Part, steps, tokens, rows, rank.json: whichever does not fit, nothing comes twice."""
    recorder, capture = recorder_of(path, LAYERS, level="tokens")
    steps = [some(random) for _ in range(4)]
    serve(capture, steps[0], fresh=True)
    flush(recorder)
    disk, left = FullDisk(recorder), refused
    for name in ("write", "write_state"):
        writer = getattr(recorder.writer, name)

        def counted(*args, writer=writer, **kwargs):
            nonlocal left
            disk.full = left == 0
            left -= 1
            return writer(*args, **kwargs)

        setattr(recorder.writer, name, counted)
    serve(capture, steps[1])
    if refused < 5:
        with pytest.raises(OSError, match="No space"):
            flush(recorder)
    else:
        flush(recorder)
    disk.full, left = False, -1
    for step in steps[2:]:
        serve(capture, step)
    recorder.close()
    profile = routeprof.load(path)
    same_loads(profile, LAYERS, steps)
    assert len(profile.steps()) == 2 * len(steps)
    for position, layer in enumerate(LAYERS):
        table = profile.tokens(layer.index)
        np.testing.assert_array_equal(
            table.ids, np.concatenate([step.calls[position].ids for step in steps])
        )
        assert table.position.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7]


def test_tags_go_on_while_the_disk_is_full(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    disk, steps = FullDisk(recorder), {}
    disk.full = True
    for number in range(20):
        with recorder.tag(f"tag {number}"):
            steps[f"tag {number}"] = some(random)
            serve(capture, steps[f"tag {number}"])
    recorder.switch(False)
    recorder.switch(True)
    disk.full = False
    recorder.close()
    profile = routeprof.load(path)
    for name, step in steps.items():
        same_loads(profile.select(tag=name), LAYERS, [step])
    assert problems(path)["write_failures"] > 10


def test_windows_kept_in_memory_for_a_full_disk_have_a_limit(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    disk = FullDisk(recorder)
    disk.full = True
    step, room = some(random), recorder.streams[0].layout.tags - 1
    for number in range(room + MAX_UNWRITTEN + 10):
        with recorder.tag(f"tag {number}"):
            serve(capture, step)
    assert len(recorder._unwritten) == MAX_UNWRITTEN
    disk.full = False
    recorder.close()
    profile = routeprof.load(path)
    lost = problems(path)["lost_windows"]
    assert {finding.code for finding in profile.findings()} >= {"lost-windows", "write-failures"}
    assert lost > 0


def test_a_disk_that_stays_full_does_not_stop_the_program(path, random):
    recorder, capture = recorder_of(path, LAYERS)
    disk = FullDisk(recorder)
    serve(capture, some(random))
    disk.full = True
    with pytest.warns(RuntimeWarning, match="make room"):
        Recording(recorder, lambda: None).stop()


CHILD = """
import sys
from pathlib import Path
import numpy as np
from tests.capture.test_recorder import fill_the_disk
fill_the_disk(sys.argv[1], Path(sys.argv[2]))
"""


def fill_the_disk(how: str, directory: Path) -> None:
    """In a process of its own: record on a disk that is full for a while; print the loads."""
    random, steps = np.random.default_rng(41), []
    recorder, capture = recorder_of(directory / "recording", LAYERS, level="steps")

    def work() -> None:
        for _ in range(60):
            steps.append(some(random))
            serve(capture, steps[-1])

    work()
    flush(recorder)
    make_room = _use_up(how, directory)
    failures = 0
    for _ in range(3):
        work()
        try:
            flush(recorder)
        except OSError:
            failures += 1
    recorder.switch(True)
    make_room()
    work()
    flush(recorder)
    recorder.close()
    sums = [load.tolist() for load in loads(LAYERS, steps)]
    print(json.dumps({"failures": failures, "steps": len(steps), "loads": sums}))


def _use_up(how: str, directory: Path):
    if how == "limit":
        import resource

        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, unlimited[1]))
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler.unlink


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, as small as a recording is."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "routeprof-test", str(mounted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.parametrize("how", ["limit", "tmpfs"])
def test_a_disk_that_is_really_full(how, tmp_path, request):
    directory = request.getfixturevalue("small_disk") if how == "tmpfs" else tmp_path
    command = [sys.executable, "-c", CHILD, how, str(directory)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["failures"] == 3
    profile = routeprof.load(directory / "recording")
    for row, expected in zip(profile.counts, said["loads"], strict=True):
        assert np.ma.getdata(row)[: len(expected)].tolist() == expected
    lost = problems(directory / "recording").get("lost_step_rows", 0)
    assert len(profile.steps()) == 2 * (said["steps"] - lost)
    assert not list(directory.rglob("*.tmp"))


# -- what a recording holds


class Block(nn.Module):
    """A mixture-of-experts block in the manner of transformers 5."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = experts, 2
        self.gate, self.experts = nn.Linear(hidden, experts, bias=False), Experts(experts, hidden)

    def forward(self, hidden_states):
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = self.gate(rows).softmax(-1).topk(2)
        return self.experts(rows, ids, weights).reshape(hidden_states.shape)


class Experts(nn.Module):
    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.randn(experts, hidden, hidden) / hidden)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        chosen = self.weight[top_k_index]
        out = torch.einsum("rkij,rj->rki", chosen, hidden_states)
        return (out * top_k_weights[..., None]).sum(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 16)
        self.layers = nn.ModuleList([Block(16, 8) for _ in range(2)])

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of every level, and the prompt that it was made from."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "recording"
    prompt = torch.randint(4000, 5000, (2, 48))
    model = Model()
    with torch.no_grad(), routeprof.record(model, path, level="tokens"):
        hidden = model(prompt)
    return path, prompt.numpy(), hidden.numpy()


def test_a_recording_holds_neither_prompts_nor_hidden_states(recorded):
    path, prompt, hidden = recorded
    numbers, words = set(), set()
    for file in path.rglob("*.parquet"):
        table = pq.read_table(file)
        for name in table.column_names:
            for value in table[name].to_pylist():
                values = value if isinstance(value, list) else [value]
                (words if isinstance(values[0], str) else numbers).update(values)
    assert words <= {"prefill", "unknown", "", "model@cpu", "@cpu", *map(str, range(2))}
    assert not numbers & set(prompt.ravel().tolist())
    assert not numbers & set(hidden.ravel().tolist())
    for file in path.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            for dtype in (np.int16, np.int32, np.int64):
                assert prompt[0].astype(dtype).tobytes()[:32] not in data
            assert hidden.tobytes()[:32] not in data


def test_a_recording_says_what_it_cost(recorded):
    state = open_recording(recorded[0]).ranks[0].state
    assert 0 < state.cost_seconds < state.busy_seconds
    table = pq.read_table(next(recorded[0].rglob("part-*.parquet")))
    assert all(cost > 0 for cost in table["cost_seconds"].to_pylist())
    assert sum(table["cost_seconds"].to_pylist()) <= state.cost_seconds * (1 + 1e-9)
