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


def write(path: Path, name: str) -> None:
    """Write a model into the directory ``path``.

    Args:
        name: one of ``SHAPES``, or ``bench``.
    """
    import torch

    torch.manual_seed(0)
    model = _build(name)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # wide enough for tokens to be told apart
            torch.nn.init.normal_(parameter, std=0.08)
    for place, buffer in model.named_buffers():
        if place.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.05)
    model.to(torch.bfloat16).save_pretrained(path)
    _tokenizer().save_pretrained(path)


def _build(name: str):
    return {"mixtral": _mixtral, "qwen3": _qwen3, "deepseek": _deepseek, "bench": _bench}[name]()


COMMON = {
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


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return MixtralForCausalLM(
        MixtralConfig(**COMMON, **experts, num_key_value_heads=2, head_dim=32)
    )


def _qwen3():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    heads = {"num_key_value_heads": 2, "head_dim": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **experts, **heads, mlp_only_layers=[1]))


def _deepseek():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts = {
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    heads = {
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        # vLLM's latent attention takes no other sum of these two.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON, **experts, **heads))


def _bench():
    """Deep enough for taps to be felt, as ``tests/bench/capture.py`` has it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    size = {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 8}
    experts = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 128}
    heads = {"num_key_value_heads": 4, "head_dim": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON | size, **experts, **heads))


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
