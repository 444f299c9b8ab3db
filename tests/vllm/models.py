"""Tiny checkpoints with random weights, in the shapes of three families."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 257
"""The 256 bytes, and an end of text."""


@dataclass(frozen=True)
class Shape:
    """What a model's routing must look like.

    Attributes:
        moe, dense: indices of its layers.
    """

    experts: int
    top_k: int
    moe: tuple[int, ...]
    dense: tuple[int, ...] = ()
    router: str = "softmax"


SHAPES = {
    "mixtral": Shape(experts=8, top_k=2, moe=(0, 1, 2)),
    "qwen3": Shape(experts=16, top_k=4, moe=(0, 2), dense=(1,)),
    "deepseek": Shape(experts=12, top_k=3, moe=(1, 2), dense=(0,), router="sigmoid"),
}


def make(folder: Path) -> None:
    """Write all models into the folder, one directory each."""
    import torch
    from transformers import DeepseekV3ForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM

    classes = {
        "mixtral": MixtralForCausalLM,
        "qwen3": Qwen3MoeForCausalLM,
        "deepseek": DeepseekV3ForCausalLM,
    }
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
        _tokenizer().save_pretrained(folder / name)


def _config(name: str):
    from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY - 1,
        "pad_token_id": VOCABULARY - 1,
    }
    if name == "mixtral":
        return MixtralConfig(
            **common,
            num_key_value_heads=2,
            head_dim=32,
            num_local_experts=8,
            num_experts_per_tok=2,
        )
    if name == "qwen3":
        return Qwen3MoeConfig(
            **common,
            num_key_value_heads=2,
            head_dim=32,
            moe_intermediate_size=64,
            num_experts=16,
            num_experts_per_tok=4,
            mlp_only_layers=[1],
        )
    return DeepseekV3Config(
        **common,
        num_key_value_heads=4,
        moe_intermediate_size=64,
        n_routed_experts=12,
        num_experts_per_tok=3,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        n_shared_experts=1,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
    )


def _tokenizer():
    """One token for each byte; the engine is given token ids, but wants one."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary | {"<eos>": len(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
