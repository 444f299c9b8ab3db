"""Run by the Python of an environment with transformers 4: records tiny models of that age.

Prints one line of JSON for each family: what was recorded, beside the rows that every expert's
own forward received.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import routeprof
from routeprof.errors import NoMoELayersError

EXPERTS, TOP_K = 8, 3
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "pad_token_id": 0,
    "hidden_size": 32,
    "initializer_range": 0.4,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], EXPERTS),
    "num_experts_per_tok": TOP_K,
    **dict.fromkeys(["n_group", "first_k_dense_replace"], 1),
    "topk_group": 1,
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 8),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "Qwen2Moe": {},
    "Qwen3Moe": {},
    "Olmoe": {},
    "DeepseekV3": {},
    "Jamba": {"mamba_dt_rank": 4, "use_mamba_kernels": False, "attn_layer_offset": 1},
    "GptOss": {},
    "GraniteMoe": {},
    "Phimoe": {"num_experts_per_tok": 2},
    "Dbrx": {
        "attn_config": {"kv_n_heads": 4, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K},
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 4,
    },
}


def build(name: str) -> nn.Module:
    config_class = getattr(transformers, f"{name}Config")
    attributes = config_class().to_dict().keys()
    sizes = {key: value for key, value in TINY.items() if key in attributes}
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(
        config_class(**sizes | FAMILIES[name])
    ).eval()


def watch_experts(model: nn.Module) -> dict[str, list[int]]:
    """Rows that each expert of each block works on, counted as the model runs."""
    rows: dict[str, list[int]] = {}
    for path, module in model.named_modules():
        block, _, leaf = path.rpartition(".")
        if leaf != "experts":
            continue
        counts = rows[block] = [0] * EXPERTS
        if isinstance(module, nn.ModuleList):
            for number, expert in enumerate(module):
                expert.register_forward_pre_hook(row_counter(counts, number))
        elif type(module).__name__ == "GptOssExperts":
            module.register_forward_pre_hook(weight_counter(counts), with_kwargs=True)
    return rows


def row_counter(counts: list[int], number: int) -> Callable[..., None]:
    def count(expert: nn.Module, args: tuple[Any, ...]) -> None:
        counts[number] += args[0].reshape(-1, args[0].shape[-1]).shape[0]

    return count


def weight_counter(counts: list[int]) -> Callable[..., None]:
    """gpt_oss runs every expert on every row, and weighs those that were not chosen with 0."""

    def count(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for number, rows in enumerate((kwargs["routing_weights"] > 0).sum(0).tolist()):
            counts[number] += rows

    return count


def record(name: str, directory: Path) -> dict[str, Any]:
    model = build(name)
    rows = watch_experts(model)
    tokens = torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(0))
    try:
        with routeprof.record(model, directory) as recording, torch.no_grad():
            model(input_ids=tokens)
            model.generate(input_ids=tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    except NoMoELayersError as error:
        return {"refused": str(error)}
    profile = routeprof.load(directory)
    layers = [profile.info.layers[position] for position in profile.captured]
    return {
        "counts": {
            layer.name: row.tolist() for layer, row in zip(layers, profile.counts, strict=True)
        },
        "rows": rows,
        "coverage": profile.coverage,
        "gates": sorted({layer.gate for layer in layers}),
        "unsupported": [layer.name for layer in profile.info.layers if layer.unsupported],
        "dense": [layer.name for layer in profile.info.layers if layer.kind == "dense"],
        "messages": recording.messages,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"family": name, **record(name, Path(folder) / "recording")}))


if __name__ == "__main__":
    main()
