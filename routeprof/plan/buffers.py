"""What a forward pass needs for a moment: activations and the buffers of all-to-all."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from routeprof.errors import UsageError
from routeprof.plan.model import Model
from routeprof.plan.precision import FORMATS
from routeprof.plan.shape import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    Mamba,
    Mamba2,
    Mixer,
    Mlp,
    Moe,
)
from routeprof.whatif.layout import Layout

LOGIT_BYTES = 4
NAN = float("nan")


@dataclass(frozen=True)
class Pass:
    """One forward pass of every replica.

    Attributes:
        tokens: of one replica.
        batch: sequences of one replica, whose logits are wanted.
        item: bytes of an activation.
        dispatch, combine: bytes of a number on the way to the experts and back.
        fullest: for each MoE layer, load of the fullest expert-parallel rank ÷ the mean rank's.
    """

    tokens: int
    batch: int
    item: float = 2.0
    dispatch: float = 2.0
    combine: float = 2.0
    fullest: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UsageError(f"{self.tokens} tokens make no forward pass: pass 1 or more")


@dataclass(frozen=True)
class Buffers:
    """Bytes on the fullest GPU; NaN where they are not known.

    Attributes:
        activations: the most that lives at one time, of the layer that needs the most.
        dispatch, combine: rows on the way to the experts and on the way back.
    """

    activations: float
    dispatch: float
    combine: float


def buffers(model: Model, layout: Layout, step: Pass) -> Buffers:
    """Buffers of one forward pass.

    Each tensor is taken to be freed once it was read, with no room for a kernel's workspace or for
    what an allocator cannot use: the least that a pass can do with.
    """
    dispatch, combine = _exchanged(model, layout, step)
    return Buffers(_activations(model, layout, step), dispatch, combine)


def rows_on_fullest(moe: Moe, layout: Layout, step: Pass, fullest: float = 1.0) -> int:
    """Assignments that the fullest rank gets in one MoE layer.

    Args:
        fullest: load of the fullest rank ÷ that of the mean rank.

    No more than each token to each expert that the rank holds, and no more than there are.
    """
    tokens = step.tokens * layout.dp
    wanted = ceil(tokens * moe.top_k * min(fullest, layout.ep) / layout.ep)
    return min(wanted, tokens * min(moe.top_k, -(-moe.experts // layout.ep)))


def _exchanged(model: Model, layout: Layout, step: Pass) -> tuple[float, float]:
    """Bytes to and from the experts.

    With expert parallelism, rows for each assignment that the fullest rank gets. Without, where
    replicas share experts that are cut up, every token of all replicas. A single replica's GPUs
    hold all tokens already.
    """
    if layout.is_replicated or not model.moes:
        return 0.0, 0.0
    most = 0
    for at, (_, moe) in enumerate(model.moes):
        rows = step.tokens * layout.dp
        if layout.ep > 1:
            rows = rows_on_fullest(moe, layout, step, _fullest(step, at))
        most = max(most, rows * moe.inputs(model.hidden))
    return most * step.dispatch, most * step.combine


def _fullest(step: Pass, at: int) -> float:
    return step.fullest[at] if step.fullest else 1.0


def _activations(model: Model, layout: Layout, step: Pass) -> float:
    """Residual and input of a layer, with the wider of its mixer and its MLP; or the logits."""
    if model.shape is None:
        return NAN
    routed, wide = 0, 0
    for layer in model.shape.layers:
        for mixer in layer.mixers:
            wide = max(wide, step.tokens * _mixer_width(mixer, model.hidden, layout.tp))
        for mlp in (layer.mlp, layer.block.mlp if layer.block else None):
            if isinstance(mlp, Moe):
                rows = rows_on_fullest(mlp, layout, step, _fullest(step, routed))
                wide = max(wide, _moe_numbers(mlp, model.hidden, layout, step, rows))
                routed += 1
            elif mlp:
                wide = max(wide, step.tokens * _mlp_width(mlp, model.hidden, layout.tp))
    layers = (2 * step.tokens * model.hidden + wide) * step.item
    logits = step.batch * -(-model.vocab // layout.tp) * LOGIT_BYTES
    return max(layers, logits + 2 * step.tokens * model.hidden * step.item)


def _mlp_width(mlp: Mlp, hidden: int, tp: int) -> int:
    """Numbers of each token: first matrices, their product, and the output."""
    return (3 if mlp.gated else 2) * -(-mlp.width // tp) + hidden


def _moe_numbers(moe: Moe, hidden: int, layout: Layout, step: Pass, rows: int) -> int:
    """Input, inner and output rows of the fullest rank, the logits, and the shared expert's."""
    inner = (3 if moe.gated else 2) * -(-moe.width // layout.etp)
    shared = step.tokens * _mlp_width(moe.shared, hidden, layout.tp) if moe.shared else 0
    return rows * (2 * moe.inputs(hidden) + inner) + step.tokens * moe.experts + shared


def _mixer_width(mixer: Mixer, hidden: int, tp: int) -> int:
    """Numbers of each token: what the first projection makes, what mixes, and the output."""
    if isinstance(mixer, Attention):
        queries = -(-mixer.heads // tp) * mixer.head
        keys = -(-mixer.kv_heads // tp) * mixer.head
        return queries * (3 if mixer.gated else 2) + 2 * keys + hidden
    if isinstance(mixer, LatentAttention):
        heads = -(-mixer.heads // tp)
        latents = (mixer.q_rank or 0) + mixer.kv_rank + mixer.rope
        # Queries; keys and values unfolded from the latent, as prefill has them; the output.
        unfolded = heads * (mixer.nope + mixer.value)
        return latents + heads * (mixer.nope + mixer.rope + mixer.value) + unfolded + hidden
    if isinstance(mixer, Mamba):
        inner = -(-mixer.inner // tp)
        return 4 * inner + mixer.dt_rank + 2 * mixer.state + hidden
    if isinstance(mixer, Mamba2):
        inner = -(-mixer.heads // tp) * mixer.head
        return 4 * inner + 4 * -(-mixer.groups // tp) * mixer.state + hidden
    if isinstance(mixer, GatedDeltaNet):
        keys = -(-mixer.key_heads * mixer.key // tp)
        return 4 * keys + 4 * -(-mixer.value_heads * mixer.value // tp) + hidden
    return 5 * -(-mixer.heads // tp) * mixer.head + hidden


def item_bytes(dtype: str) -> float:
    """Bytes of a number in a data type."""
    return FORMATS[dtype].bytes
