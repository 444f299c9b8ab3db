"""A recording of single tokens, and what a view draws from it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from time import time
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import routeprof
from routeprof.dashboards.live.source import Source
from routeprof.dashboards.state import ViewState
from routeprof.dashboards.view import Context
from tests.commands.conftest import MIXTRAL

EXPERTS, TOP_K, LAYERS = 8, 2, (0, 1, 2)


def record_tokens(directory: Path, *tags: str | None, rows: int = 3, tokens: int = 40) -> Path:
    """A batch of prompts under every tag, each with 4 decode steps, through a tiny Mixtral."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**MIXTRAL)).eval()
    with routeprof.record(model, directory, level="tokens") as running:
        for number, tag in enumerate(tags):
            # Each tag has words of its own.
            ids = torch.randint(1 + 20 * number, 21 + 20 * number, (rows, tokens)) % 64
            with running.tag(tag) if tag else nullcontext():
                model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    return directory


def context_of(directory: Path, **state: Any) -> Context:
    """What a view draws from."""
    source, whole = Source(directory), routeprof.load(directory)
    chosen = ViewState(**state)
    profile = whole.select(phase=chosen.phase, tag=chosen.tag)
    activity = source.read().activity
    return Context(whole, profile, chosen, "light", activity, time(), spans=source.spans())
