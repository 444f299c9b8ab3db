"""How many bytes a number takes in each data type, with the scales that it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from routeprof.errors import UsageError
from routeprof.plan.parameters import Part, Weight


@dataclass(frozen=True)
class Format:
    """A data type of weights.

    Attributes:
        bits: of a number.
        group: numbers that share a scale; 0 without scales.
        scale_bits: of a scale, with its zero point where the format has one.
        means: in words.
    """

    bits: int
    group: int = 0
    scale_bits: int = 0
    means: str = ""

    @property
    def bytes(self) -> float:
        """Bytes of a number, its part of the scale included."""
        return (self.bits + (self.scale_bits / self.group if self.group else 0)) / 8


FORMATS = {
    "fp32": Format(32, means="32-bit floating point"),
    "bf16": Format(16, means="bfloat16"),
    "fp16": Format(16, means="16-bit floating point"),
    "fp8": Format(8, 128 * 128, 32, "E4M3, an FP32 scale for each block of 128 x 128"),
    "int8": Format(8, 128, 16, "a 16-bit scale for each 128 numbers"),
    "int4": Format(4, 128, 16 + 4, "a 16-bit scale and a 4-bit zero point for each 128 numbers"),
    "mxfp4": Format(4, 32, 8, "E2M1, an E8M0 scale for each 32 numbers"),
    "nvfp4": Format(4, 16, 8, "E2M1, an E4M3 scale for each 16 numbers"),
}
# Scales of a cache are one a tensor or a head, which is nothing beside it, except for int4.
CACHE_FORMATS = {
    "fp32": FORMATS["fp32"],
    "bf16": FORMATS["bf16"],
    "fp16": FORMATS["fp16"],
    "fp8": Format(8, means="scales of whole tensors"),
    "int8": Format(8, means="scales of whole tensors"),
    "int4": Format(4, 64, 32, "a 16-bit scale and a 16-bit zero point for each 64 numbers"),
}
SIXTEEN = ("bf16", "fp16", "fp32")


def named(name: str, option: str, formats: dict[str, Format] = FORMATS) -> str:
    """The name in lower case.

    Raises:
        UsageError: a data type that is none.
    """
    if name.lower() not in formats:
        raise UsageError(f"{option} {name!r} is not one of {', '.join(formats)}")
    return name.lower()


@dataclass(frozen=True)
class Precision:
    """Data type of each part.

    Attributes:
        weights: of matrices that nothing below names.
        attention, routed_experts, embeddings: of those; as ``weights`` if empty, except that
            embeddings stay in 16 bits.
        small: of norms, biases, routers, convolutions, embeddings and activations.
        cache: of keys and values.
        state: of recurrent states, which transformers and most engines keep in FP32.
        hot: of the ``hot_experts`` share of each layer's routed experts that get the most tokens.
    """

    weights: str = "bf16"
    attention: str = ""
    routed_experts: str = ""
    embeddings: str = ""
    small: str = "bf16"
    cache: str = "bf16"
    state: str = "fp32"
    hot: str = ""
    hot_experts: float = 0.0

    def of(self, weight: Weight) -> str:
        """Data type of a weight, as far as it is not a hot expert's."""
        if not weight.matrix:
            return self.small
        named_parts: dict[Part, str] = {
            "attention": self.attention,
            "routed_experts": self.routed_experts,
            "embeddings": self.embeddings or self.small,
        }
        return named_parts.get(weight.part) or self.weights

    def bytes(self, weight: Weight, numbers: int) -> float:
        """Bytes of so many of a weight's numbers."""
        return numbers * FORMATS[self.of(weight)].bytes


def precision(
    weights: str = "bf16",
    *,
    attention: str | None = None,
    experts: str | None = None,
    embeddings: str | None = None,
    cache: str | None = None,
    state: str = "fp32",
    hot: str | None = None,
    hot_experts: float = 0.0,
) -> Precision:
    """Data types as they are named on the command line.

    Raises:
        UsageError: a name that is none, or a share that is not between 0 and 1.
    """
    main = named(weights, "dtype")
    small = main if main in SIXTEEN else "bf16"
    if not 0 <= hot_experts <= 1:
        raise UsageError(f"hot-experts is {hot_experts:g}: pass a share from 0 to 1")
    made = Precision(
        weights=main,
        small=small,
        cache=named(cache or small, "kv-dtype", CACHE_FORMATS),
        state=named(state, "state-dtype", CACHE_FORMATS),
        hot_experts=hot_experts if hot else 0.0,
    )
    return replace(
        made,
        attention=named(attention, "attention-dtype") if attention else "",
        routed_experts=named(experts, "expert-dtype") if experts else "",
        embeddings=named(embeddings, "embedding-dtype") if embeddings else "",
        hot=named(hot, "hot-dtype") if hot else "",
    )


def hot_count(experts: int, share: float) -> int:
    """Experts of a layer that a share of them is, rounded up."""
    return min(experts, ceil(experts * share - 1e-9))
