"""Which layer holds what, against the modules that transformers instantiates."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from torch import nn

from routeprof.plan.config import shape_of
from routeprof.plan.parameters import weights
from tests.plan.models import made, on_meta, tiny_values

LAYER = re.compile(r"\.layers\.(\d+)\.")
# With layers enough that first, last, odd and even ones differ.
CASES: dict[str, list[dict[str, Any]]] = {
    "qwen2_moe": [{"mlp_only_layers": [4], "decoder_sparse_step": 2}],
    "qwen3_moe": [{"decoder_sparse_step": 3}],
    "qwen3_next": [{}, {"full_attention_interval": 3, "mlp_only_layers": [0]}],
    "deepseek_v3": [{"first_k_dense_replace": 2}],
    "llama4_text": [{"interleave_moe_layer_step": 2}, {"interleave_moe_layer_step": 3}],
    "jamba": [
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        }
    ],
    "minimax": [{}],
    "bamba": [{"attn_layer_indices": [2, 5]}],
    "nemotron_h": [
        {
            "layers_block_type": "mamba moe attention mamba mlp moe mamba".split(),
            "mamba_conv_bias": False,
        }
    ],
}


def numbers_by_layer(model: nn.Module) -> dict[int, int]:
    """Parameters of each layer, -1 outside of any; what is tied counts where it is first."""
    sums: Counter[int] = Counter()
    for name, parameter in model.named_parameters():
        found = LAYER.search(name)
        sums[int(found[1]) if found else -1] += parameter.numel()
    return dict(sums)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param(family, overrides, id=f"{family}-{number}")
        for family, cases in CASES.items()
        for number, overrides in enumerate(cases)
    ],
)
def test_each_layer_holds_what_it_holds_in_transformers(
    family: str, overrides: dict[str, Any]
) -> None:
    values = tiny_values(family, overrides | {"num_hidden_layers": 7})
    counted: Counter[int] = Counter()
    for weight in weights(shape_of(values)):
        counted[weight.layer] += weight.numbers
    real = numbers_by_layer(on_meta(made(values)))
    assert dict(counted) == real
    assert family == "minimax" or len(set(real.values())) > 2  # layers do differ


def test_shared_blocks_stand_in_the_layers_that_are_first_to_use_them() -> None:
    types = ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid", "hybrid"]
    values = tiny_values("zamba2", {"layers_block_type": types, "num_hidden_layers": 7})
    counted: Counter[int] = Counter()
    for weight in weights(shape_of(values)):
        counted[weight.layer] += weight.numbers
    real = numbers_by_layer(on_meta(made(values)))
    assert sum(counted.values()) == sum(real.values())
    assert counted[1] == real[1]
    assert counted[2] == real[2]
    assert counted[0] == counted[3] == real[0]
