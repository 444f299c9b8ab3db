"""Shapes of models that mix attention with state-space or linear-attention layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice

from routeprof.errors import UsageError
from routeprof.plan.families import NONE, QKVO, attention, qwen_mlps, shape
from routeprof.plan.fields import OLD_TYPES, Fields
from routeprof.plan.shape import (
    Attention,
    GatedDeltaNet,
    Layer,
    LightningAttention,
    Mamba,
    Mamba2,
    Mlp,
    Moe,
    Shape,
    SharedBlock,
)

LINEAR, FULL = "linear_attention", "full_attention"


def _biases(fields: Fields) -> frozenset[str]:
    return QKVO if fields.flag("attention_bias") else NONE


def qwen3_next(fields: Fields) -> Shape:
    """Three of four layers are a gated delta net; attention's output is gated."""
    count, norms = fields.layers(), 2 * fields.number("hidden_size")
    interval = fields.number("full_attention_interval", default=4)
    types = fields.layer_types(count, (LINEAR, FULL)) or tuple(
        LINEAR if (at + 1) % interval else FULL for at in range(count)
    )
    full = attention(fields, biases=_biases(fields), norm="head", gated=True)
    linear = GatedDeltaNet(
        key_heads=fields.number("linear_num_key_heads"),
        value_heads=fields.number("linear_num_value_heads"),
        key=fields.number("linear_key_head_dim"),
        value=fields.number("linear_value_head_dim"),
        conv=fields.number("linear_conv_kernel_dim"),
    )
    mlps = qwen_mlps(fields, count, shared=True)
    layers = [
        Layer(full if kind == FULL else linear, mlp, norms)
        for kind, mlp in zip(types, mlps, strict=True)
    ]
    return shape(fields, "qwen3_next", layers)


def jamba(fields: Fields) -> Shape:
    """The first Mamba; attention once in a period, experts in every other layer."""
    hidden = fields.number("hidden_size")
    mixer = Mamba(
        inner=fields.number("mamba_expand") * hidden,
        state=fields.number("mamba_d_state"),
        conv=fields.number("mamba_d_conv"),
        dt_rank=-(-hidden // 16)
        if fields.is_auto("mamba_dt_rank")
        else fields.number("mamba_dt_rank"),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias"),
    )
    dense = Mlp(fields.number("intermediate_size"))
    moe = Moe(fields.number("num_experts"), fields.number("num_experts_per_tok"), dense.width)
    attends = _periodic(fields, "attn")
    routes = _periodic(fields, "expert")
    full = attention(fields)
    layers = [
        Layer(
            full if attends(at) else mixer,
            moe if moe.experts > 1 and routes(at) else dense,
            2 * hidden,
        )
        for at in range(fields.layers())
    ]
    return shape(fields, "jamba", layers)


def _periodic(fields: Fields, name: str) -> Callable[[int], bool]:
    period = fields.number(f"{name}_layer_period")
    offset = fields.number(f"{name}_layer_offset", least=0)
    return lambda at: at % period == offset


def _mamba2(fields: Fields) -> Mamba2:
    """Mamba2 by the names of Bamba and Granite."""
    heads = fields.number("mamba_n_heads")
    inner = fields.number("mamba_expand", default=2) * fields.number("hidden_size")
    return Mamba2(
        heads=heads,
        head=inner // heads if fields.is_auto("mamba_d_head") else fields.number("mamba_d_head"),
        groups=fields.number("mamba_n_groups", default=1),
        state=fields.number("mamba_d_state"),
        conv=fields.number("mamba_d_conv", default=4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias"),
    )


def bamba(fields: Fields) -> Shape:
    """Mamba2, attention in the layers listed, a dense MLP in each."""
    count, norms = fields.layers(), 2 * fields.number("hidden_size")
    listed = fields.numbers("attn_layer_indices") or ()
    mixer, full = _mamba2(fields), attention(fields, biases=_biases(fields))
    mlp = Mlp(fields.number("intermediate_size"), bias=fields.flag("mlp_bias"))
    layers = [Layer(full if at in listed else mixer, mlp, norms) for at in range(count)]
    return shape(fields, "bamba", layers)


def granite(fields: Fields) -> Shape:
    """Mamba2 and attention by list; routed experts, if any, beside a shared one."""
    count, norms = fields.layers(), 2 * fields.number("hidden_size")
    types = fields.layer_types(count, (LINEAR, FULL)) or (LINEAR,) * count
    shared = Mlp(fields.number("shared_intermediate_size"))
    experts = fields.number("num_local_experts", least=0)
    mlp: Mlp | Moe = shared
    if experts:
        top_k = fields.number("num_experts_per_tok")
        mlp = Moe(experts, top_k, fields.number("intermediate_size"), shared=shared)
    full = attention(fields, biases=_biases(fields)) if FULL in types else None
    mixer = _mamba2(fields) if LINEAR in types else None
    layers = [Layer(full if kind == FULL else mixer, mlp, norms) for kind in types]
    return shape(fields, "granitemoehybrid", layers)


def nemotron_h(fields: Fields) -> Shape:
    """Each layer is one of Mamba2, attention, an MLP or experts; MLPs are not gated."""
    pattern = fields.text("hybrid_override_pattern")
    words = fields.words("layers_block_type", "layer_types") or tuple(pattern)
    if not words:
        raise UsageError(
            f"{fields.source} lacks layers_block_type: pass the model's own config.json"
        )
    types = [OLD_TYPES.get(word, word) for word in words]
    bias = fields.flag("mlp_bias")
    hidden = fields.number("hidden_size")
    made: dict[str, Layer] = {}
    for kind in set(types):
        made[kind] = _nemotron_layer(fields, kind, hidden, bias)
    return shape(fields, "nemotron_h", [made[kind] for kind in types])


def _nemotron_layer(fields: Fields, kind: str, hidden: int, bias: bool) -> Layer:
    if kind == FULL:
        return Layer(attention(fields, head=fields.number("head_dim", default=128)), None, hidden)
    if kind == LINEAR:
        mixer = Mamba2(
            heads=fields.number("mamba_num_heads"),
            head=fields.number("mamba_head_dim"),
            groups=fields.number("n_groups", "mamba_n_groups"),
            state=fields.number("ssm_state_size"),
            conv=fields.number("conv_kernel", "mamba_d_conv", default=4),
            conv_bias=fields.flag("use_conv_bias", True) and fields.flag("mamba_conv_bias", True),
            bias=fields.flag("use_bias"),
        )
        return Layer(mixer, None, hidden)
    if kind == "mlp":
        return Layer(None, Mlp(fields.number("intermediate_size"), gated=False, bias=bias), hidden)
    if kind != "moe":
        raise UsageError(f"{fields.source}: layers of type {kind!r:.40} are not known")
    shared = Mlp(fields.number("moe_shared_expert_intermediate_size"), gated=False, bias=bias)
    moe = Moe(
        fields.number("n_routed_experts", "num_local_experts"),
        fields.number("num_experts_per_tok"),
        fields.number("moe_intermediate_size"),
        gated=False,
        shared=shared,
        latent=fields.maybe("moe_latent_size"),
        latent_bias=bias,
    )
    return Layer(None, moe, hidden)


def minimax(fields: Fields) -> Shape:
    """Lightning attention, and softmax attention in the layers listed."""
    count, norms = fields.layers(), 2 * fields.number("hidden_size")
    types = fields.layer_types(count, (LINEAR, FULL)) or _listed(fields, count)
    full = attention(fields)
    linear = LightningAttention(full.heads, full.head)
    moe = Moe(
        fields.number("num_local_experts", "num_experts"),
        fields.number("num_experts_per_tok"),
        fields.number("intermediate_size"),
    )
    layers = [Layer(full if kind == FULL else linear, moe, norms) for kind in types]
    return shape(fields, "minimax", layers)


def _listed(fields: Fields, count: int) -> tuple[str, ...]:
    """MiniMax's own files list 1 for softmax attention; transformers alternates by default."""
    listed = fields.numbers("attn_type_list")
    if listed is not None and len(listed) == count:
        return tuple(FULL if kind else LINEAR for kind in listed)
    return tuple(islice(cycle((FULL, LINEAR)), count))


def zamba2(fields: Fields) -> Shape:
    """Mamba2 everywhere; before some layers one of a few shared attention blocks."""
    count, hidden = fields.layers(), fields.number("hidden_size")
    types = fields.layer_types(count, (LINEAR, "hybrid"), "layers_block_type", "layer_types")
    if types is None:
        raise UsageError(
            f"{fields.source} lacks layers_block_type: pass the model's own config.json"
        )
    heads = fields.number("n_mamba_heads")
    mixer = Mamba2(
        heads=heads,
        head=fields.number("mamba_expand", default=2) * hidden // heads,
        groups=fields.number("mamba_ngroups", default=1),
        state=fields.number("mamba_d_state"),
        conv=fields.number("mamba_d_conv", default=4),
        bias=fields.flag("add_bias_linear"),
    )
    blocks = fields.number("num_mem_blocks", default=1)
    hybrids = types.count("hybrid")
    layers, seen = [], 0
    for kind in types:
        if kind == LINEAR:
            layers.append(Layer(mixer, None, hidden))
            continue
        own = len(range(seen, hybrids, blocks))
        block = _zamba_block(fields, hidden, adapters=own, owns=seen < blocks)
        layers.append(Layer(mixer, None, hidden, linear=hidden * hidden, block=block))
        seen += 1
    return shape(fields, "zamba2", layers, tied=True)


def _zamba_block(fields: Fields, hidden: int, *, adapters: int, owns: bool) -> SharedBlock:
    """It reads the layer's input and the embedding side by side.

    Args:
        adapters: layers that the block serves, each with its own low-rank additions.
    """
    heads = fields.number("num_attention_heads")
    rank = fields.number("adapter_rank", default=128)
    full = Attention(
        heads,
        fields.number("num_key_value_heads", default=heads),
        2 * hidden // heads,
        inputs=2 * hidden,
        adapters=adapters if fields.flag("use_shared_attention_adapter") else 0,
        adapter_rank=rank,
    )
    mlp = Mlp(
        fields.number("intermediate_size", default=4 * hidden),
        bias=fields.flag("add_bias_linear"),
        adapters=adapters,
        adapter_rank=rank,
    )
    return SharedBlock(full, mlp, norms=3 * hidden, owns=owns)
