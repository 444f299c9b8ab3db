"""generate(): phases, tags, and the experts of every token in the order in which it ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from routeprof import Profile
from tests.hooks.conftest import (
    TOP_K,
    Record,
    by_block,
    counts_of,
    model_of,
    problems_of,
    profile_of,
    selected,
)
from tests.zoo.families import BY_TYPE, inputs
from tests.zoo.oracle import Truth, oracle

NEW = 5
GREEDY = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
PROMPT, PAD = 10, 4
REAL = 2 * PROMPT - PAD
"""Tokens of the zoo's two prompts, the second of which is padded on the left."""

Run = Callable[[nn.Module], Any]


def prompts(**options: Any) -> dict[str, Tensor]:
    return inputs(BY_TYPE["mixtral"], **options)


def recorded(record: Record, model: nn.Module, run: Run, **options: Any) -> tuple[Profile, Truth]:
    with record(model, **options) as recording, oracle(model) as truth:
        run(model)
    profile = profile_of(recording)
    assert profile.coverage == 1.0
    assert problems_of(profile) == {}
    return profile, truth


def real_rows(mask: Tensor, truth: Truth) -> Tensor:
    """Rows that are not padding, of a prompt and everything that follows it."""
    rows = len(next(iter(truth.ids.values())))
    return torch.cat([mask.flatten(), torch.ones(rows - mask.numel(), dtype=torch.long)])


def phase_totals(profile: Profile) -> dict[str, tuple[int, int]]:
    """Steps and tokens of each phase, in the first MoE layer."""
    totals = profile.totals
    return {
        phase: (
            int(totals.sums["steps"][number, profile.captured[0]]),
            int(totals.sums["tokens"][number, profile.captured[0]]),
        )
        for number, (phase, _) in enumerate(totals.keys)
    }


@pytest.mark.parametrize(
    ("model_type", "cache"),
    [
        ("mixtral", None),
        ("mixtral", "static"),
        ("deepseek_v3", "static"),
        ("gpt_oss", None),
        ("gpt_oss", "static"),
        ("jamba", None),
    ],
)
def test_prefill_and_decode(model_type: str, cache: str | None, record: Record):
    tensors = prompts()
    profile, truth = recorded(
        record,
        model_of(model_type),
        lambda model: model.generate(**tensors, **GREEDY, cache_implementation=cache),
    )
    assert phase_totals(profile) == {"prefill": (1, REAL), "decode": (NEW - 1, 2 * (NEW - 1))}
    keep = real_rows(tensors["attention_mask"], truth)
    assert counts_of(profile) == selected(truth.ids, keep)
    prefill = keep.clone()
    prefill[2 * PROMPT :] = 0
    assert counts_of(profile.select(phase="prefill")) == selected(truth.ids, prefill)
    assert counts_of(profile.select(phase="decode")) == selected(truth.ids, keep - prefill)


def test_a_static_cache_used_again_begins_anew(record: Record):
    def twice(model: nn.Module) -> None:
        for _ in range(2):
            model.generate(**prompts(), **GREEDY, cache_implementation="static")

    profile, _ = recorded(record, model_of("mixtral"), twice)
    assert phase_totals(profile) == {"prefill": (2, 2 * REAL), "decode": (8, 16)}


def test_tags(mixtral: nn.Module, record: Record):
    one, other = prompts(seed=1, pad=0), prompts(seed=2, pad=0)
    with record(mixtral) as recording, oracle(mixtral) as untagged:
        mixtral.generate(**one, **GREEDY)
        with recording.tag("other"):
            mixtral.generate(**other, **GREEDY)
    profile = profile_of(recording)
    with oracle(mixtral) as expected:
        mixtral.generate(**other, **GREEDY)
    assert profile.tags == (None, "other")
    assert counts_of(profile.select(tag="other")) == by_block(expected.counts)
    assert counts_of(profile) == by_block(untagged.counts)
    assert phase_totals(profile.select(tag="other"))["decode"] == (NEW - 1, 2 * (NEW - 1))


def test_a_prompt_of_one_token_is_prefill(record: Record):
    tensors = prompts(length=1, pad=0)
    for cache in (None, "static"):
        profile, truth = recorded(
            record,
            model_of("mixtral"),
            lambda model, cache=cache: model.generate(
                **tensors, **GREEDY, cache_implementation=cache
            ),
        )
        assert phase_totals(profile) == {"prefill": (1, 2), "decode": (NEW - 1, 2 * (NEW - 1))}
        assert counts_of(profile) == by_block(truth.counts)


def test_without_a_cache_every_pass_is_prefill(mixtral: nn.Module, record: Record):
    tensors = prompts(pad=0)
    profile, truth = recorded(
        record, mixtral, lambda model: model.generate(**tensors, **GREEDY, use_cache=False)
    )
    tokens = sum(2 * (PROMPT + grown) for grown in range(NEW))
    assert phase_totals(profile) == {"prefill": (NEW, tokens)}
    assert counts_of(profile) == by_block(truth.counts)


def test_beam_search(mixtral: nn.Module, record: Record):
    tensors, beams = prompts(), 3
    profile, truth = recorded(
        record, mixtral, lambda model: model.generate(**tensors, **GREEDY, num_beams=beams)
    )
    mask = tensors["attention_mask"].repeat_interleave(beams, dim=0)
    assert counts_of(profile) == selected(truth.ids, real_rows(mask, truth))
    decoded = 2 * beams * (NEW - 1)
    assert phase_totals(profile) == {"prefill": (1, beams * REAL), "decode": (NEW - 1, decoded)}


def test_assisted_generation_counts_what_the_model_verified(record: Record):
    tensors, assistant = prompts(batch=1, pad=0), model_of("mixtral", seed=1)
    profile, truth = recorded(
        record,
        model_of("mixtral"),
        lambda model: model.generate(**tensors, **GREEDY, assistant_model=assistant),
    )
    assert counts_of(profile) == by_block(truth.counts)
    rows = len(next(iter(truth.ids.values())))
    assert rows > PROMPT + NEW - 1  # some drafts were refused
    assert {"prefill", "unknown"} <= set(profile.phases)
    assert sum(tokens for _, tokens in phase_totals(profile).values()) == rows


def test_positions_follow_the_cache_when_drafts_are_refused(record: Record):
    tensors, assistant = prompts(batch=1, pad=0), model_of("mixtral", seed=1)
    model, places = model_of("mixtral"), []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        cache = kwargs.get("cache") or kwargs.get("past_key_values")
        past = cache.get_seq_length() if cache is not None else 0
        places.extend(range(past, past + kwargs["input_ids"].shape[1]))

    handle = model.model.register_forward_pre_hook(note, with_kwargs=True)
    profile, _ = recorded(
        record,
        model,
        lambda model: model.generate(**tensors, **GREEDY, assistant_model=assistant),
        level="tokens",
    )
    handle.remove()
    assert sorted(set(places)) != sorted(places)  # drafts were refused, and their places reused
    assert profile.tokens(0).position.tolist() == places
    assert set(profile.tokens(0).request) == {0}


def test_a_further_turn_is_of_no_known_phase(mixtral: nn.Module, record: Record):
    tensors, added = prompts(batch=1, pad=0), 3

    def converse(model: Any) -> None:
        first = model.generate(**tensors, **GREEDY, return_dict_in_generate=True)
        text = torch.cat([first.sequences, tensors["input_ids"][:, :added]], dim=1)
        mask = torch.ones_like(text)
        cache = first.cache if "cache" in first else first.past_key_values
        model.generate(input_ids=text, attention_mask=mask, cache=cache, **GREEDY)

    profile, truth = recorded(record, mixtral, converse, level="tokens")
    assert counts_of(profile) == by_block(truth.counts)
    # The last token of the first turn is not in the cache yet.
    assert phase_totals(profile) == {
        "prefill": (1, PROMPT),
        "decode": (2 * (NEW - 1), 2 * (NEW - 1)),
        "unknown": (1, added + 1),
    }
    tokens = profile.tokens(0)
    assert set(tokens.request) == {0}
    assert tokens.position.tolist() == list(range(len(tokens.position)))


@pytest.mark.parametrize("cache", [None, "static"])
def test_every_token_in_order(cache: str | None, mixtral: nn.Module, record: Record):
    first, second = prompts(), prompts(seed=3)

    def run(model: Any) -> None:
        for tensors in (first, second):
            model.generate(**tensors, **GREEDY, cache_implementation=cache)

    profile, truth = recorded(record, mixtral, run, level="tokens")
    one = generated_rows(first["attention_mask"])
    keep = np.concatenate([one["real"], one["real"]])
    steps = np.concatenate([one["step"], one["step"] + NEW])[keep]
    requests = np.concatenate([one["request"], one["request"] + 2])[keep]
    positions = np.concatenate([one["position"], one["position"]])[keep]
    for layer in profile.info.layers:
        tokens = profile.tokens(layer.index)
        ids = truth.ids[f"{layer.name}.experts"].numpy()[keep]
        assert tokens.ids.tolist() == ids.tolist()
        assert tokens.step.tolist() == steps.tolist()
        assert tokens.request.tolist() == requests.tolist()
        assert tokens.position.tolist() == positions.tolist()


def generated_rows(mask: Tensor) -> dict[str, np.ndarray]:
    """Step, request and position of each row of one generate(), in the order of running."""
    rows = []
    for request, row in enumerate(mask.tolist()):
        seen = 0
        for real in row:
            rows.append((0, request, seen, bool(real)))
            seen += real
    lengths = mask.sum(1).tolist()
    for step in range(1, NEW):
        for request, length in enumerate(lengths):
            rows.append((step, request, length + step - 1, True))
    columns = zip(*rows, strict=True)
    return dict(zip(("step", "request", "position", "real"), map(np.array, columns), strict=True))


def test_steps_sum_up_to_the_counts(mixtral: nn.Module, record: Record):
    tensors = prompts()
    profile, truth = recorded(
        record, mixtral, lambda model: model.generate(**tensors, **GREEDY), level="steps"
    )
    table = profile.step_counts()
    for layer in profile.info.layers:
        own = table.layer == layer.index
        ids = truth.ids[f"{layer.name}.experts"]
        per_step = [ids[: 2 * PROMPT][tensors["attention_mask"].flatten().bool()]]
        per_step += list(ids[2 * PROMPT :].split(2))
        expected = [step.flatten().bincount(minlength=8).tolist() for step in per_step]
        assert table.counts[own].tolist() == expected
        assert table.requests[own].tolist() == [2] * NEW
        assert (table.counts[own].sum(1) == TOP_K * table.tokens[own]).all()


@pytest.mark.parametrize("model_type", ["switch_transformers", "nllb-moe"])
def test_encoder_and_decoder_step_on_their_own(model_type: str, record: Record):
    family = BY_TYPE[model_type]
    model, tensors = model_of(model_type), inputs(family)
    del tensors["decoder_input_ids"]
    with record(model, level="steps") as recording, oracle(model) as truth:
        model.generate(**tensors, **GREEDY)
    profile = profile_of(recording)
    assert profile.coverage == 1.0
    assert len(set(profile.info.passes)) == 2
    table = profile.step_counts()
    for layer in profile.info.layers:
        own = table.layer == layer.index
        steps = list(zip(table.phase[own], table.tokens[own].tolist(), strict=True))
        encoder = "encoder." in layer.name
        decode = [("decode", 2)] * (NEW - 1)
        assert steps == ([("prefill", REAL)] if encoder else [("prefill", 2), *decode])
    kept = {
        name: ids if "decoder." in name else ids[tensors["attention_mask"].flatten().bool()]
        for name, ids in truth.ids.items()
    }
    assert counts_of(profile) == by_block(
        {name: truth.histogram(ids) for name, ids in kept.items()}
    )
