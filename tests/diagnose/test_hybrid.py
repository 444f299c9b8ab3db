"""Which layers of a hybrid model do what, against the modules and caches of real models."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import routeprof
from routeprof.diagnose.examine import examine
from routeprof.diagnose.finding import Finding
from routeprof.diagnose.held import LENGTH
from routeprof.diagnose.hybrid import UNTOLD, hybrid, where
from routeprof.diagnose.question import Question
from routeprof.plan.cache import cache_bytes, kept
from routeprof.plan.config import shape_of
from routeprof.plan.known import known_config
from routeprof.plan.precision import precision
from tests.diagnose.made import EXPERTS, MODEL, TOP_K, Step, apportioned, moe, record, steady
from tests.plan.test_cache import tensors
from tests.zoo.families import BY_TYPE, build, quiet

LIST = re.compile(r"(\d+)(?:–(\d+))?")
ATTENTION = {
    "JambaAttention",
    "JambaSdpaAttention",
    "Qwen3NextAttention",
    "NemotronHAttention",
    "GraniteMoeHybridAttention",
    "MiniMaxAttention",
}
STATE = {
    "JambaMambaMixer",
    "Qwen3NextGatedDeltaNet",
    "NemotronHMamba2Mixer",
    "GraniteMoeHybridMambaLayer",
    "MiniMaxLightningAttention",
}
UNLIKE: dict[str, dict[str, Any]] = {
    "jamba": {
        "num_hidden_layers": 7,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
    },
    "qwen3_next": {"num_hidden_layers": 8, "mlp_only_layers": [0, 3], "num_key_value_heads": 2},
    "nemotron_h": {
        "num_hidden_layers": 7,
        "layers_block_type": "mamba moe full_attention moe mamba moe mamba".split(),
    },
    "granitemoehybrid": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "minimax": {"num_hidden_layers": 5},
}
"""Sizes at which no two kinds of layers are as many."""


def listed(text: float | str) -> list[int]:
    """``0–2, 5`` as numbers."""
    found = [(int(first), int(last or first)) for first, last in LIST.findall(str(text))]
    return [at for first, last in found for at in range(first, last + 1)]


@dataclass(frozen=True)
class Real:
    """What a model's modules and its cache say.

    Attributes:
        routes, kv, state: layers that have such modules.
        grows, stays: bytes of 1,000 tokens by layer: tensors that grow and those that do not.
    """

    routes: list[int]
    kv: list[int]
    state: list[int]
    grows: dict[int, int]
    stays: dict[int, int]


def blocks(model: Any) -> list[nn.Module]:
    return [*(model.model.layers if hasattr(model, "model") else model.backbone.layers)]


def real(model: Any) -> Real:
    def having(names: set[str]) -> list[int]:
        return [
            at
            for at, block in enumerate(blocks(model))
            if names & {type(module).__name__ for module in block.modules()}
        ]

    routes = [
        at
        for at, block in enumerate(blocks(model))
        if any(path.split(".")[-1] == "experts" for path, _ in block.named_modules())
    ]
    short, long = (_bytes_by_layer(model, length) for length in (500, 1000))
    grows = {at: size for at, size in long.items() if size > short[at]}
    stays = {at: size for at, size in long.items() if size == short[at]}
    assert all(size == 2 * short[at] for at, size in grows.items())
    return Real(routes, having(ATTENTION), having(STATE), grows, stays)


def _bytes_by_layer(model: Any, length: int) -> dict[int, int]:
    with quiet(), torch.inference_mode():
        cache = model(torch.randint(3, 60, (1, length)), use_cache=True).past_key_values
    sizes = {at: _size(vars(layer)) for at, layer in enumerate(cache.layers)}
    for at, extra in enumerate(getattr(cache, "linear_cache", [])):  # MiniMax
        sizes[at] = sizes.get(at, 0) + _size(extra)
    return {at: size for at, size in sizes.items() if size}


def _size(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(value))


def question_of(path: Path, **facts: Any) -> Question:
    return Question(routeprof.load(path), **facts)


def found(question: Question) -> Finding:
    (one,) = [one for one in examine(question, gains=False).findings if one.code == "hybrid"]
    return one


@pytest.mark.parametrize("family", UNLIKE)
def test_layers_and_bytes_are_those_of_the_recorded_model(family: str, tmp_path: Path):
    known = BY_TYPE[family]
    model = build(replace(known, overrides={**known.overrides, **UNLIKE[family]}))
    with routeprof.record(model, tmp_path / "run", window=3600.0), quiet(), torch.no_grad():
        model(torch.randint(3, 60, (2, 9)))
    finding, told = found(question_of(tmp_path / "run")), real(model)
    assert finding.severity == "info"
    figures = finding.figures
    assert figures["layers"] == len(blocks(model))
    assert listed(figures["routing_layers"]) == told.routes
    assert listed(figures["kv_layers"]) == told.kv == [*told.grows]
    assert listed(figures["state_layers"]) == told.state == [*told.stays]
    both = sorted({*told.routes} & {*told.state})
    assert listed(figures["routing_state_layers"]) == both == [*finding.layers]
    assert figures["kv_bytes_per_1000_tokens"] == sum(told.grows.values())
    assert figures["state_bytes"] == sum(told.stays.values())


def test_a_model_without_a_state_is_no_hybrid(tmp_path: Path):
    for family in ("mixtral", "gpt_oss"):
        with routeprof.record(build(BY_TYPE[family]), tmp_path / family):
            pass
        assert hybrid(question_of(tmp_path / family)) == []


# -- recordings that are made up

JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "vocab_size": 1000,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 4,
    "expert_layer_offset": 1,
}
"""Layers 1 and 5 route, 4 attends."""
Make = Callable[..., Question]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A recording of two MoE layers whose configuration has these fields."""

    def make(numbers=(1, 5), name="layers.{}.mlp", model=None, tokens=256, **fields) -> Question:
        config = {**JAMBA, **fields} if model is None else model
        layers = [replace(moe(at), name=name.format(at)) for at in numbers]
        path = tmp_path / str(len([*tmp_path.iterdir()]))
        steps = steady([1.0] * EXPERTS, tokens=tokens)
        record(path, steps, layers=layers, model=replace(MODEL, config=config))
        return question_of(path)

    return make


def test_evidence_in_words(make: Make):
    one = found(make())
    # Keys and values: 2 x 4 heads of 128, 2 bytes; states: 4096 x (16 x 4 + 4 x 2 bytes).
    assert one.evidence == (
        "2 of 8 layers route (1, 5), 1 holds keys and values (4), 7 hold a fixed state (0–3, 5–7), "
        "those that route all hold a state; of a sequence, 1,000 tokens take 2.0 MiB of keys and "
        "values (bf16), and the state 2.0 MiB whatever the length (fp32 and bf16)"
    )
    assert one.figures["kv_bytes_per_1000_tokens"] == 1000 * 2 * 4 * 128 * 2
    assert one.figures["state_bytes"] == 7 * 4096 * (16 * 4 + 4 * 2)
    assert one.layers == (1, 5)
    assert one.suggestion == (
        "the cache grows in 1 of 8 layers only: size the batch by it (routeprof plan)"
    )
    assert one.gain == (
        "a sequence of 8,192 tokens takes 18.0 MiB instead of 128.0 MiB with keys and values in "
        "all 8 layers that mix tokens: room for 7.1 times the sequences; sequences below 144 "
        "tokens take more"
    )


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([4], "4"),
        ([1, 3, 5], "1, 3, 5"),
        (range(1, 72, 2), "1 to 71 in steps of 2"),
        (range(6), "0–5"),
        ([0, 2, 4, 7, 9, 11, 14, 16, 18], "0, 2, 4, 7, 9, 11, …, 18"),
        ([0, 2, 4, 7, 9, 11, 14, 16], "0, 2, 4, 7, 9, 11, 14, 16"),
    ],
)
def test_many_layers_in_few_words(layers: list[int], text: str):
    assert where(layers) == text


def test_layers_that_do_both_are_listed_where_others_do_one(make: Make):
    one = found(make(attn_layer_offset=5))
    assert "1 holds keys and values (5)" in one.evidence
    assert "1 routes and holds a state (1); of" in one.evidence
    assert one.layers == (1,)


def test_room_is_that_beside_the_same_model_with_attention_alone(make: Make):
    figures = found(make()).figures
    mixed, full = (
        kept(shape_of({**JAMBA, "attn_layer_period": period, "attn_layer_offset": offset}))
        for period, offset in ((8, 4), (1, 0))
    )

    def total(holds: Any, length: int) -> float:
        return cache_bytes(holds, length, precision("bf16")).total

    assert figures["length"] == LENGTH
    assert figures["bytes_of_sequence"] == total(mixed, LENGTH)
    assert figures["bytes_if_all_attended"] == total(full, LENGTH)
    assert figures["times_the_sequences"] == total(full, LENGTH) / total(mixed, LENGTH)
    even = ceil(float(figures["takes_less_from_tokens"]))
    assert total(mixed, even) <= total(full, even)
    assert total(mixed, even - 1) > total(full, even - 1)


@pytest.mark.parametrize(("tokens", "small"), [(64, True), (512, False)])
def test_room_is_for_the_larger_batch_only_where_gemms_are_small(
    make: Make, tokens: int, small: bool
):
    question = make(tokens=tokens)
    codes = {one.code for one in examine(question, gains=False).findings}
    assert ("small-gemms" in codes) == small
    assert ("the room for the larger batch" in found(question).suggestion) == small


def test_without_attention_nothing_grows(make: Make):
    one = found(make(attn_layer_period=100, attn_layer_offset=99))
    assert one.evidence.startswith(
        "2 of 8 layers route (1, 5), none holds keys and values, all hold a fixed state"
    )
    assert "the cache does not grow" in one.suggestion
    assert one.gain == "a sequence takes 2.2 MiB at every length"
    assert "times_the_sequences" not in one.figures


def test_types_are_those_of_the_recorded_model(make: Make):
    question = make()
    model = replace(question.profile.info.model, dtype="float32")
    profile = replace(question.profile, info=replace(question.profile.info, model=model))
    one = found(Question(profile))
    assert one.figures["kv_bytes_per_1000_tokens"] == 1000 * 2 * 4 * 128 * 4
    assert one.evidence.endswith("(fp32)")


def test_layers_are_by_the_recordings_numbers(make: Make):
    """A recording numbers its MoE layers anew where a path has several numbers."""
    one = found(make(numbers=(0, 1), name="stages.0.layers.{}.mlp"))
    assert one.figures["routing_layers"] == "1, 5"
    assert one.layers == (0, 1)


DIFFER: list[dict[str, Any]] = [
    {"expert_layer_offset": 2},
    {"expert_layer_period": 2},
    {"num_experts": 8},
    {"num_experts": 1},
    {"num_experts_per_tok": 1},
    {"num_hidden_layers": 4},
]


@pytest.mark.parametrize("fields", DIFFER, ids=str)
def test_layers_that_differ_are_said_and_nothing_is_guessed(make: Make, fields: dict[str, Any]):
    one = found(make(**fields))
    assert one.severity == "warning"
    assert one.evidence.startswith("MoE layers 1, 5 were recorded, and by the recording's conf")
    assert "which of the recorded layers hold what is not known" in one.evidence
    assert one.layers == ()
    assert one.figures == {}
    fields = fields | {"attn_layer_period": 1, "attn_layer_offset": 0}
    reason = hybrid(make(**fields))
    assert isinstance(reason, str)
    assert reason.startswith("MoE layers 1, 5 were recorded")


def test_numbers_that_are_the_models_must_agree(make: Make):
    assert found(make(numbers=(0, 1))).severity == "warning"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "lacks model_type"),
        ({"model_type": 3}, "lacks model_type"),
        ({"model_type": "lfm2_moe"}, "is of 'lfm2_moe', which is read with transformers alone"),
        ({"model_type": "jamba"}, "lacks hidden_size: pass the model's own config.json"),
        ({**JAMBA, "num_experts": "many"}, "num_experts is 'many', not a number"),
    ],
)
def test_what_cannot_be_read_is_not_judged(make: Make, config: dict[str, Any], reason: str):
    answer = examine(make(model=config), gains=False)
    assert answer.unjudged["hybrid"].startswith("the recording's configuration")
    assert reason in answer.unjudged["hybrid"]
    assert "\n" not in answer.unjudged["hybrid"]
    assert "hybrid" not in {one.code for one in answer.findings}


def test_a_recording_without_a_configuration_needs_a_model(tmp_path: Path):
    counts = apportioned([1.0] * EXPERTS, 512)
    layers = [moe(at) for at in (1, 5)]
    path = record(tmp_path / "run", [Step([counts, counts])], layers=layers)
    assert examine(question_of(path)).unjudged["hybrid"] == UNTOLD
    told = found(question_of(path, model=(JAMBA, "config.json")))
    assert told.figures["state_layers"] == "0–3, 5–7"
    other = found(question_of(path, model=(known_config("jamba-v0.1"), "jamba-v0.1")))
    assert "by jamba-v0.1 layers 1, 3, 5" in other.evidence


def test_a_model_that_is_named_counts_before_the_recordings_own(make: Make):
    named = {**JAMBA, "attn_layer_period": 1, "attn_layer_offset": 0}
    assert hybrid(replace(make(), model=(named, "config.json"))) == []
