"""Tiny checkpoints with random weights, in the shapes of three families."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 257


@dataclass(frozen=True)
class Shape:
    """What a model's routing must look like.

    Attributes:
        moe, dense: indices of its layers.
        shared: experts that see every token.
    """

    experts: int
    top_k: int
    moe: tuple[int, ...] = (0, 1, 2)
    dense: tuple[int, ...] = ()
    router: str = "softmax"
    shared: int = 0


SHAPES = {
    "qwen3": Shape(experts=16, top_k=4),
    "mixtral": Shape(experts=8, top_k=2),
    # Routed as DeepSeek-V3 is, whose attention SGLang's CPU engine cannot run.
    "glm": Shape(experts=12, top_k=3, moe=(1, 2), dense=(0,), router="sigmoid", shared=1),
}
MODULES = ("glm4_moe", "mixtral", "qwen3_moe")
"""SGLang's modules for them."""


def make(folder: Path) -> None:
    """Write all models into the folder, one directory each."""
    import torch
    from transformers import Glm4MoeForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM

    classes = {"qwen3": Qwen3MoeForCausalLM, "mixtral": MixtralForCausalLM}
    classes["glm"] = Glm4MoeForCausalLM
    torch.manual_seed(0)
    for name, kind in classes.items():
        model = kind(_config(name))
        for parameter in model.parameters():
            if parameter.ndim > 1:  # wide enough for tokens to be told apart
                torch.nn.init.normal_(parameter, std=0.08)
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.05)
        model.to(torch.bfloat16).save_pretrained(folder / name)


def _config(name: str) -> Any:
    from transformers import Glm4MoeConfig, MixtralConfig, Qwen3MoeConfig

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY - 1,
        "pad_token_id": VOCABULARY - 1,
        "num_experts_per_tok": SHAPES[name].top_k,
    }
    experts = SHAPES[name].experts
    if name == "mixtral":
        return MixtralConfig(**common, num_local_experts=experts)
    if name == "qwen3":
        return Qwen3MoeConfig(
            **common, moe_intermediate_size=64, num_experts=experts, norm_topk_prob=True
        )
    return Glm4MoeConfig(
        **common,
        moe_intermediate_size=64,
        n_routed_experts=experts,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
