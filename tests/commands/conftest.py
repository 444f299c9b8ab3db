"""The command line as a user has it: a process, its two streams and its exit status."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import routeprof
from tests.commands.forks import Done, environment, forks

Cli = Callable[..., Done]

MIXTRAL = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_local_experts": 8,
}


FORKED = {"audit", "check", "diagnose", "fold", "plan", "report", "summary", "whatif"}
"""Verbs that only read; the others start, hook or stop programs."""


def in_a_process(arguments: list[str], folder: Path) -> Done:
    """Run ``routeprof`` with these arguments in a folder, as a user does."""
    command = [sys.executable, "-m", "routeprof", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, timeout=300, check=False
    )


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs ``routeprof`` with the given arguments in an empty folder."""

    def call(*arguments: object) -> Done:
        words = [str(argument) for argument in arguments]
        forked = words and words[0] in FORKED and sys.platform == "linux"
        if forked and environment() == forks().environment:
            return forks().run(words, tmp_path)
        return in_a_process(words, tmp_path)

    return call


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of level steps: 2 x 10 tokens and 4 decode steps of a tiny Mixtral."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**MIXTRAL)).eval()
    directory = tmp_path_factory.mktemp("runs") / "mixtral"
    ids = torch.randint(1, 64, (2, 10))
    with routeprof.record(model, directory, level="steps") as running, running.tag("code"):
        model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    return directory
