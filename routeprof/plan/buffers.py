"""What a forward pass needs for a moment: activations and the buffers of all-to-all."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isnan

from routeprof.errors import UsageError
from routeprof.plan.activations import Routed, mixer_numbers, mlp_numbers, moe_numbers
from routeprof.plan.model import Model
from routeprof.plan.precision import FORMATS
from routeprof.plan.shape import Moe, Shape
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
        ceiling: that activations do not exceed.
        dispatch, combine: rows on the way to the experts and on the way back.
    """

    activations: float
    ceiling: float
    dispatch: float
    combine: float


def buffers(model: Model, layout: Layout, step: Pass) -> Buffers:
    """Buffers of one forward pass.

    Activations are the least that a pass can do with: see ``routeprof.plan.activations``, with no
    room for a kernel's workspace or for what an allocator cannot use. Of a family that is not known
    they are what transformers allocates, where every GPU does all that a replica alone would do.
    """
    dispatch, combine = _exchanged(model, layout, step)
    if model.shape is not None:
        least = _least(model, model.shape, layout, step)
        return Buffers(least, least, dispatch, combine)
    ceiling = _allocated(model, layout, step)
    # Where experts are cut and attention is not, other replicas' rows have made it unknown.
    return Buffers(NAN if layout.tp > 1 else ceiling, ceiling, dispatch, combine)


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


def _allocated(model: Model, layout: Layout, step: Pass) -> float:
    """What transformers allocates where nothing is cut: a GPU with parts of it holds no more.

    NaN where that does not follow, since a GPU gets rows of other replicas, too.
    """
    for at, (_, moe) in enumerate(model.moes):
        rows = rows_on_fullest(moe, layout, step, _fullest(step, at))
        if rows > step.tokens * moe.top_k:
            return NAN
    if not model.config:
        return NAN
    from routeprof.plan.allocated import allocated_bytes

    layers = allocated_bytes(model.config, step.tokens, step.item)
    return layers if isnan(layers) else max(layers, _logits(model, 1, step))


def _least(model: Model, shape: Shape, layout: Layout, step: Pass) -> float:
    """The residual with the layer's part that holds the most; or what makes the logits.

    Zamba2 reads the embeddings again in every shared block: they stay.
    """
    routed, wide = 0, 0
    for layer in shape.layers:
        for mixer in layer.mixers:
            wide = max(wide, step.tokens * mixer_numbers(mixer, model.hidden, layout.tp))
        for mlp in (layer.mlp, layer.block.mlp if layer.block else None):
            if isinstance(mlp, Moe):
                wide = max(wide, moe_numbers(mlp, model.hidden, _routed(mlp, layout, step, routed)))
                routed += 1
            elif mlp:
                wide = max(wide, step.tokens * mlp_numbers(mlp, model.hidden, layout.tp))
    stays = 2 if any(layer.block for layer in shape.layers) else 1
    layers = (stays * step.tokens * model.hidden + wide) * step.item
    return max(layers, _logits(model, layout.tp, step))


def _logits(model: Model, tp: int, step: Pass) -> float:
    """The last hidden states, and each sequence's logits in FP32."""
    logits = step.batch * -(-model.vocab // tp) * LOGIT_BYTES
    return step.tokens * model.hidden * step.item + logits


def _routed(moe: Moe, layout: Layout, step: Pass, at: int) -> Routed:
    rows = rows_on_fullest(moe, layout, step, _fullest(step, at))
    return Routed(step.tokens, rows, layout.tp, layout.etp, sent=not layout.is_replicated)


def item_bytes(dtype: str) -> float:
    """Bytes of a number in a data type."""
    return FORMATS[dtype].bytes
