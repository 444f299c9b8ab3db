"""What a model is made of, layer by layer, as far as memory is concerned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormOf = Literal["", "head", "all"]


@dataclass(frozen=True)
class Attention:
    """Softmax attention with keys and values of its own: MHA, GQA or MQA.

    Attributes:
        heads, kv_heads: of queries, and of keys and values.
        head: numbers of a head.
        inputs: width of what it reads; the model's own if None (Zamba2 reads two at once).
        gated: the query projection makes a gate for the output, too (Qwen3-Next).
        biases: of "qkv" and of "o".
        norm: RMS norms of queries and keys, over a "head" or over "all" of them at once.
        sinks: one learned number for each head (gpt-oss).
        window: tokens that a query sees; None for all.
        adapter: rank of low-rank additions to q, k and v, each as wide as ``inputs``.
    """

    heads: int
    kv_heads: int
    head: int
    inputs: int | None = None
    gated: bool = False
    biases: frozenset[str] = frozenset()
    norm: NormOf = ""
    sinks: bool = False
    window: int | None = None
    adapters: int = 0
    adapter_rank: int = 0


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): keys and values are stored as one latent.

    Attributes:
        q_rank: of the query's latent; None where queries are projected at once.
        kv_rank: of the latent of keys and values.
        nope, rope, value: numbers of a head without and with position, and of its value.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    bias: bool = False


@dataclass(frozen=True)
class Mamba:
    """The first Mamba's selective state space, with Jamba's norms of dt, B and C.

    Attributes:
        inner: channels.
        state: numbers of each channel's state.
        conv: steps that the convolution looks back, this one included.
        dt_rank: of the step size's projection.
    """

    inner: int
    state: int
    conv: int
    dt_rank: int
    conv_bias: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Mamba2:
    """Mamba2: heads that share B and C in groups."""

    heads: int
    head: int
    groups: int
    state: int
    conv: int
    conv_bias: bool = True
    bias: bool = False

    @property
    def inner(self) -> int:
        return self.heads * self.head


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta rule (Qwen3-Next): one matrix of keys × values for each value head."""

    key_heads: int
    value_heads: int
    key: int
    value: int
    conv: int


@dataclass(frozen=True)
class LightningAttention:
    """Linear attention with fixed decay (MiniMax): one square matrix for each head."""

    heads: int
    head: int


Mixer = Attention | LatentAttention | Mamba | Mamba2 | GatedDeltaNet | LightningAttention
STATEFUL = (Mamba, Mamba2, GatedDeltaNet, LightningAttention)


@dataclass(frozen=True)
class Mlp:
    """A dense feed-forward network.

    Attributes:
        gated: three matrices instead of two.
        adapters, adapter_rank: low-rank additions to the first matrices, and their rank.
    """

    width: int
    gated: bool = True
    bias: bool = False
    adapters: int = 0
    adapter_rank: int = 0


@dataclass(frozen=True)
class Moe:
    """A mixture of experts.

    Attributes:
        width: inner width of a routed expert.
        shared: the expert that sees every token; as wide as all of them, where there are several.
        shared_gate: the model learns how much of the shared expert each token gets.
        expert_bias, router_bias: whether they have biases.
        latent: width that tokens are projected to before they are sent to the experts, if any.
    """

    experts: int
    top_k: int
    width: int
    gated: bool = True
    shared: Mlp | None = None
    shared_gate: bool = False
    expert_bias: bool = False
    router_bias: bool = False
    latent: int | None = None
    latent_bias: bool = False

    def inputs(self, hidden: int) -> int:
        """Width of what is sent to an expert."""
        return self.latent or hidden


@dataclass(frozen=True)
class SharedBlock:
    """An attention and MLP that several layers use (Zamba2): weights once, a cache for each.

    Attributes:
        owns: whether this layer is the one that its weights are counted at.
        norms: numbers of its norms.
    """

    attention: Attention
    mlp: Mlp
    norms: int
    owns: bool


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        mixer: what mixes tokens, if the layer does.
        mlp: what follows it, if anything does.
        norms: numbers of its norms.
        linear: numbers of matrices besides.
    """

    mixer: Mixer | None
    mlp: Mlp | Moe | None
    norms: int
    linear: int = 0
    block: SharedBlock | None = None

    @property
    def moe(self) -> Moe | None:
        return self.mlp if isinstance(self.mlp, Moe) else None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """All that keep something of the past, with the shared block's."""
        shared = (self.block.attention,) if self.block else ()
        return ((self.mixer,) if self.mixer else ()) + shared


@dataclass(frozen=True)
class Shape:
    """A language model.

    Attributes:
        family: transformers' model type.
        hidden: width of a token.
        vocab: rows of the embedding.
        tied: the output matrix is the embedding.
        notes: parts of the checkpoint that the shape leaves out.
    """

    family: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[Layer, ...]
    notes: tuple[str, ...] = ()

    @property
    def moes(self) -> tuple[tuple[int, Moe], ...]:
        """Index and experts of each MoE layer."""
        return tuple((at, layer.moe) for at, layer in enumerate(self.layers) if layer.moe)
