"""Predictions proven: the sample model runs the very batches that were composed.

In float64 a token's hidden state differs by some 1e-15 between running alone and in a padded batch,
in float32 by some 1e-6, which is enough to turn a near-tie between two experts.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import routeprof
from routeprof.metrics.balance import imbalance_ratio
from routeprof.metrics.ranks import contiguous, rank_loads
from routeprof.profile import Profile
from routeprof.sample_data import PROMPT_KINDS, encode, load_model, load_prompts
from routeprof.whatif.batching import compare_batching
from routeprof.whatif.requests.batch_steps import batch_step_counts, waits
from routeprof.whatif.requests.compose import fifo, load_aware, shuffled
from routeprof.whatif.requests.served import PHASES, served_requests
from routeprof.whatif.requests.signatures import expected_by_class

EACH, SIZE, RANKS = 4, 4, 4


@pytest.fixture(scope="module")
def model() -> Any:
    model = load_model().double()
    model.set_experts_implementation("eager")  # grouped_mm has no float64
    return model


Answers = list[tuple[Tensor, Tensor]]
"""Of each request its prompt and the tokens that were fed after it, [tokens] each."""


@pytest.fixture(scope="module")
def alone(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Answers]:
    """Requests served one by one, of different length, kind after kind."""
    directory, answers = tmp_path_factory.mktemp("alone") / "r", []
    with torch.inference_mode(), routeprof.record(model, directory, level="tokens") as recording:
        for number, kind in enumerate(PROMPT_KINDS):
            for place, text in enumerate(load_prompts(kind)[:EACH]):
                batch = encode([text], length=30 + 11 * ((3 * place + number) % 5))
                new = 3 + (5 * place + number) % 7
                with recording.tag(kind):
                    ids = model.generate(
                        **batch, max_new_tokens=new, min_new_tokens=new, do_sample=False
                    )
                prompt = batch["input_ids"].shape[1]
                answers.append((ids[0, :prompt], ids[0, prompt:-1]))  # the last is never fed
    return routeprof.load(directory), answers


def run_batch(model: Any, answers: Answers) -> None:
    """The prompts padded on the left in one pass, then the same answers in lockstep."""
    from transformers import DynamicCache

    width = max(len(prompt) for prompt, _ in answers)
    ids = torch.zeros(len(answers), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(answers):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    cache = DynamicCache(config=model.config)
    new_name = "cache" in inspect.signature(model.forward).parameters
    kept = {"cache" if new_name else "past_key_values": cache}
    model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        **kept,
    )
    left = list(range(len(answers)))
    for turn in range(max(len(answer) for _, answer in answers)):
        going = [place for place, row in enumerate(left) if turn < len(answers[row][1])]
        if len(going) < len(left):  # who has ended leaves
            cache.batch_select_indices(torch.tensor(going))
            left, mask = [left[place] for place in going], mask[going]
        mask = torch.cat((mask, torch.ones(len(left), 1, dtype=torch.long)), dim=1)
        model(
            input_ids=torch.stack([answers[row][1][turn] for row in left]).reshape(-1, 1),
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            **kept,
        )


@pytest.fixture(scope="module", params=["fifo", "random", "load_aware"])
def together(
    request: pytest.FixtureRequest,
    model: Any,
    alone: tuple[Profile, Answers],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[np.ndarray, Profile]:
    """Batches of a policy, and the recording of the model that ran them."""
    profile, answers = alone
    requests = served_requests(profile, "decode")
    members = np.arange(len(answers))
    expected = expected_by_class(requests, members, members, RANKS)
    batches = {
        "fifo": fifo(members, SIZE),
        "random": shuffled(members, SIZE, np.random.default_rng(0)),
        "load_aware": load_aware(members, expected, SIZE),
    }[request.param]
    directory = tmp_path_factory.mktemp("together") / "r"
    with torch.inference_mode(), routeprof.record(model, directory, level="steps"):
        for batch in batches:
            run_batch(model, [answers[place] for place in batch])
    return batches, routeprof.load(directory)


def measured(profile: Profile, phase: str) -> list[np.ndarray]:
    """Counts of each layer's steps in the order in which they ran, [steps, experts]."""
    steps = profile.select(phase=phase).step_counts()
    return [steps.counts[steps.layer == layer] for layer in profile.layer_indices]


@pytest.mark.parametrize("phase", PHASES)
def test_every_step_of_a_composed_batch_is_as_predicted(alone, together, phase: str):
    batches, ran = together
    requests = served_requests(alone[0], phase)
    assert (requests.left_out, requests.blind) == (0, ())
    assert list(requests.classes) == [kind for kind in PROMPT_KINDS for _ in range(EACH)]
    _, predicted = batch_step_counts(requests, batches)
    found = measured(ran, phase)
    assert len(found) == len(predicted) == 4
    for one, other in zip(predicted, found, strict=True):
        assert one.tolist() == other.tolist()
        assert imbalance_ratio(one).tolist() == imbalance_ratio(other).tolist()


@pytest.mark.parametrize("phase", PHASES)
def test_figures_are_those_of_the_run(alone, together, phase: str):
    batches, ran = together
    made = waits(served_requests(alone[0], phase), batches, RANKS)
    counts = np.concatenate(measured(ran, phase))  # all layers have as many experts
    tokens = counts.sum(1) / 2
    ranks = rank_loads(counts, contiguous(16, RANKS), RANKS)
    assert made.imbalance_ratio == pytest.approx(
        np.average(imbalance_ratio(counts), weights=tokens)
    )
    assert made.straggler_factor == pytest.approx(ranks.max(1).sum() / ranks.mean(1).sum())
    cells = counts[counts > 0]
    assert made.tokens_per_expert == pytest.approx((cells.mean(), np.median(cells)))
    assert made.small_gemm_share == pytest.approx((cells < 16).mean())
    assert made.steps == len(counts) / 4


def test_answers_end_at_different_times(alone, together):
    """Else the rule for requests that end early were not tried."""
    batches, _ = together
    lengths = np.array([len(answer) for _, answer in alone[1]])
    assert (lengths[batches].min(1) < lengths[batches].max(1)).all()


def test_mixing_kinds_is_predicted_to_help(alone):
    made = compare_batching(alone[0], [4], ranks=RANKS, phase="prefill")
    assert made.known_by == "tag"
    assert made.signatures.between > made.signatures.within
    figures = {one.policy: one.straggler_factor for one in made.policies}
    assert figures["load_aware"] < figures["random"] < figures["fifo"]
