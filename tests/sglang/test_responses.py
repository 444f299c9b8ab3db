"""Routed experts in SGLang's answers, beside what was recorded of the same engine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import routeprof
from routeprof.formats import Told, convert
from tests.formats.served import DATA
from tests.sglang.conftest import ENVIRONMENT, LIMIT, ROOT, Engines, scene


@pytest.mark.skipif(
    find_spec("sglang") is None, reason="SGLang is not installed here: make test-sglang"
)
def test_the_encoder_is_the_one_of_our_files(tmp_path: Path):
    command = [sys.executable, "-m", "tests.formats.served", "sglang", str(tmp_path / "a.jsonl")]
    subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=True, timeout=LIMIT)
    assert (tmp_path / "a.jsonl").read_bytes() == (DATA / "sglang.jsonl").read_bytes()


def test_answers_say_what_the_recording_says(engines: Engines, tmp_path: Path):
    """The second round repeats prompts of the first: what is cached must not count again."""
    files = [tmp_path / f"{number}.jsonl" for number in range(2)]
    rounds = [scene(40, 7, 21, responses=str(file)) for file in files]
    run = engines.run("glm", rounds, {"gate": False}, enable_return_routed_experts=True)
    assert sum(request["cached"] for request in run.requests(1)) > 0
    told = Told(top_k=run.shape.top_k, layers=3, experts=run.shape.experts)
    read = routeprof.load(convert(files, tmp_path / "run", told=told))
    assert tuple(read.layer_indices) == run.shape.moe
    assert read.in_state("dense") == run.shape.dense
    assert np.array_equal(read.counts, run.profile.counts)
    for phase in ("prefill", "decode"):
        ours, theirs = read.select(phase=phase), run.profile.select(phase=phase)
        assert np.array_equal(ours.counts, theirs.counts)
    assert len(read.requests()) == 6
