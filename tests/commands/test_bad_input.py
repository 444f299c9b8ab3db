"""Bad input gets one clear line on stderr and exit status 2, never a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.commands.conftest import Cli

READERS = (("summary",), ("report", "-o", "out"), ("dashboard", "--port", "0"))


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line on stderr of a call that failed as it should."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("routeprof: ")
    return lines[0]


@pytest.fixture
def copy(recording: Path, tmp_path: Path) -> Path:
    """A recording that the test may damage."""
    return Path(shutil.copytree(recording, tmp_path / "copy"))


@pytest.mark.parametrize("verb", READERS[:2], ids=lambda verb: verb[0])
def test_a_directory_that_is_not_there(cli: Cli, verb: tuple[str, ...]):
    line = one_line(cli(verb[0], "nowhere", *verb[1:]))
    assert "nowhere does not exist" in line


@pytest.mark.parametrize("verb", READERS[:2], ids=lambda verb: verb[0])
def test_not_a_recording(cli: Cli, tmp_path: Path, verb: tuple[str, ...]):
    (tmp_path / "other").mkdir()
    assert "has no recording.json" in one_line(cli(verb[0], "other", *verb[1:]))


def test_a_file_instead_of_a_directory(cli: Cli, tmp_path: Path):
    (tmp_path / "file").write_text("text")
    assert "pass a recording's directory" in one_line(cli("summary", "file"))


def test_a_newer_schema(cli: Cli, copy: Path):
    info = json.loads((copy / "recording.json").read_text())
    (copy / "recording.json").write_text(json.dumps({**info, "schema": 2}))
    line = one_line(cli("summary", copy))
    assert "schema 2" in line
    assert "pip install --upgrade" in line


def test_a_damaged_recording_json(cli: Cli, copy: Path):
    (copy / "recording.json").write_text("{")
    assert "damaged" in one_line(cli("summary", copy))


def test_a_truncated_part_among_others_is_named_and_the_rest_is_shown(cli: Cli, copy: Path):
    whole = copy / "rank-00000" / "part-000000.parquet"
    shutil.copy(whole, whole.with_name("part-000001.parquet"))
    whole.write_bytes(whole.read_bytes()[:-200])
    done = cli("summary", copy)
    assert done.returncode == 0, done.stderr
    first = " ".join(done.stdout.splitlines()[:3])
    assert "part-000000.parquet" in first
    data = json.loads(cli("summary", copy, "--json").stdout)
    assert [layer["tokens"] for layer in data["layers"]] == [28, 28, 28]


def test_a_recording_whose_only_part_is_truncated(cli: Cli, copy: Path):
    part = copy / "rank-00000" / "part-000000.parquet"
    part.write_bytes(part.read_bytes()[:100])
    assert "no part of" in one_line(cli("summary", copy))


@pytest.mark.parametrize("between", ["5", "10-5", "-5", "-1-5", "a-b", "1-2-3", "1-inf"])
def test_a_range_that_is_none(cli: Cli, recording: Path, between: str):
    assert "is no range" in one_line(cli("summary", recording, f"--between={between}"))


def test_an_unknown_phase_and_tag(cli: Cli, recording: Path):
    line = one_line(cli("summary", recording, "--phase", "verify"))
    assert "prefill, decode" in line
    assert "code" in one_line(cli("summary", recording, "--tag", "prose"))


def test_recording_into_a_directory_that_holds_something(cli: Cli, recording: Path):
    line = one_line(cli("run", "-o", recording, "--", sys.executable, "script.py"))
    assert "is not empty" in line


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["no-such-program"], "is not a program"),
        (["ls"], "only Python programs"),
        (["python"], "needs a script"),
    ],
)
def test_commands_that_cannot_be_hooked(cli: Cli, command: list[str], says: str):
    assert says in one_line(cli("run", "-o", "out", "--", *command))


def test_another_host_without_a_token(cli: Cli, recording: Path):
    assert "--auth-token" in one_line(cli("dashboard", recording, "--host", "0.0.0.0"))


RECORD = """
    import sys, torch, routeprof
    from routeprof.errors import RouteprofError
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
    small = dict(hidden_size=32, intermediate_size=16, num_hidden_layers=1,
                 num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    try:
        {body}
    except RouteprofError as error:
        print(type(error).__name__, error)
        sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "routeprof.record(LlamaForCausalLM(LlamaConfig(**small)), 'out')",
            "NoMoELayersError LlamaForCausalLM has no MoE layer",
        ),
        (
            "model = MixtralForCausalLM(MixtralConfig(**small, num_local_experts=4))\n    "
            "routeprof.record(model, 'out').tag('two\\nlines')",
            "InvalidTagError tag 'two\\nlines' has control characters",
        ),
        (
            "model = MixtralForCausalLM(MixtralConfig(**small, num_local_experts=4))\n    "
            "routeprof.record(model, 'out').tag('=1+1')",
            "InvalidTagError tag '=1+1' would be a formula",
        ),
    ],
    ids=["no MoE layers", "tag with newline", "tag with formula"],
)
def test_recording_what_cannot_be_recorded(tmp_path: Path, body: str, says: str):
    script = textwrap.dedent(RECORD).format(body=body)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith(says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("whatif layout x --gpus abc", "invalid value for '--gpus'"),
        ("whatif layout", "missing argument"),
        ("whatif layot x", "Did you mean 'layout'"),
        ("summary --nosuch x", "no such option: --nosuch"),
        ("report x", "missing option"),
        ("nosuch", "no such command 'nosuch'"),
        ("whatif capacity x --factors", "requires an argument"),
    ],
)
def test_words_that_are_no_command(cli: Cli, words: str, says: str):
    line = one_line(cli(*words.split()))
    assert says in line
    assert line.endswith("--help")
