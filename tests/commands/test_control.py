"""``routeprof start``, ``pause``, ``stop`` and ``status`` on programs that are generating."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import routeprof
from tests.commands.conftest import Cli
from tests.commands.watching import Program, program_log, segments, step_counts, until

LIVE = Path(__file__).with_name("live.py")


@pytest.fixture
def paused(tmp_path: Path) -> Iterator[Program]:
    """A program that generates under ``routeprof run --paused``."""
    options = ["-o", "out", "--paused", "--level", "steps", "--window", "0.1"]
    run = [sys.executable, "-m", "routeprof", "run", *options, "--"]
    with Program(tmp_path, [*run, sys.executable, str(LIVE)]) as program:
        until(lambda: len(program_log(tmp_path)) > 3, program)
        yield program


def counted(path: Path) -> int:
    """Assignments in the recording so far."""
    try:
        return int(routeprof.load(path).counts.sum())
    except routeprof.errors.EmptyRecordingError:
        return 0


def test_counts_move_only_while_on(cli: Cli, tmp_path: Path, paused: Program):
    out = tmp_path / "out"

    def some_passes() -> None:
        """Let it run for some windows."""
        written, passed = _updated(out), len(program_log(tmp_path))
        until(
            lambda: _updated(out) > written + 0.3 and len(program_log(tmp_path)) > passed + 10,
            paused,
        )

    some_passes()
    assert counted(out) == 0
    for _ in range(2):
        done = cli("start", "out")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("recording: 1 of 1 ranks")
        before = counted(out)
        until(lambda before=before: counted(out) > before, paused)
        some_passes()
        assert cli("pause", "out").stdout.startswith("paused: 1 of 1 ranks")
        some_passes()  # the pass that ran, and the window that holds it
        still = counted(out)
        some_passes()
        assert counted(out) == still
    assert cli("stop", "out").stdout.startswith("stopped: 1 of 1 ranks")
    said = paused.end()
    assert said["hooks"] == 0
    # Each time a run of whole passes, as the program itself saw them.
    steps = step_counts(out)
    assert len(segments(program_log(tmp_path), steps)) == 2
    assert counted(out) == sum(sum(map(sum, step)) for step in steps)


def test_status(cli: Cli, tmp_path: Path, paused: Program):
    def status() -> tuple[int, dict]:
        done = cli("status", "out", "--json")
        (row,) = json.loads(done.stdout)
        return done.returncode, row

    code, row = status()
    assert (code, row["rank"], row["state"], row["windows"]) == (0, 0, "paused", 0)
    assert row["pid"] == paused.process.pid
    assert 0 <= row["age_seconds"] < 5
    assert row["problems"] == {}
    cli("start", "out")
    until(lambda: status()[1]["windows"] > 0, paused)
    assert status()[1]["state"] == "recording"
    table = cli("status", "out")
    assert str(paused.process.pid) in table.stdout
    paused.process.kill()
    paused.process.wait()
    assert (status()[0], status()[1]["state"]) == (1, "dead")
    assert "dead" in cli("status", "out").stdout


def test_a_dead_process_is_named(cli: Cli, tmp_path: Path, paused: Program):
    paused.process.kill()
    paused.process.wait()
    for verb in ("start", "pause", "stop"):
        done = cli(verb, "out")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"routeprof: rank 0 (pid {paused.process.pid} on ")
        assert done.stderr.endswith("is not responding: its process is gone\n")


def test_what_was_stopped_stays_so(cli: Cli, recording: Path):
    assert cli("stop", recording).returncode == 0
    assert cli("pause", recording).returncode == 0
    done = cli("start", recording)
    assert done.returncode == 1
    assert "cannot be started again" in done.stderr
    assert cli("status", recording).returncode == 0


@pytest.mark.parametrize("verb", ["start", "pause", "stop", "status"])
def test_what_is_no_recording(cli: Cli, tmp_path: Path, verb: str):
    done = cli(verb, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "name the directory of a recording" in done.stderr


@pytest.mark.parametrize("verb", ["run", "attach", "detach", "start", "pause", "stop", "status"])
def test_help_has_an_example(cli: Cli, verb: str):
    assert f"Example: routeprof {verb} " in " ".join(cli(verb, "--help").stdout.split())


def test_all_ranks_obey(cli: Cli, tmp_path: Path):
    """Two ranks under torchrun, paused and started together."""
    code = "import os, sys; from pathlib import Path\n"
    code += f"sys.path.insert(0, {str(LIVE.parent)!r}); import live\n"
    code += "live.main(Path(os.environ['RANK']))\n"
    (tmp_path / "ranks.py").write_text(code)
    for rank in "01":
        (tmp_path / rank).mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py"]
    run = [sys.executable, "-m", "routeprof", "run", "-o", "out", "--window", "0.1", "--"]
    command = [*run, sys.executable, *torchrun]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        until(lambda: all(len(program_log(tmp_path / rank)) > 3 for rank in "01"), process)
        for verb, state in (("pause", "paused"), ("start", "recording"), ("stop", "stopped")):
            done = cli(verb, "out")
            assert done.stdout.startswith(f"{state}: 2 of 2 ranks"), done.stderr
            rows = json.loads(cli("status", "out", "--json").stdout)
            assert [row["state"] for row in rows] == [state] * 2
        for rank in "01":
            (tmp_path / rank / "stop").touch()
        assert process.wait() == 0


def _updated(out: Path) -> float:
    return float(json.loads((out / "rank-00000" / "rank.json").read_text())["updated"])
