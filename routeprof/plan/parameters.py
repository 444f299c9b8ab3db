"""Every weight of a model, by part, and into how many pieces tensor parallelism can cut it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from routeprof.plan.shape import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    Mlp,
    Moe,
    Shape,
)

Part = Literal["attention", "state", "shared_experts", "routed_experts", "embeddings", "other"]
PARTS: tuple[Part, ...] = (
    "attention",
    "state",
    "shared_experts",
    "routed_experts",
    "embeddings",
    "other",
)


@dataclass(frozen=True)
class Weight:
    """Numbers of one part that are cut alike.

    Attributes:
        part: attention, state (Mamba and linear attention), shared_experts, routed_experts (of all
            experts), embeddings (with the output matrix) or other (dense MLPs, routers, norms).
        numbers: how many.
        ways: pieces that it can be cut into at most; 1 is held whole by each GPU of a replica.
        matrix: whether a smaller data type would apply: not to norms, biases, routers.
        layer: index of the layer, -1 outside of any.
        experts, top_k: of routed experts, how many there are and how many a token takes; 0 else.
    """

    part: Part
    numbers: int
    ways: int = 1
    matrix: bool = True
    layer: int = -1
    experts: int = 0
    top_k: int = 0

    def on_gpu(self, tp: int) -> int:
        """Numbers that one of ``tp`` GPUs holds, the fullest of them.

        >>> Weight("attention", 80, ways=8).on_gpu(16)
        10
        """
        return self.numbers * -(-self.ways // tp) // self.ways


def weights(shape: Shape) -> tuple[Weight, ...]:
    """Every parameter of the model; their sum is what transformers instantiates.

    Router correction biases, which are buffers, and layers for multi-token prediction are not
    among them.
    """
    found = [Weight("embeddings", shape.vocab * shape.hidden, shape.vocab)]
    if not shape.tied:
        found.append(found[0])
    found.append(_small(shape.hidden))
    for at, layer in enumerate(shape.layers):
        found += [replace(weight, layer=at) for weight in _layer(layer, shape.hidden)]
    return tuple(weight for weight in found if weight.numbers)


def total(found: Iterable[Weight]) -> int:
    """All numbers together."""
    return sum(weight.numbers for weight in found)


def active(found: Iterable[Weight]) -> int:
    """Numbers that one token meets: of routed experts, its own only; all embeddings count."""
    return sum(
        weight.numbers // weight.experts * weight.top_k if weight.experts else weight.numbers
        for weight in found
    )


def by_part(found: Iterable[Weight]) -> dict[Part, int]:
    """Numbers of each part."""
    sums = dict.fromkeys(PARTS, 0)
    for weight in found:
        sums[weight.part] += weight.numbers
    return sums


def _small(numbers: int, part: Part = "other", ways: int = 1) -> Weight:
    return Weight(part, numbers, ways, matrix=False)


def _layer(layer: Layer, hidden: int) -> Iterator[Weight]:
    yield _small(layer.norms)
    yield Weight("other", layer.linear)
    if layer.mixer:
        yield from mixer_weights(layer.mixer, hidden)
    if isinstance(layer.mlp, Moe):
        yield from _moe(layer.mlp, hidden)
    elif layer.mlp:
        yield from _mlp(layer.mlp, hidden, "other")
    if layer.block and layer.block.owns:
        yield _small(layer.block.norms)
        yield from mixer_weights(layer.block.attention, hidden)
        yield from _mlp(layer.block.mlp, hidden, "other")


def mixer_weights(mixer: Mixer, hidden: int) -> Iterator[Weight]:
    """Weights of what mixes tokens in a layer."""
    if isinstance(mixer, Attention):
        return _attention(mixer, hidden)
    if isinstance(mixer, LatentAttention):
        return _latent(mixer, hidden)
    if isinstance(mixer, Mamba):
        return _mamba(mixer, hidden)
    if isinstance(mixer, Mamba2):
        return _mamba2(mixer, hidden)
    if isinstance(mixer, GatedDeltaNet):
        return _delta(mixer, hidden)
    return _lightning(mixer, hidden)


def _attention(mixer: Attention, hidden: int) -> Iterator[Weight]:
    """Queries and output by heads; keys and values by their own heads, copied where too few."""
    inputs = mixer.inputs or hidden
    queries = mixer.heads * mixer.head * (2 if mixer.gated else 1)
    keys = mixer.kv_heads * mixer.head
    yield Weight("attention", queries * inputs, mixer.heads)
    yield Weight("attention", 2 * keys * inputs, mixer.kv_heads)
    yield Weight("attention", mixer.heads * mixer.head * hidden, mixer.heads)
    if "qkv" in mixer.biases:
        yield _small(queries, "attention", mixer.heads)
        yield _small(2 * keys, "attention", mixer.kv_heads)
    if "o" in mixer.biases:
        yield _small(hidden, "attention")
    if mixer.norm == "head":
        yield _small(2 * mixer.head, "attention")
    elif mixer.norm == "all":
        yield _small(mixer.heads * mixer.head, "attention", mixer.heads)
        yield _small(keys, "attention", mixer.kv_heads)
    if mixer.sinks:
        yield _small(mixer.heads, "attention", mixer.heads)
    # Of q, k and v, down to the rank and up again.
    yield Weight("attention", mixer.adapters * 3 * 2 * inputs * mixer.adapter_rank)


def _latent(mixer: LatentAttention, hidden: int) -> Iterator[Weight]:
    """What makes the latents is whole on each GPU; what unfolds them is cut by heads."""
    heads, head = mixer.heads, mixer.nope + mixer.rope
    if mixer.q_rank is None:
        yield Weight("attention", hidden * heads * head, heads)
    else:
        yield Weight("attention", hidden * mixer.q_rank)
        yield Weight("attention", mixer.q_rank * heads * head, heads)
        yield _small(mixer.q_rank * (2 if mixer.bias else 1), "attention")
    latent = mixer.kv_rank + mixer.rope
    yield Weight("attention", hidden * latent)
    yield _small(mixer.kv_rank + (latent if mixer.bias else 0), "attention")
    yield Weight("attention", mixer.kv_rank * heads * (mixer.nope + mixer.value), heads)
    yield Weight("attention", heads * mixer.value * hidden, heads)
    if mixer.bias:
        yield _small(hidden, "attention")


def _mamba(mixer: Mamba, hidden: int) -> Iterator[Weight]:
    """By channels; norms of dt, B and C are whole."""
    inner, state, rank = mixer.inner, mixer.state, mixer.dt_rank
    yield Weight("state", 3 * hidden * inner, inner)
    yield Weight("state", inner * (2 * state + rank), inner)
    yield Weight("state", rank * inner, inner)
    # A and D, the convolution, and the bias of dt.
    yield _small(inner * (state + 1 + mixer.conv + 1), "state", inner)
    yield _small(inner * mixer.conv_bias + 2 * inner * mixer.bias, "state", inner)
    yield _small(rank + 2 * state + hidden * mixer.bias, "state")


def _mamba2(mixer: Mamba2, hidden: int) -> Iterator[Weight]:
    """By heads; B and C by their groups, copied where GPUs are more."""
    heads, inner, shared = mixer.heads, mixer.inner, 2 * mixer.groups * mixer.state
    yield Weight("state", hidden * (2 * inner + heads), heads)
    yield Weight("state", hidden * shared, mixer.groups)
    yield Weight("state", inner * hidden, heads)
    convolution = mixer.conv + mixer.conv_bias
    yield _small(inner * convolution, "state", heads)
    yield _small(shared * convolution, "state", mixer.groups)
    # A, D and the bias of dt; the norm of the output.
    yield _small(3 * heads + inner, "state", heads)
    if mixer.bias:
        yield _small(2 * inner + heads, "state", heads)
        yield _small(shared, "state", mixer.groups)
        yield _small(hidden, "state")


def _delta(mixer: GatedDeltaNet, hidden: int) -> Iterator[Weight]:
    """By key heads, of which each has as many value heads."""
    keys, values = mixer.key_heads * mixer.key, mixer.value_heads * mixer.value
    yield Weight("state", hidden * (2 * keys + 2 * values + 2 * mixer.value_heads), mixer.key_heads)
    yield Weight("state", values * hidden, mixer.key_heads)
    yield _small((2 * keys + values) * mixer.conv, "state", mixer.key_heads)
    yield _small(2 * mixer.value_heads, "state", mixer.key_heads)
    yield _small(mixer.value, "state")


def _lightning(mixer: LightningAttention, hidden: int) -> Iterator[Weight]:
    """Queries, keys, values, gate and output by heads."""
    inner = mixer.heads * mixer.head
    yield Weight("state", 5 * inner * hidden, mixer.heads)
    yield _small(inner, "state", mixer.heads)


def _mlp(mlp: Mlp, hidden: int, part: Part) -> Iterator[Weight]:
    """By the inner width."""
    first = 2 if mlp.gated else 1
    yield Weight(part, (first + 1) * hidden * mlp.width, mlp.width)
    if mlp.bias:
        yield _small(first * mlp.width, part, mlp.width)
        yield _small(hidden, part)
    yield Weight(part, mlp.adapters * mlp.adapter_rank * (hidden + first * mlp.width))


def _moe(moe: Moe, hidden: int) -> Iterator[Weight]:
    """Routers are whole on each GPU; experts go by expert and then by their inner width."""
    inputs, first = moe.inputs(hidden), 2 if moe.gated else 1
    routed = Weight("routed_experts", 0, moe.width, experts=moe.experts, top_k=moe.top_k)
    yield replace(routed, numbers=moe.experts * (first + 1) * inputs * moe.width)
    if moe.expert_bias:
        biases = moe.experts * (first * moe.width + inputs)
        yield replace(routed, numbers=biases, ways=1, matrix=False)
    yield _small(moe.experts * (hidden + moe.router_bias))
    if moe.shared:
        yield from _mlp(moe.shared, hidden, "shared_experts")
        yield _small(hidden * moe.shared_gate, "shared_experts")
    if moe.latent:
        yield Weight("other", 2 * hidden * moe.latent)
        yield _small((hidden + moe.latent) * moe.latent_bias)
