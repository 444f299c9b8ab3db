"""How wide a model's experts are, by what its configuration calls it."""

from __future__ import annotations

from typing import Any

NAMES = (
    "moe_intermediate_size",  # Qwen, DeepSeek, GLM; intermediate_size is of their dense layers
    "expert_ffn_hidden_size",  # LongCat
    "intermediate_size",  # Mixtral, OLMoE, Jamba, gpt-oss
    "ffn_hidden_size",  # DBRX
    "d_ff",  # Switch
    "encoder_ffn_dim",  # NLLB
)


def expert_width(config: Any) -> int | None:
    """Inner width of a routed expert; None where the configuration does not say one."""
    try:
        owners = (config, getattr(config, "ffn_config", None))
        said = (getattr(owner, name, None) for name in NAMES for owner in owners)
        first = next((value for value in said if value), None)
    except RuntimeError:  # transformers: layers differ
        return None
    return first if isinstance(first, int) else None  # a list is one for each modality
