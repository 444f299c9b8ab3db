"""The fewest numbers that each part of a layer holds at one time, besides the residual.

Counted operation by operation: each holds what it reads and what it makes, and nothing else but
what is read later. Matrices that read the same are one product (queries, keys and values; gate and
up), which is freed as a whole. What keeps its shape is written in place. Attention makes no matrix
of scores, and experts are computed all at once, as grouped products.
"""

from __future__ import annotations

from dataclasses import dataclass

from routeprof.plan.shape import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    Mlp,
    Moe,
)


@dataclass(frozen=True)
class Routed:
    """Where the experts of one layer stand, and what reaches them.

    Attributes:
        tokens: of the replica.
        rows: assignments that the fullest GPU computes.
        tp, etp: GPUs that share the shared expert, and each routed expert.
        sent: rows come from other replicas, into buffers of their own.
    """

    tokens: int
    rows: int
    tp: int
    etp: int
    sent: bool


def mixer_numbers(mixer: Mixer, hidden: int, tp: int) -> int:
    """Numbers of each token that a mixer holds on one of ``tp`` GPUs."""
    if isinstance(mixer, Attention):
        return _attention(mixer, hidden, tp)
    if isinstance(mixer, LatentAttention):
        return _latent(mixer, hidden, tp)
    if isinstance(mixer, Mamba):
        return _mamba(mixer, hidden, tp)
    if isinstance(mixer, Mamba2):
        return _mamba2(mixer, hidden, tp)
    if isinstance(mixer, GatedDeltaNet):
        return _delta_net(mixer, hidden, tp)
    return _lightning(mixer, hidden, tp)


def _attention(mixer: Attention, hidden: int, tp: int) -> int:
    out = -(-mixer.heads // tp) * mixer.head
    keys = -(-mixer.kv_heads // tp) * mixer.head
    first = out * (2 if mixer.gated else 1) + 2 * keys
    return max((mixer.inputs or hidden) + first, first + out, out + hidden)


def _latent(mixer: LatentAttention, hidden: int, tp: int) -> int:
    """Keys and values are unfolded from the latent, as prefill has them; values stay a view."""
    heads = -(-mixer.heads // tp)
    queries = keys = heads * (mixer.nope + mixer.rope)
    unfolded, out = heads * (mixer.nope + mixer.value), heads * mixer.value
    latent = mixer.kv_rank + mixer.rope
    return max(
        hidden + (mixer.q_rank or queries) + latent,
        (mixer.q_rank or 0) + latent + queries,
        queries + latent + unfolded,
        queries + unfolded + keys + max(mixer.rope, out),
        out + hidden,
    )


def _mamba(mixer: Mamba, hidden: int, tp: int) -> int:
    """The scan writes over the gate, as vLLM's does."""
    inner = -(-mixer.inner // tp)
    scan = 2 * inner + inner + (mixer.dt_rank + 2 * mixer.state) + inner
    return max(hidden + 2 * inner, scan)


def _mamba2(mixer: Mamba2, hidden: int, tp: int) -> int:
    heads = -(-mixer.heads // tp)
    inner = heads * mixer.head
    mixed = inner + 2 * -(-mixer.groups // tp) * mixer.state
    first = inner + mixed + heads
    return max(hidden + first, first + mixed + inner, inner + hidden)


def _delta_net(mixer: GatedDeltaNet, hidden: int, tp: int) -> int:
    keys = -(-mixer.key_heads // tp) * mixer.key
    heads = -(-mixer.value_heads // tp)
    values = heads * mixer.value
    mixed = 2 * keys + values
    first = mixed + values + 2 * heads
    return max(hidden + first, first + mixed + values, values + hidden)


def _lightning(mixer: LightningAttention, hidden: int, tp: int) -> int:
    """The gate is of what attention read, which is kept until then."""
    inner = -(-mixer.heads // tp) * mixer.head
    return hidden + 3 * inner + inner


def mlp_numbers(mlp: Mlp, hidden: int, tp: int) -> int:
    """Numbers of each token that a dense MLP holds on one of ``tp`` GPUs."""
    inner = -(-mlp.width // tp)
    return max(hidden + _first(mlp, inner), _product(mlp, inner))


def moe_numbers(moe: Moe, hidden: int, at: Routed) -> int:
    """Numbers of all tokens that a MoE layer holds on the fullest GPU.

    Of a shared expert's two places, before and after the routed ones, the better: what it reads is
    kept until it computes, and what it made after that.
    """
    tokens, wide = at.tokens, moe.inputs(hidden)
    reads = 0 if at.sent else tokens * wide
    logits = tokens * (hidden + moe.experts)
    if moe.shared is None:
        return max(logits, _experts(moe, hidden, at, reads))
    own, alone = tokens * hidden, tokens * mlp_numbers(moe.shared, hidden, at.tp)
    if at.sent:
        return max(logits, own + _experts(moe, hidden, at, 0), alone)
    after = max(_experts(moe, hidden, at, reads if moe.latent else 0), alone)
    before = max(tokens * _after_first(moe.shared, hidden, at.tp), _experts(moe, hidden, at, reads))
    return max(logits, own + min(before, after))


def _experts(moe: Moe, hidden: int, at: Routed, reads: int) -> int:
    """Experts pick their rows out of what they read, or out of the buffer that the rows came in."""
    inner, wide = -(-moe.width // at.etp), moe.inputs(hidden)
    return max(
        at.tokens * (hidden + wide) if moe.latent else 0,
        reads + at.rows * _first(moe, inner),
        at.rows * _product(moe, inner),
        at.rows * (inner + wide),
        at.rows * wide + (0 if at.sent else at.tokens * wide),
    )


def _after_first(mlp: Mlp, hidden: int, tp: int) -> int:
    inner = -(-mlp.width // tp)
    return max(_product(mlp, inner), inner + hidden)


def _first(mlp: Mlp | Moe, inner: int) -> int:
    """What the first matrices make of a row."""
    return inner * (2 if mlp.gated else 1)


def _product(mlp: Mlp | Moe, inner: int) -> int:
    """Gate and up with their product, which is half as wide; an activation alone is in place."""
    return inner * (3 if mlp.gated else 1)
