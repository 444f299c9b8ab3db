"""Weights of every family against the parameters that transformers instantiates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from routeprof.plan.config import shape_of
from routeprof.plan.known import known_config, known_facts, known_names
from routeprof.plan.parameters import active, by_part, total, weights
from tests.plan.models import (
    FAMILIES,
    VARIANTS,
    default_config,
    made,
    numbers_by_part,
    on_meta,
    tiny_values,
)

CASES = [
    pytest.param(family, overrides, id=f"{family}-{number}")
    for family in FAMILIES
    for number, overrides in enumerate([{}, *VARIANTS[family]])
]
# Billions: total and active parameters, as the models' makers publish them, and where.
PUBLISHED = {
    # Jiang et al. 2024, Mixtral of Experts: "47B parameters, but only uses 13B active".
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    # DeepSeek-AI 2024, DeepSeek-V3 Technical Report: "671B total parameters with 37B activated".
    "deepseek-v3": (671, 37),
    # Model cards of Qwen3.
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "qwen3-coder-480b-a35b": (480, 35),
    "qwen3-next-80b-a3b": (80, 3),
    # Model card of Kimi K2: "32 billion activated parameters and 1 trillion total".
    "kimi-k2": (1000, 32),
    "llama-3.1-405b": (405, 405),
    # Muennighoff et al. 2024, OLMoE: 6.9 and 1.3 billion.
    "olmoe-1b-7b": (6.9, 1.3),
    # Lieber et al. 2024, Jamba: 52 and 12 billion.
    "jamba-v0.1": (52, 12),
    # Blog of Qwen1.5-MoE: 14.3 and 2.7 billion.
    "qwen1.5-moe-a2.7b": (14.3, 2.7),
    # MiniMax-01, arXiv:2501.08313: 456 and 45.9 billion, which leaves out the embeddings.
    "minimax-text-01": (456, 45.9 + 2.46),
}


def assert_same_numbers(values: Mapping[str, Any], configuration: Any) -> None:
    counted = {part: count for part, count in by_part(weights(shape_of(values))).items() if count}
    assert counted == numbers_by_part(on_meta(configuration))


@pytest.mark.parametrize("family", FAMILIES)
def test_default_config_has_the_parameters_of_transformers(family: str) -> None:
    configuration = default_config(family)
    assert_same_numbers(configuration.to_dict(), configuration)


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_tiny_config_has_the_parameters_of_transformers(
    family: str, overrides: dict[str, Any]
) -> None:
    values = tiny_values(family, overrides)
    assert_same_numbers(values, made(values))


@pytest.mark.parametrize("name", known_names())
def test_known_models_have_the_parameters_of_transformers(name: str) -> None:
    values = known_config(name)
    assert values is not None
    text = values.get("text_config", values)
    if text["model_type"] == "kimi_k2":
        text = text | {"model_type": "deepseek_v3"}
    assert_same_numbers(values, made({k: v for k, v in text.items() if k != "quantization_config"}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_come_out(name: str) -> None:
    values = known_config(name)
    assert values is not None
    found = weights(shape_of(values))
    everything, each = PUBLISHED[name]
    assert total(found) / 1e9 == pytest.approx(everything, rel=0.03)
    # 3 billion is one digit, and embeddings are counted here.
    assert active(found) / 1e9 == pytest.approx(each, rel=0.3 if each == 3 else 0.03)


def test_sources_are_named() -> None:
    for name in known_names():
        facts = known_facts(name)
        assert facts is not None
        assert "commit" in facts["source"] or "transformers" in facts["source"]


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_of_all_gpus_hold_every_number(family: str) -> None:
    for weight in weights(shape_of(default_config(family).to_dict())):
        assert weight.numbers % weight.ways == 0
        assert weight.on_gpu(1) == weight.numbers
        for tp in (2, 3, 8, 64, 10**9):
            assert weight.on_gpu(tp) * tp >= weight.numbers
            assert weight.on_gpu(tp) >= weight.numbers // weight.ways


def test_active_numbers_are_those_a_token_meets() -> None:
    """Rows that the experts of one token have, of a real tiny Mixtral."""
    values = tiny_values("mixtral")
    model = on_meta(made(values))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    idle = sum(n // 8 * (8 - 3) for name, n in sizes.items() if ".experts." in name)
    expected = sum(sizes.values()) - idle
    changed = tiny_values("mixtral", {"num_experts_per_tok": 3})
    assert active(weights(shape_of(changed))) == expected
