"""Weights of every family against the parameters that transformers instantiates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from routeprof.plan.config import shape_of
from routeprof.plan.known import known_config, known_names
from routeprof.plan.parameters import active, by_part, weights
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

# Model types of makers' own code, and what transformers calls them.
OWN_NAMES = {"kimi_k2": "deepseek_v3", "minimax_m1": "minimax"}


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
    assert_same_numbers(values, made(as_transformers_calls_it(text)))


def as_transformers_calls_it(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same where a maker's own code has another name for it."""
    told = {key: value for key, value in values.items() if key != "quantization_config"}
    told["model_type"] = OWN_NAMES.get(told["model_type"], told["model_type"])
    if "attn_type_list" in told:
        kinds = ("linear_attention", "full_attention")
        told["layer_types"] = [kinds[kind] for kind in told.pop("attn_type_list")]
    return told


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
