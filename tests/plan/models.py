"""Models of every family, large on the meta device and tiny on the CPU, to compare shapes with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tests.zoo.families import BY_TYPE, config

FAMILIES = (
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "olmoe",
    "gpt_oss",
    "jamba",
    "zamba2",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
    "minimax",
    "llama4_text",
    "llama",
)
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY: dict[str, dict[str, Any]] = {
    "zamba2": {
        **SMALL,
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "adapter_rank": 4,
        "chunk_size": 8,
    },
    "bamba": {
        **SMALL,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "attn_layer_indices": [1],
        "mamba_chunk_size": 8,
    },
    "llama": SMALL,
}
# What else the families can have, added to the tiny config.
BIASED = {"attention_bias": True, "num_key_value_heads": 2}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "mixtral": [{"num_key_value_heads": 2, "sliding_window": 6, "tie_word_embeddings": True}],
    "deepseek_v2": [{"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}],
    "deepseek_v3": [{"q_lora_rank": None}, {"attention_bias": True, "n_shared_experts": 3}],
    "qwen2_moe": [
        {"qkv_bias": False, "use_sliding_window": True, "sliding_window": 6},
        {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_key_value_heads": 1},
    ],
    "qwen3_moe": [BIASED | {"use_sliding_window": True, "sliding_window": 6}],
    "qwen3_next": [BIASED | {"linear_num_key_heads": 2, "mlp_only_layers": [0]}],
    "olmoe": [BIASED],
    "gpt_oss": [{"attention_bias": False, "sliding_window": 6, "num_key_value_heads": 2}],
    "jamba": [
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_dt_rank": "auto"},
        {"num_experts": 1, "num_key_value_heads": 1},
    ],
    "zamba2": [
        {"use_shared_attention_adapter": True, "add_bias_linear": True, "mamba_ngroups": 2},
        {"num_mem_blocks": 1, "num_key_value_heads": 2},
    ],
    "bamba": [BIASED | {"mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False}],
    "granitemoehybrid": [
        BIASED | {"mamba_proj_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True},
        {"num_local_experts": 0},
    ],
    "nemotron_h": [
        {"mlp_bias": True, "use_bias": True, "use_conv_bias": False, "moe_latent_size": 12},
        {"layers_block_type": ["mamba", "mlp", "attention", "moe"], "num_key_value_heads": 2},
    ],
    "minimax": [{"num_key_value_heads": 2, "layer_types": ["full_attention"] * 4}],
    "llama4_text": [
        BIASED | {"interleave_moe_layer_step": 2, "attention_chunk_size": 6},
        {"moe_layers": [3], "no_rope_layers": [1, 0, 0, 1], "attention_chunk_size": 6},
    ],
    "llama": [BIASED | {"mlp_bias": True, "tie_word_embeddings": True, "head_dim": 12}],
}
ROUTED = re.compile(r"\.experts\.")
SHARED = re.compile(r"shared_experts?[._]|shared_mlp\.")
EMBEDDINGS = re.compile(r"embed_tokens\.|\.embeddings\.|^lm_head\.")
STATE = re.compile(r"(Mixer|MambaLayer|GatedDeltaNet|LightningAttention)$")


def tiny_values(family: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a small config.json of the family says."""
    values = TINY.get(family)
    if values is None:
        values = config(BY_TYPE[family]).to_dict()
        # They follow from other fields, which the overrides change.
        for derived in ("layer_types", "moe_layers", "no_rope_layers", "hybrid_layer_ids"):
            if derived in values and not _is_given(family, derived):
                del values[derived]
    if overrides and "layers_block_type" in overrides:
        values = {name: value for name, value in values.items() if name != "layer_types"}
    return {"model_type": family, **values, **(overrides or {})}


def _is_given(family: str, name: str) -> bool:
    return name in BY_TYPE[family].overrides


def default_config(family: str) -> Any:
    """What transformers takes where a config says nothing; DeepSeek-V2 has no top-k then."""
    told = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    return AutoConfig.for_model(family, **told)


def made(values: Mapping[str, Any]) -> Any:
    """The same as a config of transformers."""
    fields = {name: value for name, value in values.items() if name != "model_type"}
    return AutoConfig.for_model(values["model_type"], **fields)


def on_meta(configuration: Any) -> nn.Module:
    """The model, without memory."""
    logging.set_verbosity_error()
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(configuration)
    return model


def numbers_by_part(model: nn.Module) -> dict[str, int]:
    """Parameters by the modules that hold them; weights that are tied count once."""
    sums: Counter[str] = Counter()
    mixers = {path: _mixer(module) for path, module in model.named_modules() if _mixer(module)}
    for name, parameter in model.named_parameters():
        sums[_part(name, mixers)] += parameter.numel()
    if not sums["routed_experts"]:  # what is shared is then a dense layer's own
        sums["other"] += sums.pop("shared_experts", 0)
    return {part: count for part, count in sums.items() if count}


def _mixer(module: nn.Module) -> str:
    name = type(module).__name__
    return "state" if STATE.search(name) else "attention" if name.endswith("Attention") else ""


def _part(name: str, mixers: Mapping[str, str]) -> str:
    owners = [part for path, part in mixers.items() if name.startswith(path + ".")]
    if owners:
        return owners[0]
    if EMBEDDINGS.search(name):
        return "embeddings"
    if ROUTED.search(name):
        return "routed_experts"
    return "shared_experts" if SHARED.search(name) else "other"
