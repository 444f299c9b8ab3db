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

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

MIXTRAL = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_local_experts": 8,
}


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs ``routeprof`` with the given arguments in an empty folder."""

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "routeprof", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
        )

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
