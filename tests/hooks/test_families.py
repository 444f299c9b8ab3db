"""Every family of the zoo: counts, what is known of its layers, and gate outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from routeprof.metrics.gate import Scoring, gate_sums
from routeprof.topology import Layer
from tests.hooks.conftest import (
    Record,
    block,
    by_block,
    counts_of,
    moe_layers,
    problems_of,
    profile_of,
)
from tests.zoo.families import BY_TYPE, EXPERTS, FAMILIES, Family, build, inputs, quiet
from tests.zoo.oracle import Truth, masked_counts, oracle, unpadded_counts

NOT_EXACT = {
    "ernie4_5_vl_moe_text": "its vision experts see no text: they stay idle, coverage is unknown",
    "nllb-moe": "counts are what the router chose; the model runs experts 0 and 1 whatever it is",
}
SHARED = set(
    "qwen2_moe qwen3_next qwen3_5_moe_text qwen4_exp_text qwen3_omni_moe_talker_text deepseek_v2 "
    "deepseek_v3 deepseek_v32 deepseek_v4 granitemoe_swa granitemoeshared granitemoehybrid "
    "glm4_moe glm4_moe_lite glm4v_moe_text glm_moe_dsa glm5_next_text ernie4_5_moe "
    "ernie4_5_vl_moe_text llama4_text minimax_m3_vl_text hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl_text "
    "dots1 dots3_note_text nemotron_h kimi_linear aria_text afmoe bailing_hybrid axk1 axk2 "
    "exaone_moe flint inkling_text kolibri1 laguna lara_mini mistral4 mistral_large4_text "
    "solar_open step3p5 unlimited_ocr_text deepseek_ocr2_text".split()
)
ZERO_EXPERTS = {"longcat_flash": 4, "zaya": 1}
NO_GATE = {
    "phimoe": "each of its choices has a softmax of its own",
    "doge": "its router scores halves of an expert's id",
}


def implementations(family: Family) -> list[str | None]:
    return [None] if family.own_loop else ["eager", "grouped_mm", "batched_mm"]


CASES = [
    pytest.param(family, name, id=f"{family.model_type}-{name or 'own'}")
    for family in FAMILIES
    for name in implementations(family)
]


def parametrise(*model_types: str) -> pytest.MarkDecorator:
    families = [BY_TYPE[name] for name in model_types]
    return pytest.mark.parametrize("family", families, ids=model_types)


@pytest.mark.parametrize(("family", "implementation"), CASES)
def test_recorded_is_what_ran(family: Family, implementation: str | None, record: Record):
    model, tensors = build(family, experts_implementation=implementation), inputs(family)
    with record(model) as recording, oracle(model) as truth:
        model(**tensors)
    profile = profile_of(recording)

    assert counts_of(profile) == by_block(expected_counts(model, family, tensors, truth))
    assert profile.totals.sums["invalid"].sum() == 0
    assert recording.messages == ()
    assert problems_of(profile) == {}
    for layer in moe_layers(profile):
        assert (layer.experts, layer.top_k) == (family.experts, family.top_k)

    idle = "idle" in profile.states
    assert set(profile.states) <= {"captured", "dense", "idle"}
    assert np.isnan(profile.coverage) if idle else profile.coverage == 1.0
    exact = not idle and all(layer.executed for layer in moe_layers(profile))
    assert exact == (family.model_type not in NOT_EXACT)


def expected_counts(
    model: nn.Module, family: Family, tensors: dict[str, Tensor], truth: Truth
) -> dict[str, Tensor]:
    if not family.padding_leaks:
        return unpadded_counts(model, family, tensors)
    if not truth.ids:  # the witness of grouped_mm tells counts only
        eager = build(family, experts_implementation="eager")
        with oracle(eager) as truth:
            eager(**tensors)
    return masked_counts(truth, tensors["attention_mask"])


def test_few_families_are_not_exact():
    assert len(NOT_EXACT) <= 6
    assert BY_TYPE.keys() >= NOT_EXACT.keys() | NO_GATE.keys() | SHARED | ZERO_EXPERTS.keys()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_layers_say_what_they_are(family: Family, record: Record):
    with record(build(family)) as recording:
        pass
    layers = [layer for layer in recording.info.layers if layer.kind == "moe"]
    assert len({layer.index for layer in recording.info.layers}) == len(recording.info.layers)
    for place, layer in enumerate(layers):
        assert (layer.router, layer.gate) == expected_gate(family, place)
        assert layer.unsupported == ""
        assert layer.shared_experts == (family.model_type in SHARED)
        assert layer.zero_experts == ZERO_EXPERTS.get(family.model_type, 0)
        assert layer.drops == (family.model_type in ("switch_transformers", "nllb-moe"))


def expected_gate(family: Family, place: int) -> tuple[str, str]:
    if family.model_type in NO_GATE:
        return "unknown", "none"
    if family.model_type == "deepseek_v4" and place == 0:
        return "hash", "none"
    return family.scoring, "logits" if family.router_returns == "logits" else "probabilities"


@pytest.mark.parametrize(
    ("model_type", "changes", "scoring"),
    [
        ("cohere2_moe", {"expert_selection_fn": "sigmoid"}, "sigmoid"),
        ("cohere2_moe", {"expert_selection_fn": "softmax"}, "softmax"),
        ("deepseek_v4", {"scoring_func": "sigmoid"}, "sigmoid"),
        ("inkling2_text", {"scoring_func": "sqrtsoftplus"}, "sqrtsoftplus"),
    ],
)
def test_a_configured_scoring_is_read(
    model_type: str, changes: dict[str, str], scoring: str, record: Record
):
    known = BY_TYPE[model_type]
    family = Family(
        model_type, known.config, model=known.model, overrides={**known.overrides, **changes}
    )
    with record(build(family)) as recording:
        pass
    chosen = [layer for layer in recording.info.layers if layer.gate == "logits"]
    assert {layer.router for layer in chosen} == {scoring}


# -- what a model drops


def test_tokens_dropped_by_switch_are_invalid(record: Record):
    known = BY_TYPE["switch_transformers"]
    tight = {**known.overrides, "expert_capacity": 2}
    family = Family(known.model_type, known.config, model=known.model, overrides=tight, top_k=1)
    model, tensors = build(family), inputs(known, pad=0)
    with record(model) as recording, oracle(model) as truth:
        model(**tensors)
    profile = profile_of(recording)

    # Each expert's own first operator says how many rows it got, an empty one is not run.
    kept = {block(name): counts.tolist() for name, counts in truth.counts.items()}
    assert counts_of(profile) == kept
    rows = [len(truth.ids[f"{layer.name}.experts"]) for layer in moe_layers(profile)]
    dropped = [
        row - sum(kept[layer.name]) for row, layer in zip(rows, moe_layers(profile), strict=True)
    ]
    assert all(dropped)
    invalid = profile.totals.sums["invalid"].sum(0)[profile.captured]
    assert invalid.tolist() == dropped
    assert profile.coverage == 1.0


# -- gate outputs

PLACES = {"llama4_text": 1, "switch_transformers": 2}
"""Where a router's logits (or probabilities) are in what it returns, if not first."""


@contextmanager
def watched_routers(model: nn.Module) -> Iterator[dict[str, list[Any]]]:
    """What every router returns, by its block."""
    seen: dict[str, list[Any]] = {}
    patches = []
    for path, module in model.named_modules():
        name, _, leaf = path.rpartition(".")
        if leaf in ("gate", "router"):
            forward, outputs = module.forward, seen.setdefault(name, [])

            def watched(
                *args: Any, forward: Any = forward, outputs: list[Any] = outputs, **kwargs: Any
            ):
                outputs.append(forward(*args, **kwargs))
                return outputs[-1]

            patches.append(patch.object(module, "forward", watched))
    for one in patches:
        one.start()
    try:
        yield seen
    finally:
        for one in patches:
            one.stop()


def _kept(forward: Callable[..., Any], outputs: list[Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        outputs.append(forward(*args, **kwargs))
        return outputs[-1]

    return watched


GATED = (
    "mixtral qwen2_moe gpt_oss dbrx zaya jetmoe switch_transformers longcat_flash ernie4_5_moe "
    "deepseek_v3 llama4_text nemotron_h laguna deepseek_v4 gemma4_text diffusion_gemma_text"
).split()


@parametrise(*GATED)
@pytest.mark.parametrize("length", [10, 150], ids=["stashed", "direct"])
def test_gate_outputs(family: Family, length: int, record: Record):
    model, tensors = build(family), inputs(family, length=length)
    with record(model) as recording, watched_routers(model) as seen, quiet(), torch.no_grad():
        model(**tensors)
    profile = profile_of(recording)
    mask = tensors["attention_mask"].flatten().bool()
    gated = 0
    for position, layer in enumerate(profile.info.layers):
        if layer.gate == "none":
            assert profile.totals.sums["gate_rows"][:, position].sum() == 0
            continue
        outputs = seen[layer.name]
        logits = torch.cat([_logits(output, family) for output in outputs])
        if len(logits) == len(mask):
            logits = logits[mask]
        assert_gate_sums(profile.totals, position, layer, logits, family)
        gated += 1
    assert gated


def _logits(output: Any, family: Family) -> Tensor:
    if isinstance(output, Tensor):
        return output
    place = PLACES.get(family.model_type, -1 if family.model_type == "jetmoe" else 0)
    return output[place].flatten(0, -2)


def assert_gate_sums(totals: Any, position: int, layer: Layer, logits: Tensor, family: Family):
    scoring: Scoring = "probabilities" if family.router_returns == "probs" else family.scoring  # type: ignore[assignment]
    expected = gate_sums(logits.numpy(), layer.top_k, scoring)

    def total(name: str) -> float:
        return float(np.nansum(totals.sums[name][:, position]))

    mass = np.nansum(totals.lists["probability_mass"][:, position], axis=0)[: layer.experts]
    np.testing.assert_allclose(mass, expected.mass, rtol=1e-5)
    assert total("gate_rows") == expected.rows
    assert total("entropy_sum") == pytest.approx(expected.entropy, rel=1e-5)
    assert total("top1_sum") == pytest.approx(expected.top1, rel=1e-5)
    assert total("margin_sum") == pytest.approx(expected.margin, rel=1e-4)
    assert total("z_sum") == pytest.approx(expected.z, rel=1e-5)


@parametrise("mixtral", "deepseek_v3", "gemma4_text", "llama4_text", "qwen3_moe")
@pytest.mark.parametrize("length", [10, 150], ids=["stashed", "direct"])
def test_combine_weights(family: Family, length: int, record: Record):
    model, tensors = build(family, experts_implementation="eager"), inputs(family, length=length)
    with record(model) as recording, oracle(model) as truth:
        model(**tensors)
    profile = profile_of(recording)
    keep = tensors["attention_mask"].flatten().bool()
    for position in profile.captured:
        name = f"{profile.info.layers[position].name}.experts"
        ids, weights = truth.ids[name][keep], truth.weights[name][keep]
        if weights.shape[1] == EXPERTS:
            weights = weights.gather(1, ids)
        expected = torch.zeros(EXPERTS).scatter_add(0, ids.flatten(), weights.flatten())
        recorded = profile.totals.lists["weight_sum"][:, position, :EXPERTS].sum(0)
        np.testing.assert_allclose(recorded, expected.numpy(), rtol=1e-5)


def test_without_gate_there_are_counts_only(record: Record):
    family = BY_TYPE["mixtral"]
    model, tensors = build(family), inputs(family)
    with record(model, gate=False) as recording, quiet(), torch.no_grad():
        model(**tensors)
    profile = profile_of(recording)
    assert counts_of(profile) == by_block(unpadded_counts(model, family, tensors))
    assert profile.totals.sums["gate_rows"].sum() == 0
    assert np.isnan(profile.totals.lists["weight_sum"]).all()
