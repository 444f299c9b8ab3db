"""``routeprof run``: programs that know nothing of routeprof."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import routeprof
from routeprof.commands.run import split_options
from tests.commands.conftest import MIXTRAL, Cli

SCRIPT = f"""
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
torch.manual_seed(0)
dense = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=4, vocab_size=64))
model = MixtralForCausalLM(MixtralConfig(**{MIXTRAL!r})).eval()
ids = torch.randint(1, 64, (2, 10))
print(model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist())
print(sys.argv[1:], __name__)
model.save_pretrained("saved")
again = MixtralForCausalLM.from_pretrained("saved")
again(ids)
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "generate.py"
    path.write_text(SCRIPT)
    return path


def plain(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same program without routeprof."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)


def test_every_moe_model_is_recorded_and_the_program_is_unchanged(
    cli: Cli, script: Path, tmp_path: Path
):
    without = plain(tmp_path, script.name, "--flag", "x")
    done = cli("run", "-o", "out", "--", sys.executable, script.name, "--flag", "x")
    assert done.returncode == without.returncode == 7
    assert done.stdout == without.stdout

    made, loaded = routeprof.load(tmp_path / "out"), routeprof.load(tmp_path / "out.2")
    # 2 rows of 10 prompt tokens, then 4 decode steps: the fifth token is never fed back.
    assert made.layers()["tokens"].tolist() == [2 * (10 + 4)] * 3
    assert loaded.layers()["tokens"].tolist() == [2 * 10] * 3
    assert made.coverage == loaded.coverage == 1.0
    assert [layer.name for layer in made.info.layers] == [f"model.layers.{n}.mlp" for n in range(3)]


@pytest.mark.parametrize("form", ["module", "code", "flags"])
def test_the_ways_of_starting_python(cli: Cli, script: Path, tmp_path: Path, form: str):
    forms = {
        "module": ["-m", "generate", "a"],
        "code": ["-c", SCRIPT, "a"],
        "flags": ["-u", "-X", "utf8", "-W", "ignore", script.name, "a"],
    }
    without = plain(tmp_path, *forms[form])
    done = cli("run", "-o", "out", "--", sys.executable, *forms[form])
    assert done.returncode == 7, done.stderr
    assert done.stdout == without.stdout
    assert routeprof.load(tmp_path / "out").coverage == 1.0


def test_a_program_without_moe_models_says_so(cli: Cli, tmp_path: Path):
    done = cli("run", "-o", "out", "--", sys.executable, "-c", "print('hello')")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "nothing was recorded" in done.stderr


def test_level_and_paused(cli: Cli, script: Path, tmp_path: Path):
    done = cli(
        "run", "-o", "out", "--level", "tokens", "--no-gate", "--paused", "--", sys.executable,
        script.name,
    )  # fmt: skip
    assert done.returncode == 7
    profile = routeprof.load(tmp_path / "out")
    assert (profile.info.level, profile.info.gate) == ("tokens", False)
    assert [finding.code for finding in profile.findings()] == ["nothing-captured"]


def test_a_signal_reaches_the_program(tmp_path: Path):
    code = "import os, sys; print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-m", "routeprof", "run", "-o", "out", "--", sys.executable]
    process = subprocess.Popen(
        [*command, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    os.kill(process.pid, signal.SIGTERM)
    process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_options_of_the_interpreter_are_told_from_the_program():
    assert split_options(["-W", "error", "-u", "a.py", "-v"]) == (
        ["-W", "error", "-u"],
        ["a.py", "-v"],
    )
    assert split_options(["-m", "pkg", "-x"]) == ([], ["-m", "pkg", "-x"])
    assert split_options([]) == ([], [])
