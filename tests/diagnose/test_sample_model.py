"""The sample model: narrow prompts are the input's doing, a collapsed router is the model's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import routeprof
from routeprof.diagnose.examine import examine
from routeprof.diagnose.question import Answer, Question
from routeprof.hooks.transformers import record
from routeprof.sample_data import PROMPT_KINDS, RECORDINGS_DIR, encode, load_model, load_prompts

BATCH, NEW = 16, 24


@pytest.fixture(scope="module")
def model():
    return load_model()


def served(model, directory: Path, batches: Sequence[tuple[str, list[str]]], level: str) -> Answer:
    """What is found in a recording of these batches, each under its tag."""
    with torch.inference_mode(), record(model, directory, level=level, window=0.1) as running:
        for tag, prompts in batches:
            with running.tag(tag):
                torch.manual_seed(0)
                model.generate(**encode(prompts), max_new_tokens=NEW, do_sample=True)
    return examine(Question(routeprof.load(directory)))


def graver_than_info(answer: Answer) -> dict[str, dict]:
    return {one.code: dict(one.figures) for one in answer.findings if one.severity != "info"}


@pytest.mark.parametrize("level", ["windows", "steps"])
def test_prompts_of_one_kind_after_another_are_narrow_input(model, tmp_path: Path, level: str):
    batches = [(kind, load_prompts(kind)[:BATCH]) for kind in PROMPT_KINDS]
    found = graver_than_info(served(model, tmp_path / "run", batches, level))
    assert set(found) == {"narrow-input"}
    figures = found["narrow-input"]
    assert figures["imbalance_ratio_worst_tag"] > 3 > 1.6 > figures["imbalance_ratio_mixed"]
    if level == "steps":
        assert figures["divergence"] > 3 * figures["noise"]


@pytest.mark.parametrize("level", ["windows", "steps"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_prompts_shuffled_are_not(model, tmp_path: Path, level: str, seed: int):
    prompts = [text for kind in PROMPT_KINDS for text in load_prompts(kind)[:BATCH]]
    random.Random(seed).shuffle(prompts)
    batches = [
        (f"batch {first}", prompts[first : first + BATCH])
        for first in range(0, len(prompts), BATCH)
    ]
    assert graver_than_info(served(model, tmp_path / "run", batches, level)) == {}


def test_one_kind_alone_leaves_the_cause_open(model, tmp_path: Path):
    answer = served(model, tmp_path / "run", [("json", load_prompts("json")[:BATCH])], "steps")
    # Sixteen requests change as they go on, which may count as drift.
    assert set(graver_than_info(answer)) - {"drift-within"} == {"hot-experts"}
    assert "two tags" in answer.unjudged["narrow-input, model-skew"]


def test_the_collapsed_model_is_diagnosed_as_model_skew():
    found = graver_than_info(examine(Question(routeprof.load(RECORDINGS_DIR / "collapsed"))))
    assert set(found) == {"model-skew"}
    assert found["model-skew"]["imbalance_ratio_best_tag"] > 3


def test_the_healthy_model_on_the_same_prompts_as_narrow_input():
    found = graver_than_info(examine(Question(routeprof.load(RECORDINGS_DIR / "healthy"))))
    assert set(found) == {"narrow-input"}
