"""What each layer keeps of the tokens that it has seen: keys and values, or a fixed state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from routeprof.plan.precision import CACHE_FORMATS, Precision
from routeprof.plan.shape import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    Mamba,
    Mamba2,
    Mixer,
    Shape,
)

Kind = Literal["kv", "plain", "recurrent"]


@dataclass(frozen=True)
class Kept:
    """Numbers that a layer keeps of one sequence.

    Attributes:
        kind: kv grows with the sequence. The others do not: recurrent is a state that is summed up
            in FP32, plain is kept as it is computed (convolutions, lightning attention).
        numbers: of each token for kv, of the sequence else.
        ways: pieces that tensor parallelism can cut them into at most.
        window: tokens that are kept at most; None for all.
        layer: index of the layer.
    """

    kind: Kind
    numbers: int
    ways: int
    window: int | None = None
    layer: int = -1

    def on_gpu(self, length: int, tp: int = 1) -> int:
        """Numbers that the fullest of ``tp`` GPUs keeps of a sequence of ``length`` tokens.

        A sliding window keeps the token that is being made and those before it that it sees.

        >>> Kept("kv", 2 * 4 * 128, ways=4, window=100).on_gpu(8192, tp=8) // 100
        256
        """
        tokens = 1
        if self.kind == "kv":
            tokens = length if self.window is None else min(length, self.window)
        return self.numbers * tokens * -(-self.ways // tp) // self.ways


def kept(shape: Shape) -> tuple[Kept, ...]:
    """Everything that the model keeps of a sequence."""
    return tuple(
        Kept(one.kind, one.numbers, one.ways, one.window, at)
        for at, layer in enumerate(shape.layers)
        for mixer in layer.mixers
        for one in _of_mixer(mixer)
        if one.numbers
    )


def _of_mixer(mixer: Mixer) -> Iterator[Kept]:
    if isinstance(mixer, Attention):
        yield Kept("kv", 2 * mixer.kv_heads * mixer.head, mixer.kv_heads, mixer.window)
    elif isinstance(mixer, LatentAttention):
        # One latent for all heads, and the rotated part of the key that they share.
        yield Kept("kv", mixer.kv_rank + mixer.rope, 1)
    elif isinstance(mixer, Mamba):
        yield Kept("plain", mixer.inner * mixer.conv, mixer.inner)
        yield Kept("recurrent", mixer.inner * mixer.state, mixer.inner)
    elif isinstance(mixer, Mamba2):
        yield Kept("plain", mixer.inner * mixer.conv, mixer.heads)
        yield Kept("plain", 2 * mixer.groups * mixer.state * mixer.conv, mixer.groups)
        yield Kept("recurrent", mixer.inner * mixer.state, mixer.heads)
    elif isinstance(mixer, GatedDeltaNet):
        keys, values = mixer.key_heads * mixer.key, mixer.value_heads * mixer.value
        yield Kept("plain", (2 * keys + values) * mixer.conv, mixer.key_heads)
        yield Kept("recurrent", values * mixer.key, mixer.key_heads)
    else:
        yield Kept("plain", mixer.heads * mixer.head * mixer.head, mixer.heads)


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of sequences of one length.

    Attributes:
        kv: keys and values, or their latents.
        state: fixed state, convolutions included.
    """

    kv: float
    state: float

    @property
    def total(self) -> float:
        return self.kv + self.state


def cache_bytes(
    found: Iterable[Kept], length: int, precision: Precision, *, batch: int = 1, tp: int = 1
) -> CacheBytes:
    """Bytes that the fullest of a replica's GPUs keeps.

    Args:
        length: tokens of each sequence.
        batch: sequences of the replica.
        tp: GPUs of the replica.
    """
    sums = {"kv": 0.0, "state": 0.0}
    for one in found:
        dtype = _dtype(one.kind, precision)
        numbers = one.on_gpu(length, tp)
        sums["kv" if one.kind == "kv" else "state"] += numbers * CACHE_FORMATS[dtype].bytes
    return CacheBytes(kv=batch * sums["kv"], state=batch * sums["state"])


def _dtype(kind: Kind, precision: Precision) -> str:
    if kind == "kv":
        return precision.cache
    return precision.state if kind == "recurrent" else precision.small
