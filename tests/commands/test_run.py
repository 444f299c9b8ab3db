"""``routeprof run``: programs that know nothing of routeprof."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.commands.program import hooked, shebang, split_options
from routeprof.commands.run import rank_list
from routeprof.errors import UsageError
from routeprof.topology import RankRole
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


# -- console scripts


def console_script(path: Path, code: str, first_lines: str = f"#!{sys.executable}") -> Path:
    path.write_text(f"{first_lines}\n{code}")
    path.chmod(0o755)
    return path


FIRST_LINES = {
    "shebang": f"#!{sys.executable} -u",
    "env": f"#!/usr/bin/env {Path(sys.executable).name}",
    "long path": f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''",
}


@pytest.mark.parametrize("first_lines", FIRST_LINES)
def test_how_a_console_script_names_python(
    tmp_path: Path, first_lines: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    tool = str(console_script(tmp_path / "tool", "", FIRST_LINES[first_lines]))
    options = ["-u"] if first_lines == "shebang" else []
    expected = [sys.executable, *options, "-m", "routeprof.hooks.launch", tool, "-x"]
    assert hooked([tool, "-x"]).arguments == expected


def test_a_console_script_is_hooked(cli: Cli, tmp_path: Path):
    console_script(tmp_path / "tool", SCRIPT, FIRST_LINES["long path"])
    without = subprocess.run(
        ["./tool", "a"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    done = cli("run", "-o", "out", "--", "./tool", "a")
    assert done.returncode == without.returncode == 7
    assert done.stdout == without.stdout
    assert routeprof.load(tmp_path / "out").coverage == 1.0


ENGINE = f"""
import json, multiprocessing, os, sys

def worker(queue):
    queue.put(os.environ["ROUTEPROF_RUN"])

def main():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=worker, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
    print(sys.argv)
    if "--make" in sys.argv:
        import torch
        from transformers import MixtralConfig, MixtralForCausalLM
        MixtralForCausalLM(MixtralConfig(**{MIXTRAL!r}))(torch.ones(1, 3, dtype=int))
    sys.exit(5)
"""


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    """A console script like vLLM's, of a package of that name which serves nothing."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / "vllm" / "main.py").write_text(ENGINE)
    code = "from vllm.main import main\nif __name__ == '__main__':\n    main()\n"
    return console_script(tmp_path / "serve", code)


@pytest.mark.parametrize("make", [[], ["--make"]])
def test_an_engine_finds_the_settings_and_is_left_to_its_plugin(
    cli: Cli, tmp_path: Path, fake_vllm: Path, make: list[str]
):
    options = ["--level", "steps", "--no-gate", "--window", "0.5", "--paused", "--ranks", "2,0"]
    done = cli("run", "-o", "out", *options, "--", fake_vllm, "serve", *make)
    assert done.returncode == 5, done.stderr
    first, second = done.stdout.splitlines()
    settings = json.loads(first)
    assert len(settings.pop("run")) == 32
    assert settings == {
        "out": str(tmp_path / "out"),
        "level": "steps",
        "gate": False,
        "window": 0.5,
        "paused": True,
        "ranks": [0, 2],
    }
    assert second == str([str(fake_vllm), "serve", *make])
    # Neither hooks on what the engine makes, nor a word about it.
    assert not (tmp_path / "out").exists()
    assert "routeprof" not in done.stderr


# -- several ranks

RANK_SCRIPT = f"""
import json, os, sys, torch
import torch.distributed as dist
from torch.nn import functional
from transformers import MixtralConfig, MixtralForCausalLM
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
config = MixtralConfig(**{MIXTRAL!r}, experts_implementation="eager")
model = MixtralForCausalLM(config).eval()
calls, one_hot = [], functional.one_hot
def watched(ids, num_classes):
    calls.append(ids.flatten().bincount(minlength=8).tolist()[:8])
    return one_hot(ids, num_classes)
functional.one_hot = watched
torch.manual_seed(rank)
ids = torch.randint(1, 64, (2 + rank, 7))
model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
with open(f"truth-{{rank}}.json", "w") as file:
    json.dump([calls[layer::3] for layer in range(3)], file)
dist.barrier()
dist.destroy_process_group()
sys.exit(0)
"""


def truth(tmp_path: Path, rank: int) -> np.ndarray:
    """Assignments [layers, experts] as the rank's experts were handed them."""
    calls = json.loads((tmp_path / f"truth-{rank}.json").read_text())
    return np.array(calls).sum(1)


def torchrun(cli: Cli, *options: str):
    program = Path(sysconfig.get_path("scripts")) / "torchrun"
    command = [program, "--standalone", "--nproc-per-node", "2", "ranks.py"]
    return cli("run", "-o", "out", *options, "--", *command)


def test_the_counts_of_data_parallel_ranks_add_up(cli: Cli, tmp_path: Path):
    (tmp_path / "ranks.py").write_text(RANK_SCRIPT)
    done = torchrun(cli)
    assert done.returncode == 0, done.stderr
    profile = routeprof.load(tmp_path / "out")
    np.testing.assert_array_equal(profile.counts, truth(tmp_path, 0) + truth(tmp_path, 1))
    assert profile.files is not None
    roles = [rank.state.role for rank in profile.files.ranks if rank.state]
    assert roles == [RankRole(0, 2, dp=0), RankRole(1, 2, dp=1)]
    assert profile.coverage == 1.0
    assert "rank 1: recorded" in done.stderr


def test_some_ranks_only(cli: Cli, tmp_path: Path):
    (tmp_path / "ranks.py").write_text(RANK_SCRIPT)
    done = torchrun(cli, "--ranks", "1")
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(routeprof.load(tmp_path / "out").counts, truth(tmp_path, 1))
    assert "rank 0" not in done.stderr


TENSOR_PARALLEL = """
import torch, torch.distributed as dist
from transformers import MixtralForCausalLM
from transformers.distributed import DistributedConfig
split = DistributedConfig(tp_size=2)
model = MixtralForCausalLM.from_pretrained("saved", distributed_config=split).eval()
model(torch.arange(1, 21).reshape(2, 10))
dist.barrier()
dist.destroy_process_group()
"""


def test_tensor_parallel_twins_do_not_count_twice(cli: Cli, tmp_path: Path):
    pytest.importorskip("transformers.distributed", reason="this transformers has other ways")
    from transformers import MixtralConfig, MixtralForCausalLM

    MixtralForCausalLM(MixtralConfig(**MIXTRAL)).save_pretrained(tmp_path / "saved")
    (tmp_path / "ranks.py").write_text(TENSOR_PARALLEL)
    done = torchrun(cli)
    assert done.returncode == 0, done.stderr
    profile = routeprof.load(tmp_path / "out")
    assert profile.layers()["tokens"].tolist() == [20] * 3
    assert profile.files is not None
    owners = [rank.state.role.owns_tokens for rank in profile.files.ranks if rank.state]
    assert owners == [True, False]


def test_a_rank_that_fails_is_seen(cli: Cli, tmp_path: Path):
    (tmp_path / "ranks.py").write_text("import sys; sys.exit(3)")
    done = torchrun(cli)
    assert done.returncode == 1
    assert "exitcode  : 3" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.py", "-m", "x"], ["-m", "routeprof.hooks.launch", "a.py", "-m", "x"]),
        (
            ["--nproc_per_node=2", "--", "a.py"],
            ["--nproc_per_node=2", "-m", "routeprof.hooks.launch", "a.py"],
        ),
        (["-m", "pkg", "a.py"], ["-m", "routeprof.hooks.launch", "-m", "pkg", "a.py"]),
        (
            ["--nnodes", "2", "--module", "pkg", "--flag"],
            ["--nnodes", "2", "--module", "routeprof.hooks.launch", "-m", "pkg", "--flag"],
        ),
    ],
)
def test_where_the_hooks_go_into_a_torchrun_command(words: list[str], expected: list[str]):
    program = hooked([sys.executable, "-u", "-m", "torch.distributed.run", *words])
    assert program.arguments == [sys.executable, "-u", "-m", "torch.distributed.run", *expected]
    assert program.shared == ("--nnodes" in words)


# -- what cannot be run


@pytest.mark.parametrize(
    ("options", "command", "message"),
    [
        ([], ["/bin/true"], "cannot hook /bin/true"),
        ([], ["no-such-program"], "is not a program"),
        ([], [sys.executable], "needs a script"),
        (["--ranks", "first"], [sys.executable, "-c", ""], "write all, or numbers"),
        (["--level", "deep"], [sys.executable, "-c", ""], "not one of windows, steps, tokens"),
        (["--window", "0"], [sys.executable, "-c", ""], "between 0.05 and 3600"),
        ([], ["torchrun", "--no-python", "x"], "cannot hook torchrun --no-python"),
        ([], ["torchrun", "--nproc"], "torchrun: "),
        ([], ["torchrun"], "torchrun: "),
    ],
)
def test_one_line_says_what_is_wrong(
    cli: Cli, options: list[str], command: list[str], message: str
):
    if command[0] == "torchrun":
        command = [str(Path(sysconfig.get_path("scripts")) / "torchrun"), *command[1:]]
    done = cli("run", "-o", "out", *options, "--", *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("routeprof: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_interpreter_without_routeprof_is_named(tmp_path: Path):
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec "{base}" -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UsageError, match=r"python3 has no routeprof; run: .*pip install"):
        hooked([str(bare), "script.py"])


def test_a_directory_in_use_is_for_several_nodes_only(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    done = cli("run", "-o", "out", "--", sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (2, "")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = cli("run", "-o", "out", "--", sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_lists_of_ranks():
    assert (rank_list("all"), rank_list("2, 0,2"), rank_list("3")) == (None, [0, 2], [3])


def test_scripts_that_are_not_pythons(tmp_path: Path):
    for number, text in enumerate(["", "#!", "#!/bin/sh\n", "\x7fELF", "#!/usr/bin/env bash\n"]):
        script = tmp_path / str(number)
        script.write_text(text)
        assert shebang(script) == []
    assert shebang(tmp_path / "missing") == []


def test_a_forked_child_neither_writes_nor_says_anything(cli: Cli, tmp_path: Path):
    code = f"""
import os, torch
from transformers import MixtralConfig, MixtralForCausalLM
def run(tokens):
    MixtralForCausalLM(MixtralConfig(**{MIXTRAL!r}))(torch.ones(1, tokens, dtype=int))
run(3)
if not os.fork():
    import sys; sys.exit(0)
os.wait()
"""
    done = cli("run", "-o", "out", "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("recorded") == 1
    assert routeprof.load(tmp_path / "out").layers()["tokens"].tolist() == [3] * 3
