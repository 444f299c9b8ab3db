"""Every text-side MoE model type of transformers, as a tiny random model.

A config gets the sizes of `TINY` for the attributes it has; the table below holds only what a
family needs beyond that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

VOCAB, HIDDEN, EXPERTS, LAYERS = 64, 32, 8, 4
DECODER_LENGTH = 6

TINY: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "unpadded_vocab_size"], VOCAB),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough for tokens to disagree about the experts.
    "initializer_range": 0.4,
    **dict.fromkeys(["hidden_size", "d_model"], HIDDEN),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layers"], LAYERS),
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts"], EXPERTS),
    "moe_num_experts": EXPERTS,
    # One of two groups survives, so the best experts by score are not always the chosen ones.
    **dict.fromkeys(["n_group", "num_expert_group"], 2),
    "topk_group": 1,
    # Attention: every head is 8 wide and has its own key.
    **dict.fromkeys(["num_attention_heads", "num_key_value_heads", "num_heads", "n_heads"], 4),
    **dict.fromkeys(["swa_num_attention_heads", "swa_num_key_value_heads"], 4),
    **dict.fromkeys(["head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim"], 8),
    **dict.fromkeys(["qk_rope_head_dim", "kv_channels", "d_kv", "index_head_dim"], 8),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "index_topk", "rel_extent"], 16),
    "index_n_heads": 2,
    # State-space and linear attention.
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"], 4),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 8),
    **dict.fromkeys(["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_chunk_size"], 8),
    **dict.fromkeys(["mamba_num_heads", "mamba_head_dim", "ssm_state_size", "chunk_size"], 8),
    "mamba_dt_rank": 4,
    "n_groups": 2,
    # The width of everything feed-forward.
    **dict.fromkeys(["intermediate_size", "intermediate_size_mlp", "moe_intermediate_size"], 16),
    **dict.fromkeys(["ffn_hidden_size", "expert_ffn_hidden_size", "d_ff"], 16),
    **dict.fromkeys(["shared_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["shared_experts_intermediate_size", "share_expert_dim"], 16),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "dense_intermediate_size"], 16),
    # Where a family has dense layers, only the first is one.
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers"], 1),
    "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
}
TOP_K = ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"]
CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")


@dataclass(frozen=True)
class Family:
    model_type: str
    config: str
    scoring: str = "softmax"  # router logits -> scores, before any bias or group
    model: str = ""  # the config's ForCausalLM, if empty
    overrides: Mapping[str, Any] = field(default_factory=dict)
    call: Literal["ids", "embeds", "seq2seq"] = "ids"
    top_k: int = 3
    experts: int = EXPERTS  # classes the router chooses from
    router_returns: Literal["logits", "probs"] = "logits"
    own_loop: bool = False  # has one experts implementation only
    # The reason why a padded row is not routed as the same row alone.
    padding_leaks: str = ""
    note: str = ""
    unsupported_reason: str = ""

    @property
    def model_name(self) -> str:
        return self.model or self.config.removesuffix("Config") + "ForCausalLM"


def _causal(model_type: str, config: str, scoring: str = "softmax", **fields: Any) -> Family:
    """A text config whose model is named without "Text"."""
    model = config.removesuffix("TextConfig") + "ForCausalLM"
    return Family(model_type, config, scoring, model, **fields)


def _text(model_type: str, config: str, scoring: str = "softmax", **fields: Any) -> Family:
    """A text config that only has a headless model."""
    return Family(model_type, config, scoring, config.removesuffix("Config") + "Model", **fields)


def _rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, **more}


HYBRID = {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)}
GROUP_LIMITED = {"topk_method": "group_limited_greedy"}
MROPE = {"rope_parameters": _rope(mrope_section=[2, 1, 1])}

FAMILIES: tuple[Family, ...] = (
    Family("mixtral", "MixtralConfig"),
    Family("qwen2_moe", "Qwen2MoeConfig"),
    Family("qwen3_moe", "Qwen3MoeConfig"),
    Family("qwen3_next", "Qwen3NextConfig"),
    _causal("qwen3_5_moe_text", "Qwen3_5MoeTextConfig"),
    _causal(
        "qwen4_exp_text",
        "Qwen4ExpTextConfig",
        overrides={
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 16,
            "indexer_compress_ratio": 2,
            "hc_lowrank": 8,
        },
    ),
    _text("qwen3_vl_moe_text", "Qwen3VLMoeTextConfig"),
    Family("qwen3_omni_moe_text", "Qwen3OmniMoeTextConfig", model="Qwen3OmniMoeThinkerTextModel"),
    Family(
        "qwen3_omni_moe_talker_text",
        "Qwen3OmniMoeTalkerTextConfig",
        model="Qwen3OmniMoeTalkerModel",
        overrides={"shared_expert_intermediate_size": 16},
        call="embeds",
    ),
    Family("deepseek_v2", "DeepseekV2Config", overrides=GROUP_LIMITED),
    Family("deepseek_v3", "DeepseekV3Config", "sigmoid"),
    Family("deepseek_v32", "DeepseekV32Config", "sigmoid"),
    Family(
        "deepseek_v4",
        "DeepseekV4Config",
        "sqrtsoftplus",
        overrides={
            "mlp_layer_types": ["hash_moe"] + ["moe"] * (LAYERS - 1),
            "o_groups": 2,
            "o_lora_rank": 16,
        },
        padding_leaks="compresses windows of positions, padding included, before attending",
        note="layer 0 chooses by a table of token ids; its logits only weigh the choice",
    ),
    Family("olmoe", "OlmoeConfig"),
    Family("flex_olmo", "FlexOlmoConfig"),
    Family("jamba", "JambaConfig", overrides={"attn_layer_period": 2, "attn_layer_offset": 0}),
    Family("phimoe", "PhimoeConfig", "sparsemixer", top_k=2),
    Family("granitemoe", "GraniteMoeConfig"),
    Family("granitemoe_swa", "GraniteMoeSWAConfig"),
    Family("granitemoeshared", "GraniteMoeSharedConfig"),
    Family("granitemoehybrid", "GraniteMoeHybridConfig", overrides=HYBRID),
    Family("gpt_oss", "GptOssConfig"),
    Family(
        "openai_privacy_filter",
        "OpenAIPrivacyFilterConfig",
        model="OpenAIPrivacyFilterForTokenClassification",
        note="bidirectional",
    ),
    Family(
        "dbrx",
        "DbrxConfig",
        overrides={
            "attn_config": {"kv_n_heads": 4, "rope_theta": 10_000.0, "clip_qkv": 8.0},
            "ffn_config": {
                "hidden_size": HIDDEN,
                "ffn_hidden_size": 16,
                "moe_num_experts": EXPERTS,
                "moe_top_k": 3,
            },
        },
        own_loop=True,
        note="the router returns bare logits",
    ),
    Family("glm4_moe", "Glm4MoeConfig", "sigmoid"),
    Family("glm4_moe_lite", "Glm4MoeLiteConfig", "sigmoid"),
    _text(
        "glm4v_moe_text",
        "Glm4vMoeTextConfig",
        "sigmoid",
        overrides={"rope_parameters": _rope(mrope_section=[2, 1, 1], partial_rotary_factor=1.0)},
    ),
    Family("glm_moe_dsa", "GlmMoeDsaConfig", "sigmoid"),
    _text(
        "glm5_next_text",
        "Glm5NextTextConfig",
        "sigmoid",
        overrides={
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "qk_rope_head_dim": 0,
            "head_dim": 0,
        },
    ),
    Family("ernie4_5_moe", "Ernie4_5_MoeConfig"),
    _text(
        "ernie4_5_vl_moe_text",
        "Ernie4_5_VLMoeTextConfig",
        overrides={
            "rope_parameters": _rope(mrope_section=[1, 1, 2]),
            "moe_intermediate_size": [16, 16],
        },
        note="mlp.vision_moe is not called for text",
    ),
    _causal(
        "llama4_text",
        "Llama4TextConfig",
        "sigmoid",
        own_loop=True,
        note="every expert runs on every row, scaled by a score that is 0 unless chosen",
    ),
    Family("minimax", "MiniMaxConfig"),
    Family("minimax_m2", "MiniMaxM2Config", "sigmoid"),
    _causal("minimax_m3_vl_text", "MiniMaxM3VLTextConfig", "sigmoid"),
    Family("hunyuan_v1_moe", "HunYuanMoEV1Config"),
    Family("hy_v3", "HYV3Config", "sigmoid"),
    Family("hy_v4", "HYV4Config", "sigmoid"),
    _text("hy_v4_vl_text", "HYV4VLTextConfig", "sigmoid", overrides=MROPE),
    Family("dots1", "Dots1Config", "sigmoid", overrides={"n_shared_experts": 1}),
    _causal(
        "dots3_note_text",
        "Dots3NoteTextConfig",
        "sigmoid",
        overrides={
            "head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 8,
        },
    ),
    Family(
        "longcat_flash",
        "LongcatFlashConfig",
        overrides={"zero_expert_num": 4, "num_layers": 2},
        experts=EXPERTS + 4,
        own_loop=True,
        note="ids from 8 on are identity experts without weights",
    ),
    Family(
        "lfm2_moe",
        "Lfm2MoeConfig",
        "sigmoid",
        overrides={"layer_types": ["conv", "full_attention"] * 2},
    ),
    Family(
        "switch_transformers",
        "SwitchTransformersConfig",
        model="SwitchTransformersForConditionalGeneration",
        overrides={
            "num_decoder_layers": LAYERS,
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 2,
        },
        call="seq2seq",
        top_k=1,
        own_loop=True,
    ),
    Family(
        "nllb-moe",
        "NllbMoeConfig",
        model="NllbMoeForConditionalGeneration",
        overrides={
            **dict.fromkeys(["encoder_layers", "decoder_layers"], LAYERS),
            **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 16),
            **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
            **dict.fromkeys(["encoder_sparse_step", "decoder_sparse_step"], 2),
            "init_std": 0.2,
        },
        call="seq2seq",
        top_k=2,
        own_loop=True,
        note="the router drops padding; the experts module runs experts 0 and 1 whatever it chose",
    ),
    Family(
        "jetmoe",
        "JetMoeConfig",
        own_loop=True,
        note="attention has experts too",
    ),
    Family(
        "nemotron_h",
        "NemotronHConfig",
        "sigmoid",
        overrides={"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    ),
    Family("kimi_linear", "KimiLinearConfig", "sigmoid", overrides=HYBRID),
    Family(
        "doge",
        "DogeConfig",
        overrides={"is_moe": True, "num_experts": 16},
        experts=16,
        own_loop=True,
        padding_leaks="reshapes its router logits across rows",
        note="product keys: experts are rows of two embeddings",
    ),
    Family("aria_text", "AriaTextConfig"),
    Family("afmoe", "AfmoeConfig", "sigmoid"),
    Family("bailing_hybrid", "BailingHybridConfig", "sigmoid", overrides=HYBRID),
    Family("axk1", "AXK1Config", "sigmoid"),
    Family("axk2", "AXK2Config", "sigmoid"),
    Family("beam", "BeamConfig", "sigmoid"),
    Family("cohere2_moe", "Cohere2MoeConfig"),
    Family("exaone_moe", "ExaoneMoeConfig", "sigmoid"),
    Family("flint", "FlintConfig", "sigmoid"),
    _causal(
        "gemma4_text",
        "Gemma4TextConfig",
        router_returns="probs",
        overrides={
            "enable_moe_block": True,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 8,
        },
    ),
    _causal("inkling_text", "InklingTextConfig", "sigmoid"),
    _causal("inkling2_text", "Inkling2TextConfig", "sigmoid"),
    _causal(
        "inkling2_loop_text",
        "Inkling2LoopTextConfig",
        "sigmoid",
        overrides={
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 3,
            "loop_num_passes": 2,
            "n_layers_per_attn_res_block": 1,
        },
        note="layers 1 and 2 run twice in a forward",
    ),
    Family("kolibri1", "Kolibri1Config", "sigmoid"),
    Family("laguna", "LagunaConfig", "sigmoid"),
    Family("lara_mini", "LaraMiniConfig"),
    Family("mellum", "MellumConfig"),
    Family("mimo_v2_flash", "MiMoV2FlashConfig", "sigmoid", overrides={"num_key_value_heads": 2}),
    Family("mistral4", "Mistral4Config", overrides={"head_dim": 16}),
    _text("mistral_large4_text", "MistralLarge4TextConfig"),
    _text("muse_spark_text", "MuseSparkTextConfig", "sigmoid", overrides={"moe_hidden_size": 16}),
    Family("solar_open", "SolarOpenConfig", "sigmoid"),
    _text(
        "step3p5",
        "Step3p7TextConfig",
        "sigmoid",
        overrides={"sliding_window": 16},
        own_loop=True,
    ),
    _text("unlimited_ocr_text", "UnlimitedOcrTextConfig", overrides=GROUP_LIMITED),
    _text("deepseek_ocr2_text", "DeepseekOcr2TextConfig", overrides=GROUP_LIMITED),
    Family(
        "diffusion_gemma_text",
        "DiffusionGemmaTextConfig",
        model="DiffusionGemmaEncoderTextModel",
        router_returns="probs",
        overrides={"global_head_dim": 8},
    ),
    Family(
        "zaya",
        "ZayaConfig",
        overrides={"router_hidden_size": 16},
        top_k=1,
        experts=EXPERTS + 1,
        note="the last class skips; the experts module sees it as id 0 of weight 0",
    ),
)
BY_TYPE: dict[str, Family] = {family.model_type: family for family in FAMILIES}


def config(family: Family) -> Any:
    config_class = getattr(transformers, family.config)
    attributes = config_class().to_dict().keys()
    tiny = TINY | dict.fromkeys(TOP_K, family.top_k)
    sizes = {name: value for name, value in tiny.items() if name in attributes}
    return config_class(**(sizes | family.overrides))


def build(family: Family, *, seed: int = 0, experts_implementation: str | None = None) -> nn.Module:
    """A tiny random model in eval mode, with whatever the routers select by set at random."""
    with quiet(), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, family.model_name)(config(family)).eval()
        _randomise_selection(model, family)
        if experts_implementation and not (family.own_loop and experts_implementation == "eager"):
            model.set_experts_implementation(experts_implementation)
    return model


def _randomise_selection(model: nn.Module, family: Family) -> None:
    """Fill in what a fresh model leaves at zero, or not even that."""
    bias_std = 0.05 if family.scoring == "softmax" else 0.3
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        unset = "experts." in name if tensor.ndim == 3 else tensor.ndim > 1 and not tensor.any()
        if name.endswith("tid2eid"):
            orders = torch.rand(len(tensor), family.experts).argsort(dim=1)
            tensor.copy_(orders[:, : tensor.shape[1]])
        elif name.endswith(CORRECTION_BIASES):
            tensor.normal_(std=bias_std)
        elif unset and tensor.is_floating_point():
            tensor.normal_(std=TINY["initializer_range"])


def inputs(
    family: Family, *, batch: int = 2, length: int = 10, pad: int = 4, seed: int = 0
) -> dict[str, Tensor]:
    """Random tokens; row 1 begins with `pad` padding tokens. A decoder's input has no padding."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, length), generator=random)
    mask = torch.ones_like(ids)
    ids[1:2, :pad] = 0
    mask[1:2, :pad] = 0
    tensors = {"input_ids": ids, "attention_mask": mask}
    if family.call == "embeds":
        table = torch.randn(VOCAB, HIDDEN, generator=random)
        tensors["inputs_embeds"] = table[tensors.pop("input_ids")]
    if family.call == "seq2seq":
        size = (batch, DECODER_LENGTH)
        tensors["decoder_input_ids"] = torch.randint(3, VOCAB, size, generator=random)
    return tensors


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers logs about missing kernels."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
