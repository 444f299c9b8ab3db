"""What Tab offers: by the protocol of typer's scripts, and in a bash of its own."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from routeprof.commands import completion
from routeprof.diagnose.finding import SEVERITIES
from routeprof.formats import FORMATS
from routeprof.formats.placements import FORMATS as PLACEMENTS
from routeprof.formats.writers import WRITERS
from routeprof.hooks.inject import METHODS
from routeprof.plan.known import known_names
from routeprof.plan.precision import CACHE_FORMATS
from routeprof.plan.precision import FORMATS as DTYPES
from routeprof.whatif.capacity_rules import RULES
from routeprof.whatif.hardware import HARDWARE
from routeprof.whatif.layout_sums import PLACINGS
from routeprof.whatif.placement import EFFORTS

PIPED: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 300}
COMPLETE = "_ROUTEPROF_COMPLETE"
SHELLS = [shell for shell in ("bash", "zsh", "fish") if shutil.which(shell)]


def call(*arguments: str, **variables: str) -> str:
    """``routeprof`` as a process with these environment variables; its stdout."""
    command = [sys.executable, "-m", "routeprof", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, **PIPED).stdout


def offered(line: str) -> list[str]:
    """What bash is told for a line with the cursor at its end."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return call(**{COMPLETE: "complete_bash"}, **words).split()


def test_names_are_those_of_the_modules_that_know_them():
    assert tuple(FORMATS) == completion.READ
    assert tuple(WRITERS) == completion.WRITTEN
    assert tuple(PLACEMENTS) == completion.PLACED
    assert tuple(EFFORTS) == completion.EFFORTS
    assert completion.PLACINGS == PLACINGS
    assert tuple(RULES) == completion.RULES
    assert set(completion.SEVERITIES) == set(SEVERITIES)
    assert ("auto", *METHODS) == completion.METHODS
    assert tuple(DTYPES) == completion.DTYPES
    assert tuple(CACHE_FORMATS) == completion.CACHE_DTYPES
    assert completion.models("") == list(known_names())
    assert completion.gpus("h") == [name for name in HARDWARE if name.startswith("h")]


def test_a_list_between_commas_goes_on():
    complete = completion.some_of(("sglang", "trtllm", "vllm", "vllm-ascend"))
    assert complete("") == ["sglang", "trtllm", "vllm", "vllm-ascend"]
    assert complete("sglang,v") == ["sglang,vllm", "sglang,vllm-ascend"]
    assert complete("vllm,vllm") == ["vllm,vllm-ascend"]
    assert complete("x") == []


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_processes_that_are_gone_are_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    notes = tmp_path / f"routeprof-{os.getuid()}"
    notes.mkdir()
    (notes / f"{os.getpid()}.json").write_text("[]")
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], **PIPED)
    (notes / f"{ended.stdout.strip()}.json").write_text("[]")
    monkeypatch.setattr(completion.tempfile, "gettempdir", lambda: str(tmp_path))
    assert completion.attached("") == [str(os.getpid())]
    monkeypatch.setattr(completion.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    assert completion.attached("") == []


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("routeprof ", {"demo", "whatif", "serve-metrics"}),
        ("routeprof su", {"summary"}),
        ("routeprof whatif p", {"placement"}),
        ("routeprof summary runs --ph", {"--phase"}),
        ("routeprof summary --phase d", {"decode", "draft"}),
        ("routeprof run --level ", {"windows", "steps", "tokens"}),
        ("routeprof attach 1 --method g", {"gdb"}),
        ("routeprof convert --from imatrix a b --to s", {"sglang", "sglang-pt"}),
        ("routeprof check --fail-on w", {"warning"}),
        ("routeprof plan deepseek-v3", {"deepseek-v3", "deepseek-v3.1"}),
        ("routeprof plan --kv-dtype f", {"fp32", "fp16", "fp8"}),
        ("routeprof audit --hot s", {"source"}),
        ("routeprof diagnose --gpu h", {"h100", "h200", "h20", "h800"}),
        ("routeprof whatif layout --gpu b", {"b200"}),
        ("routeprof whatif layout --placement e", {"eplb"}),
        ("routeprof whatif capacity --rule d", {"deepspeed"}),
        ("routeprof whatif placement --effort h", {"high"}),
        ("routeprof whatif placement --format csv,e", {"csv,eplb"}),
        ("routeprof whatif batching --phase ", {"decode", "prefill"}),
    ],
)
def test_bash_is_offered(line: str, some: set[str]):
    found = offered(line)
    assert len(found) == len(set(found))
    last = line.split(" ")[-1]
    assert set(found) >= some if not last or last == "--ph" else set(found) == some


def test_files_are_left_to_the_shell():
    assert offered("routeprof summary runs") == []
    assert offered("routeprof plan ./conf") == []


def test_completing_imports_nothing_heavy():
    code = (
        "import atexit, os, sys\n"
        f"os.environ.update({COMPLETE}='complete_bash', COMP_CWORD='3')\n"
        "os.environ['COMP_WORDS'] = sys.argv.pop()\n"
        "heavy = {'torch', 'numpy', 'pandas', 'pyarrow', 'dash', 'matplotlib'}\n"
        "atexit.register(lambda: print('heavy:', sorted(heavy & set(sys.modules))))\n"
        "sys.argv[0] = 'routeprof'\n"
        "from routeprof.commands import main\n"
        "main()"
    )
    for line in ("routeprof diagnose --gpu h100", "routeprof convert --from cd-moe"):
        done = subprocess.run([sys.executable, "-c", code, line], **PIPED)
        assert done.stdout.splitlines() == [line.split()[-1], "heavy: []"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_that_the_shell_reads(shell: str, tmp_path: Path):
    script = script_of(shell, tmp_path)
    assert COMPLETE in script.read_text()
    subprocess.run([shell, "-n", str(script)], **PIPED)


@pytest.mark.skipif("bash" not in SHELLS, reason="needs bash")
def test_tab_in_a_bash(tmp_path: Path):
    """Tab is typed; in place of the command something prints what the line became."""
    program = tmp_path / "routeprof"
    program.write_text(
        f'#!/bin/sh\nif [ -n "${COMPLETE}" ]; then exec {sys.executable} -m routeprof "$@"; fi\n'
        'echo "<$*>"\n'
    )
    program.chmod(0o700)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "dumb"}
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    bash = subprocess.Popen(["bash", "--norc", "-i"], env=environment, cwd=tmp_path, **streams)
    os.close(theirs)
    lines = "routeprof what\tpla\t--effort hi\t\nrouteprof plan mixtral-8x7\t\nexit\n"
    os.write(ours, f"source {script_of('bash', tmp_path)}\n{lines}".encode())
    shown = b""
    while b"mixtral-8x7b >" not in shown and b"mixtral-8x7b>" not in shown:
        shown += os.read(ours, 4096)
    bash.wait(60)
    os.close(ours)
    assert b"<whatif placement --effort high>" in shown


def script_of(shell: str, folder: Path) -> Path:
    script = folder / f"script.{shell}"
    by_name = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script.write_text(call("--show-completion", shell, **by_name))
    return script
