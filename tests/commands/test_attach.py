"""``routeprof attach`` and ``detach``: real processes, hooked by a real debugger while they run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import time

import numpy as np
import pytest

import routeprof
from tests.commands.conftest import Cli
from tests.commands.watching import (
    BUSY,
    Program,
    Spoken,
    program_log,
    segments,
    step_counts,
    until,
)

LIVE = Path(__file__).with_name("live.py")
needs_gdb = pytest.mark.skipif(
    shutil.which("gdb") is None, reason="needs gdb (apt-get install gdb)"
)
STEPS = ("--level", "steps", "--window", "0.2")
Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``live.py``, which knows nothing of routeprof, and waits until it generates."""
    programs = []

    def begin(mode: str = "generate") -> Program:
        program = Program(tmp_path, [sys.executable, str(LIVE)], mode)
        programs.append(program)
        until(lambda: len(program_log(tmp_path)) > 3, program)
        return program

    yield begin
    for program in programs:
        program.__exit__()


def passes_on(program: Program, count: int = 20) -> None:
    """Let it generate for so many passes."""
    now = len(program_log(program.folder))
    until(lambda: len(program_log(program.folder)) >= now + count, program)


def exact(program: Program, recording: Path) -> tuple[int, int]:
    """Check the recording against the program's own account: one unbroken run of whole passes.

    Returns:
        The first pass that was counted, and the one after the last.
    """
    log, steps = program_log(program.folder), step_counts(recording)
    (run,) = segments(log, steps)
    profile = routeprof.load(recording)
    np.testing.assert_array_equal(profile.counts, np.sum(log[slice(*run)], axis=0))
    assert profile.coverage == 1.0
    assert profile.phases == ("prefill", "decode")
    return run


@needs_gdb
@pytest.mark.parametrize("mode", ["generate", "served"])
def test_counts_are_exact_from_the_attach_on(cli: Cli, start: Start, tmp_path: Path, mode: str):
    program = start(mode)
    before = len(program_log(tmp_path))
    done = cli("attach", program.process.pid, "-o", "out", *STEPS, "--method", "gdb")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith(f"attached to {program.process.pid} in ")
    assert first.endswith(f": MixtralForCausalLM, 3 MoE layers, recorded in {tmp_path / 'out'}")
    assert second == f"end it with: routeprof detach {program.process.pid}"
    attached = len(program_log(tmp_path))
    passes_on(program)

    done = cli("detach", program.process.pid)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("stopped: 1 of 1 ranks")
    detached = len(program_log(tmp_path))
    passes_on(program)
    assert program.end()["hooks"] == 0
    run = exact(program, tmp_path / "out")
    assert before <= run[0] <= attached + 1
    assert attached + 20 <= run[1] <= detached
    assert cli("detach", program.process.pid).returncode == 2


@needs_gdb
def test_again_and_again(cli: Cli, start: Start, tmp_path: Path):
    """While it is attached to it cannot be attached to; afterwards it can."""
    program = start()
    for out in ("first", "second"):
        assert cli("attach", program.process.pid, "-o", out, *STEPS).returncode == 0
        done = cli("attach", program.process.pid, "-o", "other")
        assert (done.returncode, done.stdout) == (2, "")
        assert "is being recorded already" in done.stderr
        passes_on(program)
        assert cli("detach", out).returncode == 0
    done = cli("attach", program.process.pid, "-o", "first")
    assert (done.returncode, "is not empty" in done.stderr) == (2, True)
    assert not (tmp_path / "other").exists()
    assert program.end()["hooks"] == 0
    assert exact(program, tmp_path / "first")[1] <= exact(program, tmp_path / "second")[0]


@needs_gdb
def test_duration(cli: Cli, start: Start, tmp_path: Path):
    program = start()
    began = time()
    done = cli("attach", program.process.pid, "-o", "out", *STEPS, "--duration", "1.5")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == ["stopped after 1.5 s"]
    assert time() - began >= 1.5
    passes_on(program)
    assert program.end()["hooks"] == 0
    exact(program, tmp_path / "out")


@needs_gdb
def test_control_of_what_was_attached(cli: Cli, start: Start, tmp_path: Path):
    program = start()
    assert cli("attach", program.process.pid, "-o", "out", *STEPS).returncode == 0
    for verb in ("pause", "start"):
        passes_on(program)
        assert cli(verb, "out").returncode == 0
    passes_on(program)
    assert cli("stop", "out").returncode == 0
    assert program.end()["hooks"] == 0
    assert len(segments(program_log(tmp_path), step_counts(tmp_path / "out"))) == 2


@pytest.mark.skipif(shutil.which("lldb") is None, reason="needs lldb (apt-get install lldb)")
def test_lldb(cli: Cli, start: Start, tmp_path: Path):
    program = start("served")
    done = cli("attach", program.process.pid, "-o", "out", *STEPS, "--method", "lldb")
    assert done.returncode == 0, done.stderr
    passes_on(program)
    assert cli("detach", program.process.pid).returncode == 0
    assert program.end()["hooks"] == 0
    exact(program, tmp_path / "out")


# -- what cannot work, and is survived


def refused(cli: Cli, pid: int, *options: str) -> str:
    """Attach in vain; returns the one line that says why."""
    done = cli("attach", pid, "-o", "refused", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("routeprof: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@needs_gdb
def test_a_compiled_model(cli: Cli, start: Start, tmp_path: Path):
    program = start("compiled")
    said = refused(cli, program.process.pid)
    assert "MixtralForCausalLM is compiled" in said
    assert "routeprof run --paused" in said
    passes_on(program)
    assert program.end()["hooks"] == 0
    assert not (tmp_path / "refused").exists()


BARE = str(Path(sys.base_prefix) / "bin" / "python3")
TORCH = """
import torch, sys, types
{setup}
layer = torch.nn.Linear(2, 2)
print("up", flush=True)
while True:
    layer(torch.ones(2))
"""
ENGINE = """
sys.modules["sglang"] = types.ModuleType("sglang")
class Runner(torch.nn.Module):
    __module__ = "sglang.srt.models"
model = Runner()
"""
CASES = {
    "no torch": ([sys.executable, "-c", BUSY], "has not loaded torch"),
    "no routeprof": ([BARE, "-I", "-S", "-c", BUSY], "-m pip install routeprof"),
    "no model": ([sys.executable, "-c", TORCH.format(setup="")], "no model with MoE layers"),
    "engine": (
        [sys.executable, "-c", TORCH.format(setup=ENGINE)],
        "it runs sglang, which holds its kernels in graphs; start it again under routeprof run",
    ),
}


@needs_gdb
@pytest.mark.parametrize("case", CASES)
def test_processes_without_anything_to_hook(cli: Cli, tmp_path: Path, case: str):
    command, expected = CASES[case]
    with Spoken(command) as process:
        said = refused(cli, process.pid)
        assert expected in said
        assert f"process {process.pid}" in said
        assert process.poll() is None
    assert not (tmp_path / "refused").exists()


def test_what_is_no_python_process_is_not_touched(cli: Cli):
    with subprocess.Popen(["sleep", "100"]) as process:
        assert "is no Python process" in refused(cli, process.pid)
        assert process.poll() is None
        process.kill()


def test_a_process_that_is_not_there(cli: Cli):
    process = subprocess.Popen(["true"])
    process.wait()
    assert f"there is no process {process.pid}" in refused(cli, process.pid)


@pytest.mark.skipif(
    shutil.which("setpriv") is None or os.getuid() != 0,
    reason="needs setpriv, and root, to take a right away",
)
def test_no_rights(tmp_path: Path):
    """As in a container that was started without --cap-add=SYS_PTRACE."""
    weak = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
    with Spoken([sys.executable, "-c", BUSY]) as process:
        command = [sys.executable, "-m", "routeprof", "attach", str(process.pid), "-o", "out"]
        done = subprocess.run(
            [*weak, *command], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert done.returncode == 2
        for remedy in ("no right to attach", "sudo", "ptrace_scope=0", "--cap-add=SYS_PTRACE"):
            assert remedy in done.stderr
        assert done.stderr.count("\n") == 1
        assert process.poll() is None


def test_a_debugger_that_may_not(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A fake gdb that says what the real one says where Yama forbids it."""
    fake = tmp_path / "bin" / "gdb"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'failed: ptrace: Operation not permitted.' >&2; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with Spoken([sys.executable, "-c", BUSY]) as process:
        assert "ptrace_scope=0" in refused(cli, process.pid, "--method", "gdb")
        fake.write_text("#!/bin/sh\necho 'failed: broken' >&2; exit 1\n")
        assert "(failed: broken); try another" in refused(cli, process.pid, "--method", "gdb")


def test_without_a_debugger(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with Spoken([sys.executable, "-c", BUSY]) as process:
        assert "apt-get install gdb" in refused(cli, process.pid)
        assert "install lldb" in refused(cli, process.pid, "--method", "lldb")
        if sys.version_info < (3, 14):
            assert "3.14 or later" in refused(cli, process.pid, "--method", "remote_exec")
        assert "not one of auto" in refused(cli, process.pid, "--method", "magic")


def test_detach_from_what_was_not_attached_to(cli: Cli, tmp_path: Path):
    done = cli("detach", os.getpid())
    assert (done.returncode, done.stdout) == (2, "")
    assert "was not attached to; name the recording" in done.stderr
    (tmp_path / "77").mkdir()
    assert "name the directory of a recording" in cli("detach", "77").stderr
