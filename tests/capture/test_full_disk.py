"""A recorder on a disk that takes nothing for a while loses nothing, or says what it lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.capture.recorder import MAX_UNWRITTEN, Recording
from tests.capture.full_disk import FullDisk
from tests.capture.recordings import LAYERS, flush, problems, recorder_of, same_loads, serve, some


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
    command = [sys.executable, "-m", "tests.capture.full_disk", how, str(directory)]
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
