"""Shapes of models in which every layer attends: config.json fields as transformers reads them."""

from __future__ import annotations

from routeprof.errors import UsageError
from routeprof.plan.fields import Fields
from routeprof.plan.shape import Attention, LatentAttention, Layer, Mlp, Moe, NormOf, Shape

QKV, QKVO = frozenset({"qkv"}), frozenset({"qkv", "o"})
NONE: frozenset[str] = frozenset()
SPARSE_AND_FULL = ("sliding_attention", "full_attention")


def attention(
    fields: Fields,
    *,
    biases: frozenset[str] = NONE,
    head: int | None = None,
    norm: NormOf = "",
    window: int | None = None,
    sinks: bool = False,
    gated: bool = False,
) -> Attention:
    """Heads and their widths by the names that most families use.

    Args:
        head: width of a head; the config's head_dim, else the model's width ÷ heads, if None.
    """
    heads = fields.number("num_attention_heads")
    width = head or fields.maybe("head_dim") or fields.number("hidden_size") // heads
    kv_heads = fields.number("num_key_value_heads", default=heads)
    return Attention(heads, kv_heads, width, None, gated, biases, norm, sinks, window)


def shape(fields: Fields, family: str, layers: list[Layer], *, tied: bool = False) -> Shape:
    """The layers with embeddings around them.

    Args:
        tied: what transformers takes where the config does not say.
    """
    return Shape(
        family=family,
        hidden=fields.number("hidden_size"),
        vocab=fields.number("vocab_size"),
        tied=fields.flag("tie_word_embeddings", tied),
        layers=tuple(layers),
    )


def llama(fields: Fields) -> Shape:
    """Dense: attention and a gated MLP."""
    biases = QKVO if fields.flag("attention_bias") else NONE
    mlp = Mlp(fields.number("intermediate_size"), bias=fields.flag("mlp_bias"))
    layer = Layer(attention(fields, biases=biases), mlp, 2 * fields.number("hidden_size"))
    return shape(fields, "llama", [layer] * fields.layers())


def mixtral(fields: Fields) -> Shape:
    moe = Moe(
        fields.number("num_local_experts", "num_experts"),
        fields.number("num_experts_per_tok"),
        fields.number("intermediate_size"),
    )
    mixer = attention(fields, window=fields.maybe("sliding_window"))
    layer = Layer(mixer, moe, 2 * fields.number("hidden_size"))
    return shape(fields, "mixtral", [layer] * fields.layers())


def olmoe(fields: Fields) -> Shape:
    """Norms of queries and keys go over all heads at once."""
    moe = Moe(
        fields.number("num_experts", "num_local_experts"),
        fields.number("num_experts_per_tok"),
        fields.number("intermediate_size"),
    )
    biases = QKVO if fields.flag("attention_bias") else NONE
    mixer = attention(fields, biases=biases, norm="all")
    layer = Layer(mixer, moe, 2 * fields.number("hidden_size"))
    return shape(fields, "olmoe", [layer] * fields.layers())


def qwen_mlps(fields: Fields, count: int, *, shared: bool) -> list[Mlp | Moe]:
    """Dense layers where the config lists them, and between sparse steps."""
    dense = Mlp(fields.number("intermediate_size"))
    experts = fields.number("num_experts", "num_local_experts", least=0)
    if not experts:
        return [dense] * count
    moe = Moe(
        experts,
        fields.number("num_experts_per_tok"),
        fields.number("moe_intermediate_size"),
        shared=Mlp(fields.number("shared_expert_intermediate_size")) if shared else None,
        shared_gate=shared,
    )
    step = fields.number("decoder_sparse_step", default=1)
    listed = fields.numbers("mlp_only_layers") or ()
    return [dense if at in listed or (at + 1) % step else moe for at in range(count)]


def qwen2_moe(fields: Fields) -> Shape:
    count, norms = fields.layers(), 2 * fields.number("hidden_size")
    slides = fields.flag("use_sliding_window")
    window = fields.number("sliding_window", default=4096) if slides else None
    most = fields.number("max_window_layers", default=28, least=0)
    types = fields.layer_types(count, SPARSE_AND_FULL) or tuple(
        SPARSE_AND_FULL[0] if slides and not at % 2 and at < most else SPARSE_AND_FULL[1]
        for at in range(count)
    )
    biases = QKV if fields.flag("qkv_bias", True) else NONE
    mlps = qwen_mlps(fields, count, shared=True)
    return shape(
        fields,
        "qwen2_moe",
        [
            Layer(attention(fields, biases=biases, window=_window(kind, window)), mlp, norms)
            for kind, mlp in zip(types, mlps, strict=True)
        ],
    )


def _window(kind: str, window: int | None) -> int | None:
    return window if kind == "sliding_attention" else None


def qwen3_moe(fields: Fields) -> Shape:
    count, norms = fields.layers(), 2 * fields.number("hidden_size")
    slides = fields.flag("use_sliding_window")
    window = fields.number("sliding_window", default=4096) if slides else None
    biases = QKVO if fields.flag("attention_bias") else NONE
    mixer = attention(fields, biases=biases, norm="head", window=window)
    mlps = qwen_mlps(fields, count, shared=False)
    return shape(fields, "qwen3_moe", [Layer(mixer, mlp, norms) for mlp in mlps])


def gpt_oss(fields: Fields) -> Shape:
    """Every other layer slides; experts, router and attention have biases."""
    count = fields.layers()
    types = fields.layer_types(count, SPARSE_AND_FULL) or tuple(
        SPARSE_AND_FULL[at % 2] for at in range(count)
    )
    biases = QKVO if fields.flag("attention_bias", True) else NONE
    window = fields.number("sliding_window", default=128)
    moe = Moe(
        fields.number("num_local_experts", "num_experts"),
        fields.number("num_experts_per_tok", "experts_per_token"),
        fields.number("intermediate_size"),
        expert_bias=True,
        router_bias=True,
    )
    head = fields.number("head_dim", default=64)
    mixers = [
        attention(fields, biases=biases, head=head, sinks=True, window=_window(kind, window))
        for kind in types
    ]
    norms = 2 * fields.number("hidden_size")
    return shape(fields, "gpt_oss", [Layer(mixer, moe, norms) for mixer in mixers])


def deepseek(fields: Fields, family: str, *, mlp_bias: bool) -> Shape:
    """Latent attention; the first layers are dense."""
    if fields.number("moe_layer_freq", default=1) != 1:
        raise UsageError(
            f"{fields.source}: moe_layer_freq other than 1 is not known in {family}: no model of "
            f"this family has it"
        )
    bias = fields.flag("mlp_bias") and mlp_bias
    width = fields.number("moe_intermediate_size")
    shared = fields.number("n_shared_experts", default=0, least=0)
    moe = Moe(
        fields.number("n_routed_experts", "num_experts", "num_local_experts"),
        fields.number("num_experts_per_tok", "num_experts_per_token"),
        width,
        shared=Mlp(width * shared, bias=bias) if shared else None,
    )
    mixer = LatentAttention(
        heads=fields.number("num_attention_heads"),
        q_rank=fields.maybe("q_lora_rank"),
        kv_rank=fields.number("kv_lora_rank"),
        nope=fields.number("qk_nope_head_dim"),
        rope=fields.number("qk_rope_head_dim"),
        value=fields.number("v_head_dim"),
        bias=fields.flag("attention_bias"),
    )
    dense = Mlp(fields.number("intermediate_size"), bias=bias)
    first = fields.number("first_k_dense_replace", default=0, least=0)
    norms = 2 * fields.number("hidden_size")
    count = fields.layers()
    layers = [Layer(mixer, dense if at < first else moe, norms) for at in range(count)]
    return shape(fields, family, layers)


def deepseek_v2(fields: Fields) -> Shape:
    return deepseek(fields, "deepseek_v2", mlp_bias=True)


def deepseek_v3(fields: Fields) -> Shape:
    return deepseek(fields, "deepseek_v3", mlp_bias=False)


def llama4(fields: Fields) -> Shape:
    """Three of four layers attend to chunks; experts in every layer or every other."""
    count = fields.layers()
    step = fields.number("interleave_moe_layer_step", default=1)
    listed = fields.numbers("moe_layers")
    sparse = set(range(step - 1, count, step) if listed is None else listed)
    chunk = fields.maybe("attention_chunk_size")
    types = fields.layer_types(count, ("chunked_attention", "full_attention"))
    interval = fields.number("no_rope_layer_interval", default=4)
    ropes = fields.numbers("no_rope_layers") or tuple(
        int((at + 1) % interval != 0) for at in range(count)
    )
    if len(ropes) != count:
        raise UsageError(f"{fields.source}: no_rope_layers has {len(ropes)} of {count} layers")
    chunked = [kind == "chunked_attention" for kind in types] if types else [*map(bool, ropes)]
    width = fields.number("intermediate_size")
    moe = Moe(
        fields.number("num_local_experts"),
        fields.number("num_experts_per_tok"),
        width,
        shared=Mlp(width),
    )
    dense = Mlp(fields.number("intermediate_size_mlp"))
    biases = QKVO if fields.flag("attention_bias") else NONE
    norms = 2 * fields.number("hidden_size")
    layers = [
        Layer(
            attention(fields, biases=biases, window=chunk if chunked[at] else None),
            moe if at in sparse else dense,
            norms,
        )
        for at in range(count)
    ]
    return shape(fields, "llama4_text", layers)
